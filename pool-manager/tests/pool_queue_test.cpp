// What a request can name, and who is served first.
#include "pool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

constexpr uint32_t kLong = 3'600'000;

struct Queue : Fixture {
  Server named(const std::string& server, uint64_t incarnation, const std::vector<std::string>& models) {
    Server facts = test::server(server, incarnation, static_cast<uint32_t>(models.size()));
    for (size_t i = 0; i < models.size(); ++i) facts.devices[i].name = "NVIDIA " + models[i];
    return facts;
  }
  void ask(LeaseRequest wish) {
    wish.waitMs = kLong;
    pool->request(kAdmin, wish, now);
  }
  LeaseRequest wish(uint64_t id, const std::string& tenant = "", Priority priority = Priority::normal) {
    LeaseRequest request = test::request(id);
    request.ttlMs = kLong;
    request.tenant = tenant;
    request.turns.priority = priority;
    return request;
  }
  bool placed(uint64_t id) { return pool.pool->leases().contains({id, id}); }
  void hold(const LeaseRequest& request) {
    ask(request);
    pool->granted(request.id, now);
    REQUIRE(placed(request.id.high));
  }
  void end(uint64_t id, const ServerLife& server = kA) {
    pool->release(kAdmin, {id, id}, now);
    pool->revoked(server, {id, id}, now);
    REQUIRE_FALSE(placed(id));
  }
  // Time in which the servers that are there report what they hold.
  void pass(uint64_t ms) {
    now += ms;
    for (const auto& [name, one] : pool.pool->servers()) {
      std::vector<Id> held;
      for (const auto& [id, record] : pool.pool->leases())
        if (record.runs() && record.on(name) != nullptr) held.push_back(id);
      REQUIRE(pool->beat(name, one.facts.incarnation, held, {}, 1, now));
    }
    pool->tick(now);
  }
  Explanation explain(const LeaseRequest& request, const Principal& who = kAdmin) {
    return pool->explain(who, request, now);
  }
  std::string ordinals(uint64_t id) {
    std::string text;
    for (const LeasedDevice& one : pool.pool->leases().at({id, id}).primary().devices)
      text += std::to_string(one.info.ordinal);
    return text;
  }
};

}  // namespace

TEST_CASE_METHOD(Queue, "a model or what it has decides which devices a request gets") {
  joinAndBeat(named("a", 1, {"H100", "H200", "H200"}));
  LeaseRequest one = wish(1);
  one.gpu = "h200";
  hold(one);
  CHECK(ordinals(1) == "1");
  LeaseRequest two = wish(2);
  two.gpu = "h200";
  two.deviceCount = 2;
  ask(two);
  CHECK_FALSE(placed(2));
  LeaseRequest never = wish(3);
  never.gpu = "b200";
  pool->request(kAdmin, never, now);
  CHECK(contains(failure(3), "1 device 'b200' is wanted, but the most that any server could give is 0"));
  CHECK(contains(failure(3), "GPU 1 (NVIDIA H200) is not 'b200'"));
  CHECK(events.failures.at({3, 3}).kind == Failure::Kind::nothingFits);
  LeaseRequest wrong = wish(4);
  wrong.gpu = "memory>80";
  pool->request(kAdmin, wrong, now);
  CHECK(contains(failure(4), "a condition has >= or <="));
  CHECK(events.failures.at({4, 4}).kind == Failure::Kind::refused);
  // Nobody waits for the H100 but this one.
  LeaseRequest other = wish(5);
  other.gpu = "H100,memory>=80GiB";
  hold(other);
  CHECK(ordinals(5) == "0");
}

TEST_CASE_METHOD(Queue, "a lease moves to devices of its request's kind only") {
  joinAndBeat(named("a", 1, {"H200"}));
  LeaseRequest one = wish(1);
  one.gpu = "h200";
  hold(one);
  Server b = named("b", 2, {"H200"});
  joinAndBeat(b);
  pool->migrate(kAdmin, {1, 1}, 1000, {"b"}, now);
  CHECK(pool.pool->leases().at({1, 1}).target()->server.name == "b");
}

TEST_CASE_METHOD(Queue, "spread takes the emptiest, pack the fullest") {
  joinAndBeat(server("a", 1, 2));
  LeaseRequest part = wish(1);
  part.memoryBytes = 10 * kGiB;
  hold(part);
  LeaseRequest packed = wish(2), spread = wish(3);
  packed.memoryBytes = spread.memoryBytes = 10 * kGiB;
  spread.policy = Policy::spread;
  hold(packed);
  hold(spread);
  CHECK(ordinals(2) == ordinals(1));
  CHECK(ordinals(3) != ordinals(1));
  LeaseRequest unknown = wish(4);
  unknown.policy = static_cast<Policy>(7);
  pool->request(kAdmin, unknown, now);
  CHECK(contains(failure(4), "another version"));
}

