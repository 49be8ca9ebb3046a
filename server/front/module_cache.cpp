#include "server/front/module_cache.h"

#include <filesystem>
#include <stdexcept>

#include "base/log.h"
#include "server/images/image_cache.h"

namespace gpupool::server {
namespace {

// Workers of other users open what they know the name of, and list nothing.
void openToWorkers(const std::string& cache) {
  namespace fs = std::filesystem;
  fs::permissions(cache, fs::perms{0711});
  for (fs::path above = fs::absolute(cache).parent_path(); above.has_relative_path();
       above = above.parent_path())
    if ((fs::status(above).permissions() & fs::perms::others_exec) == fs::perms::none)
      throw std::runtime_error(above.string() +
                               " is closed to the users of --worker-users: chmod o+x, or name another "
                               "--module-cache");
}

}  // namespace

ModuleCache::ModuleCache(kj::Timer& timer, const std::string& folder, uint64_t most, bool ofOtherUsers)
    : timer_(timer), most_(most) {
  if (folder.empty()) return;
  try {
    std::filesystem::create_directories(folder);
    if (ofOtherUsers) openToWorkers(folder);
  } catch (const std::exception& error) {
    GPUPOOL_WARNING("no module cache: %s", error.what());
    return;
  }
  folder_ = folder;
  trimming_ = trim().eagerlyEvaluate(
      [](kj::Exception&& exception) { GPUPOOL_ERROR("%s", exception.getDescription().cStr()); });
}

kj::Promise<void> ModuleCache::trim() {
  trimImages(openFolder(folder_), most_, 1);
  return timer_.afterDelay(1 * kj::MINUTES).then([this] { return trim(); });
}

}  // namespace gpupool::server
