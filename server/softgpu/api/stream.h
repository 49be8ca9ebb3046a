#pragma once
// Streams: queues of tasks, each executed in order by a thread of its own that exists only while there is
// work.
//
// Order between streams is a matter of fences taken at submission: a task lists the fences it waits for, and
// a fence is always that of a task submitted earlier, so waiting cannot deadlock. The legacy default stream
// waits for the last task of every blocking stream and they for its last (manual: Stream synchronization
// behavior). Tasks of a context that was told to wait for events wait for those events' fences, too.
//
// Locks: Context::order, then Stream::mutex_, then Fence. None is held while a task runs.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "server/softgpu/api/cuda_api.h"
#include "server/softgpu/api/handles.h"

namespace gpupool::softgpu::api {

struct Context;
struct Capture;
struct GraphNode;

// Completes once. Waiting ends with the task: every task submitted completes, if only because its context is
// torn down.
class Fence {
 public:
  using Clock = std::chrono::steady_clock;
  void complete();
  bool done() const { return done_.load(std::memory_order_acquire); }
  void wait();
  bool waitFor(std::chrono::milliseconds limit);
  Clock::time_point when() const { return when_; }  // valid once done

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
  Clock::time_point when_;
};
using FencePtr = std::shared_ptr<Fence>;

struct Task {
  // Any result but success becomes the context's sticky error.
  std::function<CUresult()> run;
  std::vector<FencePtr> after;  // beyond the stream's own order
  bool always = false;          // run even after a sticky error (stream callbacks report it)
  bool launch = false;          // counts against the launch queue's length
  FencePtr done = std::make_shared<Fence>();
};

// Work of up to so many bytes is cheap enough for Submit::inlineIfIdle.
inline constexpr uint64_t kCheapBytes = 64 << 10;

enum class Submit {
  asynchronous,  // the stream's thread runs it
  inlineIfIdle,  // cheap: the caller runs it at once if nothing is before it
  wait,          // returns when it is done; run by the caller if nothing is before it
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  using Handle = CUstream;
  static constexpr Tag kTag = Tag::stream;
  Stream(std::shared_ptr<Context> context, unsigned flags, int priority);

  Handle handle = nullptr;
  const std::shared_ptr<Context> context;
  const unsigned flags;
  const int priority;
  const uint64_t id;
  bool isLegacy = false;
  CUgreenCtx green = nullptr;  // whose stream it is; set before it has a handle
  std::atomic<int> syncPolicy{CU_SYNC_POLICY_AUTO};

  bool blocking() const { return !(flags & CU_STREAM_NON_BLOCKING); }
  FencePtr tail() const;  // last task submitted, null if none; done if it is done
  bool idle() const;

  // Guarded by captureMutex() (capture.h): the capture this stream takes part in, and its position in it.
  std::shared_ptr<Capture> capture;
  std::vector<std::shared_ptr<GraphNode>> captureAfter;
  std::vector<CUgraphNode> captureHandles;  // the array that cuStreamGetCaptureInfo points to

  // Adds a task behind everything that must precede it. Returns its fence.
  FencePtr submit(Task task, Submit how);

 private:
  bool enter(Task& task, Submit how);
  void work();
  void finish(Task& task);
  void execute(Task& task);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  FencePtr tail_;
  bool busy_ = false;  // a task is running, on the stream's thread or inline
  bool hasThread_ = false;
  unsigned launches_ = 0;  // queued or running
};

// The stream a handle means on this thread; 0 and CU_STREAM_LEGACY: the context's legacy stream;
// CU_STREAM_PER_THREAD: the thread's own. Error: CUDA_ERROR_INVALID_HANDLE.
CUresult findStream(const std::shared_ptr<Context>& context, CUstream handle,
                    std::shared_ptr<Stream>& stream);

}  // namespace gpupool::softgpu::api
