// gpupool migrate: a lease's sessions in other worker processes, on its GPUs or on others, while their
// programs run.

#include <cstdio>
#include <iostream>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/goes_on.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/target.h"

namespace gpupool::cli {
namespace {

using std::chrono::milliseconds;

constexpr unsigned kListMs = 10'000;
constexpr uint64_t kMigrateMs = 3'660'000;  // beside --drain: longer than the manager waits for a server

const Help kMigrate = {
    "gpupool migrate [options] LEASE",
    "Moves the sessions of a lease, one after the other, each to another worker process: with --to on other "
    "GPUs of its server or of another server, without on the same GPUs. The programs run on: a CUDA call "
    "that "
    "comes meanwhile takes longer, and they notice nothing else. The other GPUs have to be of the same "
    "model, "
    "with the same driver, and free at once; until all sessions are there the lease has both. Where a "
    "session "
    "cannot be moved it runs on where it is, and the command says why; asked again, it goes on. A suspended "
    "lease has to be resumed first. One that takes turns moves to another server, but not to other GPUs of "
    "its own. Sessions over shared memory (shm) go on over the network when they leave their program's "
    "machine, and over shared memory when they come back; those of programs for which --transport shm was "
    "asked stay. The lease, named as `gpupool leases` prints it or "
    "by 4 of its digits or "
    "more, "
    "has "
    "to be your own, or you the pool's operator. See docs/sessions.md.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: all sessions have moved. 1: there is no such lease, or a session could not be moved. 2: the command "
    "line is wrong.",
    "  gpupool migrate 3f2a91c4\n  gpupool migrate --to 1 3f2a91c4\n  gpupool migrate --to node8 --drain 5m "
    "3f2a91c4\n  gpupool migrate --to node8:0,1 3f2a91c4\n"};

std::string describe(const Id& id, const pool::MigrateResult& result) {
  const std::string lease = "lease " + shortId(id), where = "; it is on " + result.server;
  if (result.sessions == 0) return lease + ": no session had to be moved" + where;
  char pause[32];
  std::snprintf(pause, sizeof pause, "%.1f s", result.longestPauseMs / 1000.0);
  return lease + ": " + std::to_string(result.sessions) + (result.sessions == 1 ? " session" : " sessions") +
         " moved with " + options::formatSize(result.movedBytes) + "; the longest pause was " + pause + where;
}

}  // namespace

int runMigrate(const Words& words) {
  ClientOptions client;
  milliseconds drain{30'000};
  std::string to;
  const Parsed parsed = parseCommand(
      words, kMigrate, &client, kAskingOptions,
      {{"to", to, "PLACE",
        "Where to: GPU[,GPU...] of its own server (their numbers, as `gpupool devices` prints them, "
        "one for each GPU of the lease), SERVER, or SERVER:GPU[,GPU...]. Empty: the GPUs that it "
        "has.",
        true},
       {"drain", drain, "TIME",
        "What runs on the GPUs has so long to finish, for each session. If it does not, the "
        "program goes on as before, and the command fails.",
        true}});
  if (parsed.helped) return 0;
  if (drain > kMostDrain) throw options::OptionError("--drain: at most 1h");
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("one lease is expected; `gpupool leases` lists them");
  const pool::MoveTarget target = readTarget(to);
  ManagerQuery query(client, kListMs);
  const Id id = findLease(query.leases(), parsed.rest[0]);
  const auto drainMs = static_cast<unsigned>(drain.count());
  const GoesOn goesOn("lease " + shortId(id) + " goes on being moved");
  const pool::MigrateResult result = query.migrate(id, drainMs, target, drainMs + kMigrateMs);
  std::cout << "gpupool: " << describe(id, result) << "\n";
  return 0;
}

}  // namespace gpupool::cli
