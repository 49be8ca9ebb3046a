// What a copy reads from host memory, and what it finds there, is decided when its stream gets there and not
// when it is called: behind a host function that writes the memory, behind a kernel that addresses it, behind
// another copy. Lines, planes and volumes; pinned memory, registered memory, and both after kernels addressed
// them. And the call does not wait for the stream: here streams stand still until the program lets them go
// on.
#include <unistd.h>

#include <atomic>
#include <thread>

#include "check.h"

constexpr int kWidth = 300, kPitch = 500, kHeight = 40, kDepth = 3;  // in ints, of planes and volumes
constexpr int kCount = kPitch * kHeight * kDepth;
constexpr size_t kRow = kWidth * sizeof(int), kLine = kPitch * sizeof(int);

__global__ void add(int* values, int count, int step) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    values[i] += step;
}

static void fill(int* values, int value) {
  for (int i = 0; i < kCount; ++i) values[i] = value + i;
}

struct Fill {
  int* values;
  int value;
};
// Late: whoever reads the bytes before it reads the wrong ones.
static void CUDART_CB fillLate(void* data) {
  const auto* job = static_cast<const Fill*>(data);
  usleep(20000);
  fill(job->values, job->value);
}

// A stream stands still at wait() until open().
struct Door {
  std::atomic<bool> opened{false};
  static void CUDART_CB stand(void* data) {
    while (!static_cast<Door*>(data)->opened) std::this_thread::yield();
  }
  void wait(cudaStream_t stream) { CUDA(cudaLaunchHostFunc(stream, &stand, this)); }
  void open() { opened = true; }
};

// Device memory of kCount ints, packed: volumes of kWidth x kHeight x kDepth, whatever their pitch on the
// host.
struct Device {
  int* memory = nullptr;
  Device() { CUDA(cudaMalloc(&memory, kCount * sizeof(int))); }
  ~Device() { cudaFree(memory); }
  std::vector<int> read(int count) const {
    std::vector<int> values(count);
    CUDA(cudaMemcpy(values.data(), memory, count * sizeof(int), cudaMemcpyDeviceToHost));
    return values;
  }
};

enum Shape { line, plane, volume };
static const char* const kShapes[] = {"line", "plane", "volume"};

static cudaMemcpy3DParms parameters(int* host, int* device, bool toDevice) {
  cudaMemcpy3DParms copy = {};
  const cudaPitchedPtr onHost = make_cudaPitchedPtr(host, kLine, kPitch, kHeight);
  const cudaPitchedPtr onDevice = make_cudaPitchedPtr(device, kRow, kWidth, kHeight);
  copy.srcPtr = toDevice ? onHost : onDevice;
  copy.dstPtr = toDevice ? onDevice : onHost;
  copy.extent = make_cudaExtent(kRow, kHeight, kDepth);
  copy.kind = toDevice ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  return copy;
}

static void upload(Shape shape, int* device, int* host, cudaStream_t stream) {
  if (shape == line) {
    CUDA(cudaMemcpyAsync(device, host, kCount * sizeof(int), cudaMemcpyHostToDevice, stream));
  } else if (shape == plane) {
    CUDA(cudaMemcpy2DAsync(device, kRow, host, kLine, kRow, kHeight, cudaMemcpyHostToDevice, stream));
  } else {
    const cudaMemcpy3DParms copy = parameters(host, device, true);
    CUDA(cudaMemcpy3DAsync(&copy, stream));
  }
}

static void download(Shape shape, int* host, int* device, cudaStream_t stream) {
  if (shape == line) {
    CUDA(cudaMemcpyAsync(host, device, kCount * sizeof(int), cudaMemcpyDeviceToHost, stream));
  } else if (shape == plane) {
    CUDA(cudaMemcpy2DAsync(host, kLine, device, kRow, kRow, kHeight, cudaMemcpyDeviceToHost, stream));
  } else {
    const cudaMemcpy3DParms copy = parameters(host, device, false);
    CUDA(cudaMemcpy3DAsync(&copy, stream));
  }
}

