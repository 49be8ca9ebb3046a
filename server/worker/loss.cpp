#include "server/worker/loss.h"

#include <atomic>

namespace gpupool::server {
namespace {

std::function<void(uint32_t, const std::string&)> teller;

}  // namespace

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

void onDeviceLost(std::function<void(uint32_t, const std::string&)> tell) { teller = std::move(tell); }

bool deviceLost(uint32_t ordinal, const std::string& error) {
  static std::atomic_flag told;
  if (told.test_and_set()) return false;
  if (teller) teller(ordinal, error);
  return true;
}

}  // namespace gpupool::server
