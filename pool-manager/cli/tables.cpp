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
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/table.h"
#include "pool-manager/placement.h"

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

std::string uuidText(const std::string& bytes) {
  std::string text = "GPU-";
  for (size_t i = 0; i < bytes.size(); ++i) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", static_cast<unsigned char>(bytes[i]));
    text += (i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + std::string(pair);
  }
  return text;
}

std::string shortId(const Id& id) { return id.text().substr(0, 8); }

// Names come from servers: whatever bytes they are, the output is valid JSON.
void print(const json& value) {
  std::cout << value.dump(2, ' ', false, json::error_handler_t::replace) << '\n';
}

json toJson(const Device& device) {
  return {
      {"ordinal", device.ordinal},
      {"name", device.name},
      {"uuid", uuidText(device.uuid)},
      {"memoryBytes", device.memoryBytes},
      {"computeCapability", std::to_string(device.computeMajor) + "." + std::to_string(device.computeMinor)},
      {"pciBusId", device.pciBusId},
      {"software", device.software},
      {"healthy", device.problem.empty()},
      {"problem", device.problem},
      {"driverVersion", device.driverVersion}};
}

// "node7 is cordoned: a new fan (by eve@head, 2h3m ago)"
std::string describeCordon(const ListedServer& server) {
  std::string said = server.cordonedBy.empty() ? "" : "by " + server.cordonedBy;
  if (server.cordonedS != 0) said += (said.empty() ? "" : ", ") + age(server.cordonedS * 1000) + " ago";
  return server.info.name + " is cordoned" + (server.cordonReason.empty() ? "" : ": " + server.cordonReason) +
         (said.empty() ? "" : " (" + said + ")");
}

// What NVML does not tell of a GPU is left out.
json toJson(const DeviceSample& sample) {
  json entry = {{"ageMs", sample.ageMs}, {"lastXid", sample.xid}};
  const auto tell = [&](const char* name, auto value, bool known) {
    if (known) entry[name] = value;
  };
  tell("gpuPercent", sample.gpuPercent, sample.gpuPercent >= 0);
  tell("memoryPercent", sample.memoryPercent, sample.memoryPercent >= 0);
  tell("usedBytes", sample.usedBytes, sample.totalBytes != 0);
  tell("totalBytes", sample.totalBytes, sample.totalBytes != 0);
  tell("temperatureC", sample.temperatureC, sample.temperatureC != DeviceSample::kNoTemperature);
  tell("powerMilliwatts", sample.powerMw, sample.powerMw != 0);
  tell("powerLimitMilliwatts", sample.powerLimitMw, sample.powerLimitMw != 0);
  tell("smMegahertz", sample.smMhz, sample.smMhz != 0);
  tell("memoryMegahertz", sample.memoryMhz, sample.memoryMhz != 0);
  tell("uncorrectedEccErrors", sample.eccErrors, sample.eccErrors >= 0);
  tell("nvlinksUp", sample.nvlinks, sample.nvlinks >= 0);
  return entry;
}

const std::vector<std::string> kSampleHeading = {"LOAD", "USED", "TEMP", "POWER"};
// As many cells as that.
std::vector<std::string> sampleCells(const std::optional<DeviceSample>& sample) {
  if (!sample) return {"-", "-", "-", "-"};
  const auto watts = [](uint32_t milliwatts) { return std::to_string((milliwatts + 500) / 1000); };
  return {
      sample->gpuPercent < 0 ? "-" : std::to_string(sample->gpuPercent) + "%",
      sample->totalBytes == 0 ? "-" : options::formatSize(sample->usedBytes),
      sample->temperatureC == DeviceSample::kNoTemperature ? "-" : std::to_string(sample->temperatureC) + "C",
      sample->powerMw == 0        ? "-"
      : sample->powerLimitMw == 0 ? watts(sample->powerMw) + " W"
                                  : watts(sample->powerMw) + " of " + watts(sample->powerLimitMw) + " W"};
}