// How many ints the shape has, and where its i-th one lies on the host.
static int countOf(Shape shape) {
  return shape == line ? kCount : kWidth * kHeight * (shape == volume ? kDepth : 1);
}
static int placeOf(Shape shape, int i) { return shape == line ? i : i / kWidth * kPitch + i % kWidth; }

// The device has what fill(value) writes.
static void expectOnDevice(const char* name, Shape shape, const Device& device, int value) {
  const std::vector<int> got = device.read(countOf(shape));
  int wrong = 0;
  for (int i = 0; i < countOf(shape); ++i) wrong += got[i] != value + placeOf(shape, i);
  check::say("%s, %s: %d wrong", name, kShapes[shape], wrong);
  REQUIRE(wrong == 0);
}

static void behindAFunction(const char* name, int* host, cudaStream_t stream) {
  for (Shape shape : {line, plane, volume}) {
    Device device;
    Fill job = {host, 1000 * (shape + 1)};
    fill(host, 1);
    CUDA(cudaLaunchHostFunc(stream, &fillLate, &job));
    upload(shape, device.memory, host, stream);
    CUDA(cudaStreamSynchronize(stream));
    expectOnDevice(name, shape, device, job.value);
  }
}

// A caller who waits gets the same.
static void awaited(const char* name, int* host) {
  Device device;
  Fill job = {host, 7000};
  fill(host, 1);
  CUDA(cudaLaunchHostFunc(nullptr, &fillLate, &job));
  CUDA(cudaMemcpy2D(device.memory, kRow, host, kLine, kRow, kHeight, cudaMemcpyHostToDevice));
  expectOnDevice(name, plane, device, job.value);
}

static void behindAKernel(const char* name, int* host, cudaStream_t stream) {
  int* addressed = nullptr;
  CUDA(cudaHostGetDevicePointer(&addressed, host, 0));
  for (Shape shape : {line, plane, volume}) {
    Device device;
    fill(host, 10 * shape);
    add<<<8, 128, 0, stream>>>(addressed, kCount, 500);
    upload(shape, device.memory, host, stream);
    CUDA(cudaStreamSynchronize(stream));
    expectOnDevice(name, shape, device, 10 * shape + 500);
    REQUIRE(host[kCount - 1] == 10 * shape + 500 + kCount - 1);
  }
}

// Kernels go on with what a copy has brought; the first of them is called before it is there.
static void kernelsBehindACopy(const char* name, int* host, cudaStream_t stream) {
  for (Shape shape : {plane, line, volume}) {
    Device device;
    int wrong = 0;
    for (int round = 0; round < 5; ++round) {
      Fill late = {host, 2000 + round};
      fill(host, 1);
      CUDA(cudaMemsetAsync(device.memory, 0, kCount * sizeof(int), stream));
      CUDA(cudaLaunchHostFunc(stream, &fillLate, &late));
      download(shape, host, device.memory, stream);
      int* addressed = nullptr;
      CUDA(cudaHostGetDevicePointer(&addressed, host, 0));
      add<<<8, 128, 0, stream>>>(addressed, kCount, 1);
      usleep(round * 5000);
      for (int more = 0; more < 2; ++more) add<<<8, 128, 0, stream>>>(addressed, kCount, 1);
      CUDA(cudaStreamSynchronize(stream));
      std::vector<int> expected(kCount);
      for (int i = 0; i < kCount; ++i) expected[i] = 2000 + round + i + 3;
      for (int i = 0; i < countOf(shape); ++i) expected[placeOf(shape, i)] = 3;
      for (int i = 0; i < kCount; ++i) wrong += host[i] != expected[i];
    }
    check::say("%s, %s down, then kernels: %d wrong", name, kShapes[shape], wrong);
    REQUIRE(wrong == 0);
  }
}

