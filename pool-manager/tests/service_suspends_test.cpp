// Suspending, resuming and moving through the manager's RPC, and cordons.
#include "service_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

kj::Promise<SuspendResult> suspend(ManagerConnection& connection, const Id& id, uint32_t drainMs = 1000) {
  auto request = connection.manager().suspendRequest();
  write(id, request.initId());
  request.setDrainMs(drainMs);
  return request.send().then([](auto&& response) { return read(response.getResult()); });
}

kj::Promise<void> resume(ManagerConnection& connection, const Id& id, uint32_t waitMs = 0) {
  auto request = connection.manager().resumeRequest();
  write(id, request.initId());
  request.setWaitMs(waitMs);
  return request.send().ignoreResult();
}

kj::Promise<MigrateResult> migrate(ManagerConnection& connection, const Id& id, uint32_t drainMs = 1000,
                                   const MoveTarget& to = {}) {
  auto request = connection.manager().migrateRequest();
  write(id, request.initId());
  request.setDrainMs(drainMs);
  write(to, request.initTo());
  return request.send().then([](auto&& response) { return read(response.getResult()); });
}

kj::Promise<std::string> places(ManagerConnection& connection, const Id& id) {
  auto request = connection.manager().placesRequest();
  write(id, request.initId());
  return request.send().then([](auto&& response) {
    std::string names;
    for (auto server : response.getServers()) names += (names.empty() ? "" : " ") + text(server.getName());
    return names;
  });
}

kj::Promise<void> cordon(ManagerConnection& connection, const char* server, bool cordoned) {
  auto request = connection.manager().cordonRequest();
  request.setServer(server);
  request.setCordoned(cordoned);
  request.setReason("a fan");
  request.setBy("eve@head");
  return request.send().ignoreResult();
}

// A server with one software GPU of 8 GiB, and a lease of the whole of it.
struct Suspends : ServiceFixture {
  Suspends() : server(io, "node", 1, folder.path + "/sessions"), holder(connect()) {
    server.join(address);
    await(server.joined());
    held = await(lease(*holder, wish()));
  }
  std::string state() {
    return await(holder->manager().leasesRequest().send().then([this](auto&& response) {
      for (auto one : response.getLeases())
        if (read(one.getId()) == held.id) return text(one.getState());
      return std::string("gone");
    }));
  }
  uint64_t freeBytes() {
    return await(holder->manager().devicesRequest().send().then(
        [](auto&& response) { return response.getDevices()[0].getFreeBytes(); }));
  }
  std::string refusal(kj::Promise<void>&& call) { return errorText(failure(*this, kj::mv(call))); }

  FakeServer server;
  kj::Own<ManagerConnection> holder;
  Lease held;
};

}  // namespace

