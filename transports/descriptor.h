#pragma once
// Small owners for what the operating system hands out.

#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/signals.h"

namespace gpupool::transport {

// A file descriptor, closed by its owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      value_ = std::exchange(other.value_, -1);
    }
    return *this;
  }
  ~Descriptor() { reset(); }
  void reset() {
    if (value_ >= 0) ::close(value_);
    value_ = -1;
  }
  int release() { return std::exchange(value_, -1); }
  int get() const { return value_; }
  explicit operator bool() const { return value_ >= 0; }

 private:
  int value_ = -1;
};

// "what: <errno in words>"
std::string errorText(const std::string& what);

// A non-blocking, close-on-exec eventfd. Throws std::runtime_error.
Descriptor newEvent();
void signalEvent(const Descriptor& event);
void clearEvent(const Descriptor& event);

// A thread that runs in somebody else's process: no signal of theirs is delivered on it. Held by pointer so
// that a forked child, where it does not exist, can forget it.
template <class Function>
std::unique_ptr<std::thread> startQuietThread(Function&& function) {
  SignalsBlocked inherited;
  return std::make_unique<std::thread>(std::forward<Function>(function));
}

}  // namespace gpupool::transport
