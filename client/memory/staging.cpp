#include "client/memory/staging.h"

#include <algorithm>
#include <optional>
#include <thread>

namespace gpupool::client {
namespace {
constexpr size_t kSmallShare = 4;  // a quarter of the staging memory is cut small
constexpr auto kNap = std::chrono::microseconds(20);
transport::Deadline bound() { return transport::Clock::now() + std::chrono::seconds(30); }
}  // namespace

Staging& staging() {
  static auto* slots = new Staging;
  return *slots;
}

bool Staging::start() {
  Session& session = Session::get();
  if (started_) return true;
  const schema::WorkerHello& hello = session.hello();
  region_ = {hello.staging.id, hello.staging.generation};
  address_ = hello.stagingAddress;
  if (session.mapsMemory()) {
    memory_ = session.connection().map(region_, nullptr, bound());
    if (memory_ == nullptr || memory_->size() < hello.stagingBytes) return false;  // what it is cut by
    here_ = memory_.get();
  }
  uint64_t cut = hello.stagingBytes / kSmallShare;
  for (uint64_t at = 0; at + kSmall <= cut; at += kSmall) small_.free.push_back({at, kSmall});
  for (uint64_t at = cut; at + kLarge <= hello.stagingBytes; at += kLarge)
    large_.free.push_back({at, kLarge});
  started_ = true;
  return true;
}

bool Staging::isMapped() {
  Session& session = Session::get();
  if (!session.mapsMemory()) return false;
  if (!started_) {
    const Transfers::Inside inside(session.transfers(), Transfers::named);
    std::lock_guard lock(mutex_);
    if (!start()) return false;
  }
  return here_ != nullptr;
}

bool Staging::isShared(const Slot& slot) const {
  return Session::get().mapsMemory() && slot.memory != nullptr && slot.memory.get() == here_;
}

bool Staging::tryAcquire(size_t bytes, Slot& slot) {
  std::optional<Transfers::Inside> inside;  // the first time: the worker's memory is named and mapped
  if (!started_) inside.emplace(Session::get().transfers(), Transfers::named);
  std::lock_guard lock(mutex_);
  if (!start()) return false;
  Shelf& shelf = this->shelf(bytes);
  // Few and large: looked over every time, so that the slot given out is the one used last, whose bytes are
  // likeliest to be in a cache still.
  if (shelf.free.empty() || &shelf == &large_)
    std::erase_if(shelf.pending, [&](const Pending& p) {
      if (!Session::get().words().reached(p.word, p.value)) return false;
      shelf.free.push_back(p.slot);
      return true;
    });
  if (shelf.free.empty()) return false;
  slot = shelf.free.back();
  slot.memory = memory_;
  shelf.free.pop_back();
  return true;
}

// All slots are with the device: any of their streams may be the next to finish, so none is waited for alone.
CUresult Staging::acquire(size_t bytes, Slot& slot) {
  if (tryAcquire(bytes, slot)) return CUDA_SUCCESS;
  Session& session = Session::get();
  std::vector<Pending> busy;
  {
    std::lock_guard lock(mutex_);
    if (!started_) return session.transferFailed();
    busy = shelf(bytes).pending;
  }
  for (auto& p : busy) {
    uint64_t value = 0;
    if (p.ref.stream->word != p.word) continue;  // destroyed: its last word was asked for then
    if (CUresult status = requestWord(p.ref, value); status != CUDA_SUCCESS) return status;
    if (!session.mapsMemory()) session.watch(p.word, p.value);
  }
  while (!tryAcquire(bytes, slot)) {
    if (CUresult status = session.sticky(); status != CUDA_SUCCESS) return status;
    session.nap(kNap);
  }
  return CUDA_SUCCESS;
}

void Staging::release(const Slot& slot) {
  std::lock_guard lock(mutex_);
  shelf(slot.bytes).free.push_back({slot.offset, slot.bytes});
}

void Staging::releaseAfter(const Slot& slot, const StreamRef& ref, uint64_t value) {
  std::lock_guard lock(mutex_);
  shelf(slot.bytes).pending.push_back({{slot.offset, slot.bytes}, ref, ref.stream->word, value});
}

CUresult Staging::write(const Slot& slot, const void* from, size_t bytes, transport::Transfer& transfer) {
  Session& session = Session::get();
  session.notePut(CallLog::Place::staging, slot.offset, from, bytes);
  transfer = session.connection().put(from, region_, slot.offset, bytes);
  if (transfer != transport::kRefused) return CUDA_SUCCESS;
  transfer = 0;
  return session.isDoneAgain() ? CUDA_SUCCESS : session.transferFailed();
}

CUresult Staging::bring(const Slot& slot, size_t bytes) {
  transport::Transfer transfer = 0;
  const CUresult status = write(slot, mapped(slot), bytes, transfer);
  return status == CUDA_SUCCESS ? finish(transfer) : status;
}

CUresult Staging::read(const Slot& slot, void* to, size_t bytes) {
  return Session::get().fetch(CallLog::Place::staging, slot.offset, {static_cast<std::byte*>(to), bytes},
                              [&](transport::Region& region, uint64_t& offset) {
                                region = region_;
                                offset = slot.offset;
                                return true;
                              });
}

CUresult Staging::finish(transport::Transfer transfer) {
  Session& session = Session::get();
  if (transfer == 0) return CUDA_SUCCESS;
  bool arrived = transfer != transport::kRefused && session.connection().wait(transfer, transport::kForever);
  return arrived || session.isDoneAgain() ? CUDA_SUCCESS : session.transferFailed();
}

void Staging::moved(std::shared_ptr<transport::SharedMemory> shared) {
  const schema::WorkerHello& hello = Session::get().hello();
  region_ = {hello.staging.id, hello.staging.generation};
  address_ = hello.stagingAddress;
  std::lock_guard lock(mutex_);
  if (shared != nullptr && started_) memory_ = std::move(shared);
  here_ = Session::get().mapsMemory() ? memory_.get() : nullptr;
}

}  // namespace gpupool::client
