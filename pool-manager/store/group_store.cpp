#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "pool-manager/store/medium.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostGroup = 256;  // transactions written together

struct Pending {
  Transaction transaction;
  Store::Done done;
  Outcome outcome;
};

class GroupStore final : public Store {
 public:
  GroupStore(std::unique_ptr<Medium> medium, WritesOn writes) : medium_(std::move(medium)) {
    if (writes == WritesOn::ownThread) writer_ = std::thread([this] { run(); });
  }
  // What was committed is written; nobody is told any more.
  ~GroupStore() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      ready_ = nullptr;
    }
    work_.notify_all();
    if (writer_.joinable()) writer_.join();
  }

  std::vector<Entry> range(const std::string& prefix) override {
    const std::lock_guard lock(mediumMutex_);
    return medium_->range(prefix);
  }

  Outcome commitNow(const Transaction& transaction) override {
    std::vector<Pending> group(1);
    group[0].transaction = transaction;
    write(group);
    return group[0].outcome;
  }

  void commit(Transaction transaction, Done done) override {
    std::function<void()> ready;
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back({std::move(transaction), std::move(done), {}});
      if (!writer_.joinable()) ready = std::exchange(ready_, nullptr);
    }
    work_.notify_one();
    if (ready) ready();
  }

  void watch(std::string prefix, Watcher watcher) override {
    watchers_.emplace_back(std::move(prefix), std::move(watcher));
  }

  void whenReady(std::function<void()> ready) override {
    {
      const std::lock_guard lock(mutex_);
      const bool something = !written_.empty() || (!writer_.joinable() && !waiting_.empty());
      if (!ready || !something) {
        ready_ = std::move(ready);
        return;
      }
    }
    ready();
  }

  bool deliver() override {
    if (!writer_.joinable()) writeSome();
    std::deque<Pending> told;
    {
      const std::lock_guard lock(mutex_);
      told.swap(written_);
    }
    for (const Pending& one : told) {
      if (one.outcome.committed())
        for (const Write& write : one.transaction.writes)
          for (const auto& [prefix, watcher] : watchers_)
            if (write.key.starts_with(prefix)) watcher(write, one.outcome.revision);
      one.done(one.outcome);
    }
    return !told.empty();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      lock.unlock();
      writeSome();
      lock.lock();
    }
  }

  // Those that wait, up to a group's worth.
  void writeSome() {
    std::vector<Pending> group;
    {
      const std::lock_guard lock(mutex_);
      for (; !waiting_.empty() && group.size() < kMostGroup; waiting_.pop_front())
        group.push_back(std::move(waiting_.front()));
    }
    if (group.empty()) return;
    write(group);
    std::function<void()> ready;
    {
      const std::lock_guard lock(mutex_);
      for (Pending& one : group) written_.push_back(std::move(one));
      ready = std::exchange(ready_, nullptr);
    }
    if (ready) ready();
  }

  void write(std::vector<Pending>& group) {
    std::vector<Transaction> transactions;
    transactions.reserve(group.size());
    for (const Pending& one : group) transactions.push_back(one.transaction);
    try {
      const std::lock_guard lock(mediumMutex_);
      const auto outcomes = medium_->apply(transactions);
      for (size_t i = 0; i < group.size(); ++i) group[i].outcome = outcomes.at(i);
    } catch (const std::exception& error) {
      for (Pending& one : group) one.outcome = {Outcome::Kind::failed, 0, error.what()};
    }
  }

  std::unique_ptr<Medium> medium_;
  std::vector<std::pair<std::string, Watcher>> watchers_;
  std::mutex mediumMutex_, mutex_;  // mutex_: all below
  std::condition_variable work_;
  std::deque<Pending> waiting_, written_;
  std::function<void()> ready_;
  bool stopping_ = false;
  std::thread writer_;
};

}  // namespace

std::unique_ptr<Store> makeStore(std::unique_ptr<Medium> medium, WritesOn writes) {
  return std::make_unique<GroupStore>(std::move(medium), writes);
}

}  // namespace gpupool::pool
