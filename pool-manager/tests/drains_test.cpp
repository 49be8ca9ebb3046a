// Servers that are emptied: which leases are moved when, what is said of them, and what ends it.
#include "pool-manager/drains.h"

#include <kj/timer.h>

#include "pool-manager/rpc.h"
#include "targets_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

// Server a has leases 1 and 2; moves are answered by hand.
struct Draining : Targets {
  Draining() : drains(timer, *pool.pool, [this](const Principal&, const Id& lease) { return move(lease); }) {
    lease(2, "a");
    cordon();
  }
  void cordon() {
    pool->cordon(kAdmin, "a", {"a new fan", "eve@head", 1}, [](const std::string&) {});
  }
  void uncordon() {
    pool->uncordon(kAdmin, "a", [](const std::string&) {});
  }
  kj::Promise<MigrateResult> move(const Id& lease) {
    auto answer = kj::newPromiseAndFulfiller<MigrateResult>();
    asked.push_back(lease);
    answers.push_back(kj::mv(answer.fulfiller));
    return kj::mv(answer.promise);
  }
  void moved(const std::string& place) { answers.back()->fulfill({1, 0, 0, place}), turn(); }
  void stays(const std::string& why) {
    answers.back()->reject(rpcError(kj::Exception::Type::FAILED, why));
    turn();
  }
  void begin(kj::Duration tryFor = 0 * kj::SECONDS) { drains.begin(kAdmin, "a", tryFor), turn(); }
  void turn() { scope.poll(); }
  void pass(kj::Duration time) { timer.advanceTo(timer.now() + time), turn(); }
  DrainState look(uint64_t after = 0) { return drains.state("a", after); }
  std::vector<std::string> words(uint64_t after = 0) {
    std::vector<std::string> list;
    for (const DrainWord& word : look(after).words)
      list.push_back(std::to_string(word.lease.low) + (word.moved ? " moved " : " stays ") + word.text);
    return list;
  }

  kj::EventLoop loop;
  kj::WaitScope scope{loop};
  kj::TimerImpl timer{kj::origin<kj::TimePoint>()};
  std::vector<Id> asked;
  std::vector<kj::Own<kj::PromiseFulfiller<MigrateResult>>> answers;
  Drains drains;
};

const Id kOther{2, 2};

}  // namespace

TEST_CASE_METHOD(Draining, "leases are moved one after the other, and once") {
  begin();
  CHECK(asked == std::vector<Id>{kLease});
  CHECK(look().moving);
  CHECK(look().cordoned);
  REQUIRE(look().leases.size() == 2);
  CHECK(look().leases[0].state == "active");
  begin();  // joins it
  CHECK(asked.size() == 1);
  moved("b GPU 0");
  CHECK(asked == std::vector<Id>{kLease, kOther});
  stays("it shares memory");
  CHECK_FALSE(look().moving);
  CHECK_FALSE(look().goesOn);
  CHECK(words() == std::vector<std::string>{"1 moved b GPU 0", "2 stays it shares memory"});
  CHECK(words(1) == std::vector<std::string>{"2 stays it shares memory"});
  CHECK(words(look().latest).empty());
  CHECK(look().leases[1].note == "it shares memory");
  pass(10 * kj::MINUTES);
  CHECK(asked.size() == 2);
}

TEST_CASE_METHOD(Draining, "what stays is tried again every minute, and told once") {
  begin(150 * kj::SECONDS);
  stays("no room"), stays("no room");
  CHECK(look().goesOn);
  pass(59 * kj::SECONDS);
  CHECK(asked.size() == 2);
  pass(1 * kj::SECONDS);
  CHECK(asked.size() == 3);
  stays("no room"), stays("it is suspended");
  CHECK(words() == std::vector<std::string>{"1 stays no room", "2 stays no room", "2 stays it is suspended"});
  pass(60 * kj::SECONDS);
  CHECK(asked.size() == 5);
  stays("no room"), stays("no room");
  pass(60 * kj::SECONDS);  // its time is over
  CHECK(asked.size() == 6);
  CHECK_FALSE(look().goesOn);
  begin();
  CHECK(asked.size() == 7);
  stays("no room");
  CHECK(words(look().latest - 1) ==
        std::vector<std::string>{"1 stays no room"});  // who asks again hears again
}

TEST_CASE_METHOD(Draining, "who asks again does not wait for the minute") {
  begin(1 * kj::HOURS);
  stays("no room"), stays("no room");
  begin(1 * kj::HOURS);
  CHECK(asked.size() == 3);
  stays("no room"), stays("no room");
  pass(60 * kj::SECONDS);
  CHECK(asked.size() == 5);  // and not twice
  stays("no room"), stays("no room");
  begin();  // somebody who does not wait ends nothing for those who do
  stays("no room"), stays("no room");
  CHECK(look().goesOn);
  pass(60 * kj::SECONDS);
  CHECK(asked.size() == 9);
}

TEST_CASE_METHOD(Draining, "it ends when it is stopped, or the server is in service again") {
  begin(1 * kj::HOURS);
  SECTION("stopped during a move, which goes on") {
    drains.stop("a");
    CHECK(look().moving);
    moved("b GPU 0");
  }
  SECTION("stopped between two tries") {
    stays("no room"), stays("no room");
    drains.stop("a");
    asked.pop_back();
  }
  SECTION("uncordoned during a move") {
    uncordon();
    moved("b GPU 0");
    CHECK_FALSE(look().cordoned);
  }
  SECTION("uncordoned between two tries") {
    stays("no room"), stays("no room");
    uncordon();
    asked.pop_back();
  }
  CHECK_FALSE(look().moving);
  CHECK_FALSE(look().goesOn);
  pass(1 * kj::MINUTES);
  CHECK(asked.size() == 1);
  CHECK(look().cordoned == pool.pool->cordons().contains("a"));
}

TEST_CASE_METHOD(Draining, "what has ended meanwhile is left out, and a server without leases is drained") {
  begin();
  pool->release(kAdmin, kOther, now);
  moved("b GPU 0");
  CHECK(asked.size() == 1);
  CHECK_FALSE(look().moving);
  drains.begin(kAdmin, "b", 1 * kj::HOURS);
  turn();
  CHECK(drains.state("b", 0).leases.empty());
  CHECK_FALSE(drains.state("b", 0).moving);
  CHECK(drains.state("nowhere", 0).leases.empty());
}

TEST_CASE_METHOD(Draining, "a lease that has moved is named until its server has given it up") {
  migrate({"b"});
  prepared();
  moves();
  REQUIRE(at() == "b GPU 0");
  begin();
  CHECK(asked == std::vector<Id>{kOther});
  REQUIRE(look().leases.size() == 2);
  CHECK(look().leases[0].leaves);
  CHECK_FALSE(look().leases[1].leaves);
  pool->revoked(kA, kLease, now);
  CHECK(look().leases.size() == 1);
}
