// cuDNN by its graph interface, as version 9's users call it: a convolution, one with bias and ReLU fused by
// code compiled at run time, and attention. Engines are the heuristics' first that the library can plan.
#include <cudnn.h>

#include <memory>

#include "library.h"

// Some names of attributes are marked as deprecated, and still needed.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

using library::Buffer;
using library::numbers;
using library::value;

inline std::string statusText(cudnnStatus_t status) { return cudnnGetErrorString(status); }

namespace {

// A descriptor of the backend; attributes are set, then it is finalized.
class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    TRY(cudnnBackendCreateDescriptor(type, &descriptor_));
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { cudnnBackendDestroyDescriptor(descriptor_); }

  template <typename T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                  const std::vector<T>& values) {
    TRY(cudnnBackendSetAttribute(descriptor_, name, type, int64_t(values.size()), values.data()));
    return *this;
  }
  template <typename T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, T value) {
    TRY(cudnnBackendSetAttribute(descriptor_, name, type, 1, &value));
    return *this;
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& other) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, other.descriptor_);
  }
  void finalize() { TRY(cudnnBackendFinalize(descriptor_)); }
  cudnnBackendDescriptor_t get() const { return descriptor_; }

 private:
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

using Sizes = std::vector<int64_t>;

Sizes channelsLast(const Sizes& n) { return {n[1] * n[2] * n[3], 1, n[3] * n[1], n[1]}; }
Sizes packed(const Sizes& n) { return {n[1] * n[2] * n[3], n[2] * n[3], n[3], 1}; }

// A graph under construction: tensors and operations, in the order they were made.
class Graph {
 public:
  explicit Graph(cudnnHandle_t handle) : handle_(handle) {}

  // A tensor with memory behind it, which run() gives under its number; numbers count from 1.
  Descriptor& tensor(cudnnDataType_t type, const Sizes& sizes, const Sizes& strides, bool isVirtual = false) {
    Descriptor& made = add(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    made.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type)
        .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, sizes)
        .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides)
        .set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, ++tensors_)
        .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, int64_t{16})
        .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, isVirtual);
    made.finalize();
    if (!isVirtual) real_.push_back(tensors_);
    return made;
  }
  Descriptor& between(cudnnDataType_t type, const Sizes& sizes, const Sizes& strides) {
    return tensor(type, sizes, strides, true);
  }

  void convolution(const Descriptor& x, const Descriptor& w, const Descriptor& y) {
    Descriptor& how = add(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    how.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, int64_t{2})
        .set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT)
        .set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION)
        .set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, Sizes{1, 1})
        .set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, Sizes{1, 1})
        .set(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, Sizes{1, 1})
        .set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, Sizes{1, 1});
    how.finalize();
    operation(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, x)
        .set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, w)
        .set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, y)
        .set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, how)
        .set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_TYPE_FLOAT, 1.0f)
        .set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, CUDNN_TYPE_FLOAT, 0.0f)
        .finalize();
  }
  void pointwise(cudnnPointwiseMode_t mode, const Descriptor& x, const Descriptor* b, const Descriptor& y) {
    Descriptor& how = add(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    how.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode)
        .set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    how.finalize();
    Descriptor& made = operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    made.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    if (b != nullptr) made.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *b);
    made.finalize();
  }
  void product(const Descriptor& a, const Descriptor& b, const Descriptor& c) {
    Descriptor& how = add(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    how.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT).finalize();
    operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a)
        .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, b)
        .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, c)
        .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, how)
        .finalize();
  }
  void reduction(cudnnReduceTensorOp_t op, const Descriptor& x, const Descriptor& y) {
    Descriptor& how = add(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    how.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT)
        .set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, op)
        .finalize();
    operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, how)
        .finalize();
  }

  // Plans the graph and runs it; `pointers` are those of the tensors with memory, in the order they were
  // made.
  void run(const char* name, const std::vector<void*>& pointers) {
    Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    std::vector<cudnnBackendDescriptor_t> operations;
    for (const Descriptor* each : operations_) operations.push_back(each->get());
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, operations)
        .set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle_)
        .finalize();
    const std::unique_ptr<Descriptor> plan = planned(name, graph);
    int64_t bytes = 0;
    TRY(cudnnBackendGetAttribute(plan->get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                 nullptr, &bytes));
    const Buffer<char> work(size_t(bytes) + 1);
    Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, real_)
        .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, pointers)
        .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, static_cast<void*>(work.get()))
        .finalize();
    TRY(cudnnBackendExecute(handle_, plan->get(), pack.get()));
  }

 private:
  Descriptor& add(cudnnBackendDescriptorType_t type) {
    return *descriptors_.emplace_back(std::make_unique<Descriptor>(type));
  }
  Descriptor& operation(cudnnBackendDescriptorType_t type) {
    Descriptor& made = add(type);
    operations_.push_back(&made);
    return made;
  }

  // The heuristics' engines in their order; the first that can be planned.
  std::unique_ptr<Descriptor> planned(const char* name, const Descriptor& graph) {
    Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
        .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A)
        .finalize();
    constexpr int kMost = 16;
    std::vector<std::unique_ptr<Descriptor>> configurations;
    std::vector<cudnnBackendDescriptor_t> list;
    for (int i = 0; i < kMost; ++i) {
      configurations.push_back(std::make_unique<Descriptor>(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
      list.push_back(configurations.back()->get());
    }
    int64_t count = 0;
    TRY(cudnnBackendGetAttribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, kMost, &count, list.data()));
    for (int64_t i = 0; i < std::min<int64_t>(count, kMost); ++i) {
      auto plan = std::make_unique<Descriptor>(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan->set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle_)
          .set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, *configurations[size_t(i)]);
      const cudnnStatus_t status = cudnnBackendFinalize(plan->get());
      if (status == CUDNN_STATUS_SUCCESS) {
        check::say("%s: engine %lld of %lld, number %lld", name, static_cast<long long>(i),
                   static_cast<long long>(count),
                   static_cast<long long>(engineNumber(*configurations[size_t(i)])));
        return plan;
      }
      check::say("%s: engine %lld: %s", name, static_cast<long long>(i), cudnnGetErrorString(status));
    }
    throw library::Failure{"no engine of " + std::to_string(count) + " can be planned"};
  }
  static int64_t engineNumber(const Descriptor& configuration) {
    const Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendDescriptor_t descriptor = engine.get();
    int64_t count = 0, number = -1;
    TRY(cudnnBackendGetAttribute(configuration.get(), CUDNN_ATTR_ENGINECFG_ENGINE,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &descriptor));
    TRY(cudnnBackendGetAttribute(descriptor, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &count,
                                 &number));
    return number;
  }

  cudnnHandle_t handle_;
  int64_t tensors_ = 0;
  std::vector<int64_t> real_;
  std::vector<std::unique_ptr<Descriptor>> descriptors_;
  std::vector<Descriptor*> operations_;
};

