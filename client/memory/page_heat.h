#pragma once
// Which pages of a mirror (client/memory/host.h) have to be compared at a publish. Where the kernel says
// which pages processors have written (written_pages.h), a page that has not changed for a while is protected
// and left out until it is written again: cold. All others are compared as everywhere else: hot. A hot page
// is not protected, so a program that writes it often pays nothing.
//
// A page turns cold in this order: it is protected, nothing in the process can have devices write to it, it
// is compared once more and has not changed. Whatever writes it later is a processor, or pins it first: both
// are seen.
//
// Not thread-safe: the caller serialises.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "client/memory/written_pages.h"

namespace gpupool::client {

class PageHeat {
 public:
  static constexpr uint8_t kHot = 64;  // publishes for which a page is compared at least
  PageHeat() = default;
  PageHeat(PageHeat&& other) noexcept : address_(other.address_), heat_(std::move(other.heat_)) {
    other.heat_.clear();
  }
  PageHeat& operator=(PageHeat&&) = delete;
  ~PageHeat() { end(); }

  // Of a mapping of the process's own that nobody else writes to. Without it every page is compared.
  void begin(uint64_t address, size_t bytes);
  void end();
  bool watches() const { return !heat_.empty(); }
  // Before a comparison: what was written is hot (of WrittenPages::written, for this memory or more). cool:
  // pages that have not changed for long are protected; true: there are such, and settle() says what becomes
  // of them.
  bool look(std::span<const WrittenPages::Range> written, bool cool);
  // By page, 0: need not be compared. Empty: all are compared. Whoever finds a page changed sets kHot.
  std::span<uint8_t> pages() { return heat_; }
  // After the comparison of a look(true). trusted: only processors write, asked since look().
  void settle(bool trusted);

 private:
  static constexpr uint8_t kCandidate = 1;
  bool protectCandidates();

  uint64_t address_ = 0;
  std::vector<uint8_t> heat_;
};

inline void PageHeat::begin(uint64_t address, size_t bytes) {
  WrittenPages* written = WrittenPages::get();
  const size_t pages = (bytes + WrittenPages::kPage - 1) / WrittenPages::kPage;
  if (written == nullptr || address % WrittenPages::kPage != 0 || pages == 0) return;
  if (!written->watch(address, pages * WrittenPages::kPage)) return;
  address_ = address;
  heat_.assign(pages, kHot);
}

inline void PageHeat::end() {
  if (!heat_.empty()) WrittenPages::get()->unwatch(address_);
  heat_.clear();
}

inline bool PageHeat::look(std::span<const WrittenPages::Range> written, bool cool) {
  const uint64_t end = address_ + heat_.size() * WrittenPages::kPage;
  for (const auto& range : written) {
    const uint64_t from = std::max(range.begin, address_), to = std::min(range.end, end);
    for (uint64_t at = from; at < to; at += WrittenPages::kPage)
      if (uint8_t& heat = heat_[(at - address_) / WrittenPages::kPage]; heat == 0) heat = kHot;
  }
  for (uint8_t& heat : heat_) heat = static_cast<uint8_t>(heat - (heat > kCandidate));
  return cool && protectCandidates();
}

inline bool PageHeat::protectCandidates() {
  bool any = false;
  for (auto at = std::ranges::find(heat_, kCandidate); at != heat_.end();) {
    const auto last = std::find_if(at, heat_.end(), [](uint8_t heat) { return heat != kCandidate; });
    const uint64_t from = address_ + static_cast<uint64_t>(at - heat_.begin()) * WrittenPages::kPage;
    any = true;
    if (!WrittenPages::get()->protect(from, static_cast<size_t>(last - at) * WrittenPages::kPage))
      std::fill(at, last, kHot);
    at = std::find(last, heat_.end(), kCandidate);
  }
  return any;
}

inline void PageHeat::settle(bool trusted) {
  std::ranges::replace(heat_, kCandidate, trusted ? uint8_t{0} : kHot);
}

}  // namespace gpupool::client
