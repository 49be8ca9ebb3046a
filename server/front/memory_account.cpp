#include "server/front/memory_account.h"

#include <algorithm>

namespace gpupool::server {

bool MemoryAccount::take(uint64_t session, uint32_t place, uint64_t bytes) {
  if (place >= limits_.size() || bytes > limits_[place] - used_[place]) return false;
  auto& taken = sessions_[session];
  taken.resize(limits_.size());
  taken[place] += bytes;
  used_[place] += bytes;
  return true;
}

void MemoryAccount::give(uint64_t session, uint32_t place, uint64_t bytes) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end() || place >= limits_.size()) return;
  const uint64_t given = std::min(bytes, found->second[place]);
  found->second[place] -= given;
  used_[place] -= given;
}

void MemoryAccount::forget(uint64_t session) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  for (size_t place = 0; place < limits_.size(); ++place) used_[place] -= found->second[place];
  sessions_.erase(found);
}

uint64_t MemoryAccount::freeBytes(uint32_t place) const {
  return place < limits_.size() ? limits_[place] - used_[place] : 0;
}

uint64_t MemoryAccount::others(uint64_t session, uint32_t place) const {
  if (place >= limits_.size()) return 0;
  const auto found = sessions_.find(session);
  return used_[place] - (found == sessions_.end() ? 0 : found->second[place]);
}

}  // namespace gpupool::server
