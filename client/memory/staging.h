#pragma once
// Slots of the worker's pinned staging memory, for copies of ordinary memory. The client hands them out; a
// slot is free again when the stream has done the copy. On one host slots are mapped here; on a network bytes
// travel by put and get. Slots and what they hold outlive a move; their addresses in the worker do not, nor
// does the memory in which a slot is mapped here always: a session may leave the host of its worker, and come
// back to it or to another one.
// Threads: any.

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "client/streams.h"

namespace gpupool::client {

class Staging {
 public:
  static constexpr size_t kLarge = size_t{2} << 20;
  static constexpr size_t kSmall = size_t{64} << 10;

  struct Slot {
    uint64_t offset = 0;
    size_t bytes = 0;
    // Where it is mapped, as long as somebody has it, whatever becomes of the session; null: it is not.
    std::shared_ptr<transport::SharedMemory> memory = nullptr;
  };

  // A slot of at least min(bytes, kLarge). Waits for one; an error only when the session is lost.
  CUresult acquire(size_t bytes, Slot& slot);
  bool tryAcquire(size_t bytes, Slot& slot);
  void release(const Slot& slot);  // nothing uses it
  void releaseAfter(const Slot& slot, const StreamRef& ref,
                    uint64_t value);  // free when the stream got there

  // Client and worker share the staging memory: slots that are acquired from here on are mapped.
  bool isMapped();
  // Where the bytes of a slot are that is mapped.
  static std::byte* mapped(const Slot& slot) { return slot.memory->data() + slot.offset; }
  // What is written there is the worker's: of a thread inside Transfers::named until the frame is sent. Of a
  // thread that reads what has come: else it has to fetch.
  bool isShared(const Slot& slot) const;
  // In the worker: what copy frames name. Of a thread inside Transfers::named until the frame is sent.
  uint64_t address(const Slot& slot) const { return address_ + slot.offset; }
  // For a copy that began while that memory was shared, and goes on when it is not: puts the bytes at
  // mapped() into the slot of the worker (a thread inside Transfers::named), and gets them from there.
  CUresult bring(const Slot& slot, size_t bytes);
  CUresult fetch(const Slot& slot, size_t bytes) { return read(slot, mapped(slot), bytes); }
  // A network: into the slot, under way until finish(), for a thread inside Transfers::named all the time;
  // and out of it.
  CUresult write(const Slot& slot, const void* from, size_t bytes, transport::Transfer& transfer);
  CUresult read(const Slot& slot, void* to, size_t bytes);
  CUresult finish(transport::Transfer transfer);

  // The session is at another worker (Session::MoveHooks). shared: that one's memory, where it was not shared
  // before.
  void moved(std::shared_ptr<transport::SharedMemory> shared);

 private:
  struct Pending {
    Slot slot;
    StreamRef ref;
    uint64_t word, value;  // the stream may be destroyed before its word is reached
  };
  struct Shelf {
    std::vector<Slot> free;
    std::vector<Pending> pending;
  };
  bool start();  // under the mutex and inside Transfers::named; false: there is no staging memory
  Shelf& shelf(size_t bytes) { return bytes <= kSmall ? small_ : large_; }

  std::mutex mutex_;
  std::atomic<bool> started_{false};
  std::shared_ptr<transport::SharedMemory> memory_;            // the last that was shared
  std::atomic<const transport::SharedMemory*> here_{nullptr};  // the same, while it is
  transport::Region region_;
  uint64_t address_ = 0;  // in the worker
  Shelf large_, small_;
};

Staging& staging();

}  // namespace gpupool::client
