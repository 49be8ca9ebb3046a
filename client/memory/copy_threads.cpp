#include "client/memory/copy_threads.h"

#include <emmintrin.h>
#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>

#include "base/log.h"
#include "transports/descriptor.h"

namespace gpupool::client {
namespace {

constexpr size_t kLine = 64;

// Stores that do not first read what they overwrite: a third less memory traffic where the target is not in a
// cache anyway.
void copyStreaming(std::byte* to, const std::byte* from, size_t bytes) {
  size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1), c = _mm_loadu_si128(source + 2),
            d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();
  std::memcpy(to, from, bytes);
}

void run(const CopyThreads::Job& job) {
  if (job.streaming)
    copyStreaming(job.to, job.from, job.bytes);
  else
    std::memcpy(job.to, job.from, job.bytes);
}

}  // namespace

CopyThreads& copyThreads() {
  static auto* threads = new CopyThreads;
  return *threads;
}

unsigned CopyThreads::width() {
  static const unsigned threads = [] {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1u;
    return std::clamp(static_cast<unsigned>(CPU_COUNT(&cores)) / 2, 1u, kMost);
  }();
  return threads;
}

void CopyThreads::start(Job& job, bool parallel) {
  job.shared = parallel;
  if (!parallel) return;
  std::lock_guard lock(mutex_);
  queue_.push_back(&job);
  if (idle_ > 0) return queued_.notify_one();
  if (helpers_ + 1 >= width()) return;
  try {
    transport::startQuietThread([this] { help(); })->detach();
    ++helpers_;
  } catch (const std::exception& error) {  // whoever waits copies
    GPUPOOL_DEBUG("no further thread for copies: %s", error.what());
  }
}

void CopyThreads::finish(Job& job) {
  if (!job.shared) return run(job);
  std::unique_lock lock(mutex_);
  while (!job.done) {
    if (queue_.empty()) {
      finished_.wait(lock);
      continue;
    }
    runNext(lock);
  }
}

void CopyThreads::help() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    queued_.wait(lock, [&] { return !queue_.empty(); });
    --idle_;
    runNext(lock);
  }
}

void CopyThreads::runNext(std::unique_lock<std::mutex>& lock) {
  Job& next = *queue_.front();
  queue_.pop_front();
  lock.unlock();
  run(next);
  lock.lock();
  next.done = true;
  finished_.notify_all();
}

}  // namespace gpupool::client
