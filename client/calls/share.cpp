// Memory and events of other processes (Memory Management, Event Management: cuIpc...). A handle
// names a whole allocation. Who opens it maps the piece of memory in which the allocation lies, at addresses
// of his own.
#include <map>
#include <mutex>

#include "client/calls/physical.h"
#include "client/capture.h"
#include "client/devices.h"
#include "client/entry.h"
#include "client/memory/device.h"
#include "client/memory/shares.h"
#include "client/streams.h"

namespace gpupool::client {
namespace {

using schema::ShareToken;

struct OpenedMemory {
  ShareToken token;
  CUmemoryPool pool = nullptr;  // an imported one
  CUcontext context = nullptr;
  CUdevice device = 0;
  uint64_t mapped = 0;  // the piece
  size_t bytes = 0;
  unsigned references = 1;
};

// One mutex, held while the worker is awaited: calls here are rare, and who opens a handle twice gets one
// mapping.
struct OpenedMemories {
  std::mutex mutex;
  std::map<uint64_t, OpenedMemory> byAddress;
};
OpenedMemories& openedMemories() {
  static auto* all = new OpenedMemories;
  return *all;
}

CUresult allow(CUcontext context, uint64_t mapped, CUdevice device) {
  const unsigned both = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return Session::get().await<"sessionExtentAccess">(context, CUdeviceptr{mapped}, device, unsigned{both});
}

// What cuMemAlloc makes, every device may copy, whichever context is current (driver manual, Unified
// Addressing), and so it may what was opened, if it can reach its device. An imported pool's access is
// cuMemPoolSetAccess's.
void openTo(uint64_t address, const OpenedMemory& opened, CUdevice device) {
  Allocation known;
  int can = 0;
  if (opened.pool != nullptr || !allocations().find(address, known) || ((known.readers >> device) & 1) != 0)
    return;
  if (custom::cuDeviceCanAccessPeer(&can, device, opened.device) != CUDA_SUCCESS || can == 0) return;
  if (allow(opened.context, opened.mapped, device) == CUDA_SUCCESS)
    allocations().setAccess(address, device, true, true);
}

CUresult map(const Context& context, const OpenedPhysical& opened, uint64_t& mapped) {
  mapped = deviceMemory(opened.device).reserveAddresses(opened.bytes, 0);
  if (mapped == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult status =
      Session::get().await<"sessionPhysicalMap">(context.handle, opened.name, CUdeviceptr{mapped});
  if (status == CUDA_SUCCESS) {
    // For its own device and the one that opens it: the same where its own is not seen.
    status = allow(context.handle, mapped, opened.device);
    if (status == CUDA_SUCCESS && context.device != opened.device)
      status = allow(context.handle, mapped, context.device);
    if (status != CUDA_SUCCESS)
      Session::get().post<"sessionExtentUnmap">(context.handle, CUdeviceptr{mapped});
  }
  if (status != CUDA_SUCCESS) deviceMemory(opened.device).releaseAddresses(mapped, opened.bytes);
  return status;
}

// Nothing uses it any more. Under the mutex.
CUresult unmap(OpenedMemories& all, std::map<uint64_t, OpenedMemory>::iterator opened) {
  const OpenedMemory closed = opened->second;
  allocations().remove(opened->first);
  all.byAddress.erase(opened);
  const CUresult status =
      Session::get().post<"sessionExtentUnmap">(closed.context, CUdeviceptr{closed.mapped});
  deviceMemory(closed.device).releaseAddresses(closed.mapped, closed.bytes);
  return status;
}

CUresult openMemory(CUdeviceptr* out, const CUipcMemHandle& handle, unsigned flags) {
  Share share;
  if (out == nullptr || (flags & ~unsigned{CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS}) != 0 ||
      !readHandle(ShareKind::memory, handle.reserved, share))
    return CUDA_ERROR_INVALID_VALUE;
  return openShared(share.token, nullptr, out);
}

}  // namespace

CUresult offerAllocation(const Allocation& allocation, ShareToken& token) {
  return offeredAllocations().offered(allocation, token, [&](ShareToken& asked) {
    landBeforeReturning();
    return Session::get().await<"sessionMemoryOffer">(
        allocation.context, uint64_t{0}, CUdeviceptr{allocation.address}, allocation.bytes, &asked);
  });
}

CUresult openShared(const ShareToken& token, CUmemoryPool pool, CUdeviceptr* out) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status == CUDA_SUCCESS) status = captureForbids();
  if (status != CUDA_SUCCESS) return status;
  OpenedMemories& all = openedMemories();
  std::lock_guard lock(all.mutex);
  for (auto& [address, known] : all.byAddress) {
    if (known.token != token || known.context != context->handle) continue;
    ++known.references;
    *out = address;
    return CUDA_SUCCESS;
  }
  OpenedPhysical opened;
  if (status = openPhysical(context->handle, token, opened); status != CUDA_SUCCESS) return status;
  if (opened.device == CU_DEVICE_INVALID) opened.device = context->device;
  uint64_t mapped = 0;
  status = map(*context, opened, mapped);
  releasePhysicalName(context->handle, opened.name);
  if (status != CUDA_SUCCESS) return status;
  const uint64_t address = mapped + opened.offset;
  Allocation entry{
      address, opened.length, Allocation::Kind::mapped, opened.device, context->handle, 0, address, 0, pool};
  entry.readers = entry.writers = 1u << opened.device | 1u << context->device;
  if (pool == nullptr) entry.openedOn = context->device;
  allocations().add(entry);
  const OpenedMemory& known =
      all.byAddress[address] = {token, pool, context->handle, opened.device, mapped, opened.bytes};
  contexts().forEachAlive([&](const Context& other) { openTo(address, known, other.device); });
  *out = address;
  return CUDA_SUCCESS;
}

