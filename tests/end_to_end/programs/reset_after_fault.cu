// cudaDeviceReset after a device fault: the process gets no device any more, and another process is not
// disturbed.
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

__global__ void writeTo(int* address) { *address = 1; }

static void faulty() {
  int* pointer = nullptr;
  CUDA(cudaMalloc(&pointer, 64));
  writeTo<<<1, 1>>>(reinterpret_cast<int*>(0x10));
  CUDA_GIVES(cudaErrorIllegalAddress, cudaDeviceSynchronize());
  cudaDeviceReset();
  cudaGetLastError();
  CUDA_GIVES(cudaErrorDevicesUnavailable, cudaMalloc(&pointer, 64));
  CUDA_GIVES(cudaErrorDevicesUnavailable, cudaMalloc(&pointer, 64));
}

int main() {
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    faulty();
    std::_Exit(0);
  }
  int status = -1;
  REQUIRE(pid > 0 && waitpid(pid, &status, 0) == pid);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) check::fail("the child ended with %d", status);
  check::Device<int> values(16);
  writeTo<<<1, 1>>>(values);
  CUDA(cudaDeviceSynchronize());
  REQUIRE(values.read()[0] == 1);
  return check::pass();
}
