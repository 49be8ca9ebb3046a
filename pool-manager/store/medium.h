#pragma once
// What a Store writes to, one group of transactions at a time; and the Store around it.

#include <span>

#include "pool-manager/store/store.h"

namespace gpupool::pool {

class Medium {
 public:
  virtual ~Medium() = default;
  virtual std::vector<Entry> range(const std::string& prefix) = 0;
  // One outcome each, in order. Later ones see the writes of earlier ones; one whose comparison fails holds
  // back no other. Throws std::runtime_error: nothing of the group was written.
  virtual std::vector<Outcome> apply(std::span<const Transaction> group) = 0;
};

std::unique_ptr<Medium> makeMemoryMedium();

enum class WritesOn { ownThread, deliver };
std::unique_ptr<Store> makeStore(std::unique_ptr<Medium> medium, WritesOn writes);

}  // namespace gpupool::pool
