#pragma once
// Keeps transfers on one side of a move (schema/frame.h). A put, a get, a lent or a mapped region belongs to
// one worker, and so does a frame that names a region or the worker's staging memory: whoever makes one is
// *inside* from before it reads such a name until the frame that needs it is sent. The thread that moves the
// session closes the way in, and waits until nobody is inside.
//
// named: frames follow. Closed before `stopped`. Entered before any other lock of the client but
//        HostMemory's growing_; inside nothing is waited for that a host function or a frame of another
//        thread must bring, but where a comment says so.
// alone: no frame follows, and none is waited for inside. Closed before `quiet` only, since work under way
//        may need it: host functions, and the carrier. Any lock may be held.
//
// Threads: any. Entering is one addition while no move is under way.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>

namespace gpupool::client {

class Transfers {
 public:
  enum Kind : uint8_t { named, alone };

  // What is entered within it, of either kind, is inside already.
  class Inside {
   public:
    Inside(Transfers& transfers, Kind kind);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    friend class Transfers;
    Transfers* transfers_;
    Kind kind_;
  };

  // A thread that runs a host function: it may send no frame that names anything, and does not wait for a
  // move, which waits for the function.
  class Exempt {
   public:
    Exempt();
    ~Exempt();
    Exempt(const Exempt&) = delete;
    Exempt& operator=(const Exempt&) = delete;
  };

  // The calling thread is inside, of whatever kind, or exempt.
  static bool isInside();

  // A thread that is inside, and waits for the session to go on at another worker: what it has read of the
  // old one's names is worth nothing behind it.
  class Outside {
   public:
    explicit Outside(Transfers& transfers);
    ~Outside();
    Outside(const Outside&) = delete;
    Outside& operator=(const Outside&) = delete;

   private:
    Inside* left_;
  };

  // Nobody is inside while it lives; false if `cancelled` said so before the last one had left. One thread.
  class Closed {
   public:
    Closed(Transfers& transfers, Kind kind, const std::function<bool()>& cancelled);
    ~Closed();
    Closed(const Closed&) = delete;
    Closed& operator=(const Closed&) = delete;
    explicit operator bool() const { return empty_; }

   private:
    Transfers& transfers_;
    Kind kind_;
    bool empty_;
  };

 private:
  void enter(Kind kind);
  void leave(Kind kind);

  std::atomic<uint64_t> inside_[2]{};  // how many are inside
  std::atomic<bool> closed_[2]{};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace gpupool::client
