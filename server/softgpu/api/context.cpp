// Driver manual: Primary Context Management, Context Management, Peer Context Memory Access.
#include "server/softgpu/api/context.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "server/softgpu/api/callback.h"
#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/thread_state.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu::api {
namespace {

constexpr auto kTeardown = std::chrono::seconds(10);
constexpr unsigned kApiVersion = 3020;
constexpr int kLeastPriority = 0, kGreatestPriority = -5;

std::atomic<uint64_t> nextContextId{1};

struct ContextStack {
  std::vector<ContextPtr> contexts;
};
std::vector<ContextPtr>& stack() { return threadState<ContextStack>().contexts; }

std::mutex& primaryMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

CUresult usable(const ContextPtr& context) {
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->active.load(std::memory_order_acquire)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return context->sticky.load(std::memory_order_acquire);
}

void activate(Context& context) {
  context.id = nextContextId++;
  context.sticky = CUDA_SUCCESS;
  context.aborting = false;
  auto self = context.shared_from_this();
  context.legacy = std::make_shared<Stream>(self, 0, 0);
  context.legacy->isLegacy = true;
  context.active.store(true, std::memory_order_release);
}

// Everything the context holds goes; primary contexts can be activated again.
void tearDown(Context& context) {
  context.active.store(false, std::memory_order_release);
  context.aborting = true;
  std::vector<FencePtr> tails;
  {
    std::lock_guard lock(context.order);
    for (auto& weak : context.streams) {
      if (auto stream = weak.lock()) tails.push_back(stream->tail());
    }
    if (context.legacy) tails.push_back(context.legacy->tail());
    context.gates.clear();
  }
  auto deadline = Fence::Clock::now() + kTeardown;
  bool drained = true;
  for (auto& tail : tails) {
    auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Fence::Clock::now());
    if (tail && !tail->waitFor(std::max(left, std::chrono::milliseconds(0)))) drained = false;
  }
  flushOutput();
  releaseStreams(context);
  releaseEvents(context);
  if (!drained) {
    // A kernel that does not end cannot be stopped here; its memory must stay.
    std::fprintf(stderr, "gpupool: a kernel still runs in a destroyed context; its memory is not freed\n");
  } else {
    releaseModules(context);
    releaseObjects(context);
    releaseArrays(context);
    releaseMemory(context);
  }
  std::lock_guard lock(context.settings);
  context.legacy = nullptr;
  context.limits.clear();
  context.peers.clear();
  context.cacheConfig = CU_FUNC_CACHE_PREFER_NONE;
}

CUresult createContext(CUcontext* out, unsigned flags, CUdevice device) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  if (!findDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  unsigned scheduling = flags & CU_CTX_SCHED_MASK;
  if ((flags & ~unsigned(CU_CTX_FLAGS_MASK)) || (scheduling & (scheduling - 1)))
    return CUDA_ERROR_INVALID_VALUE;
  auto context = std::make_shared<Context>();
  context->device = device;
  context->flags = flags | CU_CTX_MAP_HOST;
  *out = table<Context>().add(context);
  activate(*context);
  stack().push_back(context);
  return CUDA_SUCCESS;
}

bool isAssertion(const std::string& line) {
  return line.find("Assertion `") != std::string::npos && line.find(" failed.") != std::string::npos &&
         line.find("thread: [") != std::string::npos;
}

}  // namespace

ContextPtr currentOrNull() { return stack().empty() ? nullptr : stack().back(); }

CUresult currentContext(ContextPtr& context) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (insideCallback()) return CUDA_ERROR_NOT_PERMITTED;
  if (stack().empty() || !stack().back()) return CUDA_ERROR_INVALID_CONTEXT;
  context = stack().back();
  return usable(context);
}

CUresult namedContext(CUcontext handle, ContextPtr& context) {
  if (!handle) return currentContext(context);
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  context = table<Context>().find(handle);
  return usable(context);
}

std::vector<FencePtr> Context::tails() const {
  std::vector<FencePtr> all;
  for (auto& weak : streams) {
    if (auto stream = weak.lock()) all.push_back(stream->tail());
  }
  if (legacy) all.push_back(legacy->tail());
  std::erase(all, nullptr);
  return all;
}

CUresult Context::synchronize() {
  std::vector<FencePtr> open;
  {
    std::lock_guard lock(order);
    open = tails();
  }
  for (auto& tail : open) tail->wait();
  flushOutput();
  return sticky.load();
}

void Context::drainAlone() {
  std::lock_guard lock(order);
  for (auto& tail : tails()) tail->wait();
}

// What the assertion said is out before any call reports it.
void Context::fail(CUresult error) {
  if (error == CUDA_ERROR_ASSERT) flushOutput();
  CUresult none = CUDA_SUCCESS;
  sticky.compare_exchange_strong(none, error);
}

std::shared_ptr<Stream> Context::makeStream(unsigned streamFlags, int priority) {
  priority = std::clamp(priority, kGreatestPriority, kLeastPriority);
  auto stream = std::make_shared<Stream>(shared_from_this(), streamFlags, priority);
  std::lock_guard lock(order);
  streams.push_back(stream);
  return stream;
}

