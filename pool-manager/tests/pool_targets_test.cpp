// Leases that move to other devices, of their server or of another one.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

const Id kLease{1, 1};
const ServerLife kB{"b", {2, 0}};

// Servers a and b with two devices each, and lease 1, which has all of a's first one.
struct Targets : DiskFixture {
  Targets() {
    joinAndBeat(server("a", 1, 2));
    lease(1, "a");
    joinAndBeat(server("b", 2, 2));
  }
  void lease(uint64_t id, const std::string& where, uint64_t memory = 0) {
    LeaseRequest wish = request(id, 0, memory);
    wish.server = where;
    pool->request(kAdmin, wish, now);
    pool->granted({id, id}, now);
    REQUIRE(has(id));
  }
  void migrate(const MoveTarget& to) { pool->migrate(kAdmin, kLease, 4000, to, now); }
  std::string refused(const MoveTarget& to) {
    return thrown([&] { migrate(to); });
  }
  void prepared() { pool->prepareDone(kLease, events.prepares.back().number, now); }
  void moves() { pool->migrateDone(kLease, events.migrates.back().number, {2, 10 * kGiB, 700}, now); }
  void movesNot(const std::string& why, bool isRefusal = true) {
    pool->migrateFailed(kLease, events.migrates.back().number, why, isRefusal, now);
  }
  void returned(bool unused) { pool->returned(kLease, events.returns.back().number, unused, now); }
  void ordered(const MoveTarget& to) {  // until its server has the order
    migrate(to);
    REQUIRE(events.prepares.size() == 1);
    prepared();
    REQUIRE(events.migrates.size() == 1);
  }
  void beats(const std::vector<Id>& onA, const std::vector<Id>& onB) {
    REQUIRE(pool->beat("a", kA.incarnation, onA, {}, 1, now));
    REQUIRE(pool->beat("b", kB.incarnation, onB, {}, 1, now));
  }
  const LeaseRecord& record() { return pool.pool->leases().at(kLease); }
  LeaseState state() { return record().state; }
  std::string at() { return pool::describe(record().primary()); }
  std::string to() { return pool.pool->list(kAdmin, now).at(0).movesTo; }
  // Free devices of that server.
  size_t freeOn(const std::string& name) {
    size_t count = 0;
    for (const ServerUse& use : pool.pool->inventory(kAdmin, now))
      if (use.name == name)
        for (const DeviceUse& device : use.devices) count += device.freeBytes == 80 * kGiB;
    return count;
  }
  std::string places() {
    std::string names;
    for (const Server& server : pool.pool->places(kAdmin, kLease)) names += server.name;
    return names;
  }
  std::optional<StoredLease> stored() {
    for (const Entry& entry : store->range("lease/"))
      if (StoredLease lease = decodeLease(entry.value, "boot"); lease.id == kLease) return lease;
    return std::nullopt;
  }
  size_t revokesOf(const std::string& server) {
    return static_cast<size_t>(std::count_if(events.revokes.begin(), events.revokes.end(),
                                             [&](const auto& one) { return one.server == server; }));
  }
  std::string notMoved() { return events.moveFailures[kLease]; }
  bool isMoved() { return events.moved.contains(kLease); }
  void restarted() {
    restart();
    events.prepares.clear(), events.migrates.clear(), events.returns.clear(), events.settles.clear();
    events.revokes.clear(), events.moveFailures.clear(), events.moved.clear();
  }
  // Another process of the server.
  void startedAgain(const Server& facts, const std::vector<DeviceReport>& reports = {}) {
    pool->left(facts.name, pool.pool->servers().at(facts.name).facts.incarnation, false, now);
    joinAndBeat(facts, {}, reports);
  }
  void rejoin(const std::vector<Id>& onA, const std::vector<Id>& onB) {
    joinAndBeat(server("a", 1, 2), onA);
    joinAndBeat(server("b", 2, 2), onB);
  }
};

MoveTarget elsewhere() { return {"", {}, true}; }

}  // namespace

