// Memsets of every width and alignment, and what the runtime knows of pointers of every kind.
#include "driver_check.h"

__global__ void writeHere(int* where) { *where = 99; }
__device__ int variable;

static void memsets() {
  const size_t size = 100003;
  unsigned char* device;
  std::vector<unsigned char> expected(size, 0), got(size);
  CUDA(cudaMalloc(&device, size));
  const auto fill = [&](size_t at, size_t count, unsigned value, int width) {
    for (size_t i = 0; i < count * width; ++i) expected[at + i] = value >> (8 * (i % width));
  };
  CUDA(cudaMemset(device, 0, size));
  check::Random random(35);
  for (int i = 0; i < 40; ++i) {
    const size_t count = i < 10 ? i : random.below(5000), at = random.below(90000) / 4 * 4;
    const unsigned value = random.next();
    const CUdeviceptr pointer = reinterpret_cast<CUdeviceptr>(device);
    switch (i % 5) {
      case 0:
        CUDA(cudaMemset(device + at + 3, static_cast<int>(value), count));  // the low byte counts
        fill(at + 3, count, value & 0xff, 1);
        break;
      case 1:
        CUDA(cudaMemsetAsync(device + at + 1, static_cast<int>(value), count, cudaStreamLegacy));
        fill(at + 1, count, value & 0xff, 1);
        break;
      case 2:
        DRIVER(cuMemsetD16(pointer + at + 2, value & 0xffff, count));
        fill(at + 2, count, value, 2);
        break;
      case 3:
        DRIVER(cuMemsetD32(pointer + at, value, count / 2));
        fill(at, count / 2, value, 4);
        break;
      default:
        DRIVER(cuMemsetD2D32(pointer + at, 256, value, 5, 7));
        for (int row = 0; row < 7; ++row) fill(at + row * 256, 5, value, 4);
    }
  }
  CUDA(cudaMemcpy(got.data(), device, size, cudaMemcpyDeviceToHost));
  check::same("memsets", got, expected);
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuMemsetD32(reinterpret_cast<CUdeviceptr>(device) + 2, 0, 4));
  CUDA(cudaFree(device));
}

static cudaPointerAttributes attributesOf(const void* pointer) {
  cudaPointerAttributes attributes;
  CUDA(cudaPointerGetAttributes(&attributes, pointer));
  return attributes;
}

static void pointers() {
  char *device, *host, *managed;
  CUDA(cudaMalloc(&device, 1000));
  CUDA(cudaMallocHost(&host, 1000));
  CUDA(cudaMallocManaged(&managed, 1000));
  REQUIRE(reinterpret_cast<uintptr_t>(device) % 256 == 0);
  cudaPointerAttributes a = attributesOf(device + 999);
  REQUIRE(a.type == cudaMemoryTypeDevice && a.device == 0 && a.devicePointer == device + 999 &&
          a.hostPointer == nullptr);
  a = attributesOf(host + 10);
  REQUIRE(a.type == cudaMemoryTypeHost && a.hostPointer == host + 10 && a.devicePointer != nullptr);
  a = attributesOf(managed);
  REQUIRE(a.type == cudaMemoryTypeManaged && a.hostPointer == managed);
  int local = 0;
  a = attributesOf(&local);
  REQUIRE(a.type == cudaMemoryTypeUnregistered && a.devicePointer == nullptr);
  check::say("pointer types are right");

  CUdeviceptr base = 0;
  size_t size = 0;
  DRIVER(cuMemGetAddressRange(&base, &size, reinterpret_cast<CUdeviceptr>(device + 500)));
  REQUIRE(base == reinterpret_cast<CUdeviceptr>(device) && size >= 1000);
  unsigned type = 0, isManaged = 9;
  unsigned long long one = 0, two = 0;
  CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                 CU_POINTER_ATTRIBUTE_BUFFER_ID};
  void* values[] = {&type, &isManaged, &one};
  DRIVER(cuPointerGetAttributes(3, names, values, reinterpret_cast<CUdeviceptr>(device)));
  REQUIRE(type == CU_MEMORYTYPE_DEVICE && isManaged == 0 && one != 0);
  char* another;
  CUDA(cudaMalloc(&another, 1000));
  DRIVER(cuPointerGetAttribute(&two, CU_POINTER_ATTRIBUTE_BUFFER_ID, reinterpret_cast<CUdeviceptr>(another)));
  REQUIRE(one != two);
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                               reinterpret_cast<CUdeviceptr>(&local)));
  CUcontext context = nullptr, current = nullptr;
  DRIVER(
      cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, reinterpret_cast<CUdeviceptr>(device)));
  DRIVER(cuCtxGetCurrent(&current));
  REQUIRE(context == current);
  check::say("driver attributes are right");

  size_t before = 0, after = 0, total = 0;
  CUDA(cudaMemGetInfo(&before, &total));
  REQUIRE(before > 0 && before <= total);
  char* large;
  CUDA(cudaMalloc(&large, 200 << 20));
  CUDA(cudaMemGetInfo(&after, &total));
  REQUIRE(before - after >= 100 << 20);
  CUDA(cudaFree(large));
  CUDA(cudaMemGetInfo(&after, &total));
  REQUIRE(after + (32 << 20) >= before);
  for (char* pointer : {device, managed, another}) CUDA(cudaFree(pointer));
  CUDA(cudaFreeHost(host));
  REQUIRE(attributesOf(device).type == cudaMemoryTypeUnregistered);
  writeHere<<<1, 1>>>(static_cast<int*>([] {
    void* address;
    CUDA(cudaGetSymbolAddress(&address, variable));
    return address;
  }()));
  int value = 0;
  CUDA(cudaMemcpyFromSymbol(&value, variable, sizeof value));
  REQUIRE(value == 99);
}

int main() {
  memsets();
  pointers();
  return check::pass();
}
