#pragma once
// What the programs of a lease have done, on all servers together that have had it since the manager was
// started: each server counts for itself (schema::LeaseCounts), and begins anew when it does.

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "pool-manager/model.h"

namespace gpupool::pool {

class LeaseTotals {
 public:
  // said: by that server, of all that it knows of the lease.
  void note(const std::string& server, const LeaseCounts& said, uint64_t nowMs) {
    Said& before = said_[server];
    grow(&LeaseCounts::calls, before.counts, said);
    grow(&LeaseCounts::awaited, before.counts, said);
    grow(&LeaseCounts::toDeviceBytes, before.counts, said);
    grow(&LeaseCounts::fromDeviceBytes, before.counts, said);
    before = {said, nowMs};
  }
  // The lease is there no more. Should it come back, that server counts from 0.
  template <class IsThere>
  void keepServers(IsThere&& isThere) {
    std::erase_if(said_, [&](const auto& one) { return !isThere(one.first); });
  }

  bool counted() const { return counted_; }
  const LeaseCounts& total() const { return total_; }
  // Of the oldest checkpoint that a session would go on from.
  std::optional<uint64_t> checkpointAgeMs(uint64_t nowMs) const {
    std::optional<uint64_t> oldest;
    for (const auto& [server, said] : said_)
      if (said.counts.checkpointAgeMs >= 0)
        oldest = std::max(oldest.value_or(0), static_cast<uint64_t>(said.counts.checkpointAgeMs) + nowMs -
                                                  std::min(nowMs, said.atMs));
    return oldest;
  }

 private:
  struct Said {
    LeaseCounts counts;
    uint64_t atMs = 0;
  };
  void grow(uint64_t LeaseCounts::* count, const LeaseCounts& before, const LeaseCounts& said) {
    const bool anew = said.*count < before.*count;
    total_.*count += said.*count - (anew ? 0 : before.*count);
    counted_ = true;
  }

  LeaseCounts total_;
  bool counted_ = false;
  std::map<std::string, Said> said_;  // by server
};

}  // namespace gpupool::pool
