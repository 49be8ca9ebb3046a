#pragma once
// Tells the manager what the programs of each lease have done here (schema::LeaseCounts): the sum over its
// sessions, also of those that have ended. Belongs to the event loop's thread.

#include <kj/function.h>
#include <kj/time.h>

#include <map>

#include "schema/pool.capnp.h"
#include "server/front/leases.h"
#include "server/worker_process.h"

namespace gpupool::server {

class LeaseTally {
 public:
  // Outlives it.
  explicit LeaseTally(const LeaseTable& leases) : leases_(leases) {}

  // A session of the lease has done so much more.
  void add(const Id& lease, const SessionCounts& more);
  // For the heartbeat. ages: of leases that have checkpoints, of the oldest one. What was counted for leases
  // that are here no more is forgotten.
  void report(const std::map<Id, kj::Duration>& ages,
              kj::Function<capnp::List<schema::LeaseCounts>::Builder(unsigned)> room);

 private:
  const LeaseTable& leases_;
  std::map<Id, SessionCounts> counts_;
};

}  // namespace gpupool::server
