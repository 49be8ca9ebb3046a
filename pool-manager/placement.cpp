#include "pool-manager/placement.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/options.h"

namespace gpupool::pool {
namespace {

bool overcommitted(const DeviceUse& device) { return device.overcommitPercent > 100; }

uint64_t leasable(const DeviceUse& device) {
  return leasableBytes(device.info.memoryBytes, device.overcommitPercent);
}

uint64_t asideBytes(const Claim& claim) { return suspendedBytes(claim.device, claim.kept); }

// Why a lease cannot have that on a device which is in order.
enum class Lack {
  none,
  kind,    // it is another device than was asked for
  size,    // the device is smaller
  memory,  // too much of it is leased
  own,     // it would not fit beside the others aside
  others,  // another lease would not fit beside it and the others aside
  share,   // too much of the device's time is promised
  queue,   // somebody else waits for it, and has precedence
};

Lack lack(const Claim& claim, const DeviceUse& device) {
  const uint64_t memory = device.info.memoryBytes, reserved = reservedBytes(claim.device);
  if (claim.device.memoryBytes > memory) return Lack::size;
  if (device.freeBytes < reserved) return Lack::memory;
  if (device.asideBytes + reserved > memory) return Lack::own;
  if (device.asideBytes + asideBytes(claim) + device.largestBytes > memory) return Lack::others;
  if (overcommitted(device) && device.sharePercent + claim.sharePercent > 100) return Lack::share;
  return Lack::none;
}

// What a lease of the whole device gets beside those that are suspended there; if others are there, or too
// little is left: all of it, which does not fit.
uint64_t wholeBytes(const Wish& wish, const DeviceUse& device) {
  const uint64_t whole = device.info.memoryBytes;
  if (!wish.besideSuspended || device.largestBytes != 0 || device.asideBytes == 0) return whole;
  const uint64_t room = std::min(device.freeBytes, whole - std::min(whole, device.asideBytes));
  const uint64_t overhead = device.info.software ? 0 : schema::kLeaseOverheadBytes;
  const uint64_t left = room - std::min(room, overhead);
  return left < whole / 2 ? whole : left;
}

Claim claimOf(const Wish& wish, const DeviceUse& device) {
  return {{device.info, wish.memoryBytes == 0 ? wholeBytes(wish, device) : wish.memoryBytes},
          0,
          wish.sharePercent,
          false};
}

Lack lack(const Wish& wish, const DeviceUse& device) {
  if (!wish.gpu.matches(device.info)) return Lack::kind;
  const Lack what = lack(claimOf(wish, device), device);
  return what == Lack::none && device.claimedMs < wish.endsMs ? Lack::queue : what;
}

bool inOrder(const DeviceUse& device) { return device.info.problem.empty() && device.duplicateOf.empty(); }

bool fits(const Wish& wish, const DeviceUse& device) {
  return inOrder(device) && lack(wish, device) == Lack::none;
}

// What a lease can have there without taking turns.
uint64_t roomBytes(const DeviceUse& device) {
  const uint64_t taken = leasable(device) - std::min(leasable(device), device.freeBytes);
  return device.info.memoryBytes - std::min(device.info.memoryBytes, taken);
}

// With the lease, in thousandths of the device's memory; 0: it takes no turns there. Of a whole device: what
// it does not get of it.
uint64_t crowding(const Wish& wish, const DeviceUse& device) {
  const LeasedDevice claimed = claimOf(wish, device).device;
  const uint64_t reserved = reservedBytes(claimed), whole = device.info.memoryBytes;
  if (wish.memoryBytes == 0 && claimed.memoryBytes < whole)
    return std::max<uint64_t>(1, (whole - claimed.memoryBytes) * 1000 / whole);
  if (reserved <= roomBytes(device)) return 0;
  return (leasable(device) - device.freeBytes + reserved) * 1000 / device.info.memoryBytes;
}

struct Devices {
  std::vector<const DeviceUse*> list;  // empty: too few fit
  uint64_t crowding = 0;               // of the most crowded one
};

// In the driver's order.
Devices choose(const Wish& wish, const ServerUse& server) {
  struct Fitting {
    const DeviceUse* device;
    uint64_t crowding, room;
  };
  std::vector<Fitting> fitting;
  for (const DeviceUse& device : server.devices)
    if (fits(wish, device)) fitting.push_back({&device, crowding(wish, device), roomBytes(device)});
  if (fitting.size() < wish.deviceCount) return {};
  const bool spread = wish.policy == Policy::spread;
  std::stable_sort(fitting.begin(), fitting.end(), [spread](const Fitting& a, const Fitting& b) {
    if (a.crowding != b.crowding) return a.crowding < b.crowding;
    return spread ? a.room > b.room : a.room < b.room;
  });
  fitting.resize(wish.deviceCount);
  Devices chosen;
  for (const Fitting& one : fitting) {
    chosen.list.push_back(one.device);
    chosen.crowding = std::max(chosen.crowding, one.crowding);
  }
  std::sort(chosen.list.begin(), chosen.list.end(),
            [](const DeviceUse* a, const DeviceUse* b) { return a->info.ordinal < b->info.ordinal; });
  return chosen;
}

uint64_t totalRoom(const ServerUse& server) {
  uint64_t sum = 0;
  for (const DeviceUse& device : server.devices) sum += roomBytes(device);
  return sum;
}

std::string plural(size_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string describe(const Wish& wish) {
  std::string text = plural(wish.deviceCount, "device");
  if (!wish.gpu.text.empty()) text += " '" + wish.gpu.text + "'";
  if (wish.memoryBytes != 0) text += " with " + options::formatSize(wish.memoryBytes) + " free";
  if (wish.sharePercent != 0)
    text += (wish.memoryBytes != 0 ? " and " : " with ") + std::to_string(wish.sharePercent) +
            (wish.deviceCount == 1 ? "% of its time" : "% of their time");
  if (wish.deviceCount > 1) text += " on one server";
  if (!wish.server.empty()) text += " (server " + wish.server + ")";
  return text + (wish.deviceCount == 1 ? " is wanted" : " are wanted");
}

// Holders without a name are those that the asker may not know.
std::string describe(const std::vector<std::string>& holders) {
  std::string named;
  for (const std::string& holder : holders)
    if (!holder.empty()) named += (named.empty() ? "" : " and ") + holder;
  if (named.empty()) return "is in use";
  const bool others =
      std::any_of(holders.begin(), holders.end(), [](const auto& one) { return one.empty(); });
  return "is held by " + named + (others ? " and others" : "");
}

// What hinders it on a device that leases share by turns: more than that too much of it is leased.
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

// What the device is to the wish.
std::string describe(const Wish& wish, const DeviceUse& device) {
  if (!device.duplicateOf.empty()) return "is the same device as " + device.duplicateOf;
  if (!device.info.problem.empty()) return "is broken (" + device.info.problem + ")";
  const Lack what = lack(wish, device);
  if (what == Lack::kind) return "is not '" + wish.gpu.text + "'";
  if (what == Lack::queue) return "is for a request that is before it in the queue";
  if (device.holders.empty())
    return what == Lack::none ? "is free" : "has only " + options::formatSize(device.freeBytes);
  std::string text = describe(device.holders);
  if (device.freeBytes != 0) text += " with " + describeFree(device);
  return text + (overcommitted(device) ? describeTurns(claimOf(wish, device), device) : "");
}

std::string describe(const Wish& wish, const ServerUse& server) {
  const std::string text = server.name + ": ";
  if (!server.unusable.empty()) return text + server.unusable;
  std::string devices;
  for (const DeviceUse& device : server.devices)
    devices += (devices.empty() ? "GPU " : ", GPU ") + std::to_string(device.info.ordinal) + " (" +
               device.info.name + ") " + describe(wish, device);
  return text + (devices.empty() ? "no devices" : devices);
}

// A line that holds this and a remedy has to pass through OpenReply.text (schema/holder.h).
constexpr size_t kMostDetails = 300;

std::string shortened(const std::string& text, size_t most) {
  return text.size() <= most ? text : text.substr(0, most - 3) + "...";
}

// Whether it would fit if nobody held anything there and nothing were broken.
bool couldFit(const Wish& wish, const DeviceUse& device) {
  if (!device.duplicateOf.empty() || !wish.gpu.matches(device.info)) return false;
  DeviceUse empty;
  empty.info.memoryBytes = device.info.memoryBytes;
  empty.info.software = device.info.software;
  empty.overcommitPercent = device.overcommitPercent;
  empty.freeBytes = leasable(device);
  return lack(claimOf(wish, empty), empty) == Lack::none;
}

size_t couldFit(const Wish& wish, const ServerUse& server) {
  if (!wish.server.empty() && server.name != wish.server) return 0;
  return static_cast<size_t>(std::count_if(server.devices.begin(), server.devices.end(),
                                           [&](const DeviceUse& device) { return couldFit(wish, device); }));
}

// When the wish may get the device at the earliest: not before those that have claimed it already, unless it
// ends before they begin.
uint64_t readyMs(const Wish& wish, const ServerUse& server, const DeviceUse& device, uint64_t nowMs) {
  const Lack what = lack(claimOf(wish, device), device);
  const bool unknown = !server.unusable.empty() || !inOrder(device) || device.firstEndMs == kNever;
  const uint64_t freeMs = what == Lack::none || unknown ? nowMs : std::max(nowMs, device.firstEndMs);
  return device.claimedMs < wish.endsMs ? std::max(freeMs, device.claimedMs) : freeMs;
}

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
  return (device.holders.empty() ? "has only " : describe(device.holders) + " with ") + describeFree(device);
}

// One for each claim; empty: there are too few.
std::vector<const DeviceUse*> chooseAlike(const MoveWish& wish, const ServerUse& server) {
  std::vector<const DeviceUse*> fitting, chosen;
  for (const DeviceUse& device : server.devices)
    if (hindrance(wish, device).empty()) fitting.push_back(&device);
  const bool spread = wish.policy == Policy::spread;
  std::stable_sort(fitting.begin(), fitting.end(), [spread](const DeviceUse* a, const DeviceUse* b) {
    return spread ? roomBytes(*a) > roomBytes(*b) : roomBytes(*a) < roomBytes(*b);
  });
  for (size_t i = 0; i < wish.claims.size(); ++i) {
    const auto at = std::find_if(fitting.begin(), fitting.end(), [&](const DeviceUse* device) {
      return (wish.ordinals.empty() || device->info.ordinal == wish.ordinals[i]) &&
             alike(device->info, wish.claims[i].device.info);
    });
    if (at == fitting.end()) return {};
    chosen.push_back(*at);
    fitting.erase(at);
  }
  return chosen;
}

bool takesTurns(const ServerUse& server) {
  return std::any_of(server.devices.begin(), server.devices.end(), overcommitted);
}

// By room on the whole server; of equal ones the first.
bool preferred(Policy policy, const ServerUse& server, const ServerUse& best) {
  return policy == Policy::spread ? totalRoom(server) > totalRoom(best) : totalRoom(server) < totalRoom(best);
}

bool mayMoveTo(const MoveWish& wish, const ServerUse& server) {
  return wish.server.empty() ? server.name != wish.from : server.name == wish.server;
}

std::string describe(const MoveWish& wish, const ServerUse& server) {
  const std::string text = server.name + ": ";
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

size_t fitting(const Wish& wish, const ServerUse& server) {
  return static_cast<size_t>(std::count_if(server.devices.begin(), server.devices.end(),
                                           [&](const DeviceUse& device) { return fits(wish, device); }));
}

}  // namespace

uint64_t reservedBytes(const LeasedDevice& device) {
  const uint64_t whole = device.info.memoryBytes;
  if (device.memoryBytes >= whole || device.info.software) return std::min(whole, device.memoryBytes);
  return std::min(whole, device.memoryBytes + schema::kLeaseOverheadBytes);
}

uint64_t suspendedBytes(const LeasedDevice& device, uint64_t kept) {
  const uint64_t reserved = reservedBytes(device),
                 overhead = device.info.software ? 0 : schema::kLeaseOverheadBytes;
  if (kept >= reserved) return reserved;  // before the sum: it comes from a server
  return std::min(reserved, kept + overhead);
}

void occupy(const Claim& claim, DeviceUse& device) {
  const uint64_t reserved = reservedBytes(claim.device), aside = asideBytes(claim);
  device.freeBytes -= std::min(device.freeBytes, claim.suspended ? aside : reserved);
  device.asideBytes += aside;
  if (claim.suspended) return;
  device.largestBytes = std::max(device.largestBytes, reserved - aside);
  device.sharePercent += claim.sharePercent;
}

Choice place(const Wish& wish, std::span<const ServerUse> servers) {
  const ServerUse* best = nullptr;
  Devices devices;
  for (const ServerUse& server : servers) {
    if (!server.unusable.empty() || (!wish.server.empty() && server.name != wish.server)) continue;
    Devices chosen = wish.deviceCount == 0 ? Devices() : choose(wish, server);
    if (chosen.list.empty()) continue;
    if (best != nullptr && (chosen.crowding > devices.crowding ||
                            (chosen.crowding == devices.crowding && !preferred(wish.policy, server, *best))))
      continue;
    best = &server;
    devices = std::move(chosen);
  }
  if (best == nullptr) return {{}, {}, explain(wish, servers), !couldEver(wish, servers)};
  Choice choice{best->name, {}, {}, false};
  for (const DeviceUse* device : devices.list) choice.devices.push_back(claimOf(wish, *device).device);
  return choice;
}

bool couldMove(const MoveWish& wish, const ServerUse& server) {
  if (takesTurns(server)) return false;
  std::vector<const DeviceUse*> left;
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
  for (const ServerUse& server : servers) {
    if (!mayMoveTo(wish, server)) continue;
    auto chosen = server.unusable.empty() && !takesTurns(server) ? chooseAlike(wish, server)
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
    return choice;
  }
  choice.server = best->name;
  for (size_t i = 0; i < devices.size(); ++i)
    choice.devices.push_back({devices[i]->info, wish.claims[i].device.memoryBytes});
  return choice;
}

std::string explain(const Wish& wish, std::span<const ServerUse> servers) {
  if (servers.empty()) return "no server has joined the pool yet";
  size_t most = 0, largest = 0, could = 0;
  std::string details;
  size_t more = 0;
  bool known = false;
  for (const ServerUse& server : servers) {
    if (!wish.server.empty() && server.name != wish.server) continue;
    known = true;
    if (server.unusable.empty()) most = std::max(most, fitting(wish, server));
    largest = std::max(largest, server.devices.size());
    could = std::max(could, couldFit(wish, server));
    const std::string one = describe(wish, server);
    if (details.empty() || details.size() + one.size() <= kMostDetails)
      details += (details.empty() ? ": " : "; ") + shortened(one, kMostDetails);
    else
      ++more;
  }
  if (more != 0) details += "; and " + plural(more, "more server");
  if (!known) {
    std::string names;
    for (const ServerUse& server : servers) names += (names.empty() ? "" : ", ") + server.name;
    return "there is no server named " + wish.server + " in the pool; there are: " + names;
  }
  std::string text = describe(wish) + ", ";
  if (wish.deviceCount > largest)
    text += "but no server has more than " + std::to_string(largest);
  else if (wish.deviceCount > could)
    text += "but the most that any server could give is " + std::to_string(could);
  else
    text +=
        most == 0 ? "none is free" : "only " + std::to_string(most) + (most == 1 ? " is free" : " are free");
  return text + details;
}

bool couldEver(const Wish& wish, std::span<const ServerUse> servers) {
  return std::any_of(servers.begin(), servers.end(), [&](const ServerUse& server) {
    return (wish.server.empty() || server.name == wish.server) && couldFit(wish, server) >= wish.deviceCount;
  });
}

bool onlyCordoned(const Wish& wish, std::span<const ServerUse> servers) {
  return std::none_of(servers.begin(), servers.end(), [&](const ServerUse& server) {
    return !server.cordoned && couldEver(wish, std::span(&server, 1));
  });
}

std::vector<ServerVerdict> judge(const Wish& wish, std::span<const ServerUse> servers) {
  std::vector<ServerVerdict> verdicts;
  for (const ServerUse& server : servers) {
    if (!wish.server.empty() && server.name != wish.server) continue;
    ServerVerdict& verdict = verdicts.emplace_back(ServerVerdict{server.name, server.unusable, {}});
    if (!server.unusable.empty()) continue;
    for (const DeviceUse& device : server.devices)
      verdict.devices.push_back(
          {device.info.ordinal, device.info.name, fits(wish, device) ? "" : describe(wish, device)});
    const size_t fit = fitting(wish, server);
    if (verdict.reason.empty() && fit != 0 && fit < wish.deviceCount)
      verdict.reason = "only " + std::to_string(fit) + " of the " + std::to_string(wish.deviceCount) +
                       " devices that are wanted on one server";
  }
  return verdicts;
}

void claim(const Wish& wish, uint64_t nowMs, std::span<ServerUse> servers) {
  for (ServerUse& server : servers) {
    if (server.cordoned || wish.deviceCount == 0 || couldFit(wish, server) < wish.deviceCount) continue;
    std::vector<uint64_t> ready;
    for (const DeviceUse& device : server.devices)
      if (couldFit(wish, device)) ready.push_back(readyMs(wish, server, device, nowMs));
    std::nth_element(ready.begin(), ready.begin() + (wish.deviceCount - 1), ready.end());
    const uint64_t startMs = ready[wish.deviceCount - 1];
    for (DeviceUse& device : server.devices)
      if (couldFit(wish, device)) device.claimedMs = std::min(device.claimedMs, startMs);
  }
}

std::string missingFor(std::span<const Claim> claims, const ServerUse& server) {
  if (!server.unusable.empty()) return server.name + ": " + server.unusable;
  std::string missing;
  for (const Claim& claim : claims) {
    const LeasedDevice& wanted = claim.device;
    const auto at = std::find_if(server.devices.begin(), server.devices.end(), [&](const DeviceUse& device) {
      return device.info.uuid == wanted.info.uuid;
    });
    std::string why;
    if (at == server.devices.end())
      why = "is not offered any more";
    else if (!at->duplicateOf.empty())
      why = "is the same device as " + at->duplicateOf;
    else if (!at->info.problem.empty())
      why = "is broken (" + at->info.problem + ")";
    else if (const Lack what = lack(claim, *at); what != Lack::none)
      why = "has " + describeFree(*at) +
            (what == Lack::memory
                 ? (overcommitted(*at) ? ", " : " of the ") + options::formatSize(reservedBytes(wanted)) +
                       (overcommitted(*at) ? " are wanted" : " that are wanted")
                 : describeTurns(claim, *at)) +
            (at->holders.empty() ? "" : ": it " + describe(at->holders));
    if (!why.empty())
      missing += (missing.empty() ? server.name + ": " : ", ") + "GPU " +
                 std::to_string(wanted.info.ordinal) + " (" + wanted.info.name + ") " + why;
  }
  return shortened(missing, kMostDetails);
}

}  // namespace gpupool::pool
