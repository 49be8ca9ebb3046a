#include "client/memory/staging.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace gpupool::client {
namespace {
constexpr size_t kSmallShare = 4;  // a quarter of the staging memory is cut small
transport::Deadline bound() { return transport::Clock::now() + std::chrono::seconds(30); }
}  // namespace

Staging& staging() {
  static auto* slots = new Staging;
  return *slots;
}

void Staging::start() {
  if (started_) return;
  Session& session = Session::get();
  const schema::WorkerHello& hello = session.hello();
  region_ = {hello.staging.id, hello.staging.generation};
  if (session.mapsMemory()) {
    memory_ = session.connection().map(region_, nullptr, bound());
    if (memory_ != nullptr) mapped_ = memory_->data();
  }
  uint64_t cut = hello.stagingBytes / kSmallShare;
  for (uint64_t at = 0; at + kSmall <= cut; at += kSmall)
    small_.push_back({at, kSmall, hello.stagingAddress + at});
  for (uint64_t at = cut; at + kLarge <= hello.stagingBytes; at += kLarge)
    large_.push_back({at, kLarge, hello.stagingAddress + at});
  started_ = true;
}

bool Staging::reclaim() {
  bool any = false;
  std::erase_if(pending_, [&](const Pending& p) {
    if (!isDone(p.ref, p.value)) return false;
    (p.slot.bytes == kLarge ? large_ : small_).push_back(p.slot);
    any = true;
    return true;
  });
  return any;
}

CUresult Staging::acquire(size_t bytes, Slot& slot) {
  while (true) {
    std::vector<StreamRef> busy;
    {
      std::lock_guard lock(mutex_);
      start();
      auto& list = bytes <= kSmall ? small_ : large_;
      if (list.empty()) reclaim();
      if (!list.empty()) {
        slot = list.back();
        list.pop_back();
        return CUDA_SUCCESS;
      }
      for (auto& p : pending_) busy.push_back(p.ref);
    }
    // All slots are with the device. Any of their streams may be the next to finish, so none is waited for
    // alone.
    if (CUresult status = Session::get().sticky(); status != CUDA_SUCCESS) return status;
    for (auto& ref : busy) {
      uint64_t value = 0;
      if (CUresult status = requestWord(ref, value); status != CUDA_SUCCESS) return status;
      if (!Session::get().mapsMemory()) Session::get().watch(ref.stream->word, value);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void Staging::release(const Slot& slot) {
  std::lock_guard lock(mutex_);
  (slot.bytes == kLarge ? large_ : small_).push_back(slot);
}

void Staging::releaseAfter(const Slot& slot, const StreamRef& ref, uint64_t value) {
  std::lock_guard lock(mutex_);
  pending_.push_back({slot, ref, value});
}

CUresult Staging::write(const Slot& slot, size_t at, const void* from, size_t bytes,
                        transport::Transfer& transfer) {
  transfer = 0;
  if (mapped_ != nullptr) {
    std::memcpy(mapped_ + slot.offset + at, from, bytes);
    return CUDA_SUCCESS;
  }
  transfer = Session::get().connection().put(from, region_, slot.offset + at, bytes);
  return transfer != transport::kRefused ? CUDA_SUCCESS : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

CUresult Staging::read(const Slot& slot, size_t at, void* to, size_t bytes) {
  if (mapped_ != nullptr) {
    std::memcpy(to, mapped_ + slot.offset + at, bytes);
    return CUDA_SUCCESS;
  }
  return finish(Session::get().connection().get(to, region_, slot.offset + at, bytes));
}

CUresult Staging::finish(transport::Transfer transfer) {
  if (transfer == transport::kRefused) return CUDA_ERROR_DEVICE_UNAVAILABLE;
  if (transfer == 0 || Session::get().connection().wait(transfer, transport::kForever)) return CUDA_SUCCESS;
  return CUDA_ERROR_DEVICE_UNAVAILABLE;
}

}  // namespace gpupool::client
