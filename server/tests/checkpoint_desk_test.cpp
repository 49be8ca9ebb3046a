// Checkpoints that holders bring, and holders that keep none: what the desk makes of who is slow, gone, or
// says nonsense. Whole ones go through the tests of failover.
#include "server/front/checkpoint_desk.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>

#include "catch.h"
#include "server/tests/support.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

constexpr uint64_t kMost = 1 << 20;

struct Bench {
  kj::AsyncIoContext io = kj::setupAsyncIo();
  kj::Timer& timer = io.provider->getTimer();
  std::shared_ptr<KeepBudget> budget = std::make_shared<KeepBudget>(kMost);
  CheckpointDesk desk{timer, budget, {200 * kj::MILLISECONDS, 200 * kj::MILLISECONDS}};

  // Why a session of so many bytes, of which these come, is not taken; "": it is.
  std::string take(uint64_t bytes, const std::string& come, bool closes = false) {
    auto [holder, server] = connection(*io.lowLevelProvider);
    BroughtSession brought;
    brought.facts.lease = {1, 1};
    brought.file.bytes = bytes;
    auto sent = holder->write(come.data(), come.size()).eagerlyEvaluate([](kj::Exception&&) {});
    if (closes) holder->shutdownWrite();
    std::string why;
    kj::evalNow([&, &from = *server] { return desk.take(from, brought); })
        .then([](std::shared_ptr<CheckpointDesk::File>&&) {},
              [&](kj::Exception&& error) { why = error.getDescription().cStr(); })
        .wait(io.waitScope);
    return why;
  }
  bool allFree() {
    const bool free = budget->take(kMost).empty();
    if (free) budget->give(kMost);
    return free;
  }
};

}  // namespace

TEST_CASE("what a holder brings is checked before anybody uses it, and counts until it is refused") {
  Bench bench;
  CHECK(contains(bench.take(4096, std::string(4096, 'x')), "damaged"));
  CHECK(contains(bench.take(4096, std::string(4096, '\0')), "damaged"));
  CHECK(!bench.take(4096, std::string(100, 'x'), true).empty());  // it ends early
  CHECK(!bench.take(4096, std::string(100, 'x')).empty());        // and no more
  CHECK(contains(bench.take(kMost + 1, ""), "no room"));
  CHECK(contains(bench.take(UINT64_MAX, ""), "no room"));
  CHECK(bench.allFree());
}

TEST_CASE("a budget is never more than it is") {
  auto budget = std::make_shared<KeepBudget>(100);
  CHECK(budget->take(60).empty());
  CHECK(!budget->take(50).empty());
  CHECK(!budget->take(UINT64_MAX - 10).empty());
  CHECK(budget->take(40).empty());
  {
    const auto room = budget->share(40);
    CHECK(!budget->take(1).empty());
  }
  CHECK(budget->take(40).empty());
}

TEST_CASE("a lease has one holder, the last one, and none when it is gone") {
  Bench bench;
  const Id lease{1, 1};
  LeaseTable leases{twoDevices()};
  CHECK(grant(leases, lease, 1, {1}) == "");
  CHECK(!bench.desk.has(lease));
  auto first = connection(*bench.io.lowLevelProvider);
  bench.desk.keep(kj::mv(first.second), lease);
  CHECK(bench.desk.ready(lease));
  auto second = connection(*bench.io.lowLevelProvider);
  bench.desk.keep(kj::mv(second.second), lease);
  char byte = 0;
  CHECK(first.first->tryRead(&byte, 1, 1).wait(bench.io.waitScope) == 0);  // it is closed
  bench.desk.keepOnly(leases);
  CHECK(bench.desk.has(lease));
  bench.desk.keepOnly(LeaseTable(twoDevices()));
  CHECK(!bench.desk.has(lease));
}
