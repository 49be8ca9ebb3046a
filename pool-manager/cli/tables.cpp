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

}  // namespace

int runDevices(const Words& words) {
  const Listing listing = parse(
      words, "gpupool devices [options]",
      "Lists the GPUs of the pool, the free memory of each, and who holds it. Of a suspended lease only "
      "what stays on the GPU counts.",
      "  gpupool devices\n  gpupool devices --json | jq '.[] | select(.freeBytes > 0)'\n");
  if (listing.helped) return 0;
  ManagerQuery query = listing.query();
  const auto devices = query.devices();
  std::map<Id, std::string> holders;
  std::set<Id> suspended;
  for (const pool::Lease& lease : query.leases()) {
    holders[lease.id] = lease.holder;
    if (lease.state == "suspended") suspended.insert(lease.id);
  }
  std::set<std::string> cordoned;
  for (const ListedServer& server : query.servers())
    if (server.cordoned) cordoned.insert(server.info.name);
  json list = json::array();
  std::vector<std::vector<std::string>> rows = {
      {"SERVER", "GPU", "NAME", "MEMORY", "FREE", "STATE", "HELD BY"}};
  for (const ListedDevice& device : devices) {
    std::string held;
    json entry = toJson(device.info);
    entry["server"] = device.server;
    entry["freeBytes"] = device.freeBytes;
    entry["leases"] = json::array();
    entry["cordoned"] = cordoned.contains(device.server);
    entry["suspended"] = json::array();
    bool allAway = true;
    for (const Id& id : device.leases) {
      const bool away = suspended.contains(id);
      held += (held.empty() ? "" : ", ") + (holders[id].empty() ? shortId(id) : holders[id]) +
              (away ? " (suspended)" : "");
      entry["leases"].push_back(id.text());
      if (away) entry["suspended"].push_back(id.text());
      allAway = allAway && away;
    }
    list.push_back(entry);
    rows.push_back({device.server, std::to_string(device.info.ordinal), device.info.name,
                    options::formatSize(device.info.memoryBytes), options::formatSize(device.freeBytes),
                    !device.info.problem.empty()       ? "broken"
                    : !held.empty()                    ? (allAway ? "suspended" : "leased")
                    : cordoned.contains(device.server) ? "cordoned"
                    : device.freeBytes != 0            ? "free"
                                                       : "unreachable",
                    held.empty() ? "-" : held});
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
      "addresses for sessions.",
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
    list.push_back({{"name", server.info.name},
                    {"alive", server.alive},
                    {"cordoned", server.cordoned},
                    {"cordonReason", server.cordonReason},
                    {"lastBeatMs", server.lastBeatMs},
                    {"warmWorkers", server.warmWorkers},
                    {"pid", server.info.pid},
                    {"localPath", server.info.localPath},
                    {"address", network},
                    {"rowsHash", server.info.rowsHash},
                    {"devices", devices},
                    {"leftOut", server.info.leftOut},
                    {"fabric", fabricJson(server.fabric)}});
    std::string at = network;
    if (!server.info.localPath.empty()) at += (at.empty() ? "" : ", ") + server.info.localPath;
    const std::string state = server.alive ? "alive" : "lost";
    rows.push_back({server.info.name, state + (server.cordoned ? ", cordoned" : ""),
                    std::to_string(server.info.devices.size()), std::to_string(server.warmWorkers),
                    age(server.lastBeatMs) + " ago", at});
  }
  if (listing.json) {
    print(list);
    return 0;
  }
  printTable(rows);
  for (const ListedServer& server : servers)
    if (!server.cordonReason.empty())
      std::cout << "\n" << server.info.name << " is cordoned: " << server.cordonReason << "\n";
  if (listing.verbose)
    for (const ListedServer& server : servers) {
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
      "release --help`). A suspended one has left its GPUs until it is resumed.",
      "  gpupool leases\n");
  if (listing.helped) return 0;
  ManagerQuery query = listing.query();
  json list = json::array();
  std::vector<std::vector<std::string>> rows = {
      {"LEASE", "SERVER", "GPUS", "MEMORY EACH", "STATE", "AGE", "TENANT", "HOLDER"}};
  for (const pool::Lease& lease : query.leases()) {
    json devices = json::array();
    std::string ordinals;
    bool whole = true;
    for (const LeasedDevice& device : lease.devices) {
      devices.push_back({{"ordinal", device.info.ordinal},
                         {"uuid", uuidText(device.info.uuid)},
                         {"memoryBytes", device.memoryBytes}});
      ordinals += (ordinals.empty() ? "" : ",") + std::to_string(device.info.ordinal);
      whole = whole && device.memoryBytes >= device.info.memoryBytes;
    }
    list.push_back({{"id", lease.id.text()},
                    {"server", lease.server.name},
                    {"devices", devices},
                    {"ttlMs", lease.ttlMs},
                    {"state", lease.state},
                    {"ageMs", lease.ageMs},
                    {"tenant", lease.tenant},
                    {"holder", lease.holder}});
    rows.push_back(
        {shortId(lease.id), lease.server.name, ordinals,
         whole ? "whole" : options::formatSize(lease.devices.empty() ? 0 : lease.devices[0].memoryBytes),
         lease.state, age(lease.ageMs), lease.tenant.empty() ? "-" : lease.tenant, lease.holder});
  }
  if (listing.json)
    print(list);
  else
    printTable(rows);
  return 0;
}

}  // namespace gpupool::cli
