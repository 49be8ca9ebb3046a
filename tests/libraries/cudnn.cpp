// cuDNN by its older interface: convolutions forward and backward in every type, pooling, softmax, activation
// and batch normalization. cudnn_graph.cpp has the newer one.
#include <cudnn.h>

#include "library.h"

// All of the older interface is marked as deprecated; programs use it all the same.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

using library::Buffer;
using library::numbers;
using library::value;

inline std::string statusText(cudnnStatus_t status) { return cudnnGetErrorString(status); }

namespace {

// A tensor's sizes and its places in memory: planes of channels, or channels last.
struct Shape {
  int n, c, h, w;
  bool channelsLast = false;
  size_t count() const { return size_t(n) * c * h * w; }
  size_t at(int in, int ic, int ih, int iw) const {
    return channelsLast ? ((size_t(in) * h + ih) * w + iw) * c + ic
                        : ((size_t(in) * c + ic) * h + ih) * w + iw;
  }
  std::array<int, 4> place(size_t index) const {
    if (channelsLast)
      return {int(index / c / w / h), int(index % c), int(index / c / w % h), int(index / c % w)};
    return {int(index / w / h / c), int(index / w / h % c), int(index / w % h), int(index % w)};
  }
  cudnnTensorFormat_t format() const { return channelsLast ? CUDNN_TENSOR_NHWC : CUDNN_TENSOR_NCHW; }
};

template <typename T>
constexpr cudnnDataType_t typeOf() {
  if constexpr (std::is_same_v<T, float>)
    return CUDNN_DATA_FLOAT;
  else if constexpr (std::is_same_v<T, __half>)
    return CUDNN_DATA_HALF;
  else
    return CUDNN_DATA_BFLOAT16;
}

struct Tensor {
  Tensor(const Shape& shape, cudnnDataType_t type) {
    TRY(cudnnCreateTensorDescriptor(&descriptor));
    TRY(cudnnSetTensor4dDescriptor(descriptor, shape.format(), type, shape.n, shape.c, shape.h, shape.w));
  }
  ~Tensor() { cudnnDestroyTensorDescriptor(descriptor); }
  operator cudnnTensorDescriptor_t() const { return descriptor; }
  cudnnTensorDescriptor_t descriptor = nullptr;
};

constexpr float kOne = 1, kZero = 0;

// A 3 x 3 convolution with padding: 8 images of 32 channels to 64.
template <typename T>
class Convolution {
 public:
  Convolution(cudnnHandle_t handle, std::string name, bool channelsLast, int stride, double tolerance)
      : handle_(handle),
        name_(std::move(name)),
        stride_(stride),
        tolerance_(tolerance),
        x_{8, 32, 28, 28, channelsLast},
        w_{64, 32, 3, 3, channelsLast},
        y_{8, 64, 28 / stride, 28 / stride, channelsLast},
        xTensor_(x_, typeOf<T>()),
        yTensor_(y_, typeOf<T>()) {
    TRY(cudnnCreateFilterDescriptor(&filter_));
    TRY(cudnnSetFilter4dDescriptor(filter_, typeOf<T>(), w_.format(), w_.n, w_.c, w_.h, w_.w));
    TRY(cudnnCreateConvolutionDescriptor(&convolution_));
    TRY(cudnnSetConvolution2dDescriptor(convolution_, 1, 1, stride, stride, 1, 1, CUDNN_CROSS_CORRELATION,
                                        CUDNN_DATA_FLOAT));
    TRY(cudnnSetConvolutionMathType(convolution_,
                                    std::is_same_v<T, float> ? CUDNN_FMA_MATH : CUDNN_TENSOR_OP_MATH));
  }
  Convolution(const Convolution&) = delete;
  Convolution& operator=(const Convolution&) = delete;
  ~Convolution() {
    cudnnDestroyConvolutionDescriptor(convolution_);
    cudnnDestroyFilterDescriptor(filter_);
  }

