// Tokens: the files, the proofs, and what a connection may do before and after one.
#include "pool-manager/login.h"

#include <sys/stat.h>

#include <fstream>

#include "catch.h"
#include "fake_server.h"
#include "pool-manager/convert.h"
#include "pool-manager/rpc.h"
#include "pool-manager/service.h"
#include "schema/administration.capnp.h"
#include "schema/manager_login.h"
#include "schema/protocol.h"
#include "schema/token_proof.h"
#include "support.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

const std::string kAlice(32, 'a'), kBob(32, 'b'), kServers(32, 's');

std::string write(const Folder& folder, const std::string& text, mode_t mode = 0600) {
  const std::string path = folder.path + "/tokens";
  ::unlink(path.c_str());
  std::ofstream(path) << text;
  ::chmod(path.c_str(), mode);
  return path;
}

std::string refusal(const std::function<void()>& action) {
  KJ_IF_MAYBE (error, kj::runCatchingExceptions([&]() { action(); })) {
    const std::string text = schema::loginRefusal(*error);
    return text.empty() ? errorText(*error) : text;
  }
  return "";
}

// A service on TCP that demands tokens, and a server that joined with its own.
struct Fixture {
  explicit Fixture(size_t connections = 512, kj::Duration login = 60 * kj::SECONDS)
      : io(kj::setupAsyncIo()), store(makeMemoryStore()) {
    ServiceLimits limits;
    limits.tick = 10 * kj::MILLISECONDS;
    limits.login = login;
    limits.connections = connections;
    service = kj::heap<Service>(io.provider->getTimer(), *store, PoolTimes{}, limits, bootTimeMs);
    service->demandTokens([this]() -> const Tokens& { return tokens; });
    listen();
    housekeeping = service->run();
    server = kj::heap<FakeServer>(io, "a", 1, folder.path + "/server");
    server->credentials = {kServersTenant, kServers};
    server->join(address);
    server->joined().wait(io.waitScope);
  }
  void listen() {
    auto parsed = io.provider->getNetwork().parseAddress("127.0.0.1:0").wait(io.waitScope);
    auto listener = parsed->listen();
    address = "127.0.0.1:" + std::to_string(listener->getPort());
    service->serve(kj::mv(listener), false);
  }
  kj::Own<ManagerConnection> connect(const std::string& tenant, const std::string& token) {
    return connectManager(*io.provider, address, 2 * kj::SECONDS, [&] { return Credentials{tenant, token}; })
        .wait(io.waitScope);
  }
  // A connection that has not logged in.
  kj::Own<ManagerConnection> bare() {
    auto parsed = io.provider->getNetwork().parseAddress(address.c_str()).wait(io.waitScope);
    return kj::heap<ManagerConnection>(parsed->connect().wait(io.waitScope));
  }
  Lease lease(ManagerConnection& connection, const LeaseRequest& wish) {
    auto request = connection.manager().leaseRequest();
    pool::write(wish, request.initRequest());
    return read(request.send().wait(io.waitScope).getLease());
  }
  template <class Request>
  void send(Request&& request, const Id& id) {
    pool::write(id, request.initId());
    request.send().wait(io.waitScope);
  }
  // Looks until it is so, for as long as a busy machine may take.
  bool eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 200; ++i, pause(50))
      if (condition()) return true;
    return false;
  }
  void pause(unsigned ms) { io.provider->getTimer().afterDelay(ms * kj::MILLISECONDS).wait(io.waitScope); }

  Tokens tokens{{"alice", kAlice}, {"bob", kBob}, {kServersTenant, kServers}};
  Folder folder;
  kj::AsyncIoContext io;
  std::unique_ptr<Store> store;
  std::string address;
  kj::Own<Service> service;
  kj::Promise<void> housekeeping = nullptr;
  kj::Own<FakeServer> server;
};

// Who has not logged in is sent away soon.
struct Hurried : Fixture {
  Hurried() : Fixture(512, 1 * kj::SECONDS) {}
};

// Of a file only; it outlives the book.
TokenBook bookOf(const Tokens& file) {
  TokenBook book([](auto&&...) {}, [] { return uint64_t{0}; });
  book.useFile([kept = &file]() -> const Tokens& { return *kept; });
  return book;
}

LeaseRequest wish(const std::string& tenant = "") {
  LeaseRequest request;
  request.id = Id::random();
  request.tenant = tenant;
  return request;
}

