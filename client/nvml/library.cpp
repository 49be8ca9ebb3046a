#include "client/nvml/library.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace gpupool::nvml {

Library& Library::get() {
  static auto* library = new Library;  // never destroyed: threads may ask while the process ends
  return *library;
}

Library::Library() {
  pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                 [] {
                   // The parent's connection is the parent's: two on one would take each other's answers.
                   get().link_.close();
                   get().mutex_.unlock();
                 });
}

nvmlReturn_t Library::init() {
  std::lock_guard lock(mutex_);
  if (initialised_ == 0) {
    const char* named = std::getenv("GPUPOOL_HOLDER");
    const std::string name = named != nullptr && *named != 0 ? named : holder::holderOfProcess(::getpid());
    if (holder_ != name) count_ = 0;
    holder_ = name;
    const nvmlReturn_t status = count_ == 0 ? learn() : refresh(0, kEver);
    if (status != NVML_SUCCESS) {
      link_.close();
      return status == NVML_ERROR_GPU_IS_LOST ? NVML_ERROR_DRIVER_NOT_LOADED : status;
    }
  }
  ++initialised_;
  return NVML_SUCCESS;
}

nvmlReturn_t Library::learn() {
  unsigned count = 1;
  for (unsigned i = 0; i < count; ++i) {
    if (const nvmlReturn_t status = refresh(i, kEver); status != NVML_SUCCESS) return status;
    gpus_[i].facts = gpus_[i].latest;
    count = gpus_[0].latest.deviceCount;
  }
  count_ = count;
  return count == 0 ? NVML_ERROR_DRIVER_NOT_LOADED : NVML_SUCCESS;
}

nvmlReturn_t Library::shutdown() {
  std::lock_guard lock(mutex_);
  if (initialised_ == 0) return NVML_ERROR_UNINITIALIZED;
  if (--initialised_ == 0) link_.close();
  return NVML_SUCCESS;
}

bool Library::initialised() {
  std::lock_guard lock(mutex_);
  return initialised_ != 0;
}

nvmlReturn_t Library::count(unsigned* out) {
  std::lock_guard lock(mutex_);
  if (initialised_ == 0) return NVML_ERROR_UNINITIALIZED;
  if (out == nullptr) return NVML_ERROR_INVALID_ARGUMENT;
  *out = count_;
  return NVML_SUCCESS;
}

nvmlDevice_t Library::handle(unsigned index) { return reinterpret_cast<nvmlDevice_t>(&gpus_[index]); }

nvmlReturn_t Library::indexOf(nvmlDevice_t device, unsigned* index) {
  std::lock_guard lock(mutex_);
  if (initialised_ == 0) return NVML_ERROR_UNINITIALIZED;
  for (unsigned i = 0; i < count_; ++i) {
    if (handle(i) != device) continue;
    *index = i;
    return NVML_SUCCESS;
  }
  return NVML_ERROR_INVALID_ARGUMENT;
}

void Library::facts(unsigned index, schema::NvmlFigures& out) {
  std::lock_guard lock(mutex_);
  out = gpus_[index].facts;
}

nvmlReturn_t Library::live(unsigned index, schema::NvmlFigures& out) {
  std::lock_guard lock(mutex_);
  Gpu& gpu = gpus_[index];
  const nvmlReturn_t status = Clock::now() <= gpu.until ? gpu.status : refresh(index, kFresh);
  if (status == NVML_SUCCESS) out = gpu.latest;
  return status;
}

nvmlReturn_t Library::refresh(unsigned index, std::chrono::milliseconds oldest) {
  Gpu& gpu = gpus_[index];
  Heard heard;
  gpu.status = link_.ask(holder_, index, oldest, heard, gpu.latest);
  // Its holder is gone while the library is in use.
  if (gpu.status == NVML_ERROR_DRIVER_NOT_LOADED && initialised_ != 0) gpu.status = NVML_ERROR_GPU_IS_LOST;
  if (gpu.status == NVML_SUCCESS) gpu.status = judge(heard, oldest);
  // Also what was in vain, or is old by now, counts for a while: many threads that ask do not wait in turn.
  // An old answer to nvmlInit does not: whoever asks for a live figure next is to hear a new one.
  const bool young = gpu.status == NVML_SUCCESS && heard.age < kFresh;
  const auto counts = young ? kFresh - heard.age : oldest == kFresh ? kFresh : std::chrono::milliseconds(0);
  gpu.until = Clock::now() + counts;
  return gpu.status;
}

nvmlReturn_t Library::judge(const Heard& heard, std::chrono::milliseconds oldest) const {
  if (heard.status == holder::Status::ok || heard.status == holder::Status::serverLost) {
    const bool lost = heard.status == holder::Status::serverLost;
    // nvmlInit asks for what does not change: a server that is being restarted keeps no program from it.
    if (heard.figured && heard.age <= std::max(oldest, kGrace)) return NVML_SUCCESS;
    // Before anything was heard of it, it is not there yet; NVML that does not answer is not lost.
    return lost && initialised_ != 0 ? NVML_ERROR_GPU_IS_LOST : NVML_ERROR_TIMEOUT;
  }
  return NVML_ERROR_GPU_IS_LOST;
}

}  // namespace gpupool::nvml