struct Listing {
  ClientOptions client;
  bool json = false;
  bool verbose = false;
  bool helped = false;
  ManagerQuery query() const {
    return ManagerQuery(managerAddresses(client.manager), 3000,
                        credentialsOf(client.tokenFile, client.tenant));
  }
};

// verbose: what --verbose (-v) does; null: the command has no such option.
Listing parse(Words words, const char* usage, const char* purpose, const char* examples,
              const char* verbose = nullptr) {
  const Help help = {usage, purpose, "GPUPOOL_STATE: the folder of this machine's pool.",
                     "0: success. 1: no manager is reachable. 2: the command line is wrong.", examples};
  Listing listing;
  std::vector<options::Option> own = {{"json", listing.json, "", "Print JSON instead of a table.", true}};
  if (verbose != nullptr) {
    own.push_back({"verbose", listing.verbose, "", verbose, true});
    std::replace(words.begin(), words.end(), std::string("-v"), std::string("--verbose"));
  }
  const Parsed parsed = parseCommand(words, help, &listing.client, {"manager", "tenant", "token-file"}, own);
  listing.helped = parsed.helped;
  if (!parsed.rest.empty()) throw options::OptionError("'" + parsed.rest[0] + "': no arguments are expected");
  return listing;
}

// What the manager says beside its devices.
struct PoolView {
  explicit PoolView(ManagerQuery& query) {
    for (pool::Lease& lease : query.leases()) {
      const Id id = lease.id;
      leases.emplace(id, std::move(lease));
    }
    for (const ListedServer& server : query.servers()) {
      if (server.cordoned) cordoned.insert(server.info.name);
      percents[server.info.name] = server.info.overcommitPercent;
      overcommits = overcommits || server.info.overcommitPercent > 100;
    }
  }

  // Null: it has ended since.
  const pool::Lease* find(const Id& id) const {
    const auto at = leases.find(id);
    return at == leases.end() ? nullptr : &at->second;
  }
  bool isSuspended(const Id& id) const {
    const pool::Lease* lease = find(id);
    return lease != nullptr && lease->state == "suspended";
  }
  bool allSuspended(const ListedDevice& device) const {
    return std::all_of(device.leases.begin(), device.leases.end(),
                       [&](const Id& id) { return isSuspended(id); });
  }
  uint32_t percent(const ListedDevice& device) const {
    const auto at = percents.find(device.server);
    return at == percents.end() ? 100 : at->second;
  }
  uint64_t leasable(const ListedDevice& device) const {
    return pool::leasableBytes(device.info.memoryBytes, percent(device));
  }
  // Whatever is free: of a server that is away nothing is.
  uint64_t leased(const ListedDevice& device) const {
    uint64_t sum = 0;
    for (const Id& id : device.leases)
      if (const pool::Lease* lease = find(id); lease != nullptr)
        for (const LeasedDevice& one : lease->devices)
          if (one.info.uuid == device.info.uuid)
            sum += isSuspended(id) ? pool::suspendedBytes(one, 0) : pool::reservedBytes(one);
    return sum;
  }
  std::string holders(const ListedDevice& device) const {
    std::string text;
    for (const Id& id : device.leases) {
      const pool::Lease* lease = find(id);
      text += (text.empty() ? "" : ", ") +
              (lease == nullptr || lease->holder.empty() ? shortId(id) : lease->holder);
      if (isSuspended(id)) text += " (suspended)";
      if (lease != nullptr && lease->turn) text += " (" + std::string(name(lease->turn->place)) + ")";
    }
    return text;
  }
  json toJson(const ListedDevice& device) const {
    json entry = cli::toJson(device.info);
    entry["server"] = device.server;
    entry["freeBytes"] = device.freeBytes;
    entry["leases"] = json::array();
    entry["cordoned"] = cordoned.contains(device.server);
    entry["suspended"] = json::array();
    if (device.sample) entry["sample"] = cli::toJson(*device.sample);
    for (const Id& id : device.leases) {
      entry["leases"].push_back(id.text());
      if (isSuspended(id)) entry["suspended"].push_back(id.text());
    }
    if (percent(device) <= 100) return entry;
    entry["leasableBytes"] = leasable(device);
    entry["leasedBytes"] = leased(device);
    entry["turns"] = json::object();
    for (const Id& id : device.leases)
      if (const pool::Lease* lease = find(id); lease != nullptr && lease->turn)
        entry["turns"][id.text()] = name(lease->turn->place);
    return entry;
  }

