#pragma once
// The state of the library in this process: how often it was initialised, the lease's GPUs, and their figures
// as last heard. Every function is for any thread; questions to the holder are asked one after the other, and
// each waits a bounded time (Link). A child of fork() has a connection of its own.
//
// What changes is at most kFresh old when it is answered. If the server is away, the last figures count for
// kGrace more; then the GPU is lost (NVML_ERROR_GPU_IS_LOST). What never changes of a GPU is asked once, may
// have been told at any time (so that nvmlInit, which frameworks call before all else, need not wait until
// the server's NVML has told something new), and stays what it was also when the lease moves to another GPU,
// as CUDA's answers do.

#include <array>
#include <chrono>
#include <mutex>
#include <string>

#include "client/nvml/link.h"

namespace gpupool::nvml {

inline constexpr std::chrono::milliseconds kFresh{100}, kGrace{5000}, kEver{holder::kNoAgeMs - 1};

class Library {
 public:
  static Library& get();

  nvmlReturn_t init();
  nvmlReturn_t shutdown();
  bool initialised();
  // UNINITIALIZED, or how many GPUs the lease has.
  nvmlReturn_t count(unsigned* out);
  // The GPU's index. UNINITIALIZED; INVALID_ARGUMENT: that is no GPU of the lease.
  nvmlReturn_t indexOf(nvmlDevice_t device, unsigned* index);
  nvmlDevice_t handle(unsigned index);
  // A copy, as it is after indexOf has found the GPU.
  void facts(unsigned index, schema::NvmlFigures& out);
  nvmlReturn_t live(unsigned index, schema::NvmlFigures& out);

 private:
  using Clock = std::chrono::steady_clock;
  struct Gpu {
    schema::NvmlFigures facts, latest;
    Clock::time_point until;  // what came of the last question counts so long
    nvmlReturn_t status = NVML_ERROR_UNINITIALIZED;
  };
  Library();
  nvmlReturn_t learn();  // the lease's GPUs
  nvmlReturn_t refresh(unsigned index, std::chrono::milliseconds oldest);
  nvmlReturn_t judge(const Heard& heard, std::chrono::milliseconds oldest) const;

  std::mutex mutex_;
  Link link_{std::chrono::milliseconds(holder::kFiguresBoundMs)};
  std::string holder_;
  unsigned initialised_ = 0;
  unsigned count_ = 0;
  std::array<Gpu, schema::kFigureDevices> gpus_;
};

}  // namespace gpupool::nvml
