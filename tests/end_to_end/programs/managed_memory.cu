// __managed__ variables and cudaMallocManaged with pointers inside: a list built by the host, walked and
// changed by the device, extended and read back by the host.
#include "check.h"

struct Node {
  Node* next;
  int value;
};

__managed__ int total = 5;
__managed__ Node* head = nullptr;
__managed__ float samples[256];

__global__ void walk(Node* first) {
  int sum = 0;
  for (Node* node = first; node != nullptr; node = node->next) {
    sum += node->value;
    node->value *= 2;
  }
  total += sum;
}

__global__ void reverseList() {
  Node* reversed = nullptr;
  while (head != nullptr) {
    Node* next = head->next;
    head->next = reversed;
    reversed = head;
    head = next;
  }
  head = reversed;
}

__global__ void halve() { samples[threadIdx.x] *= 0.5f; }

__global__ void fill(int* data, int count, int seed) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    data[i] += i * seed;
}

static int walkOnHost() {
  int sum = 0;
  for (const Node* node = head; node != nullptr; node = node->next) sum = sum * 31 + node->value;
  return sum;
}

int main() {
  for (int i = 0; i < 200; ++i) {
    Node* node;
    CUDA(cudaMallocManaged(&node, sizeof(Node)));
    *node = {head, i};
    head = node;
  }
  walk<<<1, 1>>>(head);
  CUDA(cudaDeviceSynchronize());
  check::say("total: %d", total);
  REQUIRE(total == 5 + 199 * 100);
  REQUIRE(head->value == 2 * 199);
  int expected = 0;
  for (int i = 0; i < 200; ++i) expected = expected * 31 + 2 * i;
  reverseList<<<1, 1>>>();
  CUDA(cudaDeviceSynchronize());
  REQUIRE(walkOnHost() == expected);
  REQUIRE(head->value == 0 && head->next->value == 2);

  // Host and device in turns, many times.
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 256; ++i) samples[i] += static_cast<float>(i);
    halve<<<1, 256>>>();
    CUDA(cudaDeviceSynchronize());
  }
  float sample = 0;
  for (int round = 0; round < 10; ++round) sample = (sample + 255.0f) * 0.5f;
  REQUIRE(samples[255] == sample && samples[0] == 0);
  check::say("samples[255]: %.6f", samples[255]);

  const int count = 1 << 18;
  int* data;
  CUDA(cudaMallocManaged(&data, count * sizeof(int)));
  for (int i = 0; i < count; ++i) data[i] = 1;
  fill<<<32, 256>>>(data, count, 3);
  CUDA(cudaDeviceSynchronize());
  for (int i = 0; i < count; ++i)
    if (data[i] != 1 + 3 * i) check::fail("managed [%d] is %d", i, data[i]);
  CUDA(cudaMemset(data, 0, count * sizeof(int)));
  fill<<<32, 256>>>(data, count, 1);
  std::vector<int> copied(count);
  CUDA(cudaMemcpy(copied.data(), data, count * sizeof(int), cudaMemcpyDefault));
  for (int i = 0; i < count; ++i)
    if (copied[i] != i) check::fail("copied [%d] is %d", i, copied[i]);
  check::say("%d managed integers are exact", count);

  cudaPointerAttributes attributes;
  CUDA(cudaPointerGetAttributes(&attributes, data));
  REQUIRE(attributes.type == cudaMemoryTypeManaged);
  REQUIRE(attributes.devicePointer == data && attributes.hostPointer == data);
  int value = -1;
  CUDA(cudaMemcpyFromSymbol(&value, total, sizeof value));
  REQUIRE(value == total);
  int managed = 0;
  CUDA(cudaDeviceGetAttribute(&managed, cudaDevAttrManagedMemory, 0));
  REQUIRE(managed == 1);
  CUDA(cudaFree(data));
  while (head != nullptr) {
    Node* next = head->next;
    CUDA(cudaFree(head));
    head = next;
  }
  return check::pass();
}
