// gpupool release: ends a lease in its holder's place, or drops a lost one.

#include <iostream>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"

namespace gpupool::cli {
namespace {

constexpr unsigned kPatienceMs = 30'000;  // a server may take this long to end a lease's sessions

const Help kReleaseHelp = {
    "gpupool release [options] LEASE",
    "Ends a lease, named as `gpupool leases` prints it or by 4 of its digits or more, in its holder's place: "
    "its "
    "sessions end. A lease in state `lost` is dropped: its server went away without saying that nothing of "
    "it runs, and the manager keeps it until then. Drop it when you know that the server does not come "
    "back; only the pool's operator can, and not while that server is connected.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: the lease is over. 1: there is no such lease, or the manager refuses. 2: the command line is wrong.",
    "  gpupool release 3f2a91c4\n"};

}  // namespace

int runRelease(const Words& words) {
  ClientOptions client;
  const Parsed parsed = parseCommand(words, kReleaseHelp, &client, kAskingOptions, {});
  if (parsed.helped) return 0;
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("release takes one lease; `gpupool leases` lists them");
  ManagerQuery query(client, kPatienceMs);
  const Id id = findLease(query.leases(), parsed.rest[0]);
  query.drop(id);
  std::cout << "gpupool: lease " << id.text() << " is over\n";
  return 0;
}

}  // namespace gpupool::cli
