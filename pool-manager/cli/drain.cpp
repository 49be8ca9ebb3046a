// gpupool drain: nothing new on a server, what is there goes to other servers, and what is there still.

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <set>
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

constexpr unsigned kStoreMs = 10'000, kLookMs = 3000, kDrainMs = 30'000;
constexpr uint64_t kMigrateMs = kDrainMs + 3'660'000;  // longer than the manager waits for a server
constexpr useconds_t kBetweenUs = 500'000;
constexpr milliseconds kMostWait = std::chrono::hours(24 * 20);
constexpr milliseconds kBetweenMoves = std::chrono::minutes(1);  // room may come
constexpr milliseconds kLeave =
    std::chrono::seconds(10);  // a server gives up what has moved away within this

const Help kDrain = {
    "gpupool drain [options] SERVER",
    "Cordons a server, so that no new lease is placed on it (see `gpupool cordon --help`), moves its leases "
    "to "
    "other servers, one after the other, as far as they can be moved and there is room (see `gpupool migrate "
    "--help`), and lists those that are there still; with --wait it waits for their end, and tries to move "
    "them again every minute. It ends none of them: `gpupool release` does. A suspended lease is not moved, "
    "for its memory is with the server. Asked again, it begins again. The server stays cordoned, whatever "
    "the "
    "command says: `gpupool uncordon` puts it back into service. Only the pool's operator can.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: the server has no lease any more, and can be stopped. 1: leases are there still, or it cannot be "
    "done. 2: the command line is wrong.",
    "  gpupool drain node7\n  gpupool drain --wait 8h --reason 'a new fan' node7 && ssh node7 poweroff\n"};

struct Drain {
  std::string server, reason;
  milliseconds wait{0};
  bool stay = false;  // its leases are not moved
};

using Leases = std::vector<pool::Lease>;
using Connect = std::function<ManagerQuery()>;

// A cordon that is there already is left as it is, unless there is another reason now.
void ensureCordoned(ManagerQuery& query, const Drain& drain) {
  for (const ListedServer& one : query.servers())
    if (one.info.name == drain.server && one.cordoned && drain.reason.empty()) return;
  query.cordon(drain.server, true, drain.reason, userAndHost());
}

// Those that the server has anything of. None: the server is not cordoned any more.
std::optional<Leases> remaining(ManagerQuery& query, const std::string& server) {
  bool cordoned = false;
  for (const ListedServer& one : query.servers())
    cordoned = cordoned || (one.info.name == server && one.cordoned);
  if (!cordoned) return std::nullopt;
  std::set<Id> there;
  for (const ListedDevice& device : query.devices())
    if (device.server == server) there.insert(device.leases.begin(), device.leases.end());
  Leases leases = query.leases();
  std::erase_if(leases, [&](const pool::Lease& lease) {
    return lease.server.name != server && !there.contains(lease.id);
  });
  return leases;
}

std::string count(size_t leases) { return std::to_string(leases) + (leases == 1 ? " lease" : " leases"); }

class Draining {
 public:
  Draining(Drain drain, Connect connect) : drain_(std::move(drain)), connect_(std::move(connect)) {}

  // What is there when there is nothing any more, or no time. A manager that is away meanwhile is waited for,
  // too.
  Leases run() {
    const auto begun = steady_clock::now();
    auto until = begun + drain_.wait, moveAt = begun;
    for (;;) {
      bool last = steady_clock::now() >= until;
      std::optional<Leases> leases;
      try {
        ManagerQuery query = connect_();
        leases = remaining(query, drain_.server);
        if (leases && !drain_.stay && steady_clock::now() >= moveAt) {
          moveAway(query, *leases);
          leases = remaining(query, drain_.server);
          moveAt = steady_clock::now() + kBetweenMoves;
          until = std::max(until, leases && leaves(*leases) ? steady_clock::now() + kLeave : until);
          last = steady_clock::now() >= until;
        }
      } catch (const std::exception&) {  // kj's, too
        if (last) throw;
        ::usleep(kBetweenUs);
        continue;
      }
      if (!leases)
        throw CommandError(kExitFailure, "server " + drain_.server +
                                             " is not cordoned any more: new leases may be placed on it");
      if (leases->empty() || last) return *leases;
      if (std::exchange(told_, leases->size()) != leases->size() && drain_.wait.count() != 0)
        std::cout << "gpupool: waiting for the end of " << count(leases->size()) << "\n" << std::flush;
      ::usleep(kBetweenUs);
    }
  }

 private:
  // They have moved, and the server has not said yet that it has given up what they had.
  bool leaves(const Leases& leases) const {
    return std::all_of(leases.begin(), leases.end(),
                       [&](const pool::Lease& lease) { return lease.server.name != drain_.server; });
  }

  // One line each, and another one only when there is news.
  void moveAway(ManagerQuery& query, const Leases& leases) {
    for (const pool::Lease& lease : leases) {
      const bool runs = lease.state == "active" || lease.state == "moving" || lease.state == "suspended";
      if (lease.server.name != drain_.server || !runs) continue;
      std::string said;
      try {
        said = "moved to " + query.migrate(lease.id, kDrainMs, {"", {}, true}, kMigrateMs).server;
      } catch (const kj::Exception& error) {
        said = "stays: " + pool::errorText(error);
      }
      if (std::exchange(said_[lease.id], said) != said)
        std::cout << "gpupool: lease " << lease.id.text().substr(0, 8) << " " << said << "\n" << std::flush;
    }
  }

  const Drain drain_;
  const Connect connect_;
  size_t told_ = 0;
  std::map<Id, std::string> said_;
};

}  // namespace

int runDrain(const Words& words) {
  ClientOptions client;
  Drain drain;
  const Parsed parsed = parseCommand(
      words, kDrain, &client, kAskingOptions,
      {{"wait", drain.wait, "TIME", "How long to wait for the end of the leases. 0: look once. At most 20d.",
        true},
       {"reason", drain.reason, "TEXT",
        "Why, as of `gpupool cordon`. Empty: that of before, if the server is cordoned already.", true},
       {"no-move", drain.stay, "", "Moves no lease.", true}});
  if (parsed.helped) return 0;
  if (drain.wait > kMostWait) throw options::OptionError("--wait: at most 20d");
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("one server is expected; `gpupool servers` lists them");
  drain.server = parsed.rest[0];
  const auto connect = [&](unsigned limitMs) { return ManagerQuery(client, limitMs); };
  {
    ManagerQuery query = connect(kStoreMs);
    ensureCordoned(query, drain);
  }
  const Leases leases = Draining(drain, [&] { return connect(kLookMs); }).run();
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
