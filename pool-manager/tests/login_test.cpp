// Tokens: the files, the proofs, and what a connection may do before one.
#include "pool-manager/login.h"

#include <sys/stat.h>

#include <fstream>

#include "login_fixture.h"
#include "schema/protocol.h"
#include "schema/token_proof.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

std::string write(const Folder& folder, const std::string& text, mode_t mode = 0600) {
  const std::string path = folder.path + "/tokens";
  ::unlink(path.c_str());
  std::ofstream(path) << text;
  ::chmod(path.c_str(), mode);
  return path;
}

// Who has not logged in is sent away soon.
struct Hurried : LoginFixture {
  Hurried() : LoginFixture(512, 1 * kj::SECONDS) {}
};

// Of a file only; it outlives the book.
TokenBook bookOf(const Tokens& file) {
  TokenBook book([](auto&&...) {}, [] { return uint64_t{0}; });
  book.useFile([kept = &file]() -> const Tokens& { return *kept; });
  return book;
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
  const auto tokens =
      readTokens(write(folder, "# all\n\n alice : " + kAlicesToken + " \r\nbob:" + kBobsToken));
  CHECK(tokens == Tokens{{"alice", kAlicesToken}, {"bob", kBobsToken}});
  const auto complaint = [&](const std::string& text, mode_t mode = 0600) {
    return thrown([&] { readTokens(write(folder, text, mode)); });
  };
  CHECK(contains(complaint("alice: " + kAlicesToken, 0640), "chmod 600"));
  CHECK(contains(complaint("alice: short"), "line 1: a token is a word of at least 16"));
  CHECK(contains(complaint("alice: " + kAlicesToken + " b"), "line 1: a token is a word"));
  CHECK(contains(complaint("\nalice"), "line 2: is not of the form"));
  CHECK(contains(complaint(": " + kAlicesToken), "a tenant's name"));
  CHECK(contains(complaint(std::string(65, 'x') + ": " + kAlicesToken), "a tenant's name"));
  CHECK(contains(complaint("a: " + kAlicesToken + "\na: " + kBobsToken), "has a token already"));
  CHECK(contains(complaint("# nobody\n"), "holds no token"));
  CHECK(contains(complaint(std::string((1 << 20) + 1, '#')), "larger than 1 MiB"));
  CHECK(contains(thrown([&] { readTokens(folder.path); }), "is not a file"));
  CHECK(contains(thrown([&] { readTokens("/nowhere/tokens"); }), "No such file"));
}

TEST_CASE("whose token is shown") {
  Folder folder;
  CHECK(readCredentials("", "alice").token.empty());
  const std::string one = write(folder, "alice: " + kAlicesToken);
  CHECK(readCredentials(one, "").tenant == "alice");
  CHECK(readCredentials(one, "alice").token == kAlicesToken);
  CHECK(contains(thrown([&] { readCredentials(one, "bob"); }), "no token of tenant 'bob'"));
  const std::string two = write(folder, "alice: " + kAlicesToken + "\nbob: " + kBobsToken);
  CHECK(readCredentials(two, "bob").token == kBobsToken);
  CHECK(contains(thrown([&] { readCredentials(two, ""); }), "choose a tenant"));
}

TEST_CASE("a proof is good once, and on its own connection") {
  const Tokens file = {{"alice", kAlicesToken}};
  TokenBook tokens = bookOf(file);
  FailureLimit failures(100, std::chrono::milliseconds(1000));
  const std::vector<std::byte> nonce(schema::kNonceBytes);
  const auto proof = [&](Login& login, const std::string& token, const std::string& tenant = "alice") {
    const auto challenge = login.begin(tenant, nonce);
    return schema::clientProof(token, {tenant, nonce, challenge});
  };
  Login right(tokens, failures, "peer", nullptr), wrong = right, other = right, role = right, unknown = right,
                                                  shortProof = right;
  const Digest good = proof(right, kAlicesToken);
  other.begin("alice", nonce);
  CHECK(contains(refusal([&] { other.prove(good); }), "refuses the token of tenant 'alice'"));
  right.prove(good);
  CHECK(right.proven());
  CHECK(contains(refusal([&] { right.prove(good); }), "without a login before it"));
  CHECK(contains(refusal([&] { wrong.prove(proof(wrong, kBobsToken)); }), "refuses the token"));
  CHECK_FALSE(wrong.proven());
  CHECK(contains(refusal([&] { wrong.prove(good); }),
                 "without a login before it"));  // a new challenge for every guess
  // What the manager would answer is no client's proof.
  const auto challenge = role.begin("alice", nonce);
  const auto reflected = schema::managerProof(schema::verifierOf(kAlicesToken), {"alice", nonce, challenge});
  CHECK(contains(refusal([&] { role.prove(reflected); }), "refuses the token"));
  CHECK(contains(refusal([&] { unknown.prove(proof(unknown, kAlicesToken, "carol")); }), "tenant 'carol'"));
  const Digest whole = proof(shortProof, kAlicesToken);
  CHECK(contains(refusal([&] { shortProof.prove(std::span(whole).first(31)); }), "refuses the token"));
  CHECK(contains(refusal([&] { other.begin(std::string(65, 'x'), nonce); }), "malformed login request"));
  CHECK(contains(refusal([&] { other.begin("alice", std::span(nonce).first(31)); }),
                 "malformed login request"));
}

