// Programs that ask for events again and again, as NCCL and PyTorch's allocators do: what the device wrote to
// mapped memory before an event is there when a query has said that the event is over; and whoever knows
// from elsewhere that it is over, is not told otherwise.
#include <unistd.h>

#include <chrono>
#include <deque>
#include <thread>

#include "check.h"

constexpr int kSlots = 64, kRounds = 300, kOrders = 100;

__global__ void set(int* mapped, int slot, int value) { mapped[slot] = value; }
__global__ void count(unsigned* counter, int cycles) {
  for (const long long end = clock64() + cycles; clock64() < end;) {
  }
  atomicAdd(counter, 1);
}

struct Mapped {
  int *host = nullptr, *device = nullptr;
  explicit Mapped(int slots) {
    CUDA(cudaHostAlloc(&host, slots * sizeof(int), cudaHostAllocMapped));
    CUDA(cudaHostGetDevicePointer(&device, host, 0));
    for (int i = 0; i < slots; ++i) host[i] = -1;
  }
  ~Mapped() { CUDA(cudaFreeHost(host)); }
  Mapped(const Mapped&) = delete;
};

struct Stream {
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  Stream() {
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  ~Stream() {
    CUDA(cudaEventDestroy(event));
    CUDA(cudaStreamDestroy(stream));
  }
  Stream(const Stream&) = delete;
  void record() const { CUDA(cudaEventRecord(event, stream)); }
};

static bool over(cudaEvent_t event) {
  const cudaError_t status = cudaEventQuery(event);
  REQUIRE(status == cudaSuccess || status == cudaErrorNotReady);
  return status == cudaSuccess;
}

static void poll(cudaEvent_t event) {
  while (!over(event)) std::this_thread::yield();
}

// Most rounds write nothing to mapped memory, so that it has often been seen unchanged.
static int writesAndQueries(const Stream& work, unsigned* counter, bool fresh) {
  Mapped first(kSlots);
  int wrong = 0;
  for (int i = 0; i < kRounds; ++i) {
    const bool writes = i % 7 == 3;
    count<<<1, 1, 0, work.stream>>>(counter, i % 5 * 1000);
    if (writes) set<<<1, 1, 0, work.stream>>>(first.device, i % kSlots, i);
    cudaEvent_t event = work.event;
    if (fresh) CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CUDA(cudaEventRecord(event, work.stream));
    poll(event);
    if (fresh) CUDA(cudaEventDestroy(event));
    if (writes && first.host[i % kSlots] != i) ++wrong;
    if (i % 50 != 20) continue;
    Mapped second(kSlots);  // more of it, in the middle
    set<<<1, 1, 0, work.stream>>>(second.device, 5, i);
    work.record();
    poll(work.event);
    if (second.host[5] != i) ++wrong;
  }
  return wrong;
}

// One after the other, in every way in which a program learns that work is over.
static int knownElsewhere(const Stream& work, const Stream& other, unsigned* counter) {
  int contradicted = 0;
  for (int i = 0; i < kOrders; ++i) {
    count<<<1, 1, 0, work.stream>>>(counter, 20'000);
    work.record();
    over(work.event);
    CUDA(cudaStreamWaitEvent(other.stream, work.event, 0));
    unsigned value = 0;
    switch (i % 5) {
      case 0:
        CUDA(cudaStreamSynchronize(other.stream));
        break;
      case 1:
        CUDA(cudaMemcpyAsync(&value, counter, sizeof value, cudaMemcpyDeviceToHost, other.stream));
        CUDA(cudaStreamSynchronize(other.stream));
        break;
      case 2:
        while (cudaStreamQuery(other.stream) != cudaSuccess) std::this_thread::yield();
        break;
      case 3:
        other.record();
        poll(other.event);
        break;
      case 4:
        CUDA(cudaDeviceSynchronize());
        break;
    }
    if (!over(work.event)) ++contradicted;
  }
  return contradicted;
}

// An event that nobody waits for is over at some time all the same.
static int laterAlone(const Stream& work, unsigned* counter) {
  int missing = 0;
  for (int i = 0; i < 20; ++i) {
    count<<<1, 1, 0, work.stream>>>(counter, 1000);
    work.record();
    over(work.event);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    bool ended = false;
    while (!(ended = over(work.event)) && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    missing += ended ? 0 : 1;
  }
  return missing;
}

// As NCCL does it: mapped memory that nobody writes, an event for every launch, and a look at the oldest ones
// before the next launch.
static int quiet(unsigned* counter) {
  Stream work;
  Mapped mapped(kSlots);
  std::deque<cudaEvent_t> open;
  for (int i = 0; i < 500; ++i) {
    while (!open.empty() && over(open.front())) {
      CUDA(cudaEventDestroy(open.front()));
      open.pop_front();
    }
    count<<<1, 1, 0, work.stream>>>(counter, 100);
    CUDA(cudaEventCreateWithFlags(&open.emplace_back(), cudaEventDisableTiming));
    CUDA(cudaEventRecord(open.back(), work.stream));
    usleep(300);
  }
  CUDA(cudaDeviceSynchronize());
  for (cudaEvent_t event : open) CUDA(cudaEventDestroy(event));
  return check::pass();
}

int main(int argc, char** argv) {
  unsigned* counter = nullptr;
  CUDA(cudaMalloc(&counter, sizeof *counter));
  CUDA(cudaMemset(counter, 0, sizeof *counter));
  if (check::flag(argc, argv, "--quiet")) return quiet(counter);
  Stream work, other;
  check::say("wrong behind a query: %d", writesAndQueries(work, counter, false));
  check::say("wrong behind a query of a new event: %d", writesAndQueries(work, counter, true));
  int wrong[2] = {};
  std::thread beside([&] { wrong[0] = writesAndQueries(other, counter, true); });
  wrong[1] = writesAndQueries(work, counter, false);
  beside.join();
  check::say("wrong in two threads: %d %d", wrong[0], wrong[1]);
  check::say("said to be running though known to be over: %d", knownElsewhere(work, other, counter));
  check::say("never over: %d", laterAlone(work, counter));
  unsigned launches = 0;
  CUDA(cudaMemcpy(&launches, counter, sizeof launches, cudaMemcpyDeviceToHost));
  check::say("launches: %u", launches);
  CUDA(cudaFree(counter));
  return check::pass();
}
