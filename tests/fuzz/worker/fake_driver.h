#pragma once
// A driver without a GPU behind the worker's handlers. It answers every name of the table with success or,
// now and then, an error (by a generator seeded from the input), hands out handles that are no memory, and
// holds the worker to what it promises: whatever address, buffer or string reaches the driver lies in the
// session's own memory, or in the call's own arguments. A promise broken ends the process.

#include <cstdint>
#include <map>
#include <memory>

#include "server/driver.h"

namespace gpupool::fuzz {

// The session's memory, as the driver was told of it, and the generator. One thread at a time.
class DriverState {
 public:
  void reset(uint64_t seed);
  // Now and then an error.
  CUresult chance();
  uint64_t random();
  // Looks like an address of a driver's object; never the same twice.
  uint64_t fresh() { return kHandles + 64 * ++handles_; }

  // Ends the process unless [address, + bytes) is the session's.
  void needDevice(uint64_t address, size_t bytes) const;
  void needHost(uint64_t address, size_t bytes) const;
  void needHandle(uint64_t value) const;
  bool isHost(uint64_t address, size_t bytes) const;
  bool isWord(uint64_t address) const;

  std::map<uint64_t, size_t> windows, host, globals, managed;
  std::map<uint64_t, size_t> own;    // device memory that the worker has for itself
  std::map<uint64_t, size_t> words;  // pages of completion words: for the driver's own writes and waits
  CUcontext current = nullptr;
  unsigned children = 0;  // graphs within graphs, told so far

 private:
  static constexpr uint64_t kHandles = 0x7a00'0000'0000;
  uint64_t seed_ = 1;
  uint64_t handles_ = 0;
};

DriverState& driverState();
const server::Driver& fakeDriver();
// Null: this driver lacks it.
void* functionOf(const char* name);

}  // namespace gpupool::fuzz
