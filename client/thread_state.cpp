#include "client/thread_state.h"

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "base/log.h"

namespace gpupool::client {

thread_local bool perThreadDefault __attribute__((tls_model("initial-exec"))) = false;
namespace {

std::atomic<void (*)(void*)> threadExit{nullptr};
pthread_key_t key;
pthread_once_t keyOnce = PTHREAD_ONCE_INIT;

void release(void* pointer) {
  auto* state = static_cast<ThreadState*>(pointer);
  if (auto handler = threadExit.load(std::memory_order_acquire);
      handler != nullptr && state->session != nullptr) {
    handler(state->session);
  }
  // The handler may have called in and so recreated nothing: the pointer still leads to this state.
  detail::threadStatePointer = nullptr;
  std::free(state->below);
  delete state;
}

}  // namespace

void setThreadExit(void (*handler)(void*)) { threadExit.store(handler, std::memory_order_release); }

namespace detail {

constinit thread_local ThreadState* threadStatePointer __attribute__((tls_model("initial-exec"))) = nullptr;

ThreadState& makeThreadState() {
  // A pthread key rather than a thread_local destructor: it works for threads that outlive main and costs no
  // registration in a library that may be unloaded by then.
  pthread_once(&keyOnce, [] { pthread_key_create(&key, release); });
  auto* state = new (std::nothrow) ThreadState;
  if (state == nullptr) {
    GPUPOOL_ERROR("out of host memory for the state of a thread");
    std::abort();
  }
  threadStatePointer = state;
  pthread_setspecific(key, state);
  return *state;
}

}  // namespace detail
}  // namespace gpupool::client
