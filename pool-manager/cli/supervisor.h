#pragma once
// The process behind `gpupool up`: it starts the manager and the server, starts either again when it dies,
// and ends both.

#include <signal.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "pool-manager/cli/pool_directory.h"
#include "pool-manager/cli/processes.h"

namespace gpupool::cli {

struct PoolPlan {
  std::vector<std::string> manager, server;    // command lines; [0] is the executable's path
  std::vector<std::string> serverEnvironment;  // "NAME=value", added
  std::string managerAddress;                  // where to ask whether the server has joined
  std::chrono::milliseconds wait{30'000};      // until it must have
};

class Supervisor {
 public:
  // `directory` is taken. Blocks the signals that end a pool, and SIGCHLD.
  Supervisor(PoolDirectory& directory, PoolPlan plan);
  // Ends every process that was started and removes their files.
  ~Supervisor();

  // Starts both and waits until a worker is warm; the text says what there is now. Throws std::runtime_error
  // with the reason, and the last lines of the logs.
  std::string start();
  // Until SIGINT, SIGTERM or SIGHUP: true. False: a process died too often, *why.
  bool watch(std::string* why);

 private:
  struct Child {
    const std::vector<std::string>& words;
    std::vector<std::string> environment;
    std::string log, role;
    ProcessName process;
    std::chrono::steady_clock::time_point started;
    int quickDeaths = 0;
    bool killed = false;  // by SIGKILL: it did not fail by itself
  };

  void launch(Child& child);
  bool interrupted(std::chrono::milliseconds limit, bool* died);  // waits for a signal
  std::string readiness(bool* ready);
  Child* firstDead();
  std::string explain(const std::string& what) const;
  void endHeld();
  void stop();

  PoolDirectory& directory_;
  PoolPlan plan_;
  Child manager_, server_;
  sigset_t signals_, before_;
};

}  // namespace gpupool::cli
