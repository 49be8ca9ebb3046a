#include "server/worker/account.h"

#include <algorithm>

namespace gpupool::server {

CUresult OwnAccount::take(unsigned place, uint64_t bytes) {
  if (place == kHost) return CUDA_SUCCESS;
  std::lock_guard lock(mutex_);
  if (place >= limits_.size() || bytes > limits_[place] - used_[place]) return CUDA_ERROR_OUT_OF_MEMORY;
  used_[place] += bytes;
  return CUDA_SUCCESS;
}

void OwnAccount::give(unsigned place, uint64_t bytes) {
  if (place == kHost) return;
  std::lock_guard lock(mutex_);
  used_[place] -= std::min(used_[place], bytes);
}

void ObjectMemory::add(uint64_t object, uint64_t context, unsigned device, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  objects_[object] = {context, device, bytes};
}

void ObjectMemory::remove(uint64_t object) {
  std::lock_guard lock(mutex_);
  const auto found = objects_.find(object);
  if (found == objects_.end()) return;
  account_.give(found->second.device, found->second.bytes);
  objects_.erase(found);
}

uint64_t ObjectMemory::bytes(unsigned device) const {
  std::lock_guard lock(mutex_);
  uint64_t total = 0;
  for (const auto& [object, entry] : objects_)
    if (entry.device == device) total += entry.bytes;
  return total;
}

}  // namespace gpupool::server