template <typename T>
constexpr cudnnDataType_t typeOf() {
  return std::is_same_v<T, float>    ? CUDNN_DATA_FLOAT
         : std::is_same_v<T, __half> ? CUDNN_DATA_HALF
                                     : CUDNN_DATA_BFLOAT16;
}

// A 3 x 3 convolution, channels last; with `fused`, plus a bias, and no negative results.
template <typename T>
void convolution(cudnnHandle_t handle, const char* name, bool fused, double tolerance) {
  const Sizes xs = {8, 64, 28, 28}, ws = {128, 64, 3, 3}, ys = {8, 128, 28, 28}, bs = {1, 128, 1, 1};
  const auto x = numbers<T>(8 * 64 * 28 * 28, 1), w = numbers<T>(128 * 64 * 9, 2), b = numbers<T>(128, 3);
  const Buffer<T> deviceX(x), deviceW(w), deviceB(b), deviceY(8 * 128 * 28 * 28, 0xff);
  const cudnnDataType_t type = typeOf<T>();
  Graph graph(handle);
  const Descriptor& in = graph.tensor(type, xs, channelsLast(xs));
  const Descriptor& filter = graph.tensor(type, ws, channelsLast(ws));
  const Descriptor& out = graph.tensor(type, ys, channelsLast(ys));
  if (fused) {
    const Descriptor& bias = graph.tensor(type, bs, channelsLast(bs));
    const Descriptor& sums = graph.between(CUDNN_DATA_FLOAT, ys, channelsLast(ys));
    const Descriptor& biased = graph.between(CUDNN_DATA_FLOAT, ys, channelsLast(ys));
    graph.convolution(in, filter, sums);
    graph.pointwise(CUDNN_POINTWISE_ADD, sums, &bias, biased);
    graph.pointwise(CUDNN_POINTWISE_RELU_FWD, biased, nullptr, out);
    graph.run(name, {deviceX.get(), deviceW.get(), deviceY.get(), deviceB.get()});
  } else {
    graph.convolution(in, filter, out);
    graph.run(name, {deviceX.get(), deviceW.get(), deviceY.get()});
  }
  library::result(name, deviceY.read(), tolerance, [&](size_t at) {
    const int k = int(at % 128), column = int(at / 128 % 28), row = int(at / 128 / 28 % 28),
              n = int(at / 128 / 784);
    double sum = fused ? value(b[size_t(k)]) : 0;
    for (int r = 0; r < 3; ++r)
      for (int s = 0; s < 3; ++s) {
        const int h = row + r - 1, v = column + s - 1;
        if (h < 0 || v < 0 || h >= 28 || v >= 28) continue;
        for (int c = 0; c < 64; ++c)
          sum += value(x[size_t((n * 28 + h) * 28 + v) * 64 + size_t(c)]) *
                 value(w[size_t((k * 3 + r) * 3 + s) * 64 + size_t(c)]);
      }
    return fused ? std::max(sum, 0.0) : sum;
  });
}