// Lets everybody in, and cannot prove anything.
class Impostor final : public schema::Manager::Server {
 protected:
  kj::Promise<void> login(LoginContext context) override {
    context.getResults().setNeeded(true);
    context.getResults().setProtocol(protocol);
    context.getResults().initServerNonce(nonceBytes);
    return kj::READY_NOW;
  }
  kj::Promise<void> prove(ProveContext context) override {
    context.getResults().initProof(32);
    return kj::READY_NOW;
  }

 public:
  unsigned nonceBytes = schema::kNonceBytes;
  uint32_t protocol = schema::poolProtocol();
};

}  // namespace

TEST_CASE("token files") {
  Folder folder;
  const auto tokens = readTokens(write(folder, "# all\n\n alice : " + kAlice + " \r\nbob:" + kBob));
  CHECK(tokens == Tokens{{"alice", kAlice}, {"bob", kBob}});
  const auto complaint = [&](const std::string& text, mode_t mode = 0600) {
    return thrown([&] { readTokens(write(folder, text, mode)); });
  };
  CHECK(contains(complaint("alice: " + kAlice, 0640), "chmod 600"));
  CHECK(contains(complaint("alice: short"), "line 1: a token is a word of at least 16"));
  CHECK(contains(complaint("alice: " + kAlice + " b"), "line 1: a token is a word"));
  CHECK(contains(complaint("\nalice"), "line 2: is not of the form"));
  CHECK(contains(complaint(": " + kAlice), "a tenant's name"));
  CHECK(contains(complaint(std::string(65, 'x') + ": " + kAlice), "a tenant's name"));
  CHECK(contains(complaint("a: " + kAlice + "\na: " + kBob), "has a token already"));
  CHECK(contains(complaint("# nobody\n"), "holds no token"));
  CHECK(contains(complaint(std::string((1 << 20) + 1, '#')), "larger than 1 MiB"));
  CHECK(contains(thrown([&] { readTokens(folder.path); }), "is not a file"));
  CHECK(contains(thrown([&] { readTokens("/nowhere/tokens"); }), "No such file"));
}

TEST_CASE("whose token is shown") {
  Folder folder;
  CHECK(readCredentials("", "alice").token.empty());
  const std::string one = write(folder, "alice: " + kAlice);
  CHECK(readCredentials(one, "").tenant == "alice");
  CHECK(readCredentials(one, "alice").token == kAlice);
  CHECK(contains(thrown([&] { readCredentials(one, "bob"); }), "no token of tenant 'bob'"));
  const std::string two = write(folder, "alice: " + kAlice + "\nbob: " + kBob);
  CHECK(readCredentials(two, "bob").token == kBob);
  CHECK(contains(thrown([&] { readCredentials(two, ""); }), "choose a tenant"));
}

TEST_CASE("a proof is good once, and on its own connection") {
  const Tokens file = {{"alice", kAlice}};
  TokenBook tokens = bookOf(file);
  FailureLimit failures(100, std::chrono::milliseconds(1000));
  const std::vector<std::byte> nonce(schema::kNonceBytes);
  const auto proof = [&](Login& login, const std::string& token, const std::string& tenant = "alice") {
    const auto challenge = login.begin(tenant, nonce);
    return schema::clientProof(token, {tenant, nonce, challenge});
  };
  Login right(tokens, failures, "peer", nullptr), wrong = right, other = right, role = right, unknown = right,
                                                  shortProof = right;
  const Digest good = proof(right, kAlice);
  other.begin("alice", nonce);
  CHECK(contains(refusal([&] { other.prove(good); }), "refuses the token of tenant 'alice'"));
  right.prove(good);
  CHECK(right.proven());
  CHECK(contains(refusal([&] { right.prove(good); }), "without a login before it"));
  CHECK(contains(refusal([&] { wrong.prove(proof(wrong, kBob)); }), "refuses the token"));
  CHECK_FALSE(wrong.proven());
  CHECK(contains(refusal([&] { wrong.prove(good); }),
                 "without a login before it"));  // a new challenge for every guess
  // What the manager would answer is no client's proof.
  const auto challenge = role.begin("alice", nonce);
  const auto reflected = schema::managerProof(schema::verifierOf(kAlice), {"alice", nonce, challenge});
  CHECK(contains(refusal([&] { role.prove(reflected); }), "refuses the token"));
  CHECK(contains(refusal([&] { unknown.prove(proof(unknown, kAlice, "carol")); }), "tenant 'carol'"));
  const Digest whole = proof(shortProof, kAlice);
  CHECK(contains(refusal([&] { shortProof.prove(std::span(whole).first(31)); }), "refuses the token"));
  CHECK(contains(refusal([&] { other.begin(std::string(65, 'x'), nonce); }), "malformed login request"));
  CHECK(contains(refusal([&] { other.begin("alice", std::span(nonce).first(31)); }),
                 "malformed login request"));
}