  void forward() {
    cudnnConvolutionFwdAlgoPerf_t choices[8];
    int count = 0;
    TRY(cudnnGetConvolutionForwardAlgorithm_v7(handle_, xTensor_, filter_, convolution_, yTensor_, 8, &count,
                                               choices));
    const auto& choice = deterministic("forward", choices, count);
    const Buffer<T> x(values_), w(weights_), y(y_.count(), 0xff);
    const Buffer<char> work(choice.memory + 1);
    TRY(cudnnConvolutionForward(handle_, &kOne, xTensor_, x.get(), filter_, w.get(), convolution_,
                                choice.algo, work.get(), choice.memory, &kZero, yTensor_, y.get()));
    library::result((name_ + " forward").c_str(), y.read(), tolerance_, [&](size_t index) {
      const auto [n, k, h, v] = y_.place(index);
      double sum = 0;
      for (int c = 0; c < x_.c; ++c)
        for (int r = 0; r < 3; ++r)
          for (int s = 0; s < 3; ++s)
            sum += at(values_, x_, n, c, h * stride_ + r - 1, v * stride_ + s - 1) *
                   value(weights_[w_.at(k, c, r, s)]);
      return sum;
    });
  }

  void backwardData() {
    cudnnConvolutionBwdDataAlgoPerf_t choices[8];
    int count = 0;
    TRY(cudnnGetConvolutionBackwardDataAlgorithm_v7(handle_, filter_, yTensor_, convolution_, xTensor_, 8,
                                                    &count, choices));
    const auto& choice = deterministic("backward data", choices, count);
    const Buffer<T> w(weights_), dy(slopes_), dx(x_.count(), 0xff);
    const Buffer<char> work(choice.memory + 1);
    TRY(cudnnConvolutionBackwardData(handle_, &kOne, filter_, w.get(), yTensor_, dy.get(), convolution_,
                                     choice.algo, work.get(), choice.memory, &kZero, xTensor_, dx.get()));
    library::result((name_ + " backward data").c_str(), dx.read(), tolerance_, [&](size_t index) {
      const auto [n, c, h, v] = x_.place(index);
      double sum = 0;
      for (int k = 0; k < y_.c; ++k)
        for (int r = 0; r < 3; ++r)
          for (int s = 0; s < 3; ++s) {
            const int row = h + 1 - r, column = v + 1 - s;
            if (row % stride_ != 0 || column % stride_ != 0) continue;
            sum +=
                at(slopes_, y_, n, k, row / stride_, column / stride_) * value(weights_[w_.at(k, c, r, s)]);
          }
      return sum;
    });
  }

  void backwardFilter() {
    cudnnConvolutionBwdFilterAlgoPerf_t choices[8];
    int count = 0;
    TRY(cudnnGetConvolutionBackwardFilterAlgorithm_v7(handle_, xTensor_, yTensor_, convolution_, filter_, 8,
                                                      &count, choices));
    const auto& choice = deterministic("backward filter", choices, count);
    const Buffer<T> x(values_), dy(slopes_), dw(w_.count(), 0xff);
    const Buffer<char> work(choice.memory + 1);
    TRY(cudnnConvolutionBackwardFilter(handle_, &kOne, xTensor_, x.get(), yTensor_, dy.get(), convolution_,
                                       choice.algo, work.get(), choice.memory, &kZero, filter_, dw.get()));
    // Sums of thousands of products.
    library::result((name_ + " backward filter").c_str(), dw.read(), 4 * tolerance_, [&](size_t index) {
      const auto [k, c, r, s] = w_.place(index);
      double sum = 0;
      for (int n = 0; n < x_.n; ++n)
        for (int h = 0; h < y_.h; ++h)
          for (int v = 0; v < y_.w; ++v)
            sum += at(values_, x_, n, c, h * stride_ + r - 1, v * stride_ + s - 1) *
                   value(slopes_[y_.at(n, k, h, v)]);
      return sum;
    });
  }

 private:
  // The first of the heuristics' choices that repeats bit by bit.
  template <typename Choice>
  const Choice& deterministic(const char* way, const Choice* choices, int count) {
    for (int i = 0; i < count; ++i) {
      if (choices[i].status != CUDNN_STATUS_SUCCESS || choices[i].determinism != CUDNN_DETERMINISTIC)
        continue;
      check::say("%s %s: algorithm %d, choice %d, workspace %zu", name_.c_str(), way, int(choices[i].algo), i,
                 choices[i].memory);
      return choices[i];
    }
    throw library::Failure{std::string("no deterministic algorithm for ") + way};
  }
  static double at(const std::vector<T>& values, const Shape& shape, int n, int c, int h, int w) {
    return h < 0 || w < 0 || h >= shape.h || w >= shape.w ? 0 : value(values[shape.at(n, c, h, w)]);
  }

