// What a capture forbids, to whom, and how it ends: the three modes, other threads, other streams, dropped
// captures.
#include <thread>

#include "check.h"

__global__ void addOne(int* value) { *value += 1; }

static cudaStream_t stream, unrelated;
static int* counter;

static void begin(cudaStreamCaptureMode mode) {
  CUDA(cudaStreamBeginCapture(stream, mode));
  addOne<<<1, 1, 0, stream>>>(counter);
  CUDA(cudaGetLastError());
}

static void end(const char* name, bool valid) {
  cudaGraph_t graph = nullptr;
  const cudaError_t status = cudaStreamEndCapture(stream, &graph);
  check::say("%s: the capture gives %s", name, cudaGetErrorName(status));
  REQUIRE(status == (valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated));
  REQUIRE((graph != nullptr) == valid);
  if (graph != nullptr) CUDA(cudaGraphDestroy(graph));
  cudaGetLastError();
}

// cudaMalloc is among the calls that a capture may forbid.
static cudaError_t allocate() {
  void* pointer = nullptr;
  const cudaError_t status = cudaMalloc(&pointer, 256);
  if (status == cudaSuccess) CUDA(cudaFree(pointer));
  cudaGetLastError();
  return status;
}

static cudaError_t allocateElsewhere() {
  cudaError_t status = cudaErrorUnknown;
  std::thread thread([&] { status = allocate(); });
  thread.join();
  return status;
}

static void byMode(const char* name, cudaStreamCaptureMode mode, cudaError_t here, cudaError_t elsewhere) {
  begin(mode);
  CUDA_GIVES(elsewhere, allocateElsewhere());
  end(name, elsewhere == cudaSuccess);
  begin(mode);
  CUDA_GIVES(here, allocate());
  end(name, here == cudaSuccess);
}

static void setUp() {
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&unrelated, cudaStreamNonBlocking));
  CUDA(cudaMalloc(&counter, sizeof(int)));
  CUDA(cudaMemset(counter, 0, sizeof(int)));
  addOne<<<1, 1, 0, unrelated>>>(counter);
  CUDA(cudaDeviceSynchronize());
}

static void modes() {
  const cudaError_t forbidden = cudaErrorStreamCaptureUnsupported;
  byMode("global", cudaStreamCaptureModeGlobal, forbidden, forbidden);
  byMode("thread-local", cudaStreamCaptureModeThreadLocal, forbidden, cudaSuccess);
  byMode("relaxed", cudaStreamCaptureModeRelaxed, cudaSuccess, cudaSuccess);

  // A thread may let itself do what its captures forbid.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  begin(cudaStreamCaptureModeGlobal);
  CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  REQUIRE(mode == cudaStreamCaptureModeGlobal);
  CUDA_GIVES(cudaSuccess, allocate());
  CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  end("exchanged", true);
}

static void otherStreams() {
  // Work on an unrelated stream goes on; the legacy stream may not be used while a blocking stream captures.
  begin(cudaStreamCaptureModeThreadLocal);
  addOne<<<1, 1, 0, unrelated>>>(counter);
  CUDA(cudaGetLastError());
  end("unrelated work", true);
  CUDA(cudaStreamSynchronize(unrelated));
  int value = 0;
  CUDA(cudaMemcpy(&value, counter, sizeof value, cudaMemcpyDeviceToHost));
  REQUIRE(value == 2);  // nothing captured has run
  cudaStream_t blocking;
  CUDA(cudaStreamCreate(&blocking));
  CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
  addOne<<<1, 1>>>(counter);
  CUDA_GIVES(cudaErrorStreamCaptureImplicit, cudaGetLastError());
  cudaGraph_t graph = nullptr;
  CUDA_GIVES(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(blocking, &graph));
  cudaGetLastError();

  // A stream destroyed while it captures takes the capture with it.
  CUDA(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
  CUDA(cudaStreamDestroy(blocking));
}

// Ended by another thread: only a relaxed capture may be.
static void otherThreads() {
  cudaGraph_t graph = nullptr;
  begin(cudaStreamCaptureModeThreadLocal);
  std::thread([&] {
    cudaGraph_t none = nullptr;
    CUDA_GIVES(cudaErrorStreamCaptureWrongThread, cudaStreamEndCapture(stream, &none));
    cudaGetLastError();
  }).join();
  CUDA_GIVES(cudaErrorIllegalState, cudaStreamEndCapture(stream, &graph));  // the attempt has ended it
  cudaGetLastError();
  begin(cudaStreamCaptureModeRelaxed);
  std::thread([&] { end("given away", true); }).join();
}

static void eventsAndInformation() {
  // Events recorded in a capture are of no use outside it.
  cudaEvent_t event;
  CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  begin(cudaStreamCaptureModeRelaxed);
  CUDA(cudaEventRecord(event, stream));
  CUDA_GIVES(cudaErrorCapturedEvent, cudaEventQuery(event));
  cudaGetLastError();
  end("after the event was queried", false);

  // Information about a capture.
  begin(cudaStreamCaptureModeRelaxed);
  cudaStreamCaptureStatus status;
  unsigned long long first = 0, second = 0;
  cudaGraph_t graph = nullptr;
  CUDA(cudaStreamGetCaptureInfo(stream, &status, &first, &graph, nullptr, nullptr, nullptr));
  REQUIRE(status == cudaStreamCaptureStatusActive && graph != nullptr);
  CUDA(cudaStreamGetCaptureInfo(unrelated, &status));
  REQUIRE(status == cudaStreamCaptureStatusNone);
  end("first", true);
  begin(cudaStreamCaptureModeRelaxed);
  CUDA(cudaStreamGetCaptureInfo(stream, &status, &second));
  REQUIRE(first != second);
  end("second", true);
  CUDA(cudaEventDestroy(event));
}

// The graph need not be asked for: where the program has it already, or wants to be rid of it.
static void endedUnseen() {
  begin(cudaStreamCaptureModeRelaxed);
  CUDA(cudaStreamEndCapture(stream, nullptr));
  REQUIRE(cudaStreamEndCapture(stream, nullptr) == cudaErrorIllegalState);
  cudaGetLastError();
  cudaGraph_t graph;
  CUDA(cudaGraphCreate(&graph, 0));
  CUDA(cudaStreamBeginCaptureToGraph(stream, graph, nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed));
  addOne<<<1, 1, 0, stream>>>(counter);
  CUDA(cudaStreamEndCapture(stream, nullptr));
  size_t nodes = 0;
  CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  REQUIRE(nodes == 1);
  CUDA(cudaGraphDestroy(graph));
}

int main() {
  setUp();
  endedUnseen();
  modes();
  otherStreams();
  otherThreads();
  eventsAndInformation();
  int value = 0;
  addOne<<<1, 1>>>(counter);
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaMemcpy(&value, counter, sizeof value, cudaMemcpyDeviceToHost));
  check::say("run in the end: %d", value);
  REQUIRE(value == 3);
  CUDA(cudaStreamDestroy(stream));
  CUDA(cudaStreamDestroy(unrelated));
  CUDA(cudaFree(counter));
  return check::pass();
}
