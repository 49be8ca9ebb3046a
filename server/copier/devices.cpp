#include "server/copier/devices.h"

#include <stdexcept>

#include "base/log.h"

namespace gpupool::server {

CopierDevices::CopierDevices(const Driver& driver) : driver_(driver) {
  int count = 0;
  if (const CUresult result = driver.cuDeviceGetCount(&count); result != CUDA_SUCCESS)
    throw std::runtime_error("cuDeviceGetCount: " + driver.describe(result));
  contexts_.resize(static_cast<size_t>(count));
  const bool complete = driver.cuMemImportFromShareableHandle && driver.cuMemHostRegister_v2 &&
                        driver.cuMemAddressFree && driver.cuMemcpyDtoHAsync_v2 &&
                        driver.cuMemcpyHtoDAsync_v2 && driver.cuStreamQuery && driver.cuStreamDestroy_v2 &&
                        driver.cuMemcpyPeerAsync && driver.cuDeviceCanAccessPeer;
  if (!complete) throw std::runtime_error("the driver is too old to move memory between processes");
}

std::string CopierDevices::use(uint32_t ordinal) {
  std::lock_guard lock(mutex_);
  if (ordinal >= contexts_.size()) return "there is no GPU " + std::to_string(ordinal);
  CUcontext& context = contexts_[ordinal];
  if (context != nullptr) return "";
  CUdevice device = 0;
  CUresult result = driver_.cuDeviceGet(&device, static_cast<int>(ordinal));
  // Threads that wait for a copy sleep; a context that exists already keeps its own way.
  if (result == CUDA_SUCCESS && driver_.cuDevicePrimaryCtxSetFlags_v2 != nullptr)
    driver_.cuDevicePrimaryCtxSetFlags_v2(device, CU_CTX_SCHED_BLOCKING_SYNC);
  if (result == CUDA_SUCCESS) result = driver_.cuDevicePrimaryCtxRetain(&context, device);
  if (result != CUDA_SUCCESS) {
    context = nullptr;
    const std::string gpu = "GPU " + std::to_string(ordinal);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
      return gpu + " is full: the copier needs some 0.5 GiB of it for a context of its own";
    return "the copier cannot use " + gpu + ": " + driver_.describe(result);
  }
  if (first_ == nullptr) {
    first_ = context;
    for (const auto& [data, bytes] : waiting_) registerNow(data, bytes);
    waiting_.clear();
  }
  return "";
}

CUresult CopierDevices::makeCurrent(uint32_t ordinal) {
  std::lock_guard lock(mutex_);
  return driver_.cuCtxSetCurrent(contexts_.at(ordinal));
}

CUcontext CopierDevices::context(uint32_t ordinal) {
  std::lock_guard lock(mutex_);
  return contexts_.at(ordinal);
}

bool CopierDevices::reaches(uint32_t from, uint32_t to) {
  CUdevice source = 0, target = 0;
  int can = 0;
  return from != to && driver_.cuDeviceGet(&source, static_cast<int>(from)) == CUDA_SUCCESS &&
         driver_.cuDeviceGet(&target, static_cast<int>(to)) == CUDA_SUCCESS &&
         driver_.cuDeviceCanAccessPeer(&can, target, source) == CUDA_SUCCESS && can != 0;
}

void CopierDevices::registerMemory(std::byte* data, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (first_ == nullptr) {
    waiting_.emplace_back(data, bytes);
  } else {
    registerNow(data, bytes);
  }
}

// mutex_ is held. PORTABLE: pinned for every context of the process.
void CopierDevices::registerNow(std::byte* data, uint64_t bytes) {
  CUresult result = driver_.cuCtxSetCurrent(first_);
  if (result == CUDA_SUCCESS) result = driver_.cuMemHostRegister_v2(data, bytes, CU_MEMHOSTREGISTER_PORTABLE);
  if (result != CUDA_SUCCESS)
    GPUPOOL_WARNING("memory for suspended sessions cannot be pinned, so they move slowly: %s",
                    driver_.describe(result).c_str());
}

}  // namespace gpupool::server