  std::map<Id, pool::Lease> leases;
  std::set<std::string> cordoned;
  std::map<std::string, uint32_t> percents;  // of each device's memory, so much may be leased; by server
  bool overcommits = false;                  // one of them
};

json toJson(const pool::Lease& lease) {
  json devices = json::array();
  for (const LeasedDevice& device : lease.devices)
    devices.push_back({{"ordinal", device.info.ordinal},
                       {"uuid", uuidText(device.info.uuid)},
                       {"memoryBytes", device.memoryBytes}});
  json entry = {{"id", lease.id.text()},  {"server", lease.server.name}, {"devices", devices},
                {"ttlMs", lease.ttlMs},   {"state", lease.state},        {"ageMs", lease.ageMs},
                {"tenant", lease.tenant}, {"holder", lease.holder}};
  if (lease.server.overcommitPercent > 100 || lease.terms.sharePercent != 0 ||
      lease.terms.priority != pool::Priority::normal)
    entry["terms"] = {{"sharePercent", lease.terms.sharePercent}, {"priority", name(lease.terms.priority)}};
  if (!lease.movesTo.empty()) entry["movesTo"] = lease.movesTo;
  if (!lease.hindrances.empty()) entry["hindrances"] = lease.hindrances;
  if (lease.turn)
    entry["turn"] = {{"place", name(lease.turn->place)},
                     {"servedMs", lease.turn->servedMs},
                     {"turns", lease.turn->turns},
                     {"note", lease.turn->note}};
  return entry;
}

}  // namespace

