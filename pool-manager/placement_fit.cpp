#include "pool-manager/placement_fit.h"

#include <algorithm>
#include <cstdio>

#include "base/options.h"

namespace gpupool::pool::fit {
namespace {

bool servesOne(const ServerUse& server, const WorkerVersion& client) {
  return client.rowsHash == 0 || server.rows.empty() ||
         std::find(server.rows.begin(), server.rows.end(), client.rowsHash) != server.rows.end();
}

}  // namespace

bool overcommitted(const DeviceUse& device) { return device.overcommitPercent > 100; }

uint64_t leasable(const DeviceUse& device) {
  return leasableBytes(device.info.memoryBytes, device.overcommitPercent);
}

uint64_t reservedOf(uint64_t bytes, const Device& device) {
  const uint64_t whole = device.memoryBytes;
  if (bytes >= whole || device.software) return std::min(whole, bytes);
  return std::min(whole, bytes + schema::kLeaseOverheadBytes);
}

uint64_t asideOf(uint64_t reserved, uint64_t kept, const Device& device) {
  if (kept >= reserved) return reserved;  // before the sum: it comes from a server
  return std::min(reserved, kept + (device.software ? 0 : schema::kLeaseOverheadBytes));
}

Need needOf(uint64_t bytes, uint64_t kept, uint32_t sharePercent, const Device& device) {
  const uint64_t reserved = reservedOf(bytes, device);
  return {bytes, reserved, asideOf(reserved, kept, device), sharePercent};
}

Need needOf(const Claim& claim) {
  return needOf(claim.device.memoryBytes, claim.kept, claim.sharePercent, claim.device.info);
}

Lack lack(const Need& need, const DeviceUse& device) {
  const uint64_t memory = device.info.memoryBytes;
  if (need.bytes > memory) return Lack::size;
  if (device.freeBytes < need.reserved) return Lack::memory;
  if (device.asideBytes + need.reserved > memory) return Lack::own;
  if (device.asideBytes + need.aside + device.largestBytes > memory) return Lack::others;
  if (overcommitted(device) && device.sharePercent + need.sharePercent > 100) return Lack::share;
  return Lack::none;
}

Lack lack(const Claim& claim, const DeviceUse& device) { return lack(needOf(claim), device); }

uint64_t roomBytes(const DeviceUse& device) {
  const uint64_t taken = leasable(device) - std::min(leasable(device), device.freeBytes);
  return device.info.memoryBytes - std::min(device.info.memoryBytes, taken);
}

bool preferred(Policy policy, const ServerUse& server, const ServerUse& best) {
  return policy == Policy::spread ? totalRoom(server) > totalRoom(best) : totalRoom(server) < totalRoom(best);
}

bool serves(const ServerUse& server, const std::vector<WorkerVersion>& clients) {
  return std::all_of(clients.begin(), clients.end(),
                     [&](const WorkerVersion& client) { return servesOne(server, client); });
}

std::string describeClient(const ServerUse& server, const std::vector<WorkerVersion>& clients) {
  for (const WorkerVersion& client : clients) {
    if (servesOne(server, client)) continue;
    char rows[17];
    std::snprintf(rows, sizeof rows, "%016llx", static_cast<unsigned long long>(client.rowsHash));
    return std::string("this client (call rows ") + rows +
           (client.release.empty() ? "" : " of gpupool " + client.release) + ")";
  }
  return "this client";
}

std::string describeNoWorker(const ServerUse& server, const std::vector<WorkerVersion>& clients) {
  return "has no worker program for " + describeClient(server, clients);
}

std::string describe(const std::vector<std::string>& holders) {
  std::string named;
  for (const std::string& holder : holders)
    if (!holder.empty()) named += (named.empty() ? "" : " and ") + holder;
  if (named.empty()) return "is in use";
  const bool others =
      std::any_of(holders.begin(), holders.end(), [](const auto& one) { return one.empty(); });
  return "is held by " + named + (others ? " and others" : "");
}

std::string describeTurns(const Claim& claim, const DeviceUse& device) {
  const uint64_t memory = device.info.memoryBytes;
  switch (lack(claim, device)) {
    case Lack::none:
    case Lack::memory:
      break;
    case Lack::size:
      return ", but it has only " + options::formatSize(memory);
    case Lack::own:
      return ", but for one lease only " + options::formatSize(memory - std::min(memory, device.asideBytes)) +
             " of its " + options::formatSize(memory) +
             ": the others keep the rest also while it is not their turn";
    case Lack::others:
      return ", but the largest lease there would not fit beside what one more keeps";
    case Lack::kind:
    case Lack::queue:
      return "";
    case Lack::share:
      return ", but only " + std::to_string(100 - std::min(100u, device.sharePercent)) +
             "% of its time is not promised to others";
  }
  return "";
}

std::string describeFree(const DeviceUse& device) {
  return options::formatSize(device.freeBytes) + " free" +
         (overcommitted(device) ? " of the " + options::formatSize(leasable(device)) + " that may be leased"
                                : "");
}

std::string shortened(const std::string& text, size_t most) {
  return text.size() <= most ? text : text.substr(0, most - 3) + "...";
}

}  // namespace gpupool::pool::fit
