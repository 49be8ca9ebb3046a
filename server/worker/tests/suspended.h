#pragma once
// What tests of suspended sessions have in common: the copier's own code on a thread of this process, the
// suspender's orders, and memory that is to be the same afterwards.

#include <sys/socket.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "server/copier/connection.h"
#include "server/worker/suspender.h"
#include "server/worker/tests/client.h"

namespace gpupool::server::test {

inline constexpr std::chrono::seconds kLong{20};

class Copier {
 public:
  // verify: it fills the memory that the session leaves, and compares what it brings back.
  explicit Copier(uint64_t budget = 64 * kMiB, bool verify = true)
      : verify_(verify),
        devices_(softDriver()),
        store_({budget, "", 16 * kMiB, [](uint64_t) { return true; }, nullptr}) {}
  ~Copier() { die(); }

  // The worker's end of a connection.
  int connect() {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    mine_.push_back(dup(ends[0]));  // before the thread, which closes the other one
    threads_.emplace_back(
        [this, mine = ends[0]] { CopierConnection(Descriptor(mine), devices_, store_, verify_).serve(); });
    return ends[1];
  }
  // As its process's death ends its connections.
  void die() {
    for (int descriptor : mine_) {
      shutdown(descriptor, SHUT_RDWR);
      close(descriptor);
    }
    mine_.clear();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  uint64_t kept() const { return store_.usage().memory; }

 private:
  const bool verify_;
  CopierDevices devices_;
  CopierStore store_;
  std::vector<std::thread> threads_;
  std::vector<int> mine_;
};

class Suspended {
 public:
  explicit Suspended(Client& client)
      : suspender(*client.session, [this](const SuspendOutcome& outcome) {
          {
            std::lock_guard lock(mutex_);
            outcomes_.push_back(outcome);
          }
          came_.notify_all();
        }) {}
  SuspendOutcome outcome() {
    std::unique_lock lock(mutex_);
    REQUIRE(came_.wait_for(lock, kLong, [this] { return !outcomes_.empty(); }));
    SuspendOutcome first = std::move(outcomes_.front());
    outcomes_.pop_front();
    return first;
  }
  SuspendOutcome suspend(Copier& copier, std::chrono::milliseconds drain = kLong) {
    suspender.suspend(drain, copier.connect());
    return outcome();
  }
  SuspendOutcome resume() {
    suspender.resume();
    return outcome();
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<SuspendOutcome> outcomes_;

 public:
  Suspender suspender;  // ends first
};

// A client with 8 MiB of extents, each word of which is its index times `key`.
struct Memory {
  explicit Memory(Client& client) : client_(client) {
    const uint64_t base = client.space().deviceBase;
    for (const auto& [offset, bytes] : {std::pair{4 * kMiB, 2 * kMiB}, std::pair{8 * kMiB, 6 * kMiB}}) {
      REQUIRE(client
                  .await(schema::RowOf<"sessionExtentMap">::id,
                         Arguments().value(0).value(base + offset).value(bytes))
                  .status() == CUDA_SUCCESS);
      extents.emplace_back(base + offset, bytes);
    }
    uint32_t value = 1;
    for (const auto& [address, bytes] : extents)
      for (uint64_t at = 0; at < bytes; at += kMiB)
        client.post(schema::RowOf<"cuMemsetD32Async">::id,
                    Arguments().value(address + at).value(value++).value(kMiB / 4).value(0));
  }
  // As the device sees them. Here so that a thread without a context can look.
  bool right() const {
    client_.await(schema::RowOf<"sessionDrain">::id, Arguments().value(0).value(1));
    uint32_t value = 1;
    for (const auto& [address, bytes] : extents)
      for (uint64_t at = 0; at < bytes; at += kMiB, ++value)
        for (uint64_t word = 0; word < kMiB / 4; word += 1023)
          if (reinterpret_cast<const uint32_t*>(address + at)[word] != value) return false;
    return true;
  }

  std::vector<std::pair<uint64_t, uint64_t>> extents;

 private:
  Client& client_;
};

// Of the device; with its primary context current on this thread from then on.
inline size_t freeBytes() {
  size_t free = 0, total = 0;
  CUcontext context = nullptr;
  REQUIRE(softDriver().cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
  REQUIRE(softDriver().cuCtxSetCurrent(context) == CUDA_SUCCESS);
  REQUIRE(softDriver().cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS);
  softDriver().cuDevicePrimaryCtxRelease_v2(0);
  return free;
}

inline void makeStream(Client& client) {
  REQUIRE(client
              .await(schema::RowOf<"cuStreamCreateWithPriority">::id,
                     Arguments().value(kStream).value(1).value(0))
              .status() == CUDA_SUCCESS);
}

}  // namespace gpupool::server::test