void flushOutput() {
  std::string text = takeOutput();
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.find('\n', begin);
    end = end == std::string::npos ? text.size() : end + 1;
    std::string line = text.substr(begin, end - begin);
    std::fwrite(line.data(), 1, line.size(), isAssertion(line) ? stderr : stdout);
    begin = end;
  }
  if (!text.empty()) std::fflush(stdout);
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice ordinal) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  Device* device = findDevice(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(primaryMutex());
  Context& primary = *device->primary;
  if (!primary.active) activate(primary);
  ++primary.retained;
  *out = primary.handle;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  Device* device = findDevice(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard lock(primaryMutex());
  Context& primary = *device->primary;
  if (!primary.retained) return CUDA_ERROR_INVALID_CONTEXT;
  if (--primary.retained == 0) tearDown(primary);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }

CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  Device* device = findDevice(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard lock(primaryMutex());
  Context& primary = *device->primary;
  if (primary.active) tearDown(primary);
  // Whoever retained it still counts; the next retain makes a new state.
  primary.retained = 0;
  primary.flags = CU_CTX_MAP_HOST;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) { return cuDevicePrimaryCtxReset_v2(device); }

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned int flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  Device* device = findDevice(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  unsigned scheduling = flags & CU_CTX_SCHED_MASK;
  if ((flags & ~unsigned(CU_CTX_FLAGS_MASK)) || (scheduling & (scheduling - 1)))
    return CUDA_ERROR_INVALID_VALUE;
  device->primary->flags = flags;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags) {
  return cuDevicePrimaryCtxSetFlags_v2(device, flags);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned int* flags, int* active) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  Device* device = findDevice(ordinal);
  if (!device) return CUDA_ERROR_INVALID_DEVICE;
  if (flags) *flags = device->primary->flags;
  if (active) *active = device->primary->active;
  return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext* context, unsigned int flags, CUdevice device) {
  return createContext(context, flags, device);
}

CUresult cuCtxCreate(CUcontext* context, unsigned int flags, CUdevice device) {
  return createContext(context, flags, device);
}

CUresult cuCtxCreate_v3(CUcontext* context, CUexecAffinityParam*, int affinities, unsigned int flags,
                        CUdevice device) {
  if (affinities) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  return createContext(context, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext* context, CUctxCreateParams* parameters, unsigned int flags,
                        CUdevice device) {
  if (parameters && parameters->numExecAffinityParams) return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
  if (parameters && parameters->cigParams) return CUDA_ERROR_NOT_SUPPORTED;
  return createContext(context, flags, device);
}

CUresult cuCtxDestroy_v2(CUcontext handle) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  auto context = table<Context>().find(handle);
  if (!context || context->isPrimary) return CUDA_ERROR_INVALID_CONTEXT;
  context = table<Context>().take(handle);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  tearDown(*context);
  if (!stack().empty() && stack().back() == context) stack().pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext context) { return cuCtxDestroy_v2(context); }

CUresult cuCtxAttach(CUcontext* context, unsigned int flags) {
  if (flags || !context) return CUDA_ERROR_INVALID_VALUE;
  SOFT_CONTEXT(current);
  *context = current->handle;
  return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext context) { return cuCtxDestroy_v2(context); }

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  auto context = table<Context>().find(handle);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  stack().push_back(context);
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxPushCurrent_v2(context); }

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = stack().back()->handle;
  stack().pop_back();
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) { return cuCtxPopCurrent_v2(context); }

CUresult cuCtxSetCurrent(CUcontext handle) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!handle) {
    if (!stack().empty()) stack().pop_back();
    return CUDA_SUCCESS;
  }
  auto context = table<Context>().find(handle);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (stack().empty()) {
    stack().push_back(context);
  } else {
    stack().back() = context;
  }
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!context) return CUDA_ERROR_INVALID_VALUE;
  *context = stack().empty() ? nullptr : stack().back()->handle;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = stack().back()->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext handle) {
  if (!handle) return cuCtxGetDevice(device);
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  auto context = table<Context>().find(handle);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  *device = context->device;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int* flags) {
  SOFT_CONTEXT(context);
  if (!flags) return CUDA_ERROR_INVALID_VALUE;
  *flags = context->flags;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetFlags(unsigned int flags) {
  SOFT_CONTEXT(context);
  if (flags & ~unsigned(CU_CTX_FLAGS_MASK)) return CUDA_ERROR_INVALID_VALUE;
  context->flags = flags;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext handle, unsigned long long* id) {
  if (!id) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr context;
  CUresult status = namedContext(handle, context);
  if (!context) return status;
  *id = context->id;
  return status;
}

CUresult cuCtxSynchronize() { return cuCtxSynchronize_v2(nullptr); }

CUresult cuCtxSynchronize_v2(CUcontext handle) {
  ContextPtr context;
  SOFT_TRY(namedContext(handle, context));
  SOFT_TRY(forbidSynchronize(*context));
  return context->synchronize();
}

CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int* version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  ContextPtr context;
  CUresult status = namedContext(handle, context);
  // The probe for dead handles, also of an inactive primary context.
  if (!context) return status;
  if (!context->active) return CUDA_ERROR_INVALID_CONTEXT;
  *version = kApiVersion;
  return status;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  SOFT_CONTEXT(context);
  if (least) *least = kLeastPriority;
  if (greatest) *greatest = kGreatestPriority;
  return CUDA_SUCCESS;
}
