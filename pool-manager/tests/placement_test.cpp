// Placement on servers that lease the memory that they have.
#include "catch.h"
#include "pool-manager/placement_index.h"
#include "pool-manager/tests/placement_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::pool::test;

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

TEST_CASE("whether a wish waits for cordoned servers only") {
  ServerUse large{"large", "cordoned by an operator", {device(0, 80, 80), device(1, 80, 80)}, true};
  ServerUse small{"small", "", {device(0, 80, 0, {"somebody"})}, false};
  const std::vector<ServerUse> both{large, small};
  CHECK(onlyCordoned({2, 0, "", 0}, both));
  CHECK(onlyCordoned({1, 0, "large", 0}, both));
  CHECK_FALSE(onlyCordoned({1, 0, "", 0}, both));  // small's is only in use
  CHECK_FALSE(onlyCordoned({1, 0, "small", 0}, both));
  CHECK(place({1, 0, "", 0}, both).server.empty());
  CHECK(place({1, 0, "", 0}, both).missing.find("large: cordoned by an operator") != std::string::npos);
  CHECK_FALSE(place({2, 0, "", 0}, both).never);
}

// --- versions -------------------------------------------------------------------------------------------

namespace {

const WorkerVersion kOld{0x01d, "0.0.9"}, kNew{0x4e3, "0.1.0"};

// Server `old` serves both, `new` the new client alone and has less room, so that it is preferred.
std::vector<ServerUse> ofTwoVersions() {
  std::vector<ServerUse> servers = {{"new", "", {device(0, 80, 80)}},
                                    {"old", "", {device(0, 80, 80), device(1, 80, 80)}}};
  servers[0].rows = {kNew.rowsHash};
  servers[1].rows = {kNew.rowsHash, kOld.rowsHash};
  return servers;
}

Wish of(std::vector<WorkerVersion> clients, uint32_t count = 1, const std::string& server = "") {
  Wish wish{count, 0, server};
  wish.clients = std::move(clients);
  return wish;
}

}  // namespace

TEST_CASE("a lease is placed where its client has a worker program") {
  auto servers = ofTwoVersions();
  PlacementIndex index;
  index.rebuild(servers);
  for (const auto& [wish, server] : std::vector<std::pair<Wish, std::string>>{{of({}), "new"},
                                                                              {of({kNew}), "new"},
                                                                              {of({{0, ""}}), "new"},
                                                                              {of({kOld}), "old"},
                                                                              {of({kNew, kOld}), "old"},
                                                                              {of({kOld}, 1, "new"), ""}}) {
    CHECK(place(wish, servers).server == server);
    CHECK(place(wish, servers, index).server == server);
  }
  servers[0].rows.clear();  // it does not say
  CHECK(place(of({kOld}), servers).server == "new");
}

TEST_CASE("what no worker program is for can never be placed, and the reason says what to do") {
  auto servers = ofTwoVersions();
  PlacementIndex index;
  index.rebuild(servers);
  const Wish nobodys = of({{0xabc, "0.3.0"}});
  const Choice choice = place(nobodys, servers);
  CHECK(choice.never);
  CHECK(place(nobodys, servers, index).never);
  CHECK(servedByNone(nobodys, servers));
  CHECK(
      choice.missing ==
      "version mismatch: no server has a worker program for this client (call rows 0000000000000abc of "
      "gpupool "
      "0.3.0); install the worker of that version there (docs/admin.md, Upgrade), or another version of the "
      "client here (gpupool servers -v)");
  CHECK(says(place(of({kOld}, 1, "new"), servers), "server new has no worker program for this client"));
  CHECK(judge(nobodys, servers)[0].reason ==
        "it has no worker program for this client (call rows 0000000000000abc of gpupool 0.3.0)");
  CHECK_FALSE(claim(nobodys, 0, servers));
  // Some server would do, and is full.
  for (DeviceUse& one : servers[1].devices) one.freeBytes = 0;
  const Choice full = place(of({kOld}), servers);
  CHECK_FALSE(full.never);
  CHECK_FALSE(servedByNone(of({kOld}), servers));
  CHECK(says(full, "none is free"));
  CHECK(
      says(full, "new: has no worker program for this client (call rows 000000000000001d of gpupool 0.0.9)"));
  // More devices than any server with that program has.
  CHECK(place(of({kOld}, 3), servers).never);
  CHECK_FALSE(servedByNone(of({kOld}, 3), servers));
  CHECK_FALSE(servedByNone(nobodys, {}));
}

