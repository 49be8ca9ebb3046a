#include "server/worker/words.h"

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

#include "base/log.h"
#include "server/arena_mmap.h"

namespace gpupool::server {

namespace {
constexpr auto kSpin = std::chrono::microseconds(100);  // after a watch begins: poll without sleeping
constexpr auto kNap = std::chrono::microseconds(20);
constexpr auto kFaultCheck = std::chrono::milliseconds(2);
constexpr auto kParked = std::chrono::milliseconds(500);  // a session that ends is noticed after this
}  // namespace

Words::Words(const Driver& driver, Objects& objects, std::shared_ptr<transport::SharedMemory> memory,
             Publish publish, std::function<void(CUresult)> fault)
    : driver_(driver),
      objects_(objects),
      publish_(std::move(publish)),
      fault_(std::move(fault)),
      memory_(std::move(memory)) {}

Words::~Words() { stop(); }

void Words::stop() {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ && !thread_.joinable()) return;
    stopping_ = true;
  }
  changed_.notify_all();
  faultsWanted_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (faults_.joinable()) faults_.join();
}

CUdeviceptr Words::deviceAddress(const HostView* view, uint64_t index) {
  if (index == 0 || index >= schema::kWordsCount || view == nullptr) return 0;
  const CUdeviceptr base = view->deviceWords.load(std::memory_order_relaxed);
  return base == 0 ? 0 : base + schema::kWordsOffset + index * 8;
}

CUresult Words::write(const HostView* view, CUstream stream, uint64_t index, uint64_t value) {
  CUdeviceptr address = deviceAddress(view, index);
  if (address == 0) return CUDA_ERROR_INVALID_VALUE;
  return driver_.cuStreamWriteValue64_v2(stream, address, value, CU_STREAM_WRITE_VALUE_DEFAULT);
}

CUresult Words::awaitIn(const HostView* view, CUstream stream, uint64_t index, uint64_t value) {
  CUdeviceptr address = deviceAddress(view, index);
  if (address == 0) return CUDA_ERROR_INVALID_VALUE;
  return driver_.cuStreamWaitValue64_v2(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ);
}

bool Words::raise(uint64_t index, uint64_t value) {
  if (index == 0 || index >= schema::kWordsCount) return false;
  std::atomic<uint64_t>& it = word(index);
  for (uint64_t known = it.load(); known < value && !it.compare_exchange_weak(known, value);) {
  }
  return true;
}

bool Words::watch(uint64_t index, uint64_t value) {
  return index == 0 || index >= schema::kWordsCount || add({{index, value}, {}, true});
}

void Words::whenReached(uint64_t index, uint64_t value, Then then, bool tell) {
  add({{index, value}, std::move(then), tell});
}

bool Words::settled() const {
  std::lock_guard lock(mutex_);
  return calling_ == 0 && std::none_of(watched_.begin(), watched_.end(), [this](const Watched& w) {
           return w.then && word(w.word.index).load(std::memory_order_acquire) >= w.word.value;
         });
}

bool Words::add(Watched watched) {
  {
    std::lock_guard lock(mutex_);
    if (!watched.then && watched_.size() >= kMostWatched) return false;
    watched_.push_back(std::move(watched));
    added_ = true;
    any_.store(true, std::memory_order_release);
    if (!stopping_ && !thread_.joinable()) {
      thread_ = std::thread([this] { run(); });
      faults_ = std::thread([this] { checkFaults(); });
    }
    if (faultsIdle_) faultsWanted_.notify_one();
  }
  changed_.notify_one();
  return true;
}

void Words::park(bool parked) {
  {
    std::lock_guard lock(mutex_);
    parked_ = parked;
    added_ = true;  // one more look
  }
  changed_.notify_all();
  faultsWanted_.notify_all();
}

// True: it was parked.
bool Words::sleepParked() {
  std::unique_lock lock(mutex_);
  if (!parked_) return false;
  changed_.wait_for(lock, kParked, [this] { return stopping_ || !parked_ || added_; });
  return true;
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
bool Words::serve(std::vector<schema::WordUpdate>& reached, std::vector<Then>& ready) {
  std::lock_guard lock(mutex_);
  added_ = false;
  while (std::erase_if(watched_, [&](Watched& w) {
           uint64_t now = word(w.word.index).load(std::memory_order_acquire);
           if (now < w.word.value) return false;
           if (w.tell) reached.push_back({w.word.index, now});
           if (w.then) ready.push_back(std::move(w.then));
           return true;
         }) != 0) {
  }
  any_.store(!watched_.empty(), std::memory_order_release);
  calling_ = ready.size();
  return !watched_.empty();
}

// No word will come any more; waiters without a function of their own look at the sticky status.
void Words::abandonWatched() {
  std::vector<Watched> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(watched_);
    any_.store(false, std::memory_order_release);
  }
  for (Watched& watched : all)
    if (watched.then) watched.then(sticky());
}

