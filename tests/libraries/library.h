#pragma once
// What the programs of NVIDIA's libraries share. Each runs a list of operations and prints, for every one, a
// hash of the result's bytes and a few of its values: equal on the same GPU however the driver is reached. So
// nothing is printed that varies from run to run, and a result that disagrees with a reference computed here
// ends the program with status 1.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <array>
#include <complex>
#include <string>

#include "check.h"

// The text of a status; a library without names for its own gets its number. Programs overload it (found by
// the status's namespace, the global one).
inline std::string statusText(cudaError_t status) { return cudaGetErrorName(status); }
inline std::string statusText(CUresult status) {
  const char* name = nullptr;
  return cuGetErrorName(status, &name) == CUDA_SUCCESS ? name : "CUDA error " + std::to_string(status);
}

namespace library {

struct Failure {
  std::string text;
};

template <typename Status>
void require(Status status, const char* expression, int line) {
  if (status == Status{}) return;
  const std::string call = std::string(expression).substr(0, std::strcspn(expression, "("));
  throw Failure{call + " gave " + statusText(status) + " (line " + std::to_string(line) + ")"};
}

inline int failures = 0;

// Runs one operation; a failed call inside it is reported under its name, and the next operation goes on.
template <typename Body>
void operation(const char* name, Body body) {
  try {
    body();
  } catch (const Failure& failure) {
    check::say("%s: FAIL: %s", name, failure.text.c_str());
    ++failures;
  }
}

inline int finish() {
  if (failures == 0) return check::pass();
  check::say("FAIL: %d operations", failures);
  return 1;
}

// A number of any type the libraries compute with, and its value.
template <typename T>
T number(float value) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(std::lrint(value * 8));
  else
    return T(value);
}
template <typename T>
double value(T number) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<double>(number);
  else
    return static_cast<double>(static_cast<float>(number));
}

// Seeded numbers in [-1, 1], of integers in [-8, 8].
template <typename T>
std::vector<T> numbers(size_t count, uint64_t seed) {
  check::Random random(seed);
  std::vector<T> made(count);
  for (T& each : made) each = number<T>(random.between(-1, 1));
  return made;
}

// Device memory; what cannot be allocated or copied ends the operation.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count, int byte = 0) : count_(count) {
    require(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc", __LINE__);
    require(cudaMemset(data_, byte, count * sizeof(T)), "cudaMemset", __LINE__);
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) {
    require(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy",
            __LINE__);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }

  operator T*() const { return data_; }
  T* get() const { return data_; }
  size_t size() const { return count_; }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize", __LINE__);
    require(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy",
            __LINE__);
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

// Prints the hash of a result and some of its values, and compares `samples` of them, spread over it, with
// reference(index): |got - expected| <= tolerance * (1 + |expected|).
template <typename T, typename Reference>
void result(const char* name, const std::vector<T>& values, double tolerance, Reference reference,
            size_t samples = 64) {
  const size_t count = values.size();
  check::say("%s: %zu values, hash %016llx; %a %a %a", name, count,
             static_cast<unsigned long long>(check::digest(values.data(), count * sizeof(T))),
             value(values[0]), value(values[count / 2]), value(values[count - 1]));
  samples = std::min(samples, count);
  for (size_t i = 0; i < samples; ++i) {
    const size_t at = samples == 1 ? 0 : i * (count - 1) / (samples - 1);
    const double got = value(values[at]);
    const double expected = reference(at);
    if (std::fabs(got - expected) <= tolerance * (1 + std::fabs(expected))) continue;
    check::say("%s: FAIL: [%zu] is %.9g, expected %.9g", name, at, got, expected);
    ++failures;
    return;
  }
}

}  // namespace library

// A call whose status must be zero; otherwise the operation ends.
#define TRY(call) ::library::require((call), #call, __LINE__)
