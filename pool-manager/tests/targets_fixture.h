#pragma once
// A pool with a lease that moves between two servers, and the orders for that.

#include "pool_fixture.h"

namespace gpupool::test {

inline const Id kLease{1, 1};
inline const ServerLife kOther{"b", {2, 0}};

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
  void moves() { moves(events.migrates.back().number); }
  void moves(uint64_t order) { pool->migrateDone(kLease, order, {2, 10 * kGiB, 700}, now); }
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
    REQUIRE(pool->beat("b", kOther.incarnation, onB, {}, 1, now));
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

inline MoveTarget elsewhere() { return {"", {}, true}; }

}  // namespace gpupool::test
