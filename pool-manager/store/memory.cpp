#include <map>

#include "pool-manager/store/medium.h"

namespace gpupool::pool {
namespace {

class MemoryMedium final : public Medium {
 public:
  std::vector<Entry> range(const std::string& prefix) override {
    std::vector<Entry> found;
    for (auto at = entries_.lower_bound(prefix); at != entries_.end() && at->first.starts_with(prefix); ++at)
      found.push_back(at->second);
    return found;
  }

  std::vector<Outcome> apply(std::span<const Transaction> group) override {
    std::vector<Outcome> outcomes;
    for (const Transaction& transaction : group) outcomes.push_back(apply(transaction));
    return outcomes;
  }

 private:
  Outcome apply(const Transaction& transaction) {
    for (const Compare& compare : transaction.compares) {
      const auto at = entries_.find(compare.key);
      if ((at == entries_.end() ? 0 : at->second.revision) != compare.revision)
        return {Outcome::Kind::compareFailed, 0, {}};
    }
    ++revision_;
    for (const Write& write : transaction.writes) {
      if (write.value)
        entries_[write.key] = {write.key, *write.value, revision_};
      else
        entries_.erase(write.key);
    }
    return {Outcome::Kind::committed, revision_, {}};
  }

  std::map<std::string, Entry> entries_;
  uint64_t revision_ = 0;
};

}  // namespace

std::unique_ptr<Medium> makeMemoryMedium() { return std::make_unique<MemoryMedium>(); }

std::unique_ptr<Store> makeMemoryStore() { return makeStore(makeMemoryMedium(), WritesOn::deliver); }

}  // namespace gpupool::pool
