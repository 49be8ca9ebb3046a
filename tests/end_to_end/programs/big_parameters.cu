// Kernels with 20 KB of parameters, with odd layouts, and with none.
#include "check.h"

struct Big {
  int values[5000];
};
struct __align__(16) Aligned {
  char tag;
  double value;
};
struct Packed {
  char bytes[3];
};

__global__ void sumOf(Big big, unsigned long long* total) {
  unsigned long long sum = 0;
  for (int i = threadIdx.x; i < 5000; i += blockDim.x) sum += big.values[i];
  atomicAdd(total, sum);
}

__global__ void mixed(char a, short b, int c, long long d, float e, double f, Aligned g, Packed h, int4 i,
                      bool j, double* output) {
  output[0] = a;
  output[1] = b;
  output[2] = c;
  output[3] = static_cast<double>(d);
  output[4] = e;
  output[5] = f;
  output[6] = g.tag;
  output[7] = g.value;
  output[8] = h.bytes[0] * 10000 + h.bytes[1] * 100 + h.bytes[2];
  output[9] = i.x + i.y * 10 + i.z * 100 + i.w * 1000;
  output[10] = j;
}

// Writes to its parameter: every thread must have its own copy, and the next launch a fresh one.
__global__ void changes(Big big, int* output) {
  for (int k = 0; k < 4; ++k) big.values[threadIdx.x] += k + threadIdx.x;
  output[threadIdx.x] = big.values[threadIdx.x] + big.values[(threadIdx.x + 1) % 64];
}

__device__ int noArguments;
__global__ void none() { noArguments = 17; }

int main() {
  static Big big;
  check::Random random(25);
  unsigned long long expected = 0;
  for (int& value : big.values) expected += value = random.below(1000000);
  check::Device<unsigned long long> total(1);
  CUDA(cudaMemset(total, 0, sizeof(unsigned long long)));
  sumOf<<<1, 128>>>(big, total);
  CUDA(cudaGetLastError());
  check::say("20 KB of parameters: sum %llu", total.read()[0]);
  REQUIRE(total.read()[0] == expected);

  // The parameters are taken when the launch is made.
  CUDA(cudaMemset(total, 0, sizeof(unsigned long long)));
  for (int round = 0; round < 30; ++round) {
    sumOf<<<1, 128>>>(big, total);
    big.values[round] = 0;
  }
  unsigned long long later = 0, wanted = 0;
  check::Random again(25);
  static int original[5000];
  for (int& value : original) value = again.below(1000000);
  for (int round = 0; round < 30; ++round) {
    wanted += expected - later;
    later += original[round];
  }
  REQUIRE(total.read()[0] == wanted);
  check::say("30 launches with changing parameters: sum %llu", wanted);

  check::Device<double> output(11);
  Packed packed = {{1, 2, 3}};
  Aligned aligned = {'x', 2.5};
  mixed<<<1, 1>>>(-3, -300, 70000, -(1ll << 40), 1.5f, -2.25, aligned, packed, make_int4(1, 2, 3, 4), true,
                  output);
  check::same("mixed parameters", output.read(),
              std::vector<double>{-3, -300, 70000, -1099511627776.0, 1.5, -2.25, 'x', 2.5, 10203, 4321, 1});

  check::Device<int> sums(64);
  for (int round = 0; round < 2; ++round) changes<<<1, 64>>>(big, sums);
  std::vector<int> expectedSums;
  for (int i = 0; i < 64; ++i) expectedSums.push_back(big.values[i] + 6 + 4 * i + big.values[(i + 1) % 64]);
  check::same("changed copies", sums.read(), expectedSums);

  none<<<1, 1>>>();
  int value = 0;
  CUDA(cudaMemcpyFromSymbol(&value, noArguments, sizeof value));
  REQUIRE(value == 17);
  return check::pass();
}
