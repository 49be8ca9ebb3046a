#pragma once
// Workers started ahead of time, each used for one session.
//
// Keeps `warm` of them ready, besides one per device in `contexts` that holds that device's context already
// (a session starts faster, and 527 MiB of the device are taken), and starts more while sessions wait. Where
// each worker has a /dev of its own (Settings.gpus), it is started for certain devices, and serves sessions
// on exactly these: the `warm` ones are then for the devices of the latest leases and sessions, and at first
// for all. A worker that fails to start, or dies while it waits, is reported with its reason and replaced
// after a pause that doubles up to `longestPause`; one that gets ready resets the pause. Belongs to the event
// loop's thread.

#include <kj/async-io.h>
#include <kj/async-unix.h>

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "server/front/worker_child.h"

namespace gpupool::server {

class WorkerPool final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    WorkerProgram program;
    WorkerParent* parent = &ownChildren();
    std::vector<std::string> arguments;
    uint32_t warm = 2;
    std::vector<int> contexts;  // ordinals
    // Of workers that have their own devices only: each device's PCI address, by ordinal. Empty: every worker
    // has all.
    std::map<int, std::string> gpus;
    bool rdma = false;  // with gpus: they have the nodes of RDMA adapters, too
    // Asked again every contextCheck while a context is missing: false while sessions use its memory.
    std::function<bool(int ordinal)> mayHold = [](int) { return true; };
    kj::Duration contextCheck = 300 * kj::MILLISECONDS;
    kj::Duration contextPause = 30 * kj::SECONDS;  // after a context could not be had
    uint64_t rowsHash = 0;                         // of a worker of this server; another's is not used
    std::vector<std::string> walls;                // by name: a worker without one of them is not used
    uint32_t atOnce = 4;                           // starting at the same time
    kj::Duration startBound = 60 * kj::SECONDS;    // from fork to ready
    kj::Duration firstPause = 100 * kj::MILLISECONDS, longestPause = 10 * kj::SECONDS;
  };

  WorkerPool(kj::UnixEventPort& port, kj::Timer& timer, Settings settings);
  ~WorkerPool();
  KJ_DISALLOW_COPY(WorkerPool);

  // For a session on these devices.
  struct Wanted {
    std::vector<int> ordinals;
    bool context = true;  // it may have one. Not so if it is rebuilt: then it makes them in their first order
  };
  // A ready worker, now the caller's: never one with a context on another device, which would take that
  // device's memory. Rejects after `bound`, saying why there is none.
  kj::Promise<kj::Own<WorkerChild>> take(Wanted wanted, kj::Duration bound);
  // Sessions on these devices are to come: one of the `warm` workers is for them from now on.
  void expect(std::vector<int> ordinals);
  uint32_t warm() const { return static_cast<uint32_t>(ready_.size()); }
  // False after three failures to start in a row: sessions would not start either.
  bool healthy() const { return failures_ < 3; }
  const std::string& lastFailure() const { return lastFailure_; }
  // Ends the waiting workers and starts no more; resolves when they are gone. Who waits for one is told why.
  kj::Promise<void> stop(const std::string& why = "the server is shutting down");
  const WorkerProgram& program() const { return settings_.program; }

 private:
  using View = std::vector<int>;  // which devices a worker has, in order; empty: there is no choice
  struct Slot : kj::Refcounted {
    kj::Own<WorkerChild> child;  // null once taken
    View view;
    int device = -1;         // whose context it holds
    bool dismissed = false;  // it waits for nobody any more, and ends
  };
  struct Waiter {
    kj::Own<kj::PromiseFulfiller<kj::Own<WorkerChild>>> fulfiller;
    Wanted wanted;
  };

  View viewOf(std::vector<int> ordinals) const;
  // 2: with a context on one of the session's devices, 1: with none, 0: of no use.
  int fitness(const Slot& slot, const Wanted& wanted) const;
  kj::Maybe<kj::Own<WorkerChild>> takeReady(const Wanted& wanted);
  void note(const View& view);
  // Of workers without a context, by what they have: how many are to be there. ahead: also for sessions to
  // come.
  std::map<View, size_t> demand(bool ahead) const;
  void refill();
  void dismissOthers(const std::map<View, size_t>& demand);
  void startContexts();
  void checkContextsLater();
  // Ready or about to be.
  size_t count(int device, const View& view) const;
  bool mayStart() const;
  void start(int device, const View& view);
  std::string lacking(schema::WorkerReport::Reader report) const;  // the first wall; empty: none
  kj::Promise<void> awaitReady(kj::Own<Slot> slot);
  kj::Promise<void> watchIdle(kj::Own<Slot> slot);
  // Kills the worker, waits until it is gone and counts the failure.
  kj::Promise<void> discard(kj::Own<Slot> slot, std::string why);
  void suspendContext(int device, const std::string& why);
  void forget(Slot& slot);  // its process is gone
  void failed(const std::string& why);
  void offer(Slot& slot);
  void taskFailed(kj::Exception&& exception) override;

  kj::UnixEventPort& port_;
  kj::Timer& timer_;
  Settings settings_;
  std::deque<kj::Own<Slot>> ready_;
  std::list<Slot*> starting_;
  std::deque<Waiter> waiters_;
  std::deque<View> latest_;  // devices that sessions wanted, the latest first; not empty, and at most `warm`
  std::set<WorkerChild*> alive_;  // started and not taken
  uint32_t failures_ = 0;         // in a row
  std::string lastFailure_;
  bool pausing_ = false;
  bool checking_ = false;
  bool stopped_ = false;
  kj::Vector<kj::Own<kj::PromiseFulfiller<void>>> emptied_;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
