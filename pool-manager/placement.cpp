#include "pool-manager/placement.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/options.h"
#include "pool-manager/placement_fit.h"
#include "pool-manager/placement_index.h"
#include "pool-manager/placement_sets.h"

namespace gpupool::pool {
namespace {

using namespace fit;

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

uint64_t bytesOf(const Wish& wish, const DeviceUse& device) {
  return wish.memoryBytes == 0 ? wholeBytes(wish, device) : wish.memoryBytes;
}

Claim claimOf(const Wish& wish, const DeviceUse& device) {
  return {{device.info, bytesOf(wish, device)}, 0, wish.sharePercent, false};
}

Need needOf(const Wish& wish, const DeviceUse& device) {
  return fit::needOf(bytesOf(wish, device), 0, wish.sharePercent, device.info);
}

Lack lackOf(const Wish& wish, const DeviceUse& device) {
  if (!wish.gpu.matches(device.info)) return Lack::kind;
  const Lack what = fit::lack(needOf(wish, device), device);
  return what == Lack::none && device.claimedMs < wish.endsMs ? Lack::queue : what;
}

bool inOrder(const DeviceUse& device) { return device.info.problem.empty() && device.duplicateOf.empty(); }

bool fits(const Wish& wish, const DeviceUse& device) {
  return inOrder(device) && lackOf(wish, device) == Lack::none;
}

// With the lease, in thousandths of the device's memory; 0: it takes no turns there. Of a whole device: what
// it does not get of it.
uint64_t crowding(const Wish& wish, const DeviceUse& device) {
  const uint64_t bytes = bytesOf(wish, device), whole = device.info.memoryBytes;
  const uint64_t reserved = reservedOf(bytes, device.info);
  if (wish.memoryBytes == 0 && bytes < whole) return std::max<uint64_t>(1, (whole - bytes) * 1000 / whole);
  if (reserved <= roomBytes(device)) return 0;
  return (leasable(device) - device.freeBytes + reserved) * 1000 / device.info.memoryBytes;
}

DeviceSet choose(const Wish& wish, const ServerUse& server) {
  if (wish.deviceCount == 0 || !serves(server, wish.clients)) return {};
  std::vector<Fitting> fitting;
  for (const DeviceUse& device : server.devices)
    if (fits(wish, device)) fitting.push_back({&device, crowding(wish, device)});
  return chooseSet(server, fitting, wish.deviceCount, wish.policy);
}

Choice chosen(const Wish& wish, const ServerUse& server, const DeviceSet& set) {
  Choice choice{server.name, {}, {}, false};
  for (const DeviceUse* device : set.devices) choice.devices.push_back(claimOf(wish, *device).device);
  return choice;
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

// What the device is to the wish.
std::string describe(const Wish& wish, const DeviceUse& device) {
  if (!device.duplicateOf.empty()) return "is the same device as " + device.duplicateOf;
  if (!device.info.problem.empty()) return "is broken (" + device.info.problem + ")";
  const Lack what = lackOf(wish, device);
  if (what == Lack::kind) return "is not '" + wish.gpu.text + "'";
  if (what == Lack::queue) return "is for a request that is before it in the queue";
  if (device.holders.empty())
    return what == Lack::none ? "is free" : "has only " + options::formatSize(device.freeBytes);
  std::string text = fit::describe(device.holders);
  if (device.freeBytes != 0) text += " with " + describeFree(device);
  return text + (overcommitted(device) ? describeTurns(claimOf(wish, device), device) : "");
}

std::string describe(const Wish& wish, const ServerUse& server) {
  const std::string text = server.name + ": ";
  if (!serves(server, wish.clients)) return text + describeNoWorker(server, wish.clients);
  if (!server.unusable.empty()) return text + server.unusable;
  std::string devices;
  for (const DeviceUse& device : server.devices)
    devices += (devices.empty() ? "GPU " : ", GPU ") + std::to_string(device.info.ordinal) + " (" +
               device.info.name + ") " + describe(wish, device);
  return text + (devices.empty() ? "no devices" : devices);
}

// Whether it would fit if nobody held anything there and nothing were broken.
bool couldFit(const Wish& wish, const DeviceUse& device) {
  const uint64_t whole = device.info.memoryBytes;
  const uint64_t bytes = wish.memoryBytes == 0 ? whole : wish.memoryBytes;
  return device.duplicateOf.empty() && bytes <= whole && wish.gpu.matches(device.info) &&
         reservedOf(bytes, device.info) <= leasable(device) &&
         (!overcommitted(device) || wish.sharePercent <= 100);
}

bool isMeant(const Wish& wish, const ServerUse& server) {
  return wish.server.empty() || server.name == wish.server;
}

size_t couldFit(const Wish& wish, const ServerUse& server) {
  if (!isMeant(wish, server) || !serves(server, wish.clients)) return 0;
  return static_cast<size_t>(std::count_if(server.devices.begin(), server.devices.end(),
                                           [&](const DeviceUse& device) { return couldFit(wish, device); }));
}

// When the wish may get the device at the earliest: not before those that have claimed it already, unless it
// ends before they begin.
uint64_t readyMs(const Wish& wish, const ServerUse& server, const DeviceUse& device, uint64_t nowMs) {
  const Lack what = fit::lack(needOf(wish, device), device);
  const bool unknown = !server.unusable.empty() || !inOrder(device) || device.firstEndMs == kNever;
  const uint64_t freeMs = what == Lack::none || unknown ? nowMs : std::max(nowMs, device.firstEndMs);
  return device.claimedMs < wish.endsMs ? std::max(freeMs, device.claimedMs) : freeMs;
}

// No server of those that the wish may have has a worker program for its client.
std::string describeNone(const Wish& wish, std::span<const ServerUse> servers) {
  const auto one = std::find_if(servers.begin(), servers.end(),
                                [&](const ServerUse& server) { return isMeant(wish, server); });
  const std::string client = describeClient(*one, wish.clients);
  return "version mismatch: " +
         (wish.server.empty() ? "no server has a worker program for " + client
                              : "server " + wish.server + " has no worker program for " + client) +
         "; " + kInstallWorker + ", or another version of the client here (gpupool servers -v)";
}

// "mlx5_0: PIX", and whose nearest it is: "GPU 0, GPU 1 ", or "" where it is so of all.
std::vector<std::pair<std::string, std::string>> byAdapter(const std::vector<const DeviceUse*>& devices) {
  std::vector<std::pair<std::string, std::string>> all;
  for (const DeviceUse* device : devices) {
    if (device->adapter.name.empty()) continue;
    const std::string adapter = device->adapter.name + ": " + fabric::text(device->adapter.distance);
    auto at = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.first == adapter; });
    if (at == all.end()) at = all.insert(at, {adapter, ""});
    at->second += (at->second.empty() ? "GPU " : ", GPU ") + std::to_string(device->info.ordinal);
  }
  const bool same = all.size() == 1 && std::none_of(devices.begin(), devices.end(), [](const auto* device) {
                      return device->adapter.name.empty();
                    });
  for (auto& [adapter, near] : all) near = same ? "" : near + " ";
  return all;
}

size_t fitting(const Wish& wish, const ServerUse& server) {
  if (!serves(server, wish.clients)) return 0;
  return static_cast<size_t>(std::count_if(server.devices.begin(), server.devices.end(),
                                           [&](const DeviceUse& device) { return fits(wish, device); }));
}

}  // namespace

