#pragma once
// A kernel's arguments as one buffer, from either form in which an application may give them.
//
// `kernelParams` is an array of pointers without count or sizes; the layout comes from the driver (never
// computed: its offsets are not the C ones) and travels with the get-function reply. Values are read at once:
// callers reuse their stack. Pure functions on caller's memory; any thread.

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "schema/session_calls.h"

namespace gpupool::client {

inline constexpr size_t kMaxParameterBytes = 32764;  // on sm_70 and newer, CUDA 12.1 and newer

class ParameterPacker {
 public:
  // False, and unchanged: the layout overlaps itself or exceeds kMaxParameterBytes.
  bool setLayout(std::span<const schema::ParameterLayout> layout);

  size_t count() const { return fields_.size(); }
  size_t bytes() const { return bytes_; }

  // Writes bytes() bytes to out, padding zeroed. CUDA_ERROR_INVALID_VALUE: a pointer is null; out is then
  // undefined.
  CUresult pack(void* const* kernelParams, std::byte* out) const;

 private:
  struct Field {
    uint32_t offset;
    uint32_t size;
  };
  std::vector<Field> fields_;
  size_t bytes_ = 0;
  bool padded_ = false;
};

// `extra`: pairs of CU_LAUNCH_PARAM_BUFFER_POINTER / _SIZE and a value, up to CU_LAUNCH_PARAM_END. On success
// *buffer is the application's. CUDA_ERROR_INVALID_VALUE: an unknown key, a missing one, or more than
// kMaxParameterBytes.
CUresult parseLaunchExtra(void* const* extra, const std::byte** buffer, size_t* bytes);

}  // namespace gpupool::client
