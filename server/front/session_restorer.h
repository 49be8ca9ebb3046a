#pragma once
// Has another worker rebuild a session whose own is gone, from what Keeper has kept of it. Until that is
// done, whoever asks for the session's next epoch is told to ask again (Admission). Takes its turn with the
// other orders for a lease (Suspension::lanes). Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "server/front/play_back.h"
#include "server/front/suspension.h"
#include "server/front/worker_pools.h"
#include "server/front/worker_starts.h"

namespace gpupool::server {

class SessionRestorer final : private kj::TaskSet::ErrorHandler {
 public:
  using Name = std::pair<Id, Id>;  // lease, session
  struct Settings {
    kj::Duration workerBound;  // until there is one to restore a session in
    kj::Duration clients;      // until the client of a restored session is there
    // An attempt has failed: is there to be one more? False: what was kept of the session is of no use.
    std::function<bool(const Name& name)> again;
  };
  SessionRestorer(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, Suspension& suspension,
                  WorkerPools& pool, const WorkerStarts& starts, Settings settings);
  KJ_DISALLOW_COPY(SessionRestorer);

  // next: the session, with the epoch that its client will ask for. play: sends what was kept of it to a
  // worker, which has no context; called once an attempt, and dropped behind the last.
  void begin(const Name& name, SessionFacts next, Play play);
  // Of a session whose client asks for that epoch: none: it is not restored here, or is rebuilt. Else "": it
  // is being restored, or why that failed.
  std::optional<std::string> failingOver(const SessionFacts& client) const;
  // It was begun, and neither its client nor its time has come.
  bool has(const Name& name) const { return restoring_.contains(name); }
  // `has`, and it has not failed.
  bool tries(const Name& name) const;
  // Its client is there, in that epoch. True: in what was restored; that is over.
  bool arrived(const Name& name, uint64_t epoch);
  // Sessions of leases that are no more.
  void dropEnded();
  // No session is restored any more.
  void stop() { stopped_ = true; }

 private:
  struct Restoring {
    uint64_t epoch = 0;
    Play play;
    Descriptor state;  // this side's end of the state socket
    bool ready = false;
    std::string why;  // it failed
  };
  // In another worker, and where that dies meanwhile, in one more.
  kj::Promise<void> attempt(Name name, SessionFacts facts, std::shared_ptr<Restoring> restoring);
  kj::Promise<void> restore(Name name, SessionFacts facts);
  kj::Promise<void> rebuild(Name name, SessionFacts facts, kj::Own<WorkerChild> worker);
  void taskFailed(kj::Exception&& exception) override;

  kj::Timer& timer_;
  LeaseTable& leases_;
  SessionTable& sessions_;
  Suspension& suspension_;
  WorkerPools& pool_;
  const WorkerStarts& starts_;
  Settings settings_;
  std::map<Name, std::shared_ptr<Restoring>> restoring_;
  bool stopped_ = false;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