TEST_CASE("guessing is slowed down, by peer") {
  const Tokens file = {{"alice", kAlice}};
  TokenBook tokens = bookOf(file);
  FailureLimit failures(3, std::chrono::hours(1));
  const std::vector<std::byte> nonce(schema::kNonceBytes);
  const Digest guess{};
  Login begunBefore(tokens, failures, "10.0.0.7", nullptr);
  begunBefore.begin("alice", nonce);
  for (int i = 0; i < 3; ++i) {
    Login login(tokens, failures, "10.0.0.7", nullptr);
    login.begin("alice", nonce);
    CHECK(contains(refusal([&] { login.prove(guess); }), "refuses the token"));
  }
  Login fourth(tokens, failures, "10.0.0.7", nullptr), elsewhere(tokens, failures, "10.0.0.8", nullptr);
  CHECK(contains(refusal([&] { fourth.begin("alice", nonce); }), "too many wrong tokens from 10.0.0.7"));
  CHECK(contains(refusal([&] { begunBefore.prove(guess); }), "too many wrong tokens"));
  CHECK(refusal([&] { elsewhere.begin("alice", nonce); }).empty());
}

TEST_CASE_METHOD(Hurried, "before the proof a connection gets refusals only, and not for long") {
  auto connection = bare();
  auto manager = connection->manager();
  const auto wants = [&](const std::function<void()>& call) {
    return contains(refusal(call), "requires a token before anything else");
  };
  CHECK(wants([&] { manager.leasesRequest().send().wait(io.waitScope); }));
  CHECK(wants([&] { manager.devicesRequest().send().wait(io.waitScope); }));
  CHECK(wants([&] { manager.serversRequest().send().wait(io.waitScope); }));
  CHECK(wants([&] { lease(*connection, wish()); }));
  CHECK(wants([&] { send(manager.renewRequest(), Id::random()); }));
  CHECK(wants([&] { send(manager.releaseRequest(), Id::random()); }));
  CHECK(wants([&] { manager.joinRequest().send().wait(io.waitScope); }));
  CHECK(wants([&] { manager.beatRequest().send().wait(io.waitScope); }));
  CHECK(wants([&] { manager.leaveRequest().send().wait(io.waitScope); }));
  CHECK(contains(refusal([&] { manager.proveRequest().send().wait(io.waitScope); }),
                 "without a login before it"));
  CHECK(contains(refusal([&] { connect("", ""); }), "requires a token: name the file"));
  // The connection ends: "disconnected", or "reset" where a request was on its way.
  const auto ended = [&] {
    const std::string said = refusal([&] { manager.leasesRequest().send().wait(io.waitScope); });
    return contains(said, "disconnected") || contains(said, "reset by peer") || contains(said, "Broken pipe");
  };
  CHECK(eventually(ended));
  auto proven = connect("alice", kAlice);
  pause(1200);
  proven->manager().leasesRequest().send().wait(io.waitScope);  // a proven one stays
}

TEST_CASE_METHOD(Fixture, "a peer has so many unproven connections and no more") {
  std::vector<kj::Own<ManagerConnection>> idle;
  idle.reserve(64);
  for (int i = 0; i < 64; ++i) idle.push_back(bare());
  CHECK(eventually([&] { return !refusal([&] { connect("alice", kAlice); }).empty(); }));
  idle.clear();
  CHECK(eventually([&] { return refusal([&] { connect("alice", kAlice); }).empty(); }));
}

TEST_CASE("no host takes more connections than its share, proven or not") {
  Fixture fixture(3);  // one is the server's
  auto first = fixture.connect("alice", kAlice), second = fixture.connect("bob", kBob);
  CHECK_FALSE(refusal([&] { fixture.connect("alice", kAlice); }).empty());
  first = nullptr;
  CHECK(
      fixture.eventually([&] { return refusal([&] { first = fixture.connect("alice", kAlice); }).empty(); }));
  first->manager().leasesRequest().send().wait(fixture.io.waitScope);
}

