// Driver manual: Module Management, and the function queries of Execution Control.
#include "server/softgpu/api/module.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "server/softgpu/api/capture.h"

namespace gpupool::softgpu::api {
namespace {

// GPUPOOL_SOFT_LOAD, see device.h.
bool loadingWaits() {
  static const bool waits = [] {
    const char* how = std::getenv("GPUPOOL_SOFT_LOAD");
    return how != nullptr && std::strcmp(how, "waits") == 0;
  }();
  return waits;
}

CUresult loadModule(CUmodule* out, const void* image, unsigned count, CUjit_option* options, void** values) {
  SOFT_CONTEXT(context);
  if (!out || !image) return CUDA_ERROR_INVALID_VALUE;
  JitOptions jit(count, options, values);
  CodeImage source;
  std::string log;
  if (CUresult result = readImage(image, source, log); result != CUDA_SUCCESS) {
    jit.error(log);
    return result;
  }
  std::shared_ptr<Code> code;
  SOFT_TRY(loadCode(source, context->deviceObject(), context.get(), nullptr, jit, code));
  if (loadingWaits()) context->drainAlone();
  *out = makeModule(context, std::move(code))->handle;
  return CUDA_SUCCESS;
}

CUresult findModule(CUmodule handle, ModulePtr& module) {
  SOFT_CONTEXT(context);
  module = table<Module>().find(handle);
  return module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// Queries on functions need no current context natively either, as long as the driver runs.
CUresult findFunction(CUfunction handle, FunctionPtr& function) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  function = table<Function>().find(handle);
  return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace
}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu;
using namespace gpupool::softgpu::api;

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return loadModule(module, image, 0, nullptr, nullptr);
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int count, CUjit_option* options,
                            void** values) {
  return loadModule(module, image, count, options, values);
}

CUresult cuModuleLoadFatBinary(CUmodule* module, const void* image) {
  return loadModule(module, image, 0, nullptr, nullptr);
}

CUresult cuModuleLoad(CUmodule* module, const char* path) {
  SOFT_CONTEXT(context);
  if (!module || !path) return CUDA_ERROR_INVALID_VALUE;
  std::ifstream file(path, std::ios::binary);
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  return loadModule(module, bytes.c_str(), 0, nullptr, nullptr);
}

CUresult cuModuleUnload(CUmodule handle) {
  ModulePtr module;
  SOFT_TRY(findModule(handle, module));
  if (module->library) return CUDA_ERROR_NOT_PERMITTED;  // a library's goes with it
  SOFT_TRY(forbidDuringCapture(*module->context));
  // What may still run it finishes first.
  CUresult result = module->context->synchronize();
  dropModule(module);
  return result;
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  if (!mode) return CUDA_ERROR_INVALID_VALUE;
  const char* wanted = std::getenv("CUDA_MODULE_LOADING");
  *mode = wanted && !std::strcmp(wanted, "EAGER") ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule handle, const char* name) {
  ModulePtr module;
  SOFT_TRY(findModule(handle, module));
  if (!out || !name || !*name) return CUDA_ERROR_INVALID_VALUE;
  auto function = module->function(name);
  if (!function) return CUDA_ERROR_NOT_FOUND;
  *out = function->handle;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned int* count, CUmodule handle) {
  ModulePtr module;
  SOFT_TRY(findModule(handle, module));
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = unsigned(module->code->program->kernels().size());
  return CUDA_SUCCESS;
}

CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned int count, CUmodule handle) {
  ModulePtr module;
  SOFT_TRY(findModule(handle, module));
  if (!functions || !count) return CUDA_ERROR_INVALID_VALUE;
  auto kernels = module->code->program->kernels();
  for (size_t i = 0; i < std::min<size_t>(count, kernels.size()); ++i) {
    functions[i] = module->function(kernels[i].name)->handle;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* address, size_t* bytes, CUmodule handle, const char* name) {
  ModulePtr module;
  SOFT_TRY(findModule(handle, module));
  if (!name || (!address && !bytes)) return CUDA_ERROR_INVALID_VALUE;
  const GlobalInfo* global = module->code->global(name);
  if (!global) return CUDA_ERROR_NOT_FOUND;
  if (address) *address = global->address;
  if (bytes) *bytes = global->size;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetTexRef(CUtexref*, CUmodule, const char*) { return CUDA_ERROR_NOT_FOUND; }
CUresult cuModuleGetSurfRef(CUsurfref*, CUmodule, const char*) { return CUDA_ERROR_NOT_FOUND; }

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction handle) {
  FunctionPtr function;
  if (table<Function>().owns(handle)) {
    SOFT_TRY(findFunction(handle, function));
  } else {
    SOFT_CONTEXT(context);
    SOFT_TRY(resolveFunction(handle, context, function));
  }
  return functionAttribute(*function->info, *function->attributes, attribute, value);
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  SOFT_CONTEXT(context);
  FunctionPtr function;
  SOFT_TRY(resolveFunction(handle, context, function));
  return setFunctionAttribute(*function->info, *function->attributes, attribute, value);
}

CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) {
  SOFT_CONTEXT(context);
  FunctionPtr function;
  SOFT_TRY(resolveFunction(handle, context, function));
  return config > CU_FUNC_CACHE_PREFER_EQUAL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuFuncSetSharedMemConfig(CUfunction handle, CUsharedconfig config) {
  SOFT_CONTEXT(context);
  FunctionPtr function;
  SOFT_TRY(resolveFunction(handle, context, function));
  return config > CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuFuncGetModule(CUmodule* module, CUfunction handle) {
  FunctionPtr function;
  SOFT_TRY(findFunction(handle, function));
  if (!module) return CUDA_ERROR_INVALID_VALUE;
  *module = function->module;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char** name, CUfunction handle) {
  FunctionPtr function;
  SOFT_TRY(findFunction(handle, function));
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  *name = function->info->name.c_str();
  return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t* offset, size_t* bytes) {
  FunctionPtr function;
  SOFT_TRY(findFunction(handle, function));
  return parameterInfo(*function->info, index, offset, bytes);
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction handle) {
  FunctionPtr function;
  SOFT_TRY(findFunction(handle, function));
  if (!state) return CUDA_ERROR_INVALID_VALUE;
  *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction handle) {
  FunctionPtr function;
  return findFunction(handle, function);
}