std::vector<std::string> leaseHeading(bool verbose) {
  std::vector<std::string> row = {"LEASE", "SERVER", "GPUS", "MEMORY EACH", "STATE"};
  if (verbose) row.insert(row.end(), {"SHARE", "PRIORITY", "SERVED", "TURNS"});
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
      shortId(lease.id), lease.server.name, ordinals,
      whole ? "whole" : options::formatSize(lease.devices.empty() ? 0 : lease.devices[0].memoryBytes),
      lease.state + (lease.turn ? std::string(", ") + name(lease.turn->place) : "")};
  if (verbose) {
    row.push_back(lease.terms.sharePercent == 0 ? "-" : std::to_string(lease.terms.sharePercent) + "%");
    row.emplace_back(name(lease.terms.priority));
    row.push_back(lease.turn ? age(lease.turn->servedMs) : "-");
    row.push_back(lease.turn ? std::to_string(lease.turn->turns) : "-");
  }
  row.insert(row.end(), {age(lease.ageMs), lease.tenant.empty() ? "-" : lease.tenant, lease.holder});
  return row;
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
      "which a kernel ran), the memory in use by whatever runs there, temperature and power. A - stands for "
      "what it does not say.");
  if (listing.helped) return 0;
  ManagerQuery query = listing.query();
  const auto devices = query.devices();
  const PoolView view(query);
  json list = json::array();
  std::vector<std::vector<std::string>> rows = {{"SERVER", "GPU", "NAME", "MEMORY", "FREE"}};
  if (view.overcommits) rows[0].emplace_back("LEASED");
  if (listing.verbose) rows[0].insert(rows[0].end(), kSampleHeading.begin(), kSampleHeading.end());
  rows[0].insert(rows[0].end(), {"STATE", "HELD BY"});
  for (const ListedDevice& device : devices) {
    const std::string held = view.holders(device);
    list.push_back(view.toJson(device));
    auto& row = rows.emplace_back();
    row = {device.server, std::to_string(device.info.ordinal), device.info.name,
           options::formatSize(device.info.memoryBytes), options::formatSize(device.freeBytes)};
    if (view.overcommits)
      row.push_back(options::formatSize(view.leased(device)) + " of " +
                    options::formatSize(view.leasable(device)));
    if (listing.verbose)
      for (std::string& cell : sampleCells(device.sample)) row.push_back(std::move(cell));
    row.emplace_back(!device.info.problem.empty() ? "broken"
                     : !held.empty()              ? (view.allSuspended(device) ? "suspended" : "leased")
                     : view.cordoned.contains(device.server) ? "cordoned"
                     : device.freeBytes != 0                 ? "free"
                                                             : "unreachable");
    row.push_back(held.empty() ? "-" : held);
  }
  if (listing.json) {
    print(list);
    return 0;
  }
  printTable(rows);
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
      "Also -v. Lists each server's RDMA devices, the state and addresses of their ports, their PCI distance "
      "from each GPU (PIX, PXB, PHB, NODE or SYS, as `nvidia-smi topo` shows it), and whether they can "
      "access GPU memory directly (GPUDirect, by dma-buf).");
  if (listing.helped) return 0;
  ManagerQuery query = listing.query();
  json list = json::array();
  std::vector<std::vector<std::string>> rows = {
      {"SERVER", "STATE", "GPUS", "WARM WORKERS", "HEARD OF", "SESSIONS AT"}};
  const auto servers = query.servers();
  for (const ListedServer& server : servers) {
    json devices = json::array();
    for (const Device& device : server.info.devices) devices.push_back(toJson(device));
    const std::string network = server.info.host.empty() || server.info.port == 0
                                    ? ""
                                    : server.info.host + ":" + std::to_string(server.info.port);
    json& entry = list.emplace_back();
    entry = {{"name", server.info.name},
             {"alive", server.alive},
             {"cordoned", server.cordoned},
             {"cordonReason", server.cordonReason},
             {"cordonedBy", server.cordonedBy},
             {"cordonedSeconds", server.cordonedS},
             {"absent", server.absent},
             {"lastBeatMs", server.lastBeatMs},
             {"warmWorkers", server.warmWorkers},
             {"pid", server.info.pid},
             {"localPath", server.info.localPath},
             {"address", network},
             {"rowsHash", server.info.rowsHash},
             {"devices", devices},
             {"leftOut", server.info.leftOut},
             {"fabric", fabricJson(server.fabric)}};
    if (server.info.overcommitPercent > 100) entry["overcommitPercent"] = server.info.overcommitPercent;
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
      "release --help`). A suspended one has left its GPUs until it is resumed. Where more is leased than "
      "there is, leases take turns: resident, its memory is on its GPUs; aside, it is not, and its programs "
      "want nothing; waiting, they do, and it comes back by itself when it is its turn. A moving one has "
      "other "
      "GPUs, too, until all of its sessions are there (see `gpupool migrate --help`).",
      "  gpupool leases\n  gpupool leases -v\n",
      "Also -v. Shows the share and the priority of each lease; how long those that take turns have been on "
      "their GPUs, and how often they have come back there; why one could not be put aside; where those that "
      "move are going; and why one could not be moved, as far as that is known before anybody tries.");
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
  if (listing.verbose)
    for (const pool::Lease& lease : leases) {
      if (!lease.movesTo.empty())
        std::cout << "\n" << shortId(lease.id) << " is moving to " << lease.movesTo << "\n";
      if (lease.turn && !lease.turn->note.empty())
        std::cout << "\n" << shortId(lease.id) << " was not put aside: " << lease.turn->note << "\n";
      for (const std::string& reason : lease.hindrances)
        std::cout << "\n" << shortId(lease.id) << " " << reason << "\n";
    }
  return 0;
}

}  // namespace gpupool::cli
