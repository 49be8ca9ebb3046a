#pragma once
// One GPU belongs to one server of a host. The server that has it holds flock(2) on a file named after the
// GPU's UUID, in a folder that all servers of the host share, and so does every worker that uses it: they
// inherit the descriptor. So a GPU whose server was killed is free only when its last worker is gone.
//
// The file says who took the lock. Anybody may write to it: what it says is for people, and decides nothing
// but whether a server waits for the lock or does without the GPU.

#include <kj/io.h>
#include <sys/types.h>

#include <cstdint>
#include <string>

namespace gpupool::server {

struct LockOwner {
  std::string server;    // its name
  std::string identity;  // the same in every life of that server: its state folder and name
  pid_t pid = 0;
  uint64_t startTicks = 0;

  bool lives() const;
  std::string text() const;  // "gpupool-server node1 (process 12)"
};

class DeviceLock {
 public:
  // uuid: its 16 bytes. folder: exists, and the same for all servers of the host.
  DeviceLock(const std::string& folder, const std::string& uuid);

  // False: `holder` has it. Throws kj::Exception if there is no telling.
  bool take(const LockOwner& me);
  // Of one that a worker of an earlier life of `me` holds: its descriptor, which that worker has handed back.
  // False: it is none, and nothing has changed.
  bool takeBack(kj::AutoCloseFd& file, const LockOwner& me);
  const LockOwner& holder() const { return holder_; }
  // For the workers; -1: not ours.
  int descriptor() const { return file_.get(); }
  // The last holder removes the file. Of a lock that a worker holds still, only our share goes.
  void release();

 private:
  kj::AutoCloseFd openFile() const;
  bool isCurrent(int file) const;
  void name(kj::AutoCloseFd file, const LockOwner& me);

  std::string path_;
  kj::AutoCloseFd file_;
  LockOwner holder_;
};

// As nvidia-smi and `gpupool devices` write it: GPU-xxxxxxxx-xxxx-...; of 16 bytes.
std::string uuidText(const std::string& uuid);

}  // namespace gpupool::server
