#pragma once
// Memory in which a sender lays out the parts that it sends (state_socket.h), one behind the other and around
// its end: each has its place from `take` on until the receiver has given it back. Parts are sent in the
// order in which their places were taken, and given back in it. Belongs to one thread.

#include <cstddef>
#include <deque>
#include <memory>
#include <span>

#include "transports/shared_memory.h"

namespace gpupool::server {

class PartRoom {
 public:
  explicit PartRoom(std::shared_ptr<transport::SharedMemory> memory) : memory_(std::move(memory)) {}

  // Null: there is no such place until another one is given back; never, if it is more than `bytes()`.
  std::byte* take(size_t bytes);
  // Whether it is the first place that was taken and not sent.
  bool isNext(std::span<const std::byte> part) const;
  void sent() { ++sent_; }
  // False: so many were not sent.
  bool giveBack(uint64_t count);

  size_t bytes() const { return memory_->size(); }
  const std::shared_ptr<transport::SharedMemory>& memory() const { return memory_; }

 private:
  struct Place {
    size_t offset = 0, bytes = 0;
  };
  const std::shared_ptr<transport::SharedMemory> memory_;
  std::deque<Place> taken_;
  size_t sent_ = 0;  // the first ones
};

}  // namespace gpupool::server
