#pragma once
// A thread that asks what may answer late or never: a network adapter's firmware, a driver's management
// library. Its owner waits for its end within a bound, and abandons it if something blocks it.

#include <chrono>
#include <functional>
#include <memory>

namespace gpupool {

class WatchThread {
 public:
  // The body's view of the end.
  class Stop {
   public:
    explicit Stop(int descriptor) : descriptor_(descriptor) {}
    // Waits so long; true: the thread is to end.
    bool within(std::chrono::milliseconds time) const;
    int descriptor() const { return descriptor_; }  // readable when the thread is to end

   private:
    int descriptor_;
  };
  // Starts `body` at once, on a thread that receives no signals. `body` owns all that it uses, since it may
  // outlive this object; it is destroyed on its thread. Throws std::system_error.
  explicit WatchThread(std::function<void(const Stop&)> body);
  ~WatchThread();
  WatchThread(const WatchThread&) = delete;
  WatchThread& operator=(const WatchThread&) = delete;

  // Tells the thread to end. False: it has not within the bound, and is abandoned.
  bool end(std::chrono::milliseconds bound);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace gpupool
