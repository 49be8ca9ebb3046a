#pragma once
// The holder of a lease in a child process of `gpupool run` or `gpupool lease`, and what a program needs in
// its environment to find it.

#include <sys/types.h>

#include <string>
#include <vector>

#include "pool-manager/cli/holder.h"

namespace gpupool::cli {

// The holder as its parent sees it: the other end of the control socket (holder_process.h).
class HolderChild {
 public:
  // Where settings name no holder of the lease, it is the child itself. Throws CommandError with `status`.
  HolderChild(HolderSettings settings, int status);
  ~HolderChild();
  HolderChild(const HolderChild&) = delete;
  HolderChild& operator=(const HolderChild&) = delete;

  int control() const { return control_; }
  // No file for it: nobody would remove it where both this process and the holder are killed.
  const std::string& name() const { return name_; }
  void say(const std::string& text) const;
  // One datagram; empty when the holder is gone.
  std::string hear() const;

  // Waits for the lease. Throws CommandError with the reason why there is none.
  struct Leased {
    uint32_t devices = 0;
    std::string id;
  };
  Leased awaitLease();
  // It is gone (`hear` said so), and its lease is not: another one takes that over, under the same name. What
  // the first one had in its memory is lost. False: so many have been killed already that there is a reason
  // for it.
  bool replace();
  // It goes on without this process, until the lease ends.
  void keep() const;
  // Asks for the release and waits for it, within a bound.
  void release();

 private:
  void start();

  std::string name_;
  HolderSettings settings_;
  int status_;
  unsigned replaced_ = 0;
  int control_ = -1;
  pid_t pid_ = -1;
};

// The folder of gpupool's libcuda.so.1. Throws CommandError with `status` if it is not there.
std::string clientLibrary(int status);
// "NAME=value", for programs of that holder. library: clientLibrary's. What is set already, and chooses the
// same, is left out.
std::vector<std::string> programEnvironment(const HolderChild& holder, const std::string& library,
                                            uint32_t devices, bool sharesMemory);

}  // namespace gpupool::cli
