#pragma once
// Contexts as an application sees them: primary contexts, created ones, each thread's stack, and the validity
// of both. Everything is answered here. The server learns of a context only when it becomes active, changes
// its flags or ends.
//
// A context's object is never freed: a dead handle stays recognisable as dead, and a reader never races with
// a free. A primary context's handle exists from start() on and is the same in all of its lives; `id` tells
// the lives apart.
//
// What a call returns for contexts that are dead or not yet active was measured on driver 580 and is
// reproduced exactly: an inactive context can be made current, has a device, flags 0 and API version error
// 201, and refuses everything else with 709.
//
// Threads: everything may be called from any thread. Current, push, pop and get touch only the calling
// thread's state. Hooks run without the table's lock; retain, release and reset of one device exclude each
// other, hooks included, so a hook must not call them. Storage destructors run with no lock held.

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <type_traits>
#include <vector>

#include "client/context_storage.h"
#include "client/handles.h"
#include "client/thread_state.h"

namespace gpupool::client {

inline constexpr int kMaxDevices = 64;
inline constexpr unsigned kApiVersionOld = 3010;  // contexts of the first cuCtxCreate
inline constexpr unsigned kApiVersion = 3020;

// The server's side of a context's life. Each may block on the wire. `activate` of a primary context and of a
// created one come with the flags in force; an error leaves the context inactive and is the application's
// answer. `destroy` comes once per life, also for streams, modules and memory of that context, before storage
// destructors run.
struct RemoteContexts {
  CUresult (*activatePrimary)(CUdevice device, unsigned flags, CUcontext context);
  CUresult (*create)(CUdevice device, unsigned flags, CUcontext context);
  CUresult (*setFlags)(CUcontext context, unsigned flags);
  CUresult (*destroy)(CUcontext context);
};

struct Context {
  Context(CUdevice device, bool primary, unsigned apiVersion, unsigned flags)
      : device(device), primary(primary), apiVersion(apiVersion), flags(flags) {}

  const CUdevice device;
  const bool primary;
  const unsigned apiVersion;
  CUcontext handle = nullptr;      // set before the object can be found by anyone else
  std::atomic<bool> alive{false};  // false: never activated, reset, released or destroyed
  std::atomic<uint64_t> id{0};     // of this life, unique in the process; 0 while not alive
  // Unique in the process, and another one with every life and every change of what launches depend on
  // (limits, cache preference): what was learnt of launches under one version says nothing under another.
  std::atomic<uint64_t> version{0};
  std::atomic<unsigned> flags;     // as cuDevicePrimaryCtxGetState and cuCtxCreate have them
  std::atomic<unsigned> usage{1};  // cuCtxAttach, cuCtxDetach
  std::atomic<unsigned> cacheConfig{0}, sharedMemConfig{0};
  ContextStorage storage;
  // Of a green context's (client/calls/green.h), which has no life but its `alive` and its `id`: the primary
  // context that it stands for, the green context, and its default stream. Set before others can find it.
  Context* base = nullptr;
  CUgreenCtx green = nullptr;
  CUstream defaultStream = nullptr;
  // The session's own state of this context; it sets and clears it.
  std::atomic<void*> session{nullptr};

  // Limits the server has told, forgotten when the context ends. Values in the limit's own unit.
  bool cachedLimit(CUlimit limit, size_t* value) const;
  void storeLimit(CUlimit limit, size_t value);
  void forgetLimits();
  void newVersion();

 private:
  static constexpr size_t kLimits = 16;
  std::array<std::atomic<uint64_t>, kLimits> limits_{};  // value + 1; 0: unknown
};

class Contexts {
 public:
  constexpr Contexts() = default;
  // Once, at cuInit. `remote` must stay valid; deviceCount <= kMaxDevices.
  void start(int deviceCount, const RemoteContexts& remote);
  int deviceCount() const { return deviceCount_; }

  // Primary contexts.
  CUresult primaryHandle(CUcontext* out, CUdevice device);  // neither retains nor activates
  CUresult primaryRetain(CUcontext* out, CUdevice device);
  CUresult primaryRelease(CUdevice device);
  CUresult primaryReset(CUdevice device);
  CUresult primarySetFlags(CUdevice device, unsigned flags);
  CUresult primaryGetState(CUdevice device, unsigned* flags, int* active);

  // Created contexts. create makes the new one current.
  CUresult create(CUcontext* out, unsigned flags, CUdevice device, unsigned apiVersion = kApiVersion);
  CUresult destroy(CUcontext handle);
  CUresult attach(CUcontext* out, unsigned flags);
  CUresult detach(CUcontext handle);

