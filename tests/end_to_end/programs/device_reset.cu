// cudaDeviceReset and life after it: symbols are initial again, memory is gone, everything can be used
// afresh. Events that a destructor destroys after the reset, as programs do, take nothing with them.
#include "check.h"

__device__ int counter = 100;
__constant__ int step = 1;
__managed__ int managed = 3;

__global__ void count(int* output) {
  counter += step;
  *output = counter;
}
__global__ void useManaged() { managed += 4; }

static int run(int rounds) {
  int* output;
  CUDA(cudaMalloc(&output, sizeof(int)));
  for (int i = 0; i < rounds; ++i) count<<<1, 1>>>(output);
  CUDA(cudaGetLastError());
  int result = 0;
  CUDA(cudaMemcpy(&result, output, sizeof result, cudaMemcpyDeviceToHost));
  return result;  // the memory is left to the reset
}

struct Kept {
  cudaEvent_t recorded, fresh;
  explicit Kept(cudaStream_t stream) {
    for (cudaEvent_t* event : {&recorded, &fresh}) CUDA(cudaEventCreate(event));
    CUDA(cudaEventRecord(recorded, stream));
  }
  ~Kept() {
    for (cudaEvent_t event : {recorded, fresh}) cudaEventDestroy(event);  // whatever that gives
    cudaGetLastError();
  }
};

int main() {
  CUDA(cudaDeviceReset());  // before any use
  for (int life = 0; life < 3; ++life) {
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    const Kept events(stream);
    const int five = 5;
    CUDA(cudaMemcpyToSymbol(step, &five, sizeof five));
    const int result = run(4);
    managed = 3;  // it keeps its value over a reset
    useManaged<<<1, 1, 0, stream>>>();
    CUDA(cudaDeviceSynchronize());
    check::say("life %d: counter %d, managed %d", life, result, managed);
    REQUIRE(result == 120 && managed == 7);
    CUDA(cudaDeviceReset());
  }
  REQUIRE(run(1) == 101);
  int device = -1;
  CUDA(cudaGetDevice(&device));
  REQUIRE(device == 0);
  return check::pass();
}
