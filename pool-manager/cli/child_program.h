#pragma once
// A program started and watched as a shell would: same process group and terminal, the signals that were
// meant for it forwarded, stopped and continued together, and its exit status or signal passed on.
//
// Why the same process group: the terminal then signals both, pipelines and job control work as without us.
// What the terminal (the kernel) sent has reached the program already; only what another process sent to us
// alone is forwarded.

#include <signal.h>
#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace gpupool::cli {

// Throws the CommandError that ChildProgram::start would throw, where that can be told beforehand.
void demandExecutable(const std::string& program);

class ChildProgram {
 public:
  ChildProgram();   // blocks the signals that are forwarded; one at a time in a process
  ~ChildProgram();  // and unblocks them
  ChildProgram(const ChildProgram&) = delete;
  ChildProgram& operator=(const ChildProgram&) = delete;

  // Throws CommandError with 126 or 127 if it cannot be executed. environment: "NAME=value", added or
  // replaced. before: called in the program's process, just before it becomes the program.
  void start(const std::vector<std::string>& words, const std::vector<std::string>& environment,
             const std::function<void()>& before);
  pid_t pid() const { return pid_; }

  // Waits for the end, and calls `onReadable` whenever `descriptor` is; it returns false when it wants no
  // more calls. Returns wait(2)'s status.
  int wait(int descriptor, const std::function<bool()>& onReadable);

 private:
  bool reap(int* status);
  void forward();

  sigset_t before_;
  int signals_ = -1;
  pid_t pid_ = -1;
};

// Ends this process as the status says: returns the exit status, or dies by the same signal.
int endLike(int status);

}  // namespace gpupool::cli
