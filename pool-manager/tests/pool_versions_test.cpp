// Clients of several versions: which servers a lease may be on, at its grant and wherever it goes.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

const WorkerVersion kOld{0x01d, "0.0.9"}, kNew{0x4e3, "0.1.0"};

Server serverOf(const std::string& name, uint64_t incarnation, const std::vector<WorkerVersion>& workers) {
  Server facts = test::server(name, incarnation, 2);
  facts.rowsHash = workers.front().rowsHash;
  facts.workers = workers;
  return facts;
}

// Servers `both`, whose leases are on it, and `new`, which has no worker for the old client.
struct Versions : Suspends {
  Versions() {
    pool->left("a", {1, 0}, true, now);
    joinAndBeat(serverOf("both", 1, {kNew, kOld}));
  }
  void joinNew() { joinAndBeat(serverOf("new", 1, {kNew})); }
  void ask(uint64_t id, const WorkerVersion& client, const std::string& where = "",
           bool isProtected = false) {
    LeaseRequest wish = request(id);
    wish.server = where;
    wish.client = client;
    if (isProtected) wish.turns.protectMs = 1000, wish.turns.holderKeeps = true;
    pool->request(kAdmin, wish, now);
    if (pool.pool->leases().contains({id, id})) pool->granted({id, id}, now);
  }
  std::string server(uint64_t id) { return record(id).server().name; }
  std::string notMoved(uint64_t id, const MoveTarget& to = {"", {}, true}) {
    return thrown([&] { pool->migrate(kAdmin, {id, id}, 1000, to, now); });
  }
  // The manager, and then both servers, with these leases on `both`.
  void startedAgain(const std::vector<Id>& leases) {
    restart();
    joinAndBeat(serverOf("both", 1, {kNew, kOld}), leases);
    joinNew();
  }
  size_t storedClients() { return store->range("clients/").size(); }
  void renew(const Id& id, const std::vector<WorkerVersion>& clients) {
    std::string why;
    REQUIRE(pool->renew(kAdmin, id, now, &why, {{}, "", 0, clients}).has_value());
  }
  void renew(uint64_t id, const std::vector<WorkerVersion>& clients) { renew(Id{id, id}, clients); }
};

const ServerLife kBoth{"both", {1, 0}};

}  // namespace

