#pragma once
// Contexts and the calling thread's stack of them (driver manual: Primary Context Management, Context
// Management).
//
// A device's primary context is one object with one handle for the process's life, active while retained;
// other contexts live until destroyed. The sticky error of a context is set once by a failed task and
// answered by every later call. Any thread.

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "server/softgpu/api/device.h"
#include "server/softgpu/api/handles.h"
#include "server/softgpu/api/stream.h"

namespace gpupool::softgpu::api {

struct Context : std::enable_shared_from_this<Context> {
  using Handle = CUcontext;
  static constexpr Tag kTag = Tag::context;

  Handle handle = nullptr;
  int device = 0;
  bool isPrimary = false;
  std::atomic<unsigned> flags{0};
  std::atomic<uint64_t> id{0};        // a new one each time a primary context becomes active
  std::atomic<bool> active{false};    // false: destroyed, or a primary context nobody retains
  std::atomic<bool> aborting{false};  // being torn down: queued tasks end unrun, value waits end
  std::atomic<CUresult> sticky{CUDA_SUCCESS};
  unsigned retained = 0;  // primary only; guarded by primaryMutex

  std::mutex order;                            // makes submissions of this context a single order
  std::vector<std::weak_ptr<Stream>> streams;  // guarded by order; all but the legacy one
  std::shared_ptr<Stream> legacy;
  std::vector<FencePtr> gates;  // guarded by order: all work submitted from now on is behind them

  std::mutex settings;
  std::map<int, size_t> limits;  // CUlimit -> value as set
  std::set<int> peers;           // devices whose memory was enabled
  CUfunc_cache cacheConfig = CU_FUNC_CACHE_PREFER_NONE;
  CUsharedconfig sharedConfig = CU_SHARED_MEM_CONFIG_DEFAULT_BANK_SIZE;

  Device& deviceObject() const { return *devices()[device]; }
  void fail(CUresult error);
  // Waits for everything submitted so far; the sticky error afterwards.
  CUresult synchronize();
  // The same, and nothing is submitted meanwhile.
  void drainAlone();
  std::shared_ptr<Stream> makeStream(unsigned flags, int priority);
  std::vector<FencePtr> tails() const;  // of every stream with work; under order
};
using ContextPtr = std::shared_ptr<Context>;

// The calling thread's current context, usable: initialised, present (201), alive (709), without sticky
// error.
CUresult currentContext(ContextPtr& context);
// The same for a call that names its context; null: the current one.
CUresult namedContext(CUcontext handle, ContextPtr& context);
ContextPtr currentOrNull();

// Kernel printf and assert output to stdout and stderr. Called wherever the driver does: synchronisation
// points.
void flushOutput();

// What a torn down context takes with it; each chapter frees its own.
void releaseStreams(Context& context);
void releaseEvents(Context& context);
void releaseModules(Context& context);
void releaseMemory(Context& context);
void releaseArrays(Context& context);
void releaseObjects(Context& context);  // textures and surfaces

#define SOFT_CONTEXT(name) \
  ContextPtr name;         \
  if (CUresult entered_ = currentContext(name); entered_ != CUDA_SUCCESS) return entered_

#define SOFT_STREAM(name, handle, context) \
  std::shared_ptr<Stream> name;            \
  if (CUresult found_ = findStream(context, handle, name); found_ != CUDA_SUCCESS) return found_

#define SOFT_TRY(expression)                                                   \
  do {                                                                         \
    if (CUresult tried_ = (expression); tried_ != CUDA_SUCCESS) return tried_; \
  } while (false)

}  // namespace gpupool::softgpu::api
