#pragma once
// Memory that can be shared with the peer. Where both are on one host it is a memfd, sealed against resizing.

#include <cstddef>
#include <memory>
#include <stdexcept>

namespace gpupool::transport {

// This machine, or a limit of this process, has no room for shared memory.
struct ShortOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Owns the mapping and the descriptor; unmapped on destruction, so it outlives its use by any device.
class SharedMemory {
 public:
  // Maps `bytes` (rounded up to pages) of zeroed memory, at `fixedAddress` if given (it must be free or
  // reserved by the caller: the mapping replaces it). Throws ShortOfMemory, or another std::runtime_error.
  static std::shared_ptr<SharedMemory> create(size_t bytes, void* fixedAddress = nullptr);
  // The same memory, from a received descriptor; checks size and seals before it maps.
  static std::shared_ptr<SharedMemory> adopt(int descriptor, size_t bytes, void* fixedAddress = nullptr);
  // Memory of the caller's own, which can be shared only where mapsMemory() is false (see Lent).
  static std::shared_ptr<SharedMemory> borrow(void* data, size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }

 private:
  SharedMemory(std::byte* data, size_t size, int descriptor, bool restoreReservation);
  std::byte* data_;
  size_t size_;
  int descriptor_;
  bool restoreReservation_;  // fixed address: leave PROT_NONE behind instead of a hole
};

}  // namespace gpupool::transport
