// What the fake driver watches of memory: where it is mapped, copied and set, and what streams write into it.
#include <algorithm>
#include <cstring>

#include "schema/frame.h"
#include "schema/handles.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/worker/fake_functions.h"

namespace gpupool::fuzz {
namespace {

CUresult addressReserve(CUdeviceptr* got, size_t bytes, size_t, CUdeviceptr wanted, unsigned long long) {
  state().windows[wanted] = bytes;
  *got = wanted;
  return CUDA_SUCCESS;
}
CUresult addressFree(CUdeviceptr address, size_t) {
  state().windows.erase(address);
  return CUDA_SUCCESS;
}
CUresult memMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  if (!within(state().windows, address, bytes)) broken("an extent outside the windows", address, bytes);
  return state().chance();
}
CUresult hostRegister(void* data, size_t bytes, unsigned) {
  const auto address = reinterpret_cast<uint64_t>(data);
  // Each context has a view of the words; the client's own memory is never as large (LittleHostMemory).
  (bytes == schema::kWordsBytes ? state().words : state().host)[address] = bytes;
  return CUDA_SUCCESS;
}
CUresult hostUnregister(void* data) {
  state().host.erase(reinterpret_cast<uint64_t>(data));
  state().words.erase(reinterpret_cast<uint64_t>(data));
  return CUDA_SUCCESS;
}
CUresult hostPointer(CUdeviceptr* device, void* data, unsigned) {
  *device = reinterpret_cast<uint64_t>(data);
  return CUDA_SUCCESS;
}

// ---- copies
bool noContext() { return state().current == nullptr; }  // of the thread, or of the stream: there is none

CUresult copyIn(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  state().needDevice(to, bytes);
  state().needHost(reinterpret_cast<uint64_t>(from), bytes);
  touch(from, std::min<size_t>(bytes, 64));
  return state().chance();
}
CUresult copyOut(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  state().needDevice(from, bytes);
  state().needHost(reinterpret_cast<uint64_t>(to), bytes);
  std::memset(to, 0x5a, std::min<size_t>(bytes, 64));
  return state().chance();
}
CUresult copyOn(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  state().needDevice(to, bytes);
  state().needDevice(from, bytes);
  return state().chance();
}
CUresult copyPeer(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream stream) {
  return copyOn(to, from, bytes, stream);
}
template <class Element>
CUresult set(CUdeviceptr to, Element, size_t count, CUstream) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  if (count > SIZE_MAX / sizeof(Element)) broken("a memset that overflows", to, count);
  state().needDevice(to, count * sizeof(Element));
  return state().chance();
}

// Every row of a box that a driver would touch; of many, some. As the driver counts, addresses are 64 bits.
template <class Need>
void eachRow(uint64_t base, size_t pitch, size_t height, size_t x, size_t y, size_t z, size_t width,
             size_t rows, size_t depth, Need need) {
  if (width == 0 || rows == 0 || depth == 0) return;
  const size_t slices[] = {0, 1, depth / 2, depth - 1}, lines[] = {0, 1, rows / 2, rows - 1};
  for (size_t slice : slices)
    for (size_t line : lines)
      if (slice < depth && line < rows) need(base + ((z + slice) * height + y + line) * pitch + x, width);
}
CUresult set2D(CUdeviceptr to, size_t pitch, size_t element, size_t width, size_t height) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  // What the driver itself refuses: rows that overlap.
  if (height > 1 && pitch < width * element) return CUDA_ERROR_INVALID_VALUE;
  if (width > SIZE_MAX / element) return CUDA_ERROR_INVALID_VALUE;
  eachRow(to, pitch, 1, 0, 0, 0, width * element, 1, height,
          [](uint64_t at, size_t bytes) { state().needDevice(at, bytes); });
  return state().chance();
}
template <class Element>
CUresult setRows(CUdeviceptr to, size_t pitch, Element, size_t width, size_t height, CUstream) {
  return set2D(to, pitch, sizeof(Element), width, height);
}
CUresult box(const CUDA_MEMCPY3D_v2& copy) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  auto side = [&](CUmemorytype type, const void* host, CUdeviceptr device, size_t x, size_t y, size_t z,
                  size_t pitch, size_t height) {
    if (type == CU_MEMORYTYPE_ARRAY) return true;
    if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED)
      return false;
    if (pitch == 0) pitch = copy.WidthInBytes + x;
    if (height == 0) height = copy.Height + y;
    if (pitch < copy.WidthInBytes || height < copy.Height) return false;  // the driver's own check
    const bool atHost = type == CU_MEMORYTYPE_HOST;
    eachRow(atHost ? reinterpret_cast<uint64_t>(host) : device, pitch, height, x, y, z, copy.WidthInBytes,
            copy.Height, copy.Depth, [&](uint64_t at, size_t bytes) {
              atHost ? state().needHost(at, bytes) : state().needDevice(at, bytes);
            });
    return true;
  };
  bool good = side(copy.srcMemoryType, copy.srcHost, copy.srcDevice, copy.srcXInBytes, copy.srcY, copy.srcZ,
                   copy.srcPitch, copy.srcHeight);
  good = good && side(copy.dstMemoryType, copy.dstHost, copy.dstDevice, copy.dstXInBytes, copy.dstY,
                      copy.dstZ, copy.dstPitch, copy.dstHeight);
  return good ? state().chance() : CUDA_ERROR_INVALID_VALUE;
}
CUresult copyBox(const CUDA_MEMCPY3D_v2* copy, CUstream) {
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : box(*copy);
}
CUresult addCopyNode(CUgraphNode* node, CUgraph, const CUgraphNode* dependencies, size_t count,
                     const CUDA_MEMCPY3D* copy, CUcontext) {
  if (dependencies != nullptr) touch(dependencies, count * sizeof *dependencies);
  *node = schema::asHandle<CUgraphNode>(state().fresh());
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : box(*copy);
}
CUresult setCopyNode(CUgraphNode, const CUDA_MEMCPY3D* copy) {
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : box(*copy);
}
CUresult execSetCopyNode(CUgraphExec, CUgraphNode, const CUDA_MEMCPY3D* copy, CUcontext) {
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : box(*copy);
}
CUresult setNode(const CUDA_MEMSET_NODE_PARAMS* params) {
  if (params == nullptr || (params->elementSize != 1 && params->elementSize != 2 && params->elementSize != 4))
    return CUDA_ERROR_INVALID_VALUE;
  return set2D(params->dst, params->pitch, params->elementSize, params->width, params->height);
}
CUresult addSetNode(CUgraphNode* node, CUgraph, const CUgraphNode* dependencies, size_t count,
                    const CUDA_MEMSET_NODE_PARAMS* params, CUcontext) {
  if (dependencies != nullptr) touch(dependencies, count * sizeof *dependencies);
  *node = schema::asHandle<CUgraphNode>(state().fresh());
  return setNode(params);
}
CUresult setSetNode(CUgraphNode, const CUDA_MEMSET_NODE_PARAMS* params) { return setNode(params); }
CUresult execSetSetNode(CUgraphExec, CUgraphNode, const CUDA_MEMSET_NODE_PARAMS* params, CUcontext) {
  return setNode(params);
}

