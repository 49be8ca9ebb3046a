// A request of a higher class takes devices from leases of lower classes, and gives them back.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

struct Preempts : Suspends {
  Preempts() { site(Preemption::suspend); }
  void site(Preemption what) {
    times.preempt = {what, 30'000, 20'000, 60'000};
    restart();
    now += 11'000;  // its servers are back by then
    joinAndBeat(server("a", 1));
  }
  void ask(uint64_t id, Priority priority, uint64_t memory = 0, uint32_t waitMs = 3'600'000,
           const std::string& tenant = "") {
    LeaseRequest wish = request(id, waitMs, memory);
    wish.turns.priority = priority;
    wish.tenant = tenant;
    wish.ttlMs = 3'600'000;
    pool->request(kAdmin, wish, now);
  }
  void run(uint64_t id, Priority priority, uint64_t memory = 0) {
    ask(id, priority, memory);
    granted(id);
  }
  void granted(uint64_t id) {
    REQUIRE(!events.grants.empty());
    CHECK(events.grants.back().id == Id{id, id});
    pool->granted({id, id}, now);
    REQUIRE(has(id));
  }
  void pass(uint64_t ms) {
    now += ms;
    std::vector<Id> held;
    std::vector<SuspendedLease> away;
    for (const auto& [lease, record] : pool.pool->leases()) {
      held.push_back(lease);
      if (record.state == LeaseState::suspended) away.push_back({lease, {16 * kMiB}});
    }
    beat(1, held, away);
    pool->tick(now);
  }
  void end(uint64_t id) {
    pool->release(kAdmin, {id, id}, now);
    pool->revoked(kA, {id, id}, now);
  }
  Lease listed(uint64_t id, const Principal& who = kAdmin) {
    for (Lease& lease : pool.pool->list(who, now))
      if (lease.id == Id{id, id}) return lease;
    return {};
  }
  std::vector<std::string> history(uint64_t id) {
    std::vector<std::string> events;
    for (const AuditEntry& entry : pool.pool->audit(kAdmin, {0, 0, Id{id, id}.text()}, 100))
      events.emplace_back(name(entry.event));
    return events;
  }
  // Lease 1, low, has been suspended for lease 2, high, which has its devices.
  void preempted() {
    run(1, Priority::low);
    pass(60'000);
    ask(2, Priority::high);
    REQUIRE(events.suspends.size() == 1);
    serverSuspends();
    REQUIRE(state(1) == LeaseState::suspended);
    granted(2);
  }
  const std::string why = "preempted by lease " + Id{2, 2}.text().substr(0, 8) + ", of a higher class";
};

}  // namespace

TEST_CASE_METHOD(Preempts, "a high request suspends a low lease, which comes back when the high one ends") {
  preempted();
  CHECK(events.suspends[0].drainMs == 30'000);
  // The whole device, but for what stays there, and for its own context.
  CHECK(events.leases.at({2, 2}).devices[0].memoryBytes == 80 * kGiB - 2 * kGiB - 16 * kMiB);
  CHECK(listed(1).why == why);
  CHECK(stored(1) == LeaseState::suspended);
  pass(600'000);
  CHECK(events.resumes.empty());
  end(2);
  REQUIRE(events.resumes.size() == 1);
  serverResumes();
  CHECK(state(1) == LeaseState::active);
  CHECK(listed(1).why.empty());
  CHECK(history(1) == std::vector<std::string>{"granted", "preempting", "suspended", "resumed"});
  for (const AuditEntry& entry : pool.pool->audit(kAdmin, {0, 0, Id{1, 1}.text()}, 100)) {
    if (entry.event == AuditEvent::granted) continue;
    CHECK(entry.by == "the manager");
    if (entry.event != AuditEvent::resumed) CHECK(entry.reason == why);
  }
}

TEST_CASE_METHOD(Preempts,
                 "nothing is taken where the site does not want it, nor by the same or a lower class") {
  SECTION("off") {
    site(Preemption::off);
    run(1, Priority::low);
    pass(600'000);
    ask(2, Priority::high);
  }
  SECTION("the same class") {
    run(1, Priority::normal);
    pass(600'000);
    ask(2, Priority::normal);
  }
  SECTION("a lower one") {
    run(1, Priority::high);
    pass(600'000);
    ask(2, Priority::normal);
  }
  SECTION("what could not help") {
    run(1, Priority::high, 40 * kGiB);
    run(3, Priority::low, 10 * kGiB);
    pass(600'000);
    ask(2, Priority::high, 60 * kGiB);
  }
  CHECK(events.suspends.empty());
  CHECK(state(1) == LeaseState::active);
}

TEST_CASE_METHOD(Preempts,
                 "a lease runs for its minimum before it is preempted, each time that it has devices") {
  run(1, Priority::low);
  pass(30'000);
  ask(2, Priority::high);
  pass(29'000);
  CHECK(events.suspends.empty());
  pass(2000);
  REQUIRE(events.suspends.size() == 1);
  serverSuspends();
  granted(2);
  end(2);
  serverResumes();
  ask(3, Priority::high);
  pass(59'000);
  CHECK(events.suspends.size() == 1);
  pass(2000);
  CHECK(events.suspends.size() == 2);
}

TEST_CASE_METHOD(Preempts, "as few as are enough, of the lowest class, those that came last") {
  run(1, Priority::normal, 20 * kGiB);
  run(3, Priority::low, 20 * kGiB);
  now += 1000;
  run(4, Priority::low, 20 * kGiB);
  pass(61'000);
  ask(2, Priority::high, 30 * kGiB);
  REQUIRE(events.suspends.size() == 1);
  CHECK(events.suspends[0].id == Id{4, 4});
  serverSuspends();
  granted(2);
  CHECK(state(1) == LeaseState::active);
  CHECK(state(3) == LeaseState::active);
}

TEST_CASE_METHOD(Preempts, "several are taken where one is not enough, and no more while they go") {
  run(1, Priority::low, 20 * kGiB);
  run(3, Priority::low, 20 * kGiB);
  run(4, Priority::normal, 20 * kGiB);
  pass(61'000);
  ask(2, Priority::high, 50 * kGiB);
  REQUIRE(events.suspends.size() == 2);
  pass(5000);
  CHECK(events.suspends.size() == 2);
  pool->suspendDone(events.suspends[0].id, events.suspends[0].number, {{0}, kGiB, 1, 1}, now);
  CHECK(events.grants.back().id != Id{2, 2});
  pass(1000);
  CHECK(events.suspends.size() == 2);
  pool->suspendDone(events.suspends[1].id, events.suspends[1].number, {{0}, kGiB, 1, 1}, now);
  granted(2);
  CHECK(state(4) == LeaseState::active);
}

TEST_CASE_METHOD(Preempts, "who does not wait waits for the leases that it preempts, and not for ever") {
  run(1, Priority::low);
  pass(60'000);
  ask(2, Priority::high, 0, 0);
  REQUIRE(events.suspends.size() == 1);
  CHECK(events.suspends[0].drainMs < 10'000);
  pass(5000);
  CHECK(failure(2).empty());
  SECTION("in time") {
    serverSuspends();
    granted(2);
  }
  SECTION("too late: the preempted lease comes back") {
    pass(6000);
    CHECK(failure(2).find("is held by") != std::string::npos);
    serverSuspends();
    pass(1000);
    REQUIRE(events.resumes.size() == 1);
    serverResumes();
    CHECK(state(1) == LeaseState::active);
  }
}

TEST_CASE_METHOD(Preempts, "what cannot be suspended goes on where the site does not revoke") {
  run(1, Priority::low);
  pass(60'000);
  ask(2, Priority::high);
  pool->suspendFailed({1, 1}, events.suspends[0].number, "a kernel runs", now);
  CHECK(state(1) == LeaseState::active);
  const auto seen = [&](const Principal& who) {
    return pool->explain(who, request(3), now).servers.at(0).devices.at(0).reason;
  };
  const std::string told = "could not be suspended for a request of a higher class: server a: a kernel runs";
  CHECK(contains(seen(kAdmin), told));
  CHECK(seen({.role = Principal::Role::user, .tenant = "other"}) == "is in use");
  pass(30'000);
  CHECK(events.suspends.size() == 1);
  CHECK(listed(1).why.empty());
  pass(31'000);
  CHECK(events.suspends.size() == 2);
  CHECK_FALSE(contains(seen(kAdmin), told));
}

TEST_CASE_METHOD(Preempts, "and else it has notice, and ends") {
  site(Preemption::revoke);
  run(1, Priority::low);
  pass(60'000);
  CHECK(pool->noticeOf({1, 1}, now).text.empty());
  ask(2, Priority::high);
  pool->suspendFailed({1, 1}, events.suspends[0].number, "a kernel runs", now);
  const auto notice = pool->noticeOf({1, 1}, now);
  CHECK(notice.ms == 20'000);
  CHECK(notice.text.find(why + ", and could not be suspended: server a: a kernel runs") == 0);
  CHECK(listed(1).why.find("ends in 20 s") == 0);
  pass(10'000);
  CHECK(state(1) == LeaseState::active);
  SECTION("when it is over") {
    pass(10'000);
    CHECK(state(1) == LeaseState::revoking);
    pool->revoked(kA, {1, 1}, now);
    granted(2);
    CHECK(history(1) == std::vector<std::string>{"granted", "preempting", "preempting", "revoked"});
  }
  SECTION("but not for a request that has gone") {
    pool->release(kAdmin, {2, 2}, now);
    pass(20'000);
    CHECK(state(1) == LeaseState::active);
    CHECK(pool->noticeOf({1, 1}, now).text.empty());
  }
}

TEST_CASE_METHOD(Preempts, "a preempted lease comes back after a restart of the manager, too") {
  SECTION("that was suspended") {
    preempted();
    restart();
    pool->join(kAdmin, server("a", 1), {}, now);
    pass(1000);
    pool->granted({2, 2}, now);
    pass(1000);
    CHECK(events.resumes.empty());
    CHECK(listed(1).why == why);
    end(2);
  }
  SECTION("that was being suspended") {
    run(1, Priority::low);
    pass(60'000);
    ask(2, Priority::high);
    REQUIRE(events.suspends.size() == 1);
    restart();  // which forgets who waits, as holders ask again
    pool->join(kAdmin, server("a", 1), {}, now);
    beat(1, {{1, 1}}, {{{1, 1}, {16 * kMiB}}});
    CHECK(history(1) == std::vector<std::string>{"granted", "preempting", "suspended", "resumed"});
  }
  REQUIRE(events.resumes.size() == 1);
  serverResumes();
  CHECK(state(1) == LeaseState::active);
}

TEST_CASE_METHOD(Preempts, "its server never heard of it: it goes on") {
  run(1, Priority::low);
  pass(60'000);
  ask(2, Priority::high);
  restart();
  pool->join(kAdmin, server("a", 1), {}, now);
  beat(1, {{1, 1}});
  beat(1, {{1, 1}});
  CHECK(state(1) == LeaseState::active);
  CHECK(record(1).preemptor == Id{});
}

TEST_CASE_METHOD(Preempts, "a preempted lease that its owner suspends stays so; one that is released ends") {
  preempted();
  SECTION("suspended") {
    events.gone.insert({1, 1});  // nobody waits for it to be resumed
    suspend(1);
    events.gone.clear();
    CHECK(listed(1).why.find("on the word of") == 0);
    pass(1000);
    end(2);
    pass(1000);
    CHECK(events.resumes.empty());
    resume(1);
    CHECK(events.resumes.size() == 1);
  }
  SECTION("released") {
    end(1);
    end(2);
    pass(1000);
    CHECK(events.resumes.empty());
    CHECK(pool.pool->leases().empty());
  }
}

TEST_CASE_METHOD(Preempts, "preempted leases come back in the queue's order, beside other requests") {
  preempted();
  ask(3, Priority::low, 0, 3'600'000);     // came later than the one that waits to come back
  ask(4, Priority::normal, 0, 3'600'000);  // and this one is of a higher class
  pass(1000);
  end(2);
  granted(4);
  CHECK(events.resumes.empty());
  end(4);
  CHECK(events.resumes.size() == 1);
  serverResumes();
  end(1);
  granted(3);
}

TEST_CASE_METHOD(Preempts, "a lease that was preempted takes its devices back from a lower class") {
  run(1, Priority::normal, 70 * kGiB);
  pass(60'000);
  ask(2, Priority::high, 70 * kGiB);
  serverSuspends();
  granted(2);
  end(2);  // and before the first is back:
  serverResumes();
  REQUIRE(state(1) == LeaseState::active);
  suspended(1);
  run(3, Priority::low);
  pass(60'000);
  resume(1, 60'000);
  REQUIRE(events.suspends.back().id == Id{3, 3});
  serverSuspends();
  CHECK(events.resumes.back().id == Id{1, 1});
  serverResumes();
  CHECK(state(1) == LeaseState::active);
  CHECK(state(3) == LeaseState::suspended);
}

TEST_CASE_METHOD(Preempts, "its store is full: nothing is taken that it could not give back") {
  run(1, Priority::low);
  pass(60'000);
  disk->full = true;
  ask(2, Priority::high);
  CHECK(events.suspends.empty());
  CHECK(state(1) == LeaseState::active);
  disk->full = false;
  pass(2000);
  CHECK(events.suspends.size() == 1);
}

TEST_CASE_METHOD(Preempts, "what a suspended lease keeps is charged to its tenant") {
  ask(1, Priority::low, 0, 0, "alice");
  granted(1);
  Quota quota;
  quota.tenant = "alice";
  quota.milliDevices = 5000;
  pool->setQuota(kAdmin, quota, "me", [](const std::string&) {});
  const auto used = [&] {
    for (const QuotaUse& use : pool.pool->quotas(kAdmin))
      if (use.quota.tenant == "alice") return use;
    return QuotaUse();
  };
  CHECK(used().milliDevices == 1000);
  pass(60'000);
  ask(2, Priority::high);
  serverSuspends({8 * kGiB});
  CHECK(used().memoryBytes == 9 * kGiB);  // with its context
  CHECK(used().milliDevices > 0);
}

TEST_CASE_METHOD(Preempts, "why a lease is suspended is its tenant's business") {
  ask(1, Priority::low, 0, 0, "alice");
  granted(1);
  pass(60'000);
  ask(2, Priority::high, 0, 1000, "bob");
  serverSuspends();
  const Principal alice{Principal::Role::user, "alice"}, bob{Principal::Role::user, "bob"};
  CHECK(listed(1, alice).why == why);
  CHECK(listed(1, bob).why.empty());
}
