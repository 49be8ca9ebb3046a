// Whole kernels, as nvcc compiles them.
#include <chrono>
#include <cmath>

#include "pace.h"
#include "server/softgpu/tests/engine_harness.h"

namespace gpupool::softgpu::test {

namespace {
Loaded& kernels() {
  static Loaded loaded(readFile(GPUPOOL_KERNELS_PTX));
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  return loaded;
}

Loaded& newerKernels() {
  static Loaded loaded(readFile(GPUPOOL_KERNELS90_PTX));
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  return loaded;
}
}  // namespace

TEST_CASE("vector addition") {
  constexpr int n = 100'003;
  DeviceMemory a(sizeof(float) * n), b(sizeof(float) * n), c(sizeof(float) * n);
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
  DeviceMemory a(sizeof(float) * n * n), b(sizeof(float) * n * n), c(sizeof(float) * n * n);
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
    CHECK(seconds < 5 * gpupool::test::busy());  // far above what it takes: shared machines
  }
}

TEST_CASE("reduction by shuffles, scan, histogram") {
  constexpr int n = 10'000;
  DeviceMemory data(sizeof(uint32_t) * n), out(1024);
  int expected = 0;
  for (int i = 0; i < n; ++i) expected += data.as<int>()[i] = i % 100 - 30;
  REQUIRE(kernels().run("reduce", {7}, {256}, data.address(), out.address(), n) == Outcome::ok);
  CHECK(out.as<int>()[0] == expected);

  kernels().dynamicShared = 1024 * 4;
  REQUIRE(kernels().run("scan", {1}, {1024}, data.address(), 1000) == Outcome::ok);
  kernels().dynamicShared = 0;
  int sum = 0;
  int wrong = 0;
  for (int i = 0; i < 1000; ++i) wrong += data.as<int>()[i] != (sum += i % 100 - 30);
  CHECK(wrong == 0);

  std::memset(out.as<void>(), 0, 1024);
  unsigned counts[256] = {};
  for (int i = 0; i < n; ++i) ++counts[data.as<unsigned char>()[i] = static_cast<unsigned char>(i * i)];
  REQUIRE(kernels().run("histogram", {8}, {128}, data.address(), n, out.address()) == Outcome::ok);
  CHECK(std::memcmp(counts, out.as<void>(), sizeof counts) == 0);
}

TEST_CASE("printf and assert") {
  takeOutput();
  DeviceMemory name(16), data(4096);
  std::strcpy(name.as<char>(), "end");
  REQUIRE(kernels().run("talk", {1}, {64}, -5, name.address()) == Outcome::ok);
  CHECK(takeOutput() == "-5  1.50|ab    |z 123456789abcdef 7 % (nil) end\n");
  data.as<int>()[9] = 3;
  CHECK(kernels().run("check", {1}, {32}, data.address()) == Outcome::assertion);
  CHECK(takeOutput().find(
            "block: [0,0,0], thread: [9,0,0] Assertion `data[threadIdx.x] < 3 && \"too large\"` failed.") !=
        std::string::npos);
}

TEST_CASE("objects with virtual functions on the device heap") {
  DeviceMemory shapes(size_t{100} * 8), areas(size_t{100} * 4);
  uint64_t before = heapBytesInUse();
  REQUIRE(kernels().run("makeShapes", {1}, {1}, shapes.address(), 100) == Outcome::ok);
  CHECK(heapBytesInUse() > before);
  REQUIRE(kernels().run("useShapes", {1}, {100}, shapes.address(), areas.address()) == Outcome::ok);
  int wrong = 0;
  for (int i = 0; i < 100; ++i) wrong += areas.as<int>()[i] != (i % 2 == 0 ? i * i : 2 * i);
  CHECK(wrong == 0);
  REQUIRE(kernels().run("deleteShapes", {1}, {1}, shapes.address(), 100) == Outcome::ok);
  CHECK(heapBytesInUse() == before);
}

TEST_CASE("function pointers and recursion") {
  DeviceMemory data(4096);
  for (int which : {0, 1, 2}) {
    for (int i = 0; i < 64; ++i) data.as<int>()[i] = i;
    REQUIRE(kernels().run("callThrough", {1}, {64}, data.address(), which) == Outcome::ok);
    CHECK(data.as<int>()[63] == (which == 0 ? 64 : which == 1 ? 126 : 63));
  }
  for (int i = 0; i < 20; ++i) data.as<int>()[i] = i;
  REQUIRE(kernels().run("recurse", {1}, {20}, data.address()) == Outcome::ok);
  CHECK(data.as<int>()[19] == 4181);
  CHECK(kernels().run("overflow", {1}, {1}, data.address()) == Outcome::illegalAddress);
}

TEST_CASE("threads that wait for one another") {
  DeviceMemory data(size_t{64} * 1024 * 4);
  kernels().cooperative = true;
  for (int i = 0; i < 40 * 64; ++i) data.as<int>()[i] = i;
  REQUIRE(kernels().run("gridSync", {40}, {64}, data.address(), 5) == Outcome::ok);
  kernels().cooperative = false;
  int wrong = 0;
  for (int i = 0; i < 40 * 64; ++i) wrong += data.as<int>()[i] != (i + 5) % (40 * 64) + 5;
  CHECK(wrong == 0);
  // Not launched cooperatively: no workspace, and grid.sync() traps.
  CHECK(kernels().run("gridSync", {4}, {64}, data.address(), 1) == Outcome::launchFailed);

  std::memset(data.as<void>(), 0, 64);
  REQUIRE(kernels().run("producer", {1}, {64}, data.address(), data.address() + 16) == Outcome::ok);
  CHECK(data.as<int>()[4] == 42);
  std::memset(data.as<void>(), 0, 64);
  REQUIRE(kernels().run("lock", {20}, {33}, data.address(), data.address() + 16) == Outcome::ok);
  CHECK(data.as<int>()[4] == 20 * 33 * 10);
}