TEST_CASE("guessing is slowed down, by peer") {
  const Tokens file = {{"alice", kAlicesToken}};
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
  // The connection ends: "closed", or "reset" where a request was on its way.
  const auto ended = [&] {
    const std::string said = refusal([&] { manager.leasesRequest().send().wait(io.waitScope); });
    return contains(said, "connection was closed") || contains(said, "reset by peer") ||
           contains(said, "Broken pipe");
  };
  CHECK(eventually(ended));
  auto proven = connect("alice", kAlicesToken);
  pause(1200);
  proven->manager().leasesRequest().send().wait(io.waitScope);  // a proven one stays
}

TEST_CASE_METHOD(LoginFixture, "a peer has so many unproven connections and no more") {
  std::vector<kj::Own<ManagerConnection>> idle;
  idle.reserve(64);
  for (int i = 0; i < 64; ++i) idle.push_back(bare());
  CHECK(eventually([&] { return !refusal([&] { connect("alice", kAlicesToken); }).empty(); }));
  idle.clear();
  CHECK(eventually([&] { return refusal([&] { connect("alice", kAlicesToken); }).empty(); }));
}

TEST_CASE("no host takes more connections than its share, proven or not") {
  LoginFixture fixture(3);  // one is the server's
  auto first = fixture.connect("alice", kAlicesToken), second = fixture.connect("bob", kBobsToken);
  CHECK_FALSE(refusal([&] { fixture.connect("alice", kAlicesToken); }).empty());
  first = nullptr;
  CHECK(fixture.eventually(
      [&] { return refusal([&] { first = fixture.connect("alice", kAlicesToken); }).empty(); }));
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

TEST_CASE_METHOD(LoginFixture, "callers of another version are told so, also where no token is wanted") {
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
  const std::string path = write(folder, "alice: " + kAlicesToken);
  TokenFile file(path);
  const auto source = credentialsOf(path, "");
  const Tokens& tokens = file.current();
  CHECK(tokens.size() == 1);
  CHECK(source().token == kAlicesToken);
  write(folder, "alice: " + kBobsToken + "\nbob: " + kBobsToken);
  CHECK(&file.current() == &tokens);
  CHECK(tokens == Tokens{{"alice", kBobsToken}, {"bob", kBobsToken}});
  CHECK(source().token == kBobsToken);  // still alice's, who was chosen
  write(folder, "alice\n");             // what cannot be used changes nothing
  CHECK(file.current().size() == 2);
  CHECK(contains(thrown([&] { source(); }), "line 1"));
  std::filesystem::remove(path);
  CHECK(file.current().size() == 2);
  write(folder, "eve: " + kAlicesToken);
  CHECK(file.current() == Tokens{{"eve", kAlicesToken}});
}

TEST_CASE("whoever cannot prove the token is no manager") {
  auto io = kj::setupAsyncIo();
  auto impostor = kj::heap<Impostor>();
  Impostor& settings = *impostor;
  schema::Manager::Client manager(kj::mv(impostor));
  const auto refused = [&] {
    return refusal([&] {
      const schema::ManagerLink link{kj::Own<kj::AsyncIoStream>(), "head:4780", {"alice", kAlicesToken}, {}};
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
