#pragma once
// Physical memory of another process, as the worker names it (virtual_memory.cpp).

#include "client/memory/allocations.h"
#include "client/session.h"
#include "client/streams.h"
#include "schema/session_calls.h"

namespace gpupool::client {

struct OpenedPhysical {
  uint64_t name = 0;
  CUdevice device = 0;            // as the application counts; CU_DEVICE_INVALID: one that it does not see
  size_t bytes = 0;               // of the piece
  size_t offset = 0, length = 0;  // what was offered of it
};

// Of the current context; 0: there is none.
CUdevice currentDevice();

// What the worker says of a token, as the driver says it of a handle; what the driver cannot say is logged.
CUresult openingResult(CUresult status);
// Of memory on a GPU that the lease does not have: says so.
CUresult openingOtherGpu();

// Errors as the driver gives them for a handle that opens nothing. The name is the caller's to release.
CUresult openPhysical(CUcontext context, const schema::ShareToken& token, OpenedPhysical& opened);
// A mapping keeps the memory.
void releasePhysicalName(CUcontext context, uint64_t name);

// The token by which other processes open it; asked for once.
CUresult offerAllocation(const Allocation& allocation, schema::ShareToken& token);
// Maps what the token names, for the current context, and adds it to allocations(); once for each token and
// context, counted. pool: the imported one that it is of, or null.
CUresult openShared(const schema::ShareToken& token, CUmemoryPool pool, CUdeviceptr* out);
// At the last close it is unmapped, after the work of `stream` so far, or of its whole context if that is
// null: the driver's unmapping would fault running kernels.
CUresult closeShared(CUdeviceptr address, const StreamRef* stream);
// Lets the device, which has a context now, copy what was opened before.
void openSharedTo(CUdevice device);
// The context ends, and nothing runs in it: what was opened for it is unmapped, however often it was opened.
void endShared(CUcontext context);
bool isOfImportedPool(const Allocation& allocation);

}  // namespace gpupool::client
