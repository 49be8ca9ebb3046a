#pragma once
// Host memory that client and worker cannot share: any over a network, and memory that the application
// registered. Each side has a copy, and both keep a base, the content they last agreed on. Differences from
// the base travel as runs {u64 offset, blob bytes}: the client's before a launch, the worker's at a
// synchronisation. Bytes neither side changed never travel, so concurrent writers of neighbouring bytes do
// not undo each other.
//
// The bytes compared may be changing meanwhile, by a host function or a kernel: what changes during a
// comparison is found by the next one.
//
// Not thread-safe: the caller serialises.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "schema/wire.h"

namespace gpupool::schema {

class MirrorBase {
 public:
  // The peer has sent these bytes at `offset`: both sides agree on them now.
  void apply(size_t offset, std::span<const std::byte> bytes) {
    grow(offset + bytes.size());
    if (!bytes.empty()) std::memcpy(base_.data() + offset, bytes.data(), bytes.size());
  }

  std::span<const std::byte> base() const { return base_; }

  // The peer's content is unknown: the next collect sends everything.
  void distrust() { agreed_ = false; }
  bool agreed() const { return agreed_; }

  // Writes the runs in which `now` differs from the base into `out` (its size is the capacity, a multiple of
  // 8 and at least 24) and takes them into the base. Returns the bytes written. more(): the room ran out, and
  // the next collect goes on behind them. pages: by page of `now`, 0: it is as the base, and is not looked
  // at; a page that differs is set to `changed`. Empty: all are looked at.
  size_t collect(const std::byte* now, size_t length, std::span<unsigned char> out,
                 std::span<uint8_t> pages = {}, uint8_t changed = 1) {
    grow(length);
    size_t used = 0, at = std::min(next_, length);
    next_ = 0;
    while (at < length) {
      const size_t end = std::min(at / kPage * kPage + kPage, length);
      uint8_t* const page = pages.empty() ? nullptr : &pages[at / kPage];
      const bool left = page != nullptr && *page == 0;
      if (agreed_ && (left || std::memcmp(now + at, base_.data() + at, end - at) == 0)) {
        at = end;
        continue;
      }
      if (page != nullptr) *page = changed;
      while (at < end) {
        size_t stop = agreed_ ? at : end;
        while (stop < end && now[stop] != base_[stop]) ++stop;
        if (stop == at) {
          ++at;
          continue;
        }
        const size_t room = out.size() - used;
        if (room < 24) {
          next_ = at;
          return used;
        }
        const size_t n = std::min(stop - at, (room - 16) & ~size_t{7});
        write(out.data() + used, at, now + at, n);
        std::memcpy(base_.data() + at, out.data() + used + 16, n);  // as sent: `now` may be changing
        used += 16 + padded(n);
        at += n;
      }
    }
    agreed_ = true;
    return used;
  }
  bool more() const { return next_ != 0; }
  static constexpr size_t kPage = 4096;

 private:
  static void write(unsigned char* to, uint64_t offset, const std::byte* bytes, uint64_t n) {
    std::memcpy(to, &offset, 8);
    std::memcpy(to + 8, &n, 8);
    std::memcpy(to + 16, bytes, n);
    if (padded(n) != n) std::memset(to + 16 + n, 0, padded(n) - n);
  }
  void grow(size_t bytes) {
    if (base_.size() < bytes) base_.resize(bytes);  // fresh memory is zero on both sides
  }
  std::vector<std::byte> base_;
  size_t next_ = 0;
  bool agreed_ = true;
};

}  // namespace gpupool::schema
