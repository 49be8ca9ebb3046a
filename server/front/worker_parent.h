#pragma once
// The process whose children the workers are: it starts them, and it alone may signal and reap them.
//
// ownChildren: this one. SpawnerParent (spawner_parent.h): gpupool-spawner, which gives each a user id of its
// own. A parent outlives its WorkerChild objects. Belongs to the event loop's thread, which must be the
// process's main thread (PR_SET_PDEATHSIG follows the thread that forked).

#include <kj/io.h>
#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

namespace gpupool::server {

class WorkerParent {
 public:
  struct Process {
    pid_t pid = 0;
    kj::AutoCloseFd descriptor;  // pidfd_open(2)
  };
  virtual ~WorkerParent() noexcept(false) {}
  // program: O_PATH. words: its arguments, the path first. control: the worker's end of its socket. Throws
  // kj::Exception.
  virtual Process start(int program, const std::vector<std::string>& words,
                        const std::vector<std::string>& variables, int control) = 0;
  // SIGKILL to it and its process group. Of a process that is not reaped.
  virtual void kill(pid_t pid) = 0;
  // The status (wait(2)) of one whose pidfd says that it is gone; -1: nobody knows.
  virtual int reap(pid_t pid) = 0;
  // SIGKILL to a worker of an earlier life of this server, by its pidfd. False: it may not.
  virtual bool killEarlier(int process) = 0;
  // A worker of this life is not ended with this process.
  virtual void outlive([[maybe_unused]] pid_t pid) {}
  // A worker of an earlier life, by its pidfd, still runs: nothing is started under its user id.
  virtual void spare([[maybe_unused]] int process) {}
  // Such a worker is one of this life from here on: kill(pid) and reap(pid) are for it, too. How it ends
  // nobody knows.
  void adopt(pid_t pid, kj::AutoCloseFd process) { adopted_[pid] = kj::mv(process); }

 protected:
  // For `kill` and `reap`: false: it is none that was adopted.
  bool killAdopted(pid_t pid);
  bool reapAdopted(pid_t pid) { return adopted_.erase(pid) != 0; }

 private:
  std::map<pid_t, kj::AutoCloseFd> adopted_;  // pidfds
};

WorkerParent& ownChildren();

// SIGKILL, by a pidfd. True also where the process is gone by now.
bool killBy(int process);
// As waitpid(2), not ended by signals: the status, or -1.
int waitFor(pid_t pid);
kj::AutoCloseFd openProcess(pid_t pid);  // pidfd_open(2), close-on-exec; throws kj::Exception
// What execve takes, with a null at its end; of these texts, which outlive it.
std::vector<char*> pointers(const std::vector<std::string>& texts);

}  // namespace gpupool::server
