// processes_share between programs that know nothing of one another but a socket. A host lends memory, an
// event and a piece by descriptor to whoever comes, one after the other, until stdin ends, and looks each
// time that what it has lent is as it should be. A visitor opens all of it and writes to it; before, it tries
// handles in which a bit was changed. A spy waits until stdin ends, and can open nothing: it is of another
// tenant or server, or the host has ended.
#include "processes_share.h"

namespace {

constexpr int kCount = 1 << 16;

struct Lent {
  cudaIpcMemHandle_t memory;
  cudaIpcEventHandle_t event;
  int from;  // where the memory's numbers begin behind the event, and the piece has this one everywhere
};

__global__ void addOne(int* values, int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) values[i] += 1;
}
__global__ void busy(long long cycles) {
  for (const long long end = clock64() + cycles; clock64() < end;) {
  }
}

std::vector<int> same(int number) { return std::vector<int>(kPiece / sizeof(int), number); }
int* numbersAt(CUdeviceptr address) { return reinterpret_cast<int*>(address); }

// ---- the host ----

// False: stdin has ended first.
bool comes(int descriptor) {
  pollfd wanted[] = {{descriptor, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
  REQUIRE(poll(wanted, 2, -1) > 0);
  return wanted[0].revents != 0;
}

}  // namespace

int host(const char* path) {
  CUDA(cudaSetDevice(0));
  int *before = nullptr, *values = nullptr, descriptor = -1;
  CUDA(cudaMalloc(&before, 4096));  // so that it is not the first of its extent
  CUDA(cudaMalloc(&values, kCount * sizeof(int)));
  CUDA(cudaMemcpy(values, counted(kCount, 0).data(), kCount * sizeof(int), cudaMemcpyHostToDevice));
  const CUmemGenericAllocationHandle piece = createPiece(descriptor);
  const CUdeviceptr address = mapPiece(piece, 0, 0);
  DRIVER(cuMemsetD32(address, 0, kPiece / sizeof(int)));
  cudaEvent_t event;
  CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
  Lent lent{};
  CUDA(cudaIpcGetMemHandle(&lent.memory, values));
  CUDA(cudaIpcGetEventHandle(&lent.event, event));
  const int listener = listenAt(path);
  check::say("lends");
  while (comes(listener)) {
    line = accepted(listener);
    ++lent.from;
    addOne<<<32, 256>>>(numbersAt(address), kPiece / sizeof(int));
    CUDA(cudaDeviceSynchronize());
    busy<<<1, 1>>>(300'000'000);
    addOne<<<32, 256>>>(values, kCount);
    CUDA(cudaEventRecord(event));
    tell(lent);
    sendDescriptor(descriptor);
    char done = 0;
    if (comes(line) && read(line, &done, 1) == 1) ++lent.from;  // a visitor has added 1
    check::same("the memory", contents(values, kCount), counted(kCount, lent.from));
    check::same("the piece", contents(numbersAt(address), kPiece / sizeof(int)), same(lent.from));
    CUDA(cudaEventQuery(event));
    close(line);
  }
  return check::pass();
}

// ---- who comes ----

namespace {

Lent come(const char* path, int& descriptor) {
  CUDA(cudaSetDevice(0));
  line = connectTo(path);
  const Lent lent = hear<Lent>();
  descriptor = receiveDescriptor();
  return lent;
}

bool opens(const cudaIpcMemHandle_t& handle, const Lent& lent) {
  void *opened = nullptr, *right = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess);
  if (status != cudaSuccess) {
    REQUIRE(status == cudaErrorInvalidValue || status == cudaErrorInvalidResourceHandle);
    REQUIRE(cudaGetLastError() == status);
    return false;
  }
  CUDA(cudaIpcOpenMemHandle(&right, lent.memory, cudaIpcMemLazyEnablePeerAccess));
  REQUIRE(right == opened);
  for (int i = 0; i < 2; ++i) CUDA(cudaIpcCloseMemHandle(opened));
  return true;
}
bool opens(const cudaIpcEventHandle_t& handle, const Lent&) {
  cudaEvent_t event = nullptr;
  const cudaError_t status = cudaIpcOpenEventHandle(&event, handle);
  if (status != cudaSuccess) {
    REQUIRE(status == cudaErrorInvalidValue || status == cudaErrorInvalidResourceHandle);
    REQUIRE(cudaGetLastError() == status);
    return false;
  }
  CUDA(cudaEventDestroy(event));
  return true;
}

// What is changed beside the token's 256 bits opens nothing, or says nothing.
template <class Handle>
void changed(const char* what, Handle handle, const Lent& lent) {
  int refused = 0;
  for (size_t bit = 0; bit < 8 * sizeof handle; ++bit) {
    const auto mask = static_cast<char>(1 << bit % 8);
    handle.reserved[bit / 8] ^= mask;
    refused += opens(handle, lent) ? 0 : 1;
    handle.reserved[bit / 8] ^= mask;
  }
  if (refused < 256) check::fail("%s: only %d changed bits are refused", what, refused);
  check::say("%s: each changed bit of its token is refused", what);
}

// What a handle of one kind begins with, and the other one's token.
template <class Handle, class Other>
void mixed(const Handle& handle, const Other& other, const Lent& lent) {
  for (const size_t begin : {0, 8, 16, 24, 32, 40}) {
    Handle forged = handle;
    std::memcpy(forged.reserved + begin, other.reserved + begin, sizeof forged - begin);
    REQUIRE(!opens(forged, lent));
  }
}

}  // namespace

