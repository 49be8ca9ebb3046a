// Events of all work of a context (cuCtxRecordEvent, cuCtxWaitEvent): over the streams of the primary
// context, of another one, and of a green context; what is not part of them; what captures and wrong handles
// get. A host function holds a stream, so that nothing here depends on how long work takes.
#include <atomic>
#include <chrono>
#include <thread>

#include "driver_check.h"

namespace {

constexpr int kCount = 3000, kThreads = 128, kBlocks = (kCount + kThreads - 1) / kThreads;

__global__ void add(int* values, int what) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) values[i] += what;
}
__global__ void scale(int* values, int by) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) values[i] *= by;
}

__global__ void tally(int* sum, int what) {
  if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(sum, what);
}

void launch(CUstream stream, void (*kernel)(int*, int), int* values, int argument) {
  kernel<<<kBlocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(values, argument);
  CUDA(cudaGetLastError());
}

// Holds one stream until it is opened.
class Hold {
 public:
  explicit Hold(CUstream stream) {
    DRIVER(cuLaunchHostFunc(
        stream,
        [](void* self) {
          while (!static_cast<Hold*>(self)->open_) std::this_thread::yield();
        },
        this));
  }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_{false};
};

struct World {
  CUdevice device = 0;
  CUcontext primary = nullptr, other = nullptr, green = nullptr;
  CUgreenCtx greenContext = nullptr;
  CUstream free = nullptr, blocking = nullptr, ofGreen = nullptr, ofOther = nullptr;
  CUevent event = nullptr, otherEvent = nullptr;  // of the primary context, and of the other one
  int *values = nullptr, *more = nullptr;         // of the primary context
};

CUevent makeEvent(unsigned flags = CU_EVENT_DISABLE_TIMING) {
  CUevent event = nullptr;
  DRIVER(cuEventCreate(&event, flags));
  return event;
}

World make() {
  World w;
  DRIVER(cuInit(0));
  DRIVER(cuDeviceGet(&w.device, 0));
  DRIVER(cuCtxCreate(&w.other, nullptr, 0, w.device));
  DRIVER(cuStreamCreate(&w.ofOther, CU_STREAM_NON_BLOCKING));
  w.otherEvent = makeEvent();
  DRIVER(cuCtxPopCurrent(nullptr));
  CUDA(cudaSetDevice(0));
  CUDA(cudaFree(nullptr));
  DRIVER(cuCtxGetCurrent(&w.primary));
  REQUIRE(w.primary != w.other);
  CUdevResource all = {};
  CUdevResourceDesc description = nullptr;
  DRIVER(cuDeviceGetDevResource(w.device, &all, CU_DEV_RESOURCE_TYPE_SM));
  DRIVER(cuDevResourceGenerateDesc(&description, &all, 1));
  DRIVER(cuGreenCtxCreate(&w.greenContext, description, w.device, CU_GREEN_CTX_DEFAULT_STREAM));
  DRIVER(cuCtxFromGreenCtx(&w.green, w.greenContext));
  DRIVER(cuGreenCtxStreamCreate(&w.ofGreen, w.greenContext, CU_STREAM_NON_BLOCKING, 0));
  DRIVER(cuStreamCreate(&w.free, CU_STREAM_NON_BLOCKING));
  DRIVER(cuStreamCreate(&w.blocking, CU_STREAM_DEFAULT));
  w.event = makeEvent();
  for (int** memory : {&w.values, &w.more}) CUDA(cudaMalloc(memory, kCount * sizeof(int)));
  // Code is loaded before a stream is held: that may wait for the device.
  for (auto kernel : {add, scale, tally}) launch(w.free, kernel, w.values, 1);
  DRIVER(cuStreamSynchronize(w.free));
  return w;
}

void set(int* memory, int value) {
  const std::vector<int> values(kCount, value);
  CUDA(cudaMemcpy(memory, values.data(), kCount * sizeof(int), cudaMemcpyHostToDevice));
  DRIVER(cuCtxSynchronize());
}
void every(const char* what, const int* device, int expected) {
  std::vector<int> values(kCount);
  CUDA(cudaMemcpy(values.data(), device, kCount * sizeof(int), cudaMemcpyDeviceToHost));
  check::same(what, values, std::vector<int>(kCount, expected));
}