TEST_CASE_METHOD(Versions, "a lease is granted where its client has a worker program, or refused at once") {
  joinNew();
  ask(1, kNew, "new");
  CHECK(server(1) == "new");
  ask(2, kOld);
  CHECK(server(2) == "both");
  ask(3, kOld, "new");
  CHECK(events.failures.at({3, 3}).kind == Failure::Kind::otherVersion);
  CHECK(contains(failure(3), "server new has no worker program for this client"));
  LeaseRequest nobodys = request(4, 60'000);
  nobodys.client = {0xabc, "0.3.0"};
  CHECK(pool->explain(kAdmin, nobodys, now).outlook == Outlook::never);
  pool->request(kAdmin, nobodys, now);
  CHECK(events.failures.at({4, 4}).kind == Failure::Kind::otherVersion);
  CHECK(contains(failure(4), "install the worker of that version there"));
  ask(5, {});  // who does not say, as peers of before
  CHECK(record(5).state == LeaseState::active);
}

TEST_CASE_METHOD(Versions,
                 "a server that does not list its workers serves its own rows, and without them any") {
  Server facts = test::server("bare", 1);
  facts.rowsHash = kOld.rowsHash;
  joinAndBeat(facts);
  pool->left("both", {1, 0}, true, now);
  ask(1, kOld);
  CHECK(server(1) == "bare");
  joinAndBeat(test::server("older", 1));
  ask(2, {0xabc, ""});
  CHECK(server(2) == "older");
}

TEST_CASE_METHOD(Versions, "a lease moves where its client has a worker program, also after a restart") {
  ask(1, kOld);
  joinNew();
  const std::string why = notMoved(1);
  CHECK(contains(why,
                 "new: has no worker program for this client (call rows 000000000000001d of gpupool 0.0.9)"));
  CHECK(contains(why, "install the worker of that version there (docs/admin.md, Upgrade)"));
  CHECK(contains(notMoved(1, {"new"}), "new: has no worker program for this client"));
  CHECK(events.prepares.empty());
  restart();
  joinAndBeat(serverOf("both", 1, {kNew, kOld}), {{1, 1}});
  joinNew();
  CHECK(contains(notMoved(1), "new: has no worker program for this client"));
  joinAndBeat(serverOf("old", 1, {kOld}));
  CHECK(notMoved(1).empty());
  CHECK(record(1).target()->server.name == "old");
}

TEST_CASE_METHOD(Versions, "a server may get and lose worker programs while it runs") {
  joinNew();
  pool->setWorkers("new", {kNew, kOld}, now);
  ask(1, kOld, "new");
  CHECK(server(1) == "new");
  pool->setWorkers("new", {kNew}, now);
  ask(2, kOld, "new");
  CHECK(contains(failure(2), "server new has no worker program for this client"));
  CHECK(record(1).state == LeaseState::active);
  ask(3, kOld, "both");
  CHECK(contains(notMoved(3, {"new"}), "new: has no worker program for this client"));
  pool->setWorkers("new", {kNew, kOld}, now);
  CHECK(notMoved(3, {"new"}).empty());
  pool->setWorkers("nowhere", {kNew}, now);
  CHECK(pool.pool->inventoryFault(now).empty());
}

TEST_CASE_METHOD(Versions, "who waits for a lost server's program gets another's when that has it") {
  ask(1, kOld, "", true);
  joinNew();
  pool->left("both", {1, 0}, false, now);
  pool->failOver(kAdmin, {1, 1}, kBoth, 60'000, now);
  REQUIRE(state(1) == LeaseState::held);
  pool->setWorkers("new", {kNew, kOld}, now);
  CHECK(state(1) == LeaseState::granting);
}

TEST_CASE_METHOD(Versions, "what the programs turn out to be counts more than what was asked for") {
  ask(1, kNew);
  ask(2, {});
  joinNew();
  renew(1, {kOld});
  CHECK(contains(notMoved(1), "new: has no worker program for this client"));
  renew(1, {});  // a holder that says nothing leaves it as it is
  CHECK(contains(notMoved(1), "new: has no worker program for this client"));
  renew(2, {kNew, kOld});
  CHECK(contains(notMoved(2), "new: has no worker program for this client"));
  renew(2, {kNew});
  CHECK(notMoved(2).empty());
}

TEST_CASE_METHOD(Versions, "what holders have said of their programs outlives the manager") {
  ask(1, kNew);
  ask(2, {});
  renew(1, {kNew});
  CHECK(storedClients() == 0);  // the lease says so already
  renew(1, {kNew, kOld});
  renew(2, {kOld});
  CHECK(storedClients() == 2);
  startedAgain({{1, 1}, {2, 2}});
  CHECK(contains(notMoved(1), "new: has no worker program for this client"));
  CHECK(contains(notMoved(2), "new: has no worker program for this client"));
  renew(1, {kNew});
  startedAgain({{1, 1}, {2, 2}});
  CHECK(notMoved(1).empty());
  CHECK(contains(notMoved(2), "new: has no worker program for this client"));
  pool->release(kAdmin, {2, 2}, now);
  pool->revoked(kBoth, {2, 2}, now);
  CHECK(storedClients() == 1);
}

TEST_CASE_METHOD(Versions, "what the store did not take is written with a later renewal") {
  ask(1, kNew);
  disk->full = true;
  renew(1, {kOld});
  disk->full = false;
  CHECK(storedClients() == 0);
  renew(1, {kOld});
  CHECK(storedClients() == 1);
}

TEST_CASE("clients in the store: what is no line of theirs is left out") {
  const std::vector<WorkerVersion> both{{0x01d, "0.0.9"}, {~uint64_t{0}, ""}};
  CHECK(decodeClients(encodeClients(both)) == both);
  CHECK(decodeClients("").empty());
  CHECK(decodeClients("0000000000000000 none\n00000000000004e3\nz0000000000004e3 0.1.0\n1d 0.1.0\n").empty());
}

TEST_CASE_METHOD(Versions, "a claim goes where all of its programs can") {
  LeaseRequest wish = request(1);
  wish.job = "alps:1:0";
  pool->nameClaim(kAdmin, wish);
  pool->request(kAdmin, wish, now);
  pool->granted(wish.id, now);
  joinNew();
  LeaseRequest program = request(7);
  program.adopts = wish.id.text();
  program.client = kOld;
  pool->request(kAdmin, program, now);
  const auto move = [&] {
    return thrown([&] { pool->migrate(kAdmin, wish.id, 1000, {"", {}, true}, now); });
  };
  CHECK(contains(move(), "new: has no worker program for this client"));
  std::string why;
  REQUIRE(pool->renew(kAdmin, wish.id, now, &why, {{7, 7}, "program", 10'000}).has_value());
  CHECK(contains(move(), "new: has no worker program for this client"));
  SECTION("until they have left it") { pool->leave(kAdmin, wish.id, {7, 7}, now); }
  SECTION("also those that have not renewed yet since the manager was started again") {
    startedAgain({wish.id});
    CHECK(contains(move(), "new: has no worker program for this client"));
    now += wish.ttlMs;
    startedAgain({wish.id});
    renew(wish.id, {});  // by the scheduler
    CHECK(contains(move(), "new: has no worker program for this client"));
    now += wish.ttlMs - 1000;
    renew(wish.id, {});
    now += 2000;
    REQUIRE(pool->beat("both", {1, 0}, {wish.id}, {}, 1, now));
    REQUIRE(pool->beat("new", {1, 0}, {}, {}, 1, now));
    pool->tick(now);  // it has not come back
  }
  CHECK(move().empty());
}

TEST_CASE_METHOD(Versions, "a held lease is restored where its client has a worker program") {
  ask(1, kOld);
  joinNew();
  pool->suspend(kAdmin, {1, 1}, 30'000, now, "monday");
  const auto order = events.suspends.back();
  pool->suspendDone(order.id, order.number, {{0}, 0, 0, 0, {{7, 7}, "monday", "both"}}, now);
  pool->revoked(kBoth, {1, 1}, now);
  REQUIRE(state(1) == LeaseState::held);
  pool->resume(kAdmin, {1, 1}, 60'000, now, "monday", {"new"});  // at once: time does not cure it
  CHECK(contains(notResumed(1), "new: has no worker program for this client"));
  CHECK(contains(notResumed(1), "install the worker of that version there"));
  pool->resume(kAdmin, {1, 1}, 0, now, "monday", {"both"});
  CHECK(state(1) == LeaseState::granting);
}

TEST_CASE_METHOD(Versions, "a lease whose server has died waits for one with its client's worker program") {
  ask(1, kOld, "", true);
  joinNew();
  pool->left("both", {1, 0}, false, now);
  pool->failOver(kAdmin, {1, 1}, kBoth, 60'000, now);
  CHECK(state(1) == LeaseState::held);
  CHECK(events.resumeFailures.empty());
  joinAndBeat(serverOf("old", 1, {kOld}));
  pool->tick(now);
  REQUIRE(state(1) == LeaseState::granting);
  CHECK(server(1) == "old");
}
