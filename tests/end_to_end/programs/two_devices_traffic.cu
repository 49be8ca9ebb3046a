// Two devices in one process as frameworks use them: a thread and a stream for each, events and copies
// across, pools that the other may use, a graph over both. The first
// device and the last, which may be the same; with --devices 2 a second one must be there.
#include <thread>

#include "check.h"

constexpr int kCount = 1 << 14;
constexpr size_t kBytes = kCount * sizeof(int);

__global__ void addTo(int* values, int amount) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) values[i] += amount;
}
__global__ void addFrom(int* values, const int* other) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) values[i] += other[i];
}
static void add(int* values, int amount, cudaStream_t stream) {
  addTo<<<kCount / 128, 128, 0, stream>>>(values, amount);
  CUDA(cudaGetLastError());
}

static void expectAll(const char* what, const int* memory, int value) {
  std::vector<int> got(kCount);
  CUDA(cudaMemcpy(got.data(), memory, kBytes, cudaMemcpyDefault));
  for (int i = 0; i < kCount; ++i)
    if (got[i] != value) check::fail("%s: [%d] is %d, expected %d", what, i, got[i], value);
}

struct Side {
  int device = 0, other = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  int *values = nullptr, *inbox = nullptr;
};
static Side makeSide(int device, int other) {
  Side side;
  side.device = device, side.other = other;
  CUDA(cudaSetDevice(device));
  CUDA(cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&side.event, cudaEventDisableTiming));
  CUDA(cudaMalloc(&side.values, kBytes));
  CUDA(cudaMalloc(&side.inbox, kBytes));
  CUDA(cudaMemset(side.values, 0, kBytes));
  CUDA(cudaMemset(side.inbox, 0, kBytes));
  CUDA(cudaDeviceSynchronize());
  return side;
}

static bool canReach(const Side& side) {
  int can = 0;
  if (side.device != side.other) CUDA(cudaDeviceCanAccessPeer(&can, side.device, side.other));
  return can != 0;
}

// A ring of two: each adds one and hands its values on, in stream order, by events.
static void exchange(Side& a, Side& b) {
  for (int turn = 0; turn < 50; ++turn) {
    Side& from = turn % 2 ? b : a;
    Side& to = turn % 2 ? a : b;
    CUDA(cudaSetDevice(from.device));
    add(from.values, 1, from.stream);
    if (turn % 3 == 0)
      CUDA(cudaMemcpyPeerAsync(to.values, to.device, from.values, from.device, kBytes, from.stream));
    else
      CUDA(cudaMemcpyAsync(to.values, from.values, kBytes, cudaMemcpyDefault, from.stream));
    CUDA(cudaEventRecord(from.event, from.stream));
    CUDA(cudaStreamWaitEvent(to.stream, from.event, 0));
    if (turn % 10 == 0) CUDA(cudaEventSynchronize(from.event));
  }
  // The host may wait for either from whatever device is current.
  CUDA(cudaSetDevice(a.device));
  CUDA(cudaStreamSynchronize(b.stream));
  CUDA(cudaStreamSynchronize(a.stream));
  REQUIRE(cudaEventQuery(b.event) == cudaSuccess);
  expectAll("handed on", a.values, 50);
  expectAll("handed on", b.values, 50);
  check::say("values handed on fifty times");
}

// Each device's own thread; pinned memory of one process for both.
static void byThreads(Side sides[2]) {
  int* pinned = nullptr;
  CUDA(cudaHostAlloc(&pinned, 2 * kBytes, cudaHostAllocPortable));
  std::thread threads[2];
  for (int i = 0; i < 2; ++i)
    threads[i] = std::thread([&, i] {
      Side& side = sides[i];
      CUDA(cudaSetDevice(side.device));
      CUDA(cudaMemsetAsync(side.values, 0, kBytes, side.stream));
      for (int turn = 0; turn < 200; ++turn) {
        add(side.values, i + 1, side.stream);
        if (turn % 20 != 0) continue;
        int* host = pinned + i * kCount;
        CUDA(cudaMemcpyAsync(host, side.values, kBytes, cudaMemcpyDeviceToHost, side.stream));
        CUDA(cudaStreamSynchronize(side.stream));
        for (int k = 0; k < kCount; k += 97) REQUIRE(host[k] == (turn + 1) * (i + 1));
      }
      int current = -1;
      CUDA(cudaGetDevice(&current));
      REQUIRE(current == side.device);
      CUDA(cudaDeviceSynchronize());
    });
  for (auto& thread : threads) thread.join();
  expectAll("first thread", sides[0].values, 200);
  expectAll("second thread", sides[1].values, 400);
  CUDA(cudaFreeHost(pinned));
  check::say("a thread for each device");
}

