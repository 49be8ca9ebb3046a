#pragma once
// JIT options of module loads and of the linker (cuda.h, CUjit_option), and files as images.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "schema/cuda.h"

namespace gpupool::client {

// JIT options as they travel: numbers only. Log buffers stay here and are filled from the reply.
struct JitOptions {
  std::vector<CUjit_option> names;
  std::vector<uint64_t> values;
  char* info = nullptr;
  char* error = nullptr;
  int infoBytes = 0, errorBytes = 0;
  void** infoSize = nullptr;
  void** errorSize = nullptr;

  JitOptions(unsigned count, const CUjit_option* options, void** given) {
    for (unsigned i = 0; i < count && options != nullptr && given != nullptr; ++i) {
      auto number = static_cast<int>(reinterpret_cast<uint64_t>(given[i]));
      switch (options[i]) {
        case CU_JIT_INFO_LOG_BUFFER:
          info = static_cast<char*>(given[i]);
          break;
        case CU_JIT_ERROR_LOG_BUFFER:
          error = static_cast<char*>(given[i]);
          break;
        case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
          infoBytes = number, infoSize = &given[i];
          break;
        case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
          errorBytes = number, errorSize = &given[i];
          break;
        case CU_JIT_WALL_TIME:
          break;  // an output nobody can fill truthfully from here
        case CU_JIT_GLOBAL_SYMBOL_NAMES:
        case CU_JIT_GLOBAL_SYMBOL_ADDRESSES:
          break;  // host arrays of a retired interface
        default:
          names.push_back(options[i]);
          values.push_back(reinterpret_cast<uint64_t>(given[i]));
      }
    }
    if (info == nullptr) infoBytes = 0;
    if (error == nullptr) errorBytes = 0;
    infoBytes = std::clamp(infoBytes, 0, 64 << 10);
    errorBytes = std::clamp(errorBytes, 0, 64 << 10);
  }
  // The driver writes the used sizes back.
  void finish() {
    if (info != nullptr && infoSize != nullptr && infoBytes > 0)
      *infoSize = reinterpret_cast<void*>(::strnlen(info, static_cast<size_t>(infoBytes)));
    if (error != nullptr && errorSize != nullptr && errorBytes > 0)
      *errorSize = reinterpret_cast<void*>(::strnlen(error, static_cast<size_t>(errorBytes)));
  }
  unsigned count() const { return static_cast<unsigned>(names.size()); }
};

// The file's bytes and a terminator, which PTX needs. False: it cannot be read.
bool readFile(const char* path, std::vector<char>& bytes);

}  // namespace gpupool::client
