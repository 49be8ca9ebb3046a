#include "client/process.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdio>

namespace gpupool::client::process {
namespace {

std::atomic<void (*)()> childHandler{nullptr};
pthread_once_t forkOnce = PTHREAD_ONCE_INIT;

void forked() {
  const State before = detail::state.load(std::memory_order_relaxed);
  if (before == State::fresh) return;
  detail::state.store(State::child, std::memory_order_relaxed);
  if (auto handler = childHandler.load(std::memory_order_relaxed);
      handler != nullptr && before != State::child) {
    handler();
  }
}

}  // namespace

namespace detail {
constinit std::atomic<State> state{State::fresh};
}

CUresult notReady(State state) {
  if (state == State::ready) return CUDA_SUCCESS;
  return state == State::lost ? CUDA_ERROR_DEINITIALIZED : CUDA_ERROR_NOT_INITIALIZED;
}

bool begin(CUresult* result) {
  // Not at load time: a library must not register handlers in programs that never use it.
  pthread_once(&forkOnce, [] { pthread_atfork(nullptr, nullptr, forked); });
  for (;;) {
    State expected = State::fresh;
    if (detail::state.compare_exchange_strong(expected, State::initialising)) return true;
    if (expected != State::initialising) {
      *result = notReady(expected);
      return false;
    }
    detail::state.wait(State::initialising);  // bounded by the other thread's own waits in cuInit
  }
}

void finish(CUresult result) {
  detail::state.store(result == CUDA_SUCCESS ? State::ready : State::fresh, std::memory_order_release);
  detail::state.notify_all();
}

void lose() {
  State expected = State::ready;
  detail::state.compare_exchange_strong(expected, State::lost);
}

void setChildHandler(void (*handler)()) { childHandler.store(handler); }

void commandName(char* out, size_t bytes) {
  if (bytes == 0) return;
  std::snprintf(out, bytes, "?");
  const int file = ::open("/proc/self/comm", O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  char text[64];
  const ssize_t length = ::read(file, text, sizeof text - 1);
  ::close(file);
  if (length <= 0) return;
  text[length] = '\0';
  std::snprintf(out, bytes, "%.*s", static_cast<int>(text[length - 1] == '\n' ? length - 1 : length), text);
}

}  // namespace gpupool::client::process