TEST_CASE("warp operations") {
  DeviceMemory out(size_t{64} * 32);
  REQUIRE(kernels().run("warpOperations", {1}, {64}, out.address()) == Outcome::ok);
  const auto* lane5 = out.as<uint32_t>() + size_t{32 + 5} * 8;
  CHECK(lane5[0] == 0xFFFFFFFF);
  CHECK(lane5[1] == 0x49249249);
  CHECK(lane5[2] == 0x3FF);
  CHECK(lane5[3] == 0xF0);
  CHECK(lane5[4] == 0);  // 0xFFFFFFFF + 1
  CHECK(lane5[5] == 2);
  CHECK(lane5[6] == 30);
  CHECK(lane5[7] == 496);
  CHECK(out.as<uint32_t>()[20 * 8 + 6] == 190);
  REQUIRE(kernels().run("partialWarp", {2}, {96}, out.address()) == Outcome::ok);
  CHECK(out.as<uint32_t>()[64] == 66);
}

TEST_CASE("faults end their grid and no other") {
  DeviceMemory data(8192);
  auto works = [&] {
    data.as<int>()[0] = 17;
    REQUIRE(kernels().run("readAt", {1}, {1}, data.address(), data.address() + 64) == Outcome::ok);
    CHECK(data.as<int>()[16] == 17);
  };
  for (int round = 0; round < 3; ++round) {
    CHECK(kernels().run("readAt", {1}, {1}, uint64_t{0}, data.address()) == Outcome::illegalAddress);
    CHECK(kernels().run("readAt", {4}, {64}, data.address() + (1 << 20), data.address()) ==
          Outcome::illegalAddress);
    CHECK(kernels().run("readAt", {1}, {1}, reinterpret_cast<uint64_t>(&round), data.address()) ==
          Outcome::illegalAddress);  // the process's own memory
    CHECK(kernels().run("readAt", {1}, {1}, uint64_t{0xFFFF'8000'0000'0000}, data.address()) ==
          Outcome::illegalAddress);
    CHECK(kernels().run("readAt", {1}, {1}, data.address() + 2, data.address()) ==
          Outcome::misalignedAddress);
    CHECK(kernels().run("readPair", {1}, {1}, data.address() + 4, data.address()) ==
          Outcome::misalignedAddress);
    works();
    CHECK(kernels().run("readShared", {1}, {64}, 31, data.address()) == Outcome::ok);
    CHECK(kernels().run("readShared", {1}, {64}, 4000, data.address()) == Outcome::illegalAddress);
    CHECK(kernels().run("readShared", {1}, {64}, -1, data.address()) == Outcome::illegalAddress);
    CHECK(kernels().run("trapIf", {100}, {64}, 77) == Outcome::launchFailed);
    CHECK(kernels().run("trapIf", {100}, {64}, 100) == Outcome::ok);
    works();
    // 32 threads wait for 64, and nobody else comes.
    CHECK(kernels().run("halfBarrier", {1}, {96}, data.address()) == Outcome::launchFailed);
    works();
  }
}

TEST_CASE("parameters, local arrays, module variables") {
  DeviceMemory out(4096);
  struct {
    int values[4000];
  } big;
  for (int i = 0; i < 4000; ++i) big.values[i] = 3 * i;
  REQUIRE(kernels().run("bigParameter", {1}, {1}, big, out.address(), 3999) == Outcome::ok);
  CHECK(out.as<int>()[0] == 11997);
  REQUIRE(kernels().run("localArray", {1}, {64}, out.address(), 7) == Outcome::ok);
  CHECK(out.as<int>()[20] == (140 % 64) * (140 % 64));
  int before = *reinterpret_cast<int*>(kernels().global("counter"));
  REQUIRE(kernels().run("globals", {1}, {4}, out.address()) == Outcome::ok);
  CHECK(out.as<float>()[3] == 15);
  CHECK(*reinterpret_cast<int*>(kernels().global("counter")) == before + 4);
}

TEST_CASE("asynchronous copies, barrier objects, clusters") {
  DeviceMemory in(size_t{64} * 1024), out(4096);
  for (int i = 0; i < 16 * 1024; ++i) in.as<int>()[i] = i;
  REQUIRE(newerKernels().run("barrierObject", {3}, {256}, out.address(), 7) == Outcome::ok);
  CHECK(out.as<int>()[250] == (250 + 7) % 256 + 7);
  REQUIRE(newerKernels().run("asyncCopy", {1}, {256}, out.address(), in.address()) == Outcome::ok);
  CHECK(out.as<int>()[3] == 252);
  REQUIRE(newerKernels().run("pipelined", {1}, {256}, out.address(), in.address(), 5) == Outcome::ok);
  CHECK(out.as<int>()[3] == 5 * 252 + 256 * (1 + 2 + 3 + 4));
  REQUIRE(newerKernels().run("bulkCopy", {2}, {256}, out.address(), in.address()) == Outcome::ok);
  CHECK(out.as<int>()[200] == 55);
  CHECK(newerKernels().run("bulkCopy", {1}, {256}, out.address(), in.address() + 4) ==
        Outcome::misalignedAddress);
  REQUIRE(newerKernels().run("largeTile", {1}, {256}, in.address()) == Outcome::ok);
  CHECK(in.as<int>()[70] == (64 + 127) * 32);
  REQUIRE(newerKernels().run("cluster", {2}, {64}, out.address()) == Outcome::ok);
  CHECK(out.as<int>()[40] == 5 + 1 + 496);
}

}  // namespace gpupool::softgpu::test