TEST_CASE_METHOD(Targets, "a lease moves to another server, and is on both until all have said so") {
  disk->full = true;
  migrate({"b"});
  CHECK(events.prepares.empty());  // the store comes first
  CHECK(contains(notMoved(), "the manager cannot write its store"));
  disk->full = false;
  pool->tick(now += 2000);
  beats({kLease}, {});
  CHECK(state() == LeaseState::active);
  CHECK(freeOn("b") == 2);
  CHECK(revokesOf("b") == 0);  // it was never told

  migrate({"b"});
  REQUIRE(events.prepares.size() == 1);
  const auto prepare = events.prepares[0];
  CHECK(prepare.server == "b");
  CHECK_FALSE(prepare.here);
  CHECK(prepare.target.key == record().primary().key);
  CHECK(prepare.target.epoch > record().primary().epoch);
  CHECK(prepare.target.devices.at(0).memoryBytes == 80 * kGiB);
  CHECK(stored()->state == LeaseState::moving);
  CHECK(stored()->target() != nullptr);
  CHECK(to() == "b GPU 0");
  CHECK(places() == "ba");
  CHECK(freeOn("a") == 1);
  CHECK(freeOn("b") == 1);
  CHECK(events.migrates.empty());
  migrate({"b"});  // joins it
  migrate({});
  beats({kLease}, {});  // b has not heard of it yet
  CHECK(events.prepares.size() == 1);
  CHECK(state() == LeaseState::moving);

  prepared();
  REQUIRE(events.migrates.size() == 1);
  CHECK(events.migrates[0].server == "a");
  CHECK(events.migrates[0].drainMs == 4000);
  CHECK(events.migrates[0].target.server.name == "b");
  beats({kLease}, {kLease});
  CHECK(state() == LeaseState::moving);
  moves();
  CHECK(events.moved[kLease].sessions == 2);
  CHECK(events.moved[kLease].server == "b GPU 0");
  CHECK(state() == LeaseState::active);
  CHECK(at() == "b GPU 0");
  CHECK(stored()->primary().server.name == "b");
  CHECK(places() == "b");
  CHECK(freeOn("a") == 1);  // a has not said that nothing of it is there
  REQUIRE(revokesOf("a") == 1);
  pool->revokeFailed(kA, kLease, now);
  beats({}, {kLease});
  CHECK(revokesOf("a") == 2);
  pool->revoked(kA, kLease, now);
  CHECK(freeOn("a") == 2);
  CHECK(freeOn("b") == 1);
  CHECK(state() == LeaseState::active);
  CHECK(stored()->placements.size() == 1);
  pool->request(kAdmin, request(1), now);
  CHECK(events.leases.at(kLease).server.name == "b");
  beats({}, {kLease});
  CHECK(revokesOf("b") == 0);
  pool->release(kAdmin, kLease, now);
  CHECK(revokesOf("b") == 1);
  CHECK(revokesOf("a") == 2);
}

TEST_CASE_METHOD(Targets, "a lease moves to another device of its server") {
  migrate({"", {1}});
  REQUIRE(events.prepares.size() == 1);
  CHECK(events.prepares[0].here);
  CHECK(places() == "a");
  CHECK(freeOn("a") == 0);
  prepared();
  moves();
  CHECK(events.moved[kLease].server == "a GPU 1");
  CHECK(events.revokes.empty());
  REQUIRE(events.settles.size() == 1);
  CHECK(freeOn("a") == 0);
  pool->settleFailed(kLease, events.settles[0].number, now);
  beats({kLease}, {});
  REQUIRE(events.settles.size() == 2);
  pool->settled(kLease, events.settles[0].number, now);  // late
  CHECK(freeOn("a") == 0);
  pool->settled(kLease, events.settles[1].number, now);
  CHECK(freeOn("a") == 1);
  CHECK(at() == "a GPU 1");
  beats({kLease}, {});
  CHECK(events.settles.size() == 2);
}

TEST_CASE_METHOD(Targets, "whoever names no device gets any that fit") {
  SECTION("of its own server: not its own") { ordered({"a"}); }
  SECTION("elsewhere") { ordered(elsewhere()); }
  SECTION("the fullest server that fits, on the fullest device") {
    lease(2, "b", 40 * kGiB);
    joinAndBeat(server("c", 3, 4));
    pool->release(kAdmin, kLease, now);
    pool->revoked(kA, kLease, now);
    pool->request(kAdmin, request(3, 0, kGiB), now);  // another one, of a part of a device
    pool->granted({3, 3}, now);
    pool->migrate(kAdmin, {3, 3}, 0, elsewhere(), now);
    const Lease& target = events.prepares.back().target;
    CHECK(target.server.name != events.leases.at({3, 3}).server.name);
    CHECK(target.devices.at(0).memoryBytes == kGiB);
    return;
  }
  CHECK(events.prepares[0].target.devices.at(0).info.uuid != record().primary().devices.at(0).info.uuid);
}

