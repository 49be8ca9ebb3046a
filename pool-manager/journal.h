#pragma once
// One manager's writes to the store, fenced: the manager that takes a store over leaves its mark there, and
// every transaction commits only while that mark is its own. So a manager that was stopped, and whose store
// another one has taken over meanwhile, can write nothing any more. One thread.

#include <functional>
#include <string>
#include <vector>

#include "pool-manager/store/store.h"

namespace gpupool::pool {

class Journal {
 public:
  // Takes the store over; `mark` is different for every manager. Throws std::runtime_error if that fails, or
  // if the store was written by a gpupool whose format is another. superseded: another manager has taken it
  // over. Called once, from Store::deliver.
  Journal(Store& store, const std::string& mark, std::function<void()> superseded);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // done: called later, from Store::deliver; why: "" if the store has accepted the writes.
  using Done = std::function<void(const std::string& why)>;
  void write(std::vector<Write> writes, Done done);
  bool superseded() const { return superseded_; }
  // False: nobody had used this store before.
  bool used() const { return used_; }

 private:
  void told(const Outcome& outcome, const Done& done);
  void supersede();

  Store& store_;
  Compare fence_;
  std::function<void()> onSuperseded_;
  std::shared_ptr<Journal*> alive_;  // what a store tells later may find this object gone
  bool superseded_ = false, failing_ = false, used_ = false;
};

}  // namespace gpupool::pool
