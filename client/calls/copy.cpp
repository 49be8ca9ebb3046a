// Copies and memsets by name; client/copies.h does the work.
#include <algorithm>

#include "client/copies.h"
#include "client/entry.h"
#include "client/memory/allocations.h"
#include "client/memory/host.h"
#include "client/memory/registered.h"

namespace gpupool::client {
namespace {

uint64_t at(const void* p) { return reinterpret_cast<uint64_t>(p); }

// A host pointer as a call declares it: arena memory stays what it is, anything else is ordinary memory.
End hostEnd(const void* p, size_t bytes) {
  End end = endOf(at(p), bytes);
  return end == End::arena || end == End::device || end == End::registered ? end : End::host;
}
// A device pointer as a call declares it: arena memory is addressable too, ordinary memory is not.
End deviceEnd(CUdeviceptr p, size_t bytes) {
  End end = endOf(p, bytes);
  Allocation found;
  if (end != End::host) return end;
  // Managed symbols and registered memory are addressed by the device too; what counts is the application's
  // copy.
  return allocations().find(p, found) ? End::host : End::unknown;
}

// A copy that waits brings what kernels printed before it, like a synchronisation.
CUresult ended(const StreamRef& ref, Timing timing, CUresult status) {
  Session& session = Session::get();
  const bool brings = timing == Timing::sync && session.printing() && !session.capturing();
  return status == CUDA_SUCCESS && brings ? synchronizeStream(ref) : status;
}

CUresult upload(CUdeviceptr to, const void* from, size_t bytes, CUstream stream, Timing timing) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status != CUDA_SUCCESS) return status;
  return ended(ref, timing,
               copyLinear(ref, to, deviceEnd(to, bytes), at(from), hostEnd(from, bytes), bytes, timing));
}
CUresult download(void* to, CUdeviceptr from, size_t bytes, CUstream stream, Timing timing) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status != CUDA_SUCCESS) return status;
  return ended(ref, timing,
               copyLinear(ref, at(to), hostEnd(to, bytes), from, deviceEnd(from, bytes), bytes, timing));
}
CUresult within(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, Timing timing) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status != CUDA_SUCCESS) return status;
  return ended(ref, timing,
               copyLinear(ref, to, deviceEnd(to, bytes), from, deviceEnd(from, bytes), bytes, timing));
}
CUresult unified(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, Timing timing) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status != CUDA_SUCCESS) return status;
  return ended(ref, timing, copyLinear(ref, to, endOf(to, bytes), from, endOf(from, bytes), bytes, timing));
}
CUresult volume(const CUDA_MEMCPY3D_v2& copy, CUstream stream, Timing timing) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  return status == CUDA_SUCCESS ? ended(ref, timing, copyVolume(ref, copy, timing)) : status;
}
CUresult plane(const CUDA_MEMCPY2D_v2* p, CUstream stream, Timing timing) {
  if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_MEMCPY3D_v2 c{};
  c.srcXInBytes = p->srcXInBytes;
  c.srcY = p->srcY;
  c.srcMemoryType = p->srcMemoryType;
  c.srcHost = p->srcHost;
  c.srcDevice = p->srcDevice;
  c.srcArray = p->srcArray;
  c.srcPitch = p->srcPitch;
  c.dstXInBytes = p->dstXInBytes;
  c.dstY = p->dstY;
  c.dstMemoryType = p->dstMemoryType;
  c.dstHost = p->dstHost;
  c.dstDevice = p->dstDevice;
  c.dstArray = p->dstArray;
  c.dstPitch = p->dstPitch;
  c.WidthInBytes = p->WidthInBytes;
  c.Height = p->Height;
  c.Depth = 1;
  bool pitchTooSmall =
      (c.srcMemoryType != CU_MEMORYTYPE_ARRAY && c.srcPitch != 0 && c.srcPitch < c.WidthInBytes) ||
      (c.dstMemoryType != CU_MEMORYTYPE_ARRAY && c.dstPitch != 0 && c.dstPitch < c.WidthInBytes);
  return pitchTooSmall ? CUDA_ERROR_INVALID_VALUE : volume(c, stream, timing);
}
CUresult peerVolume(const CUDA_MEMCPY3D_PEER* p, CUstream stream, Timing timing) {
  if (p == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_MEMCPY3D_v2 c{};
  c.srcXInBytes = p->srcXInBytes;
  c.srcY = p->srcY;
  c.srcZ = p->srcZ;
  c.srcMemoryType = p->srcMemoryType;
  c.srcHost = p->srcHost;
  c.srcDevice = p->srcDevice;
  c.srcArray = p->srcArray;
  c.srcPitch = p->srcPitch;
  c.srcHeight = p->srcHeight;
  c.dstXInBytes = p->dstXInBytes;
  c.dstY = p->dstY;
  c.dstZ = p->dstZ;
  c.dstMemoryType = p->dstMemoryType;
  c.dstHost = p->dstHost;
  c.dstDevice = p->dstDevice;
  c.dstArray = p->dstArray;
  c.dstPitch = p->dstPitch;
  c.dstHeight = p->dstHeight;
  c.WidthInBytes = p->WidthInBytes;
  c.Height = p->Height;
  c.Depth = p->Depth;
  return volume(c, stream, timing);
}
CUresult arrayRow(CUarray toArray, uint64_t to, CUarray fromArray, uint64_t from, size_t toOffset,
                  size_t fromOffset, size_t bytes, bool hostTo, bool hostFrom, CUstream stream,
                  Timing timing) {
  CUDA_MEMCPY3D_v2 c{};
  c.srcMemoryType = fromArray != nullptr ? CU_MEMORYTYPE_ARRAY
                    : hostFrom           ? CU_MEMORYTYPE_HOST
                                         : CU_MEMORYTYPE_DEVICE;
  c.dstMemoryType = toArray != nullptr ? CU_MEMORYTYPE_ARRAY
                    : hostTo           ? CU_MEMORYTYPE_HOST
                                       : CU_MEMORYTYPE_DEVICE;
  c.srcArray = fromArray;
  c.srcHost = reinterpret_cast<const void*>(from);
  c.srcDevice = from;
  c.srcXInBytes = fromOffset;
  c.dstArray = toArray;
  c.dstHost = reinterpret_cast<void*>(to);
  c.dstDevice = to;
  c.dstXInBytes = toOffset;
  c.WidthInBytes = bytes;
  c.Height = c.Depth = 1;
  return volume(c, stream, timing);
}

// Host memory is used at the address at which kernels use it, and is alike on both sides first.
CUresult asKernelsUse(CUdeviceptr address) {
  mirrorArena(address);
  return hostMemory().publish();
}

// Memory a memset may reach.
CUresult mayFill(CUcontext context, CUdeviceptr to, size_t bytes) {
  End end = endOf(to, bytes);
  uint64_t symbol = 0;
  if (end == End::device)
    return mayAccess(context, to, bytes, true) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  const bool managedSymbol = end == End::host && hostMemory().mirrored(to, bytes, symbol) && symbol == to;
  return end == End::arena || managedSymbol ? asKernelsUse(to) : CUDA_ERROR_INVALID_VALUE;
}
size_t span(size_t pitch, size_t width, size_t height) {
  return height == 0 ? 0 : pitch * (height - 1) + width;
}

template <schema::Name N, class T>
CUresult fill(CUdeviceptr to, T value, size_t count, CUstream stream) {
  if (count == 0) return CUDA_SUCCESS;
  if (to % sizeof(T) != 0) return CUDA_ERROR_INVALID_VALUE;
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS) status = mayFill(ref.context, to, count * sizeof(T));
  return status == CUDA_SUCCESS ? postTo<N>(ref, to, value, count, ref.wire) : status;
}
template <schema::Name N, class T>
CUresult fill2D(CUdeviceptr to, size_t pitch, T value, size_t width, size_t height, CUstream stream) {
  if (width == 0 || height == 0) return CUDA_SUCCESS;
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS) status = mayFill(ref.context, to, span(pitch, width * sizeof(T), height));
  return status == CUDA_SUCCESS ? postTo<N>(ref, to, pitch, value, width, height, ref.wire) : status;
}

}  // namespace

