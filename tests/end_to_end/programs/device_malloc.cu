// malloc, free, new and delete in kernels: a tree that one kernel builds, another walks, a third takes down.
#include "check.h"

struct Node {
  Node *left, *right;
  int value;
};

__device__ Node* roots[64];

__global__ void build(int perThread) {
  Node* root = nullptr;
  unsigned state = threadIdx.x * 7919 + 13;
  for (int i = 0; i < perThread; ++i) {
    state = state * 1664525u + 1013904223u;
    Node* node = static_cast<Node*>(malloc(sizeof(Node)));
    if (node == nullptr) return;
    node->left = node->right = nullptr;
    node->value = state >> 8;
    Node** at = &root;
    while (*at != nullptr) at = node->value < (*at)->value ? &(*at)->left : &(*at)->right;
    *at = node;
  }
  roots[threadIdx.x] = root;
}

// In order, with a stack of its own.
__global__ void walk(unsigned long long* sums) {
  Node* stack[64];
  int depth = 0, position = 0;
  unsigned long long sum = 0;
  for (Node* node = roots[threadIdx.x]; node != nullptr || depth > 0;) {
    if (node != nullptr) {
      stack[depth++] = node;
      node = node->left;
    } else {
      node = stack[--depth];
      sum += static_cast<unsigned long long>(node->value) * ++position;
      node = node->right;
    }
  }
  sums[threadIdx.x] = sum;
}

__global__ void destroy() {
  Node* stack[64];
  int depth = 0;
  if (roots[threadIdx.x] != nullptr) stack[depth++] = roots[threadIdx.x];
  while (depth > 0) {
    Node* node = stack[--depth];
    if (node->left != nullptr) stack[depth++] = node->left;
    if (node->right != nullptr) stack[depth++] = node->right;
    free(node);
  }
  roots[threadIdx.x] = nullptr;
}

__global__ void perBlock(int* output) {
  __shared__ int* data;
  if (threadIdx.x == 0) data = new int[blockDim.x];
  __syncthreads();
  data[threadIdx.x] = threadIdx.x * 5;
  __syncthreads();
  output[blockIdx.x * blockDim.x + threadIdx.x] = data[blockDim.x - 1 - threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) delete[] data;
}

__global__ void tooMuch(int* refused) { *refused = malloc(static_cast<size_t>(1) << 40) == nullptr; }

#include <algorithm>

int main() {
  CUDA(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 16 << 20));
  size_t heap = 0;
  CUDA(cudaDeviceGetLimit(&heap, cudaLimitMallocHeapSize));
  REQUIRE(heap >= 16 << 20);
  const int perThread = 50;
  check::Device<unsigned long long> sums(64);
  std::vector<unsigned long long> expected;
  for (unsigned thread = 0; thread < 64; ++thread) {
    std::vector<int> values;
    unsigned state = thread * 7919 + 13;
    for (int i = 0; i < perThread; ++i) values.push_back((state = state * 1664525u + 1013904223u) >> 8);
    std::sort(values.begin(), values.end());
    unsigned long long sum = 0;
    for (int i = 0; i < perThread; ++i) sum += static_cast<unsigned long long>(values[i]) * (i + 1);
    expected.push_back(sum);
  }
  for (int round = 0; round < 3; ++round) {
    build<<<1, 64>>>(perThread);
    walk<<<1, 64>>>(sums);
    destroy<<<1, 64>>>();
    CUDA(cudaDeviceSynchronize());
  }
  check::same("trees", sums.read(), expected);
  check::Device<int> output(8 * 64), refused(1);
  perBlock<<<8, 64>>>(output);
  std::vector<int> wanted;
  for (int i = 0; i < 8 * 64; ++i) wanted.push_back((63 - i % 64) * 5);
  check::same("per block", output.read(), wanted);
  tooMuch<<<1, 1>>>(refused);
  REQUIRE(refused.read()[0] == 1);
  check::say("a terabyte: refused");
  return check::pass();
}
