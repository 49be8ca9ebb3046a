// Who waits for another process's event reads, in host memory that both have, what was copied before the event
// was recorded.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

constexpr int kTurns = 20, kCount = 1 << 20;

__global__ void fill(int* values, int value) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kCount; i += gridDim.x * blockDim.x) values[i] = value;
}

static int line = -1;
template <class T>
static void tell(const T& value) {
  REQUIRE(write(line, &value, sizeof value) == sizeof value);
}
template <class T>
static T hear() {
  T value{};
  REQUIRE(read(line, &value, sizeof value) == sizeof value);
  return value;
}

static void reads(const int* shared) {
  cudaEvent_t event;
  CUDA(cudaIpcOpenEventHandle(&event, hear<cudaIpcEventHandle_t>()));
  int old = 0;
  for (int turn = 1; turn <= kTurns; ++turn) {
    REQUIRE(hear<int>() == turn);
    CUDA(cudaEventSynchronize(event));
    bool all = true;
    for (int i = 0; i < kCount; i += 512) all &= shared[i] == turn;
    old += all ? 0 : 1;
    tell(turn);
  }
  CUDA(cudaEventDestroy(event));
  check::say("%d of %d reads were too early", old, kTurns);
  std::_Exit(old == 0 ? 0 : 1);
}

static void copies(int* shared) {
  int* values = nullptr;
  cudaEvent_t event;
  cudaStream_t stream;
  cudaIpcEventHandle_t handle;
  CUDA(cudaMalloc(&values, kCount * sizeof(int)));
  CUDA(cudaHostRegister(shared, kCount * sizeof(int), cudaHostRegisterDefault));
  CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA(cudaIpcGetEventHandle(&handle, event));
  tell(handle);
  for (int turn = 1; turn <= kTurns; ++turn) {
    fill<<<32, 256, 0, stream>>>(values, turn);
    CUDA(cudaMemcpyAsync(shared, values, kCount * sizeof(int), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaEventRecord(event, stream));
    tell(turn);
    REQUIRE(hear<int>() == turn);
  }
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaHostUnregister(shared));
}

int main() {
  const int file = memfd_create("shared", 0);
  REQUIRE(file >= 0 && ftruncate(file, kCount * sizeof(int)) == 0);
  void* const memory = mmap(nullptr, kCount * sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  REQUIRE(memory != MAP_FAILED);
  int* const shared = static_cast<int*>(memory);
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
  const pid_t other = fork();  // before CUDA
  line = ends[other == 0 ? 1 : 0];
  close(ends[other == 0 ? 0 : 1]);
  if (other == 0) reads(shared);
  copies(shared);
  int status = -1;
  REQUIRE(waitpid(other, &status, 0) == other);
  REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return check::pass();
}
