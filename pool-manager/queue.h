#pragma once
// Who waits for devices, and what a round of serving them keeps. For the pool's own files.

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "pool-manager/placement.h"
#include "pool-manager/principal.h"
#include "pool-manager/quotas.h"
#include "pool-manager/records.h"

namespace gpupool::pool {

using HeldCounts = std::map<std::string, Held>;  // by tenant

struct Waiter {
  LeaseRequest request;
  Principal who;
  uint64_t untilMs = 0;
  bool resumes = false;          // request.id is a suspended lease, and nothing else of the request counts
  uint64_t number = 0;           // grows with every request
  Wish wish = {};                // what the request names; its endsMs when it is looked at
  bool noted = false;            // the audit log says that it waits
  std::string folder = {};       // resumes: it is held in these files; empty: its server keeps it
  MoveTarget to = {};            // with a folder: where to
  uint64_t sinceMs = 0;          // it waits
  uint64_t preemptTriedMs = 0;   // leases to preempt for it were looked for then; 0: never
  std::vector<Id> victims = {};  // those that were found last
};
// A wish that was not served in this round: nor is an equal one behind it.
struct Unserved {
  Wish wish;
  bool never = false;
  uint64_t claims = 0;  // Queue::claims, when it had claimed its own
};
// What those who are before the next one leave, while the queue is served. At most one at a time.
struct Queue {
  std::vector<ServerUse>& servers;  // the inventory's, with their claims; without the holders' names
  std::set<Id>& resuming;           // leases that wait to be resumed: what they need is not for those behind
  size_t length = 0;
  mutable HeldCounts held = {};  // what tenants with quotas have, as far as that was asked
  uint64_t claims = 0;           // grows with each that claims more than was
  std::vector<Unserved> unserved = {};
};
// For people, of those who are before the next one: "; 2 earlier requests are waiting"; "": there are none.
inline std::string behind(const Queue& before) {
  return before.length == 0   ? ""
         : before.length == 1 ? "; 1 earlier request is waiting"
                              : "; " + std::to_string(before.length) + " earlier requests are waiting";
}
// A wish for which no leases to preempt were found.
struct NoVictims {
  Wish wish;
  std::string tenant;
  Priority priority = Priority::normal;
  uint64_t atMs = 0;
};

}  // namespace gpupool::pool
