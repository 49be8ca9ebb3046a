#include "pool-manager/placement.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::pool;

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

DeviceUse device(uint32_t ordinal, uint64_t memoryGiB, uint64_t freeGiB,
                 std::vector<std::string> holders = {}) {
  DeviceUse use;
  use.info.name = "H200";
  use.info.ordinal = ordinal;
  use.info.memoryBytes = memoryGiB * kGiB;
  use.freeBytes = freeGiB * kGiB;
  use.holders = std::move(holders);
  return use;
}

std::vector<uint32_t> ordinals(const Choice& choice) {
  std::vector<uint32_t> list;
  list.reserve(choice.devices.size());
  for (const auto& leased : choice.devices) list.push_back(leased.info.ordinal);
  return list;
}

bool says(const Choice& choice, const std::string& text) {
  return choice.missing.find(text) != std::string::npos;
}

}  // namespace

TEST_CASE("a whole device is one that nobody holds") {
  const std::vector<ServerUse> servers = {{"a", "", {device(0, 140, 100, {"eve"}), device(1, 140, 140)}}};
  const Choice choice = place({1, 0, ""}, servers);
  CHECK(choice.server == "a");
  CHECK(ordinals(choice) == std::vector<uint32_t>{1});
  CHECK(choice.devices[0].memoryBytes == 140 * kGiB);
}

TEST_CASE("a memory limit shares the fullest device that has room, overhead included") {
  const std::vector<ServerUse> servers = {
      {"a", "", {device(0, 140, 140), device(1, 140, 30, {"x"}), device(2, 140, 20, {"y"})}}};
  CHECK(ordinals(place({1, 19 * kGiB, ""}, servers)) == std::vector<uint32_t>{2});
  CHECK(ordinals(place({1, 20 * kGiB, ""}, servers)) == std::vector<uint32_t>{1});  // 20 + 1 of overhead
  CHECK(ordinals(place({2, 19 * kGiB, ""}, servers)) == std::vector<uint32_t>{1, 2});
  CHECK(place({1, 19 * kGiB, ""}, servers).devices[0].memoryBytes == 19 * kGiB);
}

TEST_CASE("software devices have no overhead, and nothing reserves more than there is") {
  Device software;
  software.memoryBytes = 4 * kGiB;
  software.software = true;
  CHECK(reservedBytes({software, 4 * kGiB}) == 4 * kGiB);
  CHECK(reservedBytes({software, 2 * kGiB}) == 2 * kGiB);
  Device real;
  real.memoryBytes = 8 * kGiB;
  CHECK(reservedBytes({real, 2 * kGiB}) == 3 * kGiB);
  CHECK(reservedBytes({real, 8 * kGiB}) == 8 * kGiB);
  CHECK(reservedBytes({real, 8 * kGiB - 1}) == 8 * kGiB);
}

TEST_CASE("all devices of a lease come from one server, the fullest that fits") {
  const std::vector<ServerUse> servers = {
      {"big", "", {device(0, 80, 80), device(1, 80, 80), device(2, 80, 80), device(3, 80, 80)}},
      {"half", "", {device(0, 80, 80), device(1, 80, 80), device(2, 80, 0, {"x"})}},
      {"one", "", {device(0, 80, 80)}}};
  CHECK(place({1, 0, ""}, servers).server == "one");
  CHECK(place({2, 0, ""}, servers).server == "half");
  CHECK(place({3, 0, ""}, servers).server == "big");
  CHECK(place({1, 0, "big"}, servers).server == "big");
  CHECK(place({5, 0, ""}, servers).server.empty());
}

TEST_CASE("broken devices and unusable servers get nothing") {
  std::vector<ServerUse> servers = {{"a", "", {device(0, 80, 80)}},
                                    {"b", "silent for 9 s", {device(0, 80, 80)}}};
  servers[0].devices[0].info.problem = "CUDA_ERROR_ECC_UNCORRECTABLE (214)";
  const Choice choice = place({1, 0, ""}, servers);
  CHECK(choice.server.empty());
  CHECK(says(choice, "GPU 0 (H200) is broken (CUDA_ERROR_ECC_UNCORRECTABLE (214))"));
  CHECK(says(choice, "b: silent for 9 s"));
}

TEST_CASE("the reason names what is missing and who holds what") {
  const std::vector<ServerUse> servers = {
      {"a", "", {device(0, 80, 0, {"alice@n1 pid 7 python (3 min)"}), device(1, 80, 10, {"bob", "eve"})}}};
  const Choice whole = place({1, 0, ""}, servers);
  CHECK(says(whole, "1 device is wanted, none is free"));
  CHECK(says(whole, "GPU 0 (H200) is held by alice@n1 pid 7 python (3 min)"));
  CHECK(says(whole, "GPU 1 (H200) is held by bob and eve with 10.0 GiB free"));
  CHECK(says(place({2, 20 * kGiB, ""}, servers),
             "2 devices with 20.0 GiB free on one server are wanted, none is free"));
  CHECK(says(place({3, 0, ""}, servers), "no server has more than 2"));
  CHECK(says(place({2, 90 * kGiB, ""}, servers), "the most that any server could give is 0"));
  CHECK(says(place({2, 5 * kGiB, ""}, servers), "only 1 is free"));
  CHECK(says(place({1, 0, "z"}, servers), "there is no server named z in the pool; there are: a"));
  CHECK(place({1, 0, ""}, {}).missing == "no server has joined the pool yet");
}

TEST_CASE("nothing is placed for nobody") { CHECK(place({0, 0, ""}, {}).server.empty()); }
