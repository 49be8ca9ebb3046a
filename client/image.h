#pragma once
// Recognises and measures the code images that an application loads: none of the load calls passes a length.
//
// Forms: nvcc's wrapper around a fatbin (version 1, or 2 after device linking), a bare fatbin, an ELF cubin,
// PTX text. Everything is sent verbatim; selection, decompression and compilation are the server's driver's.
// The bytes are the application's own memory, read here as the driver would; sizes found in it are bounded
// before they are used. Pure functions, any thread.

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "schema/session_calls.h"

namespace gpupool::client {

enum class ImageForm : uint8_t { wrapper1, wrapper2, fatbin, elf, ptx };

// As sessionModuleLoad and sessionLibraryLoad number them: what the server puts around the bytes.
constexpr unsigned wrapperVersion(ImageForm form) {
  return form == ImageForm::wrapper1 ? 1 : form == ImageForm::wrapper2 ? 2 : 0;
}

struct CodeImage {
  ImageForm form = ImageForm::ptx;
  std::span<const std::byte> bytes;                   // the fatbin behind a wrapper, else the image itself
  std::vector<std::span<const std::byte>> prelinked;  // wrapper2: the fatbins that were linked into it
};

inline constexpr size_t kMaxImageBytes = size_t{1} << 32;

// CUDA_ERROR_INVALID_VALUE: null. CUDA_ERROR_INVALID_IMAGE: none of the forms, or sizes that cannot be.
CUresult recogniseImage(const void* image, CodeImage* out);

// The content's name on the wire: digest (base/content.h) and length.
schema::ImageName nameOfImage(std::span<const std::byte> bytes);

}  // namespace gpupool::client