// ---- what the worker has for itself: no call of a client comes here
constexpr CUdeviceptr kOwnMemory = 0x7f00'0000'0000;
CUresult memAlloc(CUdeviceptr* address, size_t bytes) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  *address = kOwnMemory;
  state().own[kOwnMemory] = bytes;
  return state().chance();
}
CUresult memFree(CUdeviceptr) { return CUDA_SUCCESS; }

// ---- words
CUresult write64(CUstream, CUdeviceptr address, cuuint64_t value, unsigned) {
  if (state().isWord(address)) {
    std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
    return CUDA_SUCCESS;
  }
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  state().needDevice(address, 8);
  return state().chance();
}
CUresult write32(CUstream, CUdeviceptr address, cuuint32_t, unsigned) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  state().needDevice(address, 4);
  return state().chance();
}
CUresult wait64(CUstream, CUdeviceptr address, cuuint64_t, unsigned) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!state().isWord(address)) state().needDevice(address, 8);
  return state().chance();
}

}  // namespace

std::span<const Function> memoryFunctions() {
  static const Function functions[] = {
      FUNCTION(cuMemAddressReserve, addressReserve),
      FUNCTION(cuMemAddressFree, addressFree),
      FUNCTION(cuMemMap, memMap),
      FUNCTION(cuMemAlloc_v2, memAlloc),
      FUNCTION(cuMemFree_v2, memFree),
      FUNCTION(cuMemHostRegister_v2, hostRegister),
      FUNCTION(cuMemHostUnregister, hostUnregister),
      FUNCTION(cuMemHostGetDevicePointer_v2, hostPointer),
      FUNCTION(cuMemcpyHtoDAsync_v2, copyIn),
      FUNCTION(cuMemcpyDtoHAsync_v2, copyOut),
      FUNCTION(cuMemcpyDtoDAsync_v2, copyOn),
      FUNCTION(cuMemcpyPeerAsync, copyPeer),
      FUNCTION(cuMemcpy3DAsync_v2, copyBox),
      FUNCTION(cuMemsetD8Async, set<unsigned char>),
      FUNCTION(cuMemsetD16Async, set<unsigned short>),
      FUNCTION(cuMemsetD32Async, set<unsigned>),
      FUNCTION(cuMemsetD2D8Async, setRows<unsigned char>),
      FUNCTION(cuMemsetD2D16Async, setRows<unsigned short>),
      FUNCTION(cuMemsetD2D32Async, setRows<unsigned>),
      FUNCTION(cuStreamWriteValue64_v2, write64),
      FUNCTION(cuStreamWriteValue32_v2, write32),
      FUNCTION(cuStreamWaitValue64_v2, wait64),
      FUNCTION(cuStreamWaitValue32_v2, write32),
      FUNCTION(cuGraphAddMemcpyNode, addCopyNode),
      FUNCTION(cuGraphMemcpyNodeSetParams, setCopyNode),
      FUNCTION(cuGraphExecMemcpyNodeSetParams, execSetCopyNode),
      FUNCTION(cuGraphAddMemsetNode, addSetNode),
      FUNCTION(cuGraphMemsetNodeSetParams, setSetNode),
      FUNCTION(cuGraphExecMemsetNodeSetParams, execSetSetNode),
  };
  return functions;
}

}  // namespace gpupool::fuzz
