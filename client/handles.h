#pragma once
// The tables behind the handles an application holds: handle -> object, by kind.
//
// Reading (find, pin) takes no lock and costs a few nanoseconds; creating and destroying take the table's
// mutex for a few instructions. The memory of a slot is never given back, so a stale or concurrent reader
// never touches freed memory. What an object's owner must choose:
//   find  returns a plain pointer. It says "live a moment ago": fine for fields that are set before
//   publication or
//         atomic, and wherever CUDA itself makes destroying-while-using the application's error.
//   pin   keeps the object from being destructed until the Pin goes; destroy() then returns at once and the
//   last pin
//         runs the destructor.
// A destroyed slot's index comes back only after kReuseDelay others were freed and with the next generation,
// so that a stale handle is recognised across millions of creations.
//
// Tables are constinit globals without destructors: the library is called from exit handlers.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>

#include "schema/handle_ids.h"

namespace gpupool::client {

using handles::generationOf;
using handles::indexOf;
using handles::Kind;
using handles::kindOf;
using handles::makeHandle;

// CUstream and the like are pointers to undefined structs, CUmemGenericAllocationHandle is an integer.
template <typename H>
uint64_t toId(H handle) {
  if constexpr (std::is_pointer_v<H>) {
    return reinterpret_cast<uintptr_t>(handle);
  } else {
    return static_cast<uint64_t>(handle);
  }
}
template <typename H>
H fromId(uint64_t id) {
  if constexpr (std::is_pointer_v<H>) {
    return reinterpret_cast<H>(static_cast<uintptr_t>(id));
  } else {
    return static_cast<H>(id);
  }
}

template <typename T>
class HandleTable {
  struct Slot;

 public:
  explicit constexpr HandleTable(Kind kind) : kind_(kind) {}
  HandleTable(const HandleTable&) = delete;
  HandleTable& operator=(const HandleTable&) = delete;

  struct Created {
    uint64_t id = 0;  // 0: out of indices or memory
    T* object = nullptr;
  };

  class Pin {
   public:
    Pin() = default;
    Pin(Pin&& other) noexcept
        : table_(std::exchange(other.table_, nullptr)),
          slot_(std::exchange(other.slot_, nullptr)),
          index_(other.index_) {}
    Pin& operator=(Pin&& other) noexcept {
      std::swap(table_, other.table_);
      std::swap(slot_, other.slot_);
      std::swap(index_, other.index_);
      return *this;
    }
    ~Pin() {
      if (slot_ != nullptr) table_->unpin(*slot_, index_);
    }
    explicit operator bool() const { return slot_ != nullptr; }
    T* operator->() const { return slot_->object(); }
    T& operator*() const { return *slot_->object(); }
    T* get() const { return slot_ == nullptr ? nullptr : slot_->object(); }

   private:
    friend HandleTable;
    Pin(HandleTable* table, Slot* slot, uint32_t index) : table_(table), slot_(slot), index_(index) {}
    HandleTable* table_ = nullptr;
    Slot* slot_ = nullptr;
    uint32_t index_ = 0;
  };

  // Constructs T(arguments...) and publishes it.
  template <typename... Arguments>
  Created create(Arguments&&... arguments) {
    const Created made = prepare(std::forward<Arguments>(arguments)...);
    if (made.object != nullptr) publish(made.id);
    return made;
  }

  // The same in two steps, for objects that others come across (forEach) and that are not complete at once.
  // Until it is published, or discarded, an object is its maker's alone.
  template <typename... Arguments>
  Created prepare(Arguments&&... arguments) {
    const uint32_t index = takeIndex();
    if (index == 0) return {};
    Slot& slot = *slotAt(index);
    T* object = new (slot.storage) T(std::forward<Arguments>(arguments)...);
    return {makeHandle(kind_, index, slot.generation()), object};
  }
  void publish(uint64_t id) {
    live_.fetch_add(1, std::memory_order_relaxed);
    slotOf(id)->state.store(kLive | uint64_t{generationOf(id)} << kGenerationShift,
                            std::memory_order_release);
  }
  void discard(uint64_t id) { finish(*slotOf(id), indexOf(id)); }

  T* find(uint64_t id) {
    Slot* slot = slotOf(id);
    if (slot == nullptr || !slot->isLive(id)) return nullptr;
    return slot->object();
  }

  Pin pin(uint64_t id) {
    Slot* slot = slotOf(id);
    if (slot == nullptr) return {};
    uint64_t state = slot->state.load(std::memory_order_acquire);
    while ((state & ~kPins) == (kLive | uint64_t{generationOf(id)} << kGenerationShift)) {
      if (slot->state.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) {
        return Pin(this, slot, indexOf(id));
      }
    }
    return {};
  }

  // True for exactly one caller per object; from then on neither find nor pin sees it. The destructor runs
  // before this returns, or with the last pin.
  bool destroy(uint64_t id) {
    Slot* slot = slotOf(id);
    if (slot == nullptr) return false;
    uint64_t state = slot->state.load(std::memory_order_acquire);
    do {
      if ((state & ~kPins) != (kLive | uint64_t{generationOf(id)} << kGenerationShift)) return false;
    } while (!slot->state.compare_exchange_weak(state, state & ~kLive, std::memory_order_acq_rel));
    live_.fetch_sub(1, std::memory_order_relaxed);
    if ((state & kPins) == 0) finish(*slot, indexOf(id));
    return true;
  }

