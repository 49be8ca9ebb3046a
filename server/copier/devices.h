#pragma once
// The devices as the copier uses them: their primary contexts, kept from the first use to the process's end,
// and the registration of its host memory with them. The registration ends with the context that made it, so
// none is ever released. Any thread.

#include "server/driver.h"

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace gpupool::server {

class CopierDevices {
 public:
  // After cuInit. Throws std::runtime_error.
  explicit CopierDevices(const Driver& driver);

  const Driver& driver() const { return driver_; }
  size_t count() const { return contexts_.size(); }
  // Makes the device's context if there is none yet. "" or why not, for people.
  std::string use(uint32_t ordinal);
  // The context becomes the calling thread's. Of a device in use.
  CUresult makeCurrent(uint32_t ordinal);
  // Likewise.
  CUcontext context(uint32_t ordinal);
  // True: a copy from `from` can go straight to `to`, without host memory between.
  bool reaches(uint32_t from, uint32_t to);
  // So that copies run at the device's own speed; at once, or with the first context. Where the driver
  // refuses they are slower.
  void registerMemory(std::byte* data, uint64_t bytes);

 private:
  void registerNow(std::byte* data, uint64_t bytes);

  const Driver& driver_;
  std::mutex mutex_;
  std::vector<CUcontext> contexts_;  // by ordinal; null: not in use
  CUcontext first_ = nullptr;
  std::vector<std::pair<std::byte*, uint64_t>> waiting_;  // for a context
};

}  // namespace gpupool::server
