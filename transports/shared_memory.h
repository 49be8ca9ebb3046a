#pragma once
// Memory that can be shared with the peer. Where both are on one host it is a memfd, sealed against resizing,
// or a part of a file of the program's.

#include <cstddef>
#include <cstdint>
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
  // `bytes` of a file in memory (tmpfs: /dev/shm, memfd), from `offset`; whole pages. Takes the descriptor.
  // Of the file, others decide: who shortens it takes its pages away, and a processor that touches them then
  // gets SIGBUS. So a worker leaves such memory to the device, and transfers (put, get) do not reach it.
  // Throws std::runtime_error: it is no such file, too short, or may not be written to.
  static std::shared_ptr<SharedMemory> ofFile(int descriptor, uint64_t offset, size_t bytes,
                                              void* fixedAddress);
  // Memory of the caller's own, which can be shared only where mapsMemory() is false (see Lent).
  static std::shared_ptr<SharedMemory> borrow(void* data, size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }
  bool isOfFile() const { return ofFile_; }
  // Of a file: its pages stay, and connections that share it go on. No other one can share it any more.
  void closeDescriptor();
  // Whoever uses this memory has from here on the pages of `from`, of the same size, at the same addresses;
  // what was there is gone. Both are memfds. Throws std::runtime_error; nothing has changed then.
  void takePages(const SharedMemory& from);
  uint64_t offset() const { return offset_; }  // in the descriptor's file

 private:
  SharedMemory(std::byte* data, size_t size, int descriptor, bool restoreReservation);
  std::byte* data_;
  size_t size_;
  int descriptor_;
  bool ofFile_ = false;
  uint64_t offset_ = 0;
  bool restoreReservation_;  // fixed address: leave PROT_NONE behind instead of a hole
};

}  // namespace gpupool::transport
