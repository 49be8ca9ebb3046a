// The machinery of stream.h: fences, queues, threads.
#include <pthread.h>

#include <algorithm>
#include <thread>

#include "server/softgpu/api/context.h"
#include "server/softgpu/api/stream.h"

namespace gpupool::softgpu::api {
namespace {

// The driver lets about this many launches queue before the caller of the next one waits.
constexpr unsigned kLaunchQueue = 1024;
constexpr auto kIdleThread = std::chrono::seconds(2);

std::atomic<uint64_t> nextStreamId{1};

}  // namespace

void Fence::complete() {
  std::lock_guard lock(mutex_);
  when_ = Clock::now();
  done_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void Fence::wait() {
  if (done()) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done(); });
}

bool Fence::waitFor(std::chrono::milliseconds limit) {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, limit, [&] { return done(); });
}

Stream::Stream(std::shared_ptr<Context> owner, unsigned streamFlags, int streamPriority)
    : context(std::move(owner)), flags(streamFlags), priority(streamPriority), id(nextStreamId++) {}

FencePtr Stream::tail() const {
  std::lock_guard lock(mutex_);
  return tail_;
}

bool Stream::idle() const {
  const auto isDone = [](const FencePtr& fence) { return !fence || fence->done(); };
  if (!isDone(tail())) return false;
  if (!isLegacy) return true;
  // It is also behind what blocking streams still do.
  std::lock_guard ordered(context->order);
  return std::ranges::all_of(context->streams, [&](const auto& weak) {
    const auto other = weak.lock();
    return !other || !other->blocking() || isDone(other->tail());
  });
}

FencePtr Stream::submit(Task task, Submit how) {
  FencePtr done = task.done;
  bool runHere = false;
  {
    std::lock_guard ordered(context->order);
    auto follow = [&](const FencePtr& fence) {
      if (fence && !fence->done()) task.after.push_back(fence);
    };
    std::erase_if(context->gates, [](const FencePtr& fence) { return fence->done(); });
    for (const FencePtr& fence : context->gates) follow(fence);
    if (isLegacy) {
      auto& streams = context->streams;
      for (size_t i = 0; i < streams.size();) {
        if (auto other = streams[i].lock()) {
          if (other->blocking()) follow(other->tail());
          ++i;
        } else {
          streams[i] = std::move(streams.back());
          streams.pop_back();
        }
      }
    } else if (blocking() && context->legacy) {
      follow(context->legacy->tail());
    }
    std::erase_if(task.after, [](const FencePtr& fence) { return fence->done(); });
    runHere = enter(task, how);
  }
  if (runHere) {
    execute(task);
    finish(task);
  } else if (how == Submit::wait) {
    done->wait();
  } else if (task.launch) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return launches_ <= kLaunchQueue || context->aborting; });
  }
  return done;
}

// True: the caller has to run `task` itself. Otherwise the task is queued (and moved from).
bool Stream::enter(Task& task, Submit how) {
  std::lock_guard lock(mutex_);
  tail_ = task.done;
  if (task.launch) ++launches_;
  if (how != Submit::asynchronous && !busy_ && queue_.empty() && task.after.empty()) {
    busy_ = true;
    return true;
  }
  bool launch = task.launch;
  queue_.push_back(std::move(task));
  task = {};
  task.launch = launch;
  if (!hasThread_) {
    hasThread_ = true;
    std::thread([self = shared_from_this()] { self->work(); }).detach();
  } else {
    changed_.notify_all();
  }
  return false;
}

void Stream::work() {
  pthread_setname_np(pthread_self(), "soft-stream");
  std::unique_lock lock(mutex_);
  while (true) {
    bool ready = changed_.wait_for(lock, kIdleThread, [&] { return !busy_ && !queue_.empty(); });
    if (!ready) {
      if (busy_ || !queue_.empty()) continue;
      hasThread_ = false;
      return;
    }
    Task task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    for (auto& fence : task.after) fence->wait();
    execute(task);
    finish(task);
    task = Task{nullptr, {}, false, false, nullptr};  // what it held is freed unlocked
    lock.lock();
  }
}

void Stream::execute(Task& task) {
  if (!task.run) return;
  if (context->aborting && !task.always) return;
  if (context->sticky.load() != CUDA_SUCCESS && !task.always) return;
  if (CUresult result = task.run(); result != CUDA_SUCCESS) context->fail(result);
}

void Stream::finish(Task& task) {
  // What the task kept alive is gone before anybody who waits can tell that it is done.
  task.run = nullptr;
  {
    std::lock_guard lock(mutex_);
    busy_ = false;
    if (task.launch) --launches_;
  }
  task.done->complete();
  changed_.notify_all();
}

}  // namespace gpupool::softgpu::api
