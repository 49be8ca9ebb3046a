// A process that forks after it has used CUDA: the child is told so; a child that runs a program anew may use
// CUDA; the parent goes on undisturbed.
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

__global__ void addOne(int* values) { values[threadIdx.x] += 1; }

static int finish(pid_t pid) {
  int status = -1;
  REQUIRE(pid > 0 && waitpid(pid, &status, 0) == pid);
  if (!WIFEXITED(status)) check::fail("the child ended by signal %d", WTERMSIG(status));
  return WEXITSTATUS(status);
}

int main(int argc, char** argv) {
  check::Device<int> values(std::vector<int>(32, 7));
  addOne<<<1, 32>>>(values);
  if (check::flag(argc, argv, "--anew")) {
    check::same("anew", values.read(), std::vector<int>(32, 8));
    return 0;
  }
  check::same("before", values.read(), std::vector<int>(32, 8));

  std::fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    void* pointer = nullptr;
    CUDA_GIVES(cudaErrorInitializationError, cudaMalloc(&pointer, 64));
    CUDA_GIVES(cudaErrorInitializationError, cudaDeviceSynchronize());
    std::_Exit(3);
  }
  REQUIRE(finish(pid) == 3);
  addOne<<<1, 32>>>(values);
  check::same("after a child", values.read(), std::vector<int>(32, 9));

  std::fflush(stdout);
  pid = fork();
  if (pid == 0) {
    execl("/proc/self/exe", argv[0], "--anew", static_cast<char*>(nullptr));
    std::_Exit(9);
  }
  REQUIRE(finish(pid) == 0);

  // A child that leaves through exit handlers must not disturb its parent either.
  pid = fork();
  if (pid == 0) std::exit(4);
  REQUIRE(finish(pid) == 4);
  addOne<<<1, 32>>>(values);
  check::same("after all", values.read(), std::vector<int>(32, 10));
  return check::pass();
}