// Down, and up again from there by the next copy; what lies between the rows stays as it is.
static void behindACopy(const char* name, int* host, cudaStream_t stream) {
  for (Shape shape : {plane, volume}) {
    Device from, to;
    fill(host, 20);
    upload(shape, from.memory, host, stream);
    add<<<8, 128, 0, stream>>>(from.memory, countOf(shape), 300);
    download(shape, host, from.memory, stream);
    upload(line, to.memory, host, stream);
    CUDA(cudaStreamSynchronize(stream));
    std::vector<int> expected(kCount);
    for (int i = 0; i < kCount; ++i) expected[i] = 20 + i;
    for (int i = 0; i < countOf(shape); ++i) expected[placeOf(shape, i)] += 300;
    const std::vector<int> got = to.read(kCount);
    int wrong = 0;
    for (int i = 0; i < kCount; ++i) wrong += (got[i] != expected[i]) + (host[i] != expected[i]);
    check::say("%s, %s down and up: %d wrong", name, kShapes[shape], wrong);
    REQUIRE(wrong == 0);
  }
}

// The calls return while the stream stands, and what is written before it goes on is what is copied.
static void standing(const char* name, int* host, cudaStream_t stream) {
  Device planes, volumes;
  Door door;
  Fill job = {host, 4000};
  fill(host, 1);
  door.wait(stream);
  CUDA(cudaLaunchHostFunc(stream, &fillLate, &job));
  upload(plane, planes.memory, host, stream);
  upload(volume, volumes.memory, host, stream);
  add<<<8, 128, 0, stream>>>(volumes.memory, countOf(volume), 5);
  download(volume, host, volumes.memory, stream);
  CUDA_IS(cudaErrorNotReady, cudaStreamQuery(stream));
  cudaGetLastError();
  REQUIRE(host[0] == 1);
  door.open();
  CUDA(cudaStreamSynchronize(stream));
  expectOnDevice(name, plane, planes, 4000);
  for (int i = 0; i < countOf(volume); ++i) REQUIRE(host[placeOf(volume, i)] == 4005 + placeOf(volume, i));
  REQUIRE(host[kWidth] == 4000 + kWidth && host[kPitch - 1] == 4000 + kPitch - 1);
}

// Two streams copy the columns of one image, to the device and back, side by side.
static void columns(const char* name, int* host, cudaStream_t const* streams) {
  constexpr int kHalf = kPitch / 2;
  Device device;
  for (int round = 0; round < 5; ++round) {
    fill(host, 0);
    for (int side = 0; side < 2; ++side) {
      int *mine = host + side * kHalf, *there = device.memory + side * kCount / 2;
      const int rows = kHeight * kDepth;
      CUDA(cudaMemcpy2DAsync(there, kHalf * sizeof(int), mine, kLine, kHalf * sizeof(int), rows,
                             cudaMemcpyHostToDevice, streams[side]));
      add<<<4, 128, 0, streams[side]>>>(there, kHalf * rows, 100 * (side + 1));
      CUDA(cudaMemcpy2DAsync(mine, kLine, there, kHalf * sizeof(int), kHalf * sizeof(int), rows,
                             cudaMemcpyDeviceToHost, streams[side]));
      CUDA(cudaMemcpy2DAsync(there, kHalf * sizeof(int), mine, kLine, kHalf * sizeof(int), rows,
                             cudaMemcpyHostToDevice, streams[side]));
      add<<<4, 128, 0, streams[side]>>>(there, kHalf * rows, 1);
      CUDA(cudaMemcpy2DAsync(mine, kLine, there, kHalf * sizeof(int), kHalf * sizeof(int), rows,
                             cudaMemcpyDeviceToHost, streams[side]));
    }
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < kCount; ++i) REQUIRE(host[i] == i + (i % kPitch < kHalf ? 101 : 201));
  }
  check::say("%s, columns on two streams are right", name);
}

