#pragma once
// The manager's durable state: ordered keys, each with the revision of its last write, and transactions that
// commit only if what they were decided on still holds. The shape is etcd's (range, txn with compare on
// mod_revision), so that a cluster can stand behind it. Small values (a lease is about 1 KiB). One thread per
// Store. Failures of the medium are std::runtime_error; nothing of the failed transaction is then visible.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace gpupool::pool {

struct Entry {
  std::string key, value;
  uint64_t revision = 0;
};

// The key's revision is exactly this; 0: there is no such key.
struct Compare {
  std::string key;
  uint64_t revision = 0;
};

struct Write {
  std::string key;
  std::optional<std::string> value;  // none: erase
};

class Store {
 public:
  virtual ~Store() = default;
  // Every entry whose key starts with `prefix`, in key order.
  virtual std::vector<Entry> range(const std::string& prefix) = 0;
  virtual std::optional<Entry> get(const std::string& key) = 0;
  // All writes or none. Returns their revision (one for the whole transaction, higher than every earlier
  // one), or none if a comparison failed. Once it returns, the writes survive the death of the process and of
  // the machine.
  virtual std::optional<uint64_t> commit(std::span<const Compare> compares,
                                         std::span<const Write> writes) = 0;
};

// A file of this host, created 0600. One process at a time: a second one is told so.
std::unique_ptr<Store> openSqliteStore(const std::string& path);
// For tests: forgets everything with the object.
std::unique_ptr<Store> makeMemoryStore();

}  // namespace gpupool::pool
