#include "server/worker/loss.h"

#include <atomic>

namespace gpupool::server {

bool isLoss(CUresult status, std::string_view call) {
  switch (status) {
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
      return call.find("Ctx") == std::string_view::npos && call.find("Context") == std::string_view::npos;
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
      return true;
    default:
      return false;
  }
}

bool deviceLost() {
  static std::atomic_flag told;
  return !told.test_and_set();
}

}  // namespace gpupool::server
