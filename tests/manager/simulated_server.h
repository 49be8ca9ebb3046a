#pragma once
// One simulated server: the life of a gpupool-server process, the leases that it admits, and the workers that
// may outlive it. Times are milliseconds of the simulated world.

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pool-manager/model.h"

namespace gpupool::history {

// A lease that is suspended, on the way there, or on the way back; it has all of its memory but when it is
// suspended.
struct Moving {
  enum class Is { running, suspending, suspended, resuming } is = Is::running;
  bool intoFiles = false;  // suspending: its sessions leave for files
  std::vector<uint64_t> kept;
  uint64_t doneAt = 0;  // suspending, resuming
  std::vector<std::function<void(bool done)>> answers;

  uint64_t bytes(size_t device, uint64_t whole) const {
    return is == Is::suspended ? kept.at(device) : whole;
  }
};

// An order to move the lease's sessions, which are moved one after the other.
struct MoveOrder {
  pool::Lease target;
  uint64_t nextAt = 0;  // of the first one in the queue: when the next session is there
  std::function<void(bool done)> answer;
};

struct Running {
  pool::Lease lease;
  Moving moving;
  uint32_t sessions = 0;              // on the lease's devices
  std::optional<pool::Lease> target;  // other devices of this server
  uint32_t onTarget = 0;              // sessions there
  std::deque<MoveOrder> orders;
  Id held;  // suspended, resuming: the checkpoint that it is in; all zero: it is in no files
  bool closing = false;
  uint64_t goneAt = 0;  // closing: when its workers are gone
  std::vector<std::function<void()>> confirm;
};

// What a lease has on one GPU.
struct Use {
  uint64_t now = 0;       // of what may be leased
  uint64_t aside = 0;     // at least, while it is not its turn
  uint64_t resident = 0;  // when it is its turn; 0: it has none, since it is suspended
  uint32_t share = 0;     // of the GPU's time
};

inline constexpr uint64_t kContext = uint64_t{1} << 30;  // of a lease on a real GPU, besides its memory

struct Orphan {
  pool::Lease lease;  // its server was killed; its worker still runs
  Moving moving;      // as it was
  uint64_t goneAt = 0;
  bool comesBack = false;  // the next life goes on with it, if it is there by then
  uint32_t sessions = 0;   // comesBack: that it has
};

struct SimulatedServer {
  pool::Server facts;  // as it tells them
  uint32_t overcommitPercent = 100;
  bool real = false;  // its GPUs: every lease there has a context
  int host = 0;
  bool alive = true;
  uint64_t startAt = 0;       // not alive: when it is started again
  uint64_t stalledUntil = 0;  // SIGSTOP
  std::map<Id, Running> leases;
  std::vector<Orphan> orphans;
  std::map<Id, uint64_t> readopted;        // with which this life goes on, and the epochs of their placements
  std::map<std::string, uint64_t> epochs;  // highest by UUID; kept in the server's state folder
  int connection = -1;                     // index into the world's; -1: none
  bool joined = false;                     // over this connection
  uint64_t connectAt = 0, beatAt = 0;

  bool runs(uint64_t now) const { return alive && now >= stalledUntil; }
  // Leases that may have a worker on that GPU, of this life or an earlier one, and what each has there. What
  // a lease keeps aside beside its context is known only when it has been there: it does not count before.
  std::map<Id, Use> on(const std::string& uuid) const {
    std::map<Id, Use> uses;
    const uint64_t context = real ? kContext : 0;
    const auto add = [&](const pool::Lease& lease, const Moving& moving) {
      for (size_t i = 0; i < lease.devices.size(); ++i) {
        if (lease.devices[i].info.uuid != uuid) continue;
        const uint64_t device = lease.devices[i].info.memoryBytes, memory = lease.devices[i].memoryBytes;
        const auto with = [&](uint64_t bytes) { return std::min(device, bytes + context); };
        const uint64_t all = with(memory);
        const bool turns = moving.is != Moving::Is::suspended;
        uses[lease.id] = {turns ? all : std::min(all, with(moving.bytes(i, memory))), std::min(all, context),
                          turns ? all : 0, turns ? lease.terms.sharePercent : 0};
      }
    };
    for (const auto& [id, one] : leases) {
      add(one.lease, one.moving);
      if (one.target) add(*one.target, one.moving);
    }
    for (const Orphan& one : orphans) add(one.lease, one.moving);
    return uses;
  }
};

}  // namespace gpupool::history