// The event comes behind what `stream` has to do at that time.
void records(World& w, const char* what, CUcontext context, CUstream stream) {
  set(w.values, 5);
  Hold hold(stream);
  launch(stream, scale, w.values, 3);
  DRIVER(cuCtxRecordEvent(context, w.event));
  REQUIRE(cuEventQuery(w.event) == CUDA_ERROR_NOT_READY);
  hold.open();
  DRIVER(cuEventSynchronize(w.event));
  every(what, w.values, 15);
}

// Nor does a stream's end before its work is done change that.
void ended(World& w) {
  for (const unsigned flags : {unsigned(CU_STREAM_NON_BLOCKING), unsigned(CU_STREAM_DEFAULT)}) {
    CUstream stream = nullptr;
    DRIVER(cuStreamCreate(&stream, flags));
    set(w.values, 5);
    Hold hold(stream);
    launch(stream, scale, w.values, 3);
    DRIVER(cuStreamDestroy(stream));
    DRIVER(cuCtxRecordEvent(w.primary, w.event));
    REQUIRE(cuEventQuery(w.event) == CUDA_ERROR_NOT_READY);
    hold.open();
    DRIVER(cuEventSynchronize(w.event));
    every("a stream that has ended", w.values, 15);
  }
}

// All of a context is done when it is synchronised, also what such a stream had to do.
void endedIsWaitedFor() {
  CUstream stream = nullptr;
  DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  Hold hold(stream);
  static std::atomic<bool> passed{false};
  DRIVER(cuLaunchHostFunc(stream, [](void*) { passed = true; }, nullptr));
  DRIVER(cuStreamDestroy(stream));
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // so that who does not wait is seen
    hold.open();
  });
  DRIVER(cuCtxSynchronize());
  REQUIRE(passed);
  opener.join();
  check::say("a context is synchronised with a stream that has ended");
}

// It does not come behind what `stream` has to do.
void passes(World& w, const char* what, CUcontext context, CUstream stream) {
  Hold hold(stream);
  DRIVER(cuCtxRecordEvent(context, w.event));
  DRIVER(cuEventSynchronize(w.event));
  hold.open();
  DRIVER(cuStreamSynchronize(stream));
  check::say("%s", what);
}

void record(World& w) {
  records(w, "all of a context with a stream", w.primary, w.free);
  records(w, "with a stream that blocks", w.primary, w.blocking);
  records(w, "with the default stream", w.primary, nullptr);
  records(w, "with a thread's default stream", w.primary, CU_STREAM_PER_THREAD);
  records(w, "with a green context's stream", w.primary, w.ofGreen);
  records(w, "all of a green context", w.green, w.ofGreen);
  ended(w);
  endedIsWaitedFor();
  passes(w, "a green context without the streams beside it", w.green, w.free);
  passes(w, "a context without those of another one", w.primary, w.ofOther);
  // What comes after the call is no part of it.
  DRIVER(cuCtxRecordEvent(w.primary, w.event));
  Hold hold(w.free);
  DRIVER(cuEventSynchronize(w.event));
  hold.open();
  DRIVER(cuStreamSynchronize(w.free));
  check::say("an event without what came later");
}

