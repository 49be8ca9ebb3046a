// Calls that are resolved on the device at run time: tables of function pointers, pointers fetched by the
// host and passed back, virtual functions of objects that a kernel made, and recursion.
#include "check.h"

typedef int (*Operation)(int, int);

__device__ int plus(int a, int b) { return a + b; }
__device__ int minus(int a, int b) { return a - b; }
__device__ __noinline__ int times(int a, int b) { return a * b; }
__device__ Operation operations[] = {plus, minus, times};
__device__ Operation chosen = minus;

__global__ void viaTable(int* output) {
  const int i = threadIdx.x;
  output[i] = operations[i % 3](i, 7);
}

__global__ void viaArgument(Operation operation, int* output) {
  output[threadIdx.x] = operation(threadIdx.x, 100);
}

class Shape {
 public:
  __device__ virtual ~Shape() {}
  __device__ virtual int area() const = 0;
  __device__ virtual int corners() const { return 4; }
};
class Square : public Shape {
 public:
  __device__ explicit Square(int side) : side_(side) {}
  __device__ int area() const override { return side_ * side_; }

 private:
  int side_;
};
class Triangle : public Shape {
 public:
  __device__ Triangle(int base, int height) : base_(base), height_(height) {}
  __device__ int area() const override { return base_ * height_ / 2; }
  __device__ int corners() const override { return 3; }

 private:
  int base_, height_;
};

__global__ void makeShapes(Shape** shapes, int count) {
  const int i = threadIdx.x;
  if (i >= count) return;
  if (i % 2)
    shapes[i] = new Triangle(i, i + 2);
  else
    shapes[i] = new Square(i);
}
__global__ void measure(Shape** shapes, int* output, int count) {
  const int i = threadIdx.x;
  if (i < count) output[i] = shapes[i]->area() * 10 + shapes[i]->corners();
}
__global__ void destroyShapes(Shape** shapes, int count) {
  if (threadIdx.x < count) delete shapes[threadIdx.x];
}

__device__ __noinline__ int ackermann(int m, int n) {
  if (m == 0) return n + 1;
  if (n == 0) return ackermann(m - 1, 1);
  return ackermann(m - 1, ackermann(m, n - 1));
}
__global__ void recursive(int* output) { output[threadIdx.x] = ackermann(2, threadIdx.x); }

int main() {
  check::Device<int> output(90);
  viaTable<<<1, 90>>>(output);
  std::vector<int> expected(90);
  for (int i = 0; i < 90; ++i) expected[i] = i % 3 == 0 ? i + 7 : i % 3 == 1 ? i - 7 : i * 7;
  check::same("table of functions", output.read(), expected);

  Operation fetched = nullptr;
  CUDA(cudaMemcpyFromSymbol(&fetched, operations, sizeof fetched, 2 * sizeof fetched));
  viaArgument<<<1, 90>>>(fetched, output);
  for (int i = 0; i < 90; ++i) expected[i] = i * 100;
  check::same("function as argument", output.read(), expected);
  CUDA(cudaMemcpyFromSymbol(&fetched, chosen, sizeof fetched));
  viaArgument<<<1, 90>>>(fetched, output);
  for (int i = 0; i < 90; ++i) expected[i] = i - 100;
  check::same("another one", output.read(), expected);

  check::Device<Shape*> shapes(60);
  makeShapes<<<1, 64>>>(shapes, 60);
  measure<<<1, 64>>>(shapes, output, 60);
  destroyShapes<<<1, 64>>>(shapes, 60);
  for (int i = 0; i < 60; ++i) expected[i] = i % 2 ? i * (i + 2) / 2 * 10 + 3 : i * i * 10 + 4;
  check::same("virtual functions", output.read(), expected);

  CUDA(cudaDeviceSetLimit(cudaLimitStackSize, 8192));
  size_t stack = 0;
  CUDA(cudaDeviceGetLimit(&stack, cudaLimitStackSize));
  REQUIRE(stack >= 8192);
  recursive<<<1, 12>>>(output);
  const std::vector<int> all = output.read();
  for (int i = 0; i < 12; ++i) REQUIRE(all[i] == 2 * i + 3);
  check::say("recursion: ackermann(2, 11) is %d", all[11]);
  return check::pass();
}
