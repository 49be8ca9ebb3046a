#pragma once
// Writes the sessions of a lease into files (server/files/): a checkpoint.
//
// From the order on no session of the lease begins. Every session's worker gets the order to copy its
// session, and one end of a state socket; at the other end a thread of this process writes what comes
// (session_file.h). No file is written before all sessions of the lease stand still, so all of a checkpoint
// are of one moment. Each goes on when its own file is on the disk. The checkpoint gets its place when all
// are written; where one cannot be, or ends meanwhile, nothing of it is left.
//
// A lease is held: its sessions are written in the same way, and leave. Their clients hear it when the
// checkpoint is published, and ask for the session's next epoch from then on; they are told to ask again
// (Admission). The lease is suspended then (LeaseTable), and nothing of it is here. CheckpointRestorer brings
// it back.
//
// A lease that runs goes back into a checkpoint that was written without that, and is restored from it, if
// its programs have sent nothing since: it is held as above, in place of that checkpoint, each session only
// if it is at the frame that its file tells of. So what is in no frame yet (staged bytes, what pinned memory
// has) is in the files as the program left it.
//
// Takes its turn with the other orders for the lease (Suspension::lanes). A lease that is suspended or aside
// is refused. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/files/checkpoint_folder.h"
#include "server/files/manifest.h"
#include "server/front/checkpoint_restorer.h"
#include "server/front/held_notes.h"
#include "server/front/suspension.h"
#include "server/front/worker_pools.h"
#include "server/front/worker_starts.h"

namespace gpupool::server {

// CheckpointResult.
struct Checkpointed {
  uint32_t sessions = 0;
  uint64_t bytes = 0;
  uint32_t longestPauseMs = 0;
  std::string folder;
};

class Checkpoints final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    std::string server;  // ServerInfo.name
    std::string folder;  // of all checkpoints, absolute; empty: none is written here
    // A worker has so long for its session, besides what its programs have to finish: the disk may be slow.
    // What comes to a standstill ends much sooner (StateSocket).
    kj::Duration bound = 1 * kj::HOURS;
    kj::Duration workerBound = 20 * kj::SECONDS;  // until there is one to restore a session in
    kj::Duration clients = 10 * kj::MINUTES;      // until the clients of restored sessions are there
    std::vector<NotedHold> holds = {};            // that an earlier life of this server has noted
    bool network = true;                          // this server takes sessions from the network
    bool disturb = false;  // workers may ask for their lease to be held and restored (GPUPOOL_DISTURB)
  };
  // With `disturb`: takes over SessionTable::onDisturb, as Suspension does.
  Checkpoints(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, Suspension& suspension,
              WorkerPools& pool, const WorkerStarts& starts, Settings settings);
  ~Checkpoints() noexcept;
  KJ_DISALLOW_COPY(Checkpoints);

  // ServerControl.checkpoint; rejects with a text for people. name: of the checkpoint in the folder.
  kj::Promise<Checkpointed> checkpoint(const Id& lease, uint32_t drainMs, const std::string& name);
  // ServerControl.suspend and resume with a folder; reject with a text for people.
  kj::Promise<Suspended> hold(const Id& lease, uint32_t drainMs, const std::string& name);
  // running: the lease runs, and goes back; else it is held, or has been restored already.
  kj::Promise<void> restore(const Id& lease, const std::string& name, bool running);
  // Of the leases that are being held, and those that an earlier life has held.
  HeldNotes& notes() { return notes_; }
  // HeldNotes::look.
  kj::Promise<void> lookAtNotes() { return notes_.look(timer_, folder_); }
  // No session begins to be written or restored any more.
  void stop() {
    stopped_ = true;
    restorer_.stop();
  }

 private:
  struct Job;
  // What the sessions were at in a checkpoint that the lease goes back into; null: it is a new one.
  using Since = std::shared_ptr<const std::map<Id, FileFacts>>;
  // Why the lease cannot be written so now; empty: it can.
  std::string refuses(const Id& lease) const;
  std::string refusesToHold(const Id& lease) const;
  kj::Promise<Checkpointed> writeNow(Id lease, uint32_t drainMs, const std::string& name);
  kj::Promise<Suspended> holdNow(Id lease, uint32_t drainMs, const std::string& name);
  kj::Promise<Suspended> leave(Id lease, uint32_t drainMs, const std::string& name, Since since = nullptr);
  kj::Promise<std::shared_ptr<Job>> write(Id lease, uint32_t drainMs, const std::string& name, bool held,
                                          Since since = nullptr);
  kj::Promise<std::shared_ptr<Job>> writeAll(Id lease, uint32_t drainMs, const std::string& name, bool held,
                                             Since since);
  // Of the lease's sessions, as they are now.
  std::shared_ptr<Job> makeJob(const Grant& grant, bool held) const;
  kj::Promise<void> writeOne(std::shared_ptr<Job> job, size_t index, uint32_t drainMs);
  static void writeFile(int socket, const std::shared_ptr<Job>& job, size_t index);
  static Checkpointed resultOf(const Job& job);
  kj::Promise<void> restoreNow(Id lease, const std::string& name, bool running);
  kj::Promise<void> goBack(Id lease, const std::string& name);
  Manifest describe(const Grant& grant) const;
  kj::Promise<void> disturbNow(Id lease);
  kj::Promise<void> goAndComeBack(Id lease, const std::string& name);
  void taskFailed(kj::Exception&& exception) override;

  kj::Timer& timer_;
  LeaseTable& leases_;
  SessionTable& sessions_;
  Suspension& suspension_;
  WorkerPools& pool_;
  Settings settings_;
  HeldNotes notes_;
  CheckpointRestorer restorer_;
  std::shared_ptr<const CheckpointFolder> folder_;  // null: none
  kj::ForkedPromise<bool> tidied_ = nullptr;        // what an earlier life has left there is removed
  bool stopped_ = false;
  uint64_t asked_ = 0, heldAndBack_ = 0;  // by workers (disturb)
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
