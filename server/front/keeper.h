#pragma once
// Keeps a checkpoint of each session of a protected lease (`gpupool run --protect`), and restores the session
// in another worker when its own dies.
//
// A session is checkpointed into memory of this process, by itself and by the clock: once an interval if
// frames have come since, when its program has sent none for a moment, or when it has sent frames for a whole
// interval. Before the interval is over it is checkpointed when its program pauses, for nobody waits then,
// and if its worker dies before the next call, nothing has to be made again. Where pauses are many,
// checkpoints take a tenth of the time at most (idleTimes). The first one comes at once, for until it is
// there nothing can be restored, and a session that has just begun has little to keep; the second one a
// second later. Its GPUs must be idle within 100 ms, else it is tried again, more and more rarely. Only what
// has changed comes (server/files/kept_pages.h), and the last whole checkpoint is kept until the next one is
// whole: there must be room for one and for what has changed.
//
// When the process of its worker is gone, and nobody has ended the session, its client is told so
// (transport::kFailoverWords) and asks for the session's next epoch; it is told to ask again (Admission)
// until another worker has rebuilt it. Then the client sends what it has sent since again, and whether it may
// go on from there is the client's to find out (client/failover.cpp). It keeps all that until it is told that
// a later checkpoint is whole; where its log fills up, it asks for the next one early. A checkpoint from
// which a session was restored twice, and whose worker died again, is not tried a third time. While a lease
// is suspended there is no memory for that: where the holder keeps the checkpoints, it brings the last one
// when the lease is resumed.
//
// Where the lease's holder keeps the checkpoints (Grant::holderKeeps), or another server does as its standby
// (Grant::standbyKeeps), each one is sent there, too (CheckpointDesk), and the client is told that it is kept
// when whoever keeps it has said so: it may go on when this whole server is gone. When it is, that one brings
// it to another one (`bring`), which rebuilds it in the same way. The second one follows the very first one
// soon: what programs do as they begin is much, and often cannot be made again. Until there is a first one,
// the client has all its calls, and the session is made again from its beginning: its next worker is as a new
// session's one.
//
// What keeps a session from being protected is told to people (`say`). Takes its turn with the other orders
// for a lease (Suspension::lanes). Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/files/kept_pages.h"
#include "server/front/checkpoint_desk.h"
#include "server/front/keep_budget.h"
#include "server/front/session_restorer.h"
#include "server/front/suspension.h"
#include "server/front/worker_pools.h"
#include "server/front/worker_starts.h"

