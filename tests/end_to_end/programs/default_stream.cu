// What waiting for the default stream waits for: the work of blocking streams too, also where nothing was
// sent to the default stream since. A host function holds a stream until another thread opens it, so that
// only a call that waits comes back behind that.
#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"

namespace {

constexpr auto kHeld = std::chrono::milliseconds(100);

__global__ void set(int* value, int what) { *value = what; }

std::atomic<bool> isOpen{false};

void hold(cudaStream_t stream) {
  isOpen = false;
  CUDA(cudaLaunchHostFunc(
      stream,
      [](void*) {
        while (!isOpen) std::this_thread::yield();
      },
      nullptr));
}

int* value = nullptr;

// A call that waits comes back when another thread has opened the stream. One that does not comes back before
// anybody would.
template <class Send, class Wait>
void ask(const char* what, bool waits, cudaStream_t stream, Send send, Wait wait) {
  CUDA(cudaDeviceSynchronize());
  hold(stream);
  set<<<1, 1, 0, stream>>>(value, 1);
  send();
  std::thread opener([&] {
    std::this_thread::sleep_for(kHeld);
    if (waits) isOpen = true;
  });
  wait();
  const bool waited = isOpen;
  opener.join();
  isOpen = true;
  check::say("%s: %s", what, waited ? "waits" : "does not wait");
}

template <class Query>
void query(const char* what, cudaStream_t stream, Query query) {
  CUDA(cudaDeviceSynchronize());
  hold(stream);
  const cudaError_t said = query();
  isOpen = true;
  CUDA(cudaDeviceSynchronize());
  check::say("%s: %s", what, cudaGetErrorName(said));
}

}  // namespace

int main() {
  cudaStream_t blocking, other, free;
  cudaEvent_t event;
  int *more = nullptr, got = 0, *pinned = nullptr;
  CUDA(cudaStreamCreate(&blocking));
  CUDA(cudaStreamCreate(&other));
  CUDA(cudaStreamCreateWithFlags(&free, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CUDA(cudaMalloc(&value, 4));
  CUDA(cudaMalloc(&more, 4));
  CUDA(cudaMallocHost(&pinned, 4));
  // The first launch loads its code, and may wait for the device.
  set<<<1, 1>>>(value, 0);
  CUDA(cudaMemcpy(&got, more, 4, cudaMemcpyDeviceToHost));
  CUDA(cudaMemset(more, 0, 4));
  CUDA(cudaDeviceSynchronize());
  const auto nothing = [] {};
  const auto synchronize = [](cudaStream_t stream) {
    return [stream] { CUDA(cudaStreamSynchronize(stream)); };
  };
  const auto launch = [&](cudaStream_t stream) { return [=] { set<<<1, 1, 0, stream>>>(more, 2); }; };

  ask("0, nothing sent to it", true, blocking, nothing, synchronize(nullptr));
  ask("legacy, nothing sent to it", true, blocking, nothing, synchronize(cudaStreamLegacy));
  ask("per thread, nothing sent to it", false, blocking, nothing, synchronize(cudaStreamPerThread));
  ask("0, beside a stream that does not block", false, free, nothing, synchronize(nullptr));
  ask("0, a kernel sent to it", true, blocking, launch(nullptr), synchronize(nullptr));
  ask("per thread, a kernel sent to it", false, blocking, launch(cudaStreamPerThread),
      synchronize(cudaStreamPerThread));
  ask("another blocking stream", false, blocking, launch(other), synchronize(other));
  ask("a blocking stream, behind the default one", false, nullptr, nothing, synchronize(blocking));
  ask("a blocking stream with a kernel, behind the default one", true, nullptr, launch(blocking),
      synchronize(blocking));
  ask("a stream that does not block, beside the default one", false, nullptr, launch(free),
      synchronize(free));
  ask("0, beside the per-thread stream", true, cudaStreamPerThread, nothing, synchronize(nullptr));
  ask(
      "an event of 0", true, blocking, [&] { CUDA(cudaEventRecord(event, nullptr)); },
      [&] { CUDA(cudaEventSynchronize(event)); });
  ask(
      "an event of 0, waited for by a stream that does not block", true, blocking,
      [&] {
        CUDA(cudaEventRecord(event, nullptr));
        CUDA(cudaStreamWaitEvent(free, event, 0));
      },
      synchronize(free));
  ask("a copy to pageable memory", true, blocking, nothing,
      [&] { CUDA(cudaMemcpy(&got, more, 4, cudaMemcpyDeviceToHost)); });
  ask("a copy to pinned memory", true, blocking, nothing,
      [&] { CUDA(cudaMemcpy(pinned, more, 4, cudaMemcpyDeviceToHost)); });
  ask("a memset", false, blocking, nothing, [&] { CUDA(cudaMemset(more, 0, 4)); });
  ask("the device", true, blocking, nothing, [&] { CUDA(cudaDeviceSynchronize()); });
  ask(
      "a host function of 0", true, blocking,
      [&] { CUDA(cudaLaunchHostFunc(nullptr, [](void* open) { *static_cast<int*>(open) = isOpen; }, &got)); },
      [&] {
        CUDA(cudaStreamSynchronize(nullptr));
        if (got != 1) check::fail("it ran before");
      });
  query("query of 0", blocking, [] { return cudaStreamQuery(nullptr); });
  query("query of per thread", blocking, [] { return cudaStreamQuery(cudaStreamPerThread); });
  query("query of 0, beside a stream that does not block", free, [] { return cudaStreamQuery(nullptr); });
  query("query of a blocking stream, behind the default one", nullptr,
        [&] { return cudaStreamQuery(blocking); });
  query("query of an event of 0", blocking, [&] {
    CUDA(cudaEventRecord(event, nullptr));
    return cudaEventQuery(event);
  });
  return check::pass();
}
