#pragma once
// What keeps a session from being moved for as long as its program is what it is: code whose state no driver
// gives out, or arrays that cannot be copied. A move asks, and a watch tells the server beforehand.

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "server/worker/images.h"
#include "server/worker/session.h"

namespace gpupool::server {

// For people, each once; empty: nothing is known. Goes by the record and the code images, and asks the driver
// about no object. Reads code that was not read before: takes time. Any thread.
std::vector<std::string> hindrances(Session& session);

// The modules and libraries of which the driver has loaded something, each with the contexts where it has.
struct LoadedCode {
  uint64_t owner = 0, context = 0;
  const Images::Contents* contents = nullptr;  // null: not in the cache, or cannot be read
};
std::vector<LoadedCode> loadedCode(Session& session);
// Libraries that have managed variables and are loaded in no context (0) any more: those keep their values.
std::vector<LoadedCode> unloadedManaged(Session& session);

// Can all of such an array be copied to host memory and back?
bool canBeCopied(const CUDA_ARRAY3D_DESCRIPTOR_v2& shape);

// Tells what hinders a session, when that changes; at first it is nothing. A thread of its own looks, and
// reads code, at the lowest priority: what it has read, a move need not read while the program stands still.
class HindranceWatch {
 public:
  static constexpr std::chrono::milliseconds kLook{500};

  // Called on the thread of its own.
  using Report = std::function<void(const std::vector<std::string>&)>;
  HindranceWatch(Session& session, Report report);
  ~HindranceWatch();
  HindranceWatch(const HindranceWatch&) = delete;
  HindranceWatch& operator=(const HindranceWatch&) = delete;

 private:
  void run();

  Session& session_;
  Report report_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace gpupool::server
