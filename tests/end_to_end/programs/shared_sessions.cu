// Two processes that use CUDA share memory of the program: both register it, and take turns with it, by
// copies and by kernels that reach it. What one has written, the other one reads.
//   --in-pool  and what gpupool cannot share with other processes is refused: pools, and memory of other APIs
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "check.h"

constexpr int kCount = 1 << 18;
constexpr int kTurns = 12;

struct Shared {
  std::atomic<int> turn;  // whose it is, in turns: even the parent's
  alignas(4096) int values[kCount];
};

__global__ void add(int* values, int step) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kCount; i += gridDim.x * blockDim.x)
    values[i] += step;
}

static void takeTurn(Shared* shared, int* mapped, int* device, int turn) {
  if (turn % 4 < 2) {
    CUDA(cudaMemcpyAsync(device, shared->values, sizeof shared->values, cudaMemcpyHostToDevice));
    add<<<32, 256>>>(device, turn);
    CUDA(cudaMemcpyAsync(shared->values, device, sizeof shared->values, cudaMemcpyDeviceToHost));
  } else {
    add<<<32, 256>>>(mapped, turn);
  }
  CUDA(cudaDeviceSynchronize());
}

static void takeTurns(Shared* shared, int mine) {
  int *mapped = nullptr, *device = nullptr;
  CUDA(cudaHostRegister(shared->values, sizeof shared->values, cudaHostRegisterMapped));
  CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&mapped), shared->values, 0));
  CUDA(cudaMalloc(reinterpret_cast<void**>(&device), sizeof shared->values));
  for (int turn = mine; turn < kTurns; turn += 2) {
    while (shared->turn != turn) usleep(200);
    takeTurn(shared, mapped, device, turn);
    shared->turn = turn + 1;
  }
  CUDA(cudaHostUnregister(shared->values));
  CUDA(cudaFree(device));
}

// By the driver library; the runtime finds no such function in it.
static void refuses(cudaError_t status, const char* what) {
  if (status != cudaErrorNotSupported && status != cudaErrorCallRequiresNewerDriver)
    check::fail("%s gave %s", what, cudaGetErrorName(status));
  cudaGetLastError();
}
#define REFUSES(call) refuses(call, #call)

static void refuseToShare() {
  cudaMemPoolProps pool{};
  cudaMemPool_t made = nullptr;
  pool.allocType = cudaMemAllocationTypePinned;
  pool.handleTypes = cudaMemHandleTypeFabric;
  pool.location = {cudaMemLocationTypeDevice, 0};
  REFUSES(cudaMemPoolCreate(&made, &pool));

  cudaExternalMemoryHandleDesc description{};
  cudaExternalMemory_t external = nullptr;
  description.type = cudaExternalMemoryHandleTypeOpaqueFd;
  description.size = 1 << 20;
  REFUSES(cudaImportExternalMemory(&external, &description));
}

int main(int argc, char** argv) {
  void* place = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(place != MAP_FAILED);
  auto* shared = static_cast<Shared*>(place);
  for (int i = 0; i < kCount; ++i) shared->values[i] = i;

  const pid_t other = fork();  // before CUDA: it has a session of its own
  if (other == 0) {
    takeTurns(shared, 1);
    std::_Exit(0);
  }
  takeTurns(shared, 0);
  if (check::flag(argc, argv, "--in-pool")) refuseToShare();
  while (shared->turn != kTurns) usleep(200);
  int status = -1;
  REQUIRE(waitpid(other, &status, 0) == other && status == 0);
  std::vector<int> expected(kCount);
  for (int i = 0; i < kCount; ++i) expected[i] = i + kTurns * (kTurns - 1) / 2;
  check::same("after all turns", std::vector<int>(shared->values, shared->values + kCount), expected);
  return check::pass();
}
