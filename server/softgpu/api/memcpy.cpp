// Driver manual: Memory Management, the cuMemcpy* calls: when the caller's memory may be touched again.
#include <algorithm>
#include <cstring>

#include "server/softgpu/api/array.h"
#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/copy.h"
#include "server/softgpu/api/memory.h"

namespace gpupool::softgpu::api {
namespace {

// Pageable sources up to this are copied aside at the call; larger ones are waited for.
constexpr uint64_t kSnapshot = 64 << 20;

enum class When { synchronous, asynchronous };

void snapshotSource(CopyPlan& plan) {
  auto bytes = std::shared_ptr<std::byte[]>(new std::byte[plan.bytes()]);
  std::byte* to = bytes.get();
  for (uint64_t z = 0; z < plan.depth; ++z) {
    for (uint64_t y = 0; y < plan.height; ++y, to += plan.width) {
      uint64_t from = plan.source.base + z * plan.source.slice + y * plan.source.pitch;
      std::memcpy(to, reinterpret_cast<const void*>(from), plan.width);
    }
  }
  plan.source.base = reinterpret_cast<uint64_t>(bytes.get());
  plan.source.pitch = plan.width;
  plan.source.slice = plan.width * plan.height;
  plan.source.known = false;
  plan.source.keep = std::move(bytes);
}

bool touchesHost(const CopyPlan& plan) {
  auto host = [](const CopySide& side) {
    if (side.pageable) return true;
    auto allocation = side.known ? addresses().find(side.base) : nullptr;
    return allocation && allocation->host();
  };
  return host(plan.source) || host(plan.target);
}

// Mapped memory takes part in copies of the devices that cuMemSetAccess names: an H100's driver (580) answers
// CUDA_ERROR_INVALID_VALUE for another device's, in peer copies, too. What cuMemAlloc makes, any may copy.
CUresult checkAccess(const CopySide& side, int device) {
  const auto allocation = side.known ? addresses().find(side.base) : nullptr;
  if (!allocation || allocation->kind != Allocation::Kind::mapped) return CUDA_SUCCESS;
  return allocation->openTo >> device & 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult submitCopy(const ContextPtr& context, const CUDA_MEMCPY3D& parameters, CUstream handle, When when) {
  SOFT_STREAM(stream, handle, context);
  if (when == When::synchronous) SOFT_TRY(forbidOnStream(*stream));
  auto operation = std::make_shared<CopyOperation>();
  operation->parameters = parameters;
  operation->context = context->handle;
  SOFT_TRY(planCopy(parameters, operation->plan));
  CopyPlan& plan = operation->plan;
  SOFT_TRY(checkAccess(plan.source, context->device));
  SOFT_TRY(checkAccess(plan.target, context->device));
  if (when == When::asynchronous && capturing(*stream)) {
    return submitOperation(*stream, operation, Submit::asynchronous);
  }
  Submit how = plan.bytes() <= kCheapBytes ? Submit::inlineIfIdle : Submit::asynchronous;
  if (when == When::synchronous) {
    // Between device memories even the plain call returns before the copy is done.
    if (touchesHost(plan)) how = Submit::wait;
  } else if (plan.width && plan.target.pageable) {
    how = Submit::wait;
  } else if (plan.width && plan.source.pageable) {
    if (plan.bytes() <= kSnapshot) {
      snapshotSource(plan);
    } else {
      how = Submit::wait;
    }
  }
  CUresult result = submitOperation(*stream, operation, how);
  if (how == Submit::wait) flushOutput();
  return result;
}

CUresult copyLinear(CUmemorytype targetType, uint64_t target, CUmemorytype sourceType, uint64_t source,
                    uint64_t bytes, CUstream stream, When when) {
  SOFT_CONTEXT(context);
  return submitCopy(context, linearCopy(targetType, target, sourceType, source, bytes), stream, when);
}

uint64_t number(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

CUresult copy2D(const CUDA_MEMCPY2D* p, CUstream stream, When when) {
  SOFT_CONTEXT(context);
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  CUDA_MEMCPY3D q{};
  q.srcXInBytes = p->srcXInBytes;
  q.srcY = p->srcY;
  q.srcMemoryType = p->srcMemoryType;
  q.srcHost = p->srcHost;
  q.srcDevice = p->srcDevice;
  q.srcArray = p->srcArray;
  q.srcPitch = p->srcPitch;
  q.dstXInBytes = p->dstXInBytes;
  q.dstY = p->dstY;
  q.dstMemoryType = p->dstMemoryType;
  q.dstHost = p->dstHost;
  q.dstDevice = p->dstDevice;
  q.dstArray = p->dstArray;
  q.dstPitch = p->dstPitch;
  q.WidthInBytes = p->WidthInBytes;
  q.Height = p->Height;
  q.Depth = 1;
  return submitCopy(context, q, stream, when);
}

CUresult copy3D(const CUDA_MEMCPY3D* p, CUstream stream, When when) {
  SOFT_CONTEXT(context);
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  return submitCopy(context, *p, stream, when);
}

// All devices of the software GPU share one address space: a peer copy is a copy.
CUresult copy3DPeer(const CUDA_MEMCPY3D_PEER* p, CUstream stream, When when) {
  SOFT_CONTEXT(context);
  if (!p) return CUDA_ERROR_INVALID_VALUE;
  static_assert(offsetof(CUDA_MEMCPY3D_PEER, srcContext) == offsetof(CUDA_MEMCPY3D, reserved0));
  CUDA_MEMCPY3D q{};
  static_assert(sizeof q == sizeof *p);
  std::memcpy(&q, p, sizeof q);
  q.reserved0 = q.reserved1 = nullptr;
  return submitCopy(context, q, stream, when);
}

CUresult arrayCopy(CUarray target, uint64_t targetX, uint64_t targetLinear, CUarray source, uint64_t sourceX,
                   uint64_t sourceLinear, bool host, uint64_t bytes, CUstream stream, When when) {
  SOFT_CONTEXT(context);
  CUmemorytype linear = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  CUDA_MEMCPY3D p = linearCopy(linear, targetLinear, linear, sourceLinear, bytes);
  if (target) {
    p.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    p.dstArray = target;
    p.dstXInBytes = targetX;
  }
  if (source) {
    p.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    p.srcArray = source;
    p.srcXInBytes = sourceX;
  }
  return submitCopy(context, p, stream, when);
}

// `element`: bytes, of the array's elements if one side is an array; lengths and offsets count them.
void fillOperand(const CUmemcpy3DOperand& operand, bool target, uint64_t element, CUDA_MEMCPY3D& p) {
  const bool array = operand.type == CU_MEMCPY_OPERAND_TYPE_ARRAY;
  const CUmemorytype type = array ? CU_MEMORYTYPE_ARRAY : CU_MEMORYTYPE_UNIFIED;
  const uint64_t pitch = array ? 0 : operand.op.ptr.rowLength * element;
  const uint64_t height = array ? 0 : operand.op.ptr.layerHeight;
  const CUoffset3D at = array ? operand.op.array.offset : CUoffset3D{0, 0, 0};
  (target ? p.dstMemoryType : p.srcMemoryType) = type;
  (target ? p.dstArray : p.srcArray) = array ? operand.op.array.array : nullptr;
  (target ? p.dstDevice : p.srcDevice) = array ? 0 : operand.op.ptr.ptr;
  (target ? p.dstPitch : p.srcPitch) = pitch;
  (target ? p.dstHeight : p.srcHeight) = height;
  (target ? p.dstXInBytes : p.srcXInBytes) = at.x * element;
  (target ? p.dstY : p.srcY) = at.y;
  (target ? p.dstZ : p.srcZ) = at.z;
}

// Of an operand: 1 for a pointer, 0 for one that is wrong.
uint64_t elementOf(const CUmemcpy3DOperand& operand, const CUextent3D& extent) {
  if (operand.type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {
    auto array = table<Array>().find(operand.op.array.array);
    return array ? array->elementBytes : 0;
  }
  const auto& p = operand.op.ptr;
  const bool right = operand.type == CU_MEMCPY_OPERAND_TYPE_POINTER &&
                     (p.rowLength == 0 || p.rowLength >= extent.width) &&
                     (p.layerHeight == 0 || p.layerHeight >= extent.height);
  return right ? 1 : 0;
}

CUresult translate(const CUDA_MEMCPY3D_BATCH_OP& op, CUDA_MEMCPY3D& p) {
  const CUextent3D& extent = op.extent;
  if (!extent.width || !extent.height || !extent.depth ||
      op.srcAccessOrder < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ||
      op.srcAccessOrder > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
    return CUDA_ERROR_INVALID_VALUE;
  const uint64_t source = elementOf(op.src, extent), target = elementOf(op.dst, extent);
  const bool arrays = op.src.type == op.dst.type && op.src.type == CU_MEMCPY_OPERAND_TYPE_ARRAY;
  if (!source || !target || (arrays && source != target)) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t element = std::max(source, target);
  fillOperand(op.src, false, element, p);
  fillOperand(op.dst, true, element, p);
  p.WidthInBytes = extent.width * element;
  p.Height = extent.height;
  p.Depth = extent.depth;
  return CUDA_SUCCESS;
}

// Batches go to streams with a name, and into no graph.
CUresult mayBatch(const ContextPtr& context, CUstream handle) {
  if (!handle || handle == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
  SOFT_STREAM(stream, handle, context);
  return capturing(*stream) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

template <class Copy>
CUresult copyEach(size_t count, size_t* failed, Copy&& copy) {
  for (size_t i = 0; i < count; ++i) {
    const CUresult status = copy(i);
    if (status == CUDA_SUCCESS) continue;
    if (failed) *failed = i;
    return status;
  }
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

namespace {
constexpr CUmemorytype kHost = CU_MEMORYTYPE_HOST, kDevice = CU_MEMORYTYPE_DEVICE,
                       kAny = CU_MEMORYTYPE_UNIFIED;
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copyLinear(kAny, to, kAny, from, bytes, nullptr, When::synchronous);
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copyLinear(kAny, to, kAny, from, bytes, stream, When::asynchronous);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return copyLinear(kDevice, to, kHost, number(from), bytes, nullptr, When::synchronous);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return copyLinear(kDevice, to, kHost, number(from), bytes, stream, When::asynchronous);
}
CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return copyLinear(kHost, number(to), kDevice, from, bytes, nullptr, When::synchronous);
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copyLinear(kHost, number(to), kDevice, from, bytes, stream, When::asynchronous);
}
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copyLinear(kDevice, to, kDevice, from, bytes, nullptr, When::synchronous);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copyLinear(kDevice, to, kDevice, from, bytes, stream, When::asynchronous);
}
CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes) {
  return copyLinear(kDevice, to, kDevice, from, bytes, nullptr, When::synchronous);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes,
                           CUstream stream) {
  return copyLinear(kDevice, to, kDevice, from, bytes, stream, When::asynchronous);
}
CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D* p) { return copy2D(p, nullptr, When::synchronous); }
CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* p) { return copy2D(p, nullptr, When::synchronous); }
CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* p, CUstream s) { return copy2D(p, s, When::asynchronous); }
CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D* p) { return copy3D(p, nullptr, When::synchronous); }
CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* p, CUstream s) { return copy3D(p, s, When::asynchronous); }
CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER* p) { return copy3DPeer(p, nullptr, When::synchronous); }
CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER* p, CUstream s) {
  return copy3DPeer(p, s, When::asynchronous);
}
CUresult cuMemcpyDtoA_v2(CUarray to, size_t x, CUdeviceptr from, size_t bytes) {
  return arrayCopy(to, x, 0, nullptr, 0, from, false, bytes, nullptr, When::synchronous);
}
CUresult cuMemcpyAtoD_v2(CUdeviceptr to, CUarray from, size_t x, size_t bytes) {
  return arrayCopy(nullptr, 0, to, from, x, 0, false, bytes, nullptr, When::synchronous);
}
CUresult cuMemcpyHtoA_v2(CUarray to, size_t x, const void* from, size_t bytes) {
  return arrayCopy(to, x, 0, nullptr, 0, number(from), true, bytes, nullptr, When::synchronous);
}
CUresult cuMemcpyAtoH_v2(void* to, CUarray from, size_t x, size_t bytes) {
  return arrayCopy(nullptr, 0, number(to), from, x, 0, true, bytes, nullptr, When::synchronous);
}
CUresult cuMemcpyAtoA_v2(CUarray to, size_t toX, CUarray from, size_t fromX, size_t bytes) {
  return arrayCopy(to, toX, 0, from, fromX, 0, false, bytes, nullptr, When::synchronous);
}
CUresult cuMemcpyHtoAAsync_v2(CUarray to, size_t x, const void* from, size_t bytes, CUstream stream) {
  return arrayCopy(to, x, 0, nullptr, 0, number(from), true, bytes, stream, When::asynchronous);
}
CUresult cuMemcpyAtoHAsync_v2(void* to, CUarray from, size_t x, size_t bytes, CUstream stream) {
  return arrayCopy(nullptr, 0, number(to), from, x, 0, true, bytes, stream, When::asynchronous);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                            CUmemcpyAttributes* attributes, size_t* indices, size_t attributeCount,
                            size_t* failed, CUstream stream) {
  SOFT_CONTEXT(context);
  SOFT_TRY(mayBatch(context, stream));
  if (failed) *failed = SIZE_MAX;
  if (!to || !from || !sizes || !count) return CUDA_ERROR_INVALID_VALUE;
  if (!attributes || !indices || !attributeCount || attributeCount > count || indices[0]) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return copyEach(count, failed, [&](size_t i) { return cuMemcpyAsync(to[i], from[i], sizes[i], stream); });
}
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                               CUmemcpyAttributes* attributes, size_t* indices, size_t attributeCount,
                               CUstream stream) {
  return cuMemcpyBatchAsync(to, from, sizes, count, attributes, indices, attributeCount, nullptr, stream);
}
CUresult cuMemcpy3DBatchAsync(size_t count, CUDA_MEMCPY3D_BATCH_OP* list, size_t* failed,
                              unsigned long long flags, CUstream stream) {
  SOFT_CONTEXT(context);
  SOFT_TRY(mayBatch(context, stream));
  if (failed) *failed = SIZE_MAX;
  if (!list || !count || flags) return CUDA_ERROR_INVALID_VALUE;
  return copyEach(count, failed, [&](size_t i) {
    CUDA_MEMCPY3D p{};
    SOFT_TRY(translate(list[i], p));
    return copy3D(&p, stream, When::asynchronous);
  });
}
CUresult cuMemcpy3DBatchAsync_v2(size_t count, CUDA_MEMCPY3D_BATCH_OP* list, unsigned long long flags,
                                 CUstream stream) {
  return cuMemcpy3DBatchAsync(count, list, nullptr, flags, stream);
}