  // Calls visit(id, T&) for every object that is live when its turn comes, pinned meanwhile, no lock held.
  template <typename Visit>
  void forEach(Visit&& visit) {
    const uint32_t end = used_.load(std::memory_order_acquire);
    for (uint32_t index = 1; index <= end; ++index) {
      Slot* slot = slotAt(index);
      if (slot == nullptr) continue;
      const uint64_t state = slot->state.load(std::memory_order_acquire);
      if ((state & kLive) == 0) continue;
      const uint64_t id = makeHandle(kind_, index, static_cast<uint32_t>(state >> kGenerationShift));
      if (Pin pinned = pin(id)) visit(id, *pinned);
    }
  }

  size_t size() const { return live_.load(std::memory_order_relaxed); }
  Kind kind() const { return kind_; }

 private:
  static constexpr uint64_t kPins = 0xffff'ffff;
  static constexpr uint64_t kLive = uint64_t{1} << 32;
  static constexpr unsigned kGenerationShift = 40;
  static constexpr uint32_t kPageBits = 8;
  static constexpr uint32_t kPageSlots = 1u << kPageBits;
  static constexpr uint32_t kDirectoryBits =
      8;  // pages per directory entry; two levels keep an empty table small
  static constexpr uint32_t kRoots = 1u << (handles::kIndexBits - kPageBits - kDirectoryBits);
  static constexpr uint32_t kReuseDelay = 1024;

  struct Slot {
    std::atomic<uint64_t> state;  // generation << 40 | live << 32 | pins
    uint32_t nextFree;
    alignas(T) unsigned char storage[sizeof(T)];

    T* object() { return std::launder(reinterpret_cast<T*>(storage)); }
    uint32_t generation() const {
      return static_cast<uint32_t>(state.load(std::memory_order_relaxed) >> kGenerationShift);
    }
    bool isLive(uint64_t id) const {
      return (state.load(std::memory_order_acquire) & ~kPins) ==
             (kLive | uint64_t{generationOf(id)} << kGenerationShift);
    }
  };
  struct Page {
    Slot slots[kPageSlots];
  };
  struct Directory {
    std::atomic<Page*> pages[1u << kDirectoryBits];
  };

  Slot* slotAt(uint32_t index) const {
    const uint32_t page = index >> kPageBits;
    Directory* directory = roots_[page >> kDirectoryBits].load(std::memory_order_acquire);
    if (directory == nullptr) return nullptr;
    Page* slots = directory->pages[page & ((1u << kDirectoryBits) - 1)].load(std::memory_order_acquire);
    return slots == nullptr ? nullptr : &slots->slots[index & (kPageSlots - 1)];
  }
  Slot* slotOf(uint64_t id) const { return kindOf(id) == kind_ ? slotAt(indexOf(id)) : nullptr; }

  uint32_t takeIndex() {
    std::lock_guard lock(mutex_);
    if (freeCount_ > kReuseDelay) {
      const uint32_t index = freeHead_;
      freeHead_ = slotAt(index)->nextFree;
      --freeCount_;
      return index;
    }
    const uint32_t index = used_.load(std::memory_order_relaxed) + 1;
    if (index > handles::kMaxIndex || !ensurePage(index)) return 0;
    used_.store(index, std::memory_order_release);
    return index;
  }

  // malloc rather than new: no exception may leave an entry point.
  bool ensurePage(uint32_t index) {
    const uint32_t page = index >> kPageBits;
    auto& root = roots_[page >> kDirectoryBits];
    Directory* directory = root.load(std::memory_order_relaxed);
    if (directory == nullptr) {
      directory = static_cast<Directory*>(std::calloc(1, sizeof(Directory)));
      if (directory == nullptr) return false;
      root.store(directory, std::memory_order_release);
    }
    auto& entry = directory->pages[page & ((1u << kDirectoryBits) - 1)];
    if (entry.load(std::memory_order_relaxed) != nullptr) return true;
    void* memory = std::aligned_alloc(alignof(Page), sizeof(Page));
    if (memory == nullptr) return false;
    entry.store(new (memory) Page(), std::memory_order_release);
    return true;
  }

  void unpin(Slot& slot, uint32_t index) {
    const uint64_t before = slot.state.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & kPins) == 1 && (before & kLive) == 0) finish(slot, index);
  }

  // Reached once per object: when it is neither live nor pinned, and nobody can pin it again.
  void finish(Slot& slot, uint32_t index) {
    slot.object()->~T();
    const uint32_t next = (slot.generation() + 1) & handles::kMaxGeneration;
    slot.state.store(uint64_t{next} << kGenerationShift, std::memory_order_release);
    std::lock_guard lock(mutex_);
    slot.nextFree = 0;
    if (freeCount_++ == 0) {
      freeHead_ = index;
    } else {
      slotAt(freeTail_)->nextFree = index;
    }
    freeTail_ = index;
  }

  const Kind kind_;
  std::atomic<Directory*> roots_[kRoots] = {};
  std::atomic<uint32_t> used_{0};
  std::atomic<size_t> live_{0};
  std::mutex mutex_;  // the free queue and growth
  uint32_t freeHead_ = 0, freeTail_ = 0, freeCount_ = 0;
};

}  // namespace gpupool::client