uint64_t reservedBytes(const LeasedDevice& device) { return reservedOf(device.memoryBytes, device.info); }

uint64_t suspendedBytes(const LeasedDevice& device, uint64_t kept) {
  return fit::needOf(device.memoryBytes, kept, 0, device.info).aside;
}

uint64_t totalRoom(const ServerUse& server) {
  uint64_t sum = 0;
  for (const DeviceUse& device : server.devices) sum += roomBytes(device);
  return sum;
}

void occupy(const Claim& claim, DeviceUse& device) {
  const Need need = fit::needOf(claim);
  device.freeBytes -= std::min(device.freeBytes, claim.suspended ? need.aside : need.reserved);
  device.asideBytes += need.aside;
  if (claim.suspended) return;
  device.largestBytes = std::max(device.largestBytes, need.reserved - need.aside);
  device.sharePercent += claim.sharePercent;
}

Choice place(const Wish& wish, std::span<const ServerUse> servers) {
  const ServerUse* best = nullptr;
  DeviceSet devices;
  for (const ServerUse& server : servers) {
    if (!server.unusable.empty() || !isMeant(wish, server)) continue;
    DeviceSet set = choose(wish, server);
    if (set.devices.empty()) continue;
    if (best != nullptr) {
      const auto order =
          std::pair(set.crowding, !set.joined) <=> std::pair(devices.crowding, !devices.joined);
      if (order > 0 || (order == 0 && !preferred(wish.policy, server, *best))) continue;
    }
    best = &server;
    devices = std::move(set);
  }
  if (best == nullptr) return {{}, {}, explain(wish, servers), !couldEver(wish, servers)};
  return chosen(wish, *best, devices);
}

