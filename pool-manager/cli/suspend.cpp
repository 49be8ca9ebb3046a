// gpupool suspend and resume: leases that leave their GPUs for a while, and come back.

#include <cstdio>
#include <functional>
#include <iostream>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"

namespace gpupool::cli {
namespace {

using std::chrono::milliseconds;

constexpr unsigned kListMs = 10'000;
constexpr uint64_t kMoveMs =
    330'000;  // beside what is waited for: longer than the manager waits for a server

const char* const kEnvironment = "GPUPOOL_STATE: the folder of this machine's pool.";
const char* const kStatus =
    "0: done. 1: there is no such lease, or it cannot be done, or with --server for one of the leases. 2: "
    "the "
    "command line is wrong.";

const Help kSuspend = {
    "gpupool suspend [options] LEASE | --server NAME",
    "Takes the memory of a lease's programs off its GPUs and keeps it in the server's own memory; other "
    "leases "
    "can have it meanwhile. The programs stand still at their next CUDA call, and notice nothing else. What "
    "stays on each GPU is printed. The lease, named as `gpupool leases` prints it or by 4 of its digits or "
    "more, "
    "has to be your own, or you the pool's operator. It is still renewed by its holder, and is released when "
    "its program ends. Undone by `gpupool resume`.",
    kEnvironment, kStatus, "  gpupool suspend 3f2a91c4\n  gpupool suspend --drain 5m --server node7\n"};
const Help kResume = {
    "gpupool resume [options] LEASE | --server NAME",
    "Brings the memory of a suspended lease back to the same GPUs, and its programs go on. Fails where there "
    "is no room, saying what is missing and who holds it, or waits for it in turn with those who wait for a "
    "lease.",
    kEnvironment, kStatus, "  gpupool resume 3f2a91c4\n  gpupool resume --wait 1h --server node7\n"};

std::string seconds(uint32_t ms) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", ms / 1000.0);
  return text;
}

// "16.0 MiB stay on GPU 0, 8.0 MiB on GPU 1"
std::string describeKept(const pool::Lease& lease, const pool::SuspendResult& result) {
  std::string text;
  for (size_t i = 0; i < std::min(result.kept.size(), lease.devices.size()); ++i) {
    if (result.kept[i] == 0) continue;
    text += (text.empty() ? "" : ", ") + options::formatSize(result.kept[i]) + (text.empty() ? " stay" : "") +
            " on GPU " + std::to_string(lease.devices[i].info.ordinal);
  }
  return text;
}

std::string describe(const pool::Lease& lease, const pool::SuspendResult& result) {
  std::string text = "lease " + shortId(lease.id) + " is suspended";
  // Suspended already, and by an earlier life of the manager: only what stays is known.
  if (result.movedBytes != 0 || result.drainMs != 0 || result.moveMs != 0)
    text += ": " + options::formatSize(result.movedBytes) + " moved in " + seconds(result.moveMs) +
            " (waited " + seconds(result.drainMs) + " for its devices)";
  const std::string kept = describeKept(lease, result);
  return text + (kept.empty() ? "" : "; " + kept);
}

struct Order {
  const Help& help;
  options::Option option;
  std::function<bool(const pool::Lease&)> concerns;                        // of those on the server
  std::function<std::string(ManagerQuery&, const pool::Lease&)> carryOut;  // what is to be printed
  std::function<void()> check;                                             // the option's value
  const char* none;                                                        // concerns none on the server
};

// All leases of a server that are the asker's; one that fails does not keep the others from it.
int onServer(ManagerQuery& query, const std::string& server, const Order& order) {
  bool known = false, failed = false, any = false, others = false;
  for (const ListedServer& one : query.servers()) known = known || one.info.name == server;
  if (!known) throw CommandError(kExitFailure, "there is no server " + server);
  for (const pool::Lease& lease : query.leases()) {
    if (lease.server.name != server || !order.concerns(lease)) continue;
    if (lease.holder == pool::kInUse) {
      others = true;
      continue;
    }
    any = true;
    try {
      std::cout << "gpupool: " + order.carryOut(query, lease) << "\n" << std::flush;
    } catch (const kj::Exception& error) {
      failed = true;
      std::cout.flush();
      std::cerr << "gpupool: lease " << shortId(lease.id) << ": " << pool::errorText(error) << "\n";
    }
  }
  if (!any)
    std::cout << "gpupool: " << order.none << server
              << (others ? " but those of other tenants, which are not yours to change\n" : "\n");
  return failed ? kExitFailure : 0;
}

int run(const Words& words, const Order& order) {
  ClientOptions client;
  std::string server;
  const Parsed parsed = parseCommand(words, order.help, &client, kAskingOptions,
                                     {order.option,
                                      {"server", server, "NAME",
                                       "All leases on this server that are your own, or all if you are the "
                                       "pool's operator, one after the other.",
                                       true}});
  if (parsed.helped) return 0;
  order.check();
  if (parsed.rest.size() != (server.empty() ? 1 : 0) || (server.empty() && parsed.rest[0].empty()))
    throw options::OptionError("one lease is expected, or --server NAME; `gpupool leases` lists them");
  ManagerQuery query(client, kListMs);
  if (!server.empty()) return onServer(query, server, order);
  const auto leases = query.leases();
  const Id id = findLease(leases, parsed.rest[0]);
  for (const pool::Lease& lease : leases)
    if (lease.id == id) std::cout << "gpupool: " + order.carryOut(query, lease) + "\n";
  return 0;
}

}  // namespace

int runSuspend(const Words& words) {
  milliseconds drain{30'000};
  return run(
      words,
      {kSuspend,
       {"drain", drain, "TIME",
        "What runs on the GPUs has so long to finish. If it does not, the programs go on as before, and "
        "the command fails.",
        true},
       [](const pool::Lease& lease) { return lease.state == "active" || lease.state == "suspended"; },
       [&](ManagerQuery& query, const pool::Lease& lease) {
         const auto drainMs = static_cast<unsigned>(drain.count());
         return describe(lease, query.suspend(lease.id, drainMs, drainMs + kMoveMs));
       },
       [&] {
         if (drain > kMostDrain) throw options::OptionError("--drain: at most 1h");
       },
       "no lease runs on "});
}

int runResume(const Words& words) {
  milliseconds wait{0};
  return run(words, {kResume,
                     {"wait", wait, "TIME",
                      "How long to wait for room on the GPUs. 0: fail at once. At most 20d.", true},
                     [](const pool::Lease& lease) { return lease.state == "suspended"; },
                     [&](ManagerQuery& query, const pool::Lease& lease) {
                       const auto waitMs = static_cast<unsigned>(wait.count());
                       query.resume(lease.id, waitMs, waitMs + kMoveMs, "", {}, tellPeople);
                       return "lease " + shortId(lease.id) + " runs";
                     },
                     [&] {
                       if (wait > kMostWait) throw options::OptionError("--wait: at most 20d");
                     },
                     "no lease is suspended on "});
}

}  // namespace gpupool::cli