// What `stream` is given from here on comes behind `hold`.
void held(CUstream stream, Hold& hold, World& w, const char* what) {
  launch(stream, scale, w.values, 3);
  REQUIRE(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
  hold.open();
  DRIVER(cuStreamSynchronize(stream));
  every(what, w.values, 15);
}

void waits(World& w, const char* what, CUcontext context, CUstream stream) {
  set(w.values, 5);
  Hold hold(w.ofOther);
  DRIVER(cuEventRecord(w.otherEvent, w.ofOther));
  DRIVER(cuCtxWaitEvent(context, w.otherEvent));
  held(stream, hold, w, what);
}

void waitsLater(World& w, const char* what, CUcontext context, CUgreenCtx green) {
  set(w.values, 5);
  Hold hold(w.ofOther);
  DRIVER(cuEventRecord(w.otherEvent, w.ofOther));
  DRIVER(cuCtxWaitEvent(context, w.otherEvent));
  CUstream later = nullptr;
  if (green == nullptr)
    DRIVER(cuStreamCreate(&later, CU_STREAM_NON_BLOCKING));
  else
    DRIVER(cuGreenCtxStreamCreate(&later, green, CU_STREAM_NON_BLOCKING, 0));
  held(later, hold, w, what);
  DRIVER(cuStreamDestroy(later));
}

void wait(World& w) {
  waits(w, "a stream of a context that waits", w.primary, w.free);
  waits(w, "a stream that blocks", w.primary, w.blocking);
  waits(w, "the default stream", w.primary, nullptr);
  waits(w, "a thread's default stream", w.primary, CU_STREAM_PER_THREAD);
  waits(w, "a green context's stream", w.primary, w.ofGreen);
  waits(w, "a stream of a green context that waits", w.green, w.ofGreen);
  waitsLater(w, "a stream that came later", w.primary, nullptr);
  waitsLater(w, "a green context's stream that came later", w.primary, w.greenContext);
  waitsLater(w, "one of a green context that waits", w.green, w.greenContext);
  // Beside a green context that waits.
  set(w.values, 2);
  Hold hold(w.ofOther);
  DRIVER(cuEventRecord(w.otherEvent, w.ofOther));
  DRIVER(cuCtxWaitEvent(w.green, w.otherEvent));
  launch(w.free, add, w.values, 3);
  DRIVER(cuStreamSynchronize(w.free));
  hold.open();
  DRIVER(cuStreamSynchronize(w.ofGreen));
  every("a stream beside a green context that waits", w.values, 5);
}

// From context to context, with events that keep times, again and again.
void backAndForth(World& w) {
  set(w.values, 1);
  set(w.more, 1);
  CUevent first = makeEvent(CU_EVENT_DEFAULT), last = makeEvent(CU_EVENT_DEFAULT);
  DRIVER(cuCtxRecordEvent(w.primary, first));
  int expected = 1;
  for (int round = 0; round < 50; ++round) {
    launch(w.free, add, w.values, 2);
    launch(w.blocking, add, w.more, 2);
    DRIVER(cuCtxRecordEvent(w.primary, w.event));
    DRIVER(cuCtxWaitEvent(w.green, w.event));
    launch(w.ofGreen, scale, w.values, round % 5 == 0 ? 2 : 1);
    launch(w.ofGreen, scale, w.more, round % 5 == 0 ? 2 : 1);
    DRIVER(cuCtxRecordEvent(w.green, w.event));
    DRIVER(cuCtxWaitEvent(w.primary, w.event));
    expected = (expected + 2) * (round % 5 == 0 ? 2 : 1);
  }
  DRIVER(cuCtxRecordEvent(w.primary, last));
  DRIVER(cuEventSynchronize(last));
  every("fifty rounds of two contexts", w.values, expected);
  every("in two streams", w.more, expected);
  float milliseconds = -1;
  DRIVER(cuEventElapsedTime(&milliseconds, first, last));
  REQUIRE(milliseconds >= 0);
  DRIVER(cuEventDestroy(first));
  DRIVER(cuEventDestroy(last));
}

// Threads that make streams and end them, while another one takes events of all of them.
void threads(World& w) {
  constexpr int kMakers = 3, kRounds = 100;
  set(w.values, 0);
  std::vector<std::thread> all;
  for (int t = 0; t < kMakers; ++t)
    all.emplace_back([&] {
      DRIVER(cuCtxSetCurrent(w.primary));
      for (int round = 0; round < kRounds; ++round) {
        CUstream stream = nullptr;
        DRIVER(cuStreamCreate(&stream, round % 2 == 0 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
        launch(stream, tally, w.values, 1);
        DRIVER(cuStreamDestroy(stream));
      }
    });
  for (int round = 0; round < kRounds; ++round) {
    DRIVER(cuCtxRecordEvent(w.primary, w.event));
    DRIVER(cuCtxWaitEvent(round % 2 == 0 ? w.primary : w.green, w.event));
  }
  for (std::thread& thread : all) thread.join();
  DRIVER(cuCtxRecordEvent(w.primary, w.event));
  DRIVER(cuEventSynchronize(w.event));
  int sum = 0;
  CUDA(cudaMemcpyAsync(&sum, w.values, sizeof sum, cudaMemcpyDeviceToHost,
                       reinterpret_cast<cudaStream_t>(w.free)));
  DRIVER(cuStreamSynchronize(w.free));
  REQUIRE(sum == kMakers * kRounds);
  check::say("events of streams that come and go in other threads");
}

// `call` while `stream` captures: refused, and the capture is spoilt; or neither.
template <class Call>
void capturing(const char* what, CUstream stream, bool spoils, Call&& call) {
  DRIVER(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  const CUresult status = call();
  CUgraph graph = nullptr;
  const CUresult ended = cuStreamEndCapture(stream, &graph);
  REQUIRE(ended == (spoils ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS));
  if (graph != nullptr) DRIVER(cuGraphDestroy(graph));
  check::say("%s: %s", what, check::resultName(status));
}

void captures(World& w) {
  CUevent captured = makeEvent();
  DRIVER(cuCtxRecordEvent(w.primary, w.event));
  capturing("a record while a stream captures", w.free, true,
            [&] { return cuCtxRecordEvent(w.primary, w.event); });
  capturing("a wait while a stream captures", w.free, true,
            [&] { return cuCtxWaitEvent(w.primary, w.event); });
  capturing("a record while a green context's stream captures", w.ofGreen, true,
            [&] { return cuCtxRecordEvent(w.primary, w.event); });
  capturing("a record of a green context that captures", w.ofGreen, true,
            [&] { return cuCtxRecordEvent(w.green, w.event); });
  capturing("a record of a green context beside a capture", w.free, false,
            [&] { return cuCtxRecordEvent(w.green, w.event); });
  capturing("a wait of another context beside a capture", w.free, false,
            [&] { return cuCtxWaitEvent(w.other, w.otherEvent); });
  capturing("a wait for an event of a capture", w.free, true, [&] {
    DRIVER(cuEventRecord(captured, w.free));
    return cuCtxWaitEvent(w.other, captured);
  });
  DRIVER(cuEventDestroy(captured));
  DRIVER(cuCtxRecordEvent(w.primary, w.event));
  DRIVER(cuEventSynchronize(w.event));
}

void errors(World& w) {
  CUevent never = makeEvent(), gone = makeEvent();
  DRIVER(cuEventDestroy(gone));
  DRIVER_GIVES(CUDA_SUCCESS, cuCtxWaitEvent(w.primary, never));
  DRIVER_GIVES(CUDA_ERROR_INVALID_CONTEXT, cuCtxRecordEvent(nullptr, w.event));
  DRIVER_GIVES(CUDA_ERROR_INVALID_CONTEXT, cuCtxWaitEvent(nullptr, w.event));
  DRIVER_GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxRecordEvent(w.primary, nullptr));
  DRIVER_GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxWaitEvent(w.primary, nullptr));
  DRIVER_GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxRecordEvent(w.primary, gone));
  DRIVER_GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxWaitEvent(w.primary, gone));
  DRIVER_GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxRecordEvent(w.primary, w.otherEvent));
  DRIVER_GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxRecordEvent(w.green, w.otherEvent));
  DRIVER(cuEventDestroy(never));
}

