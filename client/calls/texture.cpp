// Arrays by their first, 32-bit descriptors, and tensor maps. The other calls on arrays, textures and
// surfaces are rows.
#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>

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

// A tensor map is made of the arguments alone, for the GPU of the current context: the driver is asked once.
// XLA makes dozens before each step, of a few addresses that come again and again.
class TensorMaps {
 public:
  using Question = std::array<uint64_t, 8 + 4 * kMaxRank>;

  template <class Ask>
  CUresult find(const Question& question, CUtensorMap* out, Ask&& ask) {
    {
      std::lock_guard lock(mutex_);
      const auto known = answers_.find(question);
      if (known != answers_.end()) {
        *out = known->second;
        return CUDA_SUCCESS;
      }
    }
    const CUresult status = ask();
    if (status != CUDA_SUCCESS) return status;
    std::lock_guard lock(mutex_);
    if (answers_.size() >= kMost) answers_.clear();
    answers_[question] = *out;
    return status;
  }

 private:
  struct Hash {
    size_t operator()(const Question& question) const {
      uint64_t hash = 0;
      for (const uint64_t word : question) hash = mix(hash, word);
      return hash;
    }
  };
  static constexpr size_t kMost = 4096;  // 350 bytes each
  std::mutex mutex_;
  std::unordered_map<Question, CUtensorMap, Hash> answers_;
};

TensorMaps& tensorMaps() {
  static auto* maps = new TensorMaps;
  return *maps;
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
  Padded<cuuint64_t> steps(strides, rank - 1), extent(dimensions, rank);
  Padded<cuuint32_t> sides(box, rank), every(elementStrides, rank);
  const CUcontext context = contexts().working();
  const Context* known = contexts().find(context);
  const CUdevice device = known != nullptr ? known->device : -1;
  TensorMaps::Question question{reinterpret_cast<uint64_t>(address), rank,
                                static_cast<uint64_t>(device),       static_cast<uint64_t>(type),
                                static_cast<uint64_t>(interleave),   static_cast<uint64_t>(swizzle),
                                static_cast<uint64_t>(promotion),    static_cast<uint64_t>(fill)};
  auto rest = question.begin() + 8;
  rest = std::copy(steps.begin(), steps.end(), rest);
  rest = std::copy(extent.begin(), extent.end(), rest);
  rest = std::copy(sides.begin(), sides.end(), rest);
  std::copy(every.begin(), every.end(), rest);
  return tensorMaps().find(question, out, [&] {
    return Session::get().await<"cuTensorMapEncodeTiled">(context, out, type, rank, address, dimensions,
                                                          steps.data(), box, elementStrides, interleave,
                                                          swizzle, promotion, fill);
  });
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
      contexts().working(), out, type, rank, address, dimensions, steps.data(), first.data(), last.data(),
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
      contexts().working(), out, type, rank, address, dimensions, steps.data(), lower, upper, channels,
      pixels, elementStrides, interleave, mode, swizzle, promotion, fill);
}

CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  if (map == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Session::get().await<"cuTensorMapReplaceAddress">(contexts().working(), map, address);
}

}  // namespace custom
}  // namespace gpupool::client
