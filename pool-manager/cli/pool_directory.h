#pragma once
// The runtime directory of a pool on this machine: one supervisor at a time owns it, which is the process
// that holds the lock in it. The kernel drops the lock with the process, so a crash leaves files but no false
// claim.

#include <sys/types.h>

#include <string>

namespace gpupool::cli {

class PoolDirectory {
 public:
  explicit PoolDirectory(std::string path) : path_(std::move(path)) {}
  ~PoolDirectory();
  PoolDirectory(const PoolDirectory&) = delete;
  PoolDirectory& operator=(const PoolDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const char* name) const { return path_ + "/" + name; }

  // Makes the directory and takes the lock for this process. False: another process has it (*owner, 0 if it
  // is in another pid namespace). Throws std::runtime_error.
  bool take(pid_t* owner);
  // The process that has the lock; 0: nobody, -1: somebody whom this process cannot name. Not for the owner
  // itself.
  pid_t owner() const;
  // After take(): ends what an earlier supervisor left running that was killed. True if there was something.
  // Throws CommandError if it cannot be ended.
  bool endLeftovers();
  // After take(): removes what pools leave, all but the lock.
  void clear();
  // The same, with the lock, and the directory unless something else is in it.
  void remove();

 private:
  std::string path_;
  int lock_ = -1;
};

}  // namespace gpupool::cli
