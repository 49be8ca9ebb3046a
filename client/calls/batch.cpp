// Batches of copies, one by one in the stream's order: a batch asks for less order than that.
#include <algorithm>
#include <map>
#include <vector>

#include "client/copies.h"
#include "client/entry.h"
#include "schema/array_format.h"

namespace gpupool::client {
namespace {

// Of a driver of CUDA 13.0: what captures is refused, and goes on capturing.
CUresult resolveBatchStream(CUstream stream, StreamRef& ref) {
  CUresult status = resolveStream(stream, ref);
  if (status != CUDA_SUCCESS) return status;
  if (ref.wire == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return ref.stream->capturing.load() ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

bool isOrder(CUmemcpySrcAccessOrder order) {
  return order >= CU_MEMCPY_SRC_ACCESS_ORDER_STREAM && order <= CU_MEMCPY_SRC_ACCESS_ORDER_ANY;
}

// copy(i) for each; `during`: the sources may be gone when the batch returns.
template <class Copy>
CUresult copyEach(const StreamRef& ref, size_t count, bool during, size_t* failed, Copy&& copy) {
  for (size_t i = 0; i < count; ++i) {
    const CUresult status = copy(i);
    if (status == CUDA_SUCCESS) continue;
    if (failed != nullptr) *failed = i;
    return status;
  }
  return during ? synchronizeStream(ref) : CUDA_SUCCESS;
}

CUresult copyBatch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                   CUmemcpyAttributes* attributes, size_t* starts, size_t attributeCount, size_t* failed,
                   CUstream stream) {
  StreamRef ref;
  if (CUresult status = resolveBatchStream(stream, ref); status != CUDA_SUCCESS) return status;
  if (failed != nullptr) *failed = SIZE_MAX;  // not the fault of one copy
  if (to == nullptr || from == nullptr || sizes == nullptr || count == 0 || attributes == nullptr ||
      starts == nullptr || attributeCount == 0 || attributeCount > count || starts[0] != 0)
    return CUDA_ERROR_INVALID_VALUE;
  bool during = false;
  for (size_t i = 0; i < attributeCount; ++i) {
    if (starts[i] >= count || (i != 0 && starts[i] <= starts[i - 1])) return CUDA_ERROR_INVALID_VALUE;
    if (!isOrder(attributes[i].srcAccessOrder)) return CUDA_ERROR_INVALID_VALUE;
    during |= attributes[i].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
  }
  return copyEach(ref, count, during, failed,
                  [&](size_t i) { return custom::cuMemcpyAsync(to[i], from[i], sizes[i], stream); });
}

// The arrays of a batch; each is asked for once.
class Arrays {
 public:
  CUresult find(CUarray array, CUDA_ARRAY3D_DESCRIPTOR_v2& shape) {
    if (array == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (auto known = known_.find(array); known != known_.end()) {
      shape = known->second;
      return CUDA_SUCCESS;
    }
    CUresult status = Generated<schema::RowOf<"cuArray3DGetDescriptor_v2">>::call(&shape, array);
    if (status == CUDA_SUCCESS) known_[array] = shape;
    return status;
  }

 private:
  std::map<CUarray, CUDA_ARRAY3D_DESCRIPTOR_v2> known_;
};

// [offset, + length) lies in an array's axis; an axis that the array lacks has one element.
bool fits(size_t offset, size_t length, size_t axis) {
  axis = std::max<size_t>(axis, 1);
  return offset < axis && length <= axis - offset;
}

// What an operand needs to be, and the bytes of its elements if it is an array.
CUresult checkOperand(const CUmemcpy3DOperand& operand, const CUextent3D& extent, Arrays& arrays,
                      size_t& element) {
  if (operand.type == CU_MEMCPY_OPERAND_TYPE_POINTER) {
    const auto& p = operand.op.ptr;
    constexpr size_t kMost = SIZE_MAX / 16;  // elements have 16 bytes at most
    const bool right = p.ptr != 0 && (p.rowLength == 0 || p.rowLength >= extent.width) &&
                       (p.layerHeight == 0 || p.layerHeight >= extent.height) && p.rowLength <= kMost &&
                       extent.width <= kMost;
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  }
  if (operand.type != CU_MEMCPY_OPERAND_TYPE_ARRAY) return CUDA_ERROR_INVALID_VALUE;
  CUDA_ARRAY3D_DESCRIPTOR_v2 shape{};
  if (CUresult status = arrays.find(operand.op.array.array, shape); status != CUDA_SUCCESS) return status;
  const size_t bytes = schema::arrayElementBytes(shape.Format, shape.NumChannels);
  if (bytes == 0) return CUDA_ERROR_NOT_SUPPORTED;  // blocks or planes: what an offset counts is not said
  if (element != 0 && element != bytes) return CUDA_ERROR_INVALID_VALUE;
  element = bytes;
  const CUoffset3D& at = operand.op.array.offset;
  const bool inside = fits(at.x, extent.width, shape.Width) && fits(at.y, extent.height, shape.Height) &&
                      fits(at.z, extent.depth, shape.Depth);
  return inside ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// The operation as a copy that counts bytes.
CUresult translate(const CUDA_MEMCPY3D_BATCH_OP& op, Arrays& arrays, CUDA_MEMCPY3D_v2& c) {
  const CUextent3D& extent = op.extent;
  if (extent.width == 0 || extent.height == 0 || extent.depth == 0 || !isOrder(op.srcAccessOrder))
    return CUDA_ERROR_INVALID_VALUE;
  size_t element = 0;
  CUresult status = checkOperand(op.src, extent, arrays, element);
  if (status == CUDA_SUCCESS) status = checkOperand(op.dst, extent, arrays, element);
  if (status != CUDA_SUCCESS) return status;
  element = std::max<size_t>(element, 1);  // between pointers, bytes
  c.WidthInBytes = extent.width * element;
  c.Height = extent.height;
  c.Depth = extent.depth;
  const auto side = [&](const CUmemcpy3DOperand& operand, CUmemorytype& type, CUdeviceptr& address,
                        size_t& pitch, size_t& height, CUarray& array, size_t& x, size_t& y, size_t& z) {
    if (operand.type == CU_MEMCPY_OPERAND_TYPE_POINTER) {
      type = CU_MEMORYTYPE_UNIFIED;
      address = operand.op.ptr.ptr;
      pitch = operand.op.ptr.rowLength * element;
      height = operand.op.ptr.layerHeight;
      return;
    }
    type = CU_MEMORYTYPE_ARRAY;
    array = operand.op.array.array;
    x = operand.op.array.offset.x * element;
    y = operand.op.array.offset.y;
    z = operand.op.array.offset.z;
  };
  side(op.src, c.srcMemoryType, c.srcDevice, c.srcPitch, c.srcHeight, c.srcArray, c.srcXInBytes, c.srcY,
       c.srcZ);
  side(op.dst, c.dstMemoryType, c.dstDevice, c.dstPitch, c.dstHeight, c.dstArray, c.dstXInBytes, c.dstY,
       c.dstZ);
  return CUDA_SUCCESS;
}

// A batch with an operation that is wrong by itself copies nothing.
CUresult copyVolumes(size_t count, const CUDA_MEMCPY3D_BATCH_OP* list, size_t* failed,
                     unsigned long long flags, CUstream stream) {
  StreamRef ref;
  if (CUresult status = resolveBatchStream(stream, ref); status != CUDA_SUCCESS) return status;
  if (failed != nullptr) *failed = SIZE_MAX;
  if (count == 0 || list == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  std::vector<CUDA_MEMCPY3D_v2> copies(count);
  Arrays arrays;
  bool during = false;
  for (size_t i = 0; i < count; ++i) {
    during |= list[i].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    const CUresult status = translate(list[i], arrays, copies[i]);
    if (status == CUDA_SUCCESS) continue;
    if (failed != nullptr) *failed = i;
    return status;
  }
  return copyEach(ref, count, during, failed,
                  [&](size_t i) { return copyVolume(ref, copies[i], Timing::async); });
}

}  // namespace

namespace custom {

CUresult cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                            CUmemcpyAttributes* attributes, size_t* starts, size_t attributeCount,
                            size_t* failed, CUstream stream) {
  return copyBatch(to, from, sizes, count, attributes, starts, attributeCount, failed, stream);
}
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                               CUmemcpyAttributes* attributes, size_t* starts, size_t attributeCount,
                               CUstream stream) {
  return copyBatch(to, from, sizes, count, attributes, starts, attributeCount, nullptr, stream);
}
CUresult cuMemcpy3DBatchAsync(size_t count, CUDA_MEMCPY3D_BATCH_OP* list, size_t* failed,
                              unsigned long long flags, CUstream stream) {
  return copyVolumes(count, list, failed, flags, stream);
}
CUresult cuMemcpy3DBatchAsync_v2(size_t count, CUDA_MEMCPY3D_BATCH_OP* list, unsigned long long flags,
                                 CUstream stream) {
  return copyVolumes(count, list, nullptr, flags, stream);
}

}  // namespace custom
}  // namespace gpupool::client