int visit(const char* path) {
  int descriptor = -1;
  const Lent lent = come(path, descriptor);
  changed("memory", lent.memory, lent);
  changed("event", lent.event, lent);
  mixed(lent.memory, lent.event, lent);
  mixed(lent.event, lent.memory, lent);
  void* opened = nullptr;
  cudaEvent_t event = nullptr;
  cudaStream_t stream;
  CUmemGenericAllocationHandle piece = 0;
  CUDA(cudaIpcOpenMemHandle(&opened, lent.memory, cudaIpcMemLazyEnablePeerAccess));
  CUDA(cudaIpcOpenEventHandle(&event, lent.event));
  DRIVER(importPiece(piece, descriptor));
  const CUdeviceptr address = mapPiece(piece, 0, 0);
  int* values = static_cast<int*>(opened);
  std::vector<int> got(kCount);
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaStreamWaitEvent(stream, event, 0));
  CUDA(cudaMemcpyAsync(got.data(), values, kCount * sizeof(int), cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  check::same("the host's memory", got, counted(kCount, lent.from));
  check::same("the host's piece", contents(numbersAt(address), kPiece / sizeof(int)), same(lent.from));
  addOne<<<32, 256, 0, stream>>>(values, kCount);
  addOne<<<32, 256, 0, stream>>>(numbersAt(address), kPiece / sizeof(int));
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaIpcCloseMemHandle(opened));
  CUDA(cudaEventDestroy(event));
  dropPiece(piece, address);
  tell('a');
  return check::pass();
}

int spy(const char* path) {
  int descriptor = -1;
  const Lent lent = come(path, descriptor);
  check::say("has the handles");
  untilStdinEnds();
  void* opened = nullptr;
  cudaEvent_t event = nullptr;
  CUmemGenericAllocationHandle piece = 0;
  CUDA_IS(cudaErrorInvalidResourceHandle,
          cudaIpcOpenMemHandle(&opened, lent.memory, cudaIpcMemLazyEnablePeerAccess));
  CUDA_IS(cudaErrorInvalidResourceHandle, cudaIpcOpenEventHandle(&event, lent.event));
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, importPiece(piece, descriptor));
  cudaGetLastError();
  check::Device<int> usable(1000);  // nothing has happened to this process
  CUDA(cudaMemset(usable, 0, 1000 * sizeof(int)));
  addOne<<<1, 256>>>(usable, 1000);
  check::same("memory of its own", contents(usable, 1000), std::vector<int>(1000, 1));
  return check::pass();
}
