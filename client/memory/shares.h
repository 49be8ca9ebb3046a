#pragma once
// What programs pass on of memory and events that they share: the 64 bytes of an IPC handle, or a descriptor.
// Either carries a token (schema::ShareToken), and nothing of the driver's. Threads: any.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include "client/memory/allocations.h"
#include "schema/session_calls.h"

namespace gpupool::client {

// pool: the token's key is the GPU's UUID, and opens nothing; poolMemory: an allocation of such a pool. Both
// name the pool.
enum class ShareKind : uint32_t { memory = 1, event = 2, pool = 3, poolMemory = 4 };
struct Share {
  schema::ShareToken token;
  uint64_t pool[2] = {};  // PoolSharing::name (pools.h); else zeros
};
void writeHandle(ShareKind kind, const Share& share, char (&handle)[CU_IPC_HANDLE_SIZE]);
// False: it is no handle of that kind.
bool readHandle(ShareKind kind, const char (&handle)[CU_IPC_HANDLE_SIZE], Share& share);

// A descriptor that carries the same, close-on-exec, the caller's; -1: there is none to be had.
int makeDescriptor(ShareKind kind, const Share& share);
bool readDescriptor(ShareKind kind, int descriptor, Share& share);

// The allocations of this process (cuMemAlloc, and pools) of which others have a handle.
class OfferedAllocations {
 public:
  // The allocation's token, for which `offer` asks the worker: once, however many threads want it.
  CUresult offered(const Allocation& allocation, schema::ShareToken& token,
                   const std::function<CUresult(schema::ShareToken&)>& offer);
  // False: none has been offered yet, and nothing needs to be told.
  bool any() const { return any_.load(std::memory_order_relaxed); }
  // It is freed: its handle opens nothing any more.
  void freed(const Allocation& allocation);

 private:
  bool find(const Allocation& allocation, schema::ShareToken& token);

  std::mutex offering_;  // held while the worker is awaited; taken before mutex_
  std::mutex mutex_;
  std::map<uint64_t, schema::ShareToken> tokens_;  // by Allocation::bufferId
  std::atomic<bool> any_{false};
};
OfferedAllocations& offeredAllocations();

}  // namespace gpupool::client