TEST_CASE_METHOD(Targets, "what cannot be had is refused with the reason, and nothing changes") {
  const auto is = [&](const MoveTarget& where, const char* why) {
    const std::string text = refused(where);
    INFO(text);
    CHECK(contains(text, "lease 00000000 cannot be moved: "));
    CHECK(contains(text, why));
  };
  SECTION("no such server") { is({"z"}, "there is no server named z"); }
  SECTION("no such device") { is({"b", {7}}, "b: there is no such GPU"); }
  SECTION("its own device") { is({"a", {0}}, "GPU 0 (GPU) is the lease's own"); }
  SECTION("too many devices") { is({"b", {0, 1}}, "it has 1 GPU(s), and 2 are named"); }
  SECTION("devices of any server") { is({"", {0}, true}, "by their numbers on one server"); }
  SECTION("no room") {
    lease(2, "b");
    lease(3, "b", 10 * kGiB);
    is({"b"}, "GPU 0 (GPU) is held by holder2");
    is(elsewhere(), "with 69.0 GiB free");
  }
  SECTION("another tenant's leases have no names") {
    lease(2, "b");
    lease(3, "b");
    LeaseRequest wish = request(4);
    const Principal tenant{Principal::Role::user, "t"};
    pool->request(tenant, wish, now);
    pool->granted({4, 4}, now);
    CHECK(contains(thrown([&] { pool->migrate(tenant, {4, 4}, 0, elsewhere(), now); }),
                   "GPU 0 (GPU) is in use"));
    CHECK(contains(thrown([&] { pool->migrate(tenant, kLease, 0, {"b"}, now); }), "another tenant's"));
    CHECK(thrown([&] { pool.pool->places(tenant, kLease); }) == "that lease is another tenant's");
  }
  SECTION("cordoned") {
    pool->cordon(kAdmin, "b", {"a new fan", "", 0}, [](const std::string&) {});
    is({"b"}, "b: cordoned by an operator: a new fan");
    is(elsewhere(), "b: cordoned");
  }
  SECTION("broken") {
    REQUIRE(pool->beat("b", kB.incarnation, {}, {"ECC", "ECC"}, 1, now));
    is({"b"}, "GPU 0 (GPU) is broken (ECC)");
  }
  SECTION("not connected") {
    pool->left("b", kB.incarnation, false, now);
    is({"b"}, "b: not connected");
  }
  SECTION("other devices") {
    Server other = server("c", 3);
    SECTION("model") { other.devices[0].name = "other"; }
    SECTION("memory") { other.devices[0].memoryBytes += kGiB; }
    SECTION("driver") { other.devices[0].driverVersion = 12040; }
    SECTION("kind") { other.devices[0].software = true; }
    joinAndBeat(other);
    is({"c"}, "is another model or has another driver than the lease's GPU");
  }
  SECTION("where leases take turns") {
    Server other = server("c", 3);
    other.overcommitPercent = 200;
    joinAndBeat(other);
    is({"c"}, "c: its leases take turns");
    lease(2, "c");
    CHECK(contains(thrown([&] { pool->migrate(kAdmin, {2, 2}, 0, {"b"}, now); }),
                   "leases of server c take turns"));
  }
  SECTION("not free: its own server, which is cordoned") {
    pool->cordon(kAdmin, "a", {"", "", 0}, [](const std::string&) {});
    is({"a", {1}}, "a: cordoned");
  }
  CHECK(events.prepares.empty());
  CHECK(state() == LeaseState::active);
  CHECK(record().placements.size() == 1);
}