  cudnnHandle_t handle_;
  std::string name_;
  int stride_;
  double tolerance_;
  Shape x_, w_, y_;
  Tensor xTensor_, yTensor_;
  cudnnFilterDescriptor_t filter_ = nullptr;
  cudnnConvolutionDescriptor_t convolution_ = nullptr;
  std::vector<T> values_ = numbers<T>(x_.count(), 1), weights_ = numbers<T>(w_.count(), 2),
                 slopes_ = numbers<T>(y_.count(), 3);
};

template <typename T>
void convolution(cudnnHandle_t handle, const char* name, bool channelsLast, int stride, double tolerance) {
  library::operation(name, [&] {
    Convolution<T> convolution(handle, name, channelsLast, stride, tolerance);
    library::operation(name, [&] { convolution.forward(); });
    library::operation(name, [&] { convolution.backwardData(); });
    library::operation(name, [&] { convolution.backwardFilter(); });
  });
}

void pooling(cudnnHandle_t handle) {
  const Shape in{4, 16, 30, 30}, out{4, 16, 15, 15};
  const auto values = numbers<float>(in.count(), 4), slopes = numbers<float>(out.count(), 5);
  const Tensor inTensor(in, CUDNN_DATA_FLOAT), outTensor(out, CUDNN_DATA_FLOAT);
  const Buffer<float> x(values), y(out.count(), 0xff), dy(slopes), dx(in.count(), 0xff);
  cudnnPoolingDescriptor_t pooling;
  TRY(cudnnCreatePoolingDescriptor(&pooling));
  TRY(cudnnSetPooling2dDescriptor(pooling, CUDNN_POOLING_MAX_DETERMINISTIC, CUDNN_PROPAGATE_NAN, 2, 2, 0, 0,
                                  2, 2));
  TRY(cudnnPoolingForward(handle, pooling, &kOne, inTensor, x.get(), &kZero, outTensor, y.get()));
  const auto largest = [&](int n, int c, int h, int w) {
    size_t best = in.at(n, c, 2 * h, 2 * w);
    for (int i = 1; i < 4; ++i) {
      const size_t other = in.at(n, c, 2 * h + i / 2, 2 * w + i % 2);
      if (values[other] > values[best]) best = other;
    }
    return best;
  };
  library::result("max pooling", y.read(), 0, [&](size_t index) {
    const auto [n, c, h, w] = out.place(index);
    return values[largest(n, c, h, w)];
  });
  TRY(cudnnPoolingBackward(handle, pooling, &kOne, outTensor, y.get(), outTensor, dy.get(), inTensor, x.get(),
                           &kZero, inTensor, dx.get()));
  library::result("max pooling, backward", dx.read(), 0, [&](size_t index) {
    const auto [n, c, h, w] = in.place(index);
    return largest(n, c, h / 2, w / 2) == index ? slopes[out.at(n, c, h / 2, w / 2)] : 0;
  });
  TRY(cudnnSetPooling2dDescriptor(pooling, CUDNN_POOLING_AVERAGE_COUNT_INCLUDE_PADDING, CUDNN_PROPAGATE_NAN,
                                  2, 2, 0, 0, 2, 2));
  TRY(cudnnPoolingForward(handle, pooling, &kOne, inTensor, x.get(), &kZero, outTensor, y.get()));
  library::result("average pooling", y.read(), 1e-6, [&](size_t index) {
    const auto [n, c, h, w] = out.place(index);
    double sum = 0;
    for (int i = 0; i < 4; ++i) sum += values[in.at(n, c, 2 * h + i / 2, 2 * w + i % 2)];
    return sum / 4;
  });
  TRY(cudnnDestroyPoolingDescriptor(pooling));
}

void softmax(cudnnHandle_t handle) {
  const Shape shape{64, 1000, 1, 1};
  const auto values = numbers<float>(shape.count(), 6);
  const Tensor tensor(shape, CUDNN_DATA_FLOAT);
  const Buffer<float> x(values), y(shape.count(), 0xff);
  TRY(cudnnSoftmaxForward(handle, CUDNN_SOFTMAX_ACCURATE, CUDNN_SOFTMAX_MODE_CHANNEL, &kOne, tensor, x.get(),
                          &kZero, tensor, y.get()));
  library::result("softmax", y.read(), 1e-6, [&](size_t index) {
    const size_t row = index / 1000 * 1000;
    double sum = 0;
    for (size_t i = row; i < row + 1000; ++i) sum += std::exp(double(values[i]));
    return std::exp(double(values[index])) / sum;
  });
}

void activation(cudnnHandle_t handle) {
  const Shape shape{4, 10, 20, 20};
  const auto values = numbers<float>(shape.count(), 7);
  const Tensor tensor(shape, CUDNN_DATA_FLOAT);
  const Buffer<float> x(values), y(shape.count(), 0xff);
  cudnnActivationDescriptor_t activation;
  TRY(cudnnCreateActivationDescriptor(&activation));
  TRY(cudnnSetActivationDescriptor(activation, CUDNN_ACTIVATION_TANH, CUDNN_PROPAGATE_NAN, 0));
  TRY(cudnnActivationForward(handle, activation, &kOne, tensor, x.get(), &kZero, tensor, y.get()));
  library::result("tanh", y.read(), 1e-5, [&](size_t index) { return std::tanh(double(values[index])); });
  TRY(cudnnDestroyActivationDescriptor(activation));
}

void batchNormalization(cudnnHandle_t handle) {
  const Shape shape{16, 24, 14, 14}, perChannel{1, 24, 1, 1};
  const size_t channels = perChannel.count();
  const auto values = numbers<float>(shape.count(), 8), slopes = numbers<float>(shape.count(), 9);
  const auto scales = numbers<float>(channels, 10), shifts = numbers<float>(channels, 11);
  const Tensor tensor(shape, CUDNN_DATA_FLOAT), statistics(perChannel, CUDNN_DATA_FLOAT);
  const Buffer<float> x(values), y(shape.count(), 0xff), scale(scales), shift(shifts), runningMean(channels),
      runningVariance(channels), mean(channels, 0xff), inverse(channels, 0xff), dy(slopes),
      dx(shape.count(), 0xff), scaleSlope(channels, 0xff), shiftSlope(channels, 0xff);
  const double epsilon = 1e-5;
  TRY(cudnnBatchNormalizationForwardTraining(handle, CUDNN_BATCHNORM_SPATIAL, &kOne, &kZero, tensor, x.get(),
                                             tensor, y.get(), statistics, scale.get(), shift.get(), 1,
                                             runningMean.get(), runningVariance.get(), epsilon, mean.get(),
                                             inverse.get()));
  std::vector<double> means(channels), variances(channels), shiftSlopes(channels);
  const double each = double(shape.count()) / double(channels);
  for (size_t i = 0; i < shape.count(); ++i) {
    means[shape.place(i)[1]] += values[i] / each;
    shiftSlopes[shape.place(i)[1]] += slopes[i];
  }
  for (size_t i = 0; i < shape.count(); ++i) {
    const size_t channel = shape.place(i)[1];
    variances[channel] += (values[i] - means[channel]) * (values[i] - means[channel]) / each;
  }
  library::result("batch normalization", y.read(), 1e-4, [&](size_t index) {
    const size_t c = shape.place(index)[1];
    return (values[index] - means[c]) / std::sqrt(variances[c] + epsilon) * scales[c] + shifts[c];
  });
  library::result("batch mean", mean.read(), 1e-5, [&](size_t c) { return means[c]; });
  library::result("running mean", runningMean.read(), 1e-5, [&](size_t c) { return means[c]; });
  library::result("inverse deviation", inverse.read(), 1e-4,
                  [&](size_t c) { return 1 / std::sqrt(variances[c] + epsilon); });
  TRY(cudnnBatchNormalizationBackward(handle, CUDNN_BATCHNORM_SPATIAL, &kOne, &kZero, &kOne, &kZero, tensor,
                                      x.get(), tensor, dy.get(), tensor, dx.get(), statistics, scale.get(),
                                      scaleSlope.get(), shiftSlope.get(), epsilon, mean.get(),
                                      inverse.get()));
  library::result("batch normalization, shift's slope", shiftSlope.read(), 1e-3,
                  [&](size_t c) { return shiftSlopes[c]; });
  const auto back = dx.read();
  library::result("batch normalization, backward", back, 0, [&](size_t index) { return back[index]; });
}

}  // namespace

int main() {
  library::operation("create", [] {
    cudnnHandle_t handle;
    TRY(cudnnCreate(&handle));
    convolution<float>(handle, "convolution fp32", false, 1, 1e-3);
    convolution<float>(handle, "convolution fp32, stride 2", false, 2, 1e-3);
    convolution<__half>(handle, "convolution fp16", true, 1, 2e-2);
    convolution<__nv_bfloat16>(handle, "convolution bf16", true, 1, 1e-1);
    library::operation("pooling", [&] { pooling(handle); });
    library::operation("softmax", [&] { softmax(handle); });
    library::operation("activation", [&] { activation(handle); });
    library::operation("batch normalization", [&] { batchNormalization(handle); });
    TRY(cudnnDestroy(handle));
  });
  return library::finish();
}
