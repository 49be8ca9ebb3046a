#pragma once
// The folder of code images (server/images/) as the server keeps it: makes it, opens it to workers, and trims
// it. A worker keeps its tenant's folder within the bound; that all of them together stay within it is seen
// to here. Belongs to the event loop's thread.

#include <kj/async.h>
#include <kj/timer.h>

#include <cstdint>
#include <string>

namespace gpupool::server {

class ModuleCache {
 public:
  // folder: empty: there is to be none. most: bytes of all tenants' files together. ofOtherUsers: workers
  // are, and their way to the folder must be open. Where the folder cannot be had, the log says why.
  ModuleCache(kj::Timer& timer, const std::string& folder, uint64_t most, bool ofOtherUsers);
  KJ_DISALLOW_COPY(ModuleCache);

  // Empty: there is no cache.
  const std::string& folder() const { return folder_; }

 private:
  kj::Promise<void> trim();

  kj::Timer& timer_;
  std::string folder_;
  uint64_t most_;
  kj::Promise<void> trimming_ = nullptr;
};

}  // namespace gpupool::server