TEST_CASE_METHOD(Targets, "a lease that moves is not suspended, and goes nowhere else") {
  ordered({"b", {1}});
  movesNot("", false);
  CHECK(state() == LeaseState::moving);
  CHECK(contains(thrown([&] { pool->suspend(kAdmin, kLease, 0, now); }),
                 "cannot be suspended: it is moving to b GPU 1, and has to arrive there first"));
  CHECK(contains(thrown([&] { pool->resume(kAdmin, kLease, 0, now); }),
                 "cannot be resumed: it is moving to b GPU 1"));
  for (const MoveTarget& other : {MoveTarget{"b", {0}}, MoveTarget{"a"}, MoveTarget{"", {1}}})
    CHECK(contains(refused(other), "is moving to b GPU 1 already"));
  for (const MoveTarget& same : {MoveTarget{"b", {1}}, MoveTarget{"b"}, elsewhere(), MoveTarget{}}) {
    migrate(same);
    CHECK(state() == LeaseState::moving);
  }
  CHECK(events.prepares.size() == 2);  // the others have joined the first one
  std::string why;
  CHECK(pool->renew(kAdmin, kLease, now, &why));
  CHECK(contains(pool.pool->inventory(kAdmin, now).at(0).devices.at(0).holders.at(0), ", moving"));
}

TEST_CASE_METHOD(Targets, "where nothing has moved the lease is what it was") {
  SECTION("another server") {
    ordered({"b"});
    movesNot("a capture is open");
    REQUIRE(events.returns.size() == 1);
    CHECK_FALSE(events.returns[0].here);
    CHECK(notMoved().empty());
    returned(true);
    CHECK(notMoved() == "server a: a capture is open");
    CHECK(state() == LeaseState::active);
    CHECK(at() == "a GPU 0");
    REQUIRE(revokesOf("b") == 1);
    CHECK(freeOn("b") == 1);
    CHECK(contains(refused({"b"}), "b: it has not confirmed yet that the lease has left it"));
    pool->revoked(kB, kLease, now);
    CHECK(freeOn("b") == 2);
  }
  SECTION("its own server") {
    ordered({"", {1}});
    movesNot("a capture is open");
    REQUIRE(events.returns.size() == 1);
    CHECK(events.returns[0].here);
    returned(true);  // and given back
    CHECK(freeOn("a") == 1);
    CHECK(events.settles.empty());
    CHECK(events.revokes.empty());
  }
  SECTION("the target's server refuses it") {
    migrate({"b"});
    pool->prepareFailed(kLease, events.prepares[0].number, "no", true, now);
    returned(true);
    CHECK(notMoved() == "server b: no");
    pool->revoked(kB, kLease, now);
    CHECK(freeOn("b") == 2);
  }
  CHECK(state() == LeaseState::active);
  CHECK(stored()->state == LeaseState::active);
  CHECK(stored()->placements.size() == 1);
  CHECK(events.migrates.size() <= 1);
  migrate({"b"});
  CHECK(state() == LeaseState::moving);
}

TEST_CASE_METHOD(Targets, "where sessions may have moved the lease keeps both, and goes on when asked") {
  ordered({"b"});
  std::string why = "lost";
  SECTION("a session is there") {
    movesNot("one cannot be moved");
    returned(false);
    why =
        "server a: one cannot be moved; the lease may have sessions in both places: it is moving to b GPU 0 "
        "still";
  }
  SECTION("b does not say") {
    movesNot("no");
    pool->returnFailed(kLease, events.returns[0].number, "it does not answer", now);
    why = "server a: no; server b does not say what is there: it does not answer; the lease may";
  }
  SECTION("b is lost meanwhile") {
    movesNot("no");
    pool->left("b", kB.incarnation, false, now);
    why = "lost the connection to server b; whether its sessions have moved is not known";
    joinAndBeat(server("b", 2, 2), {kLease});
  }
  SECTION("a does not answer") {
    movesNot("it does not answer", false);
    why = "server a: it does not answer";
  }
  SECTION("a is lost meanwhile") {
    pool->left("a", kA.incarnation, false, now);
    why = "lost the connection to server a; whether its sessions have moved is not known";
    CHECK(contains(refused({}), "cannot be moved: server a: not connected"));
    joinAndBeat(server("a", 1, 2), {kLease});
  }
  INFO(notMoved());
  CHECK(contains(notMoved(), why));
  beats({kLease}, {kLease});
  CHECK(state() == LeaseState::moving);
  CHECK(freeOn("a") == 1);
  CHECK(freeOn("b") == 1);
  CHECK(events.revokes.empty());
  migrate({});
  REQUIRE(events.prepares.size() == 2);
  CHECK(events.prepares[1].target.epoch == events.prepares[0].target.epoch);
  prepared();
  REQUIRE(events.migrates.size() == 2);
  moves();
  CHECK(at() == "b GPU 0");
}

