// Arrays by their first, 32-bit descriptors, and tensor maps. The other calls on arrays, textures and
// surfaces are rows.
#include <algorithm>
#include <array>

#include "client/entry.h"

namespace gpupool::client {
namespace {

CUDA_ARRAY_DESCRIPTOR_v2 wide(const CUDA_ARRAY_DESCRIPTOR_v1& d) {
  return {d.Width, d.Height, d.Format, d.NumChannels};
}
CUDA_ARRAY3D_DESCRIPTOR_v2 wide(const CUDA_ARRAY3D_DESCRIPTOR_v1& d) {
  return {d.Width, d.Height, d.Depth, d.Format, d.NumChannels, d.Flags};
}

// A tensor map's lists are shorter than its rank by different amounts; they travel as `rank` elements each.
constexpr unsigned kMaxRank = 5;
template <class T>
struct Padded : std::array<T, kMaxRank> {
  Padded(const T* from, unsigned count) : std::array<T, kMaxRank>{} {
    if (from != nullptr) std::copy_n(from, std::min(count, kMaxRank), this->begin());
  }
};

CUcontext currentContext() {
  CUcontext context = contexts().working();
  return context;
}

}  // namespace

namespace custom {

CUresult cuArrayCreate(CUarray* out, const CUDA_ARRAY_DESCRIPTOR_v1* descriptor) {
  if (out == nullptr || descriptor == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_ARRAY_DESCRIPTOR_v2 whole = wide(*descriptor);
  return Generated<schema::RowOf<"cuArrayCreate_v2">>::call(
      out, static_cast<const CUDA_ARRAY_DESCRIPTOR_v2*>(&whole));
}
CUresult cuArray3DCreate(CUarray* out, const CUDA_ARRAY3D_DESCRIPTOR_v1* descriptor) {
  if (out == nullptr || descriptor == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_ARRAY3D_DESCRIPTOR_v2 whole = wide(*descriptor);
  return Generated<schema::RowOf<"cuArray3DCreate_v2">>::call(
      out, static_cast<const CUDA_ARRAY3D_DESCRIPTOR_v2*>(&whole));
}
CUresult cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1* out, CUarray array) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_ARRAY_DESCRIPTOR_v2 d{};
  CUresult status = Generated<schema::RowOf<"cuArrayGetDescriptor_v2">>::call(&d, array);
  if (status == CUDA_SUCCESS)
    *out = {static_cast<unsigned>(d.Width), static_cast<unsigned>(d.Height), d.Format, d.NumChannels};
  return status;
}
CUresult cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1* out, CUarray array) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUDA_ARRAY3D_DESCRIPTOR_v2 d{};
  CUresult status = Generated<schema::RowOf<"cuArray3DGetDescriptor_v2">>::call(&d, array);
  if (status == CUDA_SUCCESS)
    *out = {static_cast<unsigned>(d.Width),
            static_cast<unsigned>(d.Height),
            static_cast<unsigned>(d.Depth),
            d.Format,
            d.NumChannels,
            d.Flags};
  return status;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* dimensions, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* elementStrides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (out == nullptr || rank == 0 || rank > kMaxRank || dimensions == nullptr || box == nullptr ||
      elementStrides == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  Padded<cuuint64_t> steps(strides, rank - 1);
  return Session::get().await<"cuTensorMapEncodeTiled">(currentContext(), out, type, rank, address,
                                                        dimensions, steps.data(), box, elementStrides,
                                                        interleave, swizzle, promotion, fill);
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                 const cuuint64_t* dimensions, const cuuint64_t* strides, const int* lower,
                                 const int* upper, cuuint32_t channels, cuuint32_t pixels,
                                 const cuuint32_t* elementStrides, CUtensorMapInterleave interleave,
                                 CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                 CUtensorMapFloatOOBfill fill) {
  if (out == nullptr || rank < 3 || rank > kMaxRank || dimensions == nullptr || lower == nullptr ||
      upper == nullptr || elementStrides == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  Padded<cuuint64_t> steps(strides, rank - 1);
  Padded<int> first(lower, rank - 2), last(upper, rank - 2);
  return Session::get().await<"cuTensorMapEncodeIm2col">(
      currentContext(), out, type, rank, address, dimensions, steps.data(), first.data(), last.data(),
      channels, pixels, elementStrides, interleave, swizzle, promotion, fill);
}

CUresult cuTensorMapEncodeIm2colWide(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank,
                                     void* address, const cuuint64_t* dimensions, const cuuint64_t* strides,
                                     int lower, int upper, cuuint32_t channels, cuuint32_t pixels,
                                     const cuuint32_t* elementStrides, CUtensorMapInterleave interleave,
                                     CUtensorMapIm2ColWideMode mode, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (out == nullptr || rank < 3 || rank > kMaxRank || dimensions == nullptr || elementStrides == nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  Padded<cuuint64_t> steps(strides, rank - 1);
  return Session::get().await<"cuTensorMapEncodeIm2colWide">(
      currentContext(), out, type, rank, address, dimensions, steps.data(), lower, upper, channels, pixels,
      elementStrides, interleave, mode, swizzle, promotion, fill);
}

CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  if (map == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Session::get().await<"cuTensorMapReplaceAddress">(currentContext(), map, address);
}

}  // namespace custom
}  // namespace gpupool::client
