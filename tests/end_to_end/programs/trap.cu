// Other ways for a kernel to end badly: a trap, and an access that is not aligned, each in a process of its
// own.
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

__global__ void trapped(int* values) {
  if (values[threadIdx.x] == 13) asm volatile("trap;");
}
__global__ void misaligned(char* base) { *reinterpret_cast<double*>(base + 4) = 1.0; }

static void inChild(const char* name, void (*body)()) {
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    body();
    std::_Exit(0);
  }
  int status = -1;
  REQUIRE(pid > 0 && waitpid(pid, &status, 0) == pid);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    check::fail("%s: the child ended with %d", name, status);
}

int main() {
  inChild("trap", [] {
    check::Device<int> values(std::vector<int>{1, 2, 13, 4});
    trapped<<<1, 2>>>(values);
    CUDA(cudaDeviceSynchronize());
    trapped<<<1, 4>>>(values);
    CUDA_GIVES(cudaErrorLaunchFailure, cudaDeviceSynchronize());
    CUDA_GIVES(cudaErrorLaunchFailure, cudaDeviceSynchronize());
  });
  inChild("misaligned", [] {
    check::Device<char> bytes(64);
    misaligned<<<1, 1>>>(bytes);
    CUDA_GIVES(cudaErrorMisalignedAddress, cudaDeviceSynchronize());
  });
  check::Device<int> values(std::vector<int>{1, 2, 3, 4});  // other processes' misfortunes are not this one's
  trapped<<<1, 4>>>(values);
  CUDA(cudaDeviceSynchronize());
  return check::pass();
}
