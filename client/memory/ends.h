#pragma once
// What an address is, as one end of a copy. Threads: any.

#include <cstddef>
#include <cstdint>

#include "schema/cuda.h"

namespace gpupool::client {

// registered: memory of the application's own whose copies are asynchronous (client/memory/registered.h).
// What copies begins with useShared: behind it, it is registered memory that the worker has not mapped.
enum class End : uint8_t { host, registered, arena, device, unknown };
// What [address, + bytes) is. unknown: nothing of ours, but no host memory either is claimed: a device
// address that is none.
End endOf(uint64_t address, size_t bytes);

// Registered memory whose pages the worker has mapped becomes arena memory, at the address of both sides.
void useShared(uint64_t& address, End& end, size_t bytes);

// False: [address, + bytes) is memory that the application mapped without access for the context's device;
// the driver refuses to copy from it, or to it.
bool mayAccess(CUcontext context, uint64_t address, size_t bytes, bool write);

}  // namespace gpupool::client
