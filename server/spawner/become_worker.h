#pragma once
// A child process becomes a worker (exec): the child of the server itself, or of gpupool-spawner.

#include <signal.h>
#include <sys/types.h>

namespace gpupool::server {

// The worker's end of the socket pair that it shares with the server.
inline constexpr int kControlDescriptor = 3;
// What a worker gets when the process that started it ends (PR_SET_PDEATHSIG). Not SIGTERM, which means a
// shutdown: service managers send that to server and workers alike.
inline constexpr int kServerDiedSignal = SIGHUP;
// The status of a child that could not execute the program.
inline constexpr int kNotExecuted = 127;

struct WorkerImage {
  int program;             // O_PATH
  char* const* arguments;  // the first one is the program's path
  char* const* environment;
  int control;   // becomes kControlDescriptor
  int nothing;   // becomes the standard input
  pid_t parent;  // of the child
};

// In the forked child; makes calls only that a child may make after fork (signal-safety(7)). The worker has a
// session and a process group of its own. Ends it with kNotExecuted, or with 126 if the parent is gone
// already.
[[noreturn]] void becomeWorker(const WorkerImage& image);

}  // namespace gpupool::server
