#include "pool-manager/placement.h"

#include <algorithm>
#include <optional>

#include "base/options.h"

namespace gpupool::pool {
namespace {

bool fits(const Wish& wish, const DeviceUse& device) {
  if (!device.info.problem.empty() || !device.duplicateOf.empty()) return false;
  if (wish.memoryBytes == 0) return device.freeBytes >= device.info.memoryBytes;
  return wish.memoryBytes <= device.info.memoryBytes &&
         device.freeBytes >= reservedBytes({device.info, wish.memoryBytes});
}

// The fullest devices that fit, in the driver's order.
std::vector<const DeviceUse*> choose(const Wish& wish, const ServerUse& server) {
  std::vector<const DeviceUse*> fitting;
  for (const DeviceUse& device : server.devices)
    if (fits(wish, device)) fitting.push_back(&device);
  if (fitting.size() < wish.deviceCount) return {};
  std::stable_sort(fitting.begin(), fitting.end(),
                   [](const DeviceUse* a, const DeviceUse* b) { return a->freeBytes < b->freeBytes; });
  fitting.resize(wish.deviceCount);
  std::sort(fitting.begin(), fitting.end(),
            [](const DeviceUse* a, const DeviceUse* b) { return a->info.ordinal < b->info.ordinal; });
  return fitting;
}

uint64_t totalFree(const ServerUse& server) {
  uint64_t sum = 0;
  for (const DeviceUse& device : server.devices) sum += device.freeBytes;
  return sum;
}

std::string plural(size_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string describe(const Wish& wish) {
  std::string text = plural(wish.deviceCount, "device");
  if (wish.memoryBytes != 0) text += " with " + options::formatSize(wish.memoryBytes) + " free";
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

std::string describe(const Wish& wish, const ServerUse& server) {
  std::string text = server.name + ": ";
  if (!server.unusable.empty()) return text + server.unusable;
  for (const DeviceUse& device : server.devices) {
    if (&device != &server.devices.front()) text += ", ";
    text += "GPU " + std::to_string(device.info.ordinal) + " (" + device.info.name + ") ";
    if (!device.duplicateOf.empty()) {
      text += "is the same device as " + device.duplicateOf;
    } else if (!device.info.problem.empty()) {
      text += "is broken (" + device.info.problem + ")";
    } else if (device.holders.empty()) {
      text += fits(wish, device) ? "is free" : "has only " + options::formatSize(device.freeBytes);
    } else {
      text += describe(device.holders);
      if (device.freeBytes != 0) text += " with " + options::formatSize(device.freeBytes) + " free";
    }
  }
  return text + (server.devices.empty() ? "no devices" : "");
}

// A line that holds this and a remedy has to pass through OpenReply.text (schema/holder.h).
constexpr size_t kMostDetails = 300;

std::string shortened(const std::string& text, size_t most) {
  return text.size() <= most ? text : text.substr(0, most - 3) + "...";
}

// As if nobody held anything and nothing were broken.
ServerUse emptied(ServerUse server) {
  for (DeviceUse& device : server.devices) {
    device.freeBytes = device.info.memoryBytes;
    device.holders.clear();
    device.info.problem.clear();
  }
  return server;
}

size_t fitting(const Wish& wish, const ServerUse& server) {
  return static_cast<size_t>(std::count_if(server.devices.begin(), server.devices.end(),
                                           [&](const DeviceUse& device) { return fits(wish, device); }));
}

}  // namespace

uint64_t reservedBytes(const LeasedDevice& device) {
  const uint64_t whole = device.info.memoryBytes;
  if (device.memoryBytes >= whole || device.info.software) return std::min(whole, device.memoryBytes);
  return std::min(whole, device.memoryBytes + kOverheadBytes);
}

uint64_t suspendedBytes(const LeasedDevice& device, uint64_t kept) {
  const uint64_t reserved = reservedBytes(device), overhead = device.info.software ? 0 : kOverheadBytes;
  if (kept >= reserved) return reserved;  // before the sum: it comes from a server
  return std::min(reserved, kept + overhead);
}

Choice place(const Wish& wish, std::span<const ServerUse> servers) {
  const ServerUse* best = nullptr;
  for (const ServerUse& server : servers) {
    if (!server.unusable.empty() || (!wish.server.empty() && server.name != wish.server)) continue;
    if (wish.deviceCount == 0 || choose(wish, server).empty()) continue;
    if (best == nullptr || totalFree(server) < totalFree(*best)) best = &server;
  }
  if (best == nullptr) return {{}, {}, explain(wish, servers), !couldEver(wish, servers)};
  Choice choice{best->name, {}, {}, false};
  for (const DeviceUse* device : choose(wish, *best))
    choice.devices.push_back(
        {device->info, wish.memoryBytes == 0 ? device->info.memoryBytes : wish.memoryBytes});
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
    could = std::max(could, fitting(wish, emptied(server)));
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
    return (wish.server.empty() || server.name == wish.server) &&
           fitting(wish, emptied(server)) >= wish.deviceCount;
  });
}

std::string missingFor(std::span<const LeasedDevice> devices, const ServerUse& server) {
  if (!server.unusable.empty()) return server.name + ": " + server.unusable;
  std::string missing;
  for (const LeasedDevice& wanted : devices) {
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
    else if (at->freeBytes < reservedBytes(wanted))
      why = "has " + options::formatSize(at->freeBytes) + " free of the " +
            options::formatSize(reservedBytes(wanted)) + " that are wanted" +
            (at->holders.empty() ? "" : ": it " + describe(at->holders));
    if (!why.empty())
      missing += (missing.empty() ? server.name + ": " : ", ") + "GPU " +
                 std::to_string(wanted.info.ordinal) + " (" + wanted.info.name + ") " + why;
  }
  return shortened(missing, kMostDetails);
}

}  // namespace gpupool::pool
