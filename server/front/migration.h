#pragma once
// Moves the sessions of a lease to other workers, one after the other: of this server, on the devices that
// the lease has or on those that were reserved as its target, or of another server.
//
// From the order on no session of the lease begins (LeaseTable::pauseToMove). For each session a waiting
// worker is taken, which rebuilds it; the session's worker gets the order to move, with a connection to the
// copier and with one end of the state socket, of which the other worker has the other end. To another server
// the state socket is a connection to it, and there is no copier between (departure.h). What they make of
// it is SessionTable's: the session is in the other worker or where it was, never in both. The lease keeps
// its devices and its memory, until its move is settled. A session that ends meanwhile counts as gone, one
// that is at the target already is left alone.
//
// Epochs: a session moves as its worker's epoch and one. After a move that failed it is that one again, also
// where a client had come with it.
//
// Takes its turn with the orders to suspend and to resume the lease (Suspension::lanes). A lease that is
// suspended is refused. One that is aside, where leases take turns, wants its devices for that, and moves in
// its turn: its memory has to be there. Turns leave one alone that moves. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "server/front/departure.h"
#include "server/front/suspension.h"
#include "server/front/worker_pools.h"
#include "server/front/worker_starts.h"

namespace gpupool::server {

// MigrateResult.
struct Migrated {
  uint32_t sessions = 0;
  uint64_t movedBytes = 0;
  uint32_t longestPauseMs = 0;
};

// ServerControl.migrate's target, as this server reads it.
struct MoveTarget {
  uint64_t deviceEpoch = 0;  // of the lease's placement there
  Destination server;
};

class Migration final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    std::string server;  // ServerInfo.name
    // Each call is a new connection to the copier, for one session. Rejects, saying why there is none.
    std::function<kj::Promise<kj::AutoCloseFd>()> copier;
    std::string refusal;         // not empty: nothing moves from worker to worker of this server, and why
    bool disturb = false;        // workers may ask to be moved (GPUPOOL_DISTURB)
    bool disturbStream = false;  // with disturb: as if to another server
    // A worker has so long for an order, besides what its programs have to finish.
    kj::Duration bound = 300 * kj::SECONDS;
    kj::Duration workerBound = 20 * kj::SECONDS;  // until there is another one
    kj::Duration arrivalBound =
        25 * kj::SECONDS;  // until another server has one: its Admission's bound, and some
    kj::Duration leftBound = 30 * kj::SECONDS;  // from the last move to another server to the lease's revoke
    // Where leases take turns: this one wants its devices, for some time. Not set: they take none.
    std::function<void(const Id&)> wake = nullptr;
    kj::Duration turnBound = 10 * kj::MINUTES;  // until a lease that is aside has its turn
  };

  // With `disturb`: takes over SessionTable::onDisturb, as Suspension does.
  Migration(kj::Network& network, kj::Timer& timer, LeaseTable& leases, SessionTable& sessions,
            Suspension& suspension, WorkerPools& pool, const WorkerStarts& starts, Settings settings);
  ~Migration() noexcept;
  KJ_DISALLOW_COPY(Migration);

  // ServerControl.migrate; rejects with a text for people. Sessions that had moved before one that could not
  // stay where they are then. No target: to other workers, where the lease is.
  kj::Promise<Migrated> migrate(const Id& lease, uint32_t drainMs,
                                std::optional<MoveTarget> target = std::nullopt);
  // ServerControl.settle; rejects with a text for people. Resolves when no worker is left on the side that
  // goes.
  kj::Promise<void> settle(const Id& lease, bool moved);
  // No session begins to move any more.
  void stop() { stopped_ = true; }

 private:
  // An order under way.
  struct Order {
    Id lease;
    uint32_t drainMs = 0;
    std::optional<MoveTarget> target;
    bool stream = false;  // as if to another server (tests)
  };
  bool isElsewhere(const Order& order) const;
  // Why the lease cannot move so now; empty: it can.
  std::string refuses(const Order& order, const Grant& grant) const;
  // Likewise, of its sessions, when all of them are there: before the first one moves.
  std::string refusesThere(const Order& order) const;
  bool waitsForTurn(const Id& lease, kj::TimePoint until) const;
  kj::Promise<Migrated> migrateInTurn(Order order, kj::TimePoint until);
  kj::Promise<Migrated> migrateNow(Order order);
  void unpauseLater(const Id& lease);
  std::vector<uint64_t> those(const Order& order) const;
  // `numbers` from `at` on.
  kj::Promise<Migrated> moveRest(Order order, std::vector<uint64_t> numbers, size_t at, Migrated total);
  // Each of these rejects where no order was given.
  kj::Promise<MoveAnswer> moveOne(Order order, uint64_t number);
  kj::Promise<MoveAnswer> moveHere(Order order, uint64_t number, const Placement& placement);
  kj::Promise<MoveAnswer> moveTo(Order order, uint64_t number, SessionFacts facts, kj::Own<WorkerChild> next,
                                 kj::AutoCloseFd copier);
  kj::Promise<MoveAnswer> moveAway(Order order, uint64_t number);
  kj::Promise<void> settleNow(Id lease, bool moved);
  std::string refusesSettling(const Grant& grant, bool moved) const;
  kj::Promise<void> disturbNow(Id lease, uint64_t number);
  void taskFailed(kj::Exception&& exception) override;

  kj::Network& network_;
  kj::Timer& timer_;
  LeaseTable& leases_;
  SessionTable& sessions_;
  Suspension& suspension_;
  WorkerPools& pool_;
  const WorkerStarts& starts_;
  Settings settings_;
  bool stopped_ = false;
  uint64_t disturbed_ = 0, undisturbed_ = 0;  // asked for, and moved or not
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
