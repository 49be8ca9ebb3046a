#pragma once
// The state of this process: not yet initialised, in use, a forked child without a session, or disconnected.
//
// Every entry point asks `ready()` first: one relaxed load. After fork the child of an initialised process
// gets CUDA_ERROR_NOT_INITIALIZED from everything but the version, the error texts and address look-up, from
// cuInit too, as the driver does (measured on 580); a child forked before cuInit starts afresh.
//
// There is no shut-down handler where memory is shared: the library serves calls from static destructors and
// exit handlers as long as the connection is there. Over a network it leaves as an exit handler
// (calls/device.cpp). When it is gone, `lost()` makes cleanup calls (destroy, free, unload, release)
// silent successes.

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gpupool::client::process {

enum class State : uint8_t {
  fresh,         // before cuInit, or after one that failed
  initialising,  // one thread is in cuInit
  ready,
  child,  // forked from a process that had got beyond fresh
  lost,   // the connection is gone and does not come back
};

namespace detail {
extern std::atomic<State> state;
}

inline State state() { return detail::state.load(std::memory_order_acquire); }
inline bool inChild() { return state() == State::child; }

// CUDA_SUCCESS, CUDA_ERROR_NOT_INITIALIZED, or CUDA_ERROR_DEINITIALIZED once the connection is gone.
CUresult notReady(State state);
inline CUresult ready() {
  const State now = state();
  return __builtin_expect(now == State::ready, 1) ? CUDA_SUCCESS : notReady(now);
}
// For calls that only give something back: success once the connection is gone.
inline CUresult readyForCleanup(bool* skip) {
  const State now = state();
  *skip = now == State::lost;
  return now == State::ready || now == State::lost ? CUDA_SUCCESS : notReady(now);
}

// cuInit. begin returns true to the one thread that shall initialise; it must then call finish. Other threads
// wait in begin until that is decided; false means that *result is cuInit's answer.
bool begin(CUresult* result);
void finish(CUresult result);  // an error makes the process fresh again: a later cuInit may succeed
void lose();

// Runs in a forked child of an initialised process, before anything else of it: for closing descriptors and
// the like. Must be async-signal-safe. Set before finish.
void setChildHandler(void (*handler)());

// The command's name (/proc/self/comm) or "?", for display.
void commandName(char* out, size_t bytes);

}  // namespace gpupool::client::process