TEST_CASE_METHOD(Targets, "the target's server was told, perhaps: what it names decides") {
  migrate({"b"});
  SECTION("no answer") { pool->prepareFailed(kLease, events.prepares[0].number, "silent", false, now); }
  SECTION("lost") {
    pool->left("b", kB.incarnation, false, now);
    joinAndBeat(server("b", 2, 2), {});
  }
  beats({kLease}, {});
  CHECK(state() == LeaseState::active);
  CHECK(at() == "a GPU 0");
  CHECK(freeOn("b") == 1);
  CHECK(revokesOf("b") == 1);
  pool->revoked(kB, kLease, now);
  CHECK(freeOn("b") == 2);
}

TEST_CASE_METHOD(Targets, "the target's server goes away before it is told") {
  migrate({"b"});
  pool->left("b", kB.incarnation, true, now);
  CHECK(contains(notMoved(), "server b"));
  CHECK(state() == LeaseState::active);
  CHECK(record().placements.size() == 1);
}

TEST_CASE_METHOD(Targets, "what the store refuses when all have moved is not told, and tried again") {
  ordered({"b"});
  disk->full = true;
  moves();
  CHECK(contains(notMoved(), "the lease is on b GPU 0, but what it has left is not free"));
  beats({kLease}, {kLease});
  CHECK(revokesOf("a") == 0);
  CHECK(contains(thrown([&] { pool->suspend(kAdmin, kLease, 0, now); }), "is being moved at this moment"));
  SECTION("the store is there again") {
    disk->full = false;
    pool->tick(now += 2000);
    CHECK(revokesOf("a") == 1);
    CHECK(stored()->primary().server.name == "b");
    CHECK(isMoved());
  }
  SECTION("another manager goes on") {
    disk->full = false;
    restarted();
    rejoin({kLease}, {kLease});
    CHECK(state() == LeaseState::moving);
    CHECK(at() == "a GPU 0");
    migrate({});
    prepared();
    moves();
    CHECK(at() == "b GPU 0");
    CHECK(revokesOf("a") == 1);
  }
}

TEST_CASE_METHOD(Targets, "a manager that ends meanwhile knows of both when it is started again") {
  SECTION("the store has it, and nobody else") {
    disk->unsure = true;
    pool.pool->migrate(kAdmin, kLease, 0, {"b"}, now);
    store->deliver();  // and what follows from that is not written any more
    CHECK(events.prepares.empty());
    disk->unsure = false;
    restarted();
    CHECK(state() == LeaseState::moving);
    rejoin({kLease}, {});
    CHECK(state() == LeaseState::active);  // nothing can be there
    CHECK(at() == "a GPU 0");
    CHECK(revokesOf("b") == 1);
    return;
  }
  SECTION("another server") {
    ordered({"b"});
    restarted();
    CHECK(state() == LeaseState::moving);
    CHECK(places() == "ba");
    rejoin({kLease}, {kLease});
    CHECK(state() == LeaseState::moving);
    CHECK(freeOn("a") == 1);
    CHECK(freeOn("b") == 1);
    moves();  // of the manager before
    CHECK(state() == LeaseState::moving);
    CHECK(contains(refused({"a"}), "is moving to b GPU 0 already"));
    ordered({"b"});
    moves();
    CHECK(at() == "b GPU 0");
    SECTION("and again before a has confirmed") {
      restarted();
      rejoin({kLease}, {kLease});
      CHECK(at() == "b GPU 0");
      CHECK(state() == LeaseState::active);
      CHECK(freeOn("a") == 1);
      CHECK(revokesOf("a") == 1);
      pool->revoked(kA, kLease, now);
      CHECK(freeOn("a") == 2);
    }
    return;
  }
  SECTION("its own server") {
    ordered({"", {1}});
    restarted();
    rejoin({kLease}, {});
    CHECK(state() == LeaseState::moving);
    CHECK(freeOn("a") == 0);
    ordered({});
    CHECK(events.prepares[0].here);
    moves();
    restarted();
    rejoin({kLease}, {});
    CHECK(at() == "a GPU 1");
    REQUIRE(events.settles.size() == 1);
    pool->settled(kLease, events.settles[0].number, now);
    CHECK(freeOn("a") == 1);
  }
}

