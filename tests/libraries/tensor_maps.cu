// What Hopper's libraries ask of the driver itself: tensor maps read by the bulk copy engine, clusters of
// blocks with their shared memory in common, launches with parameters in `extra`, and programmatic stream
// serialization.
#include <cooperative_groups.h>

#include "library.h"

using library::Buffer;
using library::numbers;

namespace {

// Loads one box of a tensor map into shared memory; thread 0 asks, all wait. kIm2col: the map is one of
// columns of pixels, and `offsets` says which filter element they are for.
template <typename T, int kCount, bool kIm2col>
__device__ void loadBox(const CUtensorMap& map, T* box, int4 at, ushort2 offsets) {
  __shared__ alignas(8) uint64_t barrier;
  const uint32_t barrierAt = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
  const uint32_t boxAt = static_cast<uint32_t>(__cvta_generic_to_shared(box));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrierAt) : "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrierAt),
                 "n"(kCount * sizeof(T))
                 : "memory");
    if constexpr (kIm2col)
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
          " [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(boxAt),
          "l"(&map), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(barrierAt), "h"(offsets.x),
          "h"(offsets.y)
          : "memory");
    else
      asm volatile(
          "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
          "[%4];" ::"r"(boxAt),
          "l"(&map), "r"(at.x), "r"(at.y), "r"(barrierAt)
          : "memory");
  }
  __syncthreads();
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrierAt)
        : "memory");
}

template <typename T, int kWidth, int kHeight>
__global__ void readTiles(const __grid_constant__ CUtensorMap map, T* out) {
  __shared__ alignas(1024) unsigned char memory[kWidth * kHeight * sizeof(T)];
  T* box = reinterpret_cast<T*>(memory);
  const int4 at = make_int4(blockIdx.x * kWidth, blockIdx.y * kHeight, 0, 0);
  loadBox<T, kWidth * kHeight, false>(map, box, at, make_ushort2(0, 0));
  T* tile = out + (blockIdx.y * gridDim.x + blockIdx.x) * kWidth * kHeight;
  for (int i = threadIdx.x; i < kWidth * kHeight; i += blockDim.x) tile[i] = box[i];
}

template <int kChannels, int kPixels>
__global__ void readColumns(const __grid_constant__ CUtensorMap map, float* out, int filterColumn,
                            int filterRow) {
  __shared__ alignas(1024) unsigned char memory[kChannels * kPixels * sizeof(float)];
  float* box = reinterpret_cast<float*>(memory);
  const ushort2 offsets = make_ushort2(filterColumn, filterRow);
  loadBox<float, kChannels * kPixels, true>(map, box, make_int4(0, 0, 0, 0), offsets);
  for (int i = threadIdx.x; i < kChannels * kPixels; i += blockDim.x) out[i] = box[i];
}

// out[block] = the sum of the values that all blocks of the cluster put in shared memory.
__global__ void sumOverCluster(const int* values, int* out) {
  namespace cg = cooperative_groups;
  __shared__ int mine;
  const auto cluster = cg::this_cluster();
  if (threadIdx.x == 0) mine = values[blockIdx.x];
  cluster.sync();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (unsigned i = 0; i < cluster.num_blocks(); ++i) sum += *cluster.map_shared_rank(&mine, i);
    out[blockIdx.x] = sum;
  }
  cluster.sync();
}

// A chain of these may overlap: each waits for what the one before it wrote.
__global__ void addOne(int* values, int count) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) values[i] += 1;
}

