// Green contexts (client/calls/green.h): what they are made of, and their streams. Events of all of their
// work: context_events.cpp.
#include "client/calls/green.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "client/capture.h"
#include "client/codec.h"
#include "client/entry.h"

namespace gpupool::client {
namespace {

using schema::SmSource;

HandleTable<GreenContext> greens{Kind::greenContext};
// CUDA has no call that ends one.
HandleTable<std::vector<SmSource>> descriptions{Kind::resourceDescription};

// ---- resources: where they come from stands in the part of a CUdevResource that is the driver's own ----

constexpr uint32_t kMark = 0x6d735047;

void write(CUdevResource& out, const SmSource& source, const CUdevSmResource& sm) {
  out = {};
  out.type = CU_DEV_RESOURCE_TYPE_SM;
  out.sm = sm;
  static_assert(sizeof kMark + sizeof source <= sizeof out._internal_padding);
  std::memcpy(out._internal_padding, &kMark, sizeof kMark);
  std::memcpy(out._internal_padding + sizeof kMark, &source, sizeof source);
}

CUresult read(const CUdevResource& in, SmSource& source) {
  if (in.type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  uint32_t mark = 0;
  std::memcpy(&mark, in._internal_padding, sizeof mark);
  std::memcpy(static_cast<void*>(&source), in._internal_padding + sizeof mark, sizeof source);
  return mark == kMark ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult whole(const SmSource& source, CUdevResource* out, CUdevResourceType type) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_DEV_RESOURCE_TYPE_SM) return CUDA_ERROR_INVALID_RESOURCE_TYPE;
  CUdevSmResource sm{};
  CUresult status = Session::get().await<"sessionSmResource">(CUcontext{nullptr}, &source, type, &sm);
  if (status == CUDA_SUCCESS) write(*out, source, sm);
  return status;
}

SmSource ofDevice(CUdevice device) {
  SmSource source{};
  source.device = static_cast<uint32_t>(sessionDevice(device));
  return source;
}

CUresult ofGreen(CUgreenCtx handle, SmSource& source) {
  GreenContext* green = nullptr;
  CUresult status = findGreen(handle, green);
  if (status == CUDA_SUCCESS) source = ofDevice(green->device);
  source.green = handle;
  return status;
}

uint32_t nextSplit() {
  static std::atomic<uint32_t> last{0};
  return last.fetch_add(1) + 1;
}

CUresult countGroups(const SmSource& source, unsigned* count) {
  size_t groups = 0;
  CUdevSmResource rest{};
  CUresult status = Session::get().await<"sessionSmSplit">(
      CUcontext{nullptr}, &source, 1u, static_cast<CUdevSmResource*>(nullptr), &groups, &rest);
  if (status == CUDA_SUCCESS) *count = static_cast<unsigned>(groups);
  return status;
}

CUresult split(SmSource source, CUdevResource* result, unsigned* count, CUdevResource* remaining) {
  std::array<CUdevSmResource, schema::kMostSmGroups> groups;
  size_t made = source.wanted = std::min(*count, schema::kMostSmGroups);
  source.split = nextSplit();
  CUdevSmResource rest{};
  CUresult status =
      Session::get().await<"sessionSmSplit">(CUcontext{nullptr}, &source, 0u, groups.data(), &made, &rest);
  if (status != CUDA_SUCCESS) return status;
  made = std::min<size_t>(made, source.wanted);
  for (source.part = 0; source.part < made; ++source.part)
    write(result[source.part], source, groups[source.part]);
  *count = static_cast<unsigned>(made);
  if (remaining == nullptr) return CUDA_SUCCESS;
  source.part = schema::kSmRest;
  *remaining = {};  // of the invalid type, if nothing remains
  if (rest.smCount != 0) write(*remaining, source, rest);
  return CUDA_SUCCESS;
}

// ---- life ----

// The worker's side. On success the green context has its context and its default stream.
CUresult makeRemote(CUgreenCtx handle, GreenContext& green, CUcontext primary,
                    const std::vector<SmSource>& parts, unsigned flags) {
  Session& session = Session::get();
  CUresult status = session.await<"sessionGreenCreate">(primary, &handle, green.device, parts.data(),
                                                        static_cast<unsigned>(parts.size()), flags);
  if (status != CUDA_SUCCESS) return status;
  CUstream stream = nullptr;
  status = makeStream(primary, CU_STREAM_NON_BLOCKING, 0, stream, handle);
  green.context = status == CUDA_SUCCESS ? contexts().addGreen(green.device, handle, stream) : nullptr;
  if (green.context != nullptr) return CUDA_SUCCESS;
  session.await<"cuGreenCtxDestroy">(primary, handle);  // and its stream
  return status == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : status;
}

CUresult make(CUgreenCtx* out, const std::vector<SmSource>& parts, CUdevice device, unsigned flags) {
  const auto made = greens.prepare(device);
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto handle = fromId<CUgreenCtx>(made.id);
  CUcontext primary = nullptr;
  CUresult status = contexts().primaryRetain(&primary, device);
  if (status == CUDA_SUCCESS) {
    made.object->retains = true;
    status = makeRemote(handle, *made.object, primary, parts, flags);
    if (status != CUDA_SUCCESS) contexts().primaryRelease(device);
  }
  if (status != CUDA_SUCCESS) {
    greens.discard(made.id);
    return status;
  }
  greens.publish(made.id);
  *out = handle;
  return CUDA_SUCCESS;
}

template <class F>
void forEachStreamOf(CUgreenCtx handle, const GreenContext& green, F&& f) {
  CUcontext primary = nullptr;
  if (contexts().primaryHandle(&primary, green.device) != CUDA_SUCCESS) return;
  std::vector<StreamRef> mine;
  forEachStream(primary, [&](const StreamRef& ref) {
    if (ref.stream->green == handle) mine.push_back(ref);
  });
  for (const StreamRef& ref : mine) f(ref);
}

// False: another thread has ended it.
bool end(CUgreenCtx handle, GreenContext& green, CUresult& status) {
  if (!green.context->alive.exchange(false)) return false;
  forEachStreamOf(handle, green, [](const StreamRef& ref) {
    waitFor(ref, ref.stream->posted.load());
    captureDropped(*ref.stream);
    endsWithContext(ref.wire);
    endStream(ref);
  });
  CUcontext primary = nullptr;
  contexts().primaryHandle(&primary, green.device);
  status = Session::get().await<"cuGreenCtxDestroy">(primary, handle);
  return true;
}

}  // namespace

CUresult findGreen(CUgreenCtx handle, GreenContext*& out) {
  out = greens.find(toId(handle));
  if (out == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return out->context->alive.load(std::memory_order_acquire) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult makeGreenStream(CUgreenCtx handle, unsigned flags, int priority, CUstream& out) {
  GreenContext* green = nullptr;
  CUresult status = findGreen(handle, green);
  if (status != CUDA_SUCCESS) return status;
  CUcontext primary = nullptr;
  if (status = contexts().primaryHandle(&primary, green->device); status != CUDA_SUCCESS) return status;
  Context* context = contexts().find(primary);
  if (status = clampPriority(*context, priority); status != CUDA_SUCCESS) return status;
  return makeStream(primary, flags, priority, out, handle);
}

CUcontext contextOf(CUgreenCtx handle) {
  const GreenContext* green = greens.find(toId(handle));
  return green == nullptr ? nullptr : green->context->handle;
}

void endGreenContexts(CUdevice device) {
  greens.forEach([&](uint64_t id, GreenContext& green) {
    CUresult status = CUDA_SUCCESS;
    if (green.device == device) end(fromId<CUgreenCtx>(id), green, status);
  });
}

namespace custom {

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource* resource, CUdevResourceType type) {
  if (device < 0 || device >= contexts().deviceCount()) return CUDA_ERROR_INVALID_DEVICE;
  return whole(ofDevice(device), resource, type);
}
CUresult cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource* resource, CUdevResourceType type) {
  SmSource source{};
  CUresult status = ofGreen(green, source);
  return status == CUDA_SUCCESS ? whole(source, resource, type) : status;
}
CUresult cuCtxGetDevResource(CUcontext handle, CUdevResource* resource, CUdevResourceType type) {
  if (const CUgreenCtx green = contexts().greenOf(handle); green != nullptr)
    return custom::cuGreenCtxGetDevResource(green, resource, type);
  Context* context = nullptr;
  if (contexts().resolve(handle, &context) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_CONTEXT;
  return whole(ofDevice(context->device), resource, type);
}

CUresult cuDevSmResourceSplitByCount(CUdevResource* result, unsigned* count, const CUdevResource* input,
                                     CUdevResource* remaining, unsigned flags, unsigned minCount) {
  constexpr unsigned kFlags =
      CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING | CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE;
  if (count == nullptr || input == nullptr || (flags & ~kFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  SmSource source{};
  if (CUresult status = read(*input, source); status != CUDA_SUCCESS) return status;
  // Parts can be split only as all of the green context that is made of them.
  if (source.split != 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  if (minCount > input->sm.smCount || (result != nullptr && *count == 0)) return CUDA_ERROR_INVALID_VALUE;
  if (GreenContext* green = nullptr;
      source.green != nullptr && findGreen(source.green, green) != CUDA_SUCCESS)
    return CUDA_ERROR_INVALID_VALUE;
  source.flags = flags;
  source.minCount = minCount;
  return result == nullptr ? countGroups(source, count) : split(source, result, count, remaining);
}

CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* out, CUdevResource* resources, unsigned count) {
  if (out == nullptr || resources == nullptr || count == 0 || count > schema::kMostSmGroups)
    return CUDA_ERROR_INVALID_VALUE;
  std::vector<SmSource> parts(count);
  for (unsigned i = 0; i < count; ++i) {
    if (CUresult status = read(resources[i], parts[i]); status != CUDA_SUCCESS) return status;
    const bool apart = parts[i].device != parts[0].device || parts[i].split == 0 || parts[0].split == 0;
    if (i != 0 && apart) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
  }
  const auto made = descriptions.create(std::move(parts));
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = fromId<CUdevResourceDesc>(made.id);
  return CUDA_SUCCESS;
}

CUresult cuGreenCtxCreate(CUgreenCtx* out, CUdevResourceDesc description, CUdevice device, unsigned flags) {
  const std::vector<SmSource>* parts = descriptions.find(toId(description));
  if (out == nullptr || parts == nullptr || flags != CU_GREEN_CTX_DEFAULT_STREAM)
    return CUDA_ERROR_INVALID_VALUE;
  if (device < 0 || device >= contexts().deviceCount()) return CUDA_ERROR_INVALID_DEVICE;
  if (parts->front().device != static_cast<uint32_t>(sessionDevice(device))) return CUDA_ERROR_INVALID_VALUE;
  return make(out, *parts, device, flags);
}
CUresult cuGreenCtxDestroy(CUgreenCtx handle) {
  GreenContext* green = nullptr;
  CUresult status = findGreen(handle, green);
  if (green == nullptr) return status;
  if (status == CUDA_SUCCESS && !end(handle, *green, status)) status = CUDA_ERROR_CONTEXT_IS_DESTROYED;
  // Also where a reset of the device has ended it.
  const CUresult released =
      green->retains.exchange(false) ? contexts().primaryRelease(green->device) : CUDA_SUCCESS;
  return status == CUDA_SUCCESS ? released : status;
}
CUresult cuCtxFromGreenCtx(CUcontext* out, CUgreenCtx handle) {
  GreenContext* green = nullptr;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUresult status = findGreen(handle, green);
  if (status == CUDA_SUCCESS) *out = green->context->handle;
  return status;
}
CUresult cuGreenCtxGetId(CUgreenCtx handle, unsigned long long* out) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (handle == nullptr) handle = contexts().greenOf(threadState().current);
  GreenContext* green = nullptr;
  CUresult status = findGreen(handle, green);
  if (status == CUDA_SUCCESS) *out = green->context->id.load();
  return status;
}

CUresult cuGreenCtxStreamCreate(CUstream* out, CUgreenCtx green, unsigned flags, int priority) {
  if (out == nullptr || flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  return makeGreenStream(green, flags, priority, *out);
}
CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx* out) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS && out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (status == CUDA_SUCCESS) *out = ref.stream->green;
  return status;
}

}  // namespace custom
}  // namespace gpupool::client
