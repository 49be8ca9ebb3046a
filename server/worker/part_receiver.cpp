#include "server/worker/part_receiver.h"

#include <algorithm>
#include <cstring>

namespace gpupool::server {
namespace {

constexpr size_t kCopiedAtOnce = size_t{128} << 10;  // stays in a processor's cache

Checksum copyAndSum(std::span<const std::byte> from, std::byte* to) {
  ChecksumMaker checksum;
  while (!from.empty()) {
    const size_t bytes = std::min(kCopiedAtOnce, from.size());
    std::memcpy(to, from.data(), bytes);
    checksum.update({to, bytes});
    from = from.subspan(bytes);
    to += bytes;
  }
  return checksum.finish();
}

}  // namespace

PartReceiver::PartReceiver(StateSocket& socket, size_t most, size_t threads, Where where)
    : socket_(socket),
      where_(where),
      parts_(socket.partsAtOnce(StateSocket::kPartBytes, most)),
      comparing_(parts_.size(), threads, [this](size_t slot, size_t page) {
        compare(parts_[slot], page);
        return std::string();
      }) {}

bool PartReceiver::receive(std::span<std::byte> room) {
  Part& part = parts_[comparing_.next()];
  if (!socket_.receivePart(room, part.came)) return false;
  part.bytes = where_ == copied ? room : part.came.bytes;
  part.pages = part.came.paged ? (part.bytes.size() + kPageBytes - 1) / kPageBytes : 1;
  comparing_.give(part.pages);
  return true;
}

std::string PartReceiver::await() {
  if (std::string why = comparing_.await(); !why.empty()) return why;
  const Part& part = parts_[comparing_.oldest()];
  const Checksum checksum = checksumOfPages(std::span(part.checksums).first(part.pages));
  return checksum == part.came.checksum ? "" : kDamagedOnItsWay;
}

bool PartReceiver::drop() {
  const bool given = socket_.giveBack(parts_[comparing_.oldest()].came);
  comparing_.drop();
  return given;
}

// On any thread.
void PartReceiver::compare(Part& part, size_t page) const {
  const size_t at = page * kPageBytes;
  const size_t bytes =
      part.pages == 1 ? part.bytes.size() : std::min<size_t>(part.bytes.size() - at, kPageBytes);
  const auto came = std::span<const std::byte>(part.came.bytes).subspan(at, bytes);
  const bool copies = came.data() != part.bytes.data() + at;
  part.checksums[page] = copies ? copyAndSum(came, part.bytes.data() + at) : checksumOf(came);
}

}  // namespace gpupool::server
