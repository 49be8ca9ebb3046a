// What a session tells of how much its program does.
#include "server/worker/count_watch.h"

#include "server/worker/tests/client.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;
using namespace std::chrono_literals;

#define ROW(name) schema::RowOf<name>::id

TEST_CASE("frames, awaited ones and bytes of copies are counted, and refused copies are not") {
  Client client;
  client.open();
  const uint64_t device = client.space().deviceBase, staging = client.hello.stagingAddress;
  const SessionCounts before = client.session->counts().now();
  CHECK(before.calls == client.seq);
  REQUIRE(
      client.await(ROW("sessionExtentMap"), Arguments().value(0).value(device).value(2 * kMiB)).status() ==
      CUDA_SUCCESS);
  const auto copy = [&](uint32_t call, uint64_t to, uint64_t from, uint64_t bytes, uint32_t flags) {
    client.post(call, Arguments().value(to).value(from).value(bytes).value(0), flags);
    if (flags != 0) REQUIRE(client.receive());
  };
  copy(ROW("cuMemcpyHtoDAsync_v2"), device, staging, 4096, 0);
  copy(ROW("cuMemcpyHtoDAsync_v2"), device, staging, 1000, 0);
  copy(ROW("cuMemcpyDtoHAsync_v2"), staging, device, 64, 0);
  copy(ROW("cuMemcpyDtoDAsync_v2"), device + 4096, device, 512, 0);      // within the device
  copy(ROW("cuMemcpyHtoDAsync_v2"), device, 8, 1 << 20, Frame::kAwait);  // not the session's
  client.await(ROW("sessionDrain"), Arguments().value(0).value(1));
  const SessionCounts now = client.session->counts().now();
  CHECK(now.calls - before.calls == 7);
  CHECK(now.awaited - before.awaited == 3);
  CHECK(now.toDeviceBytes == 5096);
  CHECK(now.fromDeviceBytes == 64);
}

namespace {

// What a watch has told, and whether it can be.
struct Told {
  std::mutex mutex;
  std::vector<SessionCounts> all;
  bool takes = true;
  unsigned tries = 0;
  CountWatch::Report report() {
    return [this](const SessionCounts& counts) {
      std::lock_guard lock(mutex);
      ++tries;
      if (takes) all.push_back(counts);
      return takes;
    };
  }
  template <class Condition>
  bool soon(Condition condition) {
    return eventually([&] {
      std::lock_guard lock(mutex);
      return condition();
    });
  }
};

}  // namespace

TEST_CASE("counts are told when they have changed, each state once, and again where nobody took them") {
  CallCounts counts;
  Told told;
  CountWatch watch(counts, told.report(), 1ms);
  counts.frame(true);
  counts.toDevice(7);
  REQUIRE(told.soon([&] { return !told.all.empty() && told.all.back() == SessionCounts{1, 1, 7, 0}; }));
  {
    std::lock_guard lock(told.mutex);
    for (size_t i = 1; i < told.all.size(); ++i) CHECK(told.all[i] != told.all[i - 1]);
    told.takes = false;
    told.tries = 0;
  }
  counts.frame(false);
  REQUIRE(told.soon([&] { return told.tries > 1; }));
  {
    std::lock_guard lock(told.mutex);
    CHECK(told.all.back() == SessionCounts{1, 1, 7, 0});
    told.takes = true;
  }
  REQUIRE(told.soon([&] { return told.all.back() == SessionCounts{2, 1, 7, 0}; }));
}

TEST_CASE("the last counts are told at once when that is asked for") {
  CallCounts counts;
  Told told;
  CountWatch watch(counts, told.report(), 1h);
  watch.tell();
  CHECK(told.tries == 0);  // there is nothing to tell
  counts.fromDevice(3);
  watch.tell();
  watch.tell();
  REQUIRE(told.all.size() == 1);
  CHECK(told.all[0] == SessionCounts{0, 0, 0, 3});
}
