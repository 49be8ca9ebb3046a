#pragma once
// Moves bytes between memory of the application that only this process has (registered memory; ordinary
// memory that a graph copies) and its shadow: memory of the same size in the host arena, which the worker's
// device addresses. A thread of ours, the carrier, does it in the order of streams, so that no caller waits:
//
//  * Before work that reads the shadow, `fill` posts a gate: a completion word the stream waits for. When
//    everything ahead of the gate is done (what a host function wrote included), the carrier copies the
//    application's bytes into the shadow and opens the gate.
//  * Behind work that writes the shadow, `land` asks for the stream's word. When it is reached, the carrier,
//    or whoever synchronises first (`settle`), copies the shadow's bytes into the application's memory.
//
// On a network the worker's copy of arena memory is such a shadow, too: at the same address.
//
// All frames are sent by the call itself. The carrier sends none: a frame may wait behind a call of the
// driver that waits for the very gate.
//
// Threads: any. Of the locks, carrying_ is held while bytes are moved, mutex_ for a look into the list only;
// neither across a frame's wait.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "client/streams.h"

namespace gpupool::client {

class Carrier {
 public:
  struct Range {
    uint64_t application = 0, shadow = 0;
    size_t bytes = 0;
    bool written = true;  // by the device: landed after the work
    bool unguarded =
        false;  // ordinary memory, which the application may unmap without a call: moved by the kernel
    // Rows of `bytes` that begin `pitch` apart; what lies between them is not touched on either side.
    size_t rows = 1, pitch = 0;

    size_t span() const { return (rows - 1) * pitch + bytes; }
    Range part(size_t first, size_t count) const {  // of the rows
      Range some = *this;
      some.application += first * pitch;
      some.shadow += first * pitch;
      some.rows = count;
      return some;
    }
  };
  // One launch of a graph that copies ordinary or registered memory: all its ranges are filled before it, so
  // that those a launch leaves alone land as they were.
  struct Launch {
    std::vector<Range> ranges;
    // The launch of the same graph before it, which may be another stream's: not filled before that is done.
    uint64_t afterWord = 0, afterValue = 0;
    uint64_t word = 0, value = 0;  // when this one is done
  };

  // Posts a gate for `ranges` in the stream; they are filled when its word has reached `ahead`
  // (requestWordBehindOthers).
  CUresult fill(const StreamRef& ref, uint64_t ahead, const std::vector<Range>& ranges,
                const std::shared_ptr<Launch>& launch = nullptr);
  // Asks for the stream's word; those of `ranges` that the device has written land when it is reached.
  CUresult land(const StreamRef& ref, const std::vector<Range>& ranges,
                const std::shared_ptr<Launch>& launch = nullptr);
  // The same without waiting; keepCredit must follow.
  CUresult sendLand(const StreamRef& ref, const std::vector<Range>& ranges,
                    const std::shared_ptr<Launch>& launch = nullptr);
  // A move to a worker that takes this process's own pages (Session::MoveHooks::prepare), behind
  // HostMemory::prepareMove: what has not landed yet in memory that is its own shadow. False: it does not
  // give that.
  bool fetchNext(transport::Connection& next);
  // What the device is done with is in the application's memory when this returns.
  void settle() {
    if (open_.load(std::memory_order_acquire) != 0) landReached();
  }
  bool busy() const { return open_.load(std::memory_order_acquire) != 0; }
  // Until nothing of [application, + bytes) is under way.
  void await(uint64_t application, size_t bytes);

  // Around a host function that a graph runs between its copies.
  void landRunning();
  void fillRunning();

 private:
  struct Move {
    Range range;
    uint64_t word = 0, value = 0;   // when the stream is there
    uint64_t gate = 0, opened = 0;  // fill; gate 0: land
    bool opens = false;             // the last one of its gate
    std::shared_ptr<Launch> launch;
  };
  using Moves = std::list<Move>;
  static bool isReached(const Move& move);

  void push(std::vector<Move> moves);
  std::vector<Moves::iterator> reached(bool fills);
  bool carry(const std::vector<Moves::iterator>& moves);
  void landReached();
  void drop();
  void run();

  std::mutex carrying_;                           // taken before mutex_
  std::vector<std::shared_ptr<Launch>> running_;  // under carrying_: filled, not landed
  std::mutex mutex_;
  Moves moves_;
  std::condition_variable pushed_;
  bool started_ = false;
  std::atomic<size_t> open_{0};
};

Carrier& carrier();

}  // namespace gpupool::client
