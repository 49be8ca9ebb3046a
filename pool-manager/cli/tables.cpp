// gpupool devices, servers, leases: what the manager knows, as a table for people or as JSON for programs.

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/fabric_table.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/output.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/table.h"
#include "pool-manager/listing_json.h"

namespace gpupool::cli {
namespace {

using nlohmann::json;

std::string age(uint64_t ms) {
  const uint64_t s = ms / 1000;
  if (s < 60) return std::to_string(s) + "s";
  if (s < 3600) return std::to_string(s / 60) + "m";
  if (s < 86400) return std::to_string(s / 3600) + "h" + std::to_string(s / 60 % 60) + "m";
  return std::to_string(s / 86400) + "d" + std::to_string(s / 3600 % 24) + "h";
}

void print(const json& value) { std::cout << pool::dump(value, 2) << '\n'; }

// "node7 is cordoned: a new fan (by eve@head, 2h3m ago)"
std::string describeCordon(const ListedServer& server) {
  std::string said = server.cordonedBy.empty() ? "" : "by " + server.cordonedBy;
  if (server.cordonedS != 0) said += (said.empty() ? "" : ", ") + age(server.cordonedS * 1000) + " ago";
  return server.info.name + " is cordoned" + (server.cordonReason.empty() ? "" : ": " + server.cordonReason) +
         (said.empty() ? "" : " (" + said + ")");
}

// "node7: workers have the walls no_new_privs, limits, seccomp; missing: landlock: ..."
void printWalls(const pool::Server& server) {
  const auto joined = [](const std::vector<std::string>& texts, const char* between) {
    std::string all;
    for (const std::string& text : texts) all += (all.empty() ? "" : between) + text;
    return all;
  };
  if (!server.walls.empty())
    std::cout << server.name << " has walls around its workers: " << joined(server.walls, ", ") << "\n";
  if (!server.missingWalls.empty())
    std::cout << server.name << " lacks walls around its workers: " << joined(server.missingWalls, "; ")
              << "\n";
}

// "node7 serves clients of gpupool 0.2.0 (call rows 3b1f...), 0.1.0 (call rows 77aa...)"
void printWorkers(const pool::Server& server) {
  std::string all;
  for (const pool::WorkerVersion& worker : server.workers) {
    char rows[17];
    std::snprintf(rows, sizeof rows, "%016llx", static_cast<unsigned long long>(worker.rowsHash));
    all += (all.empty() ? "" : ", ") + worker.release + " (call rows " + rows + ")";
  }
  if (!all.empty()) std::cout << server.name << " serves clients of gpupool " << all << "\n";
}

const std::vector<std::string> kSampleHeading = {"LOAD",     "USED", "TEMP",    "POWER",
                                                 "SM CLOCK", "ECC",  "NVLINKS", "XID"};
// As many cells as that.
std::vector<std::string> sampleCells(const std::optional<DeviceSample>& sample) {
  if (!sample) return std::vector<std::string>(kSampleHeading.size(), "-");
  const auto watts = [](uint32_t milliwatts) { return std::to_string((milliwatts + 500) / 1000); };
  return {
      sample->gpuPercent < 0 ? "-" : std::to_string(sample->gpuPercent) + "%",
      sample->totalBytes == 0 ? "-" : options::formatSize(sample->usedBytes),
      sample->temperatureC == DeviceSample::kNoTemperature ? "-" : std::to_string(sample->temperatureC) + "C",
      sample->powerMw == 0        ? "-"
      : sample->powerLimitMw == 0 ? watts(sample->powerMw) + " W"
                                  : watts(sample->powerMw) + " of " + watts(sample->powerLimitMw) + " W",
      sample->smMhz == 0 ? "-" : std::to_string(sample->smMhz) + " MHz",
      sample->eccErrors < 0 ? "-" : std::to_string(sample->eccErrors),
      sample->nvlinks < 0 ? "-" : std::to_string(sample->nvlinks),
      sample->xid == 0 ? "-" : std::to_string(sample->xid)};
}

struct Listing {
  ClientOptions client;
  bool json = false;
  bool verbose = false;
  bool helped = false;
  ManagerQuery query() const { return ManagerQuery(client, 3000); }
};

// verbose: what --verbose (-v) does; null: the command has no such option.
Listing parse(Words words, const char* usage, const char* purpose, const char* examples,
              const char* verbose = nullptr) {
  const Help help = {usage, purpose, "GPUPOOL_STATE: the folder of this machine's pool.",
                     "0: success. 1: no manager is reachable. 2: the command line is wrong.", examples};
  Listing listing;
  Output output;
  std::vector<options::Option> own;
  output.addTo(own);
  words = withOutput(std::move(words));
  if (verbose != nullptr) {
    own.push_back({"verbose", listing.verbose, "", verbose, true});
    std::replace(words.begin(), words.end(), std::string("-v"), std::string("--verbose"));
  }
  const Parsed parsed = parseCommand(words, help, &listing.client, kAskingOptions, own);
  listing.helped = parsed.helped;
  check(output);
  listing.json = output.json;
  listing.verbose = listing.verbose || output.wide();
  if (!parsed.rest.empty()) throw options::OptionError("'" + parsed.rest[0] + "': no arguments are expected");
  return listing;
}

std::string holders(const ListedDevice& device, const pool::PoolView& view) {
  std::string text;
  for (const Id& id : device.leases) {
    const pool::Lease* lease = view.find(id);
    text += (text.empty() ? "" : ", ") +
            (lease == nullptr || lease->holder.empty() ? shortId(id) : lease->holder);
    if (view.isSuspended(id)) text += " (suspended)";
    if (lease != nullptr && lease->turn) text += " (" + std::string(name(lease->turn->place)) + ")";
  }
  return text;
}

}  // namespace

std::vector<std::string> leaseHeading(bool verbose) {
  std::vector<std::string> row = {"LEASE", "SERVER", "GPUS", "MEMORY EACH", "STATE"};
  if (verbose) row.insert(row.end(), {"SHARE", "PRIORITY", "SERVED", "TURNS", "IDLE", "IDLE RELEASE"});
  row.insert(row.end(), {"AGE", "TENANT", "HOLDER"});
  return row;
}

std::vector<std::string> leaseRow(const pool::Lease& lease, bool verbose) {
  std::string ordinals;
  bool whole = true;
  for (const LeasedDevice& device : lease.devices) {
    ordinals += (ordinals.empty() ? "" : ",") + std::to_string(device.info.ordinal);
    whole = whole && device.memoryBytes >= device.info.memoryBytes;
  }
  std::vector<std::string> row = {
      shortId(lease.id), lease.server.name.empty() ? "-" : lease.server.name,
      ordinals.empty() ? "-" : ordinals,
      lease.devices.empty() ? "-"
      : whole               ? "whole"
                            : options::formatSize(lease.devices[0].memoryBytes),
      lease.state + (lease.turn ? std::string(", ") + name(lease.turn->place) : "")};
  if (verbose) {
    row.push_back(lease.terms.sharePercent == 0 ? "-" : std::to_string(lease.terms.sharePercent) + "%");
    row.emplace_back(name(lease.terms.priority));
    row.push_back(lease.turn ? age(lease.turn->servedMs) : "-");
    row.push_back(lease.turn ? std::to_string(lease.turn->turns) : "-");
    row.push_back(lease.idleMs < 0 ? "-" : age(static_cast<uint64_t>(lease.idleMs)));
    row.push_back(lease.terms.idleMs == 0 ? "-" : age(lease.terms.idleMs));
  }
  row.insert(row.end(), {age(lease.ageMs), lease.tenant.empty() ? "-" : lease.tenant, lease.holder});
  return row;
}

std::vector<std::vector<std::string>> deviceRows(const std::vector<ListedDevice>& devices,
                                                 const pool::PoolView& view, bool verbose) {
  std::vector<std::vector<std::string>> rows = {{"SERVER", "GPU", "NAME", "MEMORY", "FREE"}};
  if (view.overcommits) rows[0].emplace_back("LEASED");
  if (verbose) rows[0].insert(rows[0].end(), kSampleHeading.begin(), kSampleHeading.end());
  rows[0].insert(rows[0].end(), {"STATE", "HELD BY"});
  for (const ListedDevice& device : devices) {
    const std::string held = holders(device, view);
    auto& row = rows.emplace_back();
    row = {device.server, std::to_string(device.info.ordinal), device.info.name,
           options::formatSize(device.info.memoryBytes), options::formatSize(device.freeBytes)};
    if (view.overcommits)
      row.push_back(options::formatSize(view.leased(device)) + " of " +
                    options::formatSize(view.leasable(device)));
    if (verbose)
      for (std::string& cell : sampleCells(device.sample)) row.push_back(std::move(cell));
    row.emplace_back(!device.info.problem.empty() ? "broken"
                     : !held.empty()              ? (view.allSuspended(device) ? "suspended" : "leased")
                     : view.cordoned.contains(device.server) ? "cordoned"
                     : device.freeBytes != 0                 ? "free"
                                                             : "unreachable");
    row.push_back(held.empty() ? "-" : held);
  }
  return rows;
}

int runDevices(const Words& words) {
  const Listing listing = parse(
      words, "gpupool devices [options]",
      "Lists the GPUs of the pool, the free memory of each, and who holds it. Of a suspended lease only "
      "what stays on the GPU counts. Where a server leases more memory than its GPUs have, free is what may "
      "still be leased, and it is shown how much is leased of how much.",
      "  gpupool devices\n  gpupool devices -v\n"
      "  gpupool devices --json | jq '.[] | select(.freeBytes > 0)'\n",
      "Also -v. Shows what NVIDIA's management library says of each GPU: its load (the part of the time in "
      "which a kernel ran), the memory in use by whatever runs there, temperature, power, the clock of its "
      "multiprocessors, its uncorrected memory errors since the driver was loaded (ECC), how many of its "
      "NVLinks are up, and its last critical error since the server was started (XID). A - stands for what "
      "it does not say, and for no such error.");
  if (listing.helped) return 0;
  ManagerQuery query = listing.query();
  const auto devices = query.devices();
  const pool::PoolView view(query.leases(), query.servers());
  if (listing.json) {
    json list = json::array();
    for (const ListedDevice& device : devices) list.push_back(toJson(device, view));
    print(list);
    return 0;
  }
  printTable(deviceRows(devices, view, listing.verbose));
  for (const ListedDevice& device : devices)
    if (!device.info.problem.empty())
      std::printf("\n%s GPU %u is broken: %s\n", device.server.c_str(), device.info.ordinal,
                  device.info.problem.c_str());
  return 0;
}

int runServers(const Words& words) {
  const Listing listing = parse(
      words, "gpupool servers [options]",
      "Lists the servers of the pool: whether each is alive, its number of GPUs and waiting workers, and the "
      "addresses for sessions. A cordoned one is listed also when it is not in the pool, as absent.",
      "  gpupool servers --manager head:4780\n  gpupool servers -v\n",
      "Also -v. Lists the versions of gpupool whose clients each server serves, the walls around its workers "
      "(docs/security.md), its RDMA devices, the state "
      "and addresses of their ports, their PCI distance "
      "from each GPU (PIX, PXB, PHB, NODE or SYS, as `nvidia-smi topo` shows it), and whether they can "
      "access GPU memory directly (GPUDirect, by dma-buf).");
  if (listing.helped) return 0;
  ManagerQuery query = listing.query();
  json list = json::array();
  std::vector<std::vector<std::string>> rows = {
      {"SERVER", "STATE", "GPUS", "WARM WORKERS", "HEARD OF", "SESSIONS AT"}};
  const auto servers = query.servers();
  for (const ListedServer& server : servers) {
    const std::string network = server.info.host.empty() || server.info.port == 0
                                    ? ""
                                    : server.info.host + ":" + std::to_string(server.info.port);
    list.push_back(toJson(server));
    std::string at = network;
    if (!server.info.localPath.empty()) at += (at.empty() ? "" : ", ") + server.info.localPath;
    const std::string state = server.alive ? "alive" : server.absent ? "absent" : "lost";
    rows.push_back({server.info.name, state + (server.cordoned ? ", cordoned" : ""),
                    std::to_string(server.info.devices.size()), std::to_string(server.warmWorkers),
                    server.absent ? "-" : age(server.lastBeatMs) + " ago", at});
  }
  if (listing.json) {
    print(list);
    return 0;
  }
  printTable(rows);
  for (const ListedServer& server : servers)
    if (server.cordoned) std::cout << "\n" << describeCordon(server) << "\n";
  if (listing.verbose)
    for (const ListedServer& server : servers) {
      if (server.info.overcommitPercent > 100)
        std::cout << server.info.name << " leases " << server.info.overcommitPercent
                  << "% of its GPUs' memory: leases take turns\n";
      printWorkers(server.info);
      printWalls(server.info);
      for (const std::string& note : server.info.leftOut)
        std::cout << server.info.name << " leaves out " << note << "\n";
      printFabric(server);
    }
  return 0;
}

int runLeases(const Words& words) {
  const Listing listing = parse(
      words, "gpupool leases [options]",
      "Lists the leases: which GPUs, how much memory, in which state, since when, and for whom. A lost lease "
      "is over, and its GPUs are not free: its server has not said that nothing of it runs (see `gpupool "
      "release --help`). A suspended one has left its GPUs until it is resumed, and one that is held has "
      "left its server for files. Where more is leased than "
      "there is, leases take turns: resident, its memory is on its GPUs; aside, it is not, and its programs "
      "want nothing; waiting, they do, and it comes back by itself when it is its turn. A moving one has "
      "other "
      "GPUs, too, until all of its sessions are there (see `gpupool migrate --help`).",
      "  gpupool leases\n  gpupool leases -v\n",
      "Also -v, or -o wide. Shows the share and the priority of each lease; for how long those with an idle "
      "release have "
      "not been used, and when they are given back for that; how long those that take turns have been on "
      "their GPUs, and how often they have come back there; why one could not be put aside; where those that "
      "move are going; why one could not be moved, as far as that is known before anybody tries; what leases "
      "are for, and what is left of their time limits.");
  if (listing.helped) return 0;
  ManagerQuery query = listing.query();
  json list = json::array();
  std::vector<std::vector<std::string>> rows = {leaseHeading(listing.verbose)};
  const auto leases = query.leases();
  for (const pool::Lease& lease : leases) {
    list.push_back(toJson(lease));
    rows.push_back(leaseRow(lease, listing.verbose));
  }
  if (listing.json) {
    print(list);
    return 0;
  }
  printTable(rows);
  for (const pool::Lease& lease : leases)
    if (!lease.why.empty())
      std::cout << "\n"
                << shortId(lease.id)
                << (lease.state == "suspended" || lease.state == "held" ? " is " + lease.state + ": " : " ")
                << lease.why << "\n";
  if (listing.verbose)
    for (const pool::Lease& lease : leases) {
      if (!lease.reason.empty())
        std::cout << "\n" << shortId(lease.id) << " is for: " << lease.reason << "\n";
      for (const std::string& adopter : lease.adopters)
        std::cout << "\n" << shortId(lease.id) << " is used by " << adopter << "\n";
      if (lease.endsInMs != 0)
        std::cout << "\n"
                  << shortId(lease.id) << " has " << age(lease.endsInMs) << " left of its time limit\n";
      if (!lease.movesTo.empty())
        std::cout << "\n" << shortId(lease.id) << " is moving to " << lease.movesTo << "\n";
      if (lease.turn && !lease.turn->note.empty())
        std::cout << "\n" << shortId(lease.id) << " was not put aside: " << lease.turn->note << "\n";
      for (const auto* said : {&lease.hindrances, &lease.protection})
        for (const std::string& one : *said) std::cout << "\n" << shortId(lease.id) << " " << one << "\n";
    }
  return 0;
}

}  // namespace gpupool::cli