// An array's plane, behind a host function.
static void arrays(const char* name, int* host, cudaStream_t stream) {
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<int>();
  cudaArray_t array;
  CUDA(cudaMallocArray(&array, &format, kWidth, kHeight));
  Fill job = {host, 6000};
  fill(host, 1);
  CUDA(cudaLaunchHostFunc(stream, &fillLate, &job));
  CUDA(cudaMemcpy2DToArrayAsync(array, 0, 0, host, kLine, kRow, kHeight, cudaMemcpyHostToDevice, stream));
  CUDA(cudaMemcpy2DFromArrayAsync(host + 7, kLine, array, 0, 0, kRow, kHeight, cudaMemcpyDeviceToHost,
                                  stream));
  CUDA(cudaStreamSynchronize(stream));
  int wrong = 0;
  for (int i = 0; i < countOf(plane); ++i) wrong += host[placeOf(plane, i) + 7] != 6000 + placeOf(plane, i);
  check::say("%s, array: %d wrong", name, wrong);
  REQUIRE(wrong == 0);
  CUDA(cudaFreeArray(array));
}

// Managed memory, which a program leaves alone while kernels run.
__managed__ int symbol[kCount];

static void managed(const char* name, int* values, cudaStream_t stream) {
  for (Shape shape : {line, plane, volume}) {
    Device device;
    fill(values, 30);
    add<<<8, 128, 0, stream>>>(values, kCount, 70);
    upload(shape, device.memory, values, stream);
    CUDA(cudaStreamSynchronize(stream));
    expectOnDevice(name, shape, device, 100);
    download(shape, values, device.memory, stream);
    for (int more = 0; more < 3; ++more) add<<<8, 128, 0, stream>>>(values, kCount, 1);
    CUDA(cudaStreamSynchronize(stream));
    int wrong = 0;
    for (int i = 0; i < kCount; ++i) wrong += values[i] != 103 + i;
    check::say("%s, %s down, then kernels: %d wrong", name, kShapes[shape], wrong);
    REQUIRE(wrong == 0);
  }
}

static void all(const char* name, int* host, cudaStream_t const* streams) {
  behindAFunction(name, host, streams[0]);
  awaited(name, host);
  behindACopy(name, host, streams[0]);
  standing(name, host, streams[0]);
  columns(name, host, streams);
  arrays(name, host, streams[0]);
  kernelsBehindACopy(name, host, streams[0]);
  behindAKernel(name, host, streams[0]);
  // Kernels have addressed it: what is known of it is more, what is right is the same.
  behindAFunction(name, host, streams[0]);
  behindACopy(name, host, streams[0]);
}

int main() {
  cudaStream_t streams[2];
  for (auto& stream : streams) CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  // Loaded ahead: loading code may wait for the device.
  add<<<1, 1, 0, streams[0]>>>(nullptr, 0, 0);
  CUDA(cudaDeviceSynchronize());
  int *pinned = nullptr, *mapped = nullptr;
  CUDA(cudaMallocHost(&pinned, kCount * sizeof(int)));
  all("pinned", pinned, streams);
  CUDA(cudaFreeHost(pinned));
  CUDA(cudaHostAlloc(&mapped, kCount * sizeof(int), cudaHostAllocMapped));
  all("mapped", mapped, streams);
  CUDA(cudaFreeHost(mapped));
  auto* registered = static_cast<int*>(std::malloc(kCount * sizeof(int)));
  CUDA(cudaHostRegister(registered, kCount * sizeof(int), cudaHostRegisterMapped));
  all("registered", registered, streams);
  CUDA(cudaHostUnregister(registered));
  std::free(registered);
  int* values = nullptr;
  CUDA(cudaMallocManaged(&values, kCount * sizeof(int)));
  managed("managed", values, streams[0]);
  CUDA(cudaFree(values));
  managed("symbol", symbol, streams[0]);
  for (cudaStream_t stream : streams) CUDA(cudaStreamDestroy(stream));
  return check::pass();
}
