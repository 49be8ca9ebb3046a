// Sessions of different leases that share memory: who may, and what becomes of it when one of them ends.
#include "server/tests/front_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

constexpr Id kOwner{1, 1}, kGuest{1, 2}, kForeign{1, 3};

struct LendingBench : Bench {
  LendingBench() {
    until([&] { return seen.beats > 0; });
    grant(kOwner, 1, "alps");
    grant(kGuest, 2, "alps");
    grant(kForeign, 3, "andes");
    owner = session(kOwner, 1);
    guest = session(kGuest, 2);
    REQUIRE(said(owner, "m") == "taken, others have 0 MiB");
    token = said(owner, "O");
    INFO(token);
    REQUIRE(token.size() == 64);
  }
  void grant(Id id, uint64_t epoch, const std::string& tenant, std::vector<int> devices = {0}) {
    auto request = control().grantRequest();
    fillLease(request.initLease(), id, epoch, std::move(devices), kGiB, kKey, tenant);
    request.send().ignoreResult().wait(io.waitScope);
  }
  Opening session(Id lease, uint64_t number) {
    Opening opening;
    opening.lease = lease;
    opening.session = {2, number};
    REQUIRE(open(opening) == "");
    return opening;
  }
  std::string said(Opening& opening, const std::string& order) {
    opening.stream->write(order.data(), order.size()).wait(io.waitScope);
    return opening.hear().wait(io.waitScope);
  }
  // Not waited for: it may take until others have closed what they opened.
  struct Revoked {
    bool done = false;
    kj::Promise<void> promise = nullptr;
  };
  kj::Own<Revoked> beginRevoke(Id id) {
    auto revoked = kj::heap<Revoked>();
    auto request = control().revokeRequest();
    schema::write(id, request.initId());
    revoked->promise =
        request.send().ignoreResult().then([&one = *revoked] { one.done = true; }).eagerlyEvaluate(nullptr);
    return revoked;
  }
  // Of a lease that goes on.
  bool saysLent(Id lease) {
    const auto said = seen.hindrances.find(lease);
    return said != seen.hindrances.end() && std::ranges::any_of(said->second, [](const std::string& reason) {
             return contains(
                 reason,
                 "cannot be suspended, or moved to other GPUs: memory of it is in use by test (process ");
           });
  }
  // The server has told so many beats more.
  void afterBeats(int more) {
    const int beats = seen.beats;
    until([&] { return seen.beats >= beats + more; });
  }

  Opening owner, guest;
  std::string token;
};

const std::string kElsewhere = "refused 2", kUnknown = "refused 1", kOtherDevice = "refused 5";

}  // namespace

TEST_CASE("a token opens in other leases of its tenant, and in no other tenant's") {
  LendingBench bench;
  Opening foreign = bench.session(kForeign, 3);
  CHECK(bench.said(foreign, "I" + bench.token) == kElsewhere);
  CHECK(bench.said(bench.guest, "I" + bench.token) == "opened at 0");
  CHECK(bench.said(foreign, "I" + bench.token) == kElsewhere);
  std::string forged = bench.token;
  forged.back() = forged.back() == '0' ? '1' : '0';
  CHECK(bench.said(bench.guest, "I" + forged) == kUnknown);
}

TEST_CASE("memory opens in a lease that has its device, whatever else that has") {
  LendingBench bench;
  bench.revoke(kForeign, "room");
  bench.grant({1, 4}, 4, "alps", {1});
  bench.grant({1, 5}, 5, "alps", {1, 0});
  Opening without = bench.session({1, 4}, 4), with = bench.session({1, 5}, 5);
  CHECK(bench.said(without, "I" + bench.token) == kOtherDevice);
  CHECK(bench.said(with, "I" + bench.token) == "opened at 1");
}

TEST_CASE(
    "a revoked lease keeps its devices until the last one has closed its memory, and says who that is") {
  LendingBench bench;
  REQUIRE(bench.said(bench.guest, "I" + bench.token) == "opened at 0");
  Opening second = bench.session(kGuest, 5);
  REQUIRE(bench.said(second, "I" + bench.token) == "opened at 0");
  auto revoked = bench.beginRevoke(kOwner);
  CHECK(bench.owner.hear().wait(bench.io.waitScope) == "stop: the lease has ended");
  bench.until([&] { return bench.seen.lentTo.contains(kOwner); });
  CHECK(contains(bench.seen.lentTo[kOwner], "test (process "));
  const std::string others = ") of lease " + kGuest.text().substr(0, 8) + ", and 1 more";
  CHECK(contains(bench.seen.lentTo[kOwner], others.c_str()));
  // Its token is nobody's, as soon as its session has ended.
  std::string said = kElsewhere;
  for (int i = 0; i < 1000 && said == kElsewhere; ++i) {
    said = bench.said(bench.guest, "I" + bench.token);
    if (said == kElsewhere) bench.timer.afterDelay(10 * kj::MILLISECONDS).wait(bench.io.waitScope);
  }
  CHECK(said == kUnknown);
  CHECK(bench.said(bench.guest, "X") == "told");
  bench.afterBeats(3);
  CHECK_FALSE(revoked->done);
  // The fake server has 8 GiB on the device, of which three leases have 3.
  CHECK(contains(failure([&] { bench.Bench::grant({1, 9}, 9, 6 * kGiB); }), "bytes free"));
  kill(static_cast<pid_t>(std::stoi(bench.said(second, "p"))), SIGKILL);
  bench.until([&] { return revoked->done; });
  bench.afterBeats(2);
  CHECK_FALSE(bench.seen.lentTo.contains(kOwner));
  bench.Bench::grant({1, 9}, 9, 6 * kGiB);
}