TEST_CASE_METHOD(Queue, "a lease ends when its time limit is over, also over restarts of the manager") {
  joinAndBeat(server("a", 1));
  LeaseRequest limited = wish(1);
  limited.limitMs = 60'000;
  limited.reason = "a\ntest";
  hold(limited);
  CHECK(events.leases.at({1, 1}).endsInMs == 60'000);
  CHECK(events.leases.at({1, 1}).reason == "a?test");
  now += 20'000;
  CHECK(pool.pool->list(kAdmin, now).at(0).endsInMs == 40'000);
  bool restarted = GENERATE(false, true);
  if (restarted) {
    restart();
    joinAndBeat(server("a", 1), {{1, 1}});
    CHECK(pool.pool->list(kAdmin, now).at(0).endsInMs == 40'000);
    CHECK(pool.pool->list(kAdmin, now).at(0).reason == "a?test");
    CHECK(pool.pool->list({Principal::Role::user, "x"}, now).at(0).reason.empty());
  }
  pool->tick(now += 39'999);
  CHECK(pool.pool->leases().at({1, 1}).state == LeaseState::active);
  pool->tick(++now);
  CHECK(pool.pool->leases().at({1, 1}).state == LeaseState::revoking);
  CHECK(events.revokes.back().reason == "its time limit of 60 s is over");
  LeaseRequest absurd = wish(2);
  absurd.limitMs = ~uint64_t{0};
  pool->request(kAdmin, absurd, now);
  CHECK(contains(failure(2), "at most 366 days"));
}

TEST_CASE_METHOD(Queue,
                 "a time limit goes on while the manager is stopped or away, whatever the calendar says") {
  joinAndBeat(server("a", 1, 2));
  LeaseRequest limited = wish(1);
  limited.limitMs = 60'000;
  hold(limited);
  const auto state = [&] { return pool->leases().at({1, 1}).state; };
  now += 20'000;
  SECTION("stopped: its clock stands still, and what ends is in time again") {
    events.stoodStill = 39'000;
    pool->tick(now);
    CHECK(state() == LeaseState::active);
    CHECK(pool->list(kAdmin, now).at(0).endsInMs == 1000);
    CHECK(pool->inventoryFault(now).empty());
    pool->tick(now += 999);
    CHECK(state() == LeaseState::active);
    events.stoodStill += 1;
    pool->tick(now);
    CHECK(state() == LeaseState::revoking);
  }
  SECTION("stopped: a lease that is granted behind that has its whole limit") {
    events.stoodStill = 50'000;
    LeaseRequest later = wish(2);
    later.limitMs = 60'000;
    beat(1, {{1, 1}});
    hold(later);
    pool->tick(now += 100);
    CHECK(state() == LeaseState::revoking);
    CHECK(pool->list(kAdmin, now).at(1).endsInMs == 59'900);
    restart();
    for (const Lease& one : pool->list(kAdmin, now))
      if (one.id == Id{2, 2}) CHECK(one.endsInMs == 59'900);
  }
  SECTION("away: it ends when the manager is back") {
    now += 50'000;
    restart();
    joinAndBeat(server("a", 1, 2), {{1, 1}});
    pool->tick(now);
    CHECK(state() == LeaseState::revoking);
    CHECK(events.revokes.back().reason == "its time limit of 60 s is over");
  }
  SECTION("away, and somebody has set the calendar") {
    calendarS += GENERATE(3'000'000, -3'000'000);
    restart();
    joinAndBeat(server("a", 1, 2), {{1, 1}});
    CHECK(pool->list(kAdmin, now).at(0).endsInMs == 40'000);
  }
  SECTION("away, and its machine was started again: the calendar counts") {
    boot = "another";
    calendarS += 30;
    restart();
    joinAndBeat(server("a", 1, 2), {{1, 1}});
    CHECK(pool->list(kAdmin, now).at(0).endsInMs == 10'000);
  }
}

TEST_CASE_METHOD(Queue, "what is longer or less than it may be is refused, not cut") {
  joinAndBeat(server("a", 1));
  LeaseRequest reason = wish(1), tenant = wish(2), memory = wish(3), most = wish(4);
  reason.reason = std::string(201, 'r');
  tenant.tenant = std::string(65, 't');
  memory.memoryBytes = (1 << 20) - 1;
  most.reason = std::string(200, 'r'), most.tenant = std::string(64, 't'), most.memoryBytes = 1 << 20;
  for (const LeaseRequest& one : {reason, tenant, memory}) pool->request(kAdmin, one, now);
  CHECK(contains(failure(1), "a reason has at most 200 bytes"));
  CHECK(contains(failure(2), "a tenant's name has at most 64 bytes"));
  CHECK(contains(failure(3), "at least 1 MiB"));
  hold(most);
  CHECK(pool->leases().at({4, 4}).purpose == most.reason);
  CHECK_THROWS_WITH(pool->cordon(kAdmin, "a", {reason.reason, "eve", 1}, [](const std::string&) {}),
                    "a reason has at most 200 bytes");
}

TEST_CASE_METHOD(Queue, "the class comes first, then who came first") {
  joinAndBeat(server("a", 1));
  hold(wish(1));
  ask(wish(2));
  ask(wish(3, "", Priority::low));
  ask(wish(4, "", Priority::high));
  ask(wish(5));
  ask(wish(6, "", Priority::high));
  std::string order;
  for (uint64_t ends = 1; ends != 0;) {
    end(ends);
    ends = 0;
    for (uint64_t id = 2; id <= 6; ++id)
      if (placed(id)) ends = id;
    if (ends != 0) order += std::to_string(ends);
  }
  CHECK(order == "46253");
}

TEST_CASE_METHOD(Queue, "within a class the tenant that has used least, for its weight, is next") {
  joinAndBeat(server("a", 1));
  SECTION("as much as the time it had a device") {
    hold(wish(1, "alice"));
    pass(60'000);
    end(1);
    CHECK(pool.pool->deviceSeconds("alice", now) == Approx(60).epsilon(0.01));
    hold(wish(2, "carol"));
    ask(wish(3, "alice"));
    ask(wish(4, "bob"));
    pass(1000);
    end(2);
    CHECK(placed(4));
  }
  SECTION("a part of a device is that part of its time") {
    LeaseRequest half = wish(1, "alice");
    half.memoryBytes = 40 * kGiB;
    hold(half);
    pass(60'000);
    CHECK(pool.pool->deviceSeconds("alice", now) == Approx(30).epsilon(0.01));
  }
  SECTION("weights count") {
    times.weights = {{"alice", 4}};
    restart();
    joinAndBeat(server("a", 1));
    for (const auto& [id, tenant] : {std::pair{1, "alice"}, {2, "bob"}}) {
      hold(wish(static_cast<uint64_t>(id), tenant));
      pass(uint64_t{10'000} * static_cast<uint64_t>(id));  // bob: twice as much
      end(static_cast<uint64_t>(id));
    }
    hold(wish(3, "alice"));
    pass(40'000);  // alice: 50 of weight 4, bob: 20 of weight 1
    ask(wish(4, "bob"));
    ask(wish(5, "alice"));
    end(3);
    CHECK(placed(5));
  }
  SECTION("half of it is forgotten after the half-life, and a restart forgets nothing") {
    times.halfLifeMs = 1'000'000;
    restart();
    joinAndBeat(server("a", 1));
    hold(wish(1, "alice"));
    for (int i = 0; i < 60; ++i) pass(1000);
    end(1);
    const double used = pool.pool->deviceSeconds("alice", now);
    CHECK(used == Approx(60).epsilon(0.05));
    pass(1'000'000);
    CHECK(pool.pool->deviceSeconds("alice", now) == Approx(used / 2).epsilon(0.01));
    now += 1'000'000;
    restart();
    CHECK(pool.pool->deviceSeconds("alice", now) == Approx(used / 4).epsilon(0.01));
  }
}

TEST_CASE("weights are numbers, by tenant") {
  CHECK(parseWeights("").empty());
  CHECK(parseWeights("alice=2,bob=0.5") == std::map<std::string, double>{{"alice", 2}, {"bob", 0.5}});
  for (const char* wrong :
       {"alice", "=2", "alice=", "alice=0", "alice=-1", "alice=2x", "alice=nan", "a=1,,b=2"})
    CHECK(contains(thrown([&] { parseWeights(wrong); }), "is no tenant's weight"));
}

TEST_CASE_METHOD(Queue, "a later request gets only devices that those before it cannot use") {
  joinAndBeat(named("a", 1, {"H100", "H100", "H200"}));
  LeaseRequest first = wish(1);
  first.gpu = "h100";
  hold(first);
  LeaseRequest both = wish(2);
  both.gpu = "h100";
  both.deviceCount = 2;
  ask(both);
  LeaseRequest any = wish(3);
  any.gpu = "h100";
  ask(any);
  CHECK_FALSE(placed(3));  // one H100 is free, and for the one before
  hold(wish(4));
  CHECK(ordinals(4) == "2");  // nobody waits for the H200
  const Explanation answer = explain(any);
  CHECK(answer.outlook == Outlook::queue);
  CHECK(answer.ahead == 2);
  CHECK(answer.servers.at(0).devices.at(1).reason == "is for a request that is before it in the queue");
  CHECK(answer.servers.at(0).devices.at(2).reason == "is not 'h100'");
}

TEST_CASE_METHOD(Queue, "a later request that ends in time may use what the head waits for") {
  joinAndBeat(server("a", 1, 2));
  LeaseRequest first = wish(1);
  const bool known = GENERATE(true, false);
  if (known) first.limitMs = 600'000;
  hold(first);
  LeaseRequest head = wish(2);
  head.deviceCount = 2;
  ask(head);
  pass(100'000);
  LeaseRequest late = wish(3), fits = wish(4), open = wish(5);
  late.limitMs = 500'001;
  fits.limitMs = 500'000;
  ask(late);
  ask(open);
  CHECK_FALSE(placed(3));
  CHECK_FALSE(placed(5));
  CHECK(explain(late).outlook == Outlook::queue);
  CHECK(explain(fits).outlook == (known ? Outlook::now : Outlook::queue));
  ask(fits);
  CHECK(placed(4) == known);  // what has no limit may end at any moment
  if (!known) return;
  pool->granted({4, 4}, now);
  end(1);
  CHECK_FALSE(placed(2));
  pass(500'000);  // the other one's limit
  pool->revoked(kA, {4, 4}, now);
  CHECK(placed(2));
  CHECK_FALSE(placed(3));
}

TEST_CASE_METHOD(Queue,
                 "what a request has already is not in its way while its server has not confirmed it") {
  joinAndBeat(named("a", 1, {"H100"}));
  ask(wish(1));
  REQUIRE(placed(1));
  CHECK(explain(wish(1)).outlook == Outlook::now);
  CHECK(explain(wish(2)).outlook != Outlook::now);
  pool->granted({1, 1}, now);
  CHECK(explain(wish(1)).outlook == Outlook::now);
  end(1);
  ask(wish(2));
  CHECK(explain(wish(1)).outlook != Outlook::now);
}

TEST_CASE_METHOD(Queue, "explain says what a request would get, or wait for") {
  CHECK(explain(wish(9)).text == "no server has joined the pool yet");
  CHECK(explain(wish(9)).outlook == Outlook::server);
  joinAndBeat(named("a", 1, {"H100"}));
  joinAndBeat(named("b", 2, {"H200"}));
  LeaseRequest big = wish(9);
  big.gpu = "h200";
  Explanation answer = explain(big);
  CHECK(answer.outlook == Outlook::now);
  CHECK(answer.text == "b GPU 0");
  CHECK(pool.pool->leases().empty());
  REQUIRE(answer.servers.size() == 2);
  CHECK(answer.servers[0].devices.at(0).reason == "is not 'h200'");
  CHECK(answer.servers[1].devices.at(0).reason.empty());
  LeaseRequest held = wish(1, "alice");
  held.gpu = "h200";
  hold(held);
  answer = explain(big);
  CHECK(answer.outlook == Outlook::devices);
  CHECK(contains(answer.text, "none is free"));
  CHECK(contains(answer.servers[1].devices.at(0).reason, "is held by holder1"));
  answer = explain(big, {Principal::Role::user, "bob"});
  CHECK(answer.servers[1].devices.at(0).reason == "is in use");
  CHECK_FALSE(contains(answer.text, "holder1"));
  pool->cordon(kAdmin, "b", {"a new fan", "", 0}, [](const std::string&) {});
  answer = explain(big);
  CHECK(answer.outlook == Outlook::anOperator);
  CHECK(answer.servers[1].reason == "cordoned by an operator: a new fan");
  pool->uncordon(kAdmin, "b", [](const std::string&) {});
  pool->left("b", {2, 0}, false, now);
  CHECK(explain(big).outlook == Outlook::server);
  CHECK(contains(explain(big).servers[1].reason, "not connected"));
  LeaseRequest two = wish(9);
  two.deviceCount = 2;
  CHECK(explain(two).outlook == Outlook::never);
  CHECK(contains(explain(two).text, "no server has more than 1"));
  two.deviceCount = 0;
  CHECK(contains(thrown([&] { explain(two); }), "1 to 8 devices"));
  two.deviceCount = 9;  // more than a session can have, whatever a server has
  CHECK(contains(thrown([&] { explain(two); }), "a lease has 1 to 8 devices, and 9 are asked for"));
}

TEST_CASE_METHOD(Queue,
                 "right after a restart, what no server has yet waits for a server, not for an operator") {
  joinAndBeat(named("a", 1, {"H100"}));
  hold(wish(1));
  restart();
  joinAndBeat(named("a", 1, {"H100"}), {{1, 1}});
  LeaseRequest big = wish(9);
  big.gpu = "h200";
  CHECK(explain(big).outlook == Outlook::server);
}