TEST_CASE("peers are counted apart") {
  PeerCount count("connections", 2);
  auto first = count.take("10.0.0.7"), second = count.take("10.0.0.7"), other = count.take("10.0.0.8");
  CHECK((first && second && other));
  CHECK_FALSE(count.take("10.0.0.7"));
  first.reset();
  CHECK(count.take("10.0.0.7"));
}

TEST_CASE_METHOD(Fixture, "a tenant's leases are its own") {
  auto alice = connect("alice", kAlice), again = connect("alice", kAlice), bob = connect("bob", kBob);
  const auto request = wish("bob");  // whatever it claims
  const Lease held = lease(*alice, request);
  CHECK(held.tenant == "alice");
  const auto others = [&](const std::function<void()>& call) {
    return refusal(call) == "that lease is another tenant's";
  };
  CHECK(others([&] { lease(*bob, request); }));  // the same request again would give its key
  CHECK(others([&] { send(bob->manager().renewRequest(), held.id); }));
  CHECK(others([&] { send(bob->manager().releaseRequest(), held.id); }));
  CHECK(service->pool().leases().size() == 1);

  auto waiting = wish();
  waiting.waitMs = 60'000;
  auto asked = alice->manager().leaseRequest();
  pool::write(waiting, asked.initRequest());
  auto granted = asked.send().eagerlyEvaluate(nullptr);
  pause(20);
  CHECK(others([&] { lease(*bob, waiting); }));
  CHECK(others([&] { send(bob->manager().releaseRequest(), waiting.id); }));
  send(again->manager().renewRequest(), held.id);
  send(again->manager().releaseRequest(), held.id);
  CHECK(read(granted.wait(io.waitScope).getLease()).id == waiting.id);
}

TEST_CASE_METHOD(Fixture, "servers join, users lease, neither does the other's") {
  auto alice = connect("alice", kAlice), node = connect(kServersTenant, kServers);
  CHECK(contains(refusal([&] { alice->manager().joinRequest().send().wait(io.waitScope); }),
                 "cannot be used by servers"));
  CHECK(contains(refusal([&] { alice->manager().beatRequest().send().wait(io.waitScope); }),
                 "cannot be used by servers"));
  CHECK(contains(refusal([&] { lease(*node, wish()); }), "cannot lease"));
}

TEST_CASE_METHOD(Fixture, "callers of another version are told so, also where no token is wanted") {
  const auto asks = [this](uint32_t protocol, uint32_t oldest, uint32_t common = 0) {
    auto connection = bare();
    auto request = connection->manager().loginRequest();
    request.setProtocol(protocol);
    request.setOldest(oldest);
    uint32_t answered = 0;
    const std::string said = refusal([&] { answered = request.send().wait(io.waitScope).getProtocol(); });
    CHECK(answered == common);
    return said;
  };
  const uint32_t latest = schema::poolProtocol(), oldest = schema::oldestPoolProtocol();
  const std::string ours = std::to_string(oldest) + " to " + std::to_string(latest);
  const std::string newer = "version mismatch: the pool's manager speaks pool protocol " + ours +
                            ", its caller speaks 1007; upgrade the pool's manager first";
  CHECK(asks(1007, 0) == newer);
  service->demandTokens(nullptr);
  CHECK(asks(1007, 0) == newer);
  CHECK(asks(1007, 1007) == newer);
  CHECK(asks(1007, 1008) == newer);  // nonsense
  CHECK(asks(oldest - 1, 0) == "version mismatch: the pool's manager speaks pool protocol " + ours +
                                   ", its caller speaks " + std::to_string(oldest - 1) +
                                   "; upgrade its caller first");
  CHECK(asks(latest, oldest, latest) == "");
  CHECK(asks(latest + 1, latest, latest) == "");
  CHECK(asks(1007, oldest, latest) == "");
  CHECK(asks(oldest, 0, oldest) == "");  // of before ranges: it takes its own number alone for an answer
  CHECK(asks(oldest, oldest - 1, oldest) == "");
}