TEST_CASE(
    "an end that a manager asks for again waits for the same, and a manager that goes away ends nothing") {
  LendingBench bench;
  REQUIRE(bench.said(bench.guest, "I" + bench.token) == "opened at 0");
  auto first = bench.beginRevoke(kOwner);
  bench.until([&] { return bench.seen.lentTo.contains(kOwner); });
  auto second = bench.beginRevoke(kOwner);
  first = nullptr;  // the call is cancelled
  bench.afterBeats(3);
  CHECK_FALSE(second->done);
  bench.seen.control = nullptr;
  bench.manager = nullptr;
  second = nullptr;
  const int joins = bench.seen.joins;
  bench.startManager();
  bench.until([&] { return bench.seen.joins > joins; });
  bench.until([&] { return bench.seen.lentTo.contains(kOwner); });
  auto third = bench.beginRevoke(kOwner);
  bench.afterBeats(3);
  CHECK_FALSE(third->done);
  bench.said(bench.guest, "X");
  bench.until([&] { return third->done; });
}

TEST_CASE("when the lease ends that has opened memory, the lease ends of which it is") {
  LendingBench bench;
  REQUIRE(bench.said(bench.guest, "I" + bench.token) == "opened at 0");
  auto revoked = bench.beginRevoke(kOwner);
  bench.until([&] { return bench.seen.lentTo.contains(kOwner); });
  bench.revoke(kGuest, "over");
  bench.until([&] { return revoked->done; });
}

TEST_CASE("two leases that have memory of each other end, one after the other") {
  LendingBench bench;
  REQUIRE(bench.said(bench.guest, "I" + bench.token) == "opened at 0");
  const std::string back = bench.said(bench.guest, "O");
  REQUIRE(bench.said(bench.owner, "I" + back) == "opened at 0");
  auto revoked = bench.beginRevoke(kOwner);
  bench.until([&] { return bench.seen.lentTo.contains(kOwner); });
  CHECK_FALSE(revoked->done);
  bench.revoke(kGuest, "over");
  bench.until([&] { return revoked->done; });
}

TEST_CASE("what is left of a dead session is charged to its lease, and keeps that on its devices") {
  LendingBench bench;
  REQUIRE(bench.said(bench.guest, "I" + bench.token) == "opened at 0");
  kill(static_cast<pid_t>(std::stoi(bench.said(bench.owner, "p"))), SIGKILL);
  CHECK(contains(bench.owner.hear().wait(bench.io.waitScope), "killed by signal 9"));
  Opening next = bench.session(kOwner, 7);
  CHECK(bench.said(next, "m") == "refused, others have 600 MiB");
  bench.until([&] { return bench.saysLent(kOwner); });
  CHECK_FALSE(bench.seen.lentTo.contains(kOwner));  // the lease goes on
  CHECK(contains(failure([&] { bench.suspend(kOwner); }), "memory of it is in use by test (process "));
  bench.said(bench.guest, "X");
  bench.until([&] { return !bench.saysLent(kOwner); });
  CHECK(bench.said(next, "m") == "taken, others have 0 MiB");
  bench.suspend(kOwner);
}

TEST_CASE("a lease without a session keeps the account of what others have of it") {
  LendingBench bench;
  REQUIRE(bench.said(bench.guest, "I" + bench.token) == "opened at 0");
  bench.owner.stream->write("q", 1).wait(bench.io.waitScope);
  bench.until([&] { return bench.saysLent(kOwner); });
  Opening next = bench.session(kOwner, 7);
  CHECK(bench.said(next, "m") == "refused, others have 600 MiB");
  CHECK(bench.said(bench.guest, "m") == "taken, others have 0 MiB");  // nothing of it is the guest's
  bench.said(bench.guest, "X");
  std::string said = bench.said(next, "m");
  for (int i = 0; i < 2000 && said != "taken, others have 0 MiB"; ++i) {
    bench.timer.afterDelay(5 * kj::MILLISECONDS).wait(bench.io.waitScope);
    said = bench.said(next, "m");
  }
  CHECK(said == "taken, others have 0 MiB");
}