TEST_CASE_METHOD(Suspends, "suspend and resume through the manager") {
  const SuspendResult result = await(suspend(*holder, held.id, 4'000'000'000));
  CHECK(result.kept == std::vector<uint64_t>{16 << 20});
  CHECK(result.movedBytes == uint64_t{3} << 30);
  CHECK(result.drainMs == 7);
  CHECK(result.moveMs == 9);
  CHECK(server.drains == std::vector<uint32_t>{3'600'000});  // an hour at most
  CHECK(state() == "suspended");
  CHECK(freeBytes() == (uint64_t{8} << 30) - (16 << 20));
  CHECK(await(suspend(*holder, held.id)).movedBytes == result.movedBytes);
  CHECK(server.drains.size() == 1);
  await(server.beatNow());
  CHECK(state() == "suspended");

  auto other = connect();
  LeaseRequest small = wish();
  small.memoryBytes = uint64_t{1} << 30;
  await(lease(*other, small));
  const kj::Exception busy = failure(*this, resume(*holder, held.id));
  CHECK(busy.getType() == kj::Exception::Type::OVERLOADED);
  CHECK(contains(errorText(busy),
                 "GPU 0 (Fake GPU) has 7.0 GiB free of the 8.0 GiB that are wanted: it is held by tester"));
  auto waiting = resume(*holder, held.id, 60'000);
  pause(50);
  CHECK(state() == "suspended");
  await(release(*other, small.id));
  await(kj::mv(waiting));
  CHECK(server.suspended.empty());
  CHECK(state() == "active");
  CHECK(freeBytes() == 0);
  await(resume(*holder, held.id));  // nothing to do
}

TEST_CASE_METHOD(Suspends, "who goes away while it waits to be resumed leaves the queue") {
  await(suspend(*holder, held.id));
  auto other = connect();
  LeaseRequest small = wish();
  small.memoryBytes = uint64_t{1} << 30;
  await(lease(*other, small));
  {
    auto gone = connect();
    auto waiting = resume(*gone, held.id, 60'000);
    pause(50);
  }
  pause(50);
  await(release(*other, small.id));
  pause(50);
  CHECK(state() == "suspended");
  small.id = Id::random();
  await(lease(*other, small));
}

TEST_CASE_METHOD(Suspends, "who asks again after somebody who has gone away waits anew") {
  await(suspend(*holder, held.id));
  LeaseRequest small = wish();
  small.memoryBytes = uint64_t{1} << 30;
  auto other = connect();
  await(lease(*other, small));
  for (int i = 0; i < 3; ++i) {
    {
      auto waiting = resume(*holder, held.id, 60'000);
      pause(1);
    }
    pause(1);  // no tick, in which it would leave the queue
    CHECK_FALSE(contains(refusal(resume(*holder, held.id)), "waits already"));
  }
}

TEST_CASE_METHOD(Suspends, "a server's refusals are told in its words") {
  const auto suspending = [&] { return refusal(suspend(*holder, held.id).ignoreResult()); };
  server.refuseSuspend = "GPU 0 was not idle within 1.0 s";
  CHECK(contains(suspending(), "server node: GPU 0 was not idle within 1.0 s"));
  server.refuseSuspend.clear();
  server.oldServer = true;
  CHECK(contains(suspending(), "server node: it cannot suspend leases (it runs another version of gpupool)"));
  CHECK(state() == "active");
  server.oldServer = false;
  await(suspend(*holder, held.id));
  server.refuseResume = "GPU 0 has 3.0 GiB free";
  CHECK(contains(refusal(resume(*holder, held.id)), "server node: GPU 0 has 3.0 GiB free"));
  CHECK(state() == "suspended");
  server.refuseResume.clear();
  await(resume(*holder, held.id));
  CHECK(contains(refusal(resume(*holder, Id::random())), "there is no lease"));
}

TEST_CASE_METHOD(Suspends, "a server that dies while it suspends: the caller is told, and the beat decides") {
  server.muteSuspend = true;
  auto caller = suspend(*holder, held.id);
  pause(50);
  server.disconnect();
  CHECK(contains(refusal(caller.ignoreResult()), "lost the connection to"));
  server.suspended[held.id] = {0};  // it went on
  server.join(address);
  await(server.joined());
  pause(50);
  CHECK(state() == "suspended");
  CHECK(freeBytes() == uint64_t{8} << 30);
}

TEST_CASE_METHOD(Suspends, "a server that stands still is not waited for, and may do it when it goes on") {
  server.muteSuspend = server.muteBeats = true;
  auto caller = suspend(*holder, held.id);
  for (int i = 0; i < 8; ++i) {
    pass(4000);
    await(renew(*holder, held.id));
  }
  CHECK(refusal(caller.ignoreResult()) ==
        "server node: it does not answer; it may carry the order out when it does");
  CHECK(state() == "active");
  server.muteBeats = false;
  server.suspended[held.id] = {0};
  pause(300);
  CHECK(state() == "suspended");
}

TEST_CASE_METHOD(Suspends, "a beat with an absurd list is refused before it is read") {
  auto request = holder->manager().beatRequest();
  request.setName("node");
  request.initSuspended(5000);
  CHECK(contains(refusal(request.send().ignoreResult()), "getSuspended"));
  auto one = holder->manager().beatRequest();
  one.initSuspended(1)[0].initKept(5000);
  CHECK(contains(refusal(one.send().ignoreResult()), "more devices than"));
  auto many = holder->manager().beatRequest();
  many.initTurns(5000);
  CHECK(contains(refusal(many.send().ignoreResult()), "getTurns"));
  auto hindered = holder->manager().beatRequest();
  hindered.initHindrances(5000);
  CHECK(contains(refusal(hindered.send().ignoreResult()), "getHindrances"));
  auto reasons = holder->manager().beatRequest();
  reasons.initHindrances(1)[0].initReasons(5000);
  CHECK(contains(refusal(reasons.send().ignoreResult()), "getReasons"));
}

TEST_CASE_METHOD(ServiceFixture, "terms reach the server, and its turns whoever lists the leases") {
  FakeServer server(io, "node", 1, folder.path + "/sessions");
  server.facts.overcommitPercent = 200;
  server.join(address);
  await(server.joined());
  auto holder = connect();
  LeaseRequest request = wish();
  request.turns = {30, Priority::high};
  const Lease held = await(lease(*holder, request));
  CHECK(held.server.overcommitPercent == 200);
  CHECK(server.leases.at(held.id).terms.sharePercent == 30);
  CHECK(server.leases.at(held.id).terms.priority == Priority::high);
  LeaseRequest other = wish();
  await(lease(*holder, other));  // the same GPU, whole, once more
  LeaseRequest third = wish();
  CHECK(contains(errorText(failure(*this, lease(*holder, third))), "is held by tester"));

  server.turns = {{held.id, TurnPlace::waiting, 1234, 5, "why", {0}}};
  await(server.beatNow());
  const auto listed = [&](const Id& id) {
    return await(holder->manager().leasesRequest().send().then([id](auto&& response) {
      for (auto one : response.getLeases())
        if (read(one.getId()) == id) return read(one);
      return Lease();
    }));
  };
  const Lease shown = listed(held.id);
  CHECK(shown.terms.sharePercent == 30);
  REQUIRE(shown.turn.has_value());
  CHECK(shown.turn->place == TurnPlace::waiting);
  CHECK(shown.turn->servedMs == 1234);
  CHECK(shown.turn->turns == 5);
  CHECK(shown.turn->note == "why");
  CHECK_FALSE(listed(other.id).turn.has_value());
  CHECK(listed(other.id).terms.priority == Priority::normal);
  CHECK(shown.hindrances.empty());
  server.hindrances = {{held.id, {"cannot be moved: why", "nor so"}}};
  await(server.beatNow());
  CHECK(listed(held.id).hindrances == std::vector<std::string>{"cannot be moved: why", "nor so"});
  CHECK(listed(other.id).hindrances.empty());
}

TEST_CASE_METHOD(Suspends, "sessions are moved through the manager") {
  const MigrateResult result = await(migrate(*holder, held.id, 4'000'000'000));
  CHECK(result.sessions == 2);
  CHECK(result.movedBytes == uint64_t{3} << 30);
  CHECK(result.longestPauseMs == 700);
  CHECK(server.migrations == std::vector<uint32_t>{3'600'000});  // an hour at most
  CHECK(state() == "active");
  const auto moving = [&] { return refusal(migrate(*holder, held.id).ignoreResult()); };
  server.refuseMigrate = "the session uses graphs of another process";
  CHECK(contains(moving(), "server node: the session uses graphs of another process"));
  server.refuseMigrate.clear();
  server.oldServer = true;
  CHECK(contains(moving(), "server node: it cannot move sessions (it runs another version of gpupool)"));
  server.oldServer = false;
  await(suspend(*holder, held.id));
  CHECK(contains(moving(), "has to be resumed first"));
  CHECK(contains(refusal(migrate(*holder, Id::random()).ignoreResult()), "there is no lease"));
  CHECK(server.migrations.size() == 2);
}

TEST_CASE_METHOD(Suspends, "sessions are written into files through the manager") {
  const auto write = [&](const Id& id, const std::string& folder) {
    auto request = holder->manager().checkpointRequest();
    pool::write(id, request.initId());
    request.setDrainMs(4'000'000'000);
    request.setFolder(folder);
    return request.send().then([](auto&& response) { return read(response.getResult()); });
  };
  const CheckpointResult result = await(write(held.id, "monday"));
  CHECK(result.sessions == 2);
  CHECK(result.bytes == uint64_t{3} << 30);
  CHECK(result.longestPauseMs == 700);
  CHECK(result.folder == "/srv/monday");
  CHECK(result.server == "node");
  CHECK(server.drains == std::vector<uint32_t>{3'600'000});  // an hour at most
  CHECK(state() == "active");
  server.refuseCheckpoint = "the disk is full";
  CHECK(contains(refusal(write(held.id, "tuesday").ignoreResult()), "server node: the disk is full"));
  server.refuseCheckpoint.clear();
  server.oldServer = true;
  CHECK(contains(refusal(write(held.id, "tuesday").ignoreResult()),
                 "server node: it cannot write sessions into files (it runs another version of gpupool)"));
  server.oldServer = false;
  CHECK(contains(refusal(write(Id::random(), "monday").ignoreResult()), "there is no lease"));
  CHECK(server.checkpoints == std::vector<std::string>{"monday", "tuesday"});
}

TEST_CASE_METHOD(Suspends, "who asked for a move may go away, and what was begun goes on") {
  server.muteMigrate = true;
  {
    auto gone = connect();
    auto asked = migrate(*gone, held.id);
    pause(50);
  }
  CHECK(server.migrations.size() == 1);
  auto second = migrate(*holder, held.id);  // joins it
  pause(50);
  CHECK(server.migrations.size() == 1);
  CHECK(contains(refusal(suspend(*holder, held.id).ignoreResult()), "is being moved at this moment"));
  server.disconnect();
  CHECK(contains(refusal(second.ignoreResult()), "lost the connection to"));
  server.muteMigrate = false;
  server.join(address);
  await(server.joined());
  CHECK(state() == "active");
  CHECK(await(migrate(*holder, held.id)).sessions == 2);
}

TEST_CASE_METHOD(Suspends, "a lease is moved to another server through the manager") {
  FakeServer other(io, "other", 2, folder.path + "/other");
  other.join(address);
  await(other.joined());
  const MoveTarget to{"other", {1}, false};
  CHECK(await(places(*holder, held.id)) == "node");

  server.muteMigrate = true;
  auto moving = migrate(*holder, held.id, 1000, to);
  pause(50);
  CHECK(state() == "moving");
  CHECK(await(places(*holder, held.id)) == "other node");
  CHECK(await(holder->manager().leasesRequest().send().then(
            [](auto&& response) { return text(response.getLeases()[0].getMovesTo()); })) == "other GPU 1");
  REQUIRE(other.leases.contains(held.id));
  CHECK(other.leases.at(held.id).key == held.key);
  CHECK(other.leases.at(held.id).epoch > held.epoch);
  REQUIRE(server.movedTo.size() == 1);
  CHECK(server.movedTo[0].server.name == "other");
  CHECK(server.movedTo[0].key == held.key);
  CHECK(server.movedTo[0].devices.at(0).info.ordinal == 1);
  CHECK(contains(refusal(suspend(*holder, held.id).ignoreResult()), "is being moved at this moment"));
  server.disconnect();
  CHECK(contains(refusal(moving.ignoreResult()), "lost the connection to"));
  CHECK(state() == "moving");
  server.muteMigrate = false;
  server.join(address);
  await(server.joined());
  CHECK(contains(refusal(migrate(*holder, held.id, 1000, {"other", {0}, false}).ignoreResult()),
                 "is moving to other GPU 1 already"));

  const MigrateResult result = await(migrate(*holder, held.id));  // goes on
  CHECK(result.sessions == 2);
  CHECK(result.server == "other GPU 1");
  CHECK(await(places(*holder, held.id)) == "other");
  for (int i = 0; i < 400 && !server.leases.empty(); ++i) pause(5);
  CHECK(server.leases.empty());
  CHECK(server.revokeReasons == std::vector<std::string>{"its sessions have moved to another server"});
  CHECK(state() == "active");
  await(server.beatNow());
  await(other.beatNow());
  CHECK(state() == "active");
  CHECK(contains(refusal(places(*holder, Id::random()).ignoreResult()), "the lease has ended"));
}

TEST_CASE_METHOD(Suspends, "a lease of which nothing could be moved is given back by the target's server") {
  FakeServer other(io, "other", 1, folder.path + "/other");
  other.join(address);
  await(other.joined());
  server.refuseMigrate = "a capture is open";
  const auto moving = [&] { return refusal(migrate(*holder, held.id, 1000, {"", {}, true}).ignoreResult()); };
  SECTION("no session is there") {
    other.living = {Id::random()};
    CHECK(moving() == "server node: a capture is open");
    CHECK(other.asked == 1);
  }
  SECTION("one has ended there") {
    other.living = {held.id};
    other.livingEnded = true;
    CHECK(moving() == "server node: a capture is open");
  }
  SECTION("one is there, and goes") {
    other.living = {held.id};
    auto asked = migrate(*holder, held.id, 1000, {"", {}, true});
    for (int i = 0; i < 400 && other.asked == 0; ++i) pause(5);
    other.living.clear();
    CHECK(refusal(asked.ignoreResult()) == "server node: a capture is open");
    CHECK(other.asked == 2);
  }
  SECTION("one is there") {
    other.living = {held.id};
    const std::string said = moving();
    INFO(said);
    CHECK(contains(said, "server node: a capture is open"));  // and perhaps that the other's answer was late
    CHECK(contains(said, "; the lease may have sessions in both places"));
    CHECK(state() == "moving");
    CHECK(other.leases.contains(held.id));
    return;
  }
  SECTION("the target's server refuses the lease") {
    other.refuseGrants = "its device is broken";
    CHECK(moving() == "server other: its device is broken");
  }
  CHECK(state() == "active");
  for (int i = 0; i < 400 && !other.leases.empty(); ++i) pause(5);
  CHECK(other.leases.empty());
  CHECK(server.leases.contains(held.id));
}

TEST_CASE_METHOD(ServiceFixture, "a lease is moved to another device of its server through the manager") {
  FakeServer server(io, "node", 2, folder.path + "/sessions");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  const Lease held = await(lease(*holder, wish()));
  const auto moving = [&] { return migrate(*holder, held.id, 1000, {"", {1}, false}); };
  SECTION("all") {
    const MigrateResult result = await(moving());
    CHECK(result.server == "node GPU 1");
    for (int i = 0; i < 400 && server.settles.empty(); ++i) pause(5);
    CHECK(server.settles == std::vector<bool>{true});
    CHECK(server.leases.at(held.id).devices.at(0).info.ordinal == 1);
    CHECK(server.movedTo.at(0).devices.at(0).info.ordinal == 1);
  }
  SECTION("none") {
    server.refuseMigrate = "a capture is open";
    CHECK(errorText(failure(*this, moving())) == "server node: a capture is open");
    CHECK(server.settles == std::vector<bool>{false});
    CHECK(server.targets.empty());
  }
  SECTION("some") {
    server.refuseMigrate = "a capture is open";
    server.refuseSettle = "a session is there";
    CHECK(contains(errorText(failure(*this, moving())),
                   "a capture is open; the lease may have sessions in both"));
    CHECK(server.targets.size() == 1);
    server.refuseMigrate.clear();
    CHECK(await(migrate(*holder, held.id)).server == "node GPU 1");
  }
  SECTION("it refuses the devices") {
    server.refuseTargets = "no";
    CHECK(errorText(failure(*this, moving())) == "server node: no");
    CHECK(server.migrations.empty());
  }
  CHECK(server.revokeReasons.empty());
}

TEST_CASE_METHOD(Suspends, "a cordon is told with who, why and since when, also of a server that is absent") {
  const auto told = [&](const std::function<void(schema::ServerState::Reader)>& look) {
    await(holder->manager().serversRequest().send().then([&](auto&& response) {
      REQUIRE(response.getServers().size() == 1);
      look(response.getServers()[0]);
    }));
  };
  const auto cordoned = [](schema::ServerState::Reader one) {
    CHECK(one.getCordoned());
    CHECK(text(one.getCordonReason()) == "a fan");
    CHECK(text(one.getCordonedBy()) == "the operator (says: eve@head)");
    CHECK(one.getCordonedS() >= 1);
    CHECK(one.getCordonedS() < 60);
    CHECK(text(one.getInfo().getName()) == "node");
  };
  CHECK(contains(refusal(cordon(*holder, "nobody", true)), "there is no server nobody"));
  CHECK(contains(refusal(cordon(*holder, "nobody", false)), "there is no server nobody"));
  await(cordon(*holder, "node", true));
  await(cordon(*holder, "node", true));
  told([&](auto one) {
    cordoned(one);
    CHECK_FALSE(one.getAbsent());
  });
  await(server.leave());
  told([&](auto one) {
    cordoned(one);
    CHECK(one.getAbsent());
    CHECK_FALSE(one.getAlive());
  });
  server.join(address);
  await(server.joined());
  LeaseRequest other = wish();
  CHECK(contains(errorText(failure(*this, lease(*holder, other))), "node: cordoned by an operator: a fan"));
  await(cordon(*holder, "node", false));
  await(cordon(*holder, "node", false));
  told([&](auto one) { CHECK_FALSE(one.getCordoned()); });
  other.id = Id::random();
  await(lease(*holder, other));
}
