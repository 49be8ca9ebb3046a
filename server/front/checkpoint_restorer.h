#pragma once
// Brings a lease back that is held in files (Checkpoints): they are checked, and each is played to a new
// worker, as to one that a session of another server comes to; when all have rebuilt theirs, the clients may
// come. Where one cannot, the lease is held as before. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <memory>
#include <string>

#include "server/files/checkpoint_folder.h"
#include "server/files/manifest.h"
#include "server/front/held_notes.h"
#include "server/front/sessions.h"
#include "server/front/worker_pools.h"
#include "server/front/worker_starts.h"

namespace gpupool::server {

class CheckpointRestorer final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    std::string server;        // ServerInfo.name
    kj::Duration workerBound;  // until there is one to restore a session in
    kj::Duration clients;      // until the clients of restored sessions are there
    bool network;              // this server takes sessions from the network
  };
  // notes: loses a lease's note when the lease is restored.
  CheckpointRestorer(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, WorkerPools& pool,
                     const WorkerStarts& starts, HeldNotes& notes, Settings settings);
  KJ_DISALLOW_COPY(CheckpointRestorer);

  // Of a lease that is held in the folder's checkpoint of that name. here: what a checkpoint of it would say
  // now, with the id of the one that it is held in. Rejects with a text for people; the lease is held then.
  kj::Promise<void> restore(const Id& lease, std::shared_ptr<const CheckpointFolder> folder,
                            const std::string& name, Manifest here);
  // No session begins to be restored any more.
  void stop() { stopped_ = true; }

 private:
  struct Restored;
  struct Restoring;
  kj::Promise<void> restoreAll(std::shared_ptr<Restoring> job);
  kj::Promise<void> restoreOne(std::shared_ptr<Restoring> job, size_t index);
  kj::Promise<void> giveUp(std::shared_ptr<Restoring> job, const std::string& why);
  void taskFailed(kj::Exception&& exception) override;

  kj::Timer& timer_;
  LeaseTable& leases_;
  SessionTable& sessions_;
  WorkerPools& pool_;
  const WorkerStarts& starts_;
  HeldNotes& notes_;
  Settings settings_;
  bool stopped_ = false;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
