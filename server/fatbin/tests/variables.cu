// Variables of every kind, for what nvcc makes of them (symbols_test.cpp).
#include <cstdio>

__device__ int plain = 3;
__device__ int zeroed[100];
__device__ double matrix[3][5];
static __device__ int hidden = 5;
__device__ char big[16 << 20];
__constant__ float table[64];
static __constant__ int smallTable[3] = {1, 2, 3};
__managed__ int shared = 8;
__managed__ double sharedZeroed[10];
template <class T>
__device__ T perType = T(2);
namespace inside {
__device__ long long deep;
namespace {
__device__ short anonymous = 3;
}
}  // namespace inside
struct alignas(64) Wide {
  int values[17];
};
__device__ Wide wide;
__device__ float4 vector;
__device__ int unused;
struct Base {
  __device__ virtual int value() { return 1; }
};
struct Derived : Base {
  __device__ int value() override { return 2; }
};
__device__ int (*pointer)(int);
__device__ Base* object;

template <class T>
__device__ int callsOf() {
  static int calls = sizeof(T);
  return ++calls;
}
__device__ int twice(int x) { return x * 2; }

__global__ void use(int n) {
  __shared__ int block[10];
  static int own = 7;
  __shared__ Derived derived;
  block[n] = n;
  object = &derived;
  pointer = &twice;
  big[n] = 1;
  wide.values[n] = block[0];
  vector.x = sharedZeroed[n] + matrix[n][0];
  plain += hidden + zeroed[n] + table[n] + smallTable[n] + shared + perType<int> + inside::deep +
           inside::anonymous;
  plain += callsOf<double>() + own++ + sin(double(n)) + object->value() + pointer(n);
  printf("%d\n", plain);
}