TEST_CASE_METHOD(Targets,
                 "a moving lease that ends is revoked on both servers, and over when both have said so") {
  ordered({"b"});
  enum class End { released, expired, andRestarted };
  const End how = GENERATE(End::released, End::expired, End::andRestarted);
  if (how == End::expired) {
    now += 11'000;
    beats({kLease}, {kLease});
    pool->tick(now);
  } else {
    pool->release(kAdmin, kLease, now);
  }
  if (how == End::andRestarted) {
    restarted();
    rejoin({kLease}, {kLease});
    CHECK(state() == LeaseState::revoking);
  }
  REQUIRE(revokesOf("a") == 1);
  REQUIRE(revokesOf("b") == 1);
  CHECK(contains(record().reason, how == End::expired ? "renewed" : "released"));
  CHECK(contains(thrown([&] { pool.pool->places(kAdmin, kLease); }), "the lease has ended: "));
  SECTION("both") {
    pool->revoked(kB, kLease, now);
    CHECK_FALSE(events.over.contains(kLease));
    CHECK(state() == LeaseState::revoking);
    pool->revoked(kA, kLease, now);
    CHECK(events.over.contains(kLease));
    CHECK(freeOn("a") + freeOn("b") == 4);
    CHECK_FALSE(stored());
  }
  SECTION("one does not") {
    pool->revoked(kB, kLease, now);
    pool->left("a", kA.incarnation, false, now);
    now += 20'000;
    pool->tick(now);
    CHECK(state() == LeaseState::lost);
    CHECK(events.over.contains(kLease));
    REQUIRE(pool->beat("b", kB.incarnation, {}, {}, 1, now));
    CHECK(freeOn("b") == 2);  // a's are kept
    CHECK(stored()->placements.size() == 1);
    CHECK(stored()->primary().server.name == "a");
    joinAndBeat(server("a", 1, 2), {kLease});
    pool->revoked(kA, kLease, now);
    CHECK(pool.pool->leases().empty());
    CHECK(freeOn("a") == 2);
  }
  SECTION("one after the lease was given up") {
    pool->left("a", kA.incarnation, false, now);
    pool->revokeFailed(kB, kLease, now);
    now += 20'000;
    pool->tick(now);
    CHECK(state() == LeaseState::lost);
    REQUIRE(pool->beat("b", kB.incarnation, {kLease}, {}, 1, now));
    pool->revoked(kB, kLease, now);
    CHECK(freeOn("b") == 2);
    REQUIRE(pool.pool->leases().size() == 1);
    pool->drop(kAdmin, kLease, now);
    CHECK(pool.pool->leases().empty());
  }
}

TEST_CASE_METHOD(Targets, "the lease lives on where its server is not gone") {
  ordered({"b"});
  const auto answered = [&](const char* why) {
    INFO(notMoved());
    CHECK(contains(notMoved(), why));
    CHECK(state() == LeaseState::active);
    CHECK(stored()->placements.size() == 1);
    CHECK_FALSE(events.over.contains(kLease));
  };
  SECTION("the target, when its server is started again") {
    startedAgain(server("a", 9, 2));
    answered("the lease is on b GPU 0 now: its server a was restarted");
    CHECK(at() == "b GPU 0");
    CHECK(freeOn("a") == 2);
  }
  SECTION("the target, when its server leaves") {
    pool->left("a", kA.incarnation, true, now);
    answered("the lease is on b GPU 0 now: its server a left the pool");
    CHECK(at() == "b GPU 0");
  }
  SECTION("the target, when its server does not hold it any more") {
    now += 5000;
    beats({}, {kLease});
    CHECK(contains(notMoved(), "the lease is on b GPU 0 now: its server a no longer holds it"));
    CHECK(at() == "b GPU 0");
    CHECK(freeOn("a") == 1);
    pool->revoked(kA, kLease, now);
    CHECK(freeOn("a") == 2);
  }
  SECTION("the primary, when the target's server is started again") {
    startedAgain(server("b", 9, 2));
    answered("the lease is on a GPU 0 now: its server b was restarted");
    CHECK(at() == "a GPU 0");
    CHECK(freeOn("b") == 2);
    moves();  // late
    CHECK(at() == "a GPU 0");
  }
  SECTION("the target; what still runs on the server that was started again is kept") {
    Server again = server("a", 9, 2);
    again.devices[0].problem = "an old worker runs";
    std::vector<DeviceReport> reports(2);
    reports[0].running = {kLease};
    startedAgain(again, reports);
    REQUIRE(pool->beat("a", {9, 0}, {}, {"an old worker runs", ""}, 1, now));
    CHECK(state() == LeaseState::moving);
    CHECK(contains(refused({}), "server a: it was restarted"));
    REQUIRE(pool->beat("a", {9, 0}, {}, {"", ""}, 1, now));
    CHECK(state() == LeaseState::active);
    CHECK(at() == "b GPU 0");
    CHECK(freeOn("a") == 2);
  }
  SECTION("and ends with the other one") {
    startedAgain(server("a", 9, 2));
    startedAgain(server("b", 9, 2));
    CHECK(events.over.contains(kLease));
    CHECK(freeOn("a") + freeOn("b") == 4);
  }
}

