// Servers that join, break, come back, are twins, or are cordoned.
#include "pool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

TEST_CASE_METHOD(Fixture, "a device that broke gets no lease until its server says that it is in order") {
  joinAndBeat(server("a", 1, 2));
  const auto says = [&](const std::vector<std::string>& problems) {
    REQUIRE(pool->beat("a", {1, 0}, {}, problems, 1, now));
  };
  const auto ordinal = [&](uint64_t id) {
    pool->request(kAdmin, request(id), now);
    const auto& leases = pool->leases();
    return leases.contains({id, id}) ? static_cast<int>(leases.at({id, id}).primary().devices[0].info.ordinal)
                                     : -1;
  };
  says({"CUDA_ERROR_ECC_UNCORRECTABLE (214)\x1b; restart gpupool-server", ""});
  CHECK(pool->inventory(kAdmin, now)[0].devices[0].info.problem ==
        "CUDA_ERROR_ECC_UNCORRECTABLE (214)?; restart gpupool-server");
  CHECK(ordinal(1) == 1);
  CHECK(ordinal(2) == -1);
  says({"", ""});
  CHECK(ordinal(3) == 0);
}

TEST_CASE_METHOD(Fixture, "what a server saw of its devices is known for as long as it says something") {
  const Server facts = server("a", 1, 2);
  joinAndBeat(facts);
  const auto load = [&](size_t device) {
    const auto sample = pool->sample("a", facts.devices[device].uuid, now);
    return sample ? sample->gpuPercent : -2;
  };
  CHECK(load(0) == -2);
  std::vector<DeviceSample> samples(2);
  samples[0].gpuPercent = 37;
  samples[1].ageMs = 10'000;
  pool->setSamples("a", samples, now);
  CHECK(load(0) == 37);
  CHECK(load(1) == -1);
  now += 20'001;
  CHECK(pool->sample("a", facts.devices[0].uuid, now)->ageMs == 20'001);
  CHECK(load(1) == -2);                      // 30 s old
  pool->setSamples("a", {samples[0]}, now);  // of one device of two: not taken
  pool->setSamples("b", samples, now);
  CHECK(load(1) == -2);
  pool->setSamples("a", samples, now);
  CHECK(load(0) == 37);
  CHECK_FALSE(pool->sample("a", "of no device", now));
  Server next = facts;
  next.incarnation = {1, 7};
  pool->left("a", facts.incarnation, false, now);
  joinAndBeat(next);
  CHECK(load(0) == -2);  // another process said that
}

TEST_CASE_METHOD(Fixture, "what comes from the wire is checked") {
  for (const std::string& name : std::vector<std::string>{"", "bad\nname", "a:1", "a/b", "..", ".a", "-a",
                                                          "a b", "\xc3\xa4", std::string(64, 'a')})
    CHECK(contains(thrown([&] { pool->join(kAdmin, server(name, 1), {}, now); }), "is no name for a server"));
  CHECK_NOTHROW(pool->join(kAdmin, server("Node-7_b.example.org", 1, 0), {}, now));
  CHECK_NOTHROW(pool->join(kAdmin, server(std::string(63, 'a'), 1, 0), {}, now));
  CHECK_THROWS_AS(pool->join(kAdmin, server("a", 1, kMaxDevices + 1), {}, now), std::invalid_argument);
  auto twins = server("a", 1, 2);
  twins.devices[1].ordinal = 0;
  CHECK_THROWS_AS(pool->join(kAdmin, twins, {}, now), std::invalid_argument);
  twins.devices[1].ordinal = 1;
  twins.devices[1].uuid = twins.devices[0].uuid;
  CHECK(contains(thrown([&] { pool->join(kAdmin, twins, {}, now); }), "the same UUID"));
  CHECK(
      contains(thrown([&] { pool->join(kAdmin, server("a", 1), {{}, {}}, now); }), "more or fewer devices"));
  CHECK(contains(thrown([&] { pool->join(kAdmin, server("a", 1), {{~uint64_t{0}, {}}}, now); }), "absurd"));
  auto unnamed = server("a", 1);
  unnamed.devices[0].uuid = "short";
  CHECK(contains(thrown([&] { pool->join(kAdmin, unnamed, {}, now); }), "16 bytes"));
  auto nowhere = server("a", 1);
  nowhere.localPath.clear();
  CHECK_THROWS_AS(pool->join(kAdmin, nowhere, {}, now), std::invalid_argument);

  joinAndBeat(server("a", 1));
  CHECK(contains(thrown([&] { pool->join(kAdmin, server("a", 2), {}, now); }), "another name"));
  CHECK_FALSE(pool->beat("a", {2, 0}, {}, {}, 0, now));
  CHECK_FALSE(pool->beat("b", {1, 0}, {}, {}, 0, now));

  auto none = request(1);
  none.deviceCount = 0;
  pool->request(kAdmin, none, now);
  CHECK(failure(1).find("1 to 8 devices, and 0 are asked for") != std::string::npos);
  auto eager = request(2);
  eager.ttlMs = 0;
  eager.holder = "evil\x1b[2J";
  pool->request(kAdmin, eager, now);
  REQUIRE(events.grants.size() == 1);
  CHECK(events.grants[0].ttlMs == times.minTtlMs);
  CHECK(events.grants[0].holder == "evil?[2J");
}

// --- one GPU is leased once -----------------------------------------------------------------------------

namespace {

// A second server with the first one's GPU.
Server twin(const std::string& boot = "") {
  Server facts = server("b", 2);
  facts.devices[0].uuid = server("a", 1).devices[0].uuid;
  facts.bootId = boot;
  return facts;
}

}  // namespace

TEST_CASE_METHOD(Fixture, "two servers with one GPU: it is the first one's, and both are named") {
  joinAndBeat(server("a", 1));
  joinAndBeat(twin());
  leaseNow(1);
  CHECK(events.grants.back().server.name == "a");
  pool->request(kAdmin, request(2), now);
  CHECK(failure(2).find("b: GPU 0 (GPU) is the same device as GPU 0 of server a") != std::string::npos);
  LeaseRequest there = request(3);
  there.server = "b";
  pool->request(kAdmin, there, now);
  CHECK(failure(3).find("the same device as GPU 0 of server a") != std::string::npos);
  CHECK(events.grants.size() == 1);
}

TEST_CASE_METHOD(Fixture, "a GPU goes over to another server only when nothing of the first can run there") {
  const auto askedOfB = [&](uint64_t id) {
    REQUIRE(pool->beat("b", {2, 0}, {}, {}, 1, now));
    const size_t before = events.grants.size();
    pool->request(kAdmin, request(id), now);
    return events.grants.size() != before && events.grants.back().server.name == "b";
  };
  joinAndBeat(server("a", 1));
  SECTION("the first has left, and nothing of it was leased") {
    joinAndBeat(twin());
    CHECK_FALSE((pool->left("a", {1, 0}, false, now), pool->leases().size()));
    CHECK(askedOfB(5));
  }
  SECTION("a lease of the first runs") {
    leaseNow(1);
    joinAndBeat(twin());
    pool->left("a", {1, 0}, false, now);
    CHECK_FALSE(askedOfB(5));
  }
  SECTION("a lease of the first runs, and the manager is started again") {
    leaseNow(1);
    restart();
    joinAndBeat(twin());
    CHECK_FALSE(askedOfB(5));
  }
  SECTION("the machine was started again under another name") {
    leaseNow(1);
    pool->left("a", {1, 0}, false, now);
    joinAndBeat(twin("the next boot"));
    CHECK(events.over.contains({1, 1}));
    CHECK(askedOfB(5));
    joinAndBeat(server("a", 3));
    pool->request(kAdmin, request(6), now);
    CHECK(failure(6).find("a: GPU 0 (GPU) is the same device as GPU 0 of server b") != std::string::npos);
  }
  SECTION("a worker of the first one's earlier life still runs") {
    REQUIRE(pool->beat("a", {1, 0}, {}, {"a worker of an earlier life still runs"}, 1, now));
    pool->left("a", {1, 0}, false, now);
    joinAndBeat(twin());
    CHECK_FALSE(askedOfB(5));
  }
}

TEST_CASE_METHOD(Fixture, "a late beat of a machine's earlier boot takes no GPU over") {
  joinAndBeat(server("a", 1));
  joinAndBeat(twin());
  pool->left("a", {1, 0}, false, now);
  Server again = server("a", 3);
  again.bootId = "the next boot";
  joinAndBeat(again);
  leaseNow(1);
  REQUIRE(events.grants.back().server.name == "a");
  const bool leased = GENERATE(true, false);
  if (!leased) {
    pool->release(kAdmin, {1, 1}, now);
    pool->revoked({"a", {3, 0}}, {1, 1}, now);
  }
  pool->left("a", {3, 0}, false, now);
  REQUIRE(pool->beat("b", {2, 0}, {}, {}, 1, now));  // written before its machine was started again
  CHECK(events.over.contains({1, 1}) != leased);
  pool->request(kAdmin, request(5), now);
  CHECK(failure(5).find("b: GPU 0 (GPU) is the same device as GPU 0 of server a") != std::string::npos);

  // Its next process is of a's boot.
  pool->left("b", {2, 0}, false, now);
  Server other = twin("the next boot");
  other.incarnation = {4, 0};
  joinAndBeat(other);
  CHECK(events.over.contains({1, 1}) != leased);
  pool->request(kAdmin, request(6), now);
  CHECK(pool.pool->leases().contains({6, 6}) != leased);
}

TEST_CASE_METHOD(Fixture, "a server that comes back is leased to nobody while its old workers run") {
  joinAndBeat(server("a", 1, 2));
  const Lease lease = leaseNow(1);
  const uint32_t ordinal = lease.devices[0].info.ordinal;
  pool->left("a", {1, 0}, false, now);
  std::vector<DeviceReport> reports(2);
  std::vector<std::string> problems(2);
  reports[ordinal] = {lease.epoch, {{1, 1}}};
  problems[ordinal] = "a worker of an earlier life still runs";
  const auto beats = [&] { REQUIRE(pool->beat("a", {2, 0}, {}, problems, 1, now)); };
  pool->join(kAdmin, server("a", 2, 2), reports, now);
  SECTION("while the manager runs") {
    beats();
    CHECK(events.over.contains({1, 1}));
  }
  SECTION("the manager is started again, and another server has the GPU too") {
    restart();
    Server other = twin();
    other.devices[0].uuid = lease.devices[0].info.uuid;
    joinAndBeat(other);
    LeaseRequest there = request(7);
    there.server = "b";
    pool->request(kAdmin, there, now);
    CHECK_FALSE(failure(7).empty());
    pool->join(kAdmin, server("a", 2, 2), reports, now);
    beats();
  }
  pool->request(kAdmin, request(2, 0, 0, 2), now);
  CHECK_FALSE(failure(2).empty());
  LeaseRequest there = request(3);
  there.server = "a";
  pool->request(kAdmin, there, now);
  pool->granted({3, 3}, now);
  REQUIRE(has(3));
  CHECK(events.leases.at({3, 3}).devices[0].info.ordinal != ordinal);
  there.id = {4, 4};
  pool->request(kAdmin, there, now);
  pool->revoked({"a", {2, 0}}, {1, 1}, now);  // of an earlier life's lease a server knows nothing
  pool->revoked(kA, {1, 1}, now);
  CHECK_FALSE(has(4));
  CHECK(pool->leases().contains({1, 1}));
  problems[ordinal].clear();
  REQUIRE(pool->beat("a", {2, 0}, {{3, 3}}, problems, 1, now));
  CHECK_FALSE(pool->leases().contains({1, 1}));
  there.id = {5, 5};
  pool->request(kAdmin, there, now);
  pool->granted({5, 5}, now);
  REQUIRE(has(5));
  CHECK(events.leases.at({5, 5}).devices[0].info.ordinal == ordinal);
}

TEST_CASE_METHOD(Fixture,
                 "a manager that lost its store leases nothing that is still held, and no epoch again") {
  joinAndBeat(server("a", 1));
  const Lease lease = leaseNow(1);
  store = makeMemoryStore();
  calendarS = 7;  // and its clock
  restart();
  joinAndBeat(server("a", 1), {{1, 1}}, {{lease.epoch, {}}});
  pool->request(kAdmin, request(2), now);
  CHECK_FALSE(failure(2).empty());
  CHECK(events.revokes.back().id == Id{1, 1});
  pool->revoked(kA, {1, 1}, now);
  CHECK(leaseNow(3).epoch > lease.epoch);
}

TEST_CASE_METHOD(Fixture, "what one server confirms ends no lease on another") {
  joinAndBeat(server("a", 1));
  joinAndBeat(server("b", 2), {{1, 1}});  // granted by a manager that has lost its store
  CHECK(events.revokes.back().server == "b");
  CHECK(leaseNow(1).server.name == "a");  // its holder has asked again
  pool->release(kAdmin, {1, 1}, now);
  REQUIRE(events.revokes.back().server == "a");
  CHECK(events.revokes.back().incarnation == Id{1, 0});
  const auto isFree = [&](size_t at) {
    const DeviceUse device = pool->inventory(kAdmin, now).at(at).devices.at(0);
    return device.info.problem.empty() && device.freeBytes == device.info.memoryBytes;
  };
  SECTION("the other server") {
    pool->revoked({"b", {2, 0}}, {1, 1}, now);
    CHECK(pool->leases().contains({1, 1}));
    CHECK_FALSE(isFree(0));
    CHECK(isFree(1));
  }
  SECTION("an earlier process of the same server") {
    pool->revoked({"a", {9, 0}}, {1, 1}, now);
    CHECK(pool->leases().contains({1, 1}));
    pool->revokeFailed({"a", {9, 0}}, {1, 1}, now);
    const size_t told = events.revokes.size();
    beat(1, {{1, 1}});
    CHECK(events.revokes.size() == told);  // the order to the one that runs is under way still
  }
  pool->revoked(kA, {1, 1}, now);
  CHECK_FALSE(pool->leases().contains({1, 1}));
  CHECK(isFree(0));
}

TEST_CASE_METHOD(Fixture, "what a server confirms of its lease leaves another's stranger where it is") {
  joinAndBeat(server("a", 1));
  joinAndBeat(server("b", 2), {{1, 1}});
  leaseNow(1);
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked(kA, {1, 1}, now);
  LeaseRequest there = request(2);
  there.server = "b";
  pool->request(kAdmin, there, now);
  CHECK(contains(failure(2), "still runs there"));
}

// The connection of a process that has ended may reach the manager behind those of the process after it.
TEST_CASE_METHOD(Fixture, "the late join of a server's earlier process ends no lease of the one that runs") {
  Server latest = server("a", 2), before = server("a", 1);
  latest.bootId = "this boot", before.bootId = "the boot before";
  joinAndBeat(latest);
  leaseNow(1);
  joinAndBeat(twin("this boot"));
  pool->left("a", {2, 0}, false, now);
  pool->join(kAdmin, before, {{0, {{8, 8}}}}, now);
  const auto askedOfB = [&](uint64_t id) {
    REQUIRE(pool->beat("b", {2, 0}, {}, {}, 1, now));
    pool->request(kAdmin, request(id), now);
    return events.grants.back().server.name == "b";
  };
  CHECK(pool->leases().at({1, 1}).state == LeaseState::active);
  CHECK_FALSE(askedOfB(2));
  SECTION("it breaks off") { pool->left("a", {1, 0}, false, now); }
  SECTION("it says goodbye") { pool->left("a", {1, 0}, true, now); }
  CHECK_FALSE(askedOfB(3));
  joinAndBeat(latest, {{1, 1}});
  std::string why;
  CHECK(pool->renew(kAdmin, {1, 1}, now, &why));
  CHECK(pool->leases().at({1, 1}).state == LeaseState::active);
  CHECK_FALSE(askedOfB(4));
}

TEST_CASE_METHOD(Fixture, "a lease is not granted by another process of its server than it was placed on") {
  joinAndBeat(server("a", 1));
  pool.pool->request(kAdmin, request(1), now);  // the store has not accepted it yet
  pool.pool->left("a", {1, 0}, false, now);
  pool->join(kAdmin, server("a", 2), {}, now);
  CHECK(events.grants.empty());
  beat(2, {});
  CHECK(pool->leases().empty());
  CHECK(events.grants.empty());
}

TEST_CASE_METHOD(Fixture, "epochs start above the calendar, whatever an old copy of the store says") {
  joinAndBeat(server("a", 1));
  const Lease lease = leaseNow(1);
  pool->release(kAdmin, {1, 1}, now);
  pool->revoked(kA, {1, 1}, now);
  calendarS += 3600;
  restart();
  joinAndBeat(server("a", 1));
  CHECK(leaseNow(2).epoch > (calendarS << 20));
  CHECK(lease.epoch < (calendarS << 20));
}

TEST_CASE_METHOD(DiskFixture, "a cordoned server keeps its leases and gets no new ones") {
  joinAndBeat(server("a", 1, 2));
  leaseNow(1);
  std::string why = "not said yet";
  const auto tell = [&](const std::string& text) { why = text; };
  const Principal user{Principal::Role::user, ""};
  CHECK(contains(thrown([&] { pool->cordon(user, "a", {}, tell); }), "operator"));
  CHECK(contains(thrown([&] { pool->cordon(kAdmin, "b", {}, tell); }), "there is no server b"));
  CHECK(contains(thrown([&] { pool->uncordon(kAdmin, "b", tell); }), "there is no server b"));
  pool->uncordon(kAdmin, "a", tell);
  CHECK(why.empty());  // it is in service already
  disk->full = true;
  pool->cordon(kAdmin, "a", {"on Friday", "", 0}, tell);
  CHECK(contains(why, "full"));
  CHECK(pool->cordons().empty());
  disk->full = false;
  pool->cordon(kAdmin, "a", {"on Thursday", "bob@head", 6}, tell);
  pool->cordon(kAdmin, "a", {"on\nFriday", "eve\n@head", 7}, tell);
  REQUIRE(why.empty());
  beat(1, {{1, 1}});
  CHECK(pool->renew(kAdmin, {1, 1}, now, &why));
  SECTION("as it is") {}
  SECTION("known to a manager that was started again, and of a server that was") {
    restart();
    joinAndBeat(server("a", 1, 2), {{1, 1}});
  }
  CHECK(pool->cordons().at("a").reason == "on?Friday");
  CHECK(pool->cordons().at("a").by == "the operator (says: eve?@head)");
  CHECK(pool->cordons().at("a").sinceS == 7);
  pool->request(kAdmin, request(2), now);
  CHECK(contains(failure(2), "cordoned by an operator: on?Friday"));
  pool->request(kAdmin, request(3, 60'000), now);  // this one waits
  CHECK_FALSE(has(3));
  CHECK(contains(thrown([&] { pool->uncordon(user, "a", tell); }), "operator"));
  pool->uncordon(kAdmin, "a", tell);
  REQUIRE(why.empty());
  pool->granted({3, 3}, now);
  CHECK(has(3));
  restart();
  CHECK(pool->cordons().empty());
}

TEST_CASE_METHOD(Fixture, "beside a cordoned server the others are leased") {
  joinAndBeat(server("a", 1));
  joinAndBeat(server("b", 2));
  pool->cordon(kAdmin, "a", {}, [](const std::string&) {});
  CHECK(leaseNow(1).server.name == "b");
  pool->request(kAdmin, request(2), now);
  CHECK(contains(failure(2), "a: cordoned by an operator"));
  CHECK(contains(failure(2), "held by holder1"));
}

TEST_CASE_METHOD(DiskFixture, "nothing is placed on a server whose cordon the store is about to accept") {
  joinAndBeat(server("a", 1, 2));
  std::string why = "not said yet";
  Pool& direct = *pool.pool;  // whose store writes only when it is told to
  direct.cordon(kAdmin, "a", {"a fan", "", 0}, [&](const std::string& text) { why = text; });
  SECTION("it does") {
    direct.request(kAdmin, request(1), now);
    CHECK(contains(failure(1), "cordoned by an operator"));
    CHECK(direct.leases().empty());
  }
  SECTION("it does not: who waits is served") {
    disk->full = true;
    direct.request(kAdmin, request(1, 60'000), now);
    CHECK(direct.leases().empty());
    while (store->deliver()) {
    }
    CHECK(contains(why, "full"));
    CHECK(direct.leases().size() == 1);
  }
}

TEST_CASE_METHOD(DiskFixture, "a cordon that the disk has although it said otherwise is lifted, too") {
  joinAndBeat(server("a", 1));
  std::string why;
  const auto tell = [&](const std::string& text) { why = text; };
  disk->unsure = true;
  pool->cordon(kAdmin, "a", {}, tell);
  CHECK(contains(why, "I/O error"));
  disk->unsure = false;
  SECTION("by uncordon") {
    pool->uncordon(kAdmin, "a", tell);
    restart();
    CHECK(pool->cordons().empty());
  }
  SECTION("which a manager that was started again needs") {
    restart();
    CHECK(pool->cordons().size() == 1);
    pool->uncordon(kAdmin, "a", tell);  // the server is away
    CHECK(pool->cordons().empty());
    CHECK(contains(thrown([&] { pool->uncordon(kAdmin, "a", tell); }), "there is no server a"));
  }
}

TEST_CASE_METHOD(Fixture, "who waits for a cordoned server holds back nobody") {
  joinAndBeat(server("a", 1, 2));
  joinAndBeat(server("b", 2));
  pool->cordon(kAdmin, "a", {}, [](const std::string&) {});
  LeaseRequest there = request(1, 60'000);
  there.server = "a";
  pool->request(kAdmin, there, now);
  pool->request(kAdmin, request(2, 60'000, 0, 2), now);  // only a has two
  CHECK(leaseNow(3).server.name == "b");
  CHECK_FALSE(has(1));
  pool->request(kAdmin, request(4), now);
  CHECK(contains(failure(4), "is held by holder3"));
  CHECK_FALSE(contains(failure(4), "waiting"));
  pool->uncordon(kAdmin, "a", [](const std::string&) {});
  pool->granted({1, 1}, now);
  CHECK(has(1));
}

TEST_CASE("what an earlier version has stored of a cordon is its reason") {
  CHECK(decodeCordon("a new fan").reason == "a new fan");
  CHECK(decodeCordon("").reason.empty());
  const Cordon cordon = decodeCordon(encodeCordon({"why", "who", 12}));
  CHECK(cordon.reason == "why");
  CHECK(cordon.by == "who");
  CHECK(cordon.sinceS == 12);
  CHECK(decodeCordon(encodeCordon({"", "", 0})).reason.empty());
  CHECK(decodeCordon("x\nwho\nwhy").sinceS == 0);
}