namespace {

// Takes the servers of an index in the order of preference, and keeps the best.
class IndexedChoice {
 public:
  IndexedChoice(const Wish& wish, std::span<const ServerUse> servers, const PlacementIndex& index)
      : wish_(wish), servers_(servers), index_(index), query_(index.queryOf(wish)) {}

  // First those that may have a joined set, for such a one elsewhere is better than any other.
  void lookAtAll() {
    if (wish_.deviceCount == 0) return;
    lookAtSome(true);
    if (wish_.deviceCount > 1) lookAtSome(false);
  }
  const ServerUse* server() const { return best_; }
  const DeviceSet& devices() const { return devices_; }

 private:
  using Merit = std::tuple<uint64_t, bool, size_t>;  // crowding, not joined, place in the order

  void lookAtSome(bool mayJoin) {
    const auto& order = index_.byRoom();
    size_t place = 0;
    const auto visit = [&](size_t at) {  // false: none that follows is better than the best one
      if (best_ != nullptr && merit_ < Merit{0, !mayJoin, place}) return false;
      if (index_.mayJoin(query_, at) == mayJoin) look(at, place);
      ++place;
      return true;
    };
    if (wish_.policy != Policy::spread) {
      for (const PlacementIndex::Room& room : order)
        if (!visit(room.server)) return;
      return;
    }
    for (size_t end = order.size(); end > 0;) {  // those of equal room in their own order
      size_t begin = end - 1;
      while (begin > 0 && order[begin - 1].bytes == order[end - 1].bytes) --begin;
      for (size_t i = begin; i < end; ++i)
        if (!visit(order[i].server)) return;
      end = begin;
    }
  }
  void look(size_t at, size_t place) {
    const ServerUse& server = servers_[at];
    if (!index_.mayFit(query_, at) || !isMeant(wish_, server)) return;
    DeviceSet set = choose(wish_, server);
    const Merit merit{set.crowding, !set.joined, place};
    if (set.devices.empty() || (best_ != nullptr && merit_ < merit)) return;
    best_ = &server;
    devices_ = std::move(set);
    merit_ = merit;
  }

  const Wish& wish_;
  std::span<const ServerUse> servers_;
  const PlacementIndex& index_;
  PlacementIndex::Query query_;
  const ServerUse* best_ = nullptr;
  DeviceSet devices_;
  Merit merit_;
};

}  // namespace

Choice place(const Wish& wish, std::span<const ServerUse> servers, const PlacementIndex& index) {
  IndexedChoice choice(wish, servers, index);
  choice.lookAtAll();
  if (choice.server() == nullptr) return {{}, {}, {}, !couldEver(wish, servers, index)};
  return chosen(wish, *choice.server(), choice.devices());
}

bool servedByNone(const Wish& wish, std::span<const ServerUse> servers) {
  bool some = false;
  for (const ServerUse& server : servers) {
    if (!isMeant(wish, server)) continue;
    if (serves(server, wish.clients)) return false;
    some = true;
  }
  return some;
}