TEST_CASE_METHOD(Targets, "a target that its server has not been told of does not save the lease") {
  SECTION("the store has not accepted it") {
    pool.pool->migrate(kAdmin, kLease, 0, {"b"}, now);
    CHECK(state() == LeaseState::moving);
    SECTION("its server leaves") { pool.pool->left("a", kA.incarnation, true, now); }
    SECTION("its server does not hold it any more") {
      now += 5000;
      REQUIRE(pool.pool->beat("a", kA.incarnation, {}, {}, 1, now));
      CHECK(state() == LeaseState::revoking);
      pool->revoked(kA, kLease, now);
    }
    pool->tick(now);
    CHECK(revokesOf("b") == 0);
  }
  SECTION("it is told, and has it not") {
    migrate({"b"});
    pool->left("a", kA.incarnation, true, now);
    CHECK(state() == LeaseState::active);
    now += 5000;
    REQUIRE(pool->beat("b", kB.incarnation, {}, {}, 1, now));
    CHECK(state() == LeaseState::revoking);
    pool->revoked(kB, kLease, now);
  }
  CHECK(events.over.contains(kLease));
  CHECK(freeOn("b") == 2);
  CHECK_FALSE(stored());
}

TEST_CASE_METHOD(Targets, "a lease that has moved ends with its server, whatever it has left elsewhere") {
  ordered({"b"});
  moves();
  startedAgain(server("b", 9, 2));
  CHECK(state() == LeaseState::revoking);
  CHECK(freeOn("b") == 1);
  pool->revoked(kA, kLease, now);
  CHECK(events.over.contains(kLease));
  CHECK(freeOn("a") + freeOn("b") == 4);
}

TEST_CASE_METHOD(Targets, "what a lease has left is free when its server is gone for good") {
  ordered({"b"});
  moves();
  startedAgain(server("a", 9, 2));
  CHECK(state() == LeaseState::active);
  CHECK(at() == "b GPU 0");
  CHECK(freeOn("a") == 2);
  CHECK(stored()->placements.size() == 1);
}

TEST_CASE_METHOD(Targets, "a device of a lease that has moved away and back") {
  ordered({"b"});
  moves();
  pool->revoked(kA, kLease, now);
  migrate({"a", {0}});
  prepared();
  moves();
  CHECK(at() == "a GPU 0");
  pool->revoked(kB, kLease, now);
  CHECK(freeOn("a") == 1);
  CHECK(freeOn("b") == 2);
  CHECK(record().primary().epoch > events.prepares[0].target.epoch);
}

TEST_CASE_METHOD(Targets, "all devices of a lease move, each to one like it") {
  joinAndBeat(server("c", 3, 3));
  LeaseRequest wish = request(5, 0, 0, 2);
  wish.server = "b";
  pool->request(kAdmin, wish, now);
  pool->granted({5, 5}, now);
  pool->migrate(kAdmin, {5, 5}, 0, {"c", {2, 0}}, now);
  const auto& devices = events.prepares.back().target.devices;
  REQUIRE(devices.size() == 2);
  CHECK(devices[0].info.ordinal == 2);
  CHECK(devices[1].info.ordinal == 0);
  CHECK(pool.pool->list(kAdmin, now).at(1).movesTo == "c GPUs 2,0");
}
