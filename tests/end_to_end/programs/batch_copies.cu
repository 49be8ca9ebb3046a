// Batches of copies, of rows and volumes: between all kinds of memory and arrays, with pitches and offsets;
// what is refused, and which operation failed.
#include "driver_check.h"

namespace {

constexpr int kWidth = 24, kHeight = 10, kDepth = 3, kCount = kWidth * kHeight * kDepth;

cudaMemcpy3DOperand at(void* address, size_t rowLength = 0, size_t layerHeight = 0) {
  cudaMemcpy3DOperand operand = {};
  operand.type = cudaMemcpyOperandTypePointer;
  operand.op.ptr.ptr = address;
  operand.op.ptr.rowLength = rowLength;
  operand.op.ptr.layerHeight = layerHeight;
  return operand;
}

cudaMemcpy3DOperand at(cudaArray_t array, size_t x, size_t y, size_t z) {
  cudaMemcpy3DOperand operand = {};
  operand.type = cudaMemcpyOperandTypeArray;
  operand.op.array.array = array;
  operand.op.array.offset = {x, y, z};
  return operand;
}

cudaMemcpy3DBatchOp copy(cudaMemcpy3DOperand to, cudaMemcpy3DOperand from, cudaExtent extent,
                         cudaMemcpySrcAccessOrder order = cudaMemcpySrcAccessOrderStream) {
  cudaMemcpy3DBatchOp op = {};
  op.src = from;
  op.dst = to;
  op.extent = extent;
  op.srcAccessOrder = order;
  return op;
}

std::vector<int> numbers(int count, int start) {
  std::vector<int> values(count);
  for (int i = 0; i < count; ++i) values[i] = start + i * 3;
  return values;
}

template <size_t N>
void batch(cudaMemcpy3DBatchOp (&list)[N], cudaStream_t stream) {
  CUDA(cudaMemcpy3DBatchAsync(N, list, 0, stream));
}

__global__ void addOne(int* values, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) ++values[i];
}

// Between pointers an element is a byte.
void pointers(cudaStream_t stream) {
  const size_t row = kWidth * sizeof(int);
  const cudaExtent whole = make_cudaExtent(row, kHeight, kDepth);
  const std::vector<int> first = numbers(kCount, 1), second = numbers(kCount, 100000);
  int *pinned, *pinnedBack;
  CUDA(cudaMallocHost(&pinned, kCount * sizeof(int)));
  CUDA(cudaMallocHost(&pinnedBack, kCount * sizeof(int)));
  std::memcpy(pinned, first.data(), kCount * sizeof(int));
  std::vector<int> pageable = second, back(kCount, -1);
  char* pitched;
  size_t pitch = 0;
  CUDA(cudaMallocPitch(&pitched, &pitch, row, kHeight * kDepth + 8));
  check::Device<int> plain(kCount), moved(kCount);

  // Host memory of both kinds to the device; what is ordinary is read before the call returns.
  cudaMemcpy3DBatchOp in[] = {
      copy(at(plain.get()), at(pinned), whole),
      copy(at(pitched, pitch, kHeight + 1), at(pageable.data()), whole,
           cudaMemcpySrcAccessOrderDuringApiCall),
  };
  batch(in, stream);
  std::memset(pageable.data(), 0, kCount * sizeof(int));
  addOne<<<(kCount + 63) / 64, 64, 0, stream>>>(plain.get(), kCount);
  // In the order of the stream: a box of the pitched memory within the device, and both back to the host.
  cudaMemcpy3DBatchOp out[] = {
      copy(at(moved.get(), row, kHeight),
           at(pitched + 2 * pitch + 4 * sizeof(int), pitch, kHeight + 1),
           make_cudaExtent(6 * sizeof(int), 5, 2)),
      copy(at(pinnedBack), at(plain.get()), whole),
      copy(at(back.data()), at(pitched, pitch, kHeight + 1), whole),
  };
  CUDA(cudaMemsetAsync(moved.get(), 0xff, kCount * sizeof(int), stream));
  batch(out, stream);
  CUDA(cudaStreamSynchronize(stream));

  std::vector<int> expected = first;
  for (int& value : expected) ++value;
  check::same("pinned memory, there and back", std::vector<int>(pinnedBack, pinnedBack + kCount), expected);
  check::same("ordinary memory, there and back", back, second);
  std::vector<int> box(kCount, -1);
  for (int z = 0; z < 2; ++z)
    for (int y = 0; y < 5; ++y)
      for (int x = 0; x < 6; ++x)
        box[(z * kHeight + y) * kWidth + x] = second[(z * kHeight + y + 2) * kWidth + x + 4];
  check::same("a box within the device", moved.read(), box);
  CUDA(cudaFree(pitched));
  CUDA(cudaFreeHost(pinned));
  CUDA(cudaFreeHost(pinnedBack));
}

