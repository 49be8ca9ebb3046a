#include "server/worker/record.h"

namespace gpupool::server {

void Record::append(Entry entry) {
  std::lock_guard lock(mutex_);
  bytes_ += entry.bytes.size();
  log_.push_back(std::move(entry));
  auto last = std::prev(log_.end());
  if (last->subject != 0) bySubject_.emplace(last->subject, last);
}

void Record::forget(uint64_t subject) {
  std::lock_guard lock(mutex_);
  auto [first, end] = bySubject_.equal_range(subject);
  for (auto it = first; it != end; ++it) {
    bytes_ -= it->second->bytes.size();
    log_.erase(it->second);
  }
  bySubject_.erase(first, end);
}

void Record::unrestorable(const std::string& reason) {
  std::lock_guard lock(mutex_);
  reasons_.insert(reason);
}

size_t Record::size() const {
  std::lock_guard lock(mutex_);
  return log_.size();
}

size_t Record::bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

std::vector<Record::Entry> Record::entries() const {
  std::lock_guard lock(mutex_);
  return {log_.begin(), log_.end()};
}

std::set<std::string> Record::reasons() const {
  std::lock_guard lock(mutex_);
  return reasons_;
}

}  // namespace gpupool::server
