#pragma once
// Moves the sessions of a lease to other workers of this server, one after the other.
//
// From the order on no session of the lease begins (LeaseTable::pauseToMove). For each session a waiting
// worker is taken, which rebuilds it; the session's worker gets the order to move, with a connection to the
// copier and with one end of the state socket, of which the other worker has the other end. What they make of
// it is SessionTable's: the session is in the other worker or where it was, never in both. The lease keeps
// its devices and its memory. A session that ends meanwhile counts as gone.
//
// Epochs: a session moves as its worker's epoch and one. After a move that failed it is that one again, also
// where a client had come with it.
//
// Takes its turn with the orders to suspend and to resume the lease (Suspension::lanes). A lease that is
// suspended or aside is refused; turns leave one alone that moves. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <functional>
#include <string>
#include <vector>

#include "server/front/suspension.h"
#include "server/front/worker_pool.h"
#include "server/front/worker_starts.h"

namespace gpupool::server {

// MigrateResult.
struct Migrated {
  uint32_t sessions = 0;
  uint64_t movedBytes = 0;
  uint32_t longestPauseMs = 0;
};

class Migration final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    // Each call is a new connection to the copier, for one session. Rejects, saying why there is none.
    std::function<kj::Promise<kj::AutoCloseFd>()> copier;
    std::string refusal;   // not empty: nothing moves here, and why
    bool disturb = false;  // workers may ask to be moved (GPUPOOL_DISTURB)
    // A worker has so long for an order, besides what its programs have to finish.
    kj::Duration bound = 300 * kj::SECONDS;
    kj::Duration workerBound = 20 * kj::SECONDS;  // until there is another one
  };

  // With `disturb`: takes over SessionTable::onDisturb, as Suspension does.
  Migration(LeaseTable& leases, SessionTable& sessions, Suspension& suspension, WorkerPool& pool,
            const WorkerStarts& starts, Settings settings);
  ~Migration() noexcept;
  KJ_DISALLOW_COPY(Migration);

  // ServerControl.migrate; rejects with a text for people. Sessions that had moved before one that could not
  // stay where they are then.
  kj::Promise<Migrated> migrate(const Id& lease, uint32_t drainMs);
  // No session begins to move any more.
  void stop() { stopped_ = true; }

 private:
  kj::Promise<Migrated> migrateNow(Id lease, uint32_t drainMs);
  // `numbers` from `at` on.
  kj::Promise<Migrated> moveRest(Id lease, std::vector<uint64_t> numbers, size_t at, uint32_t drainMs,
                                 Migrated total);
  // Rejects where no order was given.
  kj::Promise<MoveAnswer> moveOne(Id lease, uint64_t number, uint32_t drainMs);
  kj::Promise<MoveAnswer> moveTo(Id lease, uint64_t number, uint32_t drainMs, kj::Own<WorkerChild> next,
                                 kj::AutoCloseFd copier);
  kj::Promise<void> disturbNow(Id lease, uint64_t number);
  void taskFailed(kj::Exception&& exception) override;

  LeaseTable& leases_;
  SessionTable& sessions_;
  Suspension& suspension_;
  WorkerPool& pool_;
  const WorkerStarts& starts_;
  Settings settings_;
  bool stopped_ = false;
  uint64_t disturbed_ = 0, undisturbed_ = 0;  // asked for, and moved or not
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
