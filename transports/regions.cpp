#include "transports/regions.h"

#include <algorithm>

#include "transports/waiting.h"

namespace gpupool::transport {

Region LocalRegions::add(std::shared_ptr<SharedMemory> memory) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else {
    if (slots_.size() >= kMaxRegions) return {};
    slot = static_cast<uint32_t>(slots_.size());
    slots_.emplace_back();
  }
  slots_[slot].memory = std::move(memory);
  return {slot + 1, slots_[slot].generation};
}

bool LocalRegions::remove(Region region) {
  std::shared_ptr<SharedMemory> dropped;  // unmapped outside the lock
  std::lock_guard lock(mutex_);
  if (region.id == 0 || region.id > slots_.size()) return false;
  Slot& slot = slots_[region.id - 1];
  if (slot.generation != region.generation || !slot.memory) return false;
  dropped = std::move(slot.memory);
  slot.memory = nullptr;
  if (++slot.generation != 0) free_.push_back(region.id - 1);  // a slot out of generations is never reused
  return true;
}

std::shared_ptr<SharedMemory> LocalRegions::find(Region region) const {
  std::lock_guard lock(mutex_);
  if (region.id == 0 || region.id > slots_.size()) return nullptr;
  const Slot& slot = slots_[region.id - 1];
  return slot.generation == region.generation ? slot.memory : nullptr;
}

void LocalRegions::clear() {
  std::vector<Slot> dropped;
  std::lock_guard lock(mutex_);
  dropped.swap(slots_);
  free_.clear();
}

bool RemoteRegions::announce(Region region, size_t size, Descriptor descriptor,
                             std::shared_ptr<SharedMemory> mapping, std::optional<uint64_t> fileOffset) {
  if (region.id == 0 || region.id > kMaxRegions || region.generation == 0 || size == 0) return false;
  {
    std::lock_guard lock(mutex_);
    Entry& entry = entries_[region.id];
    if (!entry.withdrawn || region.generation <= entry.generation) return false;
    entry = {region.generation,
             false,
             size,
             descriptor ? std::make_shared<Descriptor>(std::move(descriptor)) : nullptr,
             std::move(mapping),
             fileOffset};
  }
  changed_.notify_all();
  return true;
}

bool RemoteRegions::withdraw(Region region) {
  Entry dropped;  // unmapped outside the lock
  {
    std::lock_guard lock(mutex_);
    auto found = entries_.find(region.id);
    if (found == entries_.end() || found->second.generation != region.generation || found->second.withdrawn) {
      return false;
    }
    dropped = std::move(found->second);
    found->second = Entry{region.generation, true, 0, nullptr, nullptr, {}};
  }
  changed_.notify_all();
  return true;
}

std::optional<RemoteRegions::Entry> RemoteRegions::wait(Region region, Deadline deadline) {
  TimeLeft time(deadline - Clock::now());
  std::unique_lock lock(mutex_);
  for (;;) {
    auto found = entries_.find(region.id);
    if (found != entries_.end() && found->second.generation >= region.generation) {
      const Entry& entry = found->second;
      if (entry.withdrawn || entry.generation != region.generation) return std::nullopt;
      return entry;
    }
    const Clock::duration step = time.step();
    if (stopped_ || step == Clock::duration::zero() || region.id == 0 || region.id > kMaxRegions)
      return std::nullopt;
    changed_.wait_for(lock, step);
  }
}

std::shared_ptr<SharedMemory> RemoteRegions::remember(Region region, std::shared_ptr<SharedMemory> mapping) {
  std::lock_guard lock(mutex_);
  auto found = entries_.find(region.id);
  if (found == entries_.end() || found->second.generation != region.generation || found->second.withdrawn) {
    return mapping;
  }
  if (!found->second.mapping) found->second.mapping = mapping;
  return found->second.mapping;
}

void RemoteRegions::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
}

}  // namespace gpupool::transport
