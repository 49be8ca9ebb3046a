// Stream-ordered allocation: reuse on a stream and across streams, pools and their attributes, trimming, and
// allocation inside graphs.
#include "check.h"

__global__ void fill(int* values, int count, int value) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    values[i] = value + i;
}

__global__ void sumInto(const int* values, int count, unsigned long long* total) {
  unsigned long long sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    sum += values[i];
  atomicAdd(total, sum);
}

static uint64_t poolAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute) {
  uint64_t value = 0;
  CUDA(cudaMemPoolGetAttribute(pool, attribute, &value));
  return value;
}

static unsigned long long sumOf(int count, int value) {
  return static_cast<unsigned long long>(count) * value +
         static_cast<unsigned long long>(count) * (count - 1) / 2;
}

static cudaStream_t one, two;
static cudaEvent_t event;
static unsigned long long* totals;  // on the device, one for each part

static unsigned long long total(int which) {
  unsigned long long value = 0;
  CUDA(cudaMemcpy(&value, totals + which, sizeof value, cudaMemcpyDeviceToHost));
  return value;
}

static void setUp() {
  int supported = 0;
  CUDA(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, 0));
  REQUIRE(supported == 1);
  CUDA(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  CUDA(cudaMalloc(&totals, 4 * sizeof *totals));
  CUDA(cudaMemset(totals, 0, 4 * sizeof *totals));
  CUDA(cudaDeviceSynchronize());  // the streams do not wait for the NULL stream's memset
}

static void onStreams() {
  // Many short lives on one stream; the host never waits.
  unsigned long long expected = 0;
  for (int i = 0; i < 50; ++i) {
    const int count = 1000 + 777 * i;
    int* values;
    CUDA(cudaMallocAsync(&values, count * sizeof(int), one));
    fill<<<8, 128, 0, one>>>(values, count, i);
    sumInto<<<8, 128, 0, one>>>(values, count, totals);
    CUDA(cudaFreeAsync(values, one));
    expected += sumOf(count, i);
  }
  CUDA(cudaStreamSynchronize(one));
  REQUIRE(total(0) == expected);
  check::say("50 allocations on a stream: %llu", expected);

  // Allocated on one stream, used and freed on another, ordered by events.
  expected = 0;
  for (int i = 0; i < 20; ++i) {
    const int count = 50000;
    int* values;
    CUDA(cudaMallocAsync(&values, count * sizeof(int), one));
    fill<<<8, 128, 0, one>>>(values, count, i);
    CUDA(cudaEventRecord(event, one));
    CUDA(cudaStreamWaitEvent(two, event, 0));
    sumInto<<<8, 128, 0, two>>>(values, count, totals + 1);
    CUDA(cudaFreeAsync(values, two));
    expected += sumOf(count, i);
  }
  CUDA(cudaDeviceSynchronize());
  REQUIRE(total(1) == expected);
  check::say("20 allocations across streams: %llu", expected);
}

// The device's own pool, which gives back what is free at every synchronisation.
static void standardPool() {
  cudaMemPool_t standard, current;
  CUDA(cudaDeviceGetDefaultMemPool(&standard, 0));
  CUDA(cudaDeviceGetMemPool(&current, 0));
  REQUIRE(standard == current);
  REQUIRE(poolAttribute(standard, cudaMemPoolAttrReleaseThreshold) == 0);
  REQUIRE(poolAttribute(standard, cudaMemPoolAttrUsedMemCurrent) == 0);
  REQUIRE(poolAttribute(standard, cudaMemPoolAttrUsedMemHigh) > 0);
}

// A pool of one's own, which keeps what it has up to the threshold.
static void ownPool() {
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = 0;
  cudaMemPool_t pool;
  CUDA(cudaMemPoolCreate(&pool, &properties));
  uint64_t threshold = 64 << 20;
  CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
  REQUIRE(poolAttribute(pool, cudaMemPoolAttrReleaseThreshold) == threshold);
  int *a, *b;
  const int count = 1 << 20;
  CUDA(cudaMallocFromPoolAsync(&a, count * sizeof(int), pool, one));
  CUDA(cudaMallocFromPoolAsync(&b, count * sizeof(int), pool, one));
  fill<<<16, 128, 0, one>>>(a, count, 5);
  fill<<<16, 128, 0, one>>>(b, count, 6);
  sumInto<<<16, 128, 0, one>>>(a, count, totals + 2);
  sumInto<<<16, 128, 0, one>>>(b, count, totals + 2);
  CUDA(cudaStreamSynchronize(one));
  REQUIRE(total(2) == sumOf(count, 5) + sumOf(count, 6));
  REQUIRE(poolAttribute(pool, cudaMemPoolAttrUsedMemCurrent) == 2 * count * sizeof(int));
  CUDA(cudaFreeAsync(a, one));
  CUDA(cudaFreeAsync(b, one));
  CUDA(cudaStreamSynchronize(one));
  REQUIRE(poolAttribute(pool, cudaMemPoolAttrUsedMemCurrent) == 0);
  REQUIRE(poolAttribute(pool, cudaMemPoolAttrReservedMemCurrent) >= 2 * count * sizeof(int));
  CUDA(cudaMemPoolTrimTo(pool, 0));
  REQUIRE(poolAttribute(pool, cudaMemPoolAttrReservedMemCurrent) == 0);
  check::say("a pool keeps its memory until trimmed");
  uint64_t zero = 0;
  CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &zero));
  REQUIRE(poolAttribute(pool, cudaMemPoolAttrUsedMemHigh) == 0);

  cudaMemPool_t standard;
  CUDA(cudaDeviceGetDefaultMemPool(&standard, 0));
  CUDA(cudaDeviceSetMemPool(0, pool));
  CUDA(cudaMallocAsync(&a, 4096, one));
  REQUIRE(poolAttribute(pool, cudaMemPoolAttrUsedMemCurrent) == 4096);
  CUDA(cudaStreamSynchronize(one));
  CUDA(cudaFree(a));  // an ordinary free takes it too
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaDeviceSetMemPool(0, standard));
  CUDA(cudaMemPoolDestroy(pool));
}

static void mixed() {
  // Ordinary memory may be freed in stream order.
  int* a;
  CUDA(cudaMalloc(&a, 1 << 16));
  fill<<<1, 128, 0, one>>>(a, 1 << 14, 0);
  CUDA(cudaFreeAsync(a, one));
  CUDA(cudaStreamSynchronize(one));

  // Allocation captured into a graph, launched several times.
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal));
  CUDA(cudaMallocAsync(&a, 10000 * sizeof(int), one));
  fill<<<8, 128, 0, one>>>(a, 10000, 1);
  sumInto<<<8, 128, 0, one>>>(a, 10000, totals + 3);
  CUDA(cudaFreeAsync(a, one));
  CUDA(cudaStreamEndCapture(one, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 5; ++i) CUDA(cudaGraphLaunch(exec, one));
  CUDA(cudaStreamSynchronize(one));
  REQUIRE(total(3) == 5 * sumOf(10000, 1));
  check::say("allocation in a graph, 5 launches: %llu", 5 * sumOf(10000, 1));
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaDeviceGraphMemTrim(0));
  CUDA_GIVES(cudaErrorInvalidValue, cudaFreeAsync(reinterpret_cast<void*>(0x12345), one));
  cudaGetLastError();
}

int main() {
  setUp();
  onStreams();
  standardPool();
  ownPool();
  mixed();
  CUDA(cudaFree(totals));
  CUDA(cudaEventDestroy(event));
  CUDA(cudaStreamDestroy(one));
  CUDA(cudaStreamDestroy(two));
  return check::pass();
}
