// Leases over REST: made, kept, waited for, and what else is asked about requests.
#include "rest_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

struct Leases : RestFixture {
  Leases() : server(io, "a", 1, folder.path + "/server") {
    server.join(address);
    await(server.joined());
  }
  static std::string key(const std::string& text) { return "Idempotency-Key: " + text + "\r\n"; }
  bool becomesActive(const Reply& lease) {
    for (int i = 0; i < 500; ++i) {
      if (get(path(lease)).json.value("state", "") == "active") return true;
      pause(10);
    }
    return false;
  }
  static std::string path(const Reply& lease) { return "/v1/leases/" + lease.json.value("id", "none"); }
  FakeServer server;
};

}  // namespace

TEST_CASE_METHOD(Leases, "a lease is made over REST, renewed and released") {
  const Reply made = post("/v1/leases", R"({"reason": "nightly", "unusedMs": 60000})");
  CHECK(made.status == 200);
  CHECK(made.json["state"] == "active");
  CHECK(made.json["server"] == "a");
  CHECK(made.json["ttlMs"] == 60'000);
  CHECK(made.json["reason"] == "nightly");
  CHECK(get(path(made)).json["id"] == made.json["id"]);
  pass(50'000);
  const Reply renewed = post(path(made) + "/renew");
  CHECK(renewed.status == 200);
  CHECK(renewed.json["ttlMs"] == 60'000);
  pass(50'000);
  CHECK(get(path(made)).json["state"] == "active");
  CHECK(post(path(made) + "/release").json["state"] == "ended");
  CHECK(post(path(made) + "/renew").code() == "lease_ended");
  CHECK(server.leases.empty());
}

TEST_CASE_METHOD(Leases, "one that nobody renews ends") {
  const Reply made = post("/v1/leases", R"({"unusedMs": 5000})");
  REQUIRE(made.status == 200);
  pass(10'000);
  CHECK(get(path(made)).code() == "lease_ended");
}

TEST_CASE_METHOD(Leases, "the same Idempotency-Key is the same lease, and another wish with it a mistake") {
  const Reply first = post("/v1/leases", "{}", key("nightly-1"));
  REQUIRE(first.status == 200);
  CHECK(post("/v1/leases", "{}", key("nightly-1")).json["id"] == first.json["id"]);
  for (const char* other :
       {R"({"devices": 2})", R"({"memoryBytes": 1073741824})", R"({"server": "a"})", R"({"reason": "x"})",
        R"({"spread": true})", R"({"unusedMs": 60000})", R"({"waitMs": 5})", R"({"answerMs": 5})"}) {
    const Reply refused = post("/v1/leases", other, key("nightly-1"));
    CHECK(refused.status == 422);
    CHECK(refused.code() == "key_reused");
    CHECK(contains(refused.json["error"]["hint"], first.json["id"]));
  }
  CHECK(post("/v1/leases", "{}", key("nightly-2")).code() == "no_room");
  CHECK(post("/v1/leases", "{}", key("a b")).code() == "bad_key");
  CHECK(post("/v1/leases", "{}", key(std::string(65, 'k'))).code() == "bad_key");
  post(path(first) + "/release");
  const Reply over = post("/v1/leases", "{}", key("nightly-1"));
  CHECK(over.code() == "refused");
  CHECK(contains(over.json["error"]["message"], "has ended"));
}

TEST_CASE_METHOD(Leases,
                 "of a key, another body is refused also while the lease waits, or in another order") {
  post("/v1/leases");
  const Reply waits =
      post("/v1/leases", R"({"waitMs": 60000, "answerMs": 0, "reason": "next"})", key("nightly-3"));
  REQUIRE(waits.status == 202);
  const Reply again =
      post("/v1/leases", R"({"reason": "next", "answerMs": 0, "waitMs": 60000})", key("nightly-3"));
  CHECK(again.status == 202);
  CHECK(again.json["id"] == waits.json["id"]);
  const Reply other =
      post("/v1/leases", R"({"waitMs": 60000, "answerMs": 0, "reason": "else"})", key("nightly-3"));
  CHECK(other.status == 422);
  CHECK(other.code() == "key_reused");
  CHECK(get(path(waits)).json["reason"] == "next");
}

TEST_CASE_METHOD(Leases, "who waits has a position in the queue, and is served in turn") {
  const Reply first = post("/v1/leases");
  REQUIRE(first.status == 200);
  const std::string waits = R"({"waitMs": 60000, "answerMs": 0, "reason": "next"})";
  const Reply second = post("/v1/leases", waits);
  CHECK(second.status == 202);
  CHECK(second.json["state"] == "queued");
  CHECK(second.json["position"] == 1);
  const Reply third = post("/v1/leases", waits);
  CHECK(third.json["position"] == 2);
  const Reply urgent = post("/v1/leases", R"({"waitMs": 60000, "answerMs": 0, "priority": "high"})");
  CHECK(urgent.json["position"] == 1);
  const Reply queue = get("/v1/queue");
  REQUIRE(queue.json["queue"].size() == 3);
  CHECK(queue.json["queue"][0]["id"] == urgent.json["id"]);
  CHECK(queue.json["queue"][1]["reason"] == "next");
  CHECK(get(path(third)).json["position"] == 3);
  CHECK(post(path(third) + "/suspend").code() == "queued");

  CHECK(post(path(third) + "/release").json["state"] == "ended");  // it waits no more
  CHECK(get(path(third)).code() == "lease_unserved");
  post(path(first) + "/release");
  CHECK(becomesActive(urgent));
  CHECK(get(path(second)).json["position"] == 1);
  post(path(urgent) + "/release");
  CHECK(becomesActive(second));
}

TEST_CASE_METHOD(Leases, "who waits too long is told so, also when it looks later") {
  post("/v1/leases");
  const Reply waits = post("/v1/leases", R"({"waitMs": 5000, "answerMs": 0})");
  REQUIRE(waits.status == 202);
  pass(10'000);
  const Reply late = get(path(waits));
  CHECK(late.status == 404);
  CHECK(late.code() == "lease_unserved");
  CHECK(contains(late.json["error"]["message"], "none is free"));
}

TEST_CASE_METHOD(Leases, "requests are explained, and what has happened is told") {
  CHECK(get("/v1/explain").json["outlook"] == "now");
  CHECK(get("/v1/explain?devices=2&spread=true").json["outlook"] == "never");
  CHECK(get("/v1/explain?spread=maybe").code() == "bad_parameter");
  CHECK(get("/v1/explain?priority=urgent").code() == "bad_field");
  const Reply made = post("/v1/leases");
  const Reply taken = get("/v1/explain");
  CHECK(taken.json["outlook"] == "devices");
  CHECK(taken.json["servers"][0]["devices"][0]["fits"] == false);
  const Reply audit = get("/v1/audit?lease=" + made.json["id"].get<std::string>());
  REQUIRE(audit.json["entries"].size() == 1);
  CHECK(audit.json["entries"][0]["event"] == "granted");
  CHECK(audit.json["more"] == false);
  const std::string after = std::to_string(audit.json["entries"][0]["number"].get<uint64_t>());
  CHECK(get("/v1/audit?after=" + after).json["entries"].empty());
}

TEST_CASE_METHOD(Leases, "a server is drained: what can be moved moves, and the rest is named") {
  auto holder = connect();
  await(lease(*holder, wish()));
  const Reply alone = post("/v1/servers/a/drain", R"({"reason": "a new fan"})");
  CHECK(alone.json["cordoned"] == true);
  CHECK(alone.json["drained"] == false);
  Reply again;
  for (int i = 0; i < 200 && (again.json.is_null() || again.json["leases"][0]["note"] == ""); ++i) {
    pause(10);
    again = post("/v1/servers/a/drain", R"({"stay": true})");
  }
  CHECK(contains(again.json["leases"][0]["note"], "there is no other server"));
  FakeServer other(io, "b", 1, folder.path + "/other");
  other.join(address);
  await(other.joined());
  Reply moved;
  for (int i = 0; i < 500 && (moved.json.is_null() || moved.json["drained"] != true); ++i) {
    pause(10);
    moved = post("/v1/servers/a/drain");
  }
  CHECK(moved.json["drained"] == true);
  CHECK(moved.status == 200);
  CHECK(get("/v1/leases").json["leases"][0]["server"] == "b");
  CHECK(post("/v1/servers/nowhere/drain").code() == "server_unknown");
}

TEST_CASE_METHOD(Leases, "files of sessions need a folder") {
  const Reply made = post("/v1/leases");
  for (const char* order : {"/checkpoint", "/hold", "/restore"}) {
    CHECK(post(path(made) + order).code() == "bad_field");
    CHECK(post(std::string("/v1/leases/") + std::string(32, '0') + order, R"({"folder": "monday"})").status ==
          404);
  }
  const char* monday = R"({"folder": "monday"})";
  server.refuseResume = "calls were sent since";
  CHECK(post(path(made) + "/restore", monday).code() == "refused");  // by its server: it runs
  server.refuseResume.clear();
  CHECK(post(path(made) + "/restore", monday).status == 200);
}

TEST_CASE("of others' requests only their place in the queue is told") {
  struct WithTokens : RestFixture {
    WithTokens() {
      service->demandTokens([this]() -> const Tokens& { return tokens; });
    }
    Tokens tokens{{"alice", kAlice}, {"bob", kBob}, {kServersTenant, kServersToken}};
  } pool;
  FakeServer server(pool.io, "a", 1, pool.folder.path + "/server");
  server.join(pool.address);
  pool.await(server.joined());
  const auto bearer = [](const std::string& token) { return "Authorization: Bearer " + token + "\r\n"; };
  const Reply alices = pool.post("/v1/leases", R"({"reason": "secret"})", bearer(kAlice));
  REQUIRE(alices.status == 200);
  CHECK(alices.json["tenant"] == "alice");
  const Reply waits =
      pool.post("/v1/leases", R"({"waitMs": 60000, "answerMs": 0, "reason": "secret"})", bearer(kAlice));
  REQUIRE(waits.status == 202);
  const Reply bobs = pool.get("/v1/queue", bearer(kBob));
  REQUIRE(bobs.json["queue"].size() == 1);
  CHECK(bobs.json["queue"][0]["holder"] == "in use");
  CHECK(bobs.text.find("secret") == std::string::npos);
  CHECK(bobs.text.find("alice") == std::string::npos);
  const std::string path = "/v1/leases/" + alices.json["id"].get<std::string>();
  CHECK(pool.post(path + "/renew", "", bearer(kBob)).code() == "forbidden");
  CHECK(
      pool.post("/v1/leases/" + waits.json["id"].get<std::string>() + "/release", "", bearer(kBob)).status ==
      409);
  CHECK(pool.post("/v1/leases", R"({"tenant": "alice"})", bearer(kBob)).code() == "refused");
  CHECK(pool.post("/v1/servers/a/drain", "", bearer(kBob)).code() == "operators_only");
}
