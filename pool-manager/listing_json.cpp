#include "pool-manager/listing_json.h"

#include <arpa/inet.h>

#include <cstdio>
#include <nlohmann/json.hpp>

namespace gpupool::pool {
namespace {

using nlohmann::json;

json deviceJson(const Device& device) {
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

// What NVML does not tell of a GPU is left out.
json sampleJson(const DeviceSample& sample) {
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

json portJson(const fabric::Port& port) {
  json gids = json::array();
  for (const fabric::Gid& gid : port.gids)
    gids.push_back({{"index", gid.index},
                    {"type", fabric::text(gid.type)},
                    {"value", gidText(gid.value)},
                    {"default", port.defaultGid == static_cast<int64_t>(gid.index)}});
  return {{"number", port.number},
          {"state", fabric::text(port.state)},
          {"linkLayer", fabric::text(port.linkLayer)},
          {"rateGbps", port.rateMbps / 1000.0},
          {"mtu", port.mtu},
          {"lid", port.lid},
          {"interface", port.netdev},
          {"gids", gids}};
}

json fabricJson(const fabric::Fabric& fabric) {
  json devices = json::array();
  for (const fabric::Device& device : fabric.devices) {
    json distances = json::array(), ports = json::array();
    for (auto distance : device.gpuDistances) distances.push_back(fabric::text(distance));
    for (const fabric::Port& port : device.ports) ports.push_back(portJson(port));
    devices.push_back({{"name", device.name},
                       {"nodeGuid", guidText(device.nodeGuid)},
                       {"transport", device.transport},
                       {"firmware", device.firmware},
                       {"pciAddress", device.pciAddress},
                       {"numaNode", device.numaNode},
                       {"gpuDistances", distances},
                       {"dmaBuf", fabric::text(device.dmaBuf)},
                       {"dmaBufReason", device.dmaBufReason},
                       {"problem", device.problem},
                       {"ports", ports}});
  }
  json nvlinks = json::array();
  for (const uint64_t joined : fabric.nvlinks) nvlinks.push_back(fabric::indices(joined));
  return {{"note", fabric.note}, {"devices", devices}, {"nvlinks", nvlinks}};
}

}  // namespace

json toJson(const Lease& lease) {
  json devices = json::array();
  for (const LeasedDevice& device : lease.devices)
    devices.push_back({{"ordinal", device.info.ordinal},
                       {"uuid", uuidText(device.info.uuid)},
                       {"memoryBytes", device.memoryBytes}});
  json entry = {{"id", lease.id.text()},  {"server", lease.server.name}, {"devices", devices},
                {"ttlMs", lease.ttlMs},   {"state", lease.state},        {"ageMs", lease.ageMs},
                {"tenant", lease.tenant}, {"holder", lease.holder}};
  if (lease.server.overcommitPercent > 100 || lease.terms.sharePercent != 0 ||
      lease.terms.priority != Priority::normal)
    entry["terms"] = {{"sharePercent", lease.terms.sharePercent}, {"priority", name(lease.terms.priority)}};
  if (!lease.movesTo.empty()) entry["movesTo"] = lease.movesTo;
  if (!lease.reason.empty()) entry["reason"] = lease.reason;
  if (lease.endsInMs != 0) entry["endsInMs"] = lease.endsInMs;
  if (!lease.job.empty()) entry["claim"] = {{"job", lease.job}, {"usedBy", lease.adopters}};
  if (!lease.hindrances.empty()) entry["hindrances"] = lease.hindrances;
  if (!lease.protection.empty()) entry["protection"] = lease.protection;
  if (lease.terms.protectMs != 0) entry["protectMs"] = lease.terms.protectMs;
  if (lease.standby) entry["standby"] = lease.standby->name;
  if (lease.held) entry["held"] = {{"folder", lease.held.folder}, {"server", lease.held.server}};
  if (!lease.why.empty()) entry["why"] = lease.why;
  if (lease.terms.idleMs != 0) entry["idleReleaseMs"] = lease.terms.idleMs;
  if (lease.idleMs >= 0) entry["idleMs"] = lease.idleMs;
  if (lease.turn)
    entry["turn"] = {{"place", name(lease.turn->place)},
                     {"servedMs", lease.turn->servedMs},
                     {"turns", lease.turn->turns},
                     {"note", lease.turn->note}};
  return entry;
}

json toJson(const ListedServer& server) {
  json devices = json::array();
  for (const Device& device : server.info.devices) devices.push_back(deviceJson(device));
  const std::string network = server.info.host.empty() || server.info.port == 0
                                  ? ""
                                  : server.info.host + ":" + std::to_string(server.info.port);
  json workers = json::array();
  for (const WorkerVersion& worker : server.info.workers)
    workers.push_back({{"rowsHash", worker.rowsHash}, {"release", worker.release}});
  json entry = {{"name", server.info.name},
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
                {"workers", workers},
                {"devices", devices},
                {"leftOut", server.info.leftOut},
                {"walls", server.info.walls},
                {"missingWalls", server.info.missingWalls},
                {"fabric", fabricJson(server.fabric)}};
  if (server.info.overcommitPercent > 100) entry["overcommitPercent"] = server.info.overcommitPercent;
  return entry;
}

json toJson(const ListedDevice& device, const PoolView& view) {
  json entry = deviceJson(device.info);
  entry["server"] = device.server;
  entry["freeBytes"] = device.freeBytes;
  entry["leases"] = json::array();
  entry["cordoned"] = view.cordoned.contains(device.server);
  entry["suspended"] = json::array();
  if (device.sample) entry["sample"] = sampleJson(*device.sample);
  for (const Id& id : device.leases) {
    entry["leases"].push_back(id.text());
    if (view.isSuspended(id)) entry["suspended"].push_back(id.text());
  }
  if (view.percent(device) <= 100) return entry;
  entry["leasableBytes"] = view.leasable(device);
  entry["leasedBytes"] = view.leased(device);
  entry["turns"] = json::object();
  for (const Id& id : device.leases)
    if (const Lease* lease = view.find(id); lease != nullptr && lease->turn)
      entry["turns"][id.text()] = name(lease->turn->place);
  return entry;
}

json toJson(const Explanation& answer) {
  json servers = json::array();
  for (const ServerVerdict& server : answer.servers) {
    json devices = json::array();
    for (const DeviceVerdict& device : server.devices)
      devices.push_back({{"ordinal", device.ordinal},
                         {"name", device.name},
                         {"fits", device.reason.empty()},
                         {"reason", device.reason}});
    servers.push_back({{"name", server.name}, {"reason", server.reason}, {"devices", devices}});
  }
  return {{"outlook", name(answer.outlook)},
          {"text", answer.text},
          {"ahead", answer.ahead},
          {"servers", servers}};
}

json toJson(const AuditEntry& entry) {
  return {{"number", entry.number},     {"timeMs", entry.timeMs},
          {"event", name(entry.event)}, {"lease", entry.lease == Id{} ? "" : entry.lease.text()},
          {"where", entry.server},      {"tenant", entry.tenant},
          {"holder", entry.holder},     {"by", entry.by},
          {"reason", entry.reason}};
}

json toJson(const Quota& quota) {
  return {{"tenant", quota.tenant},           {"milliDevices", quota.milliDevices},
          {"memoryBytes", quota.memoryBytes}, {"deviceSeconds", quota.deviceSeconds},
          {"per", name(quota.window)},        {"protectMs", quota.protectMs}};
}

json toJson(const QuotaUse& use) {
  return {{"tenant", use.quota.tenant},         {"quota", toJson(use.quota)},
          {"milliDevices", use.milliDevices},   {"memoryBytes", use.memoryBytes},
          {"deviceSeconds", use.deviceSeconds}, {"windowEndsS", use.windowEndsS}};
}

json toJson(const TenantUse& use) {
  json entry = toJson(use.quota);
  entry["tokens"] = use.tokens;
  entry["leases"] = use.leases;
  entry["claims"] = use.claims;
  entry["queued"] = use.queued;
  entry["usageDeviceSeconds"] = use.usage;
  return entry;
}

std::string guidText(uint64_t guid) {
  char text[20];
  std::snprintf(text, sizeof text, "%04x:%04x:%04x:%04x", static_cast<unsigned>(guid >> 48 & 0xffff),
                static_cast<unsigned>(guid >> 32 & 0xffff), static_cast<unsigned>(guid >> 16 & 0xffff),
                static_cast<unsigned>(guid & 0xffff));
  return text;
}

std::string gidText(const fabric::GidValue& value) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(AF_INET6, value.data(), text, sizeof text);
  return text;
}

std::string dump(const json& value, int indent) {
  return value.dump(indent, ' ', false, json::error_handler_t::replace);
}

}  // namespace gpupool::pool
