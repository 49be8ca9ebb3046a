// gpupool cordon and uncordon: a server out of service, and back.

#include <iostream>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/holder.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"

namespace gpupool::cli {
namespace {

constexpr unsigned kStorePatienceMs = 10'000;

const char* const kEnvironment = "GPUPOOL_STATE: the folder of this machine's pool.";
const char* const kStatus =
    "0: done. 1: there is no such server, or the manager refuses. 2: the command line is wrong.";

const Help kCordon = {
    "gpupool cordon [options] SERVER",
    "Takes a server out of service: no new lease is placed on it. The leases that it has "
    "go on; `gpupool leases` "
    "lists them, and `gpupool drain` waits for their end. A suspended lease there can still be resumed. The "
    "manager remembers it "
    "through restarts, its own and the server's. Asked again, it takes over the new reason. Only "
    "the pool's operator "
    "can. Undone by `gpupool uncordon`.",
    kEnvironment, kStatus, "  gpupool cordon --reason 'new power supply on Friday' node7\n"};
const Help kUncordon = {
    "gpupool uncordon [options] SERVER",
    "Puts a server that was cordoned back into service. Requests that wait are placed there at "
    "once. Of one that is in service: does nothing.",
    kEnvironment, kStatus, "  gpupool uncordon node7\n"};

int set(const Words& words, bool cordoned) {
  ClientOptions client;
  std::string reason;
  std::vector<options::Option> own;
  if (cordoned)
    own.push_back({"reason", reason, "TEXT",
                   "Why, for people: whoever could be placed only there reads it. At most 200 bytes."});
  const Parsed parsed = parseCommand(words, cordoned ? kCordon : kUncordon, &client, kAskingOptions, own);
  if (parsed.helped) return 0;
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("one server is expected; `gpupool servers` lists them");
  checkReason(reason);
  ManagerQuery query(client, kStorePatienceMs);
  query.cordon(parsed.rest[0], cordoned, reason, userAndHost());
  std::cout << "gpupool: server " << parsed.rest[0] << (cordoned ? " is cordoned\n" : " is in service\n");
  return 0;
}

}  // namespace

int runCordon(const Words& words) { return set(words, true); }
int runUncordon(const Words& words) { return set(words, false); }

}  // namespace gpupool::cli