  // The calling thread's stack.
  CUresult push(CUcontext handle);
  CUresult pop(CUcontext* out);  // out may be null
  CUresult setCurrent(CUcontext handle);
  CUresult getCurrent(CUcontext* out);

  // Properties; a null handle means the calling thread's current context.
  CUresult getDevice(CUdevice* out, CUcontext handle);
  CUresult getFlags(unsigned* out);
  CUresult setFlags(unsigned flags);
  CUresult getApiVersion(CUcontext handle, unsigned* out);
  CUresult getId(CUcontext handle, uint64_t* out);

  // What every other call asks first: the live context it works in. 201: none current, or no context; 709:
  // not alive.
  CUresult resolve(CUcontext handle, Context** out) {
    Context* context = handle == nullptr ? threadState().context : find(handle);
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (!context->alive.load(std::memory_order_acquire)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    const CUcontext named = handle == nullptr ? threadState().current : handle;
    if (__builtin_expect(context->handle != named, 0) && !greenAlive(named))
      return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *out = context;
    return CUDA_SUCCESS;
  }
  // Dead ones too; null for what never was a context.
  // A green context's stands for the primary context.
  Context* find(CUcontext handle) {
    Context* context = table_.find(toId(handle));
    return context != nullptr && context->base != nullptr ? context->base : context;
  }
  // Of this thread, for calls that travel: the primary context where a green context's is current. Dead ones
  // too; null: none is current.
  CUcontext working() {
    const Context* context = threadState().context;
    return context == nullptr ? nullptr : context->handle;
  }
  bool isAlive(CUcontext handle) {
    Context* context = find(handle);
    return context != nullptr && context->alive.load(std::memory_order_acquire);
  }
  // visit(Context&) for each live context, no lock held.
  template <typename Visit>
  void forEachAlive(Visit&& visit) {
    table_.forEach([&](uint64_t, Context& context) {
      if (context.base == nullptr && context.alive.load(std::memory_order_acquire)) visit(context);
    });
  }

  // The context that a node of a graph is given: a green context's stands for the primary context there, too.
  CUcontext given(CUcontext handle) {
    const Context* entry = table_.find(toId(handle));
    return entry != nullptr && entry->base != nullptr ? entry->base->handle : handle;
  }
  // Green contexts. The one of a context, or null: it is not a green context's. Dead ones too.
  CUgreenCtx greenOf(CUcontext handle) {
    const Context* entry = table_.find(toId(handle));
    return entry == nullptr ? nullptr : entry->green;
  }
  // The calling thread's, if its current context is one's; else null. Dead ones too.
  Context* currentGreen() {
    const ThreadState& state = threadState();
    if (state.context == nullptr || state.context->handle == state.current) return nullptr;
    return table_.find(toId(state.current));
  }
  // Makes a context of `green`, whose device's primary context is retained. Null: too many contexts.
  Context* addGreen(CUdevice device, CUgreenCtx green, CUstream defaultStream);

  // Context-local storage (context_storage.h); a null handle means the current context. On a thread without a
  // live current context this must fail: cudart then makes its primary context current.
  CUresult storagePut(CUcontext handle, void* key, void* value, StorageDestructor destructor);
  CUresult storageGet(void** value, CUcontext handle, void* key);
  CUresult storageRemove(CUcontext handle, void* key);

 private:
  struct Primary {
    Context* context = nullptr;  // set by start
    std::mutex mutex;            // one life change at a time; guards retained
    unsigned retained = 0;
  };

  Primary* primaryOf(CUdevice device) {
    return device >= 0 && device < deviceCount_ ? &primaries_[static_cast<size_t>(device)] : nullptr;
  }
  struct Ended {
    CUresult result = CUDA_SUCCESS;
    std::vector<ContextStorage::Entry> entries;
  };
  CUresult activate(Primary& primary);
  bool greenAlive(CUcontext handle) {
    const Context* entry = table_.find(toId(handle));
    return entry != nullptr && entry->alive.load(std::memory_order_acquire);
  }
  Ended endLife(Context& context);
  static void runDestructors(Context& context, const Ended& ended);

  HandleTable<Context> table_{Kind::context};
  std::array<Primary, kMaxDevices> primaries_{};
  int deviceCount_ = 0;
  const RemoteContexts* remote_ = nullptr;
  std::atomic<uint64_t> lives_{0};
};

// The process's contexts: constant-initialised, never destructed.
Contexts& contexts();

}  // namespace gpupool::client
