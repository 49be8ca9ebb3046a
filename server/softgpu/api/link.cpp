// Driver manual: Module Management, the JIT linker. What is linked is PTX; the result is a fatbin that holds
// all of it, and loading links. Whether it does is tried out at cuLinkComplete, where the driver reports it.
#include <cstring>
#include <fstream>
#include <iterator>

#include "server/softgpu/api/module.h"

namespace gpupool::softgpu::api {
namespace {

struct Link {
  using Handle = CUlinkState;
  static constexpr Tag kTag = Tag::link;
  Handle handle = nullptr;
  std::mutex mutex;
  CodeImage image;
  std::vector<std::byte> output;
  Device* device = nullptr;
  // The caller's arrays: the logs among them are written until cuLinkDestroy.
  unsigned count = 0;
  CUjit_option* options = nullptr;
  void** values = nullptr;
};

CUresult add(Link& link, CUjitInputType type, const void* data, size_t size) {
  if (!data || !size) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(link.mutex);
  if (!link.output.empty()) return CUDA_ERROR_INVALID_VALUE;
  JitOptions jit(link.count, link.options, link.values);
  std::string log;
  CUresult result = CUDA_SUCCESS;
  switch (type) {
    case CU_JIT_INPUT_PTX: {
      auto* text = static_cast<const char*>(data);
      CodeImage one;
      result = readImage(std::string(text, strnlen(text, size)).c_str(), one, log);
      if (result == CUDA_SUCCESS) result = checkPtx(one.ptx.front(), *link.device, jit);
      if (result != CUDA_SUCCESS) break;
      link.image.ptx.push_back(std::move(one.ptx.front()));
      return CUDA_SUCCESS;
    }
    case CU_JIT_INPUT_FATBINARY:
      result = readFatbin(data, size, link.image, log);
      break;
    case CU_JIT_INPUT_CUBIN:
    case CU_JIT_INPUT_OBJECT:
    case CU_JIT_INPUT_LIBRARY:
      log = "the software GPU links PTX and fatbins with PTX only";
      result = CUDA_ERROR_NO_BINARY_FOR_GPU;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  if (result != CUDA_SUCCESS && !log.empty()) jit.error(log);
  return result;
}

}  // namespace
}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuLinkCreate_v2(unsigned int count, CUjit_option* options, void** values, CUlinkState* out) {
  SOFT_CONTEXT(context);
  if (!out || (count && (!options || !values))) return CUDA_ERROR_INVALID_VALUE;
  auto link = std::make_shared<Link>();
  link->device = &context->deviceObject();
  link->count = count;
  link->options = options;
  link->values = values;
  *out = table<Link>().add(link);
  return CUDA_SUCCESS;
}
CUresult cuLinkCreate(unsigned int count, CUjit_option* options, void** values, CUlinkState* out) {
  return cuLinkCreate_v2(count, options, values, out);
}

CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void* data, size_t size, const char*,
                          unsigned int, CUjit_option*, void**) {
  auto link = table<Link>().find(state);
  return link ? add(*link, type, data, size) : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuLinkAddData(CUlinkState state, CUjitInputType type, void* data, size_t size, const char* name,
                       unsigned int count, CUjit_option* options, void** values) {
  return cuLinkAddData_v2(state, type, data, size, name, count, options, values);
}

CUresult cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char* path, unsigned int,
                          CUjit_option*, void**) {
  auto link = table<Link>().find(state);
  if (!link) return CUDA_ERROR_INVALID_HANDLE;
  if (!path) return CUDA_ERROR_INVALID_VALUE;
  std::ifstream file(path, std::ios::binary);
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  return add(*link, type, bytes.data(), bytes.size());
}
CUresult cuLinkAddFile(CUlinkState state, CUjitInputType type, const char* path, unsigned int count,
                       CUjit_option* options, void** values) {
  return cuLinkAddFile_v2(state, type, path, count, options, values);
}

CUresult cuLinkComplete(CUlinkState state, void** out, size_t* size) {
  SOFT_CONTEXT(context);
  auto link = table<Link>().find(state);
  if (!link) return CUDA_ERROR_INVALID_HANDLE;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(link->mutex);
  if (link->image.ptx.empty()) return CUDA_ERROR_INVALID_VALUE;
  JitOptions jit(link->count, link->options, link->values);
  std::shared_ptr<Code> trial;
  SOFT_TRY(loadCode(link->image, context->deviceObject(), context.get(), nullptr, jit, trial));
  link->output = writeFatbin(link->image.ptx);
  *out = link->output.data();
  if (size) *size = link->output.size();
  return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState state) {
  return table<Link>().take(state) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
