// When what kernels print appears: with every call that waits, before what the program itself prints next;
// across streams that wait for each other; before a stream callback; in a child process; with a reset; and,
// of one kernel, more than a message holds.
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

__global__ void say(int number) { printf("kernel %d\n", number); }
__global__ void sayMuch(int lines) {
  for (int i = 0; i < lines; ++i) printf("line %d of much, to be counted by nobody but the test itself\n", i);
}
__global__ void addOne(int* value) { *value += 1; }

static void CUDART_CB callback(cudaStream_t, cudaError_t status, void*) {
  check::say("callback, %s", cudaGetErrorName(status));
}

static void waits() {
  check::Device<int> value(std::vector<int>{1});
  int host = 5;
  say<<<1, 1>>>(1);
  CUDA(cudaMemcpy(&host, value.get(), sizeof host, cudaMemcpyDeviceToHost));
  check::say("after a copy to the host: %d", host);
  say<<<1, 1>>>(2);
  CUDA(cudaMemcpy(value.get(), &host, sizeof host, cudaMemcpyHostToDevice));
  CUDA(cudaStreamSynchronize(nullptr));
  check::say("after a copy from the host");
  cudaEvent_t event;
  CUDA(cudaEventCreate(&event));
  say<<<1, 1>>>(3);
  CUDA(cudaEventRecord(event));
  CUDA(cudaEventSynchronize(event));
  check::say("after an event");
  addOne<<<1, 1>>>(value);
  say<<<1, 1>>>(4);
  CUDA(cudaDeviceSynchronize());
  check::say("after the device");
  CUDA(cudaEventDestroy(event));
}

static void streams() {
  constexpr int kStreams = 4;
  cudaStream_t all[kStreams];
  cudaEvent_t turn;
  CUDA(cudaEventCreate(&turn));
  for (auto& stream : all) CUDA(cudaStreamCreate(&stream));
  for (int i = 0; i < 3 * kStreams; ++i) {
    cudaStream_t stream = all[i % kStreams];
    if (i != 0) CUDA(cudaStreamWaitEvent(stream, turn, 0));
    say<<<1, 1, 0, stream>>>(10 + i);
    CUDA(cudaEventRecord(turn, stream));
  }
  CUDA(cudaStreamSynchronize(all[kStreams - 1]));
  check::say("after the last of the streams");
  say<<<1, 1, 0, all[0]>>>(30);
  CUDA(cudaStreamAddCallback(all[0], callback, nullptr, 0));
  CUDA(cudaStreamSynchronize(all[0]));
  check::say("after a stream with a callback");
  for (auto& stream : all) CUDA(cudaStreamDestroy(stream));
  CUDA(cudaEventDestroy(turn));
}

// Too much for anybody to read: into a file, and its lines are compared.
static void much(int lines) {
  std::fflush(stdout);
  const int kept = dup(STDOUT_FILENO);
  std::FILE* file = std::tmpfile();
  dup2(fileno(file), STDOUT_FILENO);
  sayMuch<<<1, 1>>>(lines);
  const cudaError_t status = cudaDeviceSynchronize();
  dup2(kept, STDOUT_FILENO);
  close(kept);
  CUDA(status);
  std::rewind(file);
  char line[200], expected[200];
  int count = 0;
  for (; std::fgets(line, sizeof line, file) != nullptr; ++count) {
    std::snprintf(expected, sizeof expected, "line %d of much, to be counted by nobody but the test itself\n",
                  count);
    if (std::strcmp(line, expected) != 0) check::fail("line %d is: %s", count, line);
  }
  std::fclose(file);
  if (count != lines) check::fail("%d lines of %d", count, lines);
  check::say("%d long lines in order", count);
}

int main() {
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    say<<<1, 1>>>(0);
    CUDA(cudaDeviceSynchronize());
    check::say("in the child");
    std::_Exit(0);
  }
  int status = -1;
  REQUIRE(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
  waits();
  streams();
  much(15000);
  say<<<1, 1>>>(40);
  CUDA(cudaDeviceReset());
  check::say("after a reset");
  return check::pass();
}
