// gpupool down. Asks the supervisor of the pool to end it; where that has died, ends what it had started;
// then removes what is left. Every step is bounded.

#include <unistd.h>

#include <iostream>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/pool_directory.h"
#include "pool-manager/cli/processes.h"

namespace gpupool::cli {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSupervisorPatience{40'000};

const Help kDownHelp = {
    "gpupool down [options]",
    "Stops the pool of this machine. Its sessions end, and no process, socket or file of the pool remains. "
    "Leases that are held in files (`gpupool checkpoint --hold`) end, too, and cannot be restored any more. "
    "It is no error if no pool is up.",
    "GPUPOOL_STATE: the folder of this machine's pool, instead of $XDG_RUNTIME_DIR/gpupool or "
    "/tmp/gpupool-<uid>.",
    "0: no pool is up now. 1: something could not be stopped or removed. 2: the command line is wrong.",
    "  gpupool down\n  gpupool down --state /run/my-pool\n"};

// They end with the pool: its store, without which none is restored, goes, too.
void tellHeld(const PoolDirectory& directory) {
  size_t held = 0;
  try {
    for (const pool::Lease& lease :
         ManagerQuery(std::vector{"unix:" + directory.file(kManagerSocket)}).leases())
      if (lease.state == "held" && lease.held) ++held;
  } catch (const std::exception&) {  // kj's too: nobody knows
  }
  if (held == 0) return;
  std::cout << "gpupool: " << held
            << (held == 1 ? " lease that is held in files ends, and its programs; it"
                          : " leases that are held in files end, and their programs; they")
            << " cannot be restored any more\n"
            << std::flush;
}

// True if there was something to take down.
bool takeDown(const std::string& path) {
  PoolDirectory directory(path);
  bool found = false;
  const pid_t owner = directory.owner();
  if (owner < 0)
    throw CommandError(kExitFailure,
                       "the pool in " + path + " belongs to a process of another container; stop it there");
  if (owner > 0) {
    found = true;
    tellHeld(directory);
    if (!endProcess(nameProcess(owner, "supervisor"), kSupervisorPatience))
      throw CommandError(kExitFailure,
                         "the pool's supervisor, process " + std::to_string(owner) + ", cannot be ended");
  }
  if (::access(directory.file(kLock).c_str(), F_OK) != 0) return found;
  pid_t other = 0;
  if (!directory.take(&other))
    throw CommandError(kExitFailure, "a pool is being started in " + path + " by process " +
                                         std::to_string(other) + "; try again");
  directory.endLeftovers();
  directory.remove();
  return true;
}

}  // namespace

int runDown(const Words& words) {
  std::string state;
  const Parsed parsed = parseCommand(
      words, kDownHelp, nullptr, {},
      {{"state", state, "DIR",
        "The folder that was given to `gpupool up --state`. Empty: as GPUPOOL_STATE says.", true}});
  if (parsed.helped) return 0;
  if (!parsed.rest.empty()) throw options::OptionError("'" + parsed.rest[0] + "': down takes options only");
  std::string looked;
  bool found = false;
  for (const std::string& path : runtimeDirectories(state)) {
    looked += (looked.empty() ? "" : ", ") + path;
    if (!takeDown(path)) continue;
    found = true;
    std::cout << "gpupool: the pool in " << path << " is down\n";
  }
  if (!found) std::cout << "gpupool: no pool is up (looked in " << looked << ")\n";
  return 0;
}

}  // namespace gpupool::cli
