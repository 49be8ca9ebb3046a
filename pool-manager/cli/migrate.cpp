// gpupool migrate: a lease's sessions in other worker processes, while their programs run.

#include <cstdio>
#include <iostream>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"

namespace gpupool::cli {
namespace {

using std::chrono::milliseconds;

constexpr unsigned kListMs = 10'000;
constexpr uint64_t kMigrateMs = 3'660'000;  // beside --drain: longer than the manager waits for a server
constexpr milliseconds kMostDrain = std::chrono::hours(1);

const Help kMigrate = {
    "gpupool migrate [options] LEASE",
    "Moves the sessions of a lease, one after the other, each to another worker process of its server. The "
    "programs run on: a CUDA call that comes meanwhile takes longer, and they notice nothing else. It "
    "replaces "
    "workers, for example after the worker's program on the server was updated, and it shows whether a "
    "program "
    "can be moved. The lease keeps its GPUs and its server: moving to other ones comes with a later version. "
    "Where a session cannot be moved it runs on where it is, and the command says why. A suspended lease has "
    "to be resumed first. The lease, named as `gpupool leases` prints it or by more of its digits, has to be "
    "your own, or you the pool's operator. See docs/sessions.md.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: all sessions have moved. 1: there is no such lease, or a session could not be moved. 2: the command "
    "line is wrong.",
    "  gpupool migrate 3f2a91c4\n  gpupool migrate --drain 5m 3f2a91c4\n"};

std::string describe(const Id& id, const pool::MigrateResult& result) {
  const std::string lease = "lease " + id.text().substr(0, 8);
  if (result.sessions == 0) return lease + " has no session: there is nothing to move";
  char pause[32];
  std::snprintf(pause, sizeof pause, "%.1f s", result.longestPauseMs / 1000.0);
  return lease + ": " + std::to_string(result.sessions) + (result.sessions == 1 ? " session" : " sessions") +
         " moved with " + options::formatSize(result.movedBytes) + "; the longest pause was " + pause;
}

}  // namespace

int runMigrate(const Words& words) {
  ClientOptions client;
  milliseconds drain{30'000};
  const Parsed parsed =
      parseCommand(words, kMigrate, &client, {"manager", "tenant", "token-file"},
                   {{"drain", drain, "TIME",
                     "What runs on the GPUs has so long to finish, for each session. If it does not, the "
                     "program goes on as before, and the command fails.",
                     true}});
  if (parsed.helped) return 0;
  if (drain > kMostDrain) throw options::OptionError("--drain: at most 1h");
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("one lease is expected; `gpupool leases` lists them");
  ManagerQuery query(managerAddresses(client.manager), kListMs,
                     credentialsOf(client.tokenFile, client.tenant));
  const Id id = findLease(query.leases(), parsed.rest[0]);
  const auto drainMs = static_cast<unsigned>(drain.count());
  const pool::MigrateResult result = query.migrate(id, drainMs, drainMs + kMigrateMs);
  std::cout << "gpupool: " << describe(id, result) << "\n";
  return 0;
}

}  // namespace gpupool::cli