TEST_CASE("a lease moves where its clients have worker programs") {
  auto servers = ofTwoVersions();
  servers.push_back({"from", "", {device(0, 80, 0)}});
  servers.back().devices[0].info.uuid = "its own";
  MoveWish wish{"from", {{{servers.back().devices[0].info, 80 * kGiB}, 0, 0, false}}};
  CHECK(placeMove(wish, servers).server == "new");
  wish.clients = {kOld};
  CHECK(placeMove(wish, servers).server == "old");
  CHECK(couldMove(wish, servers[1]));
  CHECK_FALSE(couldMove(wish, servers[0]));
  wish.clients = {kOld, {0xabc, ""}};
  const Choice nowhere = placeMove(wish, servers);
  CHECK(nowhere.server.empty());
  CHECK(says(nowhere,
             "new: has no worker program for this client (call rows 000000000000001d of gpupool 0.0.9)"));
  CHECK(says(nowhere, "old: has no worker program for this client (call rows 0000000000000abc)"));
  CHECK(says(nowhere, "; install the worker of that version there (docs/admin.md, Upgrade)"));
}

// As a lease has them that was given what suspended ones had left of its devices.
TEST_CASE("claims of different sizes each get a device where they fit") {
  const auto placed = [](uint64_t firstGiB, uint64_t secondGiB, uint64_t free0, uint64_t free1) {
    MoveWish wish{"from", {}};
    for (const uint64_t gib : {firstGiB, secondGiB})
      wish.claims.push_back({{device(0, 80, 0).info, gib * kGiB}, 0, 0, false});
    for (Claim& claim : wish.claims) claim.device.info.uuid = "its own";
    const std::vector<ServerUse> servers{{"to", "", {device(0, 80, free0), device(1, 80, free1)}}};
    return placeMove(wish, servers);
  };
  CHECK(ordinals(placed(60, 80, 80, 70)) == std::vector<uint32_t>{1, 0});
  CHECK(ordinals(placed(80, 60, 80, 70)) == std::vector<uint32_t>{0, 1});
  CHECK(ordinals(placed(60, 80, 70, 80)) == std::vector<uint32_t>{0, 1});
  const Choice tight = placed(60, 80, 70, 70);
  CHECK(tight.server.empty());
  CHECK(says(tight, "to: GPU 0 (H200) has 70.0 GiB free, GPU 1 (H200) has 70.0 GiB free"));
  CHECK(says(placed(60, 80, 80, 50), "to: GPU 0 (H200) is free, GPU 1 (H200) has only 50.0 GiB free"));
}

TEST_CASE("of a lease that needs more devices than are free it is said how many are") {
  MoveWish wish{"from", {2, {{device(0, 80, 0).info, 80 * kGiB}, 0, 0, false}}};
  for (Claim& claim : wish.claims) claim.device.info.uuid = "its own";
  std::vector<ServerUse> servers{{"b", "cordoned by an operator", {device(0, 80, 80), device(1, 80, 80)}},
                                 {"node", "", {device(0, 80, 80)}}};
  CHECK(
      placeMove(wish, servers).missing ==
      "2 devices on one server are wanted, only 1 is free: b: cordoned by an operator; node: GPU 0 (H200) is "
      "free");
  servers[1].devices.push_back(device(1, 80, 0, {"eve"}));
  CHECK(says(placeMove(wish, servers), "only 1 is free: "));
  servers[1].devices[0].freeBytes = 0;
  CHECK_FALSE(says(placeMove(wish, servers), "wanted"));
  servers[1].devices = {device(0, 80, 80)};
  wish.ordinals = {0, 1};
  CHECK_FALSE(says(placeMove(wish, servers), "wanted"));
}
