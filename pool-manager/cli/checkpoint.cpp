// gpupool checkpoint and restore: a lease's sessions in files of its server, while their programs run or
// stand still, and back.

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
constexpr uint64_t kWriteMs = 3'660'000;  // beside --drain: longer than the manager waits for a server

const Help kCheckpoint = {
    "gpupool checkpoint [options] LEASE DIR",
    "Writes the sessions of a lease into files of its server: their code, their GPU memory, and all that the "
    "driver was asked to make for them. DIR is a new folder in the server's --checkpoint-folder: a name, or "
    "a "
    "path that begins with that folder's. All sessions of the lease stand still for it at one moment, and go "
    "on "
    "as soon as they are on the disk: a CUDA call that comes meanwhile takes longer, and the programs notice "
    "nothing else. The checkpoint is there as a whole or not at all. What cannot be moved (`gpupool "
    "migrate`) "
    "cannot be written either. The lease, named as `gpupool leases` prints it or by 4 of its digits or more, "
    "has "
    "to "
    "be your own, or you the pool's operator. See docs/sessions.md.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: it is written. 1: there is no such lease, or it could not be written. 2: the command line is wrong.",
    "  gpupool checkpoint 3f2a91c4 monday\n  gpupool checkpoint --drain 5m 3f2a91c4 "
    "/srv/checkpoints/monday\n"};

std::string describe(const Id& id, const pool::CheckpointResult& result) {
  char pause[32];
  std::snprintf(pause, sizeof pause, "%.1f s", result.longestPauseMs / 1000.0);
  return "lease " + shortId(id) + ": " + std::to_string(result.sessions) +
         (result.sessions == 1 ? " session" : " sessions") + " written to " + result.folder + " on " +
         result.server + " with " + options::formatSize(result.bytes) + "; the longest pause was " + pause;
}

const Help kRestore = {
    "gpupool restore [options] LEASE DIR",
    "Brings the sessions of a lease back that is held in files (`gpupool checkpoint --hold`), in new worker "
    "processes, and its programs go on. They get GPUs of the server that has written the files, also if it "
    "was "
    "started again, or with --to of another one whose --checkpoint-folder is the same folder (shared, by NFS "
    "for example): of the same model, with as much memory and the same driver. The files are checked first. "
    "Where they are damaged, are of another lease, or are not those in which it is held, or where there is "
    "no "
    "room, the lease is held as before. A lease that runs is restored, on the GPUs that it has, from a "
    "checkpoint that was written without --hold, if its programs have sent nothing to their GPUs since; else "
    "that is refused, and it runs on. The lease has to be your own, or you the pool's operator. See "
    "docs/sessions.md.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: it runs. 1: there is no such lease, or it could not be restored. 2: the command line is wrong.",
    "  gpupool restore 3f2a91c4 monday\n  gpupool restore --wait 1h --to node8 3f2a91c4 monday\n"};

std::string describeHeld(const Id& id, const std::string& folder, const pool::SuspendResult& result) {
  char time[32];
  std::snprintf(time, sizeof time, "%.1f s", result.moveMs / 1000.0);
  return "lease " + shortId(id) + " is held in " + folder + ": " + options::formatSize(result.movedBytes) +
         " written in " + time + "; gpupool restore brings it back";
}

}  // namespace

int runRestore(const Words& words) {
  ClientOptions client;
  milliseconds wait{5000};  // one that was just held may not have left its server yet
  std::string to;
  const Parsed parsed = parseCommand(
      words, kRestore, &client, kAskingOptions,
      {{"wait", wait, "TIME",
        "Wait so long for room, and for the server, in turn with those who wait for a lease.", true},
       {"to", to, "PLACE",
        "Where to: GPU[,GPU...] of the server that has written the files (their numbers, as `gpupool "
        "devices` prints them, one for each GPU that the lease had), SERVER, or SERVER:GPU[,GPU...]. "
        "Empty: any GPUs of that server.",
        true}});
  if (parsed.helped) return 0;
  if (wait > kMostWait) throw options::OptionError("--wait: at most 20 days");
  if (parsed.rest.size() != 2 || parsed.rest[0].empty() || parsed.rest[1].empty())
    throw options::OptionError("a lease and a folder are expected; `gpupool leases` lists the leases");
  const pool::MoveTarget target = readTarget(to);
  ManagerQuery query(client, kListMs);
  const Id id = findLease(query.leases(), parsed.rest[0]);
  const auto waitMs = static_cast<unsigned>(wait.count());
  query.resume(id, waitMs, waitMs + kWriteMs, parsed.rest[1], target, tellPeople);
  std::cout << "gpupool: lease " << shortId(id) << " runs\n";
  return 0;
}

int runCheckpoint(const Words& words) {
  ClientOptions client;
  milliseconds drain{30'000};
  bool hold = false;
  const Parsed parsed = parseCommand(
      words, kCheckpoint, &client, kAskingOptions,
      {{"hold", hold, "",
        "The sessions leave their GPUs and the server, which may be started again, and the "
        "programs stand still until `gpupool restore`. Sessions over shared memory (shm) go on over "
        "the network then; not those for which --transport shm was asked.",
        true},
       {"drain", drain, "TIME",
        "What runs on the GPUs has so long to finish. If it does not, the programs "
        "go on as before, and the command fails.",
        true}});
  if (parsed.helped) return 0;
  if (drain > kMostDrain) throw options::OptionError("--drain: at most 1h");
  if (parsed.rest.size() != 2 || parsed.rest[0].empty() || parsed.rest[1].empty())
    throw options::OptionError("a lease and a folder are expected; `gpupool leases` lists the leases");
  ManagerQuery query(client, kListMs);
  const Id id = findLease(query.leases(), parsed.rest[0]);
  const auto drainMs = static_cast<unsigned>(drain.count());
  const GoesOn goesOn("lease " + shortId(id) + " goes on being written into files");
  if (hold) {
    const auto held = query.suspend(id, drainMs, drainMs + kWriteMs, parsed.rest[1]);
    std::cout << "gpupool: " << describeHeld(id, parsed.rest[1], held) << "\n";
    return 0;
  }
  const auto result = query.checkpoint(id, drainMs, parsed.rest[1], drainMs + kWriteMs);
  std::cout << "gpupool: " << describe(id, result) << "\n";
  return 0;
}

}  // namespace gpupool::cli
