#pragma once
// Physical memory of another process of the lease, as the worker names it (virtual_memory.cpp).

#include "client/session.h"
#include "schema/session_calls.h"

namespace gpupool::client {

struct OpenedPhysical {
  uint64_t name = 0;
  CUdevice device = 0;            // as the application counts
  size_t bytes = 0;               // of the piece
  size_t offset = 0, length = 0;  // what was offered of it
};

// What the worker says of a token, as the driver says it of a handle; what the driver cannot say is logged.
CUresult openingResult(CUresult status);

// Errors as the driver gives them for a handle that opens nothing. The name is the caller's to release.
CUresult openPhysical(CUcontext context, const schema::ShareToken& token, OpenedPhysical& opened);
// A mapping keeps the memory.
void releasePhysicalName(CUcontext context, uint64_t name);

}  // namespace gpupool::client
