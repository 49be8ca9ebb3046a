#pragma once
// Writes the sessions of a lease into files (server/files/): a checkpoint.
//
// From the order on no session of the lease begins. Every session's worker gets the order to copy its
// session, and one end of a state socket; at the other end a thread of this process writes what comes
// (session_file.h). No file is written before all sessions of the lease stand still, so all of a checkpoint
// are of one moment. Each goes on when its own file is on the disk. The checkpoint gets its place when all
// are written; where one cannot be, or ends meanwhile, nothing of it is left.
//
// Takes its turn with the other orders for the lease (Suspension::lanes). A lease that is suspended or aside
// is refused. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/files/checkpoint_folder.h"
#include "server/files/manifest.h"
#include "server/front/suspension.h"

namespace gpupool::server {

// CheckpointResult.
struct Checkpointed {
  uint32_t sessions = 0;
  uint64_t bytes = 0;
  uint32_t longestPauseMs = 0;
  std::string folder;
};

class Checkpoints {
 public:
  struct Settings {
    std::string server;  // ServerInfo.name
    uint64_t rowsHash = 0;
    std::string folder;  // of all checkpoints, absolute; empty: none is written here
    // A worker has so long for its session, besides what its programs have to finish: the disk may be slow.
    // What comes to a standstill ends much sooner (StateSocket).
    kj::Duration bound = 1 * kj::HOURS;
  };
  Checkpoints(LeaseTable& leases, SessionTable& sessions, Suspension& suspension, Settings settings);
  KJ_DISALLOW_COPY(Checkpoints);

  // ServerControl.checkpoint; rejects with a text for people. name: of the checkpoint in the folder.
  kj::Promise<Checkpointed> checkpoint(const Id& lease, uint32_t drainMs, const std::string& name);
  // No session begins to be written any more.
  void stop() { stopped_ = true; }

 private:
  class Cut;
  struct Written;
  struct Job;
  static Written writeFile(int socket, int file, const std::shared_ptr<Cut>& cut);
  // Why the lease cannot be written so now; empty: it can.
  std::string refuses(const Id& lease) const;
  kj::Promise<Checkpointed> writeNow(Id lease, uint32_t drainMs, const std::string& name);
  kj::Promise<Checkpointed> writeAll(Id lease, uint32_t drainMs, const std::string& name);
  kj::Promise<void> writeOne(std::shared_ptr<Job> job, size_t index, uint32_t drainMs);
  Manifest describe(const Grant& grant) const;

  LeaseTable& leases_;
  SessionTable& sessions_;
  Suspension& suspension_;
  Settings settings_;
  std::shared_ptr<const CheckpointFolder> folder_;  // null: none
  kj::ForkedPromise<bool> tidied_ = nullptr;        // what an earlier life has left there is removed
  bool stopped_ = false;
};

}  // namespace gpupool::server
