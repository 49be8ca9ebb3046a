// Copies of registered memory: asynchronous, in their stream's order, and right beside host functions, other
// streams and graphs. A call that copies must not wait for the stream: here streams stand still until the
// program lets them go on, which it does only after the calls have returned.
#include <atomic>
#include <thread>

#include "check.h"

__global__ void add(int* values, int count, int step) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    values[i] += step;
}

constexpr int kCount = 3 << 20;  // several pieces of whatever a driver cuts copies into
constexpr size_t kBytes = kCount * sizeof(int);

static int* host;
static int* device;

// A stream stands still at wait() until open().
struct Door {
  std::atomic<bool> opened{false};
  static void CUDART_CB stand(void* data) {
    auto* door = static_cast<Door*>(data);
    while (!door->opened) std::this_thread::yield();
  }
  void wait(cudaStream_t stream) { CUDA(cudaLaunchHostFunc(stream, &stand, this)); }
  void open() { opened = true; }
};

static void fill(int value) {
  for (int i = 0; i < kCount; ++i) host[i] = value + i;
}
static void expect(const char* name, const int* values, int value) {
  int wrong = 0;
  for (int i = 0; i < kCount; ++i) wrong += values[i] != value + i;
  check::say("%s: %d wrong", name, wrong);
  REQUIRE(wrong == 0);
}

// The bytes are taken when the stream is there: what a host function ahead has written is what arrives.
static void CUDART_CB fillFrom(void* value) { fill(*static_cast<int*>(value)); }