// Where there are cores, whoever asked a moment ago finds this thread awake.
void Words::idle(Clock::time_point since) const {
  while (!any_.load(std::memory_order_acquire) && Clock::now() - since < kSpin)
    for (int i = 0; i < 64; ++i) __builtin_ia32_pause();
}

// Every live context is asked through an idle non-blocking stream: any other stream's query could disturb a
// capture or wait in line behind it.
void Words::checkFault() {
  std::lock_guard probing(probing_);
  objects_.forEach(HandleKind::context, [&](uint64_t id, uint64_t real) {
    if (sticky() != CUDA_SUCCESS) return;
    if (driver_.cuCtxSetCurrent(reinterpret_cast<CUcontext>(real)) != CUDA_SUCCESS) return;
    CUstream probe = nullptr;
    {
      std::lock_guard lock(mutex_);
      const auto own = probes_.find(reinterpret_cast<CUcontext>(real));
      if (own != probes_.end()) probe = own->second;
    }
    for (auto& [context, stream] : otherProbes_)
      if (context == id) probe = stream;
    CUresult result = CUDA_SUCCESS;
    if (probe == nullptr) {
      result = driver_.cuStreamCreate(&probe, CU_STREAM_NON_BLOCKING);
      if (result == CUDA_SUCCESS) otherProbes_.emplace_back(id, probe);
    }
    if (result == CUDA_SUCCESS) result = driver_.cuStreamQuery(probe);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY && result != CUDA_ERROR_INVALID_HANDLE &&
        result != CUDA_ERROR_CONTEXT_IS_DESTROYED) {
      fault_(result);  // first, so that nobody acts on the fault before the client was told of it
      setSticky(result);
    }
  });
}

// Without probing_: a query may be blocked until the program comes further.
void Words::contextMade(CUcontext context) {
  {
    std::lock_guard lock(mutex_);
    if (probes_.contains(context)) return;
  }
  CUstream probe = nullptr;
  if (driver_.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return;
  const PlaceGlobals place;
  const CUresult made = driver_.cuStreamCreate(&probe, CU_STREAM_NON_BLOCKING);
  driver_.cuCtxPopCurrent_v2(&context);
  std::lock_guard lock(mutex_);
  if (made == CUDA_SUCCESS) probes_[context] = probe;
}

std::unique_lock<std::mutex> Words::contextEnds(CUcontext ending) {
  std::unique_lock probing(probing_);
  CUstream own = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (const auto probe = probes_.extract(ending)) own = probe.mapped();
  }
  if (own != nullptr) driver_.cuStreamDestroy_v2(own);
  for (auto& [context, stream] : otherProbes_) driver_.cuStreamDestroy_v2(stream);
  otherProbes_.clear();
  return probing;
}

void Words::checkFaults() {
  CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
  if (driver_.cuThreadExchangeStreamCaptureMode) driver_.cuThreadExchangeStreamCaptureMode(&relaxed);
  std::unique_lock lock(mutex_);
  while (true) {
    faultsIdle_ = true;
    faultsWanted_.wait(lock, [&] { return stopping_ || !watched_.empty(); });
    faultsIdle_ = false;
    while (!watched_.empty()) {
      const auto pause = parked_ ? std::chrono::nanoseconds(kParked) : std::chrono::nanoseconds(kFaultCheck);
      const bool parked = parked_;
      if (faultsWanted_.wait_for(lock, pause, [&] { return stopping_ || parked_ != parked; })) {
        if (stopping_) return;
        continue;
      }
      if (parked_) continue;
      lock.unlock();
      checkFault();
      lock.lock();
    }
    if (stopping_) return;
  }
}

void Words::run() {
  Clock::time_point began{};
  bool watching = false;
  prctl(PR_SET_TIMERSLACK, 1'000UL);  // else a nap takes 50 us more
  const bool spin = sysconf(_SC_NPROCESSORS_ONLN) > 2;
  while (true) {
    if (spin) idle(began);
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
    }
    std::vector<schema::WordUpdate> reached;
    std::vector<Then> ready;
    bool more = serve(reached, ready);
    for (Then& then : ready) then(CUDA_SUCCESS);
    if (!ready.empty()) {
      std::lock_guard lock(mutex_);
      calling_ = 0;
    }
    if (!reached.empty()) {
      if (publish_) publish_(reached);
      ring();
    }
    if (!reached.empty() || !ready.empty()) began = Clock::now();
    if (!more) continue;
    if (sticky() != CUDA_SUCCESS) {
      abandonWatched();
      continue;
    }
    if (sleepParked()) continue;
    if (!spin || now - began > kSpin) std::this_thread::sleep_for(kNap);
  }
}

}  // namespace gpupool::server
