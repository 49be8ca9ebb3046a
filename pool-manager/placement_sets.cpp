#include "pool-manager/placement_sets.h"

#include <algorithm>
#include <bit>
#include <compare>
#include <span>

#include "pool-manager/placement_fit.h"

namespace gpupool::pool::fit {
namespace {

constexpr size_t kMostSteps = 4096;  // sets of 12 devices

// The less the better, one after the other.
struct Cost {
  uint64_t crowding = 0, room = 0, distance = 0;

  Cost operator+(const Cost& other) const {
    return {crowding + other.crowding, room + other.room, distance + other.distance};
  }
  auto operator<=>(const Cost&) const = default;
};

struct Candidate {
  const DeviceUse* device;
  Cost cost;
};

uint64_t distanceOf(const DeviceUse& device) {
  const auto distance = device.adapter.distance;
  const auto farthest = static_cast<uint64_t>(fabric::PciDistance::SYS);
  return distance == fabric::PciDistance::UNKNOWN ? farthest + 1 : static_cast<uint64_t>(distance);
}

// Spread: what one has less than the one that has most.
std::vector<Candidate> inOrder(const std::vector<Fitting>& fitting, Policy policy) {
  std::vector<Candidate> all;
  all.reserve(fitting.size());
  uint64_t most = 0;
  for (const Fitting& one : fitting) most = std::max(most, roomBytes(*one.device));
  for (const Fitting& one : fitting) {
    const uint64_t room = roomBytes(*one.device);
    const bool spread = policy == Policy::spread;
    all.push_back({one.device, {one.crowding, spread ? most - room : room, distanceOf(*one.device)}});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.cost < b.cost; });
  return all;
}

uint64_t bit(size_t index) { return index < kMaxDevices ? uint64_t{1} << index : 0; }
size_t indexOf(const ServerUse& server, const DeviceUse& device) {
  return static_cast<size_t>(&device - server.devices.data());
}
size_t first(uint64_t bits) { return static_cast<size_t>(std::countr_zero(bits)); }
size_t count(uint64_t bits) { return static_cast<size_t>(std::popcount(bits)); }

// The cheapest set of candidates that are joined, each with each; they are in the order of their costs. It
// goes through all such sets that may be cheaper than the best one so far.
class JoinedSearch {
 public:
  JoinedSearch(const ServerUse& server, std::span<const Candidate> candidates) : candidates_(candidates) {
    for (const Candidate& one : candidates) {
      uint64_t joined = 0;
      for (size_t i = 0; i < candidates.size(); ++i)
        if ((one.device->joined & bit(indexOf(server, *candidates[i].device))) != 0) joined |= bit(i);
      joined_.push_back(joined);
    }
  }
  // As bits; 0: none is found.
  uint64_t find(size_t wanted) {
    const uint64_t last = bit(candidates_.size() - 1);
    extend(0, {}, last | (last - 1), wanted);
    return best_;
  }

 private:
  // open: those that are joined with all that are taken, and come after them.
  void extend(uint64_t taken, const Cost& cost, uint64_t open, size_t more) {
    if (more == 0) {
      best_ = taken;
      bestCost_ = cost;
      return;
    }
    while (count(open) >= more && steps_ < kMostSteps) {
      if (best_ != 0 && cost + cheapest(open, more) >= bestCost_) return;
      ++steps_;
      const size_t next = first(open);
      open &= open - 1;
      extend(taken | bit(next), cost + candidates_[next].cost, open & joined_[next], more - 1);
    }
  }
  Cost cheapest(uint64_t open, size_t wanted) const {
    Cost sum;
    for (; wanted != 0; --wanted, open &= open - 1) sum = sum + candidates_[first(open)].cost;
    return sum;
  }

  std::span<const Candidate> candidates_;
  std::vector<uint64_t> joined_;
  uint64_t best_ = 0;
  Cost bestCost_;
  size_t steps_ = 0;
};

}  // namespace

bool joined(const ServerUse& server, const std::vector<const DeviceUse*>& devices) {
  uint64_t all = 0;
  for (const DeviceUse* device : devices) all |= bit(indexOf(server, *device));
  return std::all_of(devices.begin(), devices.end(), [&](const DeviceUse* device) {
    const uint64_t own = bit(indexOf(server, *device));
    return devices.size() == 1 || ((device->joined | own) & all) == all;
  });
}

DeviceSet chooseSet(const ServerUse& server, std::vector<Fitting> fitting, size_t count, Policy policy) {
  DeviceSet set;
  if (count == 0 || fitting.size() < count) return set;
  const std::vector<Candidate> all = inOrder(fitting, policy);
  for (size_t i = 0; i < count; ++i) set.devices.push_back(all[i].device);
  set.crowding = all[count - 1].cost.crowding;
  set.joined = joined(server, set.devices);
  if (!set.joined && mostJoined(server) >= count) {
    const auto more = std::find_if(all.begin(), all.end(),
                                   [&](const Candidate& one) { return one.cost.crowding > set.crowding; });
    const auto least = std::span(all).first(std::min<size_t>(kMaxDevices, more - all.begin()));
    uint64_t found = JoinedSearch(server, least).find(count);
    set.joined = found != 0;
    for (size_t i = 0; found != 0; ++i, found &= found - 1) set.devices[i] = least[first(found)].device;
  }
  std::sort(set.devices.begin(), set.devices.end(),
            [](const DeviceUse* a, const DeviceUse* b) { return a->info.ordinal < b->info.ordinal; });
  return set;
}

size_t mostJoined(const ServerUse& server) {
  const auto usable = [](const DeviceUse& device) {
    return device.freeBytes != 0 && device.info.problem.empty() && device.duplicateOf.empty();
  };
  uint64_t all = 0;
  for (const DeviceUse& device : server.devices)
    if (usable(device)) all |= bit(indexOf(server, device));
  size_t most = 0;
  for (const DeviceUse& device : server.devices)
    if (usable(device)) most = std::max(most, count(device.joined & all) + 1);
  return most;
}

}  // namespace gpupool::pool::fit
