// Where a lease that runs may go.
#include <algorithm>
#include <numeric>

#include "pool-manager/placement.h"
#include "pool-manager/placement_fit.h"

namespace gpupool::pool {
namespace {

using namespace fit;

bool alike(const Device& a, const Device& b) {
  return a.name == b.name && a.memoryBytes == b.memoryBytes && a.driverVersion == b.driverVersion &&
         a.software == b.software;
}

// Of the claims that the device is like, the one that needs least; null: it is like none.
const Claim* leastAlike(const MoveWish& wish, const Device& device) {
  const Claim* least = nullptr;
  for (const Claim& claim : wish.claims)
    if (alike(claim.device.info, device) &&
        (least == nullptr || claim.device.memoryBytes < least->device.memoryBytes))
      least = &claim;
  return least;
}

// Why the device cannot stand for any of the claims; "": it can for one at least.
std::string hindrance(const MoveWish& wish, const DeviceUse& device) {
  const auto is = [&](const Claim& claim) { return claim.device.info.uuid == device.info.uuid; };
  if (std::any_of(wish.claims.begin(), wish.claims.end(), is)) return "is the lease's own";
  const Claim* like = leastAlike(wish, device.info);
  if (like == nullptr)
    return "is another model or has another driver than the lease's " + wish.claims.front().device.info.name;
  if (!device.duplicateOf.empty()) return "is the same device as " + device.duplicateOf;
  if (!device.info.problem.empty()) return "is broken (" + device.info.problem + ")";
  if (!wish.gpu.matches(device.info)) return "is not '" + wish.gpu.text + "'";
  if (lack(*like, device) == Lack::none) return "";
  return (device.holders.empty() ? "has only " : fit::describe(device.holders) + " with ") +
         describeFree(device);
}

// One for each claim; empty: there are too few. Claims differ in memory where a lease had what others left of
// its devices. Those that need most choose first: what they leave fits the others, if anything does.
std::vector<const DeviceUse*> chooseAlike(const MoveWish& wish, const ServerUse& server) {
  std::vector<const DeviceUse*> fitting, chosen;
  for (const DeviceUse& device : server.devices)
    if (hindrance(wish, device).empty()) fitting.push_back(&device);
  const bool spread = wish.policy == Policy::spread;
  std::stable_sort(fitting.begin(), fitting.end(), [spread](const DeviceUse* a, const DeviceUse* b) {
    return spread ? roomBytes(*a) > roomBytes(*b) : roomBytes(*a) < roomBytes(*b);
  });
  std::vector<size_t> order(wish.claims.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return wish.claims[a].device.memoryBytes > wish.claims[b].device.memoryBytes;
  });
  chosen.resize(wish.claims.size());
  for (const size_t i : order) {
    const auto at = std::find_if(fitting.begin(), fitting.end(), [&](const DeviceUse* device) {
      return (wish.ordinals.empty() || device->info.ordinal == wish.ordinals[i]) &&
             alike(device->info, wish.claims[i].device.info) && lack(wish.claims[i], *device) == Lack::none;
    });
    if (at == fitting.end()) return {};
    chosen[i] = *at;
    fitting.erase(at);
  }
  return chosen;
}

bool takesTurns(const ServerUse& server) {
  return std::any_of(server.devices.begin(), server.devices.end(), overcommitted);
}

bool mayMoveTo(const MoveWish& wish, const ServerUse& server) {
  return wish.server.empty() ? server.name != wish.from : server.name == wish.server;
}

std::string describe(const MoveWish& wish, const ServerUse& server) {
  const std::string text = server.name + ": ";
  if (!serves(server, wish.clients)) return text + describeNoWorker(server, wish.clients);
  if (!server.unusable.empty()) return text + server.unusable;
  if (takesTurns(server)) return text + "its leases take turns";
  std::string devices;
  for (const DeviceUse& device : server.devices) {
    const bool meant = wish.ordinals.empty() || std::find(wish.ordinals.begin(), wish.ordinals.end(),
                                                          device.info.ordinal) != wish.ordinals.end();
    if (!meant) continue;
    const std::string why = hindrance(wish, device);
    devices += (devices.empty() ? "GPU " : ", GPU ") + std::to_string(device.info.ordinal) + " (" +
               device.info.name + ") ";
    if (!why.empty())
      devices += why;
    else
      devices += device.freeBytes == leasable(device) ? "is free" : "has " + describeFree(device);
  }
  return text + (devices.empty() ? "there is no such GPU" : devices);
}

}  // namespace

bool couldMove(const MoveWish& wish, const ServerUse& server) {
  if (takesTurns(server) || !serves(server, wish.clients)) return false;
  std::vector<const DeviceUse*> left;
  left.reserve(server.devices.size());
  for (const DeviceUse& device : server.devices) left.push_back(&device);
  for (size_t i = 0; i < wish.claims.size(); ++i) {
    const auto at = std::find_if(left.begin(), left.end(), [&](const DeviceUse* device) {
      return (wish.ordinals.empty() || device->info.ordinal == wish.ordinals[i]) &&
             alike(device->info, wish.claims[i].device.info);
    });
    if (at == left.end()) return false;
    left.erase(at);
  }
  return true;
}

Choice placeMove(const MoveWish& wish, std::span<const ServerUse> servers) {
  const ServerUse* best = nullptr;
  std::vector<const DeviceUse*> devices;
  std::string missing;
  bool noWorker = false;
  for (const ServerUse& server : servers) {
    if (!mayMoveTo(wish, server)) continue;
    noWorker = noWorker || !serves(server, wish.clients);
    auto chosen = server.unusable.empty() && !takesTurns(server) && serves(server, wish.clients)
                      ? chooseAlike(wish, server)
                      : std::vector<const DeviceUse*>();
    if (chosen.empty()) {
      missing += (missing.empty() ? "" : "; ") + describe(wish, server);
    } else if (best == nullptr || preferred(wish.policy, server, *best)) {
      best = &server;
      devices = std::move(chosen);
    }
  }
  Choice choice;
  if (best == nullptr) {
    choice.missing = !missing.empty()      ? shortened(missing, kMostDetails)
                     : wish.server.empty() ? "there is no other server"
                                           : "there is no server named " + wish.server;
    if (noWorker) choice.missing += std::string("; ") + kInstallWorker;
    return choice;
  }
  choice.server = best->name;
  for (size_t i = 0; i < devices.size(); ++i)
    choice.devices.push_back({devices[i]->info, wish.claims[i].device.memoryBytes});
  return choice;
}

}  // namespace gpupool::pool
