// An assertion that fails in a kernel: cudaErrorAssert, and every later call gives it too. The message goes
// to the standard error stream, before any call reports the failure.
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <string>

#include "check.h"

__global__ void checked(const int* values, int* output) {
  assert(values[threadIdx.x] < 100);
  output[threadIdx.x] = values[threadIdx.x];
}

// What was written to the standard error stream from here on, up to the last look.
class Errors {
 public:
  Errors() : file_(std::tmpfile()) { dup2(fileno(file_), STDERR_FILENO); }
  std::string read() {
    char text[4096];
    const ssize_t n = pread(fileno(file_), text, sizeof text, read_);
    if (n <= 0) return "";
    read_ += n;
    return std::string(text, static_cast<size_t>(n));
  }

 private:
  std::FILE* file_;
  off_t read_ = 0;
};

int main() {
  std::vector<int> values(64, 5);
  check::Device<int> input(values), output(64);
  checked<<<1, 64>>>(input, output);
  check::same("assertions that hold", output.read(), values);
  values[40] = 100;
  input.put(values);
  Errors errors;
  checked<<<1, 64>>>(input, output);
  CUDA(cudaPeekAtLastError());  // the launch itself is fine
  CUDA_GIVES(cudaErrorAssert, cudaDeviceSynchronize());
  const std::string said = errors.read();
  check::say("%s", said.c_str() + std::min(said.find("device_assert.cu"), said.size()));
  CUDA_GIVES(cudaErrorAssert, cudaGetLastError());
  CUDA_GIVES(cudaErrorAssert, cudaDeviceSynchronize());
  void* pointer = nullptr;
  CUDA_GIVES(cudaErrorAssert, cudaMalloc(&pointer, 16));
  CUDA_GIVES(cudaErrorAssert, cudaMemcpy(values.data(), output.get(), 4, cudaMemcpyDeviceToHost));
  checked<<<1, 64>>>(input, output);
  CUDA_GIVES(cudaErrorAssert, cudaGetLastError());
  REQUIRE(errors.read().empty());  // once
  return check::pass();
}
