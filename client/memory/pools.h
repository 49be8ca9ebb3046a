#pragma once
// Stream-ordered allocation on the client's own device memory (driver manual: Stream Ordered Memory
// Allocator; docs/design.md).
//
// A pool holds chunks of DeviceMemory and cuts blocks from them. A freed block carries a mark, (stream,
// operations sent so far): its own stream takes it again at once, because its work is ordered behind; anybody
// else once the stream's word has reached the mark. Neither allocation nor free sends anything, unless a
// chunk is added or given back.
//
// The release threshold is applied when something looks (attributes, memory info, memory running out), not at
// every synchronisation: what a program can see is the same, and a loop of allocate, use, synchronise, free
// maps nothing.
//
// Threads: any; one mutex per pool, not held while waiting for the device.

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "client/handles.h"
#include "client/streams.h"
#include "schema/cuda.h"

namespace gpupool::client {

// A point of a stream. Valid after the stream is gone: its word keeps its values.
struct StreamMark {
  uint64_t word = 0;
  uint64_t id = 0;  // Stream::id; words are given on to later streams
  uint64_t value = 0;
  CUcontext context = nullptr;
  CUstream wire = nullptr;

  static StreamMark now(const StreamRef& ref);
  bool reached() const;
  // Asks for the word, so that `reached` can become true; does not wait.
  void request() const;
  // Waits. False: it cannot be known, because the stream is being captured or failed.
  bool wait() const;
  std::pair<uint64_t, uint64_t> key() const { return {word, id}; }

 private:
  bool find(StreamRef& ref) const;
};

// imported: another process's, from which nothing is allocated here; its allocations are opened one by one
// (calls/pool_share.cpp). The name is the same in all processes, and opens nothing.
struct PoolSharing {
  enum class Kind : uint8_t { none, exportable, imported };
  Kind kind = Kind::none;
  uint64_t name[2] = {};

  bool exportable() const { return kind == Kind::exportable; }
  bool imported() const { return kind == Kind::imported; }
};

class MemoryPool {
 public:
  static constexpr size_t kChunk = size_t{32} << 20;
  static constexpr size_t kUnit = size_t{2} << 20;

  MemoryPool(CUdevice device, bool standard, uint64_t maximum, const PoolSharing& sharing = {});
  CUdevice device() const { return device_; }
  bool standard() const { return standard_; }
  const PoolSharing& sharing() const { return sharing_; }

  // CUDA_ERROR_OUT_OF_MEMORY: waiting for frees (drain) may help.
  CUresult allocate(const StreamRef& ref, size_t bytes, uint64_t& address);
  // mark null: nothing uses the block any more. False: not a block of this pool.
  bool release(uint64_t address, const StreamMark* mark);
  // Takes back what is done, then gives chunks back above the threshold.
  void settle();
  void trim(CUcontext context, uint64_t keep);
  // Waits for the pending frees; false if there were none. Does nothing during a capture, which waiting would
  // destroy.
  bool drain();
  // The context's streams are done and gone.
  void contextEnded(CUcontext context);
  bool empty();

  CUresult getAttribute(CUmemPool_attribute what, void* value);
  CUresult setAttribute(CUmemPool_attribute what, const void* value);
  // By application device; the owner's is always read and write.
  CUresult setAccess(CUdevice device, CUmemAccess_flags flags);
  CUmemAccess_flags access(CUdevice device);

  std::atomic<bool> destroyed{false};  // to the application; lives on until its last block is free

 private:
  using Key = std::pair<uint64_t, uint64_t>;
  struct Free {
    size_t bytes = 0;
    bool pending = false;
    StreamMark mark;
  };
  struct Chunk {
    size_t bytes = 0;
    size_t used = 0;  // bytes of blocks handed out
  };
  static Key keyOf(const Free& free) { return free.pending ? free.mark.key() : Key{0, 0}; }
  // All with the mutex held.
  void add(uint64_t address, const Free& free);
  void erase(std::map<uint64_t, Free>::iterator at);
  void addClean(uint64_t address, size_t bytes);
  uint64_t take(Key key, size_t bytes);
  uint64_t takeRun(Key key, size_t bytes);
  template <class Over>
  void clean(Over&& over);
  void sweep();
  void trimLocked(CUcontext context, uint64_t keep);
  CUresult grow(CUcontext context, size_t bytes);
  std::map<uint64_t, Chunk>::iterator chunkOf(uint64_t address) {
    return std::prev(chunks_.upper_bound(address));
  }

  const CUdevice device_;
  const bool standard_;
  const uint64_t maximum_;  // 0: the device's
  const PoolSharing sharing_;
  std::mutex mutex_;
  std::map<uint64_t, Chunk> chunks_;
  std::map<uint64_t, size_t> blocks_;
  std::map<uint64_t, Free> free_;  // by address; never spans chunks
  std::map<Key, std::set<std::pair<size_t, uint64_t>>> bySize_;
  uint64_t threshold_ = 0, reserved_ = 0, reservedHigh_ = 0, used_ = 0, usedHigh_ = 0;
  int reuse_[3] = {1, 1, 1};
  uint64_t access_ = 0;  // bit per device
};

// ---- the process's pools ----
CUresult standardPool(CUdevice device, CUmemoryPool* out);
CUresult currentPool(CUdevice device, CUmemoryPool* out);
CUresult setCurrentPool(CUdevice device, CUmemoryPool pool);
CUresult createPool(CUdevice device, uint64_t maximum, const PoolSharing& sharing, CUmemoryPool* out);
CUresult destroyPool(CUmemoryPool pool);
// Pinned while in use. Empty: no such pool, or destroyed and `dead` false.
HandleTable<MemoryPool>::Pin findPool(CUmemoryPool pool, bool dead = false);

// An address of a pool was freed (cuMemFree, cuMemFreeAsync, its context ended).
void releaseToPool(CUmemoryPool pool, uint64_t address, const StreamMark* mark);
// A cuMemAlloc address freed in stream order: given back when the stream got there.
void releaseLater(CUdevice device, uint64_t address, const StreamMark& mark);
// Notes what is done by now and applies the thresholds: before memory is counted.
void settlePools(CUdevice device);
// Memory ran out: waits for pending frees and gives idle chunks back. False: there was nothing to wait for or
// give.
bool reclaimPools(CUcontext context, CUdevice device);
void poolsForgetContext(CUcontext context, CUdevice device);

}  // namespace gpupool::client
