// Kernels and functions: their names, attributes and preferences.
#include "client/code.h"
#include "client/entry.h"
#include "client/functions.h"

namespace gpupool::client {
namespace {

Context* currentOrNull() {
  Context* context = nullptr;
  contexts().resolve(nullptr, &context);
  return context;
}

CUresult attributeOf(CUfunction handle, const Context* context, CUdevice device,
                     CUfunction_attribute attribute, int* value) {
  if (value == nullptr || attribute < 0 || attribute >= schema::kFunctionAttributes)
    return CUDA_ERROR_INVALID_VALUE;
  Function* function = findFunction(handle);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  schema::FunctionInfo info;
  CUresult status = functionInfo(handle, *function, context, device, info);
  if (status != CUDA_SUCCESS) return status;
  if ((info.known >> attribute & 1) == 0) return CUDA_ERROR_INVALID_VALUE;
  *value = info.attributes[attribute];
  return CUDA_SUCCESS;
}

CUresult parameterInfo(CUfunction handle, size_t index, size_t* offset, size_t* size) {
  if (offset == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Function* function = findFunction(handle);
  CUresult status = describe(handle, *function, homeOf(*function, currentOrNull()));
  if (status != CUDA_SUCCESS) return status;
  const auto& layout = function->state->layout();
  if (index >= layout.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = layout[index].offset;
  if (size != nullptr) *size = layout[index].size;
  return CUDA_SUCCESS;
}

// Libraries set the same value before every launch: only what may change something is sent. What is known is
// forgotten before, so that no launch is posted behind the change by what held before it, and after, for what
// was asked meanwhile.
template <class Send>
CUresult setAttribute(KernelState& state, const KernelState::Setting& setting, Send&& send) {
  if (state.isSet(setting)) return CUDA_SUCCESS;
  state.attributesChange();
  CUresult status = send();
  state.attributesChange();
  if (status == CUDA_SUCCESS) state.noteSetting(setting);
  return status;
}

}  // namespace

namespace custom {

CUresult cuKernelGetFunction(CUfunction* out, CUkernel kernel) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  if (kernels.find(toId(kernel)) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return out == nullptr ? CUDA_ERROR_INVALID_VALUE : functionIn(*context, kernel, out);
}
CUresult cuKernelGetLibrary(CUlibrary* out, CUkernel kernel) {
  Function* entry = kernels.find(toId(kernel));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = fromId<CUlibrary>(entry->library);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetModule(CUmodule* out, CUfunction function) {
  Function* entry = functions.find(toId(function));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (entry->kernel != nullptr)
    return moduleIn(*contexts().find(entry->context), fromId<CUlibrary>(entry->library), out);
  *out = fromId<CUmodule>(entry->library);
  return CUDA_SUCCESS;
}

CUresult cuKernelGetAttribute(int* value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
  if (kernels.find(toId(kernel)) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  return attributeOf(reinterpret_cast<CUfunction>(kernel), currentOrNull(), device, attribute, value);
}
// Of the calls on functions, those that launch and the occupancy's take a kernel, too; these do not.
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  Function* entry = functions.find(toId(function));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const Context* context = homeOf(*entry, nullptr);
  return attributeOf(function, context, context->device, attribute, value);
}
CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  if (kernels.find(toId(kernel)) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return parameterInfo(reinterpret_cast<CUfunction>(kernel), index, offset, size);
}
CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* size) {
  if (functions.find(toId(function)) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return parameterInfo(function, index, offset, size);
}
CUresult cuKernelGetName(const char** name, CUkernel kernel) {
  Function* entry = kernels.find(toId(kernel));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return name == nullptr ? CUDA_ERROR_INVALID_VALUE
                         : functionName(reinterpret_cast<CUfunction>(kernel), *entry, nullptr, name);
}
CUresult cuFuncGetName(const char** name, CUfunction function) {
  Function* entry = functions.find(toId(function));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return name == nullptr ? CUDA_ERROR_INVALID_VALUE : functionName(function, *entry, entry->context, name);
}
CUresult cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction function) {
  if (functions.find(toId(function)) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (state == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
  Function* entry = kernels.find(toId(kernel));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  const Context* context = currentOrNull();
  const bool here = context != nullptr && context->device == device;
  return setAttribute(*entry->state,
                      {{here ? context->version.load() : 0, toId(kernel)}, device, attribute, value}, [&] {
                        return Session::get().await<"cuKernelSetAttribute">(
                            context != nullptr ? context->handle : nullptr, attribute, value, kernel, device);
                      });
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  Function* entry = functions.find(toId(function));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  context = homeOf(*entry, context);
  return setAttribute(
      *entry->state, {{context->version.load(), toId(function)}, context->device, attribute, value}, [&] {
        return Session::get().await<"cuFuncSetAttribute">(context->handle, function, attribute, value);
      });
}
CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice device) {
  Function* entry = kernels.find(toId(kernel));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  const Context* context = currentOrNull();
  entry->state->attributesChange();
  return Session::get().await<"cuKernelSetCacheConfig">(context != nullptr ? context->handle : nullptr,
                                                        kernel, config, device);
}
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  Function* entry = functions.find(toId(function));
  if (entry == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  entry->state->attributesChange();
  return Session::get().await<"cuFuncSetCacheConfig">(homeOf(*entry, context)->handle, function, config);
}
CUresult cuFuncSetSharedMemConfig(CUfunction function, CUsharedconfig) {
  return functions.find(toId(function)) == nullptr ? CUDA_ERROR_INVALID_HANDLE
                                                   : CUDA_SUCCESS;  // no effect on these devices
}

}  // namespace custom
}  // namespace gpupool::client
