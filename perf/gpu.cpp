#include "perf/gpu.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "perf/driver.h"

namespace gpupool::perf {

DeviceMemory::DeviceMemory(size_t bytes) { ok(cuda().cuMemAlloc(&address_, bytes)); }
DeviceMemory::~DeviceMemory() { cuda().cuMemFree(address_); }
PinnedMemory::PinnedMemory(size_t bytes) { ok(cuda().cuMemHostAlloc(&address_, bytes, 0)); }
PinnedMemory::~PinnedMemory() { cuda().cuMemFreeHost(address_); }

std::vector<char> readBeside(const std::string& name) {
  char self[PATH_MAX];
  const ssize_t length = ::readlink("/proc/self/exe", self, sizeof self);
  if (length <= 0) throw std::runtime_error("/proc/self/exe cannot be read");
  std::string path(self, static_cast<size_t>(length));
  path = path.substr(0, path.rfind('/') + 1) + name;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

Gpu::Gpu(size_t largest) : largest_(std::max(largest, size_t{1} << 20)) {
  CUdevice device = 0;
  ok(cuda().cuInit(0));
  ok(cuda().cuDeviceGet(&device, 0));
  ok(cuda().cuDevicePrimaryCtxRetain(&context_, device));
  ok(cuda().cuCtxSetCurrent(context_));
  const std::vector<char> image = readBeside("perf-kernels.fatbin");
  ok(cuda().cuModuleLoadData(&module_, image.data()));
  ok(cuda().cuModuleGetFunction(&empty_, module_, "empty"));
  ok(cuda().cuModuleGetFunction(&sixteen_, module_, "sixteen"));
  ok(cuda().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
}

Gpu::~Gpu() {
  dropHostBuffers();
  device_.reset();
  otherDevice_.reset();
  cuda().cuStreamDestroy(stream_);
  cuda().cuModuleUnload(module_);
  cuda().cuDevicePrimaryCtxRelease(0);
}

void Gpu::launchEmpty() const {
  ok(cuda().cuLaunchKernel(empty_, 1, 1, 1, 1, 1, 1, 0, stream_, nullptr, nullptr));
}

void Gpu::launchSixteen() const {
  static uint64_t wide[9] = {};
  static uint32_t narrow[7] = {};
  void* parameters[16];
  for (size_t i = 0; i < 9; ++i) parameters[i] = &wide[i];
  for (size_t i = 0; i < 7; ++i) parameters[9 + i] = &narrow[i];
  ok(cuda().cuLaunchKernel(sixteen_, 1, 1, 1, 1, 1, 1, 0, stream_, parameters, nullptr));
}

void Gpu::synchronize() const { ok(cuda().cuStreamSynchronize(stream_)); }

CUdeviceptr Gpu::device() {
  if (!device_) device_ = std::make_unique<DeviceMemory>(largest_);
  return device_->address();
}

CUdeviceptr Gpu::otherDevice() {
  if (!otherDevice_) otherDevice_ = std::make_unique<DeviceMemory>(largest_);
  return otherDevice_->address();
}

void* Gpu::pinned() {
  if (!pinned_) {
    pinned_ = std::make_unique<PinnedMemory>(largest_);
    std::memset(pinned_->address(), 1, largest_);
  }
  return pinned_->address();
}

void* Gpu::pageable() {
  if (!pageable_) {
    pageable_.reset(new char[largest_]);
    std::memset(pageable_.get(), 1, largest_);  // every page is there before it is measured
  }
  return pageable_.get();
}

void Gpu::dropHostBuffers() {
  pinned_.reset();
  pageable_.reset();
}

}  // namespace gpupool::perf
