// European options by the Black-Scholes formula, in float with fast intrinsics and in double.
#include "check.h"

template <typename T>
__host__ __device__ T normal(T d) {
  return T(0.5) * erfc(-d * T(0.70710678118654752440));
}

template <typename T>
__host__ __device__ void price(T spot, T strike, T years, T rate, T volatility, T& call, T& put) {
  const T root = sqrt(years);
  const T d1 = (log(spot / strike) + (rate + T(0.5) * volatility * volatility) * years) / (volatility * root);
  const T d2 = d1 - volatility * root;
  const T discount = exp(-rate * years);
  call = spot * normal(d1) - strike * discount * normal(d2);
  put = strike * discount * normal(-d2) - spot * normal(-d1);
}

template <typename T>
__global__ void priceAll(const float* spot, const float* strike, const float* years, T* call, T* put,
                         int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) price<T>(spot[i], strike[i], years[i], T(0.02), T(0.3), call[i], put[i]);
}

__device__ float fastNormal(float d) {
  const float k = 1.0f / (1.0f + 0.2316419f * fabsf(d));
  const float tail =
      0.39894228f * __expf(-0.5f * d * d) *
      (k * (0.31938153f + k * (-0.356563782f + k * (1.781477937f + k * (-1.821255978f + k * 1.330274429f)))));
  return d > 0 ? 1.0f - tail : tail;
}

__global__ void priceFast(const float* spot, const float* strike, const float* years, float* call,
                          int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float root = sqrtf(years[i]);
  const float d1 = (__logf(__fdividef(spot[i], strike[i])) + (0.02f + 0.045f) * years[i]) / (0.3f * root);
  call[i] = spot[i] * fastNormal(d1) - strike[i] * __expf(-0.02f * years[i]) * fastNormal(d1 - 0.3f * root);
}

int main(int argc, char** argv) {
  const int count = check::option(argc, argv, "--size", 20000);
  const std::vector<float> spot = check::randomFloats(count, 12, 5, 30);
  const std::vector<float> strike = check::randomFloats(count, 13, 1, 100);
  const std::vector<float> years = check::randomFloats(count, 14, 0.25f, 10);
  std::vector<double> call(count), put(count);
  for (int i = 0; i < count; ++i) price<double>(spot[i], strike[i], years[i], 0.02, 0.3, call[i], put[i]);

  check::Device<float> deviceSpot(spot), deviceStrike(strike), deviceYears(years), callFloat(count),
      putFloat(count);
  check::Device<double> callDouble(count), putDouble(count);
  const int blocks = (count + 127) / 128;
  priceAll<<<blocks, 128>>>(deviceSpot, deviceStrike, deviceYears, callFloat.get(), putFloat.get(), count);
  priceAll<<<blocks, 128>>>(deviceSpot, deviceStrike, deviceYears, callDouble.get(), putDouble.get(), count);
  CUDA(cudaDeviceSynchronize());
  check::near("calls, float", callFloat.read(), call, 1e-4, 1e-4);
  check::near("puts, float", putFloat.read(), put, 1e-4, 1e-4);
  check::near("calls, double", callDouble.read(), call, 1e-11, 1e-11);
  check::near("puts, double", putDouble.read(), put, 1e-11, 1e-11);
  priceFast<<<blocks, 128>>>(deviceSpot, deviceStrike, deviceYears, callFloat, count);
  check::near("calls, fast", callFloat.read(), call, 1e-3, 1e-3);
  return check::pass();
}
