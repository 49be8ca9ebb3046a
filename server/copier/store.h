#pragma once
// The host memory in which the copier keeps what it took off the devices.
//
// Memory comes in slabs, each touched once by several threads and shown to its owner (who registers it with
// the driver), and kept for reuse until the process ends: what makes a page ready costs more than copying to
// it. Ranges of slabs are given out in units of 2 MiB. Beyond the budget, if there is a folder, the rest of a
// reservation lies in a file there that has no name, its blocks allocated beforehand: nothing is left on the
// disk however the process ends. A range may hold what its last owner left: whoever holds it writes before he
// reads.
//
// Any thread.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace gpupool::server {

class CopierStore {
 public:
  struct Options {
    uint64_t budget = 0;                           // bytes of memory
    std::string folder;                            // for what is beyond it; empty: nothing is
    uint64_t slabBytes = uint64_t{1} << 30;        // a multiple of 2 MiB
    std::function<bool(uint64_t)> machineHasRoom;  // for a slab of so many bytes; null: hostHasRoom
    // A slab was made: for the process's life. Called by whichever thread needed it, one at a time.
    std::function<void(std::byte*, uint64_t)> onSlab;
  };
  struct Range {
    std::byte* data = nullptr;
    uint64_t bytes = 0;
  };

  // Room for the pieces of one session, in whole: each is some ranges, in order. Gives it back at its end.
  class Holding {
   public:
    ~Holding();
    Holding(const Holding&) = delete;
    Holding& operator=(const Holding&) = delete;

    size_t pieces() const { return ends_.size(); }
    std::span<const Range> piece(size_t index) const {
      const size_t first = index == 0 ? 0 : ends_[index - 1];
      return {ranges_.data() + first, ends_[index] - first};
    }
    // Something may still write here when this ends, so nobody may have it ever again.
    void abandon() { abandoned_ = true; }

   private:
    friend class CopierStore;
    explicit Holding(CopierStore& store) : store_(store) {}

    CopierStore& store_;
    uint64_t memory_ = 0, disk_ = 0;  // bytes counted as used
    std::vector<Range> taken_;        // of slabs
    std::byte* file_ = nullptr;       // mapped, disk_ bytes
    std::vector<Range> ranges_;       // of all pieces, one after the other
    std::vector<size_t> ends_;        // where a piece's ranges end in ranges_
    bool abandoned_ = false;
  };

  explicit CopierStore(Options options);
  // Its memory stays mapped: a driver may have it registered.
  ~CopierStore() = default;
  CopierStore(const CopierStore&) = delete;
  CopierStore& operator=(const CopierStore&) = delete;

  // Pieces of so many bytes each, multiples of 2 MiB, whose sum does not overflow: all, or null and why. The
  // store outlives what it gives. Waits for slabs to be made.
  std::unique_ptr<Holding> reserve(std::span<const uint64_t> pieces, std::string& why);
  // From now on; of the budget not less than what is there by now.
  void setRoom(uint64_t budget, std::string folder);
  // Makes slabs until there are so many bytes of them, or as many as the budget allows. False: the machine
  // has no such memory.
  bool touchAhead(uint64_t bytes);

  struct Usage {
    uint64_t memory = 0, disk = 0;  // held
    uint64_t slabs = 0;             // made
  };
  Usage usage() const;

 private:
  // What a reservation that was refused in the middle took goes back with its Holding.
  bool takeMemory(Holding& holding, std::string& why);
  bool takeDisk(Holding& holding, std::string& why);
  void cut(Holding& holding, std::span<const uint64_t> pieces);
  void takeFree(Holding& holding, uint64_t& missing);
  bool grow(uint64_t missing, std::string& why);
  bool makeSlab(uint64_t bytes);
  uint64_t nextSlab(uint64_t missing) const;
  void giveBack(Holding& holding);
  std::string refusal(uint64_t wanted) const;

  Options options_;
  std::mutex making_;  // taken before mutex_
  mutable std::mutex mutex_;
  std::map<std::byte*, uint64_t> free_;  // ranges of slabs; neighbours are one
  Usage usage_;
};

}  // namespace gpupool::server
