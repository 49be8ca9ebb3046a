#include "client/parameters.h"

#include <algorithm>
#include <cstring>

namespace gpupool::client {

bool ParameterPacker::setLayout(std::span<const schema::ParameterLayout> layout) {
  std::vector<Field> fields;
  for (const auto& parameter : layout) {
    if (parameter.offset > kMaxParameterBytes || parameter.size > kMaxParameterBytes - parameter.offset)
      return false;
    fields.push_back({parameter.offset, parameter.size});
  }
  std::vector<Field> ordered = fields;
  std::sort(ordered.begin(), ordered.end(),
            [](const Field& a, const Field& b) { return a.offset < b.offset; });
  size_t end = 0;
  bool padded = false;
  for (const Field& field : ordered) {
    if (field.offset < end) return false;
    padded = padded || field.offset > end;
    end = field.offset + field.size;
  }
  fields_ = std::move(fields);
  bytes_ = end;
  padded_ = padded;
  return true;
}

CUresult ParameterPacker::pack(void* const* kernelParams, std::byte* out) const {
  if (fields_.empty()) return CUDA_SUCCESS;
  if (kernelParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (padded_) std::memset(out, 0, bytes_);
  for (size_t i = 0; i < fields_.size(); ++i) {
    const Field field = fields_[i];
    const void* value = kernelParams[i];
    if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
    switch (field.size) {  // the two sizes that nearly all have become single moves
      case 8:
        std::memcpy(out + field.offset, value, 8);
        break;
      case 4:
        std::memcpy(out + field.offset, value, 4);
        break;
      default:
        std::memcpy(out + field.offset, value, field.size);
    }
  }
  return CUDA_SUCCESS;
}

CUresult parseLaunchExtra(void* const* extra, const std::byte** buffer, size_t* bytes) {
  if (extra == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const std::byte* foundBuffer = nullptr;
  const size_t* foundSize = nullptr;
  for (int pairs = 0; extra[0] != CU_LAUNCH_PARAM_END; extra += 2) {
    if (++pairs > 8) return CUDA_ERROR_INVALID_VALUE;  // no END in sight
    if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      foundBuffer = static_cast<const std::byte*>(extra[1]);
    } else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE) {
      foundSize = static_cast<const size_t*>(extra[1]);
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (foundSize == nullptr || *foundSize > kMaxParameterBytes) return CUDA_ERROR_INVALID_VALUE;
  if (foundBuffer == nullptr && *foundSize > 0) return CUDA_ERROR_INVALID_VALUE;
  *buffer = foundBuffer;
  *bytes = *foundSize;
  return CUDA_SUCCESS;
}

}  // namespace gpupool::client