// The other context has the first one's event, and ends.
void destroy(World& w) {
  Hold hold(w.free);
  DRIVER(cuCtxRecordEvent(w.primary, w.event));
  DRIVER(cuCtxWaitEvent(w.other, w.event));
  hold.open();
  DRIVER(cuEventSynchronize(w.event));
  DRIVER(cuCtxDestroy(w.other));
  REQUIRE(cuCtxRecordEvent(w.other, w.event) != CUDA_SUCCESS);
  REQUIRE(cuCtxWaitEvent(w.other, w.event) != CUDA_SUCCESS);
  DRIVER(cuStreamDestroy(w.ofGreen));
  DRIVER(cuGreenCtxDestroy(w.greenContext));
  REQUIRE(cuCtxRecordEvent(w.green, w.event) != CUDA_SUCCESS);
  records(w, "the context without them", w.primary, w.free);
  DRIVER(cuStreamDestroy(w.free));
  DRIVER(cuStreamDestroy(w.blocking));
  DRIVER(cuEventDestroy(w.event));
  for (int* memory : {w.values, w.more}) CUDA(cudaFree(memory));
}

}  // namespace

int main() {
  World w = make();
  record(w);
  wait(w);
  backAndForth(w);
  threads(w);
  captures(w);
  errors(w);
  destroy(w);
  return check::pass();
}