std::string explain(const Wish& wish, std::span<const ServerUse> servers) {
  if (servers.empty()) return "no server has joined the pool yet";
  size_t most = 0, largest = 0, could = 0;
  std::string details;
  size_t more = 0;
  bool known = false;
  for (const ServerUse& server : servers) {
    if (!isMeant(wish, server)) continue;
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
  if (servedByNone(wish, servers)) return describeNone(wish, servers);
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

std::string describeLinks(const Choice& choice, std::span<const ServerUse> servers) {
  const auto server = std::find_if(servers.begin(), servers.end(),
                                   [&](const ServerUse& one) { return one.name == choice.server; });
  if (server == servers.end()) return "";
  std::vector<const DeviceUse*> devices;
  for (const LeasedDevice& leased : choice.devices)
    for (const DeviceUse& device : server->devices)
      if (device.info.uuid == leased.info.uuid) devices.push_back(&device);
  std::string text;
  const bool linked = std::any_of(server->devices.begin(), server->devices.end(),
                                  [](const DeviceUse& device) { return device.joined != 0; });
  if (devices.size() > 1 && linked)
    text = joined(*server, devices) ? "; joined by NVLink" : "; not all joined by NVLink";
  for (const auto& [adapter, near] : byAdapter(devices)) text += "; " + near + "nearest to " + adapter;
  return text;
}

bool couldEver(const Wish& wish, std::span<const ServerUse> servers) {
  return std::any_of(servers.begin(), servers.end(), [&](const ServerUse& server) {
    return isMeant(wish, server) && couldFit(wish, server) >= wish.deviceCount;
  });
}

bool couldEver(const Wish& wish, std::span<const ServerUse> servers, const PlacementIndex& index) {
  const auto query = index.queryOf(wish);
  for (size_t i = 0; i < servers.size(); ++i)
    if (index.couldFit(query, i) && couldEver(wish, servers.subspan(i, 1))) return true;
  return false;
}

bool onlyCordoned(const Wish& wish, std::span<const ServerUse> servers) {
  return std::none_of(servers.begin(), servers.end(), [&](const ServerUse& server) {
    return !server.cordoned && couldEver(wish, std::span(&server, 1));
  });
}

std::vector<ServerVerdict> judge(const Wish& wish, std::span<const ServerUse> servers) {
  std::vector<ServerVerdict> verdicts;
  for (const ServerUse& server : servers) {
    if (!isMeant(wish, server)) continue;
    ServerVerdict& verdict = verdicts.emplace_back(ServerVerdict{server.name, server.unusable, {}});
    if (!serves(server, wish.clients)) verdict.reason = "it " + describeNoWorker(server, wish.clients);
    if (!verdict.reason.empty()) continue;
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

bool claim(const Wish& wish, uint64_t nowMs, std::span<ServerUse> servers) {
  bool more = false;
  for (ServerUse& server : servers) {
    if (server.cordoned || wish.deviceCount == 0 || couldFit(wish, server) < wish.deviceCount) continue;
    std::vector<uint64_t> ready;
    for (const DeviceUse& device : server.devices)
      if (couldFit(wish, device)) ready.push_back(readyMs(wish, server, device, nowMs));
    std::nth_element(ready.begin(), ready.begin() + (wish.deviceCount - 1), ready.end());
    const uint64_t startMs = ready[wish.deviceCount - 1];
    for (DeviceUse& device : server.devices) {
      if (device.claimedMs <= startMs || !couldFit(wish, device)) continue;
      device.claimedMs = startMs;
      more = true;
    }
  }
  return more;
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
    else if (const Lack what = fit::lack(claim, *at); what != Lack::none)
      why = "has " + describeFree(*at) +
            (what == Lack::memory
                 ? (overcommitted(*at) ? ", " : " of the ") + options::formatSize(reservedBytes(wanted)) +
                       (overcommitted(*at) ? " are wanted" : " that are wanted")
                 : describeTurns(claim, *at)) +
            (at->holders.empty() ? "" : ": it " + fit::describe(at->holders));
    if (!why.empty())
      missing += (missing.empty() ? server.name + ": " : ", ") + "GPU " +
                 std::to_string(wanted.info.ordinal) + " (" + wanted.info.name + ") " + why;
  }
  return shortened(missing, kMostDetails);
}

}  // namespace gpupool::pool