// softmax(Q K') V for 2 x 4 heads of 128 places and 64 numbers, as the pattern that the library fuses; Q is
// an eighth beforehand.
template <typename T>
void attention(cudnnHandle_t handle, const char* name, double tolerance) {
  constexpr int64_t kBatch = 2, kHeads = 4, kLength = 128, kWidth = 64;
  const Sizes qs = {kBatch, kHeads, kLength, kWidth}, kt = {kBatch, kHeads, kWidth, kLength};
  const Sizes scores = {kBatch, kHeads, kLength, kLength}, rows = {kBatch, kHeads, kLength, 1};
  const Sizes ktStrides = {kHeads * kLength * kWidth, kLength * kWidth, 1, kWidth};
  const size_t count = kBatch * kHeads * kLength * kWidth;
  auto q = numbers<T>(count, 1);
  for (T& number : q) number = T(float(value(number)) / 8);  // exact
  const auto k = numbers<T>(count, 2), v = numbers<T>(count, 3);
  const Buffer<T> deviceQ(q), deviceK(k), deviceV(v), out(count, 0xff);
  Graph graph(handle);
  const cudnnDataType_t type = typeOf<T>();
  const Descriptor& queries = graph.tensor(type, qs, packed(qs));
  const Descriptor& keys = graph.tensor(type, kt, ktStrides);
  const Descriptor& values = graph.tensor(type, qs, packed(qs));
  const Descriptor& result = graph.tensor(type, qs, packed(qs));
  const auto between = [&](const Sizes& sizes) -> const Descriptor& {
    return graph.between(CUDNN_DATA_FLOAT, sizes, packed(sizes));
  };
  const Descriptor &raw = between(scores), &largest = between(rows), &lowered = between(scores),
                   &powers = between(scores), &sums = between(rows);
  const Descriptor& weights = graph.between(type, scores, packed(scores));
  graph.product(queries, keys, raw);
  graph.reduction(CUDNN_REDUCE_TENSOR_MAX, raw, largest);
  graph.pointwise(CUDNN_POINTWISE_SUB, raw, &largest, lowered);
  graph.pointwise(CUDNN_POINTWISE_EXP, lowered, nullptr, powers);
  graph.reduction(CUDNN_REDUCE_TENSOR_ADD, powers, sums);
  graph.pointwise(CUDNN_POINTWISE_DIV, powers, &sums, weights);
  graph.product(weights, values, result);
  graph.run(name, {deviceQ.get(), deviceK.get(), deviceV.get(), out.get()});
  library::result(name, out.read(), tolerance, [&](size_t at) {
    const size_t head = at / (kLength * kWidth) * (kLength * kWidth), row = at / kWidth % kLength,
                 place = at % kWidth;
    double total = 0, sum = 0;
    for (size_t j = 0; j < kLength; ++j) {
      double score = 0;
      for (size_t i = 0; i < kWidth; ++i)
        score += value(q[head + row * kWidth + i]) * value(k[head + j * kWidth + i]);
      const double weight = std::exp(score);
      total += weight;
      sum += weight * value(v[head + j * kWidth + place]);
    }
    return sum / total;
  });
}

}  // namespace

int main() {
  library::operation("create", [] {
    cudnnHandle_t handle;
    TRY(cudnnCreate(&handle));
    const auto each = [&](const char* name, auto body) {
      library::operation(name, [&] { body(handle, name); });
    };
    each("convolution bf16", [](auto h, auto name) { convolution<__nv_bfloat16>(h, name, false, 1e-1); });
    each("convolution fp16", [](auto h, auto name) { convolution<__half>(h, name, false, 2e-2); });
    each("convolution fp32", [](auto h, auto name) { convolution<float>(h, name, false, 5e-2); });
    each("bias and ReLU fused bf16",
         [](auto h, auto name) { convolution<__nv_bfloat16>(h, name, true, 1e-1); });
    each("attention fp16", [](auto h, auto name) { attention<__half>(h, name, 1e-2); });
    each("attention bf16", [](auto h, auto name) { attention<__nv_bfloat16>(h, name, 5e-2); });
    TRY(cudnnDestroy(handle));
  });
  return library::finish();
}
