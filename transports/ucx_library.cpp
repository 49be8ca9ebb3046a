#include "transports/ucx_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

#include "base/log.h"

namespace gpupool::transport {

namespace {

// UCX reads these from the environment in its constructors, so they are set around dlopen alone and only
// where the user said nothing. It must not replace the application's malloc and mmap, take its signals, start
// threads for its own debugging, or write into the application's output, as it does by default: what fails
// comes back as a status, and its own words are for who debugs.
class LoadEnvironment {
 public:
  explicit LoadEnvironment(bool memoryEvents) {
    for (auto& setting : settings_) {
      if (memoryEvents && setting.events) setting.value = setting.events;
      if (setting.debugging && log::enabled(log::Level::debug)) setting.value = setting.debugging;
      setting.ours = std::getenv(setting.name) == nullptr && setenv(setting.name, setting.value, 0) == 0;
    }
  }
  ~LoadEnvironment() {
    for (auto& setting : settings_) {
      if (setting.ours) unsetenv(setting.name);
    }
  }

 private:
  struct Setting {
    const char* name;
    const char* value;
    const char* events = nullptr;     // the value where mappings may be watched
    const char* debugging = nullptr;  // with GPUPOOL_LOG=debug
    bool ours = false;
  };
  Setting settings_[9] = {{"UCX_LOG_FILE", "stderr"},
                          {"UCX_LOG_LEVEL", "fatal", nullptr, "warn"},
                          {"UCX_MEM_EVENTS", "n", "y"},
                          {"UCX_MEM_MMAP_HOOK_MODE", "none", "bistro"},
                          {"UCX_MEM_CUDA_HOOK_MODE", "none"},
                          {"UCX_HANDLE_ERRORS", "none"},
                          {"UCX_DEBUG_SIGNO", "0"},
                          {"UCX_WARN_UNUSED_ENV_VARS", "n"},
                          {"UCX_VFS_ENABLE", "n"}};
};

void* open(const char* name) {
  if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  const char* why = dlerror();
  throw std::runtime_error(std::string("ucx: a network needs UCX on this machine (package libucx0): ") +
                           (why ? why : name));
}

UcxLibrary load(bool memoryEvents) {
  LoadEnvironment environment(memoryEvents);
  void* ucs = open("libucs.so.0");
  void* ucp = open("libucp.so.0");
  UcxLibrary library;
  auto find = [](void* from, const char* name) {
    void* symbol = dlsym(from, name);
    if (!symbol) throw std::runtime_error(std::string("ucx: the installed UCX is too old, it lacks ") + name);
    return symbol;
  };
#define GPUPOOL_FIND_UCP(name) library.name = reinterpret_cast<decltype(&::name)>(find(ucp, #name));
#define GPUPOOL_FIND_UCS(name) library.name = reinterpret_cast<decltype(&::name)>(find(ucs, #name));
  GPUPOOL_UCP_FUNCTIONS(GPUPOOL_FIND_UCP)
  GPUPOOL_UCS_FUNCTIONS(GPUPOOL_FIND_UCS)
#undef GPUPOOL_FIND_UCP
#undef GPUPOOL_FIND_UCS
  GPUPOOL_INFO("UCX %s", library.ucp_get_version_string());
  return library;
}

}  // namespace

const UcxLibrary& UcxLibrary::get(bool memoryEvents) {
  static const UcxLibrary library = load(memoryEvents);
  return library;
}

}  // namespace gpupool::transport