CUresult closeShared(CUdeviceptr address, const StreamRef* stream) {
  OpenedMemories& all = openedMemories();
  OpenedMemory closed;
  {
    std::lock_guard lock(all.mutex);
    const auto found = all.byAddress.find(address);
    if (found == all.byAddress.end()) return CUDA_ERROR_INVALID_VALUE;
    if (found->second.references > 1) {
      --found->second.references;
      return CUDA_SUCCESS;
    }
    closed = found->second;
  }
  CUresult status = captureForbids();
  if (status == CUDA_SUCCESS)
    status = stream == nullptr ? synchronizeContext(closed.context)
                               : waitFor(*stream, stream->stream->posted.load(std::memory_order_acquire));
  if (status != CUDA_SUCCESS) return status;
  std::lock_guard lock(all.mutex);
  const auto found = all.byAddress.find(address);
  if (found == all.byAddress.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.references != 0) return CUDA_SUCCESS;  // opened again meanwhile
  return unmap(all, found);
}

void openSharedTo(CUdevice device) {
  OpenedMemories& all = openedMemories();
  std::lock_guard lock(all.mutex);
  for (const auto& [address, opened] : all.byAddress) openTo(address, opened, device);
}

void endShared(CUcontext context) {
  OpenedMemories& all = openedMemories();
  std::lock_guard lock(all.mutex);
  for (auto at = all.byAddress.begin(); at != all.byAddress.end();) {
    const auto opened = at++;
    if (opened->second.context == context) unmap(all, opened);
  }
}

bool isOfImportedPool(const Allocation& allocation) {
  return allocation.kind == Allocation::Kind::mapped && allocation.pool != nullptr;
}

namespace custom {

CUresult cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr pointer) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  Allocation found;
  // Of no other kind of memory, as the driver.
  if (out == nullptr || !allocations().find(pointer, found) || found.kind != Allocation::Kind::device ||
      found.pool != nullptr || found.ofGraph)
    return CUDA_ERROR_INVALID_VALUE;
  if (status = captureForbids(); status != CUDA_SUCCESS) return status;
  ShareToken token;
  status = offerAllocation(found, token);
  if (status != CUDA_SUCCESS) return status;
  writeHandle(ShareKind::memory, {token, {}}, out->reserved);
  return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* out, CUipcMemHandle handle, unsigned flags) {
  return openMemory(out, handle, flags);
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* out, CUipcMemHandle handle, unsigned flags) {
  return openMemory(out, handle, flags);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  Allocation found;
  const bool ofPool = allocations().find(pointer, found) && isOfImportedPool(found);
  return ofPool ? CUDA_ERROR_INVALID_VALUE : closeShared(pointer, nullptr);
}

CUresult cuIpcGetEventHandle(CUipcEventHandle* out, CUevent handle) {
  Event* event = nullptr;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUresult status = findEvent(handle, event);
  if (status != CUDA_SUCCESS) return status;
  if ((event->flags & CU_EVENT_INTERPROCESS) == 0) return CUDA_ERROR_INVALID_HANDLE;
  ShareToken token;
  status = Session::get().await<"sessionEventOffer">(event->context, handle, &token);
  if (status != CUDA_SUCCESS) return status;
  eventShared(*event);
  writeHandle(ShareKind::event, {token, {}}, out->reserved);
  return CUDA_SUCCESS;
}

CUresult cuIpcOpenEventHandle(CUevent* out, CUipcEventHandle handle) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  Share share;
  if (out == nullptr || !readHandle(ShareKind::event, handle.reserved, share))
    return CUDA_ERROR_INVALID_VALUE;
  auto made = makeEvent(*context, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
  if (made == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  status = openingResult(Session::get().await<"sessionEventOpen">(context->handle, &made, share.token));
  if (status != CUDA_SUCCESS) {
    events.destroy(toId(made));
    return status;
  }
  eventShared(*events.find(toId(made)));
  *out = made;
  return CUDA_SUCCESS;
}

}  // namespace custom
}  // namespace gpupool::client
