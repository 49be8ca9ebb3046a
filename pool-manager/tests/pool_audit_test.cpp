// What has happened to leases and servers: in the store with what it tells of.
#include "suspends_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

template <class Base>
struct Audited : Base {
  // But for servers that come and go.
  std::vector<AuditEntry> entries(const Principal& who = kAdmin, const AuditQuery& query = {}) {
    auto all = this->pool.pool->audit(who, query, 1000);
    std::erase_if(all, isOfServer);
    return all;
  }
  static bool isOfServer(const AuditEntry& entry) {
    return entry.event == AuditEvent::serverAlive || entry.event == AuditEvent::serverLost ||
           entry.event == AuditEvent::serverLeft;
  }
  // And these alone: "server-alive a: it has joined".
  std::vector<std::string> servers() {
    std::vector<std::string> lines;
    for (const AuditEntry& one : this->pool.pool->audit(kBob, {}, 1000)) {
      if (!isOfServer(one)) continue;
      CHECK(one.by == "the manager");
      lines.push_back(std::string(name(one.event)) + " " + one.server + ": " + one.reason);
    }
    return lines;
  }
  std::string story(const AuditQuery& query = {}) {
    std::string text;
    for (const AuditEntry& one : entries(kAdmin, query))
      text += std::string(text.empty() ? "" : " ") + name(one.event);
    return text;
  }
};

}  // namespace

