// Contexts: kept in client/contexts.cpp; here are the names, and what the worker must hear of them.
#include "client/calls/green.h"
#include "client/calls/physical.h"
#include "client/capture.h"
#include "client/code.h"
#include "client/entry.h"
#include "client/memory/allocations.h"
#include "client/memory/device.h"
#include "client/memory/host.h"
#include "client/memory/pools.h"
#include "client/memory/registered.h"
#include "client/memory/shares.h"
#include "client/streams.h"

namespace gpupool::client {
namespace {

// After a device fault a process gets no context any more: its device is "unavailable" until it ends (H200,
// driver 580), whatever was reset or destroyed.
CUresult mayHaveContext() {
  CUresult sticky = Session::get().sticky();
  return sticky == CUDA_SUCCESS || sticky == CUDA_ERROR_DEINITIALIZED ? sticky
                                                                      : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

CUresult activatePrimary(CUdevice device, unsigned flags, CUcontext context) {
  Session& session = Session::get();
  if (CUresult status = mayHaveContext(); status != CUDA_SUCCESS) return status;
  if (flags != 0) session.await<"cuDevicePrimaryCtxSetFlags_v2">(CUcontext{nullptr}, device, flags);
  return session.await<"cuDevicePrimaryCtxRetain">(CUcontext{nullptr}, &context, device);
}

CUresult createRemote(CUdevice device, unsigned flags, CUcontext context) {
  if (CUresult status = mayHaveContext(); status != CUDA_SUCCESS) return status;
  return Session::get().await<"cuCtxCreate_v2">(CUcontext{nullptr}, &context, flags, device);
}

CUresult setRemoteFlags(CUcontext context, unsigned flags) {
  Context* object = contexts().find(context);
  return Session::get().await<"cuDevicePrimaryCtxSetFlags_v2">(CUcontext{nullptr}, object->device, flags);
}

// Everything of the context dies with it: memory first, while the worker can still unmap in it.
CUresult destroyRemote(CUcontext context) {
  Session& session = Session::get();
  Context* object = contexts().find(context);
  if (object->primary) endGreenContexts(object->device);
  if (session.sticky() == CUDA_SUCCESS) synchronizeContext(context);
  endShared(context);
  std::vector<Allocation> mine;
  allocations().forEach([&](const Allocation& a) {
    if (a.context == context) mine.push_back(a);
  });
  for (const Allocation& a : mine) {
    if (a.kind == Allocation::Kind::registered) {
      registeredMemory().remove(a.address);
      continue;
    }
    allocations().remove(a.address);
    offeredAllocations().freed(a);
    if (a.pool != nullptr)
      releaseToPool(a.pool, a.address, nullptr);
    else if (a.kind == Allocation::Kind::device)
      deviceMemory(a.device).release(context, a.address);
    else if (a.kind == Allocation::Kind::pinned || a.kind == Allocation::Kind::managed)
      hostMemory().release(context, a.address);
    else
      hostMemory().removeMirror(a.address);
  }
  hostMemory().contextEnds(context);
  poolsForgetContext(context, object->device);
  deviceMemory(object->device).trim(context, 0);
  forgetStreams(*object);
  forgetCode(context);
  return object->primary ? session.await<"cuDevicePrimaryCtxReset_v2">(CUcontext{nullptr}, object->device)
                         : session.await<"cuCtxDestroy_v2">(CUcontext{nullptr}, context);
}

constexpr RemoteContexts remote{&activatePrimary, &createRemote, &setRemoteFlags, &destroyRemote};

CUresult current(CUcontext& context) {
  Context* object = nullptr;
  CUresult status = contexts().resolve(nullptr, &object);
  if (status == CUDA_SUCCESS) context = object->handle;
  return status;
}

// `status` is that of making or retaining a context of the device. Called when the context is alive: memory
// that another thread opens meanwhile is then opened to it by that thread.
CUresult withShared(CUresult status, CUdevice device) {
  if (status == CUDA_SUCCESS) openSharedTo(device);
  return status;
}

}  // namespace

CUresult startContexts(int deviceCount) {
  contexts().start(deviceCount, remote);
  return CUDA_SUCCESS;
}

namespace custom {

CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  return withShared(contexts().primaryRetain(out, device), device);
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return contexts().primaryRelease(device); }
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return contexts().primaryRelease(device); }
CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) { return contexts().primaryReset(device); }
CUresult cuDevicePrimaryCtxReset(CUdevice device) { return contexts().primaryReset(device); }
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  return contexts().primarySetFlags(device, flags);
}
CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
  return contexts().primarySetFlags(device, flags);
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return contexts().primaryGetState(device, flags, active);
}

