#pragma once
// Code images as they reach the driver without a length: fatbin wrappers (nvcc's, version 1 and 2), bare
// fatbins, PTX text. Only PTX can run here; of each fatbin the newest that compute capability 9.0 can take is
// used.

#include <cstdint>
#include <string>
#include <vector>

#include "server/softgpu/api/cuda_api.h"

namespace gpupool::softgpu::api {

struct CodeImage {
  std::vector<std::string> ptx;  // linked together if several
};

// 209: machine code only, or PTX for newer devices only; 200: none of the formats, or damaged.
CUresult readImage(const void* image, CodeImage& code, std::string& log);
// A bare fatbin of known length (cuLinkAddData).
CUresult readFatbin(const void* image, uint64_t limit, CodeImage& code, std::string& log);
// A bare fatbin that holds these texts; readImage() links them again.
std::vector<std::byte> writeFatbin(const std::vector<std::string>& ptx);

}  // namespace gpupool::softgpu::api
