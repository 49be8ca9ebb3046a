#pragma once
// Completion words on the client's side (schema/frame.h): indices for streams and events, and waiting. On one
// host the words are in the page that the device writes; on a network they are in a copy that the service
// thread updates.
//
// Threads: any. Waiting holds no lock.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "schema/cuda.h"
#include "schema/frame.h"
#include "transports/transport.h"

namespace gpupool::client {

class Words {
 public:
  // The shared page, or null for a private copy.
  explicit Words(std::shared_ptr<transport::SharedMemory> shared);

  // Reserves an index for the caller; 0 if none is left (the caller then awaits instead). Values only grow,
  // also from one owner to the next: start from value().
  uint64_t take();
  // Gives the index back. The last value that the device will write is `value`; the index is free when it
  // has.
  void retire(uint64_t index, uint64_t value);

  uint64_t value(uint64_t index) const { return words_[index].load(std::memory_order_acquire); }
  // network: the worker told, or a reply did; they may cross, and a word never goes back
  void set(uint64_t index, uint64_t value);
  // network: when the word had come to `value`, mirrored memory held nothing that is not here (HostMemory).
  // Told before the word itself is.
  void setUnchanged(uint64_t index, uint64_t value);
  bool unchanged(uint64_t index, uint64_t value) const {
    const auto* known = unchanged_.load(std::memory_order_acquire);
    return known != nullptr && known[index].load(std::memory_order_acquire) >= value;
  }
  CUresult sticky() const { return static_cast<CUresult>(header().sticky.load(std::memory_order_acquire)); }
  void setSticky(CUresult status);
  void ring() { ring(header()); }
  // The session goes from a worker of this host to one on a network: the page becomes a private copy, at the
  // same address. Nobody writes a word meanwhile; whoever sleeps looks again.
  // False: there is no memory for it, and nothing has changed.
  bool leaveShared();
  // The way back, to the page of a worker that has all that was told here. False: it could not be mapped, and
  // nothing has changed.
  bool enterShared(std::shared_ptr<transport::SharedMemory> page);
  // No word moves: who waits looks rarely.
  void setStill(bool still) { still_.store(still, std::memory_order_relaxed); }

  // Waits until the word reaches `value`. CUDA_SUCCESS, or the sticky status when it never will. `watch` is
  // called once if polling did not suffice: it asks the worker to ring.
  // sleeps: the application asked for blocking synchronisation (CU_CTX_SCHED_BLOCKING_SYNC); otherwise it
  // polls for long, as the driver would.
  template <class Watch>
  CUresult wait(uint64_t index, uint64_t value, bool sleeps, Watch&& watch) {
    if (poll(index, value, shared() && !sleeps ? kUnasked : kBrief)) return CUDA_SUCCESS;
    if (CUresult status = sticky(); status != CUDA_SUCCESS) return status;
    watch();
    if (!sleeps && poll(index, value, kLong)) return CUDA_SUCCESS;
    return sleep(index, value);
  }
  // Not past an error that sticks: a worker that is told to end lets go what waits for host functions, and
  // words that follow say nothing.
  bool reached(uint64_t index, uint64_t value) const {
    return this->value(index) >= value && sticky() == CUDA_SUCCESS;
  }

 private:
  struct Header {
    std::atomic<uint32_t> sticky, bell, waiters, reserved;
  };
  static_assert(sizeof(Header) == sizeof(schema::WordsHeader));
  static void ring(Header& header);
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  // Where polling does not do: a wake-up costs tens of microseconds on either side, so it is worth much
  // polling; the worker is asked later where the device writes the very page, for it has more to do then.
  static constexpr std::chrono::microseconds kBrief{50}, kUnasked{5'000}, kLong{20'000};
  bool poll(uint64_t index, uint64_t value, std::chrono::microseconds time) const;
  CUresult sleep(uint64_t index, uint64_t value);

  // What is at base_ becomes `next`, and who sleeps at the one before looks again.
  bool replace(std::shared_ptr<transport::SharedMemory> next);

  std::shared_ptr<transport::SharedMemory> first_;   // has the addresses
  std::shared_ptr<transport::SharedMemory> memory_;  // has the pages
  std::byte* base_;
  std::atomic<uint64_t>* words_;
  bool shared() const { return unchanged_.load(std::memory_order_relaxed) == nullptr; }
  void makeUnchanged();
  std::unique_ptr<std::atomic<uint64_t>[]> unchangedRoom_;  // stays: others may look there
  std::atomic<std::atomic<uint64_t>*> unchanged_{nullptr};  // network only
  std::atomic<bool> still_{false};
  bool spin_;
  std::mutex mutex_;
  std::vector<uint32_t> free_;
  std::vector<std::pair<uint32_t, uint64_t>> retired_;
  uint32_t next_ = 1;
};

}  // namespace gpupool::client