CUresult cuCtxCreate(CUcontext* out, unsigned flags, CUdevice device) {
  return withShared(contexts().create(out, flags, device, kApiVersionOld), device);
}
CUresult cuCtxCreate_v2(CUcontext* out, unsigned flags, CUdevice device) {
  return withShared(contexts().create(out, flags, device), device);
}
CUresult cuCtxCreate_v3(CUcontext* out, CUexecAffinityParam*, int count, unsigned flags, CUdevice device) {
  return count != 0 ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY : custom::cuCtxCreate_v2(out, flags, device);
}
CUresult cuCtxCreate_v4(CUcontext* out, CUctxCreateParams* parameters, unsigned flags, CUdevice device) {
  if (parameters != nullptr && parameters->numExecAffinityParams != 0)
    return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  if (parameters != nullptr && parameters->cigParams != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  return custom::cuCtxCreate_v2(out, flags, device);
}
CUresult cuCtxDestroy(CUcontext context) { return contexts().destroy(context); }
CUresult cuCtxDestroy_v2(CUcontext context) { return contexts().destroy(context); }
CUresult cuCtxAttach(CUcontext* out, unsigned flags) { return contexts().attach(out, flags); }
CUresult cuCtxDetach(CUcontext context) { return contexts().detach(context); }
CUresult cuCtxPushCurrent(CUcontext context) { return contexts().push(context); }
CUresult cuCtxPushCurrent_v2(CUcontext context) { return contexts().push(context); }
CUresult cuCtxPopCurrent(CUcontext* out) { return contexts().pop(out); }
CUresult cuCtxPopCurrent_v2(CUcontext* out) { return contexts().pop(out); }
CUresult cuCtxSetCurrent(CUcontext context) { return contexts().setCurrent(context); }
CUresult cuCtxGetCurrent(CUcontext* out) { return contexts().getCurrent(out); }
CUresult cuCtxGetDevice(CUdevice* out) { return contexts().getDevice(out, nullptr); }
CUresult cuCtxGetDevice_v2(CUdevice* out, CUcontext context) { return contexts().getDevice(out, context); }
CUresult cuCtxGetFlags(unsigned* out) { return contexts().getFlags(out); }
CUresult cuCtxSetFlags(unsigned flags) { return contexts().setFlags(flags); }
CUresult cuCtxGetApiVersion(CUcontext context, unsigned* out) {
  return contexts().getApiVersion(context, out);
}
CUresult cuCtxGetId(CUcontext context, unsigned long long* out) {
  uint64_t id = 0;
  CUresult status = out == nullptr ? CUDA_ERROR_INVALID_VALUE : contexts().getId(context, &id);
  if (status == CUDA_SUCCESS) *out = id;
  return status;
}

CUresult cuCtxSynchronize() {
  CUcontext context = nullptr;
  CUresult status = current(context);
  if (status == CUDA_SUCCESS) status = captureConflict(context);
  if (status == CUDA_SUCCESS) status = captureForbids();
  return status == CUDA_SUCCESS ? synchronizeContext(context, contexts().greenOf(threadState().current))
                                : status;
}
CUresult cuCtxSynchronize_v2(CUcontext handle) {
  Context* object = nullptr;
  CUresult status = contexts().resolve(handle, &object);
  if (status == CUDA_SUCCESS) status = captureConflict(object->handle);
  if (status == CUDA_SUCCESS) status = captureForbids();
  if (handle == nullptr) handle = threadState().current;
  return status == CUDA_SUCCESS ? synchronizeContext(object->handle, contexts().greenOf(handle)) : status;
}

CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  Context* object = nullptr;
  CUresult status = contexts().resolve(nullptr, &object);
  if (status != CUDA_SUCCESS) return status;
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (object->cachedLimit(limit, value)) return CUDA_SUCCESS;
  status = Session::get().await<"cuCtxGetLimit">(object->handle, value, limit);
  if (status == CUDA_SUCCESS) object->storeLimit(limit, *value);
  return status;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  Context* object = nullptr;
  CUresult status = contexts().resolve(nullptr, &object);
  if (status != CUDA_SUCCESS) return status;
  status = Session::get().await<"cuCtxSetLimit">(object->handle, limit, value);
  object->forgetLimits();  // the driver rounds, and one limit may move another
  object->newVersion();
  return status;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  Context* object = nullptr;
  CUresult status = contexts().resolve(nullptr, &object);
  int lowest = 0, highest = 0;
  if (status == CUDA_SUCCESS) status = priorityRange(*object, lowest, highest);
  if (status != CUDA_SUCCESS) return status;
  if (least != nullptr) *least = lowest;
  if (greatest != nullptr) *greatest = highest;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetSharedMemConfig(CUsharedconfig* config) {
  Context* object = nullptr;
  CUresult status = contexts().resolve(nullptr, &object);
  if (status == CUDA_SUCCESS && config != nullptr) *config = CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE;
  return status == CUDA_SUCCESS && config == nullptr ? CUDA_ERROR_INVALID_VALUE : status;
}
CUresult cuCtxSetSharedMemConfig(CUsharedconfig) {
  Context* object = nullptr;
  return contexts().resolve(nullptr, &object);  // without effect since compute capability 5
}
CUresult cuCtxGetExecAffinity(CUexecAffinityParam*, CUexecAffinityType) {
  return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  CUcontext context = nullptr;
  CUresult status = current(context);
  return status == CUDA_SUCCESS ? Session::get().await<"cuCtxEnablePeerAccess">(context, peer, flags)
                                : status;
}
CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  CUcontext context = nullptr;
  CUresult status = current(context);
  return status == CUDA_SUCCESS ? Session::get().await<"cuCtxDisablePeerAccess">(context, peer) : status;
}

}  // namespace custom
}  // namespace gpupool::client
