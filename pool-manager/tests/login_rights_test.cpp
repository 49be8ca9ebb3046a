// What a connection may do once its token is proven, and its end with the token's.
#include <map>

#include "login_fixture.h"
#include "schema/administration.capnp.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

TEST_CASE_METHOD(LoginFixture, "a tenant's leases are its own") {
  auto alice = connect("alice", kAlicesToken), again = connect("alice", kAlicesToken),
       bob = connect("bob", kBobsToken);
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

TEST_CASE_METHOD(LoginFixture, "servers join, users lease, neither does the other's") {
  auto alice = connect("alice", kAlicesToken), node = connect(kServersTenant, kServers);
  CHECK(contains(refusal([&] { alice->manager().joinRequest().send().wait(io.waitScope); }),
                 "cannot be used by servers"));
  CHECK(contains(refusal([&] { alice->manager().beatRequest().send().wait(io.waitScope); }),
                 "cannot be used by servers"));
  CHECK(contains(refusal([&] { lease(*node, wish()); }), "cannot lease"));
}

namespace {

// A service whose store has tokens, and an operator's connection.
struct Made : LoginFixture {
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
  CHECK((contains(said, "was revoked on") || contains(said, "connection was closed")));
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

TEST_CASE_METHOD(LoginFixture,
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
