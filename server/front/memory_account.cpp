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

void MemoryAccount::hand(uint64_t from, uint64_t to, uint32_t place, uint64_t bytes) {
  const uint64_t handed = std::min(bytes, used(from, place));
  give(from, place, handed);
  take(to, place, handed);
}

void MemoryAccount::forget(uint64_t session) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  for (size_t place = 0; place < limits_.size(); ++place) used_[place] -= found->second[place];
  sessions_.erase(found);
}

bool MemoryAccount::takeAs(const MemoryAccount& other, uint64_t session) {
  const auto found = other.sessions_.find(session);
  if (found == other.sessions_.end()) return true;
  const std::vector<uint64_t>& amounts = found->second;
  for (size_t place = 0; place < amounts.size(); ++place) {
    if (amounts[place] == 0 || take(session, static_cast<uint32_t>(place), amounts[place])) continue;
    for (size_t taken = 0; taken < place; ++taken)
      give(session, static_cast<uint32_t>(taken), amounts[taken]);
    return false;
  }
  return true;
}

uint64_t MemoryAccount::freeBytes(uint32_t place) const {
  return place < limits_.size() ? limits_[place] - used_[place] : 0;
}

uint64_t MemoryAccount::used(uint64_t session, uint32_t place) const {
  const auto found = sessions_.find(session);
  return found == sessions_.end() || place >= limits_.size() ? 0 : found->second[place];
}

bool MemoryAccount::empty() const {
  return std::all_of(used_.begin(), used_.end(), [](uint64_t bytes) { return bytes == 0; });
}

uint64_t MemoryAccount::others(uint64_t session, uint32_t place) const {
  if (place >= limits_.size()) return 0;
  const auto found = sessions_.find(session);
  return used_[place] - (found == sessions_.end() ? 0 : found->second[place]);
}

}  // namespace gpupool::server
