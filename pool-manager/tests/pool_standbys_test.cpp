// Which server keeps the checkpoints of a lease: the pure choice, and what becomes of it when servers come,
// go silent and die.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

Server keeper(const std::string& name, const std::string& host, uint64_t incarnation = 1) {
  Server facts = server(name, incarnation);
  facts.bootId = host;
  facts.keepBytes = 4 * kGiB;
  return facts;
}

// On the server a of host 1, with others beside it.
struct Standbys : Suspends {
  Standbys() {
    pool->left("a", {1, 0}, true, now);
    here = keeper("a", "host 1", 2);
    joinAndBeat(here);
  }
  void protectedLease(uint64_t id, bool standbyKeeps = true) {
    LeaseRequest wish = request(id, 0, 20 * kGiB);
    wish.server = "a";
    wish.turns.protectMs = 1000;
    wish.turns.holderKeeps = true;
    wish.turns.standbyKeeps = standbyKeeps;
    pool->request(kAdmin, wish, now);
    pool->granted({id, id}, now);
    REQUIRE(state(id) == LeaseState::active);
  }
  std::string standby(uint64_t id = 1) { return record(id).standby; }
  std::string said() {
    const auto lines = pool->list(kAdmin, now).at(0).protection;
    return lines.empty() ? "" : lines.back();
  }
  // Those that are there beat, and time goes on.
  void wait(uint64_t ms, const std::vector<Server>& there) {
    for (uint64_t at = 0; at < ms; at += 500) {
      now += 500;
      for (const Server& one : there) {
        std::vector<Id> leases;
        for (const auto& [id, record] : pool.pool->leases())
          if (record.isPlacedOn(one.name)) leases.push_back(id);
        REQUIRE(pool->beat(one.name, one.incarnation, leases, {}, 1, now));
      }
      pool->renew(kAdmin, {1, 1}, now, &why);
      pool->tick(now);
    }
  }
  void keeps(const Server& one, const std::vector<KeptLease>& kept) {
    events.keeps.clear();
    events.drops.clear();
    pool->setKept(one.name, kept, now);
  }

  Server here;
  std::string why;
};

}  // namespace

