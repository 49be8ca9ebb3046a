#pragma once
// A pool with leases of parts of one device, and the orders to suspend and resume them.

#include "pool_fixture.h"

namespace gpupool::test {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

// One server, one device of 80 GiB, and leases 1, 2, ... of a part of it.
struct Suspends : DiskFixture {
  Suspends() { joinAndBeat(server("a", 1)); }
  void lease(uint64_t id, uint64_t memory) {
    pool->request(kAdmin, request(id, 0, memory), now);
    pool->granted({id, id}, now);
    REQUIRE(has(id));
  }
  const LeaseRecord& record(uint64_t id) { return pool.pool->leases().at({id, id}); }
  LeaseState state(uint64_t id) { return record(id).state; }
  uint64_t freeBytes() { return pool.pool->inventory(kAdmin, now).at(0).devices.at(0).freeBytes; }
  LeaseState stored(uint64_t id) {
    for (const Entry& entry : store->range("lease/"))
      if (const auto lease = decodeLease(entry.value, "boot"); lease.id == Id{id, id}) return lease.state;
    return LeaseState::queued;
  }
  void suspend(uint64_t id) { pool->suspend(kAdmin, {id, id}, 30'000, now); }
  void resume(uint64_t id, uint32_t waitMs = 0) { pool->resume(kAdmin, {id, id}, waitMs, now); }
  void serverSuspends(std::vector<uint64_t> kept = {16 * kMiB}) {
    const auto order = events.suspends.back();
    pool->suspendDone(order.id, order.number, {std::move(kept), 10 * kGiB, 100, 300}, now);
  }
  void serverResumes() {
    const auto order = events.resumes.back();
    pool->resumeDone(order.id, order.number, now);
  }
  void suspended(uint64_t id) {
    suspend(id);
    serverSuspends();
    REQUIRE(state(id) == LeaseState::suspended);
  }
  std::string refusal(uint64_t id, bool resumes) {
    return thrown([&] { resumes ? resume(id) : suspend(id); });
  }
  std::string notResumed(uint64_t id) { return events.resumeFailures[{id, id}]; }
  std::string notSuspended(uint64_t id) { return events.suspendFailures[{id, id}]; }
  bool isRunning(uint64_t id) { return events.running.contains({id, id}); }
};

}  // namespace gpupool::test
