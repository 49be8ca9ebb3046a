#pragma once
// One batch of pieces on its way between devices and the store, or between devices: imported, mapped, copied
// by streams of its own, and given up again. Reused for a connection's later batches. One thread.

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "server/copier/devices.h"
#include "server/copier/store.h"
#include "server/images/image_cache.h"

namespace gpupool::server {

class CopierBatch {
 public:
  enum class Direction { out, in, across };
  struct Piece {
    uint32_t index = 0;  // of the connection's plan
    uint32_t ordinal = 0;
    uint64_t bytes = 0;
    std::span<const CopierStore::Range> kept;  // empty: goes across
    Descriptor descriptor;                     // from the worker, so it may be anything
  };

  // verify: what was brought in is read back and compared.
  CopierBatch(CopierDevices& devices, bool verify) : devices_(devices), verify_(verify) {}
  // After finish.
  ~CopierBatch();
  CopierBatch(const CopierBatch&) = delete;
  CopierBatch& operator=(const CopierBatch&) = delete;

  // Of devices in use. across: first the pieces that are read, then those that are written. Starts the copies
  // and closes the descriptors; done() and finish() must follow.
  void start(Direction direction, std::vector<Piece> pieces);
  bool running() const { return running_; }
  // True: finish does not wait any more. Looks, and returns.
  bool done();
  // Waits for done(), gives every piece up, and says "" or what went wrong, for people.
  std::string finish();
  const std::vector<Piece>& pieces() const { return pieces_; }
  // The device did not come back in time, and may still read and write the memory of what was last finished.
  bool stuck() const { return stuck_; }

 private:
  CUresult import(const Piece& piece, CUmemGenericAllocationHandle& handle);
  std::string reserveWindow(uint64_t bytes);
  std::string map();
  std::string allow(uint64_t begin, uint64_t end, uint32_t ordinal);
  std::string copy();
  std::string copyAcross();
  std::string compare(const Piece& piece, CUdeviceptr address);
  std::string streamOf(uint32_t ordinal, CUstream& stream);
  std::string failed(const char* call, CUresult result) const;
  void giveUp();

  CopierDevices& devices_;
  const bool verify_;
  bool running_ = false, stuck_ = false;
  Direction direction_ = Direction::out;
  std::vector<Piece> pieces_;  // by device
  std::string error_;
  CUdeviceptr window_ = 0;  // addresses, kept for the next batch
  uint64_t windowBytes_ = 0;
  uint64_t mapped_ = 0;                   // bytes from the window's begin
  std::map<uint32_t, CUstream> streams_;  // by ordinal
  std::chrono::steady_clock::time_point deadline_;
  std::vector<std::byte> scratch_;
};

}  // namespace gpupool::server
