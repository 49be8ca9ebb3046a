// The warp's matrix instructions against plain loops.
#include "server/softgpu/tests/engine_harness.h"

namespace gpupool::softgpu::test {

namespace {

Loaded& matrixKernels() {
  static Loaded loaded(readFile(GPUPOOL_KERNELS90_PTX));
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  return loaded;
}

// Small whole numbers as halves: exact in every sum here.
uint16_t halfOf(int value) {
  if (value == 0) return 0;
  int magnitude = std::abs(value);
  int exponent = 0;
  while ((2 << exponent) <= magnitude) ++exponent;
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | (exponent + 15) << 10 |
                               ((magnitude << (10 - exponent)) & 1023));
}

int small(int i) { return i * 7 % 11 - 5; }

}  // namespace

TEST_CASE("wmma of halves") {
  DeviceMemory a(4096), b(4096), c(4096);
  for (int i = 0; i < 16 * 32; ++i)
    a.as<uint16_t>()[i] = halfOf(small(i)), b.as<uint16_t>()[i] = halfOf(small(i + 3));
  REQUIRE(matrixKernels().run("wmmaHalf", {1}, {32}, a.address(), b.address(), c.address()) == Outcome::ok);
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 16; ++column) {
      int sum = 1;
      for (int k = 0; k < 32; ++k) sum += small(row * 32 + k) * small(column * 32 + k + 3);
      CHECK(c.as<float>()[row * 16 + column] == static_cast<float>(2 * sum));
    }
}

TEST_CASE("mma of halves, through ldmatrix") {
  DeviceMemory a(4096), b(4096), c(4096);
  for (int i = 0; i < 256; ++i)
    a.as<uint16_t>()[i] = halfOf(small(i)), b.as<uint16_t>()[i] = halfOf(small(i + 3));
  REQUIRE(matrixKernels().run("mmaHalf", {1}, {32}, a.address(), b.address(), c.address()) == Outcome::ok);
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float sum = 0.5f;
      for (int k = 0; k < 16; ++k) sum += static_cast<float>(small(row * 16 + k) * small(k * 8 + column + 3));
      CHECK(c.as<float>()[row * 8 + column] == sum);
    }
}

TEST_CASE("mma of bytes") {
  DeviceMemory a(4096), b(4096), c(4096);
  for (int i = 0; i < 512; ++i)
    a.as<int8_t>()[i] = static_cast<int8_t>(i * 37), b.as<uint8_t>()[i] = static_cast<uint8_t>(i * 91);
  REQUIRE(matrixKernels().run("mmaBytes", {1}, {32}, a.address(), b.address(), c.address()) == Outcome::ok);
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      int sum = -7;
      for (int k = 0; k < 32; ++k) sum += a.as<int8_t>()[row * 32 + k] * b.as<uint8_t>()[column * 32 + k];
      CHECK(c.as<int>()[row * 8 + column] == sum);
    }
}

TEST_CASE("mma of doubles") {
  DeviceMemory a(4096), b(4096), c(4096);
  for (int i = 0; i < 32; ++i) a.as<double>()[i] = small(i), b.as<double>()[i] = small(i + 3);
  REQUIRE(matrixKernels().run("mmaDouble", {1}, {32}, a.address(), b.address(), c.address()) == Outcome::ok);
  for (int row = 0; row < 8; ++row)
    for (int column = 0; column < 8; ++column) {
      double sum = 0;
      for (int k = 0; k < 4; ++k) sum += small(row * 4 + k) * small(k * 8 + column + 3);
      CHECK(c.as<double>()[column * 8 + row] == sum);
    }
}

}  // namespace gpupool::softgpu::test
