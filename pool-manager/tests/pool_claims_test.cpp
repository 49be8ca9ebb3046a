// Claims: a lease that a scheduler makes for a job, and that programs adopt.
#include "pool-manager/claims.h"
#include "pool_fixture.h"

using namespace gpupool;
using namespace gpupool::test;

namespace {

constexpr uint64_t kProgram = 900;

struct Claims : Fixture {
  // Its id, when the pool has answered or not.
  Id claim(const std::string& job, uint32_t unusedMs = 20'000, const Principal& who = kAdmin,
           uint32_t waitMs = 0) {
    LeaseRequest wish = request(1, waitMs);
    wish.job = job;
    wish.ttlMs = unusedMs;
    pool->nameClaim(who, wish);
    pool->request(who, wish, now);
    return wish.id;
  }
  Id granted(const std::string& job, uint32_t unusedMs = 20'000) {
    const Id id = claim(job, unusedMs);
    pool->granted(id, now);
    REQUIRE(events.leases.contains(id));
    return id;
  }
  void adopt(uint64_t program, const std::string& name, const Principal& who = kAdmin) {
    LeaseRequest wish = request(program);
    wish.adopts = name;
    pool->request(who, wish, now);
  }
  bool uses(uint64_t program) const { return events.adoptions.contains({program, program}); }
  bool renew(const Id& id, uint64_t program) {
    std::string why;
    return pool->renew(kAdmin, id, now, &why, {{program, program}, "program", 10'000}).has_value();
  }
  void pass(uint64_t ms) { now += ms, pool->tick(now); }
  bool runs(const Id& id) const {
    const auto at = pool.pool->leases().find(id);
    return at != pool.pool->leases().end() && at->second.runs();
  }
  std::vector<std::string> story() {
    std::vector<std::string> events;
    for (const AuditEntry& entry : pool.pool->audit(kAdmin, {}, 100))
      if (entry.lease != Id{}) events.emplace_back(name(entry.event));
    return events;
  }
  std::string why(const Id& id) const {
    const std::string* text = pool.pool->endedBecause(id);
    return text == nullptr ? "" : *text;
  }
};

}  // namespace

TEST_CASE("a job has a cluster, an id and a restart count") {
  for (const char* good : {"alps:4711:0", "a.b-c:12_3+1:17", "alps:4711:0:20261125211858"})
    CHECK_NOTHROW(checkJob(good));
  CHECK(numberOf("alps:4711.n1:0:20261125211858") == "alps:4711.n1:0");
  CHECK(submittedAt("alps:4711.n1:0:20261125211858") == 20261125211858);
  CHECK(numberOf("alps:4711.n1:0") == "alps:4711.n1:0");
  CHECK(submittedAt("alps:4711.n1:0") == 0);
  for (const std::string bad :
       {"", "4711", "alps:4711", "alps:4711:", "alps:4711:x", ":1:0", "a b:1:0", "a:1:0:", "a:1:0:x",
        "a:1:0:0:0", "a:1:0:1234567890123456789", "a/b:1:0", "a:1:-1"})
    CHECK_THROWS_AS(checkJob(bad), std::invalid_argument);
  CHECK_THROWS_AS(checkJob(std::string(120, 'a') + ":1:0"), std::invalid_argument);
  CHECK(claimId("t", "a:1:0") == claimId("t", "a:1:0"));
  CHECK(claimId("t", "a:1:0") != claimId("t", "a:1:1"));
  CHECK(claimId("t", "a:1:0") != claimId("u", "a:1:0"));
}

TEST_CASE_METHOD(Claims, "to claim again gives the same claim; a requeued job has another one") {
  joinAndBeat(server("a", 1, 2));
  const Id id = granted("alps:1:0");
  const Lease first = events.leases.at(id);
  CHECK(first.holder == "claim alps:1:0 of holder1");
  events.leases.clear();
  CHECK(claim("alps:1:0") == id);
  REQUIRE(events.leases.contains(id));
  CHECK(events.leases.at(id).epoch == first.epoch);
  CHECK(events.grants.size() == 1);
  const Id requeued = granted("alps:1:1");
  CHECK(requeued != id);
  CHECK(events.grants.size() == 2);
  CHECK(pool->release(kAdmin, id, now));
  pool->revoked(kA, id, now);
  claim("alps:1:0");
  CHECK(events.failures.at(id).text.find("has ended: released") != std::string::npos);
}

TEST_CASE_METHOD(Claims, "a number that is given again is another job's") {
  joinAndBeat(server("a", 1, 2));
  const Id first = granted("alps:1:0:100");
  CHECK(claim("alps:1:0:100") == first);  // asked again
  adopt(kProgram, "alps:1:0");
  CHECK(events.adoptions.at({kProgram, kProgram}).id == first);
  const Id other = granted("alps:2:0:100"), requeued = claim("alps:1:1:100");
  CHECK(runs(first));  // another number, and another start
  pool->release(kAdmin, requeued, now);

  const Id second = claim("alps:1:0:200", 20'000, kAdmin, 10'000);
  CHECK(second != first);
  CHECK_FALSE(runs(first));
  CHECK(runs(other));
  pool->revoked(kA, first, now);
  CHECK(why(first) == "a job that was submitted later has the number of its job");
  pool->granted(second, now);
  REQUIRE(runs(second));
  adopt(kProgram + 1, "alps:1:0");
  CHECK(events.adoptions.at({kProgram + 1, kProgram + 1}).id == second);

  const Id late = claim("alps:1:0:100");  // a prolog that is still under way
  CHECK(late == first);
  CHECK(events.failures.contains(late));
  const Id between = claim("alps:1:0:150");
  CHECK(contains(events.failures.at(between).text, "a job that was submitted later has that number"));
  CHECK(contains(events.failures.at(claim("alps:1:0")).text, "a job that was submitted later"));
  CHECK(runs(second));
  CHECK(pool->claimNamed(kAdmin, "", "alps:1:0") == second);
  CHECK(pool->claimNamed(kAdmin, "", "alps:1:0:100") == first);
  CHECK(pool->claimNamed(Principal{Principal::Role::user, "eve"}, "", "alps:1:0") != second);
}

TEST_CASE_METHOD(Claims, "an earlier job's claim that waits still waits no more") {
  joinAndBeat(server("a", 1));
  const Id other = granted("alps:7:0");
  const Id first = claim("alps:1:0:100", 20'000, kAdmin, 10'000);
  CHECK(pool->claimNamed(kAdmin, "", "alps:1:0") == first);
  const Id second = claim("alps:1:0:200", 20'000, kAdmin, 10'000);
  CHECK(events.failures.contains(first));
  CHECK(pool->claimNamed(kAdmin, "", "alps:1:0") == second);
  pool->release(kAdmin, other, now);
  pool->revoked(kA, other, now);
  pool->granted(second, now);
  CHECK(runs(second));
}

TEST_CASE_METHOD(Claims, "a release that overtakes the claim wins") {
  joinAndBeat(server("a", 1));
  CHECK_FALSE(pool->release(kAdmin, pool->claimNamed(kAdmin, "", "alps:1:0"), now));
  claim("alps:1:0");
  CHECK(events.grants.empty());
}

TEST_CASE_METHOD(Claims, "a claim that nobody adopts ends") {
  joinAndBeat(server("a", 1));
  const Id id = granted("alps:1:0");
  pass(20'000 + times.driftMs);
  CHECK(runs(id));
  pass(1);
  CHECK_FALSE(runs(id));
  pool->revoked(kA, id, now);
  CHECK(why(id) == "no program has used the claim for 20 s");
  CHECK(story() == std::vector<std::string>{"granted", "expired"});
}

TEST_CASE_METHOD(Claims, "programs adopt a claim, by its id or its job, at once and one after the other") {
  joinAndBeat(server("a", 1));
  const Id id = granted("alps:1:0");
  adopt(kProgram, "alps:1:0");
  adopt(kProgram + 1, id.text());
  REQUIRE(uses(kProgram));
  REQUIRE(uses(kProgram + 1));
  const Lease& lease = events.adoptions.at({kProgram, kProgram});
  CHECK(lease.id == id);
  CHECK(lease.key == events.leases.at(id).key);
  CHECK(lease.ttlMs == 10'000);
  CHECK(pool->list(kAdmin, now)[0].job == "alps:1:0");
  CHECK(pool->list(kAdmin, now)[0].adopters == std::vector<std::string>{"holder900", "holder901"});
  for (int i = 0; i < 20; ++i) {
    pass(5000);
    REQUIRE(renew(id, kProgram));
  }
  REQUIRE(runs(id));
  CHECK(pool->list(kAdmin, now)[0].adopters.size() == 1);  // the other one has not renewed
  pool->leave(kAdmin, id, {kProgram, kProgram}, now);
  CHECK(pool->list(kAdmin, now)[0].adopters.empty());
  pass(19'000);
  REQUIRE(runs(id));
  adopt(kProgram + 2, "alps:1:0");
  pass(9000);
  CHECK(runs(id));
  pass(times.driftMs + 1001);  // and dies
  CHECK(pool->list(kAdmin, now)[0].adopters.empty());
  REQUIRE(runs(id));
  pass(20'000 + times.driftMs + 1);
  CHECK_FALSE(runs(id));
  CHECK(story() ==
        std::vector<std::string>{"granted", "adopted", "adopted", "left", "left", "adopted", "left"});
}

TEST_CASE_METHOD(Claims, "an adopter's TTL is at most its claim's") {
  joinAndBeat(server("a", 1));
  granted("alps:1:0", 4000);
  adopt(kProgram, "alps:1:0");
  CHECK(events.adoptions.at({kProgram, kProgram}).ttlMs == 4000);
}

TEST_CASE_METHOD(Claims, "an adopter that was killed on this machine is gone at once, and the claim is not") {
  joinAndBeat(server("a", 1));
  const Id id = granted("alps:1:0");
  LeaseRequest wish = request(kProgram);
  wish.adopts = "alps:1:0";
  wish.process = {77, 1};
  pool->request(kAdmin, wish, now);
  REQUIRE(uses(kProgram));
  events.dead.insert(77);
  pass(100);
  CHECK(pool->list(kAdmin, now)[0].adopters.empty());
  CHECK(runs(id));
}

TEST_CASE_METHOD(Claims, "who claims may end at once") {
  joinAndBeat(server("a", 1));
  LeaseRequest wish = request(1);
  wish.job = "alps:1:0";
  wish.process = {77, 1};
  pool->nameClaim(kAdmin, wish);
  pool->request(kAdmin, wish, now);
  pool->granted(wish.id, now);
  events.dead.insert(77);
  pass(100);
  CHECK(runs(wish.id));
}

TEST_CASE_METHOD(Claims, "a release ends a claim, and its programs hear why") {
  joinAndBeat(server("a", 1));
  const Id id = granted("alps:1:0");
  adopt(kProgram, "alps:1:0");
  CHECK(pool->release(kAdmin, id, now));
  REQUIRE(events.revokes.size() == 1);
  CHECK_FALSE(renew(id, kProgram));
  pool->revoked(kA, id, now);
  adopt(kProgram + 1, "alps:1:0");
  CHECK(failure(kProgram + 1) == "claim alps:1:0 has ended: released");
}

TEST_CASE_METHOD(Claims, "what cannot be adopted says why") {
  joinAndBeat(server("a", 1));
  adopt(kProgram, "alps:1:0");
  CHECK(failure(kProgram) == "there is no claim alps:1:0, or it has ended");
  adopt(kProgram + 1, "alps");
  CHECK(failure(kProgram + 1).find("names no claim") != std::string::npos);
  const Lease lease = leaseNow(1);
  adopt(kProgram + 2, lease.id.text());
  CHECK(failure(kProgram + 2).find("is no claim") != std::string::npos);
  claim("alps:2:0", 20'000, kAdmin, 60'000);
  adopt(kProgram + 3, "alps:2:0");
  CHECK(failure(kProgram + 3) == "claim alps:2:0 has no GPUs yet: it waits for them");
}

TEST_CASE_METHOD(Claims, "another tenant's claim is another one") {
  const Principal alice{Principal::Role::user, "alice"}, bob{Principal::Role::user, "bob"};
  joinAndBeat(server("a", 1, 2));
  const Id id = claim("alps:1:0", 20'000, alice);
  pool->granted(id, now);
  adopt(kProgram, "alps:1:0", bob);
  CHECK(failure(kProgram) == "there is no claim alps:1:0, or it has ended");
  adopt(kProgram + 1, id.text(), bob);
  CHECK(failure(kProgram + 1) == "that lease is another tenant's");
  CHECK_THROWS_AS(pool->leave(bob, id, {1, 1}, now), std::invalid_argument);
  CHECK(claim("alps:1:0", 20'000, bob) != id);
  CHECK(pool->list(bob, now)[0].job != pool->list(bob, now)[1].job);
  LeaseRequest wish = request(5);
  wish.job = "alps:1:0";  // under an id of its own choice
  pool->request(bob, wish, now);
  CHECK(failure(5) == "that is not the id of a claim for this job");
}

TEST_CASE_METHOD(Claims, "a claim, and those who use it, outlive the manager") {
  joinAndBeat(server("a", 1));
  const Id id = granted("alps:1:0");
  adopt(kProgram, "alps:1:0");
  now += 5000;
  restart();
  adopt(kProgram + 1, "alps:1:0");  // its server has not said yet that it has it
  CHECK_FALSE(uses(kProgram + 1));
  REQUIRE(renew(id, kProgram));
  joinAndBeat(server("a", 1), {id});
  pass(100);
  CHECK(uses(kProgram + 1));
  CHECK(pool->list(kAdmin, now)[0].job == "alps:1:0");
  CHECK(pool->list(kAdmin, now)[0].adopters == std::vector<std::string>{"program", "holder901"});
  pass(9'000);
  CHECK(claim("alps:1:0") == id);
  CHECK(events.grants.size() == 1);
}

TEST_CASE_METHOD(Claims, "who waits to adopt hears that the claim has ended") {
  joinAndBeat(server("a", 1));
  const Id id = granted("alps:1:0");
  restart();
  adopt(kProgram, "alps:1:0");
  CHECK(pool->release(kAdmin, id, now));
  pass(100);
  joinAndBeat(server("a", 1));
  pass(100);
  CHECK(failure(kProgram) == "the claim has ended: released");
}
