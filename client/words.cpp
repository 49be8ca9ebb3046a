#include "client/words.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>
#include <exception>
#include <utility>

namespace gpupool::client {
namespace {
constexpr size_t kSweep = 64;  // retired words are looked over by so many, not one by one
constexpr long kNapNanoseconds = 100'000'000, kStillNanoseconds = 500'000'000;  // what a lost ring costs

void* mapPage(const transport::SharedMemory& memory, size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.descriptor(), 0);
}

}  // namespace

Words::Words(std::shared_ptr<transport::SharedMemory> shared) : memory_(std::move(shared)) {
  if (memory_ == nullptr) {
    memory_ = transport::SharedMemory::create(schema::kWordsBytes);
    makeUnchanged();
  }
  first_ = memory_;
  base_ = memory_->data();
  words_ = reinterpret_cast<std::atomic<uint64_t>*>(base_ + schema::kWordsOffset);
  spin_ = sysconf(_SC_NPROCESSORS_ONLN) > 2;
}

void Words::makeUnchanged() {
  if (unchangedRoom_ == nullptr)
    unchangedRoom_ = std::make_unique<std::atomic<uint64_t>[]>(schema::kWordsCount);
  unchanged_.store(unchangedRoom_.get(), std::memory_order_release);
}

bool Words::leaveShared() {
  if (shared()) {
    try {
      if (!replace(transport::SharedMemory::create(schema::kWordsBytes))) return false;
    } catch (const std::exception&) {
      return false;
    }
    makeUnchanged();
  }
  return true;
}

bool Words::enterShared(std::shared_ptr<transport::SharedMemory> page) {
  if (!replace(std::move(page))) return false;
  unchanged_.store(nullptr, std::memory_order_release);
  return true;
}

// The pages are replaced at once: a thread that polls sees no word go back. (Mapped elsewhere first, for
// ThreadSanitizer takes mmap for a write.)
bool Words::replace(std::shared_ptr<transport::SharedMemory> next) {
  auto* words = reinterpret_cast<std::atomic<uint64_t>*>(next->data() + schema::kWordsOffset);
  for (size_t i = 0; i < schema::kWordsCount; ++i)
    if (const uint64_t here = words_[i].load(std::memory_order_acquire); here > words[i].load())
      words[i] = here;
  Header& there = *reinterpret_cast<Header*>(next->data());
  there.sticky = header().sticky.load();
  there.bell = header().bell.load();
  there.waiters = header().waiters.load();
  void* mapped = mapPage(*next, schema::kWordsBytes);
  if (mapped == MAP_FAILED) return false;
  if (mremap(mapped, schema::kWordsBytes, schema::kWordsBytes, MREMAP_MAYMOVE | MREMAP_FIXED, base_) ==
      MAP_FAILED) {
    munmap(mapped, schema::kWordsBytes);
    return false;
  }
  const auto left = std::exchange(memory_, std::move(next));
  Header* before = nullptr;
  mapped = MAP_FAILED;
  if (left != first_) {
    before = reinterpret_cast<Header*>(left->data());
  } else {  // its mapping is the one that was replaced
    mapped = mapPage(*left, sizeof(Header));
    if (mapped != MAP_FAILED) before = static_cast<Header*>(mapped);
  }
  if (before != nullptr) {
    if (const uint32_t said = before->sticky; said != 0) setSticky(static_cast<CUresult>(said));
    ring(*before);  // who sleeps there does not hear the new page's bell
  }
  if (mapped != MAP_FAILED) munmap(mapped, sizeof(Header));
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
