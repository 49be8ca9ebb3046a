#pragma once
// The small process that may change user ids. gpupool-server starts it first and then gives up every
// capability; the spawner keeps three, runs nothing of a tenant, reads no file of the server and speaks with
// nobody else.
//
//   CAP_SETUID, CAP_SETGID   a worker gets a user id of the range that no other process has, the range's
//                            group id, and the supplementary groups of the server (where a site has groups
//                            that may open GPUs)
//   CAP_KILL                 workers are of other users than it and the server
//
// Whatever the server asks, it gets nothing that is not of these user ids: no other user, no signal to other
// processes. One thread.

#include <sys/types.h>

#include <map>
#include <optional>
#include <vector>

#include "server/spawner/protocol.h"
#include "server/spawner/user_range.h"

namespace gpupool::server {

class Spawner {
 public:
  // Of a process with one thread and these capabilities, which loses all others. Throws std::runtime_error.
  explicit Spawner(UserRange users);
  ~Spawner();  // kills its workers that are not to outlive it
  Spawner(const Spawner&) = delete;
  Spawner& operator=(const Spawner&) = delete;

  // Serves the socket until its other end closes.
  void serve(int socket);

 private:
  struct Worker {
    uid_t user = 0;
    std::optional<int> status;  // it has ended; wait(2)
    bool outlives = false;
  };
  struct Answer {
    SpawnerAnswer words;
    int descriptor = -1;  // sent, and then closed
  };

  Answer answer(const SpawnerRequest& request, const std::vector<int>& descriptors);
  Answer start(const SpawnerRequest& request, int program, int control, int texts);
  Answer reap(pid_t pid);
  Answer kill(pid_t pid);
  Answer killEarlier(int process) const;
  Answer outlive(pid_t pid);
  Answer spare(int process);
  // A worker of an earlier life has it, and is to live.
  bool isSpared(uid_t user);
  // A user id of which no process runs; 0: all are in use.
  uid_t freeUser();
  // Ends what runs under that user id. True: nothing does any more.
  bool sweep(uid_t user);
  [[noreturn]] void endOthers(uid_t user) const;  // in a child
  // Reaps every child that has ended, and keeps the status of those that are workers.
  void collect();

  const UserRange users_;
  std::vector<gid_t> groups_;
  std::map<pid_t, Worker> workers_;  // until the server has asked for their status
  std::map<uid_t, int> spared_;      // pidfds
  uid_t next_;                       // to try: ids are given in turn
};

}  // namespace gpupool::server