// With an array, an element is the array's.
void arrays(cudaStream_t stream) {
  const cudaChannelFormatDesc format = cudaCreateChannelDesc<int4>();
  cudaArray_t from, to;
  CUDA(cudaMalloc3DArray(&from, &format, make_cudaExtent(kWidth, kHeight, kDepth), 0));
  CUDA(cudaMalloc3DArray(&to, &format, make_cudaExtent(kWidth, kHeight, kDepth), 0));
  std::vector<int> source = numbers(kCount * 4, 7);
  check::Device<int> device(source), result(kCount * 4);
  CUDA(cudaMemset(result.get(), 0xff, kCount * 16));
  const cudaExtent whole = make_cudaExtent(kWidth, kHeight, kDepth);
  cudaMemcpy3DBatchOp fill[] = {
      copy(at(from, 0, 0, 0), at(source.data()), whole, cudaMemcpySrcAccessOrderAny),
      copy(at(to, 0, 0, 0), at(device.get()), whole),
  };
  batch(fill, stream);
  cudaMemcpy3DBatchOp between[] = {
      copy(at(to, 5, 4, 1), at(from, 2, 1, 0), make_cudaExtent(6, 3, 2)),
  };
  batch(between, stream);
  // Rows of another length than the copy's: half of the array into memory of the whole one's shape.
  std::vector<int> back(kCount * 4, -1);
  cudaMemcpy3DBatchOp out[] = {
      copy(at(result.get(), kWidth, kHeight), at(to, 3, 2, 1),
           make_cudaExtent(kWidth - 4, kHeight - 3, 2)),
      copy(at(back.data()), at(to, 0, 0, 0), whole),
  };
  batch(out, stream);
  CUDA(cudaStreamSynchronize(stream));

  std::vector<int> expected = source;
  const auto index = [](int x, int y, int z) { return ((z * kHeight + y) * kWidth + x) * 4; };
  for (int z = 0; z < 2; ++z)
    for (int y = 0; y < 3; ++y)
      for (int x = 0; x < 6; ++x)
        std::memcpy(&expected[index(x + 5, y + 4, z + 1)], &source[index(x + 2, y + 1, z)], 16);
  check::same("an array, with a part of another", back, expected);
  std::vector<int> part(kCount * 4, -1);
  for (int z = 0; z < 2; ++z)
    for (int y = 0; y < kHeight - 3; ++y)
      for (int x = 0; x < kWidth - 4; ++x)
        std::memcpy(&part[index(x, y, z)], &expected[index(x + 3, y + 2, z + 1)], 16);
  check::same("a part of an array, in longer rows", result.read(), part);
  CUDA(cudaFreeArray(from));
  CUDA(cudaFreeArray(to));
}

void refused(const char* what, cudaError_t status) {
  check::say("%s: %s", what, cudaGetErrorName(status));
  cudaGetLastError();
}