TEST_CASE_METHOD(Standbys, "the standby is on another host, and has such GPUs and memory for checkpoints") {
  const Server beside = keeper("b", "host 1"), away = keeper("c", "host 2");
  joinAndBeat(beside);
  SECTION("there is one") {
    Server other = keeper("d", "host 3");
    other.devices[0].driverVersion = 13'000;  // another driver than the lease's
    joinAndBeat(other);
    Server small = keeper("e", "host 4");
    small.keepBytes = 0;
    joinAndBeat(small);
    joinAndBeat(away);
    protectedLease(1);
    CHECK(standby() == "c");
    REQUIRE(events.leases.at({1, 1}).standby);
    CHECK(events.leases.at({1, 1}).standby->name == "c");
    REQUIRE(events.keeps.size() == 1);
    CHECK(events.keeps[0].first.name == "c");
    CHECK(events.keeps[0].second.server.name == "a");
    CHECK(events.keeps[0].second.key == events.leases.at({1, 1}).key);
    CHECK(said() == "has its checkpoints kept by its standby, server c");
    CHECK(pool->inventory(kAdmin, now).at(2).devices.at(0).freeBytes == leasableBytes(80 * kGiB, 100));
  }
  SECTION("there is none: one of the same host, which is said") {
    protectedLease(1);
    CHECK(standby() == "b");
    CHECK(contains(said(), "which is on the same host"));
    joinAndBeat(away);
    wait(12'000, {here, beside, away});
    CHECK(standby() == "c");  // it has come since
  }
  SECTION("not asked for") {
    joinAndBeat(away);
    protectedLease(1, false);
    CHECK(standby().empty());
    CHECK(said().empty());
  }
}

TEST_CASE_METHOD(Standbys, "without a standby the holder keeps them, and it is said why") {
  SECTION("no other server") {
    protectedLease(1);
    CHECK(said() == "has no standby, and its holder keeps its checkpoints: there is no other server");
    CHECK_FALSE(events.leases.at({1, 1}).standby);
    const Server away = keeper("c", "host 2");
    joinAndBeat(away);
    wait(3'000, {here, away});
    CHECK(standby() == "c");
    REQUIRE(pool->standbyOf(Id{1, 1}));
    CHECK(pool->standbyOf(Id{1, 1})->name == "c");
  }
  SECTION("one that keeps none") {
    Server other = keeper("c", "host 2");
    other.keepBytes = 0;
    joinAndBeat(other);
    protectedLease(1);
    CHECK(contains(said(), "c: keeps no checkpoints"));
  }
  SECTION("one with other GPUs") {
    Server other = keeper("c", "host 2");
    other.devices[0].name = "another";
    joinAndBeat(other);
    protectedLease(1);
    CHECK(contains(said(), "c: has no GPUs of that model and driver"));
  }
}

TEST_CASE_METHOD(Standbys, "several leases are spread over the servers that can keep them") {
  joinAndBeat(keeper("b", "host 2"));
  joinAndBeat(keeper("c", "host 3"));
  for (uint64_t id = 1; id <= 4; ++id) {
    pool->request(kAdmin, request(id + 10, 0, kGiB), now);  // others, without one
    LeaseRequest wish = request(id, 0, kGiB);
    wish.server = "a";
    wish.turns = {.protectMs = 1000, .holderKeeps = true, .standbyKeeps = true};
    pool->request(kAdmin, wish, now);
    pool->granted({id, id}, now);
  }
  CHECK(standby(1) == "b");
  CHECK(standby(2) == "c");
  CHECK(standby(3) == "b");
  CHECK(standby(4) == "c");
}

TEST_CASE_METHOD(Standbys, "a standby that cannot serve any more is replaced") {
  const Server b = keeper("b", "host 2"), c = keeper("c", "host 3");
  joinAndBeat(b);
  joinAndBeat(c);
  protectedLease(1);
  REQUIRE(standby() == "b");
  const uint64_t before = record(1).standbyEpoch;
  SECTION("it is silent") { wait(7'000, {here, c}); }
  SECTION("it has left") {
    pool->left("b", {1, 0}, true, now);
    wait(1'000, {here, c});
    joinAndBeat(keeper("b", "host 2", 2));
  }
  SECTION("it is cordoned") {
    pool->cordon(kAdmin, "b", {"repair", "eve", 0}, [](const std::string&) {});
    wait(1'000, {here, b, c});
  }
  CHECK(standby() == "c");
  CHECK(record(1).standbyEpoch > before);
  REQUIRE(!events.keeps.empty());
  CHECK(events.keeps.back().first.name == "c");
  // It comes back, or is there still, and has what it had.
  keeps(b, {{{1, 1}, before, record(1).primary().epoch}});
  REQUIRE(events.drops.size() == 1);
  CHECK(events.drops[0].first.name == "b");
  CHECK(events.keeps.empty());
}

TEST_CASE_METHOD(Standbys, "a standby is told again until it says that it keeps what it is to keep") {
  const Server b = keeper("b", "host 2");
  joinAndBeat(b);
  protectedLease(1);
  const uint64_t number = record(1).standbyEpoch, epoch = record(1).primary().epoch;
  keeps(b, {});
  CHECK(events.keeps.size() == 1);
  keeps(b, {{{1, 1}, number, epoch}});
  CHECK(events.keeps.empty());
  CHECK(events.drops.empty());
  keeps(b, {{{1, 1}, number, epoch - 1}});  // from where the lease was
  CHECK(events.keeps.size() == 1);
  keeps(b, {{{9, 9}, 1, 1}, {{1, 1}, number, epoch}});  // one that nobody knows
  REQUIRE(events.drops.size() == 1);
  CHECK(events.drops[0].second == Id{9, 9});
  SECTION("the manager is started again") {
    restart();
    joinAndBeat(here, {{1, 1}});
    joinAndBeat(b);
    CHECK(standby() == "b");
    keeps(b, {{{1, 1}, number, epoch}});
    CHECK(events.drops.empty());
    CHECK(events.keeps.empty());
  }
  SECTION("the lease ends") {
    pool->release(kAdmin, {1, 1}, now);
    keeps(b, {{{1, 1}, number, epoch}});
    CHECK(events.drops.size() == 1);
    pool->revoked({"a", {2, 0}}, {1, 1}, now);
    keeps(b, {{{1, 1}, number, epoch}});
    CHECK(events.drops.size() == 1);
    CHECK(events.keeps.empty());
  }
}

TEST_CASE_METHOD(Standbys, "a lease whose server is lost goes to its standby if that has room") {
  const Server b = keeper("b", "host 2"), c = keeper("c", "host 3");
  joinAndBeat(b);
  joinAndBeat(c);
  protectedLease(1);
  REQUIRE(standby() == "b");
  // By the usual policy the fullest server would be chosen.
  LeaseRequest other = request(2, 0, 30 * kGiB);
  other.server = "c";
  pool->request(kAdmin, other, now);
  pool->granted({2, 2}, now);
  const uint64_t number = record(1).standbyEpoch;
  SECTION("it has") {
    pool->left("a", {2, 0}, false, now);
    pool->failOver(kAdmin, {1, 1}, {"a", {2, 0}}, 1, now);
    CHECK(events.grants.back().server.name == "b");
    pool->granted({1, 1}, now);
    CHECK(contains(pool->audit(kAdmin, {}, 100).back().reason, "from its standby's memory"));
    wait(1'000, {b, c});
    CHECK(standby() == "c");  // it cannot be its own
    keeps(b, {{{1, 1}, number, 1}});
    CHECK(events.drops.size() == 1);
  }
  SECTION("it has not") {
    LeaseRequest whole = request(3);
    whole.server = "b";
    pool->request(kAdmin, whole, now);
    pool->granted({3, 3}, now);
    pool->left("a", {2, 0}, false, now);
    events.keeps.clear();
    pool->failOver(kAdmin, {1, 1}, {"a", {2, 0}}, 1, now);
    CHECK(events.grants.back().server.name == "c");
    CHECK(events.keeps.empty());  // not before the server has it
    pool->granted({1, 1}, now);
    CHECK(standby() == "b");
    REQUIRE(events.keeps.size() == 1);  // it hears where to
    CHECK(events.keeps[0].second.server.name == "c");
  }
}
