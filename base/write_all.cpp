#include "base/write_all.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>

namespace gpupool {
namespace {

bool awaitRoom(int descriptor, std::chrono::milliseconds bound) {
  using Clock = std::chrono::steady_clock;
  for (const auto end = Clock::now() + bound;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    pollfd room{descriptor, POLLOUT, 0};
    const int ready = poll(&room, 1, static_cast<int>(left));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

}  // namespace

bool writeAll(int descriptor, std::string_view text, std::chrono::milliseconds bound) {
  while (!text.empty()) {
    const ssize_t n = ::write(descriptor, text.data(), text.size());
    if (n > 0) {
      text.remove_prefix(static_cast<size_t>(n));
    } else if (n == 0 || (errno != EINTR && errno != EAGAIN)) {
      return false;
    } else if (errno == EAGAIN && !awaitRoom(descriptor, bound)) {
      return false;
    }
  }
  return true;
}

}  // namespace gpupool