static void standingStream(cudaStream_t stream) {
  Door door;
  int value = 1000;
  fill(1);
  door.wait(stream);
  CUDA(cudaLaunchHostFunc(stream, &fillFrom, &value));
  CUDA(cudaMemcpyAsync(device, host, kBytes, cudaMemcpyHostToDevice, stream));
  add<<<64, 256, 0, stream>>>(device, kCount, 5);
  CUDA(cudaMemcpyAsync(host, device, kBytes, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaMemcpyAsync(device, host, kBytes, cudaMemcpyHostToDevice,
                       stream));  // reads what the copy before wrote
  add<<<64, 256, 0, stream>>>(device, kCount, 7);
  CUDA(cudaMemcpyAsync(host, device, kBytes, cudaMemcpyDeviceToHost, stream));
  CUDA_GIVES(cudaErrorNotReady, cudaStreamQuery(stream));
  cudaGetLastError();
  door.open();
  CUDA(cudaStreamSynchronize(stream));
  expect("behind a host function", host, 1012);
}

// The program's own bytes, written while the stream stands and the copy is under way behind it, are no race:
// the copy has not begun.
static void writtenBehindADoor(cudaStream_t stream) {
  Door door;
  fill(2);
  door.wait(stream);
  CUDA(cudaMemcpyAsync(device, host, kBytes, cudaMemcpyHostToDevice, stream));
  fill(2000);
  door.open();
  CUDA(cudaStreamSynchronize(stream));
  std::vector<int> got(kCount);
  CUDA(cudaMemcpy(got.data(), device, kBytes, cudaMemcpyDeviceToHost));
  expect("written behind a door", got.data(), 2000);
}

// The default stream is behind streams that block, also behind one that has ended.
static void behindOthers() {
  for (const bool ends : {false, true}) {
    Door door;
    int value = ends ? 4000 : 3000;
    cudaStream_t other;
    CUDA(cudaStreamCreate(&other));
    fill(3);
    door.wait(other);
    CUDA(cudaLaunchHostFunc(other, &fillFrom, &value));
    if (ends) CUDA(cudaStreamDestroy(other));
    CUDA(cudaMemcpyAsync(device, host, kBytes, cudaMemcpyHostToDevice, cudaStreamLegacy));
    door.open();
    CUDA(cudaDeviceSynchronize());
    std::vector<int> got(kCount);
    CUDA(cudaMemcpy(got.data(), device, kBytes, cudaMemcpyDeviceToHost));
    expect(ends ? "behind a stream that has ended" : "behind a stream that blocks", got.data(), value);
    if (!ends) CUDA(cudaStreamDestroy(other));
  }
}

// One stream stands, another one's copies go on.
static void otherStream(cudaStream_t standing, cudaStream_t stream) {
  Door door;
  const int half = kCount / 2;
  fill(3000);
  door.wait(standing);
  CUDA(cudaMemcpyAsync(device, host, kBytes / 2, cudaMemcpyHostToDevice, standing));
  CUDA(cudaMemcpyAsync(device + half, host + half, kBytes / 2, cudaMemcpyHostToDevice, stream));
  add<<<64, 256, 0, stream>>>(device + half, half, 9);
  CUDA(cudaMemcpyAsync(host + half, device + half, kBytes / 2, cudaMemcpyDeviceToHost, stream));
  cudaEvent_t done;
  CUDA(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  CUDA(cudaEventRecord(done, stream));
  CUDA(cudaEventSynchronize(done));
  int wrong = 0;
  for (int i = half; i < kCount; ++i) wrong += host[i] != 3009 + i;
  check::say("beside a stream that stands: %d wrong", wrong);
  REQUIRE(wrong == 0);
  // By an event: the standing stream's copy reads what this stream's copy has brought.
  CUDA(cudaStreamWaitEvent(standing, done, 0));
  CUDA(cudaMemcpyAsync(device, host + half, kBytes / 2, cudaMemcpyHostToDevice, standing));
  CUDA(cudaMemcpyAsync(host, device, kBytes / 2, cudaMemcpyDeviceToHost, standing));
  door.open();
  CUDA(cudaStreamSynchronize(standing));
  wrong = 0;
  for (int i = 0; i < half; ++i) wrong += host[i] != 3009 + half + i;
  check::say("by an event: %d wrong", wrong);
  REQUIRE(wrong == 0);
  CUDA(cudaEventDestroy(done));
}

// A host function behind a copy reads what it brought; synchronous copies see it too; small ones are no
// different.
static std::atomic<int> seen;
static void CUDART_CB look(void*) { seen = host[kCount - 1]; }

static void mixed(cudaStream_t stream) {
  fill(4000);
  CUDA(cudaMemcpyAsync(device, host, kBytes, cudaMemcpyHostToDevice, stream));
  add<<<64, 256, 0, stream>>>(device, kCount, 1);
  CUDA(cudaMemcpyAsync(host, device, kBytes, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaLaunchHostFunc(stream, &look, nullptr));
  CUDA(cudaStreamSynchronize(stream));
  REQUIRE(seen == 4001 + kCount - 1);
  for (int round = 0; round < 50; ++round) {
    host[7] = round;
    CUDA(cudaMemcpyAsync(device + 7, host + 7, sizeof(int), cudaMemcpyHostToDevice, stream));
    add<<<1, 1, 0, stream>>>(device + 7, 1, 100);
    CUDA(cudaMemcpyAsync(host + 7, device + 7, sizeof(int), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    REQUIRE(host[7] == round + 100);
  }
  // The default stream waits for `stream`, which blocks; the caller waits for both.
  CUDA(cudaMemcpyAsync(host, device, kBytes, cudaMemcpyDeviceToHost, stream));
  host[8] = -1;
  CUDA(cudaMemcpy(device + 8, host + 8, sizeof(int), cudaMemcpyHostToDevice));
  CUDA(cudaMemcpy(host, device, kBytes, cudaMemcpyDeviceToHost));
  REQUIRE(host[9] == 4001 + 9 && host[7] == 149);
  check::say("mixed sizes and callers are right");
}

// Four streams, parts of one buffer, many rounds.
static void fourStreams() {
  cudaStream_t streams[4];
  const int part = kCount / 4;
  fill(5000);
  CUDA(cudaMemcpy(device, host, kBytes, cudaMemcpyHostToDevice));
  for (auto& stream : streams) CUDA(cudaStreamCreate(&stream));
  for (int round = 0; round < 10; ++round)
    for (int s = 0; s < 4; ++s) {
      add<<<16, 256, 0, streams[s]>>>(device + s * part, part, 1);
      CUDA(cudaMemcpyAsync(host + s * part, device + s * part, kBytes / 4, cudaMemcpyDeviceToHost,
                           streams[s]));
    }
  CUDA(cudaDeviceSynchronize());
  expect("four streams", host, 5010);
  for (auto& stream : streams) CUDA(cudaStreamDestroy(stream));
}

// A graph copies registered memory, and ordinary memory; a host function in it changes both. What a launch
// leaves alone stays.
struct Buffers {
  int *registered, *ordinary;
  int count;
};
static void CUDART_CB bump(void* data) {
  auto* b = static_cast<Buffers*>(data);
  for (int i = 0; i < b->count; ++i) b->registered[i] += 1000, b->ordinary[i] += 2000;
}

static void inAGraph(cudaStream_t stream) {
  const int count = 50000;
  const size_t bytes = count * sizeof(int);
  std::vector<int> ordinary(count), other(count, -5);
  Buffers buffers = {host, ordinary.data(), count};
  int *a = device, *b = device + count;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaStream_t side;  // joined, and gone before the capture ends
  cudaEvent_t fork, join;
  CUDA(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  CUDA(cudaEventRecord(fork, stream));
  CUDA(cudaStreamWaitEvent(side, fork, 0));
  CUDA(cudaMemcpyAsync(a, host, bytes, cudaMemcpyHostToDevice, side));
  CUDA(cudaEventRecord(join, side));
  CUDA(cudaStreamWaitEvent(stream, join, 0));
  CUDA(cudaStreamDestroy(side));
  CUDA(cudaEventDestroy(fork));
  CUDA(cudaEventDestroy(join));
  CUDA(cudaMemcpyAsync(b, ordinary.data(), bytes, cudaMemcpyHostToDevice, stream));
  add<<<16, 256, 0, stream>>>(a, count, 1);
  add<<<16, 256, 0, stream>>>(b, count, 2);
  CUDA(cudaMemcpyAsync(host, a, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaMemcpyAsync(ordinary.data(), b, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaLaunchHostFunc(stream, &bump, &buffers));
  CUDA(cudaMemcpyAsync(a, host, bytes, cudaMemcpyHostToDevice, stream));
  CUDA(cudaMemcpyAsync(other.data() + 10, a, bytes - 20 * sizeof(int), cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < count; ++i) host[i] = i, ordinary[i] = -i;
  for (int launch = 0; launch < 3; ++launch) CUDA(cudaGraphLaunch(exec, stream));
  CUDA(cudaStreamSynchronize(stream));
  int wrong = 0;
  for (int i = 0; i < count; ++i) wrong += host[i] != i + 3003 || ordinary[i] != -i + 6006;
  for (int i = 0; i < count; ++i) wrong += other[i] != (i < 10 || i >= count - 10 ? -5 : i - 10 + 3003);
  check::say("in a graph: %d wrong", wrong);
  REQUIRE(wrong == 0);
  // Written between launches, and not at all.
  for (int i = 0; i < count; ++i) host[i] = 7, ordinary[i] = 8, other[i] = 9;
  CUDA(cudaGraphLaunch(exec, stream));
  CUDA(cudaStreamSynchronize(stream));
  REQUIRE(host[3] == 1008 && ordinary[3] == 2010 && other[9] == 9 && other[10] == 1008);
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
}

// From now on a kernel addresses the memory itself, between copies of it.
static void mapped(cudaStream_t stream) {
  int* onDevice = nullptr;
  fill(6000);
  CUDA(cudaMemcpyAsync(device, host, kBytes, cudaMemcpyHostToDevice, stream));
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaHostGetDevicePointer(&onDevice, host, 0));
  for (int round = 0; round < 3; ++round) {
    add<<<64, 256, 0, stream>>>(onDevice, kCount, 1);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpyAsync(device, host, kBytes, cudaMemcpyHostToDevice, stream));
    add<<<64, 256, 0, stream>>>(device, kCount, 1);
    CUDA(cudaMemcpyAsync(host, device, kBytes, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
  }
  expect("mapped", host, 6006);
}

int main() {
  host = static_cast<int*>(std::malloc(kBytes));
  CUDA(cudaHostRegister(host, kBytes, cudaHostRegisterMapped));
  CUDA(cudaMalloc(&device, kBytes));
  cudaStream_t blocking, free;
  CUDA(cudaStreamCreate(&blocking));
  CUDA(cudaStreamCreateWithFlags(&free, cudaStreamNonBlocking));
  // What is used behind closed doors is loaded ahead: loading code may wait for the device.
  add<<<1, 1, 0, free>>>(device, 0, 0);
  CUDA(cudaDeviceSynchronize());
  standingStream(free);
  writtenBehindADoor(free);
  behindOthers();
  otherStream(free, blocking);
  mixed(blocking);
  fourStreams();
  inAGraph(free);
  mapped(free);
  CUDA(cudaStreamDestroy(blocking));
  CUDA(cudaStreamDestroy(free));
  CUDA(cudaHostUnregister(host));
  CUDA(cudaFree(device));
  std::free(host);
  return check::pass();
}
