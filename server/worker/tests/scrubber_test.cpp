// Memory that was another tenant's is zero before a session reads it.
#include "server/worker/scrubber.h"

#include <algorithm>
#include <vector>

#include "server/worker/tests/client.h"

using namespace gpupool::server;
using namespace gpupool::server::test;

TEST_CASE("a scrubber clears what it is told, wherever and however much, and no byte beside it") {
  const Driver& driver = softDriver();
  CUcontext context = nullptr;
  REQUIRE(driver.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
  REQUIRE(driver.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
  constexpr size_t kBytes = 8 << 20;
  CUdeviceptr memory = 0;
  REQUIRE(driver.cuMemAlloc_v2(&memory, kBytes) == CUDA_SUCCESS);
  {
    Scrubber scrubber(driver, 3 << 20);
    struct Piece {
      size_t from, bytes;
    };
    for (const Piece piece :
         {Piece{4096, 64}, Piece{0, 2 << 20}, Piece{2 << 20, 6 << 20}, Piece{0, kBytes}}) {
      CAPTURE(piece.from, piece.bytes);
      REQUIRE(driver.cuMemsetD8_v2(memory, 0xab, kBytes) == CUDA_SUCCESS);
      REQUIRE(driver.cuCtxSynchronize() == CUDA_SUCCESS);  // the scrubber's stream waits for no other
      REQUIRE(scrubber.clear(memory + piece.from, piece.bytes) == CUDA_SUCCESS);
      std::vector<unsigned char> seen(kBytes), wanted(kBytes, 0xab);
      std::fill_n(wanted.begin() + piece.from, piece.bytes, 0);
      REQUIRE(driver.cuMemcpyDtoH_v2(seen.data(), memory, kBytes) == CUDA_SUCCESS);
      CHECK((seen == wanted));  // not to be printed
    }
  }
  CHECK(driver.cuMemFree_v2(memory) == CUDA_SUCCESS);
  driver.cuCtxPopCurrent_v2(&context);
  driver.cuDevicePrimaryCtxRelease_v2(0);
}

TEST_CASE("a scrubber that was prepared keeps its own memory until it ends, and clears as any other") {
  const Driver& driver = softDriver();
  CUcontext context = nullptr;
  REQUIRE(driver.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS);
  REQUIRE(driver.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS);
  const auto freeBytes = [&] {
    size_t bytes = 0, total = 0;
    CHECK(driver.cuMemGetInfo_v2(&bytes, &total) == CUDA_SUCCESS);
    return bytes;
  };
  constexpr size_t kBytes = 4096;
  CUdeviceptr memory = 0;
  REQUIRE(driver.cuMemAlloc_v2(&memory, kBytes) == CUDA_SUCCESS);
  const size_t before = freeBytes();
  {
    Scrubber scrubber(driver);
    REQUIRE(scrubber.prepare() == CUDA_SUCCESS);
    const size_t prepared = freeBytes();
    CHECK(prepared < before);
    REQUIRE(scrubber.prepare() == CUDA_SUCCESS);
    CHECK(freeBytes() == prepared);
    REQUIRE(driver.cuMemsetD8_v2(memory, 0xab, kBytes) == CUDA_SUCCESS);
    REQUIRE(driver.cuCtxSynchronize() == CUDA_SUCCESS);
    REQUIRE(scrubber.clear(memory, kBytes) == CUDA_SUCCESS);
    std::vector<unsigned char> seen(kBytes, 1);
    REQUIRE(driver.cuMemcpyDtoH_v2(seen.data(), memory, kBytes) == CUDA_SUCCESS);
    CHECK(std::all_of(seen.begin(), seen.end(), [](unsigned char byte) { return byte == 0; }));
  }
  CHECK(freeBytes() == before);
  CHECK(driver.cuMemFree_v2(memory) == CUDA_SUCCESS);
  driver.cuCtxPopCurrent_v2(&context);
  driver.cuDevicePrimaryCtxRelease_v2(0);
}
