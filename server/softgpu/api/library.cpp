// Driver manual: Library Management.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "server/softgpu/api/module.h"

namespace gpupool::softgpu::api {
namespace {

struct Library;

struct KernelEntry {
  using Handle = CUkernel;
  static constexpr Tag kTag = Tag::kernel;
  Handle handle = nullptr;
  std::weak_ptr<Library> library;
  CUlibrary libraryHandle = nullptr;
  const KernelInfo* info = nullptr;  // of the library's first code
  std::shared_ptr<FunctionAttributes> attributes[kMaxDevices];
  std::mutex mutex;
  std::map<uint64_t, FunctionPtr> functions;  // by context id
};
using KernelPtr = std::shared_ptr<KernelEntry>;

struct Library {
  using Handle = CUlibrary;
  static constexpr Tag kTag = Tag::library;
  Handle handle = nullptr;
  CodeImage image;
  std::shared_ptr<Code> first;  // loaded with the library: names and layouts, and the first context's code
  bool firstTaken = false;
  ManagedVariables managed;
  std::vector<KernelPtr> kernels;
  std::map<std::string, KernelPtr, std::less<>> byName;
  std::mutex mutex;                       // the three below
  std::map<uint64_t, ModulePtr> modules;  // by context id

  ~Library() {
    first.reset();
    for (auto& [name, variable] : managed) {
      if (variable && addresses().take(variable->base)) freeAllocation(*variable);
    }
  }
  CUresult module(const ContextPtr& context, ModulePtr& out);
};
using LibraryPtr = std::shared_ptr<Library>;

CUresult Library::module(const ContextPtr& context, ModulePtr& out) {
  std::lock_guard lock(mutex);
  auto& known = modules[context->id];
  if (!known) {
    std::shared_ptr<Code> code;
    if (!firstTaken && first->move(context->deviceObject())) {
      code = first;
      firstTaken = true;
    } else {
      JitOptions none(0, nullptr, nullptr);
      SOFT_TRY(loadCode(image, context->deviceObject(), context.get(), &managed, none, code));
    }
    known = makeModule(context, std::move(code));
    known->library = handle;
  }
  out = known;
  return CUDA_SUCCESS;
}

CUresult kernelFunction(KernelEntry& kernel, const ContextPtr& context, FunctionPtr& function) {
  std::lock_guard lock(kernel.mutex);
  auto& known = kernel.functions[context->id];
  if (!known) {
    auto library = kernel.library.lock();
    if (!library) return CUDA_ERROR_INVALID_HANDLE;
    ModulePtr module;
    SOFT_TRY(library->module(context, module));
    auto made = module->function(kernel.info->name);
    if (!made) return CUDA_ERROR_NOT_FOUND;
    made->attributes = kernel.attributes[context->device];
    made->origin = kernel.handle;
    known = made;
  }
  function = known;
  return CUDA_SUCCESS;
}

CUresult loadLibrary(CUlibrary* out, const void* bytes, JitOptions& jit) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
  auto library = std::make_shared<Library>();
  std::string log;
  if (CUresult result = readImage(bytes, library->image, log); result != CUDA_SUCCESS) {
    jit.error(log);
    return result;
  }
  auto current = currentOrNull();
  Device& home = *devices()[size_t(current ? current->device : 0)];
  SOFT_TRY(loadCode(library->image, home, nullptr, &library->managed, jit, library->first));
  *out = table<Library>().add(library);
  for (const KernelInfo& info : library->first->program->kernels()) {
    auto kernel = std::make_shared<KernelEntry>();
    kernel->library = library;
    kernel->libraryHandle = library->handle;
    kernel->info = &info;
    for (auto& attributes : kernel->attributes) attributes = std::make_shared<FunctionAttributes>();
    table<KernelEntry>().add(kernel);
    library->kernels.push_back(kernel);
    library->byName.emplace(info.name, kernel);
  }
  return CUDA_SUCCESS;
}

CUresult findLibrary(CUlibrary handle, LibraryPtr& library) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  library = table<Library>().find(handle);
  return library ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult findKernel(CUkernel handle, KernelPtr& kernel) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  kernel = table<KernelEntry>().find(handle);
  return kernel ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

CUresult resolveFunction(CUfunction handle, const ContextPtr& context, FunctionPtr& function) {
  if (HandleTable<KernelEntry>::owns(handle)) {
    auto kernel = table<KernelEntry>().find(reinterpret_cast<CUkernel>(handle));
    return kernel ? kernelFunction(*kernel, context, function) : CUDA_ERROR_INVALID_HANDLE;
  }
  function = table<Function>().find(handle);
  if (!function || function->context != context) return CUDA_ERROR_INVALID_HANDLE;
  return CUDA_SUCCESS;
}

void releaseLibraries(Context& context) {
  const uint64_t id = context.id;
  // The tables are locked only to list what there is: dropping code frees memory.
  std::vector<LibraryPtr> libraries;
  std::vector<KernelPtr> kernels;
  table<Library>().forEach([&](const LibraryPtr& library) { libraries.push_back(library); });
  table<KernelEntry>().forEach([&](const KernelPtr& kernel) { kernels.push_back(kernel); });
  for (auto& kernel : kernels) {
    std::lock_guard lock(kernel->mutex);
    kernel->functions.erase(id);
  }
  for (auto& library : libraries) {
    std::lock_guard lock(library->mutex);
    auto module = library->modules.find(id);
    if (module == library->modules.end()) continue;
    dropModule(module->second);
    library->modules.erase(module);
  }
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu;
using namespace gpupool::softgpu::api;

CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option* options, void** values,
                           unsigned int count, CUlibraryOption*, void**, unsigned int) {
  JitOptions jit(count, options, values);
  return loadLibrary(library, image, jit);
}

CUresult cuLibraryLoadFromFile(CUlibrary* library, const char* path, CUjit_option* options, void** values,
                               unsigned int count, CUlibraryOption*, void**, unsigned int) {
  if (!library || !path) return CUDA_ERROR_INVALID_VALUE;
  std::ifstream file(path, std::ios::binary);
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  JitOptions jit(count, options, values);
  return loadLibrary(library, bytes.c_str(), jit);
}

CUresult cuLibraryUnload(CUlibrary handle) {
  LibraryPtr library;
  SOFT_TRY(findLibrary(handle, library));
  library = table<Library>().take(handle);
  if (!library) return CUDA_ERROR_INVALID_HANDLE;
  for (auto& kernel : library->kernels) table<KernelEntry>().take(kernel->handle);
  std::lock_guard lock(library->mutex);
  for (auto& [id, module] : library->modules) {
    module->context->synchronize();
    dropModule(module);
  }
  library->modules.clear();
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel* out, CUlibrary handle, const char* name) {
  LibraryPtr library;
  SOFT_TRY(findLibrary(handle, library));
  if (!out || !name) return CUDA_ERROR_INVALID_VALUE;
  auto found = library->byName.find(name);
  if (found == library->byName.end()) return CUDA_ERROR_NOT_FOUND;
  *out = found->second->handle;
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernelCount(unsigned int* count, CUlibrary handle) {
  LibraryPtr library;
  SOFT_TRY(findLibrary(handle, library));
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = unsigned(library->kernels.size());
  return CUDA_SUCCESS;
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned int count, CUlibrary handle) {
  LibraryPtr library;
  SOFT_TRY(findLibrary(handle, library));
  if (!kernels || !count) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < std::min<size_t>(count, library->kernels.size()); ++i) {
    kernels[i] = library->kernels[i]->handle;
  }
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetModule(CUmodule* out, CUlibrary handle) {
  SOFT_CONTEXT(context);
  LibraryPtr library;
  SOFT_TRY(findLibrary(handle, library));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  ModulePtr module;
  SOFT_TRY(library->module(context, module));
  *out = module->handle;
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary handle, const char* name) {
  SOFT_CONTEXT(context);
  LibraryPtr library;
  SOFT_TRY(findLibrary(handle, library));
  if (!name || (!address && !bytes)) return CUDA_ERROR_INVALID_VALUE;
  ModulePtr module;
  SOFT_TRY(library->module(context, module));
  const GlobalInfo* global = module->code->global(name);
  if (!global) return CUDA_ERROR_NOT_FOUND;
  if (address) *address = global->address;
  if (bytes) *bytes = global->size;
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetManaged(CUdeviceptr* address, size_t* bytes, CUlibrary handle, const char* name) {
  LibraryPtr library;
  SOFT_TRY(findLibrary(handle, library));
  if (!name || (!address && !bytes)) return CUDA_ERROR_INVALID_VALUE;
  const GlobalInfo* global = library->first->global(name);
  if (!global || !global->managed) return CUDA_ERROR_NOT_FOUND;
  if (address) *address = global->address;
  if (bytes) *bytes = global->size;
  return CUDA_SUCCESS;
}

CUresult cuLibraryGetUnifiedFunction(void**, CUlibrary, const char*) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuKernelGetFunction(CUfunction* out, CUkernel handle) {
  SOFT_CONTEXT(context);
  KernelPtr kernel;
  SOFT_TRY(findKernel(handle, kernel));
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  FunctionPtr function;
  SOFT_TRY(kernelFunction(*kernel, context, function));
  *out = function->handle;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetLibrary(CUlibrary* library, CUkernel handle) {
  KernelPtr kernel;
  SOFT_TRY(findKernel(handle, kernel));
  if (!library) return CUDA_ERROR_INVALID_VALUE;
  *library = kernel->libraryHandle;
  return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel handle, CUdevice device) {
  KernelPtr kernel;
  SOFT_TRY(findKernel(handle, kernel));
  if (!findDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  return functionAttribute(*kernel->info, *kernel->attributes[device], attribute, value);
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle, CUdevice device) {
  KernelPtr kernel;
  SOFT_TRY(findKernel(handle, kernel));
  if (!findDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  return setFunctionAttribute(*kernel->info, *kernel->attributes[device], attribute, value);
}

CUresult cuKernelSetCacheConfig(CUkernel handle, CUfunc_cache config, CUdevice device) {
  KernelPtr kernel;
  SOFT_TRY(findKernel(handle, kernel));
  if (!findDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  return config > CU_FUNC_CACHE_PREFER_EQUAL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuKernelGetName(const char** name, CUkernel handle) {
  KernelPtr kernel;
  SOFT_TRY(findKernel(handle, kernel));
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  *name = kernel->info->name.c_str();
  return CUDA_SUCCESS;
}

CUresult cuKernelGetParamInfo(CUkernel handle, size_t index, size_t* offset, size_t* bytes) {
  KernelPtr kernel;
  SOFT_TRY(findKernel(handle, kernel));
  return parameterInfo(*kernel->info, index, offset, bytes);
}
