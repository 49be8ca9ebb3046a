// The linker (Module Management). Inputs travel as images by content; the linked image is read back in pieces
// and kept until the link is destroyed, because cuLinkComplete hands out a pointer to it.
#include <map>
#include <memory>
#include <string>

#include "client/calls/jit_options.h"
#include "client/code.h"
#include "client/entry.h"

namespace gpupool::client {
namespace {

constexpr size_t kPiece = size_t{256} << 10;

struct Link {
  CUcontext context = nullptr;
  std::unique_ptr<JitOptions> options;  // its log buffers are the application's, valid as long as the link
  std::vector<unsigned char> result;
};

struct Links {
  std::mutex mutex;
  std::map<uint64_t, std::shared_ptr<Link>> byHandle;
};
Links& all() {
  static auto* instance = new Links;
  return *instance;
}

std::shared_ptr<Link> find(CUlinkState state) {
  std::lock_guard lock(all().mutex);
  auto found = all().byHandle.find(toId(state));
  return found == all().byHandle.end() ? nullptr : found->second;
}

CUresult create(unsigned count, CUjit_option* names, void** values, CUlinkState* out) {
  Context* context = nullptr;
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  if (out == nullptr || (count != 0 && (names == nullptr || values == nullptr)))
    return CUDA_ERROR_INVALID_VALUE;
  auto link = std::make_shared<Link>();
  link->context = context->handle;
  link->options = std::make_unique<JitOptions>(count, names, values);
  auto handle = mintPlain<CUlinkState>();
  if (handle == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  status = Session::get().await<"sessionLinkCreate">(link->context, link->options->names.data(),
                                                     link->options->values.data(), link->options->count(),
                                                     &handle);
  if (status != CUDA_SUCCESS) {
    dropPlain(handle);
    return status;
  }
  std::lock_guard lock(all().mutex);
  all().byHandle[toId(handle)] = link;
  *out = handle;
  return CUDA_SUCCESS;
}

CUresult add(CUlinkState state, CUjitInputType type, const void* data, size_t bytes, const char* name,
             unsigned count, CUjit_option* names, void** values) {
  auto link = find(state);
  if (link == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (data == nullptr || bytes == 0 || bytes > kMaxImageBytes) return CUDA_ERROR_INVALID_VALUE;
  std::span image(static_cast<const std::byte*>(data), bytes);
  if (type == CU_JIT_INPUT_PTX)  // the worker adds the terminator
    while (!image.empty() && image.back() == std::byte{0}) image = image.first(image.size() - 1);
  if (image.empty()) return CUDA_ERROR_INVALID_PTX;
  schema::ImageName content;
  CUresult status = sendImage(link->context, image, content);
  if (status != CUDA_SUCCESS) return status;
  JitOptions options(count, names, values);
  JitOptions& logs = *link->options;
  status = Session::get().await<"sessionLinkAdd">(
      link->context, state, type, content, name == nullptr ? "" : name, options.names.data(),
      options.values.data(), options.count(), logs.info, logs.infoBytes, logs.error, logs.errorBytes);
  logs.finish();
  return status;
}

CUresult addFile(CUlinkState state, CUjitInputType type, const char* path, unsigned count,
                 CUjit_option* names, void** values) {
  std::vector<char> bytes;
  if (find(state) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (!readFile(path, bytes)) return CUDA_ERROR_FILE_NOT_FOUND;
  return add(state, type, bytes.data(), bytes.size() - 1, path, count, names, values);
}

CUresult readResult(CUlinkState state, Link& link, size_t bytes) {
  if (bytes > kMaxImageBytes) return CUDA_ERROR_INVALID_IMAGE;
  link.result.resize(bytes);
  for (size_t at = 0; at < bytes;) {
    size_t n = std::min(kPiece, bytes - at);
    CUresult status =
        Session::get().await<"sessionLinkRead">(link.context, state, at, link.result.data() + at, &n);
    if (status != CUDA_SUCCESS) return status;
    if (n == 0) return CUDA_ERROR_INVALID_IMAGE;
    at += n;
  }
  return CUDA_SUCCESS;
}

}  // namespace

namespace custom {

CUresult cuLinkCreate_v2(unsigned count, CUjit_option* names, void** values, CUlinkState* out) {
  return create(count, names, values, out);
}
CUresult cuLinkCreate(unsigned count, CUjit_option* names, void** values, CUlinkState* out) {
  return create(count, names, values, out);
}
CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void* data, size_t bytes, const char* name,
                          unsigned count, CUjit_option* names, void** values) {
  return add(state, type, data, bytes, name, count, names, values);
}
CUresult cuLinkAddData(CUlinkState state, CUjitInputType type, void* data, size_t bytes, const char* name,
                       unsigned count, CUjit_option* names, void** values) {
  return add(state, type, data, bytes, name, count, names, values);
}
CUresult cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char* path, unsigned count,
                          CUjit_option* names, void** values) {
  return addFile(state, type, path, count, names, values);
}
CUresult cuLinkAddFile(CUlinkState state, CUjitInputType type, const char* path, unsigned count,
                       CUjit_option* names, void** values) {
  return addFile(state, type, path, count, names, values);
}

CUresult cuLinkComplete(CUlinkState state, void** image, size_t* bytes) {
  auto link = find(state);
  if (link == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  size_t size = 0;
  JitOptions& logs = *link->options;
  CUresult status = Session::get().await<"sessionLinkComplete">(
      link->context, state, logs.info, logs.infoBytes, logs.error, logs.errorBytes, &size);
  logs.finish();
  if (status == CUDA_SUCCESS) status = readResult(state, *link, size);
  if (status != CUDA_SUCCESS) return status;
  *image = link->result.data();
  if (bytes != nullptr) *bytes = size;
  return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState state) {
  std::shared_ptr<Link> link;
  {
    std::lock_guard lock(all().mutex);
    auto found = all().byHandle.find(toId(state));
    if (found == all().byHandle.end()) return CUDA_ERROR_INVALID_HANDLE;
    link = found->second;
    all().byHandle.erase(found);
  }
  dropPlain(state);
  return Session::get().await<"cuLinkDestroy">(link->context, state);
}

}  // namespace custom
}  // namespace gpupool::client
