#pragma once
// What programs pass on of memory and events that they share: the 64 bytes of an IPC handle, or a descriptor.
// Either carries a token (schema::ShareToken), and nothing of the driver's. Threads: any.

#include <cstdint>
#include <map>
#include <mutex>

#include "client/memory/allocations.h"
#include "schema/session_calls.h"

namespace gpupool::client {

enum class ShareKind : uint32_t { memory = 1, event = 2 };
void writeHandle(ShareKind kind, const schema::ShareToken& token, char (&handle)[CU_IPC_HANDLE_SIZE]);
// False: it is no handle of that kind.
bool readHandle(ShareKind kind, const char (&handle)[CU_IPC_HANDLE_SIZE], schema::ShareToken& token);

// A descriptor that carries the token, close-on-exec, the caller's; -1: there is none to be had.
int makeDescriptor(const schema::ShareToken& token);
bool readDescriptor(int descriptor, schema::ShareToken& token);

// The allocations of this process (cuMemAlloc) of which others have a handle.
class OfferedAllocations {
 public:
  bool find(const Allocation& allocation, schema::ShareToken& token) const;
  void add(const Allocation& allocation, const schema::ShareToken& token);
  // It is freed: its handle opens nothing any more.
  void freed(const Allocation& allocation);

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, schema::ShareToken> tokens_;  // by Allocation::bufferId
};
OfferedAllocations& offeredAllocations();

}  // namespace gpupool::client
