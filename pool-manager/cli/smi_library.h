#pragma once
// Our libnvidia-ml.so.1 (client/nvml), as `gpupool smi` asks it: as any other program does. One thread.

#include <nvml.h>

#include <stdexcept>
#include <string>

namespace gpupool::cli {

class NvmlError : public std::runtime_error {
 public:
  NvmlError(nvmlReturn_t status, const std::string& text) : std::runtime_error(text), status(status) {}
  nvmlReturn_t status;
};

class NvmlLibrary {
 public:
  // Loads and initialises it. Throws NvmlError, whose text is for people.
  explicit NvmlLibrary(const std::string& path);
  ~NvmlLibrary();
  NvmlLibrary(const NvmlLibrary&) = delete;
  NvmlLibrary& operator=(const NvmlLibrary&) = delete;

  // The function of that name. The arguments have exactly the types of its parameters.
  template <class... Arguments>
  nvmlReturn_t ask(const char* name, Arguments... arguments) const {
    const auto function = reinterpret_cast<nvmlReturn_t (*)(Arguments...)>(find(name));
    return function == nullptr ? NVML_ERROR_FUNCTION_NOT_FOUND : function(arguments...);
  }
  std::string errorText(nvmlReturn_t status) const;

 private:
  void* find(const char* name) const;
  void* library_;
};

}  // namespace gpupool::cli
