#pragma once
// What the library remembers of each application thread. Allocated at a thread's first call, freed at its
// exit.
//
// One pointer of initial-exec thread storage leads here: reading it is a single instruction, and eight bytes
// fit into the static storage that the C library keeps for libraries loaded by dlopen. A thread-exit handler
// of an application that calls in after ours has run gets a fresh, empty state: as natively, the thread then
// has no current context.

#include <cuda.h>

#include <cstddef>

namespace gpupool::client {

struct Context;

struct ThreadState {
  CUcontext current = nullptr;  // top of the stack
  Context* context = nullptr;   // its object; null exactly when current is null
  // The entries below the top, oldest first.
  CUcontext* below = nullptr;
  size_t depth = 0, capacity = 0;
  // Belongs to the session: its state of this thread, given back through the handler of setThreadExit.
  void* session = nullptr;
};

// Runs on the exiting thread for every state whose `session` is set. Set once, before the first thread needs
// it.
void setThreadExit(void (*handler)(void* session));

namespace detail {
// constinit: says that no initialisation wrapper is needed around every access.
extern constinit thread_local ThreadState* threadStatePointer __attribute__((tls_model("initial-exec")));
ThreadState& makeThreadState();  // aborts with a message when memory for it cannot be had
}  // namespace detail

inline ThreadState& threadState() {
  ThreadState* state = detail::threadStatePointer;
  return state != nullptr ? *state : detail::makeThreadState();
}

// Set while a call came in by a per-thread name (_ptsz, _ptds): stream 0 then means the thread's own default
// stream.
extern thread_local bool perThreadDefault __attribute__((tls_model("initial-exec")));

}  // namespace gpupool::client
