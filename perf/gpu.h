#pragma once
// What every case works with: the primary context of device 0, one stream, two kernels, and buffers that are
// made when first asked for. Everything is given back in the destructors. Threads: one.

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace gpupool::perf {

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  CUdeviceptr address() const { return address_; }

 private:
  CUdeviceptr address_ = 0;
};

class PinnedMemory {
 public:
  explicit PinnedMemory(size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  void* address() const { return address_; }

 private:
  void* address_ = nullptr;
};

// The bytes of a file beside this program. Throws std::runtime_error.
std::vector<char> readBeside(const std::string& name);

class Gpu {
 public:
  explicit Gpu(size_t largest);  // bytes of the buffers below
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  CUstream stream() const { return stream_; }
  void launchEmpty() const;
  void launchSixteen() const;  // sixteen parameters, 100 bytes
  void synchronize() const;

  CUdeviceptr device();  // `largest` bytes each, never smaller than 1 MiB
  CUdeviceptr otherDevice();
  void* pinned();
  void* pageable();
  void dropHostBuffers();

 private:
  size_t largest_;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction empty_ = nullptr, sixteen_ = nullptr;
  std::unique_ptr<DeviceMemory> device_, otherDevice_;
  std::unique_ptr<PinnedMemory> pinned_;
  std::unique_ptr<char[]> pageable_;
};

}  // namespace gpupool::perf
