#pragma once
// One simulated server: the life of a gpupool-server process, the leases that it admits, and the workers that
// may outlive it. Times are milliseconds of the simulated world.

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "pool-manager/model.h"

namespace gpupool::history {

struct Running {
  pool::Lease lease;
  bool closing = false;
  uint64_t goneAt = 0;  // closing: when its workers are gone
  std::vector<std::function<void()>> confirm;
};

struct Orphan {
  pool::Lease lease;  // its server was killed; its worker still runs
  uint64_t goneAt = 0;
};

struct SimulatedServer {
  pool::Server facts;
  int host = 0;
  bool alive = true;
  uint64_t startAt = 0;       // not alive: when it is started again
  uint64_t stalledUntil = 0;  // SIGSTOP
  std::map<Id, Running> leases;
  std::vector<Orphan> orphans;
  std::map<std::string, uint64_t> epochs;  // highest by UUID; kept in the server's state folder
  int connection = -1;                     // index into the world's; -1: none
  uint64_t connectAt = 0, beatAt = 0;

  bool runs(uint64_t now) const { return alive && now >= stalledUntil; }
  // Leases that may have a worker on that GPU, of this life or an earlier one.
  std::vector<const pool::Lease*> on(const std::string& uuid) const {
    std::vector<const pool::Lease*> list;
    const auto uses = [&](const pool::Lease& lease) {
      for (const auto& device : lease.devices)
        if (device.info.uuid == uuid) return true;
      return false;
    };
    for (const auto& [id, one] : leases)
      if (uses(one.lease)) list.push_back(&one.lease);
    for (const Orphan& one : orphans)
      if (uses(one.lease)) list.push_back(&one.lease);
    return list;
  }
};

}  // namespace gpupool::history
