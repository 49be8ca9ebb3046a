// printf in kernels: every conversion, in order within a thread, and one kernel's output before the next
// one's.
#include "check.h"

__global__ void conversions() {
  printf("int %d %5d|%-5d|%05d %+d\n", -7, 42, 42, 42, 42);
  printf("unsigned %u hex %x %X %#x octal %o\n", 4000000000u, 0xabcdefu, 0xabcdefu, 255u, 8u);
  printf("long %ld %lld %llu %llx\n", -1234567890123l, -9000000000000000000ll, 18000000000000000000ull,
         1ull << 60);
  printf("float %f %.3f %10.2f|%-10.2f|%e %g\n", 1.5, 3.14159265, 2.5, 2.5, 12345.678, 0.0001);
  printf("char %c%c string %s %10s|%-10s|%.2s percent %%\n", 'o', 'k', "hello", "right", "left", "cut");
  printf("no arguments\n");
}

__global__ void inOrder(int from) {
  for (int i = from; i < from + 5; ++i) printf("line %d\n", i);
}

__global__ void fromThreads(int* returned) {
  for (int turn = 0; turn < blockDim.x; ++turn) {
    if (turn == threadIdx.x)
      returned[turn] = printf("thread %d of %d in block %d\n", threadIdx.x, blockDim.x, blockIdx.x);
    __syncthreads();
  }
}

int main() {
  conversions<<<1, 1>>>();
  CUDA(cudaDeviceSynchronize());
  check::say("-- kernels in a stream");
  for (int i = 0; i < 4; ++i) inOrder<<<1, 1>>>(i * 5);
  CUDA(cudaDeviceSynchronize());
  check::say("-- threads of a block, by turns");
  check::Device<int> returned(3);
  fromThreads<<<1, 3>>>(returned);
  CUDA(cudaDeviceSynchronize());
  for (int value : returned.read()) REQUIRE(value == 3);  // the number of arguments, not of characters
  size_t size = 0;
  CUDA(cudaDeviceGetLimit(&size, cudaLimitPrintfFifoSize));
  REQUIRE(size > 0);
  return check::pass();
}
