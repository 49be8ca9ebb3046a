#include "client/contexts.h"

#include <cstdlib>

namespace gpupool::client {
namespace {

constexpr unsigned kScheduleMask = 0x7;
constexpr unsigned kFlagsMask = 0xff;
constexpr unsigned kMapHost =
    CU_CTX_MAP_HOST;  // always on; cuCtxGetFlags shows it, the primary context's state not

bool validFlags(unsigned flags) {
  const unsigned schedule = flags & kScheduleMask;
  return (flags & ~kFlagsMask) == 0 && (schedule & (schedule - 1)) == 0;
}

bool grow(ThreadState& state) {
  const size_t capacity = state.capacity == 0 ? 16 : state.capacity * 2;
  void* memory = std::realloc(state.below, capacity * sizeof(CUcontext));
  if (memory == nullptr) return false;
  state.below = static_cast<CUcontext*>(memory);
  state.capacity = capacity;
  return true;
}

}  // namespace

bool Context::cachedLimit(CUlimit limit, size_t* value) const {
  const auto index = static_cast<size_t>(limit);
  if (index >= kLimits) return false;
  const uint64_t stored = limits_[index].load(std::memory_order_relaxed);
  if (stored == 0) return false;
  *value = stored - 1;
  return true;
}

void Context::storeLimit(CUlimit limit, size_t value) {
  const auto index = static_cast<size_t>(limit);
  if (index < kLimits) limits_[index].store(uint64_t{value} + 1, std::memory_order_relaxed);
}

void Context::forgetLimits() {
  for (auto& limit : limits_) limit.store(0, std::memory_order_relaxed);
}

void Context::newVersion() {
  static std::atomic<uint64_t> versions{0};
  version.store(versions.fetch_add(1, std::memory_order_relaxed) + 1, std::memory_order_release);
}

void Contexts::start(int deviceCount, const RemoteContexts& remote) {
  remote_ = &remote;
  for (int device = 0; device < deviceCount && device < kMaxDevices; ++device) {
    const auto created = table_.create(device, true, kApiVersion, 0u);
    if (created.object == nullptr) break;
    created.object->handle = fromId<CUcontext>(created.id);
    primaries_[static_cast<size_t>(device)].context = created.object;
    deviceCount_ = device + 1;
  }
}

CUresult Contexts::primaryHandle(CUcontext* out, CUdevice device) {
  Primary* primary = primaryOf(device);
  if (primary == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = primary->context->handle;
  return CUDA_SUCCESS;
}

CUresult Contexts::activate(Primary& primary) {
  Context& context = *primary.context;
  if (context.alive.load(std::memory_order_relaxed)) return CUDA_SUCCESS;
  const CUresult result =
      remote_->activatePrimary(context.device, context.flags.load(std::memory_order_relaxed), context.handle);
  if (result != CUDA_SUCCESS) return result;
  context.id.store(lives_.fetch_add(1) + 1, std::memory_order_relaxed);
  context.newVersion();
  context.alive.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult Contexts::primaryRetain(CUcontext* out, CUdevice device) {
  Primary* primary = primaryOf(device);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (primary == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard lock(primary->mutex);
  if (const CUresult result = activate(*primary); result != CUDA_SUCCESS) return result;
  ++primary->retained;
  *out = primary->context->handle;
  return CUDA_SUCCESS;
}

CUresult Contexts::primaryRelease(CUdevice device) {
  Primary* primary = primaryOf(device);
  if (primary == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  Ended ended;
  {
    std::lock_guard lock(primary->mutex);
    if (primary->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--primary->retained > 0 || !primary->context->alive.load(std::memory_order_relaxed))
      return CUDA_SUCCESS;
    ended = endLife(*primary->context);
  }
  runDestructors(*primary->context, ended);
  return ended.result;
}

// Ends the life but keeps the count of retains, which must still be released, as measured.
CUresult Contexts::primaryReset(CUdevice device) {
  Primary* primary = primaryOf(device);
  if (primary == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  Ended ended;
  {
    std::lock_guard lock(primary->mutex);
    if (!primary->context->alive.load(std::memory_order_relaxed)) return CUDA_SUCCESS;
    ended = endLife(*primary->context);
  }
  runDestructors(*primary->context, ended);
  return ended.result;
}

CUresult Contexts::primarySetFlags(CUdevice device, unsigned flags) {
  Primary* primary = primaryOf(device);
  if (primary == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (!validFlags(flags)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(primary->mutex);
  Context& context = *primary->context;
  if (context.alive.load(std::memory_order_relaxed)) {
    if (const CUresult result = remote_->setFlags(context.handle, flags); result != CUDA_SUCCESS)
      return result;
  }
  context.flags.store(flags & ~kMapHost, std::memory_order_relaxed);
  return CUDA_SUCCESS;
}

CUresult Contexts::primaryGetState(CUdevice device, unsigned* flags, int* active) {
  Primary* primary = primaryOf(device);
  if (primary == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *flags = primary->context->flags.load(std::memory_order_relaxed);
  *active = primary->context->alive.load(std::memory_order_acquire) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult Contexts::create(CUcontext* out, unsigned flags, CUdevice device, unsigned apiVersion) {
  if (out == nullptr || !validFlags(flags)) return CUDA_ERROR_INVALID_VALUE;
  if (primaryOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  const auto created = table_.create(device, false, apiVersion, flags & ~kMapHost);
  if (created.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  Context& context = *created.object;
  context.handle = fromId<CUcontext>(created.id);
  const CUresult result = remote_->create(device, flags, context.handle);
  if (result != CUDA_SUCCESS) {
    table_.destroy(created.id);  // nobody has seen the handle
    return result;
  }
  context.id.store(lives_.fetch_add(1) + 1, std::memory_order_relaxed);
  context.newVersion();
  context.alive.store(true, std::memory_order_release);
  *out = context.handle;
  return push(context.handle);
}

Context* Contexts::addGreen(CUdevice device, CUgreenCtx green, CUstream defaultStream) {
  const auto created = table_.prepare(device, false, kApiVersion, 0u);
  if (created.object == nullptr) return nullptr;
  Context& context = *created.object;
  context.handle = fromId<CUcontext>(created.id);
  context.base = primaryOf(device)->context;
  context.green = green;
  context.defaultStream = defaultStream;
  context.id.store(lives_.fetch_add(1) + 1, std::memory_order_relaxed);
  context.alive.store(true, std::memory_order_release);
  table_.publish(created.id);
  return &context;
}

// Exactly one caller per life gets past the exchange. For primary contexts their mutex is held, so that a
// following activation reaches the server after this destruction and the next life's entries are not taken
// for this one's.
Contexts::Ended Contexts::endLife(Context& context) {
  if (!context.alive.exchange(false)) return {CUDA_ERROR_CONTEXT_IS_DESTROYED, {}};
  Ended ended;
  ended.entries = context.storage.takeAll();
  context.id.store(0, std::memory_order_relaxed);
  context.flags.store(0, std::memory_order_relaxed);
  context.cacheConfig.store(0, std::memory_order_relaxed);
  context.sharedMemConfig.store(0, std::memory_order_relaxed);
  context.forgetLimits();
  ended.result = remote_->destroy(context.handle);
  return ended;
}

void Contexts::runDestructors(Context& context, const Ended& ended) {
  for (const auto& entry : ended.entries) {
    if (entry.destructor != nullptr) entry.destructor(context.handle, entry.key, entry.value);
  }
}

CUresult Contexts::destroy(CUcontext handle) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Context* context = find(handle);
  if (context == nullptr || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->alive.load(std::memory_order_acquire)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  const Ended ended = endLife(*context);
  runDestructors(*context, ended);
  // Below the top, and on other threads, the dead handle stays where it is.
  if (threadState().current == handle) pop(nullptr);
  return ended.result;
}

CUresult Contexts::attach(CUcontext* out, unsigned flags) {
  Context* context = threadState().context;
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (out == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->alive.load(std::memory_order_acquire)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  context->usage.fetch_add(1);
  *out = context->handle;
  return CUDA_SUCCESS;
}

CUresult Contexts::detach(CUcontext handle) {
  Context* context = find(handle);
  if (context == nullptr || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  if (!context->alive.load(std::memory_order_acquire)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return context->usage.fetch_sub(1) == 1 ? destroy(handle) : CUDA_SUCCESS;
}

CUresult Contexts::push(CUcontext handle) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Context* context = find(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  ThreadState& state = threadState();
  if (state.current != nullptr) {
    if (state.depth == state.capacity && !grow(state)) return CUDA_ERROR_OUT_OF_MEMORY;
    state.below[state.depth++] = state.current;
  }
  state.current = handle;
  state.context = context;
  return CUDA_SUCCESS;
}

CUresult Contexts::pop(CUcontext* out) {
  ThreadState& state = threadState();
  if (state.current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (out != nullptr) *out = state.current;
  state.current = state.depth == 0 ? nullptr : state.below[--state.depth];
  state.context = state.current == nullptr ? nullptr : find(state.current);
  return CUDA_SUCCESS;
}

// Null pops; anything else takes the place of the top.
CUresult Contexts::setCurrent(CUcontext handle) {
  ThreadState& state = threadState();
  if (handle == nullptr) {
    if (state.current != nullptr) pop(nullptr);
    return CUDA_SUCCESS;
  }
  Context* context = find(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  state.current = handle;
  state.context = context;
  return CUDA_SUCCESS;
}

CUresult Contexts::getCurrent(CUcontext* out) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = threadState().current;
  return CUDA_SUCCESS;
}

CUresult Contexts::getDevice(CUdevice* out, CUcontext handle) {
  const Context* context = handle == nullptr ? threadState().context : find(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = context->device;
  return CUDA_SUCCESS;
}

CUresult Contexts::getFlags(unsigned* out) {
  const Context* context = threadState().context;
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = context->alive.load(std::memory_order_acquire)
             ? context->flags.load(std::memory_order_relaxed) | kMapHost
             : 0;
  return CUDA_SUCCESS;
}

CUresult Contexts::setFlags(unsigned flags) {
  Context* context = nullptr;
  if (const CUresult result = resolve(nullptr, &context); result != CUDA_SUCCESS) return result;
  if (context->primary) return primarySetFlags(context->device, flags);
  if (!validFlags(flags)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = remote_->setFlags(context->handle, flags); result != CUDA_SUCCESS)
    return result;
  context->flags.store(flags & ~kMapHost, std::memory_order_relaxed);
  return CUDA_SUCCESS;
}

CUresult Contexts::getApiVersion(CUcontext handle, unsigned* out) {
  Context* context = nullptr;
  if (resolve(handle, &context) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_CONTEXT;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = context->apiVersion;
  return CUDA_SUCCESS;
}

CUresult Contexts::getId(CUcontext handle, uint64_t* out) {
  Context* context = nullptr;
  if (const CUresult result = resolve(handle, &context); result != CUDA_SUCCESS) return result;
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = context->id.load(std::memory_order_relaxed);
  return CUDA_SUCCESS;
}

CUresult Contexts::storagePut(CUcontext handle, void* key, void* value, StorageDestructor destructor) {
  Context* context = nullptr;
  if (const CUresult result = resolve(handle, &context); result != CUDA_SUCCESS) return result;
  return context->storage.put(key, value, destructor, context->alive);
}

CUresult Contexts::storageGet(void** value, CUcontext handle, void* key) {
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (handle == nullptr) {
    const Context* context = threadState().context;
    if (context == nullptr || !context->alive.load(std::memory_order_acquire))
      return CUDA_ERROR_INVALID_CONTEXT;
    return context->storage.get(value, key);
  }
  const Context* context = find(handle);
  return context == nullptr ? CUDA_ERROR_INVALID_HANDLE : context->storage.get(value, key);
}

CUresult Contexts::storageRemove(CUcontext handle, void* key) {
  Context* context = handle == nullptr ? threadState().context : find(handle);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return context->storage.remove(key);
}

Contexts& contexts() {
  static constinit Contexts instance;
  static_assert(std::is_trivially_destructible_v<Contexts>);
  return instance;
}

}  // namespace gpupool::client
