#include "client/words.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>

namespace gpupool::client {
namespace {
constexpr size_t kSweep = 64;  // retired words are looked over by so many, not one by one
constexpr long kNapNanoseconds = 100'000'000, kStillNanoseconds = 500'000'000;  // what a lost ring costs
}  // namespace

Words::Words(std::shared_ptr<transport::SharedMemory> shared) : memory_(std::move(shared)) {
  if (memory_ == nullptr) {
    memory_ = transport::SharedMemory::create(schema::kWordsBytes);
    makeUnchanged();
  }
  base_ = memory_->data();
  words_ = reinterpret_cast<std::atomic<uint64_t>*>(base_ + schema::kWordsOffset);
  spin_ = sysconf(_SC_NPROCESSORS_ONLN) > 2;
}

void Words::makeUnchanged() {
  unchangedRoom_ = std::make_unique<std::atomic<uint64_t>[]>(schema::kWordsCount);
  unchanged_.store(unchangedRoom_.get(), std::memory_order_release);
}

// The pages are replaced at once: a thread that polls sees the same words before and behind it.
bool Words::leaveShared() {
  if (!shared()) return true;
  void* copy = mmap(nullptr, schema::kWordsBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return false;
  void* left =
      mmap(nullptr, schema::kWordsBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_->descriptor(), 0);
  std::memcpy(copy, base_, schema::kWordsBytes);
  if (mremap(copy, schema::kWordsBytes, schema::kWordsBytes, MREMAP_MAYMOVE | MREMAP_FIXED, base_) ==
      MAP_FAILED) {
    munmap(copy, schema::kWordsBytes);
    if (left != MAP_FAILED) munmap(left, schema::kWordsBytes);
    return false;
  }
  makeUnchanged();
  if (left == MAP_FAILED) return true;
  ring(*static_cast<Header*>(left));  // who sleeps there does not hear the new page's bell
  munmap(left, schema::kWordsBytes);
  return true;
}

uint64_t Words::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty() && retired_.size() >= kSweep)
    std::erase_if(retired_, [&](const auto& old) {
      if (!reached(old.first, old.second)) return false;
      free_.push_back(old.first);
      return true;
    });
  if (!free_.empty()) {
    uint32_t index = free_.back();
    free_.pop_back();
    return index;
  }
  return next_ < schema::kWordsCount ? next_++ : 0;
}

void Words::retire(uint64_t index, uint64_t value) {
  if (index == 0) return;
  std::lock_guard lock(mutex_);
  retired_.emplace_back(static_cast<uint32_t>(index), value);
}

void Words::setUnchanged(uint64_t index, uint64_t value) {
  auto* known = unchanged_.load(std::memory_order_acquire);
  if (known != nullptr && index < schema::kWordsCount) known[index].store(value, std::memory_order_release);
}

void Words::set(uint64_t index, uint64_t value) {
  if (index >= schema::kWordsCount) return;
  uint64_t known = words_[index].load(std::memory_order_relaxed);
  while (known < value && !words_[index].compare_exchange_weak(known, value, std::memory_order_release)) {
  }
}

void Words::setSticky(CUresult status) {
  uint32_t none = 0;
  header().sticky.compare_exchange_strong(none, status);
  ring();
}

void Words::ring(Header& header) {
  header.bell.fetch_add(1);
  syscall(SYS_futex, &header.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Words::poll(uint64_t index, uint64_t value, std::chrono::microseconds time) const {
  if (reached(index, value)) return true;
  if (!spin_) return false;
  auto end = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < 64; ++i) {
      if (reached(index, value)) return true;
      __builtin_ia32_pause();
    }
  } while (std::chrono::steady_clock::now() < end && sticky() == CUDA_SUCCESS);
  return reached(index, value);
}

CUresult Words::sleep(uint64_t index, uint64_t value) {
  header().waiters.fetch_add(1);
  CUresult result = CUDA_SUCCESS;
  while (true) {
    uint32_t bell = header().bell.load();
    if (reached(index, value)) break;
    result = sticky();
    if (result != CUDA_SUCCESS) break;
    timespec nap{0, still_.load(std::memory_order_relaxed) ? kStillNanoseconds : kNapNanoseconds};
    syscall(SYS_futex, &header().bell, FUTEX_WAIT, bell, &nap, nullptr, 0);
  }
  header().waiters.fetch_sub(1);
  return result;
}

}  // namespace gpupool::client
