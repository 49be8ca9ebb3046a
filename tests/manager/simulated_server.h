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

// A lease that is suspended, on the way there, or on the way back; it has all of its memory but when it is
// suspended.
struct Moving {
  enum class Is { running, suspending, suspended, resuming } is = Is::running;
  std::vector<uint64_t> kept;
  uint64_t doneAt = 0;  // suspending, resuming
  std::vector<std::function<void(bool done)>> answers;

  uint64_t bytes(size_t device, uint64_t whole) const {
    return is == Is::suspended ? kept.at(device) : whole;
  }
};

struct Running {
  pool::Lease lease;
  Moving moving;
  bool closing = false;
  uint64_t goneAt = 0;  // closing: when its workers are gone
  std::vector<std::function<void()>> confirm;
};

struct Orphan {
  pool::Lease lease;  // its server was killed; its worker still runs
  Moving moving;      // as it was
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
  bool joined = false;                     // over this connection
  uint64_t connectAt = 0, beatAt = 0;

  bool runs(uint64_t now) const { return alive && now >= stalledUntil; }
  // Leases that may have a worker on that GPU, of this life or an earlier one, and what each has there.
  std::map<Id, uint64_t> on(const std::string& uuid) const {
    std::map<Id, uint64_t> bytes;
    const auto add = [&](const pool::Lease& lease, const Moving& moving) {
      for (size_t i = 0; i < lease.devices.size(); ++i)
        if (lease.devices[i].info.uuid == uuid)
          bytes[lease.id] = moving.bytes(i, lease.devices[i].memoryBytes);
    };
    for (const auto& [id, one] : leases) add(one.lease, one.moving);
    for (const Orphan& one : orphans) add(one.lease, one.moving);
    return bytes;
  }
};

}  // namespace gpupool::history
