#pragma once
// The manager's durable state: ordered keys, each with the revision of its last write, and transactions that
// commit only if what they were decided on still holds. The shape is etcd's (range, txn with compare on
// mod_revision, watch), so that a cluster can stand behind it. Small values (a lease is about 1 KiB).
//
// Writing is asynchronous: commit() returns at once, the transactions that wait are written together (one
// fsync for all of them), in the order of their commits, and deliver() tells what became of them. A Store
// belongs to one thread, its owner's; what it does on a thread of its own is not to be seen.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
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

// All writes or none.
struct Transaction {
  std::vector<Compare> compares;
  std::vector<Write> writes;
};

struct Outcome {
  // committed: the writes survive the death of the process and of the machine. failed: the medium refused (a
  // full disk); usually nothing was written, but that is not certain.
  enum class Kind { committed, compareFailed, failed } kind = Kind::failed;
  uint64_t revision = 0;  // committed: of the transaction, higher than every earlier one
  std::string why;        // failed
  bool committed() const { return kind == Kind::committed; }
};

class Store {
 public:
  using Done = std::function<void(const Outcome&)>;
  using Watcher = std::function<void(const Write&, uint64_t revision)>;

  virtual ~Store() = default;
  // Every entry whose key starts with `prefix`, in key order. May wait for the medium: for the start, before
  // the first commit(). Throws std::runtime_error.
  virtual std::vector<Entry> range(const std::string& prefix) = 0;
  // Writes and waits: for the start as well.
  virtual Outcome commitNow(const Transaction& transaction) = 0;
  // `done` is called by a later deliver(), never from here, in the order of the commits.
  virtual void commit(Transaction transaction, Done done) = 0;
  // `watcher` is called by deliver() for every write to a key that starts with `prefix`, whoever made it,
  // before the `done` of that transaction.
  virtual void watch(std::string prefix, Watcher watcher) = 0;
  // `ready` is called once, from any thread, when deliver() has something to do; perhaps at once. Empty: no
  // more.
  virtual void whenReady(std::function<void()> ready) = 0;
  // False: there was nothing to tell.
  virtual bool deliver() = 0;
};

// A file of this host, created 0600. One process at a time: a second one gets an error.
std::unique_ptr<Store> openSqliteStore(const std::string& path);
// Forgets everything with the object. It writes inside deliver(), on the caller's thread.
std::unique_ptr<Store> makeMemoryStore();

}  // namespace gpupool::pool
