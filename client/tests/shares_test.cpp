// What a process knows of its memory that others have a handle of.
#include "client/memory/shares.h"

#include <chrono>
#include <thread>

#include "catch.h"

using namespace gpupool;
using namespace gpupool::client;
using schema::ShareToken;

namespace {

Allocation allocationOf(uint64_t buffer) {
  Allocation allocation{};
  allocation.bufferId = buffer;
  return allocation;
}

}  // namespace

TEST_CASE("an allocation that two threads offer at once is offered once, and has one token") {
  OfferedAllocations offered;
  const Allocation allocation = allocationOf(7);
  std::atomic<uint64_t> offers{0};
  ShareToken first, second;
  std::thread other;
  const auto offer = [&](ShareToken& token) {
    token.key[0] = ++offers;
    return CUDA_SUCCESS;
  };
  // The first offer gives the second one time to overtake it.
  const CUresult result = offered.offered(allocation, first, [&](ShareToken& token) {
    offer(token);
    other = std::thread([&] { offered.offered(allocation, second, offer); });
    for (int i = 0; i < 300 && offers == 1; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return CUDA_SUCCESS;
  });
  other.join();
  REQUIRE(result == CUDA_SUCCESS);
  CHECK(offers == 1);
  CHECK(first == second);
  CHECK(offered.any());
}

TEST_CASE("an allocation whose offer has failed is offered again, and each has a token of its own") {
  OfferedAllocations offered;
  ShareToken token;
  const auto fails = [](ShareToken&) { return CUDA_ERROR_OUT_OF_MEMORY; };
  CHECK(offered.offered(allocationOf(7), token, fails) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK_FALSE(offered.any());
  for (uint64_t buffer : {7, 8})
    REQUIRE(offered.offered(allocationOf(buffer), token, [&](ShareToken& asked) {
      asked.key[0] = buffer;
      return CUDA_SUCCESS;
    }) == CUDA_SUCCESS);
  REQUIRE(offered.offered(allocationOf(7), token, fails) == CUDA_SUCCESS);
  CHECK(token.key[0] == 7);
}
