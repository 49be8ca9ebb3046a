// Driver manual: Memory Management, the cuMemset* calls.
#include <algorithm>
#include <cstring>
#include <shared_mutex>

#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/copy.h"
#include "server/softgpu/api/memory.h"

namespace gpupool::softgpu::api {
namespace {

constexpr uint64_t kChunk = 4 << 20;

template <class T>
void fill(uint64_t to, uint64_t bytes, unsigned value) {
  auto* at = reinterpret_cast<T*>(to);
  std::fill(at, at + bytes / sizeof(T), T(value));
}

CUresult fillRow(uint64_t to, uint64_t bytes, unsigned element, unsigned value) {
  while (bytes) {
    uint64_t part = std::min(kChunk, bytes);
    std::shared_lock lock(unmapMutex());
    if (!addresses().covers(to, part, true)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (element == 1) fill<uint8_t>(to, part, value);
    if (element == 2) fill<uint16_t>(to, part, value);
    if (element == 4) fill<uint32_t>(to, part, value);
    to += part;
    bytes -= part;
  }
  return CUDA_SUCCESS;
}

CUresult set(CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width, size_t height,
             CUstream handle, bool synchronous) {
  SOFT_CONTEXT(context);
  SOFT_STREAM(stream, handle, context);
  if (synchronous) SOFT_TRY(forbidOnStream(*stream));
  auto operation = std::make_shared<MemsetOperation>();
  operation->parameters = {to, pitch, value, element, width, height};
  operation->context = context->handle;
  SOFT_TRY(checkMemset(operation->parameters));
  if (!width || !height) return CUDA_SUCCESS;
  auto target = addresses().find(to);
  Submit how = width * height * element <= kCheapBytes ? Submit::inlineIfIdle : Submit::asynchronous;
  if (synchronous && target && target->host()) how = Submit::wait;
  return submitOperation(*stream, operation, how);
}

}  // namespace

CUresult checkMemset(const CUDA_MEMSET_NODE_PARAMS& p) {
  if (p.elementSize != 1 && p.elementSize != 2 && p.elementSize != 4) return CUDA_ERROR_INVALID_VALUE;
  if (p.dst % p.elementSize) return CUDA_ERROR_INVALID_VALUE;
  if (!p.width || !p.height) return CUDA_SUCCESS;
  if (p.width > SIZE_MAX / 4 || (p.height > 1 && p.pitch > SIZE_MAX / p.height))
    return CUDA_ERROR_INVALID_VALUE;
  size_t row = p.width * p.elementSize;
  if (p.height > 1 && (p.pitch < row || p.pitch % p.elementSize)) return CUDA_ERROR_INVALID_VALUE;
  return checkDeviceRange(p.dst, (p.height - 1) * p.pitch + row, true);
}

CUresult MemsetOperation::run(Context&) const {
  const auto& p = parameters;
  for (size_t y = 0; y < p.height; ++y) {
    SOFT_TRY(fillRow(p.dst + y * p.pitch, p.width * p.elementSize, p.elementSize, p.value));
  }
  return CUDA_SUCCESS;
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
  return set(to, 0, value, 1, count, 1, nullptr, true);
}
CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
  return set(to, 0, value, 2, count, 1, nullptr, true);
}
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count) {
  return set(to, 0, value, 4, count, 1, nullptr, true);
}
CUresult cuMemsetD2D8_v2(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height) {
  return set(to, pitch, value, 1, width, height, nullptr, true);
}
CUresult cuMemsetD2D16_v2(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height) {
  return set(to, pitch, value, 2, width, height, nullptr, true);
}
CUresult cuMemsetD2D32_v2(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height) {
  return set(to, pitch, value, 4, width, height, nullptr, true);
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
  return set(to, 0, value, 1, count, 1, stream, false);
}
CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
  return set(to, 0, value, 2, count, 1, stream, false);
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
  return set(to, 0, value, 4, count, 1, stream, false);
}
CUresult cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                           CUstream stream) {
  return set(to, pitch, value, 1, width, height, stream, false);
}
CUresult cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height,
                            CUstream stream) {
  return set(to, pitch, value, 2, width, height, stream, false);
}
CUresult cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height,
                            CUstream stream) {
  return set(to, pitch, value, 4, width, height, stream, false);
}
