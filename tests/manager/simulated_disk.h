#pragma once
// A disk that outlives the manager's process, and what it does wrong.

#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool-manager/records.h"
#include "pool-manager/store/medium.h"

namespace gpupool::history {

using namespace gpupool::pool;

// The disk outlives the manager's process.
struct Disk {
  std::unique_ptr<Medium> medium = makeMemoryMedium();
  bool full = false, unsure = false, forgets = false, losesCordons = false, losesHolds = false;
};

class OnDisk final : public Medium {
 public:
  explicit OnDisk(Disk& disk) : disk_(disk) {}
  std::vector<Entry> range(const std::string& prefix) override { return disk_.medium->range(prefix); }
  std::vector<Outcome> apply(std::span<const Transaction> group) override {
    if (disk_.full) throw std::runtime_error("store: the disk is full");
    if (disk_.forgets && !group.empty() && ++writes_ > 3) {
      std::vector<Outcome> lies;
      lies.reserve(group.size());
      for (size_t i = 0; i < group.size(); ++i) lies.push_back({Outcome::Kind::committed, ++revision_, {}});
      return lies;
    }
    if (disk_.losesCordons)
      return applyWithout(group, [](const Write& write) { return write.key.starts_with("cordon/"); });
    if (disk_.losesHolds)
      return applyWithout(group, [](const Write& write) {
        return write.key.starts_with("lease/") && write.value &&
               decodeLease(*write.value, "manager").state == LeaseState::held;
      });
    auto outcomes = disk_.medium->apply(group);
    if (disk_.unsure) throw std::runtime_error("store: I/O error");
    return outcomes;
  }

 private:
  template <class Loses>
  std::vector<Outcome> applyWithout(std::span<const Transaction> group, Loses loses) {
    std::vector<Transaction> kept(group.begin(), group.end());
    for (Transaction& one : kept) std::erase_if(one.writes, loses);
    return disk_.medium->apply(kept);
  }

  Disk& disk_;
  int writes_ = 0;
  uint64_t revision_ = 1'000'000;
};

}  // namespace gpupool::history