// A tile of 32 x 16 floats at a time from a matrix whose edges are no multiples of it: zeros beyond them.
void tiles() {
  constexpr uint64_t width = 100, height = 70;
  const auto values = numbers<float>(width * height, 1);
  const Buffer<float> in(values), out(4 * 5 * 32 * 16, 0xff);
  CUtensorMap map;
  const cuuint64_t sizes[] = {width, height}, strides[] = {width * 4};
  const cuuint32_t box[] = {32, 16}, steps[] = {1, 1};
  TRY(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, in.get(), sizes, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  readTiles<float, 32, 16><<<dim3(4, 5), 128>>>(map, out);
  TRY(cudaGetLastError());
  library::result(
      "tiles", out.read(), 0,
      [&](size_t at) {
        const size_t tile = at / 512, x = tile % 4 * 32 + at % 32, y = tile / 4 * 16 + at % 512 / 32;
        return x < width && y < height ? values[y * width + x] : 0.0;
      },
      10240);
}

// The 128-byte swizzle of matrix instructions: the 16-byte piece p of row r lies at p ^ (r % 8).
void swizzledTiles() {
  constexpr uint64_t width = 128, height = 32;
  const auto values = numbers<__half>(width * height, 2);
  const Buffer<__half> in(values), out(width * height, 0xff);
  CUtensorMap map;
  const cuuint64_t sizes[] = {width, height}, strides[] = {width * 2};
  const cuuint32_t box[] = {64, 8}, steps[] = {1, 1};
  TRY(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, in.get(), sizes, strides, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  readTiles<__half, 64, 8><<<dim3(2, 4), 64>>>(map, out);
  TRY(cudaGetLastError());
  library::result(
      "swizzled tiles", out.read(), 0,
      [&](size_t at) {
        const size_t tile = at / 512, row = at % 512 / 64, piece = (at % 64 / 8) ^ row;
        return library::value(values[(tile / 2 * 8 + row) * width + tile % 2 * 64 + piece * 8 + at % 8]);
      },
      4096);
}

// Columns of pixels for the element (2, 1) of a 3 x 3 filter: they go along rows, then down, then to the next
// image.
void columns() {
  constexpr uint64_t channels = 16, width = 9, height = 7, images = 3;
  const auto values = numbers<float>(channels * width * height * images, 3);
  const Buffer<float> in(values), out(channels * 64, 0xff);
  CUtensorMap map;
  const cuuint64_t sizes[] = {channels, width, height, images};
  const cuuint64_t strides[] = {channels * 4, channels * width * 4, channels * width * height * 4};
  const int lower[] = {0, 0}, upper[] = {-2, -2};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  TRY(cuTensorMapEncodeIm2col(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, in.get(), sizes, strides, lower,
                              upper, channels, 64, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  readColumns<channels, 64><<<1, 128>>>(map, out, 2, 1);
  TRY(cudaGetLastError());
  library::result(
      "columns of pixels", out.read(), 0,
      [&](size_t at) {
        const size_t pixel = at / channels, x = pixel % (width - 2) + 2,
                     y = pixel / (width - 2) % (height - 2) + 1;
        const size_t image = pixel / (width - 2) / (height - 2);
        return values[((image * height + y) * width + x) * channels + at % channels];
      },
      1024);
}

CUlaunchAttribute clusterOf(unsigned blocks) {
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim.x = blocks;
  attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1;
  return attribute;
}

CUlaunchConfig configuration(unsigned blocks, unsigned threads, CUlaunchAttribute* attributes,
                             unsigned count) {
  CUlaunchConfig config{};
  config.gridDimX = blocks;
  config.blockDimX = threads;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.attrs = attributes;
  config.numAttrs = count;
  return config;
}

// Parameters go in `extra`, as cuBLASLt passes them.
void cluster(unsigned blocks, bool portable) {
  cudaFunction_t function;
  TRY(cudaGetFuncBySymbol(&function, reinterpret_cast<const void*>(sumOverCluster)));
  if (!portable) TRY(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1));
  CUlaunchAttribute attribute = clusterOf(blocks);
  const CUlaunchConfig config = configuration(blocks * 3, 32, &attribute, 1);
  int active = 0;
  TRY(cuOccupancyMaxActiveClusters(&active, function, &config));
  check::say("clusters of %u: %d fit", blocks, active);
  std::vector<int> values;
  for (unsigned i = 0; i < blocks * 3; ++i) values.push_back(static_cast<int>(i * i + 1));
  const Buffer<int> in(values), out(blocks * 3, 0xff);
  struct {
    const int* values;
    int* out;
  } parameters = {in.get(), out.get()};
  size_t size = sizeof parameters;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &parameters, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                   CU_LAUNCH_PARAM_END};
  TRY(cuLaunchKernelEx(&config, function, nullptr, extra));
  library::result(("cluster of " + std::to_string(blocks)).c_str(), out.read(), 0, [&](size_t at) {
    int sum = 0;
    for (size_t i = at / blocks * blocks; i < (at / blocks + 1) * blocks; ++i) sum += values[i];
    return sum;
  });
}

void wrongCluster() {
  cudaFunction_t function;
  TRY(cudaGetFuncBySymbol(&function, reinterpret_cast<const void*>(sumOverCluster)));
  CUlaunchAttribute attribute = clusterOf(4);
  const CUlaunchConfig config = configuration(6, 32, &attribute, 1);
  int* none = nullptr;
  void* parameters[] = {&none, &none};
  check::say("6 blocks in clusters of 4: %s",
             statusText(cuLaunchKernelEx(&config, function, parameters, nullptr)).c_str());
  TRY(cudaDeviceSynchronize());
}

// As cuDNN launches its convolutions: programmatic stream serialization, alone and with clusters of three.
void serialization(const char* name, unsigned clusterBlocks) {
  cudaFunction_t function;
  TRY(cudaGetFuncBySymbol(&function, reinterpret_cast<const void*>(addOne)));
  CUlaunchAttribute attributes[2] = {};
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attributes[0].value.programmaticStreamSerializationAllowed = 1;
  attributes[1] = clusterOf(clusterBlocks);
  CUlaunchConfig config = configuration(24, 256, attributes, clusterBlocks > 1 ? 2 : 1);
  cudaStream_t stream;
  TRY(cudaStreamCreate(&stream));
  config.hStream = stream;
  int count = 1 << 20;
  const Buffer<int> values(count);
  int* pointer = values;
  void* parameters[] = {&pointer, &count};
  for (int i = 0; i < 20; ++i) TRY(cuLaunchKernelEx(&config, function, parameters, nullptr));
  TRY(cudaStreamSynchronize(stream));
  library::result(
      name, values.read(), 0, [](size_t) { return 20; }, 1 << 20);
  TRY(cudaStreamDestroy(stream));
}

}  // namespace

int main() {
  library::operation("tiles", tiles);
  library::operation("swizzled tiles", swizzledTiles);
  library::operation("columns of pixels", columns);
  library::operation("cluster of 2", [] { cluster(2, true); });
  library::operation("cluster of 8", [] { cluster(8, true); });
  library::operation("cluster of 16", [] { cluster(16, false); });
  library::operation("wrong cluster", wrongCluster);
  library::operation("serialization", [] { serialization("serialization", 1); });
  library::operation("serialization of clusters", [] { serialization("serialization of clusters", 3); });
  return library::finish();
}
