#include "server/worker/words.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

#include "base/log.h"

namespace gpupool::server {

using Clock = std::chrono::steady_clock;
namespace {
constexpr auto kSpin = std::chrono::microseconds(100);  // after a watch begins: poll without sleeping
constexpr auto kNap = std::chrono::microseconds(50);
constexpr auto kFaultCheck = std::chrono::milliseconds(2);
}  // namespace

Words::Words(const Driver& driver, Objects& objects, std::shared_ptr<transport::SharedMemory> memory,
             Publish publish, std::function<void(CUresult)> fault)
    : driver_(driver),
      objects_(objects),
      publish_(std::move(publish)),
      fault_(std::move(fault)),
      memory_(std::move(memory)) {
  thread_ = std::thread([this] { run(); });
}

Words::~Words() { stop(); }

void Words::stop() {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ && !thread_.joinable()) return;
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

CUdeviceptr Words::deviceAddress(uint64_t index) {
  if (index == 0 || index >= schema::kWordsCount) return 0;
  CUdeviceptr base = device_.load(std::memory_order_acquire);
  if (base == 0) {
    if (driver_.cuMemHostGetDevicePointer_v2(&base, memory_->data(), 0) != CUDA_SUCCESS) return 0;
    device_.store(base, std::memory_order_release);
  }
  return base + schema::kWordsOffset + index * 8;
}

void Words::watch(uint64_t index, uint64_t value) {
  if (index == 0 || index >= schema::kWordsCount) return;
  {
    std::lock_guard lock(mutex_);
    watched_.push_back({index, value});
  }
  changed_.notify_one();
}

CUresult Words::sticky() const {
  return static_cast<CUresult>(std::atomic_ref<uint32_t>(header().sticky).load(std::memory_order_acquire));
}

void Words::setSticky(CUresult status) {
  uint32_t none = 0;
  std::atomic_ref<uint32_t>(header().sticky).compare_exchange_strong(none, status);
  ring();
}

void Words::ring() {
  std::atomic_ref<uint32_t>(header().bell).fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &header().bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Takes out what was reached. True if watches remain. Scans until a pass finds nothing: a word that was
// written before another one found reached must never be told after it.
bool Words::serve(std::vector<schema::WordUpdate>& reached) {
  std::lock_guard lock(mutex_);
  while (std::erase_if(watched_, [&](const schema::WordUpdate& w) {
           uint64_t now = word(w.index).load(std::memory_order_acquire);
           if (now < w.value) return false;
           reached.push_back({w.index, now});
           return true;
         }) != 0) {
  }
  return !watched_.empty();
}

// Every live context is asked through an idle non-blocking stream: any other stream's query could disturb a
// capture or wait in line behind it.
void Words::checkFault() {
  objects_.forEach(HandleKind::context, [&](uint64_t id, uint64_t real) {
    if (sticky() != CUDA_SUCCESS) return;
    if (driver_.cuCtxSetCurrent(reinterpret_cast<CUcontext>(real)) != CUDA_SUCCESS) return;
    CUstream probe = nullptr;
    for (auto& [context, stream] : probes_)
      if (context == id) probe = stream;
    CUresult result = CUDA_SUCCESS;
    if (probe == nullptr) {
      result = driver_.cuStreamCreate(&probe, CU_STREAM_NON_BLOCKING);
      if (result == CUDA_SUCCESS) probes_.emplace_back(id, probe);
    }
    if (result == CUDA_SUCCESS) result = driver_.cuStreamQuery(probe);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY && result != CUDA_ERROR_INVALID_HANDLE &&
        result != CUDA_ERROR_CONTEXT_IS_DESTROYED) {
      setSticky(result);
      fault_(result);
    }
  });
}

void Words::run() {
  CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
  if (driver_.cuThreadExchangeStreamCaptureMode) driver_.cuThreadExchangeStreamCaptureMode(&relaxed);
  Clock::time_point began{}, nextCheck{};
  bool watching = false;
  const bool spin = sysconf(_SC_NPROCESSORS_ONLN) > 2;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (watched_.empty()) watching = false;
      changed_.wait(lock, [&] { return stopping_ || !watched_.empty(); });
      if (stopping_) return;
    }
    auto now = Clock::now();
    if (!watching) {
      watching = true;
      began = now;
      nextCheck = now + kFaultCheck;
    }
    std::vector<schema::WordUpdate> reached;
    bool more = serve(reached);
    if (!reached.empty()) {
      if (publish_) publish_(reached);
      ring();
      began = now;
    }
    if (!more) continue;
    if (now >= nextCheck) {
      checkFault();
      nextCheck = Clock::now() + kFaultCheck;
    }
    if (sticky() != CUDA_SUCCESS) {  // no word will come; the waiters were told
      std::lock_guard lock(mutex_);
      watched_.clear();
      continue;
    }
    if (!spin || now - began > kSpin) std::this_thread::sleep_for(kNap);
  }
}

}  // namespace gpupool::server
