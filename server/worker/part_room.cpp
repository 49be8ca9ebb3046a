#include "server/worker/part_room.h"

namespace gpupool::server {

std::byte* PartRoom::take(size_t bytes) {
  size_t offset = 0, end = memory_->size();
  if (!taken_.empty()) {
    const size_t first = taken_.front().offset, behind = taken_.back().offset + taken_.back().bytes;
    const bool around = taken_.back().offset < first;
    if (around || end - behind >= bytes)
      offset = behind;
    else
      end = first;
    if (around) end = first;
  }
  if (bytes == 0 || bytes > end - offset) return nullptr;
  taken_.push_back({offset, bytes});
  return memory_->data() + offset;
}

bool PartRoom::isNext(std::span<const std::byte> part) const {
  return sent_ < taken_.size() && part.data() == memory_->data() + taken_[sent_].offset &&
         part.size() <= taken_[sent_].bytes;
}

bool PartRoom::giveBack(uint64_t count) {
  if (count == 0 || count > sent_) return false;
  taken_.erase(taken_.begin(), taken_.begin() + static_cast<std::ptrdiff_t>(count));
  sent_ -= count;
  return true;
}

}  // namespace gpupool::server
