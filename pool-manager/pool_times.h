#pragma once
// How patient a pool is, and when and where it starts.

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace gpupool::pool {

// What a request of a higher class that finds no devices does to leases of lower ones.
enum class Preemption : uint32_t {
  off,      // nothing
  suspend,  // they are suspended, if they can be
  revoke    // and those that cannot be end, after a notice
};
struct PreemptTimes {
  Preemption what = Preemption::off;
  uint32_t graceMs = 30'000;    // what runs on the devices has so long to finish
  uint32_t noticeMs = 30'000;   // between the notice and the end
  uint32_t minRunMs = 600'000;  // a lease has its devices for so long at least, each time
};

struct PoolTimes {
  uint32_t beatMs = 1000;      // servers beat this often
  uint32_t sampleMs = 30'000;  // an older sample says nothing
  uint32_t silentMs = 5000;    // and are not placed on after this long without
  uint32_t minTtlMs = 1000, maxTtlMs = 3'600'000;
  uint32_t driftMs = 500;      // clocks and message delays, added to every deadline
  uint32_t killMs = 3000;      // what a server needs to end a lease's sessions
  uint32_t takeOverMs = 1500;  // another holder takes a lease over whose holder was killed, or it ends
  uint32_t tombstoneMs = 3'600'000;
  uint64_t halfLifeMs = 86'400'000;     // half of what a tenant has used is forgotten after this
  uint32_t idleMs = 0, mostIdleMs = 0;  // TurnTerms::idleMs of leases that name none; at most; 0: none
  PreemptTimes preempt;
  std::map<std::string, double> weights;  // by tenant; the others have 1
  size_t auditEntries = 10'000;
};

// When and where a manager starts.
struct PoolStart {
  std::string bootId;      // of this machine
  uint64_t nowMs = 0;      // on the clock of every later call
  uint64_t calendarS = 0;  // seconds since 1970; epochs start above it
  std::string mark;        // different for every start
};

}  // namespace gpupool::pool
