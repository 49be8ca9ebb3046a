// gpupool drain: nothing new on a server, and what is there still.

#include <unistd.h>

#include <functional>
#include <iostream>
#include <optional>
#include <utility>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/holder.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/table.h"

namespace gpupool::cli {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr unsigned kStoreMs = 10'000, kLookMs = 3000;
constexpr useconds_t kBetweenUs = 500'000;
constexpr milliseconds kMostWait = std::chrono::hours(24 * 20);

const Help kDrain = {
    "gpupool drain [options] SERVER",
    "Cordons a server, so that no new lease is placed on it (see `gpupool cordon --help`), and lists the "
    "leases that are there still; with --wait it waits for their end. It ends none of them: `gpupool "
    "release` "
    "does. A suspended lease is there, too, for its memory is with the server. Leases are not moved to other "
    "servers; that comes with a later version. Asked again, it looks again. The server stays cordoned, "
    "whatever the command says: `gpupool uncordon` puts it back into service. Only the pool's operator can.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: the server has no lease any more, and can be stopped. 1: leases are there still, or it cannot be "
    "done. "
    "2: the command line is wrong.",
    "  gpupool drain node7\n  gpupool drain --wait 8h --reason 'a new fan' node7 && ssh node7 poweroff\n"};

struct Drain {
  std::string server, reason;
  milliseconds wait{0};
};

// A cordon that is there already is left as it is, unless there is another reason now.
void ensureCordoned(ManagerQuery& query, const Drain& drain) {
  for (const ListedServer& one : query.servers())
    if (one.info.name == drain.server && one.cordoned && drain.reason.empty()) return;
  query.cordon(drain.server, true, drain.reason, userAndHost());
}

// None: the server is not cordoned any more.
std::optional<std::vector<pool::Lease>> remaining(ManagerQuery& query, const std::string& server) {
  bool cordoned = false;
  for (const ListedServer& one : query.servers())
    cordoned = cordoned || (one.info.name == server && one.cordoned);
  if (!cordoned) return std::nullopt;
  std::vector<pool::Lease> leases = query.leases();
  std::erase_if(leases, [&](const pool::Lease& lease) { return lease.server.name != server; });
  return leases;
}

std::string count(size_t leases) { return std::to_string(leases) + (leases == 1 ? " lease" : " leases"); }

// What is there when there is nothing any more, or no time. A manager that is away meanwhile is waited for,
// too.
std::vector<pool::Lease> awaitEnd(const Drain& drain, const std::function<ManagerQuery()>& connect) {
  const auto until = steady_clock::now() + drain.wait;
  size_t told = 0;
  for (;;) {
    const bool last = steady_clock::now() >= until;
    std::optional<std::vector<pool::Lease>> leases;
    try {
      ManagerQuery query = connect();
      leases = remaining(query, drain.server);
    } catch (const std::exception&) {  // kj's, too
      if (last) throw;
      ::usleep(kBetweenUs);
      continue;
    }
    if (!leases)
      throw CommandError(kExitFailure, "server " + drain.server +
                                           " is not cordoned any more: new leases may be placed on it");
    if (leases->empty() || last) return *leases;
    if (std::exchange(told, leases->size()) != leases->size())
      std::cout << "gpupool: waiting for the end of " << count(leases->size()) << "\n" << std::flush;
    ::usleep(kBetweenUs);
  }
}

}  // namespace

int runDrain(const Words& words) {
  ClientOptions client;
  Drain drain;
  const Parsed parsed = parseCommand(
      words, kDrain, &client, {"manager", "tenant", "token-file"},
      {{"wait", drain.wait, "TIME", "How long to wait for the end of the leases. 0: look once. At most 20d.",
        true},
       {"reason", drain.reason, "TEXT",
        "Why, as of `gpupool cordon`. Empty: that of before, if the server is cordoned already.", true}});
  if (parsed.helped) return 0;
  if (drain.wait > kMostWait) throw options::OptionError("--wait: at most 20d");
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("one server is expected; `gpupool servers` lists them");
  drain.server = parsed.rest[0];
  const auto connect = [&](unsigned limitMs) {
    return ManagerQuery(managerAddresses(client.manager), limitMs,
                        credentialsOf(client.tokenFile, client.tenant));
  };
  {
    ManagerQuery query = connect(kStoreMs);
    ensureCordoned(query, drain);
  }
  const auto leases = awaitEnd(drain, [&] { return connect(kLookMs); });
  if (leases.empty()) {
    std::cout << "gpupool: server " << drain.server << " is cordoned and has no leases\n";
    return 0;
  }
  std::cout << "gpupool: server " << drain.server << " is cordoned and has " << count(leases.size())
            << " still:\n";
  std::vector<std::vector<std::string>> rows = {leaseHeading(false)};
  for (const pool::Lease& lease : leases) rows.push_back(leaseRow(lease, false));
  std::cout.flush();
  printTable(rows);
  return kExitFailure;
}

}  // namespace gpupool::cli
