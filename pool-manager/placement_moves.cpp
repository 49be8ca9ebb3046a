// Where a lease that runs may go.
#include <algorithm>
#include <numeric>

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

// It is said which device is to stand for which, or the claims are of several models, which NVLink does not
// join, or of several sizes. Those that need most choose first: what they leave fits the others, if anything
// does.
DeviceSet chooseEach(const MoveWish& wish, const ServerUse& server, std::vector<Fitting> fitting) {
  std::vector<size_t> order(wish.claims.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return wish.claims[a].device.memoryBytes > wish.claims[b].device.memoryBytes;
  });
  DeviceSet set;
  set.devices.resize(wish.claims.size());
  for (const size_t i : order) {
    std::vector<Fitting> meant;
    for (const Fitting& one : fitting)
      if ((wish.ordinals.empty() || one.device->info.ordinal == wish.ordinals[i]) &&
          alike(one.device->info, wish.claims[i].device.info) &&
          lack(wish.claims[i], *one.device) == Lack::none)
        meant.push_back(one);
    if (meant.empty()) return {};
    const DeviceUse* chosen = chooseSet(server, meant, 1, wish.policy).devices.front();
    set.devices[i] = chosen;
    std::erase_if(fitting, [&](const Fitting& one) { return one.device == chosen; });
  }
  set.joined = joined(server, set.devices);
  return set;
}

// One for each claim, in their order. Claims differ in memory where a lease had what others left of its
// devices.
DeviceSet chooseAlike(const MoveWish& wish, const ServerUse& server) {
  std::vector<Fitting> fitting;
  for (const DeviceUse& device : server.devices)
    if (hindrance(wish, device).empty()) fitting.push_back({&device, 0});
  const LeasedDevice& first = wish.claims.front().device;
  const bool same = std::all_of(wish.claims.begin(), wish.claims.end(), [&](const Claim& claim) {
    return alike(claim.device.info, first.info) && claim.device.memoryBytes == first.memoryBytes;
  });
  if (same && wish.ordinals.empty()) return chooseSet(server, fitting, wish.claims.size(), wish.policy);
  return chooseEach(wish, server, std::move(fitting));
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

// The devices there that could stand for one of the claims, each alone.
size_t fitting(const MoveWish& wish, const ServerUse& server) {
  return static_cast<size_t>(
      std::count_if(server.devices.begin(), server.devices.end(),
                    [&](const DeviceUse& device) { return hindrance(wish, device).empty(); }));
}

// Of a lease that needs several where fewer are free: else those would be named as a reason.
std::string describeTooFew(const MoveWish& wish, size_t most) {
  if (most == 0 || most >= wish.claims.size() || !wish.ordinals.empty()) return "";
  return std::to_string(wish.claims.size()) + " devices on one server are wanted, only " +
         std::to_string(most) + (most == 1 ? " is free: " : " are free: ");
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
  size_t most = 0;
  for (const ServerUse& server : servers) {
    if (!mayMoveTo(wish, server)) continue;
    noWorker = noWorker || !serves(server, wish.clients);
    const bool usable = server.unusable.empty() && !takesTurns(server) && serves(server, wish.clients);
    auto chosen = usable ? chooseAlike(wish, server) : DeviceSet();
    if (chosen.devices.empty()) {
      if (usable) most = std::max(most, fitting(wish, server));
      missing += (missing.empty() ? "" : "; ") + describe(wish, server);
    } else if (best == nullptr ||
               (chosen.joined != devices.joined ? chosen.joined : preferred(wish.policy, server, *best))) {
      best = &server;
      devices = std::move(chosen);
    }
  }
  Choice choice;
  if (best == nullptr) {
    choice.missing = !missing.empty()      ? describeTooFew(wish, most) + shortened(missing, kMostDetails)
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

namespace {

// Why the server cannot be the standby; "": it can.
std::string hindersKeeping(const MoveWish& wish, const KeeperUse& keeper) {
  const ServerUse& server = *keeper.server;
  if (!serves(server, wish.clients)) return describeNoWorker(server, wish.clients);
  if (!couldMove(wish, server)) return "has no GPUs of that model and driver";
  if (!server.unusable.empty()) return server.unusable;
  return keeper.keepBytes == 0 ? "keeps no checkpoints (its protect_memory is 0)" : "";
}

bool betterKeeper(const KeeperUse& a, const KeeperUse& b) {
  if (a.sameHost != b.sameHost) return b.sameHost;
  return a.keepBytes / (a.leases + 1) > b.keepBytes / (b.leases + 1);
}

}  // namespace

StandbyChoice placeStandby(const MoveWish& wish, std::span<const KeeperUse> keepers) {
  const KeeperUse* best = nullptr;
  std::string missing;
  for (const KeeperUse& keeper : keepers) {
    if (keeper.server->name == wish.from) continue;
    const std::string why = hindersKeeping(wish, keeper);
    if (!why.empty())
      missing += (missing.empty() ? "" : "; ") + keeper.server->name + ": " + why;
    else if (best == nullptr || betterKeeper(keeper, *best))
      best = &keeper;
  }
  if (best != nullptr) return {best->server->name, best->sameHost, ""};
  return {"", false, missing.empty() ? "there is no other server" : shortened(missing, kMostDetails)};
}

}  // namespace gpupool::pool
