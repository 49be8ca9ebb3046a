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
  Draining() {
    lease(2, "a");
    cordon();
    begins();
  }
  void begins() {
    drains.emplace(
        timer, *pool.pool,
        [this](const Principal& who, const Id& lease) {
          by = who;
          return move(lease);
        },
        [this] { return calendarMs; });
    drains->load(store->range("drain/"));
  }
  // The manager is killed, and started again after that time.
  void startedAgain(kj::Duration after) {
    drains.reset();
    asked.clear(), answers.clear();
    calendarMs += static_cast<uint64_t>(after / kj::MILLISECONDS);
    restarted();
    begins();
  }
  // The servers are back, and the pool has had its time for that.
  void settles(const std::vector<Id>& onA) {
    rejoin(onA, {});
    now += pool.pool->settlesInMs();
    pool->tick(now);
    pass(1 * kj::MINUTES);
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
  void begin(kj::Duration tryFor = 0 * kj::SECONDS) {
    auto begun = drains->begin(kAdmin, "a", tryFor);
    turn();
    begun.wait(scope);
    turn();
  }
  void stop() {
    auto stopped = drains->stop("a");
    turn();
    stopped.wait(scope);
  }
  void turn() {
    do scope.poll();
    while (store->deliver());
  }
  void pass(kj::Duration time) {
    calendarMs += static_cast<uint64_t>(time / kj::MILLISECONDS);
    timer.advanceTo(timer.now() + time), turn();
  }
  DrainState look(uint64_t after = 0) { return drains->state("a", after); }
  bool isStored() { return !store->range("drain/").empty(); }
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
  uint64_t calendarMs = 0;
  Principal by;
  std::optional<Drains> drains;
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

TEST_CASE_METHOD(Draining, "why a lease stays is told of it, and not of its number again") {
  begin();
  stays("lease " + kLease.text().substr(0, 8) + " is being suspended at this moment");
  stays("lease " + kOther.text() + " is not known here");
  CHECK(words() == std::vector<std::string>{"1 stays it is being suspended at this moment",
                                            "2 stays it is not known here"});
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
    stop();
    CHECK(look().moving);
    moved("b GPU 0");
  }
  SECTION("stopped between two tries") {
    stays("no room"), stays("no room");
    stop();
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
  auto begun = drains->begin(kAdmin, "b", 1 * kj::HOURS);
  turn();
  CHECK(drains->state("b", 0).leases.empty());
  CHECK_FALSE(drains->state("b", 0).moving);
  CHECK(drains->state("nowhere", 0).leases.empty());
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

TEST_CASE_METHOD(Draining, "a manager that is started again goes on") {
  begin(150 * kj::SECONDS);
  stays("no room"), stays("no room");
  pass(60 * kj::SECONDS);
  REQUIRE(asked.size() == 3);
  const uint64_t seen = look().latest;
  startedAgain(0 * kj::SECONDS);
  // Leases that their servers have not named yet are not called drained, nor left behind.
  turn();
  CHECK(look().moving);
  CHECK(look().goesOn);
  CHECK(look().leases.size() == 2);
  pass(1 * kj::SECONDS);
  CHECK(asked.empty());
  settles({kLease, kOther});
  CHECK(asked == std::vector<Id>{kLease});
  moved("b GPU 0"), stays("no room");
  CHECK(words(seen) ==
        std::vector<std::string>{"1 moved b GPU 0", "2 stays no room"});  // and no earlier number
  pass(60 * kj::SECONDS);
  CHECK(asked.size() == 2);  // its time is over
  CHECK_FALSE(look().goesOn);
  CHECK_FALSE(isStored());
}

TEST_CASE_METHOD(Draining, "one that is asked for once is gone through once more after a restart") {
  const Principal eve{Principal::Role::admin, "eve", "0123"};
  auto begun = drains->begin(eve, "a", 0 * kj::SECONDS);
  turn();
  REQUIRE(asked == std::vector<Id>{kLease});
  startedAgain(1 * kj::HOURS);
  settles({kLease, kOther});
  REQUIRE(asked == std::vector<Id>{kLease});
  CHECK(by.tenant == "eve");
  CHECK(by.token == "0123");
  CHECK(by.role == Principal::Role::admin);
  stays("no room"), stays("no room");
  CHECK_FALSE(look().moving);
  CHECK_FALSE(isStored());
  startedAgain(0 * kj::SECONDS);
  settles({kLease, kOther});
  CHECK(asked.empty());
}

TEST_CASE_METHOD(Draining, "what was stopped does not begin again") {
  begin(1 * kj::HOURS);
  SECTION("by whoever drains it") { stop(); }
  SECTION("and the store takes it while it is stopped") {
    moved("b GPU 0"), stays("no room");
    auto begun = drains->begin(kAdmin, "a", 2 * kj::HOURS);
    stop();
    begun.wait(scope);
    CHECK_FALSE(look().goesOn);
  }
  SECTION("it is in service again") {
    uncordon();
    moved("b GPU 0");
  }
  turn();
  CHECK_FALSE(isStored());
  startedAgain(0 * kj::SECONDS);
  settles({kLease, kOther});
  CHECK(asked.empty());
}

TEST_CASE_METHOD(Draining, "a drain that cannot be stored is not begun") {
  disk->full = true;
  auto begun = drains->begin(kAdmin, "a", 1 * kj::HOURS);
  turn();
  CHECK_THROWS(begun.wait(scope));
  CHECK(asked.empty());
  CHECK_FALSE(look().goesOn);
  disk->full = false;
  begin();
  CHECK(asked.size() == 1);
}

TEST_CASE("a drain in the store is read again, also where a later gpupool has written more") {
  const auto drain = decodeDrain(encodeDrain({{Principal::Role::admin, "eve", "0123"}, 12}) + "more\n");
  REQUIRE(drain);
  CHECK(drain->untilMs == 12);
  CHECK(drain->who.tenant == "eve");
  CHECK(drain->who.token == "0123");
  CHECK(decodeDrain(encodeDrain({{}, 0}))->who.tenant.empty());
  for (const char* text :
       {"", "12", "12\neve", "12\neve\n0123", "x\neve\n0123\n", "\neve\n0123\n", "12x\ne\n0\n"})
    CHECK_FALSE(decodeDrain(text));
}
