#include "pool-manager/placement_index.h"

#include <algorithm>

#include "pool-manager/placement_sets.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostKinds = 4096;  // then those that are no more are forgotten

}  // namespace

uint32_t PlacementIndex::kindOf(const Device& device) {
  const auto [at, isNew] = kinds_.try_emplace(
      Kind{device.name, device.memoryBytes, device.computeMajor, device.computeMinor}, examples_.size());
  if (isNew) examples_.push_back(device);
  return at->second;
}

PlacementIndex::Summary PlacementIndex::summaryOf(const ServerUse& server) {
  Summary summary;
  summary.usable = server.unusable.empty();
  summary.room = totalRoom(server);
  summary.mostJoined = fit::mostJoined(server);
  for (const DeviceUse& device : server.devices) {
    const uint32_t kind = kindOf(device.info);
    auto at = std::find_if(summary.amounts.begin(), summary.amounts.end(),
                           [&](const Amount& one) { return one.kind == kind; });
    if (at == summary.amounts.end()) at = summary.amounts.insert(at, Amount{kind});
    ++at->count;
    if (!device.info.problem.empty() || !device.duplicateOf.empty()) continue;
    at->inOrder = true;
    at->mostFree = std::max(at->mostFree, device.freeBytes);
  }
  return summary;
}

void PlacementIndex::rebuild(std::span<const ServerUse> servers) {
  summaries_.clear();
  byRoom_.clear();
  kinds_.clear();
  examples_.clear();
  for (const ServerUse& server : servers) {
    summaries_.push_back(summaryOf(server));
    byRoom_.push_back({summaries_.back().room, static_cast<uint32_t>(byRoom_.size())});
  }
  std::sort(byRoom_.begin(), byRoom_.end());
}

void PlacementIndex::update(std::span<const ServerUse> servers, size_t server) {
  if (examples_.size() > kMostKinds) return rebuild(servers);
  const Room before{summaries_.at(server).room, static_cast<uint32_t>(server)};
  summaries_[server] = summaryOf(servers[server]);
  const Room now{summaries_[server].room, before.server};
  if (now == before) return;
  byRoom_.erase(std::lower_bound(byRoom_.begin(), byRoom_.end(), before));
  byRoom_.insert(std::lower_bound(byRoom_.begin(), byRoom_.end(), now), now);
}

PlacementIndex::Query PlacementIndex::queryOf(const Wish& wish) const {
  Query query{wish.deviceCount, {}};
  query.least.reserve(examples_.size());
  for (const Device& device : examples_) {
    const uint64_t whole = wish.besideSuspended ? device.memoryBytes / 2 : device.memoryBytes;
    const bool is = wish.gpu.matches(device) && wish.memoryBytes <= device.memoryBytes;
    query.least.push_back(!is ? kNone : wish.memoryBytes == 0 ? whole : wish.memoryBytes);
  }
  return query;
}

bool PlacementIndex::mayFit(const Query& query, size_t server) const {
  const Summary& summary = summaries_[server];
  uint32_t count = 0;
  if (!summary.usable) return false;
  for (const Amount& one : summary.amounts)
    if (one.inOrder && query.least[one.kind] != kNone && one.mostFree >= query.least[one.kind])
      count += one.count;
  return count >= query.deviceCount;
}

bool PlacementIndex::couldFit(const Query& query, size_t server) const {
  uint32_t count = 0;
  for (const Amount& one : summaries_[server].amounts)
    if (query.least[one.kind] != kNone) count += one.count;
  return count >= query.deviceCount;
}

bool PlacementIndex::mayJoin(const Query& query, size_t server) const {
  return query.deviceCount == 1 || summaries_[server].mostJoined >= query.deviceCount;
}

}  // namespace gpupool::pool