TEST_CASE("a token file is read again when it has changed") {
  Folder folder;
  const std::string path = write(folder, "alice: " + kAlice);
  TokenFile file(path);
  const auto source = credentialsOf(path, "");
  const Tokens& tokens = file.current();
  CHECK(tokens.size() == 1);
  CHECK(source().token == kAlice);
  write(folder, "alice: " + kBob + "\nbob: " + kBob);
  CHECK(&file.current() == &tokens);
  CHECK(tokens == Tokens{{"alice", kBob}, {"bob", kBob}});
  CHECK(source().token == kBob);  // still alice's, who was chosen
  write(folder, "alice\n");       // what cannot be used changes nothing
  CHECK(file.current().size() == 2);
  CHECK(contains(thrown([&] { source(); }), "line 1"));
  std::filesystem::remove(path);
  CHECK(file.current().size() == 2);
  write(folder, "eve: " + kAlice);
  CHECK(file.current() == Tokens{{"eve", kAlice}});
}

TEST_CASE("whoever cannot prove the token is no manager") {
  auto io = kj::setupAsyncIo();
  auto impostor = kj::heap<Impostor>();
  Impostor& settings = *impostor;
  schema::Manager::Client manager(kj::mv(impostor));
  const auto refused = [&] {
    return refusal([&] {
      const schema::ManagerLink link{kj::Own<kj::AsyncIoStream>(), "head:4780", {"alice", kAlice}, {}};
      schema::logIn(manager, link).wait(io.waitScope);
    });
  };
  CHECK(contains(refused(), "whoever answers at head:4780 does not know the token of tenant 'alice'"));
  settings.nonceBytes = 5;
  CHECK(contains(refused(), "malformed challenge"));
  settings.protocol = 0;
  CHECK(contains(refused(), "the pool's manager speaks pool protocol 0, its caller speaks " +
                                std::to_string(schema::oldestPoolProtocol()) + " to " +
                                std::to_string(schema::poolProtocol()) +
                                "; upgrade the pool's manager first"));
}

namespace {

// A service whose store has tokens, and an operator's connection.
struct Made : Fixture {
  Made() {
    service->demandTokens(nullptr);
    // The server has joined by the token file: it is let in still.
    admin = connect("operator", make({"operator", "first", Role::admin}));
  }
  std::string make(const TokenWish& wish) {
    std::optional<MadeToken> made;
    service->tokens().create(wish, "test", [&](const MadeToken& token, const std::string& why) {
      CHECK(why == "");
      made = token;
    });
    REQUIRE(eventually([&] { return made.has_value(); }));
    ids[wish.tenant + "/" + wish.name] = made->token.id;
    return made->text;
  }
  schema::Administration::Client administration(ManagerConnection& connection) {
    return connection.manager().administrationRequest().send().getAdministration();
  }
  void revoke(const std::string& name) {
    auto request = administration(*admin).revokeTokenRequest();
    request.setId(ids.at(name));
    request.send().wait(io.waitScope);
  }
  bool ended(ManagerConnection& connection) {
    bool over = false;
    auto watch = connection.onDisconnect().then([&] { over = true; }).eagerlyEvaluate(nullptr);
    return eventually([&] { return over; });
  }
  std::map<std::string, std::string> ids;
  kj::Own<ManagerConnection> admin;
};

}  // namespace

TEST_CASE_METHOD(Made,
                 "a revoked token's connections end; leases are the tenant's, and another token goes on") {
  const std::string first = make({"alice", "one"}), second = make({"alice", "two"});
  auto one = connect("alice", first), two = connect("alice", second);
  const Lease held = lease(*one, wish());
  auto asked = one->manager().leaseRequest();
  auto waiting = wish();
  waiting.waitMs = 600'000;
  pool::write(waiting, asked.initRequest());
  auto never = asked.send().ignoreResult().eagerlyEvaluate([](kj::Exception&&) {});
  CHECK(eventually([&] { return service->pool().waiting() == 1; }));

  revoke("alice/one");
  // At once, though the connection is there for some more milliseconds.
  const std::string said = refusal([&] { send(one->manager().renewRequest(), held.id); });
  CHECK((contains(said, "was revoked on") || contains(said, "disconnected")));
  CHECK(ended(*one));
  CHECK(eventually([&] { return service->pool().waiting() == 0; }));
  CHECK(contains(refusal([&] { connect("alice", first); }), "(one) was revoked on"));
  CHECK(service->pool().leases().contains(held.id));
  send(two->manager().renewRequest(), held.id);
  revoke("alice/one");

  // Who revokes its own token hears that it is done.
  revoke("operator/first");
  CHECK(ended(*admin));
  two->manager().leasesRequest().send().wait(io.waitScope);
}

TEST_CASE_METHOD(Made, "a token that expires ends its connections") {
  auto brief = connect("alice", make({"alice", "brief", Role::user, 2}));
  brief->manager().leasesRequest().send().wait(io.waitScope);
  CHECK(ended(*brief));
}

