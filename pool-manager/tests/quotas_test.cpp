// Quotas: their arithmetic, and what they make of requests.
#include "pool-manager/quotas.h"

#include "catch.h"
#include "pool-manager/claims.h"
#include "pool-manager/roles.h"
#include "pool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

constexpr uint64_t kNov24 = 1'795'516'800;  // 2026-11-24, a Tuesday
constexpr uint64_t kHour = 3600, kDay = 86'400;

Quota quota(const std::string& tenant, double devices, uint64_t gib = 0, double hours = 0) {
  return {tenant, static_cast<uint64_t>(devices * 1000), gib << 30, static_cast<uint64_t>(hours * kHour)};
}

}  // namespace

TEST_CASE("windows are the calendar's, in UTC") {
  const auto window = [](QuotaWindow window, uint64_t nowS) {
    const auto times = windowAt(window, nowS);
    return utcText(times.beginS) + " - " + utcText(times.endS);
  };
  CHECK(window(QuotaWindow::day, kNov24 + 5) == "2026-11-24 00:00 UTC - 2026-11-25 00:00 UTC");
  CHECK(window(QuotaWindow::week, kNov24 + 5) == "2026-11-23 00:00 UTC - 2026-11-30 00:00 UTC");
  CHECK(window(QuotaWindow::week, kNov24 + 5 * kDay) == "2026-11-23 00:00 UTC - 2026-11-30 00:00 UTC");
  CHECK(window(QuotaWindow::week, kNov24 + 6 * kDay) == "2026-11-30 00:00 UTC - 2026-12-07 00:00 UTC");
  CHECK(window(QuotaWindow::month, kNov24) == "2026-11-01 00:00 UTC - 2026-12-01 00:00 UTC");
  CHECK(window(QuotaWindow::month, kNov24 + 8 * kDay) == "2026-12-01 00:00 UTC - 2027-01-01 00:00 UTC");
}

TEST_CASE("what is used counts in its window, and outlives the manager") {
  Quotas quotas;
  quotas.set(quota("alice", 0, 0, 10));
  quotas.charge("alice", 4 * kHour, kNov24);
  quotas.charge("alice", 5 * kHour, kNov24 + kDay);
  CHECK(quotas.used("alice", QuotaWindow::month, kNov24 + kDay) == 9 * kHour);
  CHECK(quotas.used("alice", QuotaWindow::day, kNov24 + kDay) == 5 * kHour);
  CHECK(quotas.used("alice", QuotaWindow::month, kNov24 + 8 * kDay) == 0);
  std::vector<Entry> stored;
  for (const Write& one : quotas.changes(kNov24 + kDay)) stored.push_back({one.key, *one.value});
  CHECK(quotas.changes(kNov24 + kDay).empty());
  Quotas later;
  const Write own = Quotas::writeOf(quota("alice", 1.5, 20, 10));
  later.load({{own.key, *own.value}}, stored);
  CHECK(describe(*later.of("alice")) == "1.5 GPUs, 20 GiB, 10 GPU-hours a month");
  CHECK(later.used("alice", QuotaWindow::month, kNov24 + kDay) == 9 * kHour);
  CHECK_FALSE(quotas.changes(kNov24 + 40 * kDay).front().value.has_value());
}

