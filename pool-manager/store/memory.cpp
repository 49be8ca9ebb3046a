#include <map>

#include "pool-manager/store/store.h"

namespace gpupool::pool {
namespace {

class MemoryStore final : public Store {
 public:
  std::vector<Entry> range(const std::string& prefix) override {
    std::vector<Entry> found;
    for (auto at = entries_.lower_bound(prefix); at != entries_.end() && at->first.starts_with(prefix); ++at)
      found.push_back(at->second);
    return found;
  }

  std::optional<Entry> get(const std::string& key) override {
    const auto at = entries_.find(key);
    if (at == entries_.end()) return std::nullopt;
    return at->second;
  }

  std::optional<uint64_t> commit(std::span<const Compare> compares, std::span<const Write> writes) override {
    for (const Compare& compare : compares) {
      const auto at = entries_.find(compare.key);
      if ((at == entries_.end() ? 0 : at->second.revision) != compare.revision) return std::nullopt;
    }
    ++revision_;
    for (const Write& write : writes) {
      if (write.value)
        entries_[write.key] = {write.key, *write.value, revision_};
      else
        entries_.erase(write.key);
    }
    return revision_;
  }

 private:
  std::map<std::string, Entry> entries_;
  uint64_t revision_ = 0;
};

}  // namespace

std::unique_ptr<Store> makeMemoryStore() { return std::make_unique<MemoryStore>(); }

}  // namespace gpupool::pool
