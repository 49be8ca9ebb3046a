#pragma once
// What the end-to-end programs share: a verdict, options, seeded data and comparisons. Standard output must
// be the same on every device: no addresses, times, device names or raw device limits.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

namespace check {

// Prints "FAIL: why" and ends the program with status 1. Built with -DCHECK_SURVEY it goes on, up to 40
// failures: for learning at one go what a device does.
#ifdef CHECK_SURVEY
#define CHECK_NORETURN
#else
#define CHECK_NORETURN [[noreturn]]
#endif
CHECK_NORETURN __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::printf("FAIL: ");
  std::vprintf(format, arguments);
  std::printf("\n");
  va_end(arguments);
  std::fflush(stdout);
#ifdef CHECK_SURVEY
  static int failures = 0;
  if (++failures < 40) return;
#endif
  std::_Exit(1);
}

// Prints one line of the report.
__attribute__((format(printf, 1, 2))) inline void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  std::printf("\n");
  std::fflush(stdout);
  va_end(arguments);
}

inline int pass() {
  say("PASS");
  return 0;
}

inline bool flag(int argc, char** argv, const char* name) {
  for (int i = 1; i < argc; ++i)
    if (std::strcmp(argv[i], name) == 0) return true;
  return false;
}

inline int option(int argc, char** argv, const char* name, int otherwise) {
  for (int i = 1; i + 1 < argc; ++i)
    if (std::strcmp(argv[i], name) == 0) return std::atoi(argv[i + 1]);
  return otherwise;
}

// The same numbers everywhere (64-bit linear congruential generator, upper half returned).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2862933555777941757ull + 3037000493ull) {}
  uint32_t next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 32);
  }
  uint32_t below(uint32_t limit) { return static_cast<uint32_t>((uint64_t{next()} * limit) >> 32); }
  float unit() { return static_cast<float>(next() >> 8) * (1.0f / 16777216.0f); }
  float between(float low, float high) { return low + (high - low) * unit(); }

 private:
  uint64_t state_;
};

inline std::vector<float> randomFloats(size_t count, uint64_t seed, float low = 0.0f, float high = 1.0f) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = random.between(low, high);
  return values;
}

inline uint64_t digest(const void* bytes, size_t count, uint64_t start = 14695981039346656037ull) {
  const auto* at = static_cast<const unsigned char*>(bytes);
  for (size_t i = 0; i < count; ++i) start = (start ^ at[i]) * 1099511628211ull;
  return start;
}

template <typename T, typename U>
void sameSize(const char* what, const std::vector<T>& got, const std::vector<U>& expected) {
  if (got.size() != expected.size()) fail("%s: %zu values, expected %zu", what, got.size(), expected.size());
}

template <typename T, typename U>
void differs(const char* what, size_t index, T got, U expected) {
  if constexpr (std::is_floating_point_v<T>)
    fail("%s: [%zu] is %.9g, expected %.9g", what, index, static_cast<double>(got),
         static_cast<double>(expected));
  else
    fail("%s: [%zu] is %lld, expected %lld", what, index, static_cast<long long>(got),
         static_cast<long long>(expected));
}

template <typename T>
void same(const char* what, const std::vector<T>& got, const std::vector<T>& expected) {
  sameSize(what, got, expected);
  for (size_t i = 0; i < got.size(); ++i)
    if (got[i] != expected[i]) return differs(what, i, got[i], expected[i]);
  say("%s: %zu values are exact", what, got.size());
}

// |got - expected| <= absolute + relative * |expected|
template <typename T, typename U>
void near(const char* what, const std::vector<T>& got, const std::vector<U>& expected, double relative,
          double absolute = 0) {
  sameSize(what, got, expected);
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    const double bound = absolute + relative * std::fabs(static_cast<double>(expected[i]));
    if (!(difference <= bound)) return differs(what, i, got[i], expected[i]);
  }
  say("%s: %zu values agree", what, got.size());
}

inline void cuda(cudaError_t status, const char* expression, const char* file, int line) {
  if (status != cudaSuccess) fail("%s gave %s (%s:%d)", expression, cudaGetErrorName(status), file, line);
}

inline void cudaIs(cudaError_t status, cudaError_t expected, const char* expression, const char* file,
                   int line) {
  if (status != expected)
    fail("%s gave %s, expected %s (%s:%d)", expression, cudaGetErrorName(status), cudaGetErrorName(expected),
         file, line);
}

inline void cudaGives(cudaError_t status, cudaError_t expected, const char* expression, const char* file,
                      int line) {
  cudaIs(status, expected, expression, file, line);
  say("%s: %s", expression, cudaGetErrorName(status));
}

// Device memory that lives as long as the object.
template <typename T>
class Device {
 public:
  explicit Device(size_t count) : count_(count) {
    cuda(cudaMalloc(&data_, count * sizeof(T)), "cudaMalloc", "check.h", 0);
  }
  explicit Device(const std::vector<T>& values) : Device(values.size()) { put(values); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { cudaFree(data_); }

  T* get() const { return data_; }
  operator T*() const { return data_; }
  size_t size() const { return count_; }
  // Ready for any stream: a copy from pageable memory returns when it is staged, and streams that do not
  // block do not wait for it.
  void put(const std::vector<T>& values) {
    cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy",
         "check.h", 0);
    cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize", "check.h", 0);
  }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    cuda(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy",
         "check.h", 0);
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

}  // namespace check

#define CHECK_FILE (std::strrchr(__FILE__, '/') ? std::strrchr(__FILE__, '/') + 1 : __FILE__)
// A CUDA runtime call that must succeed; one that must give a certain error; the same, reported.
#define CUDA(call) ::check::cuda((call), #call, CHECK_FILE, __LINE__)
#define CUDA_IS(expected, call) ::check::cudaIs((call), (expected), #call, CHECK_FILE, __LINE__)
#define CUDA_GIVES(expected, call) ::check::cudaGives((call), (expected), #call, CHECK_FILE, __LINE__)
#define REQUIRE(condition)                                                                     \
  do {                                                                                         \
    if (!(condition)) ::check::fail("%s is not so (%s:%d)", #condition, CHECK_FILE, __LINE__); \
  } while (0)
