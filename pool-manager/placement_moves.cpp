// Where a lease that runs may go.
#include <algorithm>

#include "pool-manager/placement.h"
#include "pool-manager/placement_fit.h"
#include "pool-manager/placement_sets.h"

namespace gpupool::pool {
namespace {

using namespace fit;

bool alike(const Device& a, const Device& b) {
  return a.name == b.name && a.memoryBytes == b.memoryBytes && a.driverVersion == b.driverVersion &&
         a.software == b.software;
}

// Why the device cannot stand for any of the claims; "": it can for those that are like it.
std::string hindrance(const MoveWish& wish, const DeviceUse& device) {
  const auto is = [&](const Claim& claim) { return claim.device.info.uuid == device.info.uuid; };
  if (std::any_of(wish.claims.begin(), wish.claims.end(), is)) return "is the lease's own";
  const auto like = std::find_if(wish.claims.begin(), wish.claims.end(),
                                 [&](const Claim& claim) { return alike(claim.device.info, device.info); });
  if (like == wish.claims.end())
    return "is another model or has another driver than the lease's " + wish.claims.front().device.info.name;
  if (!device.duplicateOf.empty()) return "is the same device as " + device.duplicateOf;
  if (!device.info.problem.empty()) return "is broken (" + device.info.problem + ")";
  if (!wish.gpu.matches(device.info)) return "is not '" + wish.gpu.text + "'";
  if (lack(*like, device) == Lack::none) return "";
  return (device.holders.empty() ? "has only " : fit::describe(device.holders) + " with ") +
         describeFree(device);
}

// One for each claim.
DeviceSet chooseAlike(const MoveWish& wish, const ServerUse& server) {
  std::vector<Fitting> fitting;
  for (const DeviceUse& device : server.devices)
    if (hindrance(wish, device).empty()) fitting.push_back({&device, 0});
  const Device& first = wish.claims.front().device.info;
  const bool same = std::all_of(wish.claims.begin(), wish.claims.end(),
                                [&](const Claim& claim) { return alike(claim.device.info, first); });
  if (same && wish.ordinals.empty()) return chooseSet(server, fitting, wish.claims.size(), wish.policy);
  // It is said which device is to stand for which, or there are several models, which NVLink does not join.
  DeviceSet set;
  for (size_t i = 0; i < wish.claims.size(); ++i) {
    std::vector<Fitting> meant;
    for (const Fitting& one : fitting)
      if ((wish.ordinals.empty() || one.device->info.ordinal == wish.ordinals[i]) &&
          alike(one.device->info, wish.claims[i].device.info))
        meant.push_back(one);
    if (meant.empty()) return {};
    const DeviceUse* chosen = chooseSet(server, meant, 1, wish.policy).devices.front();
    set.devices.push_back(chosen);
    std::erase_if(fitting, [&](const Fitting& one) { return one.device == chosen; });
  }
  set.joined = joined(server, set.devices);
  return set;
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
               device.info.name + ") " + (why.empty() ? "is free" : why);
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
  DeviceSet devices;
  std::string missing;
  bool noWorker = false;
  for (const ServerUse& server : servers) {
    if (!mayMoveTo(wish, server)) continue;
    noWorker = noWorker || !serves(server, wish.clients);
    auto chosen = server.unusable.empty() && !takesTurns(server) && serves(server, wish.clients)
                      ? chooseAlike(wish, server)
                      : DeviceSet();
    if (chosen.devices.empty()) {
      missing += (missing.empty() ? "" : "; ") + describe(wish, server);
    } else if (best == nullptr ||
               (chosen.joined != devices.joined ? chosen.joined : preferred(wish.policy, server, *best))) {
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
  for (size_t i = 0; i < devices.devices.size(); ++i)
    choice.devices.push_back({devices.devices[i]->info, wish.claims[i].device.memoryBytes});
  return choice;
}

}  // namespace gpupool::pool