namespace gpupool::server {

class Keeper final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    uint64_t mostBytes = 0;  // of all checkpoints together, those that are being made with them
    uint32_t drainMs = 100;
    kj::Duration look = 200 * kj::MILLISECONDS;
    kj::Duration secondAfter = 1 * kj::SECONDS;  // the first one; where the interval is longer
    // In a pause of the program: not before a thirtieth of the interval has passed since the last one, nor
    // ten times what that one took until whoever keeps it had it.
    unsigned idlePart = 30, idleTimes = 10;
    // Then twice as long each time, 30 s at most: of a session that has no checkpoint yet, and of others.
    kj::Duration soonRetry = 200 * kj::MILLISECONDS, firstRetry = 1 * kj::SECONDS;
    kj::Duration offerAgain = 3 * kj::SECONDS;    // each time the whole file is made anew
    kj::Duration bound = 1 * kj::HOURS;           // a worker has so long for its session
    kj::Duration workerBound = 20 * kj::SECONDS;  // until there is one to restore a session in
    kj::Duration clients = 10 * kj::MINUTES;      // until the client of a restored session is there
    CheckpointDesk::Settings desk;
    // A later checkpoint of the session is away from this server now.
    std::function<void(const Id& lease, const Id& session)> shipped = [](const Id&, const Id&) {};
    // There is no room for the session's next checkpoint, nor for the last one on its way: what this server
    // still has of it as its standby (Standby) goes, for the session goes on here from a copy of that.
    std::function<void(const Id& lease, const Id& session)> tight = [](const Id&, const Id&) {};
    bool disturb = false;  // tests: workers ask for checkpoints (GPUPOOL_DISTURB)
    bool diesToo = false;  // tests: when a worker of a session has died, so does this process
  };
  // Takes over SessionTable::onDeath.
  Keeper(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, Suspension& suspension,
         WorkerPools& pool, const WorkerStarts& starts, Settings settings);
  ~Keeper() noexcept;
  KJ_DISALLOW_COPY(Keeper);

  // Of a session whose client asks for that epoch: none: it does not fail over. Else "": it is being
  // restored, or why that failed.
  std::optional<std::string> failingOver(const SessionFacts& client) const {
    return restorer_.failingOver(client);
  }
  // By lease, of those that are protected: LeaseHindrances.protection.
  std::map<Id, std::vector<std::string>> say() const;
  // By lease, of those that have checkpoints: how old the oldest is that a session would go on from.
  std::map<Id, kj::Duration> ages() const;
  CheckpointDesk& desk() { return desk_; }
  const std::shared_ptr<KeepBudget>& budget() const { return budget_; }
  // Its bytes follow on the stream. What there is of the session here ends.
  void bring(kj::Own<kj::AsyncIoStream> stream, const BroughtSession& brought);
  // Can it go on at another server: from a checkpoint that its lease's holder has, or from its beginning?
  bool leaves(const SessionFacts& facts) const;
  bool anyLeaves() const;
  bool anyLeaves(const Id& lease) const;
  // No session is written or restored any more.
  void stop() {
    stopped_ = true;
    restorer_.stop();
  }

 private:
  struct Writing;
  struct Kept {  // of a session
    uint64_t epoch = 0;
    std::string who;
    std::shared_ptr<const KeptPages> pages;  // the last whole checkpoint; null: none yet
    std::shared_ptr<PageStore> store;        // where those of the session are
    kj::TimePoint since = kj::origin<kj::TimePoint>(),
                  at = kj::origin<kj::TimePoint>();                  // of the first, the last
    kj::TimePoint next = kj::origin<kj::TimePoint>();                // not before
    kj::Duration retry = 0 * kj::SECONDS;                            // 0: the last attempt was no failure
    kj::Duration took = 0 * kj::SECONDS, wayTook = 0 * kj::SECONDS;  // the last one; its way to who keeps it
    kj::TimePoint offered = kj::origin<kj::TimePoint>();             // when that began
    bool idle = false;  // the one that is being made: because its program pauses, before its time
    bool idleOver =
        false;           // such a one has failed since the last checkpoint: there is no other before the next
    uint64_t seen = 0;   // SessionTable::Sending.changes at the last checkpoint
    bool asked = false;  // tests: its worker has asked for one
    std::string why;     // the last attempt failed
    bool beginning = false;  // its client has not been told of any: it has its calls since the beginning
    ClientLog log;
    bool writing = false;
    unsigned restored = 0;    // from the last checkpoint
    unsigned times = 0;       // its client has gone on from one
    bool serverLost = false;  // the holder has brought it here, and no checkpoint was made here yet
    // Where the holder keeps them, too:
    std::shared_ptr<CheckpointDesk::File> brought;  // from which it began here, until there is a later one
    bool offering = false;
    Id shipped;                                             // KeptPages.id of what the holder has
    uint64_t shippedOver = 0;                               // CheckpointDesk.connection
    kj::TimePoint shippedAt = kj::origin<kj::TimePoint>();  // when that was made
    kj::TimePoint offerNext = kj::origin<kj::TimePoint>();  // not before
    std::string notShipped;                                 // why the last one is not there
  };
  using Name = SessionRestorer::Name;

  kj::Promise<void> lookAgain();
  void look();
  void lookAt(const Grant& grant, uint64_t number);
  // With what is known of a session that is seen for the first time.
  Kept& keptOf(const Name& name, const SessionFacts& facts);
  void restore(const Name& name, const SessionFacts& next, const Kept& kept);
  bool isDue(const Kept& kept, uint64_t number, kj::Duration interval) const;
  bool isDueIdle(const Kept& kept, uint64_t number, kj::Duration interval) const;
  // Why a session of the lease cannot be protected at all; empty: it can.
  std::string refuses(const SessionFacts& facts) const;
  std::shared_ptr<PageStore> makeStore() const;
  void lookToOffer(const Name& name, uint64_t number);
  void makeRoom(const Name& name, uint64_t bytes);
  void offered(const Name& name, const KeptPages& pages, kj::TimePoint made, const std::string& why,
               uint64_t bytes = 0, uint64_t connection = 0);
  kj::Promise<void> receive(kj::Own<kj::AsyncIoStream> stream, BroughtSession brought);
  std::string refusesBrought(const SessionFacts& facts) const;
  void write(const Name& name, uint64_t number);
  kj::Promise<void> writeNow(Name name, uint64_t number);
  void written(const Name& name, uint64_t number, const Writing& writing);
  std::string describe(const Kept& kept, bool holderKeeps, const std::string& awayKeeper) const;
  // Who keeps the lease's checkpoints, or is to; for people.
  std::string keeperOf(const Id& lease) const;
  std::string describeBeginning(const Kept& kept, const std::string& why) const;
  static std::optional<kj::TimePoint> madeAt(const Kept& kept, bool holderKeeps);
  static std::string restoredTimes(const Kept& kept);
  void failed(Kept& kept, const std::string& why);
  std::string died(const SessionFacts& facts);
  bool restoresAfterDeath(const SessionFacts& facts);
  // SessionRestorer::Settings.again
  bool again(const Name& name);
  void taskFailed(kj::Exception&& exception) override;

  kj::Timer& timer_;
  LeaseTable& leases_;
  SessionTable& sessions_;
  Suspension& suspension_;
  Settings settings_;
  const std::shared_ptr<KeepBudget> budget_;
  CheckpointDesk desk_;
  std::map<Name, Kept> kept_;
  SessionRestorer restorer_;
  bool stopped_ = false;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