TEST_CASE_METHOD(Made, "each call takes its role") {
  auto viewer = connect("alice", make({"alice", "v", Role::viewer})),
       user = connect("alice", make({"alice", "u"})),
       scheduler = connect("slurm", make({"slurm", "s", Role::scheduler})),
       node = connect("servers", make({"servers", "n", Role::server}));
  const Lease held = lease(*user, wish());
  const auto refused = [&](kj::Own<ManagerConnection>& connection, const auto& call) {
    return contains(refusal([&] { call(connection->manager()); }), "the token of tenant '");
  };
  const auto look = [&](auto manager) {
    manager.leasesRequest().send().wait(io.waitScope);
    manager.devicesRequest().send().wait(io.waitScope);
    manager.auditRequest().send().wait(io.waitScope);
  };
  for (auto* who : {&viewer, &user, &scheduler, &node, &admin}) CHECK_FALSE(refused(*who, look));
  const auto renew = [&](auto manager) { send(manager.renewRequest(), held.id); };
  CHECK(refused(viewer, renew));
  CHECK(refused(node, renew));
  for (auto* who : {&user, &scheduler, &admin}) CHECK_FALSE(refused(*who, renew));
  const auto release = [&](auto manager) { send(manager.releaseRequest(), held.id); };
  CHECK(refused(viewer, release));
  CHECK(refused(node, release));
  const auto beat = [&](auto manager) { manager.beatRequest().send().wait(io.waitScope); };
  for (auto* who : {&viewer, &user, &scheduler}) CHECK(refused(*who, beat));
  const auto tokens = [&](auto manager) {
    manager.administrationRequest().send().getAdministration().tokensRequest().send().wait(io.waitScope);
  };
  const auto cordon = [&](auto manager) {
    auto request = manager.cordonRequest();
    request.setServer("a");
    request.send().wait(io.waitScope);
  };
  const auto quota = [&](auto manager) {
    auto request = manager.administrationRequest().send().getAdministration().setQuotaRequest();
    request.initQuota().setTenant("alice");
    request.send().wait(io.waitScope);
  };
  for (auto* who : {&viewer, &user, &scheduler, &node}) {
    CHECK(refused(*who, tokens));
    CHECK(refused(*who, cordon));
    CHECK(refused(*who, quota));
  }
  CHECK_FALSE(refused(admin, tokens));
  CHECK_FALSE(refused(admin, quota));

  // A scheduler leases in others' names, and sees and ends their leases; a user does neither.
  const auto seenBy = [&](kj::Own<ManagerConnection>& connection) {
    auto response = connection->manager().leasesRequest().send().wait(io.waitScope);
    return read(response.getLeases()[0]).holder;
  };
  auto bob = connect("bob", make({"bob", "u"}));
  CHECK(seenBy(bob) == "in use");
  CHECK(seenBy(node) == "in use");
  CHECK(seenBy(scheduler) != "in use");
  CHECK(seenBy(viewer) != "in use");
  CHECK_FALSE(refused(scheduler, release));
  CHECK(eventually([&] { return service->pool().leases().empty(); }));
  CHECK(lease(*scheduler, wish("bob")).tenant == "bob");
}

TEST_CASE_METHOD(Fixture,
                 "the first token is made at home, and closes the pool to those who have shown none") {
  service->demandTokens(nullptr);
  auto stranger = connect("", "");
  auto request = stranger->manager().administrationRequest().send().getAdministration().createTokenRequest();
  request.setTenant("mallory");
  request.setRole(schema::Role::OPERATOR);
  CHECK(contains(refusal([&] { request.send().wait(io.waitScope); }), "demands no tokens yet: its own user"));
  Principal own;
  auto home = service->managerFor(own);
  auto good = home.administrationRequest().send().getAdministration().createTokenRequest();
  good.setTenant("alice");
  good.setRole(schema::Role::USER);
  const auto answer = good.send().wait(io.waitScope);
  const std::string token = pool::text(answer.getSecret());
  bool over = false;
  auto watch = stranger->onDisconnect().then([&] { over = true; }).eagerlyEvaluate(nullptr);
  CHECK(eventually([&] { return over; }));
  CHECK(contains(refusal([&] { connect("", ""); }), "requires a token"));
  connect("alice", token)->manager().leasesRequest().send().wait(io.waitScope);
}