TEST_CASE_METHOD(Audited<Fixture>, "a lease's life is told, with who, when, where and why") {
  joinAndBeat(server("a", 1));
  LeaseRequest wish = request(1);
  wish.tenant = "x";
  wish.reason = "nightly tests";
  pool->request(kAlice, wish, now);
  pool->granted({1, 1}, now);
  pool->request(kBob, request(2, 60'000), now += 3000);
  CHECK(pool->release(kAlice, {1, 1}, now));
  pool->revoked(kA, {1, 1}, now += 1000);
  CHECK(story() == "granted queued released granted");
  const auto all = entries();
  CHECK(all[0].lease == Id{1, 1});
  CHECK(all[0].server == "a GPU 0");
  CHECK(all[0].tenant == "alice");
  CHECK(all[0].holder == "holder1");
  CHECK(all[0].by == "tenant alice");
  CHECK(all[0].reason == "nightly tests");
  CHECK(all[0].timeMs == calendarS * 1000);
  CHECK(all[1].lease == Id{2, 2});
  CHECK(all[1].server.empty());
  CHECK(all[1].timeMs == calendarS * 1000 + 3000);
  CHECK(all[2].reason == "released");
  CHECK(all[2].by == "tenant alice");
  // Of others' leases nobody is told whose they are, nor why.
  const auto seen = entries(kBob);
  REQUIRE(seen.size() == 4);
  CHECK(seen[0].holder == "in use");
  CHECK((seen[0].tenant + seen[0].by + seen[0].reason).empty());
  CHECK(seen[1].holder == "holder2");
  CHECK(seen[1].by == "tenant bob");
  // One lease; later than; not older than.
  CHECK(story({0, 0, Id{1, 1}.text().substr(0, 20)}) == "granted released");
  CHECK(story({all[1].number, 0, ""}) == "released granted");
  CHECK(story({0, 500, ""}) == "released granted");
  restart();
  CHECK(story() == "granted queued released granted");
  CHECK(entries()[3].number == all[3].number);
  joinAndBeat(server("a", 1), {{2, 2}});
  pool->release(kBob, {2, 2}, now);
  pool->revoked(kA, {2, 2}, now);
  CHECK(entries().back().number == all[3].number + 1);
}

TEST_CASE_METHOD(Audited<Fixture>, "ends that nobody ordered are the manager's word") {
  joinAndBeat(server("a", 1));
  SECTION("expired") {
    leaseNow(1);
    pool->tick(now += 10'000 + times.driftMs + 1);
    pool->revoked(kA, {1, 1}, now);
    CHECK(story() == "granted expired");
    CHECK(entries()[1].reason == "its holder has not renewed it for 10 s");
  }
  SECTION("by hand") {
    leaseNow(1);
    pool->drop(kAdmin, {1, 1}, now);
    pool->revoked(kA, {1, 1}, now);
    CHECK(story() == "granted released");
    CHECK(entries()[1].reason == "somebody has released it (gpupool release)");
    CHECK(entries()[1].by == "the operator");
    return;
  }
  SECTION("lost") {
    leaseNow(1);
    pool->left("a", {1, 0}, false, now);
    joinAndBeat(server("a", 2));
    CHECK(story() == "granted lost");
    CHECK(entries()[1].reason == "its server a was restarted");
  }
  SECTION("lost, and dropped") {
    leaseNow(1);
    pool->left("a", {1, 0}, false, now);
    pool->release(kAdmin, {1, 1}, now);
    pool->tick(now += 10'000 + times.driftMs + times.killMs + 1);
    REQUIRE(story() == "granted lost");
    pool->drop(kAdmin, {1, 1}, now);
    CHECK(story() == "granted lost released");
    CHECK(entries().back().by == "the operator");
    CHECK(contains(entries().back().reason, "dropped, lost: "));
    return;
  }
  SECTION("the server does not take it") {
    pool->request(kAdmin, request(1), now);
    pool->grantFailed({1, 1}, "no", true, now);
    pool->revoked(kA, {1, 1}, now);
    CHECK(story() == "granted lost");
  }
  SECTION("a request that is not served") {
    leaseNow(1);
    pool->request(kAdmin, request(2, 1000), now);
    pool->tick(now += 1001);
    CHECK(story() == "granted queued unserved");
    CHECK(contains(entries()[2].reason, "is held by holder1"));
  }
  if (entries().back().event != AuditEvent::unserved) CHECK(entries().back().by == "the manager");
}

TEST_CASE_METHOD(Audited<Fixture>, "servers that are cordoned, and moves, are told") {
  joinAndBeat(server("a", 1));
  const auto done = [](const std::string&) {};
  pool->cordon(kAdmin, "a", {"a new fan", "eve@head", 0}, done);
  pool->uncordon(kAdmin, "a", done, "bob@head");
  pool->uncordon(kAdmin, "a", done, "bob@head");  // it is in service: nothing has happened
  CHECK(story() == "cordoned uncordoned");
  const auto all = entries(kBob);  // as `gpupool servers` shows everybody
  CHECK(all[0].server == "a");
  CHECK(all[0].by == "the operator (says: eve@head)");
  CHECK(all[0].reason == "a new fan");
  CHECK(all[1].by == "the operator (says: bob@head)");
  const Principal token{Principal::Role::admin, "ops", "1f0c77ab"};
  pool->cordon(token, "a", {"", "the manager", 0}, done);
  CHECK(entries().back().by == "the operator (token 1f0c77ab) (says: the manager)");
}

TEST_CASE_METHOD(Audited<Fixture>, "servers that come, are lost and leave are told, each change once") {
  using Lines = std::vector<std::string>;
  joinAndBeat(server("a", 1));
  beat(1, {});
  CHECK(servers() == Lines{"server-alive a: it has joined"});
  SECTION("it is killed, and comes back") {
    pool->left("a", {1, 0}, false, now);
    joinAndBeat(server("a", 2));
    CHECK(servers() == Lines{"server-alive a: it has joined", "server-lost a: its connection has ended",
                             "server-alive a: it was started again"});
  }
  SECTION("it is silent, and is heard of again") {
    for (int i = 0; i < 3; ++i) pool->tick(now += times.silentMs);
    beat(1, {});
    CHECK(servers() == Lines{"server-alive a: it has joined",
                             "server-lost a: it has not been heard of for 5 s",
                             "server-alive a: it is heard of again"});
  }
  SECTION("it leaves") {
    pool->left("a", {1, 0}, true, now);
    CHECK(servers() == Lines{"server-alive a: it has joined", "server-left a: it has ended"});
  }
  SECTION("a manager that is started again tells what has changed meanwhile") {
    joinAndBeat(server("b", 1));
    restart();
    joinAndBeat(server("a", 1));
    CHECK(servers().size() == 2);
    pool->tick(now += 11'000);
    CHECK(servers().back() == "server-lost b: it has not come back since the manager was started");
    CHECK(servers().size() == 4);  // and a is silent by now
  }
}

TEST_CASE_METHOD(Audited<Fixture>, "a server that comes and goes does not fill the log") {
  const auto flap = [&](uint64_t from, uint64_t to) {
    for (uint64_t life = from; life < to; ++life) {
      joinAndBeat(server("a", life));
      pool->left("a", {life, 0}, false, now += 100);
    }
  };
  flap(1, 100);
  CHECK(servers().size() == ServerLog::kMostCredit);
  joinAndBeat(server("b", 1));
  CHECK(servers().back() == "server-alive b: it has joined");  // others are told of
  joinAndBeat(server("a", 100));
  pool->tick(now += ServerLog::kCreditEveryMs);
  CHECK(servers().size() == ServerLog::kMostCredit + 2);  // b is silent; and a, as was told of it
  beat(100, {});
  CHECK(servers().size() == ServerLog::kMostCredit + 3);
  CHECK(contains(servers().back(), "server-alive a: it is heard of again; it has come and gone meanwhile"));
}

TEST_CASE_METHOD(Audited<Fixture>,
                 "of a lease that is lost with its server it is told that the server is gone") {
  joinAndBeat(server("a", 1));
  pool->request(kAlice, request(1), now);
  pool->granted({1, 1}, now);
  pool->left("a", {1, 0}, false, now);
  CHECK(pool->release(kAlice, {1, 1}, now));
  pool->tick(now += 60'000);
  CHECK(story() == "granted lost");
  CHECK(entries().back().by == "the manager");
  CHECK(entries().back().reason == "its server a is gone; it was to end: released (tenant alice)");
}

TEST_CASE_METHOD(Audited<DiskFixture>, "what the store does not accept has not happened") {
  joinAndBeat(server("a", 1));
  disk->full = true;
  pool->request(kAdmin, request(1), now);
  CHECK(failure(1) != "");
  CHECK(story().empty());
  disk->full = false;
  pool->tick(now += 2000);
  leaseNow(2);
  CHECK(story() == "revoked granted");
}

TEST_CASE_METHOD(Audited<Fixture>, "the log is bounded, in the store, too") {
  times.auditEntries = 5;
  restart();
  joinAndBeat(server("a", 1));
  for (uint64_t id = 1; id <= 20; ++id) {
    leaseNow(id);
    pool->release(kAdmin, {id, id}, now);
    pool->revoked(kA, {id, id}, now);
  }
  CHECK(entries().size() == 5);
  CHECK(entries().back().event == AuditEvent::released);
  CHECK(entries().back().lease == Id{20, 20});
  CHECK(store->range(kAuditPrefix).size() == 5);
  times.auditEntries = 2;
  restart();
  joinAndBeat(server("a", 1));
  leaseNow(21);
  pool->release(kAdmin, {21, 21}, now);
  pool->revoked(kA, {21, 21}, now);
  CHECK(entries().size() == 2);
  CHECK(store->range(kAuditPrefix).size() == 2);
  times.auditEntries = 0;
  restart();
  joinAndBeat(server("a", 1));
  leaseNow(30);
  CHECK(store->range(kAuditPrefix).size() == 2);  // none is written any more
}

TEST_CASE_METHOD(Audited<Suspends>, "suspending and resuming are told when the store has them") {
  lease(1, 20 * kGiB);
  disk->full = true;
  suspend(1);
  serverSuspends();
  CHECK(story() == "granted");
  disk->full = false;
  pool->tick(now += 2000);
  CHECK(story() == "granted suspended");
  CHECK(entries()[1].by == "the operator");
  resume(1);
  serverResumes();
  CHECK(story() == "granted suspended resumed");
}

TEST_CASE("a pool that is lost as a whole leaves room in the audit log") {
  ServerLog log;
  uint64_t now = 1'000'000, told = 0;
  for (unsigned i = 0; i < 2 * ServerLog::kMostOfAll; ++i)
    told += log.note("s" + std::to_string(i), AuditEvent::serverLost, "its network", now).has_value();
  CHECK(told == ServerLog::kMostOfAll);
  CHECK(log.due(now).empty());
  const auto later = log.due(now += ServerLog::kOfAllEveryMs);
  REQUIRE(later.size() == 1);
  CHECK(later[0].event == AuditEvent::serverLost);
  CHECK(log.due(now).empty());
}
