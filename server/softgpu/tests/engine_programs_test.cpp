// Whole kernels, as nvcc compiles them.
#include <chrono>
#include <cmath>

#include "server/softgpu/tests/engine_harness.h"

namespace gpupool::softgpu::test {

namespace {
Loaded& kernels() {
  static Loaded loaded(readFile(GPUPOOL_KERNELS_PTX));
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  return loaded;
}
}  // namespace

TEST_CASE("vector addition") {
  constexpr int n = 100'003;
  DeviceMemory a(n * 4), b(n * 4), c(n * 4);
  for (int i = 0; i < n; ++i)
    a.as<float>()[i] = static_cast<float>(i), b.as<float>()[i] = 0.5f * static_cast<float>(i);
  REQUIRE(kernels().run("vectorAdd", {(n + 255) / 256}, {256}, a.address(), b.address(), c.address(), n) ==
          Outcome::ok);
  int wrong = 0;
  for (int i = 0; i < n; ++i)
    wrong += c.as<float>()[i] != static_cast<float>(i) + 0.5f * static_cast<float>(i);
  CHECK(wrong == 0);
}

TEST_CASE("tiled matrix product") {
  constexpr int n = 512;
  DeviceMemory a(n * n * 4), b(n * n * 4), c(n * n * 4);
  for (int i = 0; i < n * n; ++i) {
    a.as<float>()[i] = static_cast<float>(i % 7) - 3;
    b.as<float>()[i] = static_cast<float>(i % 5) - 2;
  }
  for (unsigned tile : {16u, 32u}) {
    std::string name = "matmul" + std::to_string(tile);
    REQUIRE(prepare(*kernels().program().kernel(name)));
    auto begin = std::chrono::steady_clock::now();
    REQUIRE(kernels().run(name, {n / tile, n / tile}, {tile, tile}, a.address(), b.address(), c.address(),
                          n) == Outcome::ok);
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    WARN(name << ": " << seconds << " s");
    int wrong = 0;
    for (int row = 0; row < n; row += 37)
      for (int column = 0; column < n; column += 11) {
        float sum = 0;
        for (int k = 0; k < n; ++k) sum += a.as<float>()[row * n + k] * b.as<float>()[k * n + column];
        wrong += c.as<float>()[row * n + column] != sum;  // small whole numbers: exact in any order
      }
    CHECK(wrong == 0);
    CHECK(seconds < 5);  // far above what it takes: shared machines
  }
}

}  // namespace gpupool::softgpu::test
