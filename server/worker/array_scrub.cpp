#include "server/worker/array_scrub.h"

#include <algorithm>
#include <vector>

#include "base/log.h"
#include "schema/array_format.h"

namespace gpupool::server {
namespace {

constexpr size_t kZeros = size_t{4} << 20;
constexpr unsigned kWithoutMemory = CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING;

// Block-compressed formats: bytes of a block of 4 x 4 texels; 0: another format.
size_t blockBytes(CUarray_format format) {
  switch (format) {
    case CU_AD_FORMAT_BC1_UNORM:
    case CU_AD_FORMAT_BC1_UNORM_SRGB:
    case CU_AD_FORMAT_BC4_UNORM:
    case CU_AD_FORMAT_BC4_SNORM:
      return 8;
    case CU_AD_FORMAT_BC2_UNORM:
    case CU_AD_FORMAT_BC2_UNORM_SRGB:
    case CU_AD_FORMAT_BC3_UNORM:
    case CU_AD_FORMAT_BC3_UNORM_SRGB:
    case CU_AD_FORMAT_BC5_UNORM:
    case CU_AD_FORMAT_BC5_SNORM:
    case CU_AD_FORMAT_BC6H_UF16:
    case CU_AD_FORMAT_BC6H_SF16:
    case CU_AD_FORMAT_BC7_UNORM:
    case CU_AD_FORMAT_BC7_UNORM_SRGB:
      return 16;
    default:
      return 0;
  }
}

// What a copy calls the array's width in bytes and its rows; false for a format that is not known here.
bool shapeOf(const CUDA_ARRAY3D_DESCRIPTOR& array, size_t& rowBytes, size_t& rows) {
  const size_t height = std::max<size_t>(array.Height, 1);
  if (const size_t block = blockBytes(array.Format); block != 0) {
    rowBytes = (array.Width + 3) / 4 * block;
    rows = (height + 3) / 4;
    return true;
  }
  rowBytes = array.Width * schema::arrayElementBytes(array.Format, array.NumChannels);
  rows = height;
  return rowBytes != 0;
}

CUresult clearPlanes(const Driver& driver, CUarray array, const CUDA_ARRAY3D_DESCRIPTOR& shape,
                     CUstream stream) {
  size_t rowBytes = 0, rows = 0;
  if (!shapeOf(shape, rowBytes, rows)) {
    GPUPOOL_WARNING("an array of format %#x cannot be cleared of an earlier tenant's bytes: refused",
                    static_cast<unsigned>(shape.Format));
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  static const std::vector<std::byte> zeros(kZeros);
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = zeros.data();
  copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
  copy.dstArray = array;
  copy.Depth = 1;
  for (copy.dstZ = 0; copy.dstZ < std::max<size_t>(shape.Depth, 1); ++copy.dstZ)
    for (copy.dstXInBytes = 0; copy.dstXInBytes < rowBytes; copy.dstXInBytes += copy.WidthInBytes) {
      copy.srcPitch = copy.WidthInBytes = std::min(rowBytes - copy.dstXInBytes, kZeros);
      for (copy.dstY = 0; copy.dstY < rows; copy.dstY += copy.Height) {
        copy.srcHeight = copy.Height = std::min(rows - copy.dstY, kZeros / copy.WidthInBytes);
        if (CUresult result = driver.cuMemcpy3DAsync_v2(&copy, stream); result != CUDA_SUCCESS) return result;
      }
    }
  return CUDA_SUCCESS;
}

}  // namespace

// On a stream of its own, as extents are (server/worker/space.cpp).
CUresult clearArray(const Driver& driver, CUarray array) {
  CUDA_ARRAY3D_DESCRIPTOR shape{};
  CUresult result = driver.cuArray3DGetDescriptor_v2(&shape, array);
  if (result != CUDA_SUCCESS || (shape.Flags & kWithoutMemory) != 0) return result;
  CUstream stream = nullptr;
  result = driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  if (result != CUDA_SUCCESS) return result;
  result = clearPlanes(driver, array, shape, stream);
  if (CUresult done = driver.cuStreamSynchronize(stream); result == CUDA_SUCCESS) result = done;
  driver.cuStreamDestroy_v2(stream);
  return result;
}

CUresult clearMipmap(const Driver& driver, CUmipmappedArray mipmap, unsigned levels) {
  for (unsigned level = 0; level < levels; ++level) {
    CUarray array = nullptr;
    CUresult result = driver.cuMipmappedArrayGetLevel(&array, mipmap, level);
    if (result == CUDA_SUCCESS) result = clearArray(driver, array);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

}  // namespace gpupool::server