TEST_CASE("how a tenant's leases are protected is stored with its quota") {
  Quota alone{"alice"};
  alone.protectMs = 30'000;
  CHECK_FALSE(alone.none());
  CHECK(describe(alone) == "as much as there is; its leases are protected, every 30s");
  Quota both = quota("bob", 2);
  both.protectMs = 1500;
  Quotas later;
  later.load({{kQuotaPrefix + "alice", *Quotas::writeOf(alone).value},
              {kQuotaPrefix + "bob", *Quotas::writeOf(both).value},
              {kQuotaPrefix + "carol", "2000 0 0 1"}},  // an earlier manager's
             {});
  CHECK(later.of("alice")->protectMs == 30'000);
  CHECK(describe(*later.of("bob")) == "2 GPUs; its leases are protected, every 1500ms");
  CHECK(later.of("carol")->protectMs == 0);
  CHECK(later.of("carol")->window == QuotaWindow::week);
  CHECK(later.never("alice", {1000, 1000 * kGiB, 1e9}) == "");
}

TEST_CASE("refusals have the figures") {
  Quotas quotas;
  quotas.set(quota("*", 2, 100, 10));
  quotas.set(quota("bob", 3));
  CHECK(quotas.of("") == nullptr);
  CHECK(quotas.never("alice", {2, 100 * kGiB, 10 * kHour}) == "");
  CHECK(quotas.never("alice", {3, 0}) == "tenant 'alice' may have 2 GPUs at once, and 3 are wanted");
  CHECK(quotas.never("alice", {1, 101 * kGiB}) ==
        "tenant 'alice' may have 100 GiB of GPUs' memory at once, and 101 GiB are wanted");
  CHECK(quotas.never("alice", {1, 1, 11 * kHour}) ==
        "tenant 'alice' may have 10 GPU-hours a month, and 11 are wanted");
  CHECK(quotas.never("bob", {3, 101 * kGiB, 11 * kHour}) == "");
  const auto hinders = [&](const Held& has, const Held& wanted) {
    return quotas.hinders("alice", has, wanted, kNov24);
  };
  CHECK(hinders({1, 50 * kGiB}, {1, 50 * kGiB}).text == "");
  CHECK(
      hinders({1.5, 0}, {1, 0}).text ==
      "tenant 'alice' may have 2 GPUs at once, and has 1.5; 1 more is wanted: leases of its own have to end "
      "first");
  CHECK(contains(hinders({0, 50 * kGiB}, {0, 51 * kGiB}).text,
                 "100 GiB of GPUs' memory at once, and has 50 GiB"));
  quotas.charge("alice", 8 * kHour, kNov24);
  CHECK(hinders({}, {1, 1, 2 * kHour}).text == "");
  CHECK(hinders({}, {1, 1, 3 * kHour}).text ==
        "tenant 'alice' may have 10 GPU-hours a month, and has had 8; 3 more are wanted. The next month "
        "begins on "
        "2026-12-01 00:00 UTC");
  quotas.charge("alice", 2 * kHour, kNov24);
  CHECK(contains(hinders({}, {1, 1}).text, "and has had 10. The next month"));
}

namespace {

// A server of four GPUs of 80 GiB each, on 2026-11-24.
struct Quoted : Fixture {
  Quoted() {
    calendarS = kNov24;
    joinAndBeat(server("a", 1, 4));
  }
  void set(const Quota& quota) {
    pool->setQuota(kAdmin, quota, "", [](const std::string& why) { CHECK(why == ""); });
  }
  void ask(const Principal& who, const LeaseRequest& wish) {
    pool->request(who, wish, now);
    grantAll();
  }
  void grantAll() {
    for (const Lease& lease : std::exchange(events.grants, {})) pool->granted(lease.id, now);
  }
  void release(const Principal& who, uint64_t id) {
    pool->release(who, {id, id}, now);
    pool->revoked(kA, {id, id}, now);
    pool->tick(now);
    grantAll();
  }
  // Beats on, with what is leased.
  void pass(uint64_t ms) {
    for (uint64_t untilMs = now + ms; now < untilMs;) {
      now += std::min<uint64_t>(1000, untilMs - now);
      std::vector<Id> held;
      for (const auto& [id, record] : pool->leases()) {
        held.push_back(id);
        std::string why;
        pool->renew(kAdmin, id, now, &why);
      }
      beat(1, held);
      pool->tick(now);
    }
  }
  QuotaUse use(const std::string& tenant) {
    for (const QuotaUse& one : pool->quotas(kAdmin))
      if (one.quota.tenant == tenant) return one;
    return {};
  }
};

}  // namespace

TEST_CASE_METHOD(Quoted, "beyond the quota for good: refused at once, whatever it would wait") {
  set(quota("alice", 2, 160, 10));
  ask(kAlice, request(1, 60'000, 0, 3));
  CHECK(failure(1) == "tenant 'alice' may have 2 GPUs at once, and 3 are wanted");
  CHECK(events.failures.at({1, 1}).kind == Failure::Kind::refused);
  set(quota("alice", 0, 100));
  ask(kAlice, request(2, 60'000, 0, 2));
  CHECK(failure(2) == "tenant 'alice' may have 100 GiB of GPUs' memory at once, and 160 GiB are wanted");
  set(quota("alice", 0, 0, 10));
  LeaseRequest timed = request(3, 60'000);
  timed.limitMs = 11 * kHour * 1000;
  ask(kAlice, timed);
  CHECK(contains(failure(3), "may have 10 GPU-hours a month, and 11 are wanted"));
  ask(kBob, request(4, 0, 0, 3));
  CHECK(has(4));
  CHECK(pool->explain(kAlice, timed, now).outlook == Outlook::never);
}

TEST_CASE_METHOD(Quoted, "leases that name nothing else are protected as their tenant is set up") {
  Quota protects = quota("alice", 0);
  protects.protectMs = 20'000;
  set(protects);
  const auto terms = [&](const Principal& who, uint64_t id, TurnTerms wanted, const std::string& job = "") {
    LeaseRequest wish = request(id);
    wish.turns = wanted;
    wish.job = job;
    if (!job.empty()) wish.id = claimId("alice", job);
    ask(who, wish);
    const auto at = pool->leases().find(wish.id);
    REQUIRE(at != pool->leases().end());
    return at->second.terms;
  };
  const TurnTerms open{.holderKeeps = true, .protectByTenant = true};
  CHECK(terms(kAlice, 1, open).protectMs == 20'000);
  CHECK(terms(kAlice, 2, open).holderKeeps);
  CHECK(terms(kAlice, 3, {.protectMs = 5000, .protectByTenant = true}).protectMs == 5000);
  release(kAlice, 1), release(kAlice, 2), release(kAlice, 3);
  const TurnTerms none =
      terms(kAlice, 4, {.holderKeeps = true});  // --no-protect; or a client that knows of no tenant's
  CHECK(none.protectMs == 0);
  CHECK_FALSE(none.holderKeeps);
  CHECK(terms(kBob, 5, open).protectMs == 0);
  const TurnTerms claimed = terms(kAlice, 6, open, "alps:1:0");
  CHECK(claimed.protectMs == 20'000);
  CHECK_FALSE(claimed.holderKeeps);
  const auto refused = [&](uint32_t protectMs) {
    Quota wrong = quota("alice", 1);
    wrong.protectMs = protectMs;
    return thrown([&] { pool->setQuota(kAdmin, wrong, "", [](const std::string&) {}); });
  };
  CHECK(contains(refused(999), "once a second at most"));
  CHECK(contains(refused(kMostProtectMs + 1), "once a day at least"));
}

TEST_CASE_METHOD(Quoted, "what fits when its own leases have ended waits for them, and holds nobody back") {
  set(quota("alice", 2));
  ask(kAlice, request(1, 0, 0, 1));
  ask(kAlice, request(2, 0, 40 * kGiB));
  CHECK(has(2));
  CHECK(use("alice").milliDevices == 1500);
  ask(kAlice, request(3, 0));
  CHECK(
      failure(3) ==
      "tenant 'alice' may have 2 GPUs at once, and has 1.5; 1 more is wanted: leases of its own have to end "
      "first");
  CHECK(events.failures.at({3, 3}).kind == Failure::Kind::noDevice);
  const auto answer = pool->explain(kAlice, request(9), now);
  CHECK(answer.outlook == Outlook::quota);
  CHECK(contains(answer.text, "and has 1.5"));
  ask(kAlice, request(4, 60'000));
  CHECK_FALSE(has(4));
  CHECK(failure(4) == "");
  ask(kBob, request(5, 0, 0, 2));  // behind it, and on the last two
  CHECK(has(5));
  release(kBob, 5);
  release(kAlice, 2);
  CHECK(has(4));
  CHECK(use("alice").milliDevices == 2000);
  restart();
  CHECK(use("alice").quota.milliDevices == 2000);
  CHECK(use("alice").milliDevices == 2000);
}

TEST_CASE_METHOD(Quoted,
                 "a suspended lease is charged what it still holds, and comes back within the quota") {
  set(quota("alice", 1));
  ask(kAlice, request(1));
  pool->suspend(kAlice, {1, 1}, 0, now);
  pool->suspendDone({1, 1}, events.suspends.back().number, {{8 * kGiB}, 0, 0, 0}, now);
  const uint64_t kept = use("alice").milliDevices;
  CHECK(kept >= 100);
  CHECK(kept < 120);
  ask(kAlice, request(2));
  CHECK(contains(failure(2), "may have 1 GPU at once, and has 0.1"));
  LeaseRequest half = request(3, 0, 40 * kGiB);
  half.policy = Policy::spread;
  ask(kAlice, half);
  CHECK(has(3));
  pool->resume(kAlice, {1, 1}, 0, now);
  CHECK(contains(events.resumeFailures[{1, 1}], "cannot be resumed: tenant 'alice' may have 1 GPU at once"));
  pool->resume(kAlice, {1, 1}, 60'000, now);
  CHECK(events.resumes.empty());
  release(kAlice, 3);
  CHECK(events.resumes.size() == 1);
}

TEST_CASE_METHOD(Quoted, "all leases of a large pool are looked at within a second") {
  constexpr uint64_t kLeases = 2500;
  for (int i = 0; i < 16; ++i) joinAndBeat(server("s" + std::to_string(i), 10 + i, 4));
  set(quota("alice", 100));
  for (uint64_t id = 1; id <= kLeases; ++id) ask(kAlice, request(id, 0, kGiB));
  const auto count = [&](LeaseState state) {
    const auto& leases = pool.pool->leases();
    return std::count_if(leases.begin(), leases.end(),
                         [&](const auto& one) { return one.second.state == state; });
  };
  const auto tickFor = [&](uint64_t ms) {
    for (uint64_t end = now + ms; now < end;) pool->tick(now += 100);
  };
  REQUIRE(count(LeaseState::active) == kLeases);
  const double devices = static_cast<double>(use("alice").milliDevices) / 1000;
  const auto used = [&] { return static_cast<double>(use("alice").deviceSeconds); };
  tickFor(10'000);
  CHECK(used() >= devices * 8.9);
  CHECK(used() <= devices * 10.1);

  now = pool.pool->leases().begin()->second.deadlineMs + times.driftMs + 1;
  tickFor(1100);
  CHECK(count(LeaseState::active) == 0);
  const double atEnd = used();
  tickFor(10'000);  // what a server has not confirmed is occupied still
  CHECK(used() > atEnd);
}

TEST_CASE_METHOD(Quoted, "a lease that is larger than its tenant's quota comes back when that has grown") {
  set(quota("alice", 1));
  ask(kAlice, request(1));
  pool->suspend(kAlice, {1, 1}, 0, now);
  pool->suspendDone({1, 1}, events.suspends.back().number, {{8 * kGiB}, 0, 0, 0}, now);
  Quota small{"alice"};
  small.memoryBytes = kGiB / 2;
  set(small);
  CHECK(describe(small) == "512 MiB");
  pool->resume(kAlice, {1, 1}, 0, now);
  CHECK(contains(events.resumeFailures[{1, 1}],
                 "may have 512 MiB of GPUs' memory at once, and 80 GiB are wanted: its quota has to grow"));
  pool->resume(kAlice, {1, 1}, 60'000, now);
  CHECK(events.resumes.empty());
  set(quota("alice", 1));
  pool->tick(now);
  CHECK(events.resumes.size() == 1);
}

TEST_CASE_METHOD(Quoted, "hours that are used up: refused until the next window") {
  set(quota("alice", 0, 0, 2));
  ask(kAlice, request(1, 0, 0, 4));
  pass(1'800'000);  // four GPUs for half an hour
  CHECK(use("alice").deviceSeconds >= 2 * kHour - 8);
  pass(10'000);
  CHECK(has(1));
  CHECK(pool->leases().contains({1, 1}));  // what runs is left alone
  release(kAlice, 1);
  ask(kAlice, request(2, 60'000));
  CHECK(contains(failure(2), "may have 2 GPU-hours a month, and has had 2"));
  CHECK(contains(failure(2), "The next month begins on 2026-12-01 00:00 UTC"));
  CHECK(use("alice").windowEndsS == windowAt(QuotaWindow::month, kNov24).endS);
  calendarS += 7 * kDay;
  ask(kAlice, request(3));
  CHECK(has(3));
}

TEST_CASE_METHOD(Quoted, "who sets and sees quotas") {
  set(quota("alice", 2));
  set(quota("*", 1));
  const auto sees = [&](const Principal& who) {
    std::string text;
    for (const QuotaUse& one : pool->quotas(who))
      text += one.quota.tenant + ":" + std::to_string(one.quota.milliDevices) + " ";
    return text;
  };
  CHECK(sees(kAdmin) == "*:1000 alice:2000 ");
  CHECK(sees(kAlice) == "alice:2000 ");
  CHECK(sees(kBob) == "bob:1000 ");
  const auto no = [&](const Principal& who, const Quota& quota) {
    return thrown([&] { pool->setQuota(who, quota, "", [](const std::string&) {}); });
  };
  CHECK(contains(no(kAlice, quota("alice", 9)), "cannot set quotas"));
  CHECK(contains(no(kAdmin, quota("", 1)), "a tenant's name"));
  set(quota("alice", 0));
  CHECK(sees(kAlice) == "alice:1000 ");
  std::string told;
  for (const AuditEntry& one : pool->audit(kAdmin, {}, 100))
    if (one.event == AuditEvent::quotaSet)
      told += std::string(name(one.event)) + " " + one.tenant + " " + one.reason + "; ";
  CHECK(told == "quota-set alice 2 GPUs; quota-set * 1 GPU; quota-set alice as much as there is; ");
  CHECK(pool->audit(kBob, {}, 100).size() == 1);  // that the server is there
}

TEST_CASE_METHOD(Quoted, "who is a tenant, what each has, and who sees that") {
  set(quota("alice", 2));
  set(quota("*", 1));
  ask(kAlice, request(1));
  ask(kAlice, request(2, 0, 40 * kGiB));
  LeaseRequest claim = request(3);
  claim.job = "alps:1:0";
  pool->nameClaim(kBob, claim);
  ask(kBob, claim);
  ask({}, request(5));  // nobody's
  pass(60'000);
  ask(kBob, request(4, 60'000));  // beyond its quota now
  pool->suspend(kAlice, {1, 1}, 0, now);
  pool->suspendDone({1, 1}, events.suspends.back().number, {{0}, 0, 0, 0}, now);
  const std::map<std::string, uint32_t> tokens{{"alice", 2}, {"carol", 1}};
  const auto sees = [&](const Principal& who) {
    std::string names;
    for (const TenantUse& one : pool->tenants(who, tokens, now)) names += one.quota.quota.tenant + " ";
    return names;
  };
  CHECK(sees(kAdmin) == "alice bob carol ");
  CHECK(sees({Role::scheduler, "slurm"}) == "alice bob carol slurm ");
  CHECK(sees(kAlice) == "alice ");
  CHECK(sees({Role::viewer, "dora"}) == "dora ");  // it has nothing

  const auto all = pool->tenants(kAdmin, tokens, now);
  const TenantUse &alice = all.at(0), &bob = all.at(1), &carol = all.at(2);
  CHECK(alice.tokens == 2);
  CHECK(alice.leases == std::map<std::string, uint32_t>{{"active", 1}, {"suspended", 1}});
  CHECK(alice.claims == 0);
  CHECK(alice.queued == 0);
  CHECK(alice.quota.milliDevices == use("alice").milliDevices);
  CHECK(alice.quota.quota.milliDevices == 2000);
  CHECK(alice.usage >= 80);  // one and a half GPUs for a minute, but for the first tick
  CHECK(alice.usage <= 90);
  CHECK(alice.usage == pool->deviceSeconds("alice", now));
  CHECK(bob.tokens == 0);
  CHECK(bob.leases == std::map<std::string, uint32_t>{{"active", 1}});
  CHECK(bob.claims == 1);
  CHECK(bob.queued == 1);
  CHECK(bob.quota.milliDevices == 1000);
  CHECK(bob.quota.quota.milliDevices == 1000);  // each tenant's
  CHECK(carol.tokens == 1);
  CHECK(carol.leases.empty());
  CHECK(carol.usage == 0);

  // What has ended leaves hours in this month.
  for (const uint64_t id : {1, 2}) release(kAlice, id);
  const TenantUse own = pool->tenants(kAlice, {}, now).at(0);
  CHECK(own.leases.empty());
  CHECK(own.quota.milliDevices == 0);
  CHECK(own.quota.deviceSeconds >= 80);
}
