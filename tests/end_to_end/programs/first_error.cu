// The first CUDA call that fails, and what later calls say then: what a program sees of a pool in trouble.
// Without trouble it says so. Calls are made in rounds: allocate, fill, launch, copy back, check, free.
//   first_error [--seconds S] [--pinned MIB]
//     --seconds S   goes on for so long, or until a call fails; says "ready" after the first round
//     --until FILE  goes on until there is such a file, or a call fails; says "ready" likewise
//     --pinned MIB  allocates so much pinned memory in each round as well, and writes to all of it
//     --device MIB  allocates so much device memory first, and keeps it
//     --array MIB   the same as a CUDA array
//     --free yes    says then how much is free
//     --segment FILE  makes the file, maps it to be shared, and registers it, as NCCL does with its segments
// Exit status: 0 no call failed, 3 one did, 4 a result is wrong.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <cuda_runtime.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr int kNumbers = 1000;

__global__ void square(int* numbers) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < kNumbers) numbers[at] *= at;
}

bool failed(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return false;
  std::printf("%s: %s (%d)\n", call, cudaGetErrorName(error), static_cast<int>(error));
  return true;
}
#define TRY(call, ...) \
  if (failed(#call, call(__VA_ARGS__))) return 3

int usePinned(size_t bytes) {
  void* memory = nullptr;
  TRY(cudaMallocHost, &memory, bytes);
  std::memset(memory, 1, bytes);
  TRY(cudaFreeHost, memory);
  return 0;
}

int keep(size_t device, size_t array, bool sayFree) {
  void* memory = nullptr;
  cudaArray_t kept = nullptr;
  if (device != 0) TRY(cudaMalloc, &memory, device << 20);
  const cudaChannelFormatDesc number = cudaCreateChannelDesc<float>();
  if (array != 0) TRY(cudaMallocArray, &kept, &number, 1024, array << 8);
  size_t free = 0, total = 0;
  if (sayFree) {
    TRY(cudaMemGetInfo, &free, &total);
    std::printf("free %zu of %zu MiB\n", free >> 20, total >> 20);
  }
  return 0;
}

int registerSegment(const char* path) {
  constexpr size_t kBytes = 1 << 20;
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  void* memory = MAP_FAILED;
  if (file >= 0 && ftruncate(file, kBytes) == 0)
    memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  unlink(path);
  if (memory == MAP_FAILED) {
    std::perror(path);
    return 3;
  }
  TRY(cudaHostRegister, memory, kBytes, cudaHostRegisterMapped);
  TRY(cudaHostUnregister, memory);
  return 0;
}

int round(size_t pinned) {
  int count = 0;
  TRY(cudaGetDeviceCount, &count);
  int* numbers = nullptr;
  TRY(cudaMalloc, &numbers, kNumbers * sizeof(int));
  std::vector<int> host(kNumbers);
  for (int i = 0; i < kNumbers; ++i) host[i] = i;
  TRY(cudaMemcpy, numbers, host.data(), kNumbers * sizeof(int), cudaMemcpyHostToDevice);
  square<<<(kNumbers + 127) / 128, 128>>>(numbers);
  TRY(cudaGetLastError);
  TRY(cudaDeviceSynchronize);
  TRY(cudaMemcpy, host.data(), numbers, kNumbers * sizeof(int), cudaMemcpyDeviceToHost);
  for (int i = 0; i < kNumbers; ++i)
    if (host[i] != i * i) return 4;
  if (pinned != 0)
    if (const int status = usePinned(pinned); status != 0) return status;
  TRY(cudaFree, numbers);
  return 0;
}

// Programs try again, and clean up: none of it may say more than was said.
void tryAgain() {
  std::printf("later:");
  void* memory = nullptr;
  for (int i = 0; i < 2; ++i) std::printf(" %s", cudaGetErrorName(cudaMalloc(&memory, 16)));
  std::printf(" %s\n", cudaGetErrorName(cudaDeviceSynchronize()));
}

}  // namespace

int main(int count, char** words) {
  double seconds = 0;
  size_t pinned = 0, device = 0, array = 0;
  bool sayFree = false;
  const char* until = nullptr;
  const char* segment = nullptr;
  for (int i = 1; i + 1 < count; i += 2) {
    if (std::strcmp(words[i], "--seconds") == 0) seconds = std::atof(words[i + 1]);
    if (std::strcmp(words[i], "--until") == 0) until = words[i + 1];
    if (std::strcmp(words[i], "--segment") == 0) segment = words[i + 1];
    if (std::strcmp(words[i], "--device") == 0) device = std::strtoul(words[i + 1], nullptr, 10);
    if (std::strcmp(words[i], "--array") == 0) array = std::strtoul(words[i + 1], nullptr, 10);
    if (std::strcmp(words[i], "--free") == 0) sayFree = true;
    if (std::strcmp(words[i], "--pinned") == 0) pinned = std::strtoul(words[i + 1], nullptr, 10) << 20;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  int status = keep(device, array, sayFree);
  if (status == 0 && segment != nullptr) status = registerSegment(segment);
  if (status == 0) status = round(pinned);
  const auto goesOn = [&] {
    return until != nullptr ? access(until, F_OK) != 0 : std::chrono::steady_clock::now() < end;
  };
  if (status == 0 && goesOn()) {
    std::printf("ready\n");
    std::fflush(stdout);
    while (status == 0 && goesOn()) {
      status = round(pinned);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  if (status == 0) std::printf("no call failed\n");
  if (status == 3) tryAgain();
  if (status == 4) std::printf("a result is wrong\n");
  return status;
}
