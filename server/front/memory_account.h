#pragma once
// The memory that the sessions of one lease have taken together: what one process of a lease has, another
// cannot have. Pure bookkeeping.

#include <cstdint>
#include <map>
#include <vector>

namespace gpupool::server {

class MemoryAccount {
 public:
  // limits: of each place, a device of the lease.
  explicit MemoryAccount(std::vector<uint64_t> limits) : limits_(std::move(limits)), used_(limits_.size()) {}

  // `session` is any name that its owner gives it. False: the place has no such room, or there is no such
  // place.
  bool take(uint64_t session, uint32_t place, uint64_t bytes);
  // At most what the session has there.
  void give(uint64_t session, uint32_t place, uint64_t bytes);
  // Its process is gone, and with it all that it had.
  void forget(uint64_t session);
  // What one session has there is another's, but at most what it has.
  void hand(uint64_t from, uint64_t to, uint32_t place, uint64_t bytes);
  // The session takes here what it has in `other`. False: a place has no such room, and nothing was taken.
  bool takeAs(const MemoryAccount& other, uint64_t session);
  uint64_t freeBytes(uint32_t place) const;
  // What the session has there, or, without one, all together.
  uint64_t used(uint64_t session, uint32_t place) const;
  uint64_t used(uint32_t place) const { return place < used_.size() ? used_[place] : 0; }
  bool empty() const;
  // What all sessions but this one have there.
  uint64_t others(uint64_t session, uint32_t place) const;

 private:
  std::vector<uint64_t> limits_, used_;
  std::map<uint64_t, std::vector<uint64_t>> sessions_;
};

}  // namespace gpupool::server