// Pools: of each device, opened to the other; freed from the other device's thread.
static void byPools(Side sides[2]) {
  cudaMemPool_t pools[2];
  for (int i = 0; i < 2; ++i) {
    Side& side = sides[i];
    CUDA(cudaSetDevice(side.device));
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = side.device;
    CUDA(cudaMemPoolCreate(&pools[i], &properties));
    if (canReach(side)) {
      cudaMemAccessDesc access{};
      access.location = properties.location;
      access.location.id = side.other;
      access.flags = cudaMemAccessFlagsProtReadWrite;
      CUDA(cudaMemPoolSetAccess(pools[i], &access, 1));
      cudaMemAccessFlags flags = cudaMemAccessFlagsProtNone;
      CUDA(cudaMemPoolGetAccess(&flags, pools[i], &access.location));
      REQUIRE(flags == cudaMemAccessFlagsProtReadWrite);
    }
  }
  for (int round = 0; round < 20; ++round) {
    int *mine = nullptr, *theirs = nullptr;
    Side &a = sides[round % 2], &b = sides[1 - round % 2];
    CUDA(cudaSetDevice(b.device));
    CUDA(cudaMallocFromPoolAsync(reinterpret_cast<void**>(&theirs), kBytes, pools[1 - round % 2], b.stream));
    CUDA(cudaMemsetAsync(theirs, 0, kBytes, b.stream));
    add(theirs, 7, b.stream);
    CUDA(cudaEventRecord(b.event, b.stream));
    CUDA(cudaSetDevice(a.device));
    CUDA(cudaMallocAsync(reinterpret_cast<void**>(&mine), kBytes, a.stream));
    CUDA(cudaMemsetAsync(mine, 0, kBytes, a.stream));
    CUDA(cudaStreamWaitEvent(a.stream, b.event, 0));
    if (a.device == b.device || canReach(b)) {
      addFrom<<<kCount / 128, 128, 0, a.stream>>>(mine, theirs);
      CUDA(cudaGetLastError());
    } else {
      CUDA(cudaMemcpyPeerAsync(mine, a.device, theirs, b.device, kBytes, a.stream));
    }
    CUDA(cudaStreamSynchronize(a.stream));
    expectAll("from the other's pool", mine, 7);
    cudaPointerAttributes attributes;
    CUDA(cudaPointerGetAttributes(&attributes, theirs));
    REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == b.device);
    CUDA(cudaFreeAsync(mine, a.stream));
    if (round % 2) {
      CUDA(cudaFree(theirs));
    } else {
      CUDA(cudaSetDevice(b.device));
      CUDA(cudaFreeAsync(theirs, b.stream));
    }
  }
  for (int i = 0; i < 2; ++i) {
    CUDA(cudaSetDevice(sides[i].device));
    CUDA(cudaStreamSynchronize(sides[i].stream));
    CUDA(cudaMemPoolDestroy(pools[i]));
  }
  check::say("pools of both");
}

// A capture that begins on one device and forks to the other.
static void byGraph(Side& a, Side& b) {
  cudaEvent_t fork, join;
  CUDA(cudaSetDevice(a.device));
  CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CUDA(cudaSetDevice(b.device));
  CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  CUDA(cudaMemset(b.values, 0, kBytes));
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaSetDevice(a.device));
  CUDA(cudaMemset(a.values, 0, kBytes));
  CUDA(cudaDeviceSynchronize());
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(a.stream, cudaStreamCaptureModeThreadLocal));
  add(a.values, 1, a.stream);
  CUDA(cudaEventRecord(fork, a.stream));
  CUDA(cudaStreamWaitEvent(b.stream, fork, 0));
  CUDA(cudaSetDevice(b.device));
  add(b.values, 10, b.stream);
  CUDA(cudaEventRecord(join, b.stream));
  CUDA(cudaSetDevice(a.device));
  CUDA(cudaStreamWaitEvent(a.stream, join, 0));
  CUDA(cudaMemcpyAsync(a.inbox, b.values, kBytes, cudaMemcpyDefault, a.stream));
  CUDA(cudaStreamEndCapture(a.stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 5; ++i) CUDA(cudaGraphLaunch(exec, a.stream));
  CUDA(cudaStreamSynchronize(a.stream));
  expectAll("graph, first device", a.values, 5);
  expectAll("graph, second device", b.values, 50);
  expectAll("graph, between them", a.inbox, 50);
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaEventDestroy(fork));
  CUDA(cudaEventDestroy(join));
  check::say("one graph over both");
}

// What does not fit together is refused, and nothing is broken by it.
static void mixedUp(Side& a, Side& b) {
  if (a.device != b.device) {
    CUDA(cudaSetDevice(a.device));
    REQUIRE(cudaEventRecord(a.event, b.stream) == cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    cudaEvent_t begin, end;
    float milliseconds = 0;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventRecord(begin, a.stream));
    CUDA(cudaSetDevice(b.device));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaEventRecord(end, b.stream));
    CUDA(cudaEventSynchronize(begin));
    CUDA(cudaEventSynchronize(end));
    REQUIRE(cudaEventElapsedTime(&milliseconds, begin, end) == cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
  }
  // Memory is cleared and given back from whatever device is current.
  int* memory = nullptr;
  CUDA(cudaSetDevice(b.device));
  CUDA(cudaMalloc(&memory, kBytes));
  CUDA(cudaSetDevice(a.device));
  CUDA(cudaMemset(memory, 0, kBytes));
  expectAll("cleared from the other device", memory, 0);
  CUDA(cudaFree(memory));
  check::say("what belongs to the other device");
}

int main(int argc, char** argv) {
  int devices = 0;
  CUDA(cudaGetDeviceCount(&devices));
  REQUIRE(devices >= check::option(argc, argv, "--devices", 1));
  const int last = devices - 1;
  Side sides[2] = {makeSide(0, last), makeSide(last, 0)};
  exchange(sides[0], sides[1]);
  for (const Side& side : sides) {
    if (!canReach(side)) continue;
    CUDA(cudaSetDevice(side.device));
    CUDA(cudaDeviceEnablePeerAccess(side.other, 0));
  }
  CUDA(cudaMemset(sides[0].values, 0, kBytes));
  CUDA(cudaDeviceSynchronize());
  exchange(sides[0], sides[1]);
  byThreads(sides);
  byPools(sides);
  byGraph(sides[0], sides[1]);
  mixedUp(sides[0], sides[1]);
  return check::pass();
}