namespace custom {

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) {
  return unified(to, from, n, nullptr, Timing::sync);
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) {
  return unified(to, from, n, s, Timing::async);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t n) {
  return upload(to, from, n, nullptr, Timing::sync);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t n, CUstream s) {
  return upload(to, from, n, s, Timing::async);
}
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t n) {
  return download(to, from, n, nullptr, Timing::sync);
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t n, CUstream s) {
  return download(to, from, n, s, Timing::async);
}
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t n) {
  return within(to, from, n, nullptr, Timing::sync);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s) {
  return within(to, from, n, s, Timing::async);
}
CUresult cuMemcpyHtoD(CUdeviceptr_v1 to, const void* from, unsigned n) {
  return upload(to, from, n, nullptr, Timing::sync);
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr_v1 to, const void* from, unsigned n, CUstream s) {
  return upload(to, from, n, s, Timing::async);
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr_v1 from, unsigned n) {
  return download(to, from, n, nullptr, Timing::sync);
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr_v1 from, unsigned n, CUstream s) {
  return download(to, from, n, s, Timing::async);
}
CUresult cuMemcpyDtoD(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned n) {
  return within(to, from, n, nullptr, Timing::sync);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned n, CUstream s) {
  return within(to, from, n, s, Timing::async);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext toContext, CUdeviceptr from, CUcontext fromContext,
                           size_t n, CUstream s) {
  Context *a = nullptr, *b = nullptr;
  CUresult status = contexts().resolve(toContext, &a);
  if (status == CUDA_SUCCESS) status = contexts().resolve(fromContext, &b);
  StreamRef ref;
  if (status == CUDA_SUCCESS) status = resolveStream(s, ref);
  if (status != CUDA_SUCCESS || n == 0) return status;
  for (CUdeviceptr end : {to, from}) {
    const End kind = deviceEnd(end, n);
    if (kind == End::unknown) return CUDA_ERROR_INVALID_VALUE;
    if (kind != End::device) status = asKernelsUse(end);
    if (status != CUDA_SUCCESS) return status;
  }
  const auto bothMay = [&](CUdeviceptr end, bool write) {
    return mayAccess(a->handle, end, n, write) && mayAccess(b->handle, end, n, write);
  };
  if (bothMay(to, true) && bothMay(from, false))
    return postTo<"cuMemcpyPeerAsync">(ref, to, a->handle, from, b->handle, n, ref.wire);
  // Whether memory that one of them may not access can be copied all the same is the driver's to say.
  return countIn(ref, Session::get().await<"cuMemcpyPeerAsync">(ref.context, to, a->handle, from, b->handle,
                                                                n, ref.wire));
}
CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext toContext, CUdeviceptr from, CUcontext fromContext,
                      size_t n) {
  return custom::cuMemcpyPeerAsync(to, toContext, from, fromContext, n, nullptr);
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D_v2* p) { return plane(p, nullptr, Timing::sync); }
CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D_v2* p) { return plane(p, nullptr, Timing::sync); }
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D_v2* p, CUstream s) { return plane(p, s, Timing::async); }
CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D_v2* p) {
  return p == nullptr ? CUDA_ERROR_INVALID_VALUE : volume(*p, nullptr, Timing::sync);
}
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D_v2* p, CUstream s) {
  return p == nullptr ? CUDA_ERROR_INVALID_VALUE : volume(*p, s, Timing::async);
}
CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* p) { return peerVolume(p, nullptr, Timing::sync); }
CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* p, CUstream s) {
  return peerVolume(p, s, Timing::async);
}