void errors(cudaStream_t stream) {
  check::Device<int> a(64), b(64);
  const cudaExtent extent = make_cudaExtent(16, 2, 2);
  const cudaMemcpy3DBatchOp good = copy(at(a.get()), at(b.get()), extent);
  const auto tried = [&](cudaMemcpy3DBatchOp op) { return cudaMemcpy3DBatchAsync(1, &op, 0, stream); };
  cudaMemcpy3DBatchOp op = good;
  CUDA(tried(op));
  refused("the default stream", cudaMemcpy3DBatchAsync(1, &op, 0, nullptr));
  refused("flags", cudaMemcpy3DBatchAsync(1, &op, 1, stream));
  refused("no width", tried(copy(at(a.get()), at(b.get()), make_cudaExtent(0, 2, 2))));
  refused("no height", tried(copy(at(a.get()), at(b.get()), make_cudaExtent(16, 0, 2))));
  refused("no depth", tried(copy(at(a.get()), at(b.get()), make_cudaExtent(16, 2, 0))));
  refused("rows shorter than the copy", tried(copy(at(a.get(), 15, 2), at(b.get()), extent)));
  refused("layers lower than the copy", tried(copy(at(a.get()), at(b.get(), 16, 1), extent)));
  refused("no order", tried(copy(at(a.get()), at(b.get()), extent, cudaMemcpySrcAccessOrderInvalid)));
  cudaArray_t bytes, words;
  const cudaChannelFormatDesc one = cudaCreateChannelDesc<unsigned char>(), four = cudaCreateChannelDesc<int>();
  CUDA(cudaMallocArray(&bytes, &one, 16, 4));
  CUDA(cudaMallocArray(&words, &four, 16, 4));
  const cudaExtent plane = make_cudaExtent(16, 4, 1);
  refused("arrays of different elements", tried(copy(at(bytes, 0, 0, 0), at(words, 0, 0, 0), plane)));
  refused("beyond an array", tried(copy(at(words, 1, 0, 0), at(a.get()), plane)));
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaFreeArray(bytes));
  CUDA(cudaFreeArray(words));
}

// The driver's functions of CUDA 12.8, which tell the operation that failed.
void failures(cudaStream_t stream) {
  check::Device<int> a(64), b(64);
  CUresult (*volumes)(size_t, CUDA_MEMCPY3D_BATCH_OP*, size_t*, unsigned long long, CUstream) = nullptr;
  DRIVER(cuGetProcAddress("cuMemcpy3DBatchAsync", reinterpret_cast<void**>(&volumes), 12080, 0, nullptr));
  CUDA_MEMCPY3D_BATCH_OP list[3] = {};
  for (auto& op : list) {
    op.src.type = op.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
    op.src.op.ptr.ptr = reinterpret_cast<CUdeviceptr>(a.get());
    op.dst.op.ptr.ptr = reinterpret_cast<CUdeviceptr>(b.get());
    op.extent = {16, 1, 1};
    op.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  }
  for (int i = 0; i < 3; ++i) list[i].dst.op.ptr.ptr += 16 * i;
  size_t failed = 77;
  DRIVER(volumes(3, list, &failed, 0, stream));
  list[2].extent.height = 0;
  CUresult status = volumes(3, list, &failed, 0, stream);
  check::say("the third of three: %s, and its index is %s", check::resultName(status),
             failed == 2 ? "told" : "not told");
  list[2].extent.height = 1;
  failed = 77;
  status = volumes(3, list, &failed, 0, nullptr);
  check::say("the default stream: %s, and the index is %s", check::resultName(status),
             failed == 77 ? "not told" : failed == SIZE_MAX ? "that of no operation" : "told");
  CUDA(cudaStreamSynchronize(stream));
}

// A capture refuses batches, and goes on.
void captures(cudaStream_t stream) {
  check::Device<int> a(64), b(64);
  cudaMemcpy3DBatchOp op = copy(at(a.get()), at(b.get()), make_cudaExtent(16, 2, 2));
  void* to[] = {a.get()};
  const void* from[] = {b.get()};
  size_t sizes[] = {64}, starts[] = {0};
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  refused("volumes, captured", cudaMemcpy3DBatchAsync(1, &op, 0, stream));
  refused("rows, captured", cudaMemcpyBatchAsync(to, from, sizes, 1, &attributes, starts, 1, stream));
  CUDA(cudaMemsetAsync(a.get(), 0, 64, stream));
  cudaGraph_t graph;
  CUDA(cudaStreamEndCapture(stream, &graph));
  size_t count = 0;
  CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  check::say("the capture has %zu node", count);
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaMemcpyBatchAsync(to, from, sizes, 1, &attributes, starts, 1, stream));
  CUDA(cudaStreamSynchronize(stream));
}

}  // namespace

int main() {
  cudaStream_t stream, another;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaStreamCreateWithFlags(&another, cudaStreamNonBlocking));
  pointers(stream);
  arrays(another);
  pointers(cudaStreamPerThread);
  errors(stream);
  failures(stream);
  captures(another);
  CUDA(cudaStreamDestroy(stream));
  CUDA(cudaStreamDestroy(another));
  return check::pass();
}
