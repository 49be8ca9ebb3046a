// A process that forks before it uses CUDA: two children use it, then the parent does.
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

__global__ void square(int* values) { values[threadIdx.x] *= values[threadIdx.x]; }

static void use(const char* who, int base) {
  std::vector<int> values(32), expected;
  for (int i = 0; i < 32; ++i) {
    values[i] = base + i;
    expected.push_back(values[i] * values[i]);
  }
  check::Device<int> device(values);
  square<<<1, 32>>>(device);
  check::same(who, device.read(), expected);
}

int main() {
  for (int child = 0; child < 2; ++child) {
    std::fflush(stdout);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      use(child == 0 ? "first child" : "second child", child * 100);
      std::exit(0);
    }
    int status = -1;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) check::fail("child %d ended with %d", child, status);
  }
  use("parent", 500);
  return check::pass();
}