CUresult cuMemcpyDtoA_v2(CUarray to, size_t offset, CUdeviceptr from, size_t n) {
  return arrayRow(to, 0, nullptr, from, offset, 0, n, false, false, nullptr, Timing::sync);
}
CUresult cuMemcpyAtoD_v2(CUdeviceptr to, CUarray from, size_t offset, size_t n) {
  return arrayRow(nullptr, to, from, 0, 0, offset, n, false, false, nullptr, Timing::sync);
}
CUresult cuMemcpyHtoA_v2(CUarray to, size_t offset, const void* from, size_t n) {
  return arrayRow(to, 0, nullptr, at(from), offset, 0, n, false, true, nullptr, Timing::sync);
}
CUresult cuMemcpyAtoH_v2(void* to, CUarray from, size_t offset, size_t n) {
  return arrayRow(nullptr, at(to), from, 0, 0, offset, n, true, false, nullptr, Timing::sync);
}
CUresult cuMemcpyAtoA_v2(CUarray to, size_t toOffset, CUarray from, size_t fromOffset, size_t n) {
  return arrayRow(to, 0, from, 0, toOffset, fromOffset, n, false, false, nullptr, Timing::sync);
}
CUresult cuMemcpyHtoAAsync_v2(CUarray to, size_t offset, const void* from, size_t n, CUstream s) {
  return arrayRow(to, 0, nullptr, at(from), offset, 0, n, false, true, s, Timing::async);
}
CUresult cuMemcpyAtoHAsync_v2(void* to, CUarray from, size_t offset, size_t n, CUstream s) {
  return arrayRow(nullptr, at(to), from, 0, 0, offset, n, true, false, s, Timing::async);
}

#define FILL(width, type, wire)                                                   \
  CUresult cuMemset##width##_v2(CUdeviceptr to, type v, size_t n) {               \
    return fill<wire, type>(to, v, n, nullptr);                                   \
  }                                                                               \
  CUresult cuMemset##width(CUdeviceptr_v1 to, type v, unsigned n) {               \
    return fill<wire, type>(to, v, n, nullptr);                                   \
  }                                                                               \
  CUresult cuMemset##width##Async(CUdeviceptr to, type v, size_t n, CUstream s) { \
    return fill<wire, type>(to, v, n, s);                                         \
  }
FILL(D8, unsigned char, "cuMemsetD8Async")
FILL(D16, unsigned short, "cuMemsetD16Async")
FILL(D32, unsigned int, "cuMemsetD32Async")
#undef FILL
#define FILL2D(width, type, wire)                                                                         \
  CUresult cuMemset##width##_v2(CUdeviceptr to, size_t pitch, type v, size_t w, size_t h) {               \
    return fill2D<wire, type>(to, pitch, v, w, h, nullptr);                                               \
  }                                                                                                       \
  CUresult cuMemset##width(CUdeviceptr_v1 to, unsigned pitch, type v, unsigned w, unsigned h) {           \
    return fill2D<wire, type>(to, pitch, v, w, h, nullptr);                                               \
  }                                                                                                       \
  CUresult cuMemset##width##Async(CUdeviceptr to, size_t pitch, type v, size_t w, size_t h, CUstream s) { \
    return fill2D<wire, type>(to, pitch, v, w, h, s);                                                     \
  }
FILL2D(D2D8, unsigned char, "cuMemsetD2D8Async")
FILL2D(D2D16, unsigned short, "cuMemsetD2D16Async")
FILL2D(D2D32, unsigned int, "cuMemsetD2D32Async")
#undef FILL2D

}  // namespace custom
}  // namespace gpupool::client
