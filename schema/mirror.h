#pragma once
// Host memory that client and worker cannot share (a network; pages of the application's own that it
// registered): each side has its copy, and both keep a base, the content they last agreed on. Differences
// from the base travel as runs {u64 offset, blob bytes}: the client's before a launch, the worker's at a
// synchronisation. Bytes neither side changed never travel, so concurrent writers of neighbouring bytes do
// not undo each other.
//
// Not thread-safe: the caller serialises.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "schema/wire.h"

namespace gpupool::schema {

class MirrorBase {
 public:
  // The peer's bytes at `offset` are agreed now.
  void apply(size_t offset, std::span<const std::byte> bytes) {
    grow(offset + bytes.size());
    if (!bytes.empty()) std::memcpy(base_.data() + offset, bytes.data(), bytes.size());
  }

  // Writes the runs in which `now` differs from the base into `out` (its size is the capacity, a multiple of
  // 8) and takes them into the base. Returns the bytes written; if `more` is not null it tells whether the
  // room ran out.
  size_t collect(const std::byte* now, size_t length, std::span<unsigned char> out, bool* more = nullptr) {
    grow(length);
    size_t used = 0;
    if (more != nullptr) *more = false;
    for (size_t page = 0; page < length; page += kPage) {
      size_t end = page + kPage < length ? page + kPage : length;
      if (std::memcmp(now + page, base_.data() + page, end - page) == 0) continue;
      for (size_t at = page; at < end;) {
        if (now[at] == base_[at]) {
          ++at;
          continue;
        }
        size_t stop = at + 1,
               same = 0;  // a run swallows gaps shorter than its own header would cost, if unchanged
        for (size_t i = at + 1; i < end && same < 1; ++i) {
          if (now[i] == base_[i])
            ++same;
          else
            stop = i + 1, same = 0;
        }
        size_t room = out.size() - used;
        if (room < 24) {
          if (more != nullptr) *more = true;
          return used;
        }
        size_t n = stop - at < room - 16 ? stop - at : (room - 16) & ~size_t{7};
        write(out.data() + used, at, now + at, n);
        used += 16 + padded(n);
        std::memcpy(base_.data() + at, now + at, n);
        at += n;
      }
    }
    return used;
  }

 private:
  static constexpr size_t kPage = 4096;
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
};

}  // namespace gpupool::schema
