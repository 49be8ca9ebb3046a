// The REST interface in process: what it shows and does, who may, and what it refuses.
#include "rest_fixture.h"

#include <vector>

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

using Fixture = RestFixture;

// Peers that are slow are given up soon.
struct Hurried : RestFixture {
  Hurried() : RestFixture(limits()) {}
  static rest::HttpLimits limits() {
    rest::HttpLimits limits;
    limits.request = 300 * kj::MILLISECONDS;
    limits.idle = 300 * kj::MILLISECONDS;
    return limits;
  }
};

std::string bearer(const std::string& token) { return "Authorization: Bearer " + token + "\r\n"; }

// Its connections are strangers', who need a token.
struct WithTokens : RestFixture {
  WithTokens() {
    service->demandTokens([this]() -> const Tokens& { return tokens; });
  }
  Tokens tokens{{"alice", kAlice}, {"bob", kBob}, {kServersTenant, kServersToken}};
};

std::string metric(const Reply& reply, const std::string& series) {
  const size_t at = reply.text.find("\n" + series + " ");
  if (at == std::string::npos) return "";
  const size_t value = at + series.size() + 2;
  return reply.text.substr(value, reply.text.find('\n', value) - value);
}

}  // namespace

TEST_CASE_METHOD(Fixture, "what the pool has is listed, a page at a time") {
  FakeServer server(io, "a", 3, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  for (int i = 0; i < 3; ++i) await(lease(*holder, wish()));

  const Reply devices = get("/v1/devices");
  CHECK(devices.status == 200);
  CHECK(devices.headers.at("Content-Type") == "application/json");
  REQUIRE(devices.json["devices"].size() == 3);
  CHECK(devices.json["devices"][0]["server"] == "a");
  CHECK(devices.json["devices"][0]["leases"].size() == 1);
  CHECK(devices.json["devices"][0]["freeBytes"] == 0);
  CHECK(get("/v1/servers").json["servers"][0]["alive"] == true);

  const Reply first = get("/v1/leases?limit=2");
  REQUIRE(first.json["leases"].size() == 2);
  const std::string next = first.json["nextCursor"];
  CHECK(first.json["leases"][1]["id"] == next);
  const Reply second = get("/v1/leases?limit=2&cursor=" + next);
  REQUIRE(second.json["leases"].size() == 1);
  CHECK(!second.json.contains("nextCursor"));
  CHECK(second.json["leases"][0]["id"] > next);
  CHECK(get("/v1/leases?limit=3").json.contains("nextCursor") == false);  // there is nothing behind
  CHECK(get("/v1/leases?state=active&server=a").json["leases"].size() == 3);
  CHECK(get("/v1/leases?state=suspended").json["leases"].empty());
  CHECK(get("/v1/leases?server=b").json["leases"].empty());
  const std::string id = second.json["leases"][0]["id"];
  CHECK(get("/v1/leases/" + id).json["holder"] == "tester");
  CHECK(second.text.find("key") == std::string::npos);
}

TEST_CASE_METHOD(Fixture, "a request that says something unknown or wrong is refused with a code") {
  const auto check = [](const Reply& reply, unsigned status, const std::string& code) {
    CHECK(reply.status == status);
    CHECK(reply.code() == code);
  };
  check(get("/v1/nothing"), 404, "not_found");
  check(get("/v1/leases/"), 404, "not_found");
  check(get("/v1/leases/" + std::string(32, '0')), 404, "lease_unknown");
  check(get("/v1/leases/1"), 404, "lease_unknown");
  check(get("/v1/leases?limit=0"), 400, "bad_parameter");
  check(get("/v1/leases?limit=1001"), 400, "bad_parameter");
  check(get("/v1/leases?limit=-1"), 400, "bad_parameter");
  check(get("/v1/leases?limit=1&limit=2"), 400, "bad_parameter");
  check(get("/v1/leases?state=gone"), 400, "bad_parameter");
  check(get("/v1/leases?cursor=x"), 400, "bad_parameter");
  check(get("/v1/leases?colour=red"), 400, "unknown_parameter");
  check(get("/v1/leases?server=%zz"), 400, "bad_address");
  check(get("/v1/leases?server=%0a"), 400, "bad_address");
  check(get("/" + std::string(5000, 'x')), 414, "url_too_long");
  check(post("/v1/servers/a/cordon", "[1]"), 400, "bad_json");
  check(post("/v1/servers/a/cordon", "{"), 400, "bad_json");
  const Reply twice = post("/v1/servers/a/cordon", R"({"reason": "a", "by": "b", "reason": "c"})");
  check(twice, 400, "bad_json");
  CHECK(contains(twice.json["error"]["message"], "'reason' twice"));
  check(post("/v1/leases", R"({"colour": {"red": 1, "red": 2}})"), 400, "bad_json");
  check(get("/v1/audit?lease=zz"), 400, "bad_parameter");
  check(get("/v1/audit?lease=" + std::string(33, 'a')), 400, "bad_parameter");
  CHECK(get("/v1/audit?lease=0123abcd").json["entries"].empty());  // unknown
  const std::string most(200, 'r'), tenant(64, 't');
  for (const char* path : {"/v1/leases", "/v1/explain"}) {
    const bool posts = std::string(path) == "/v1/leases";
    const auto say = [&](const std::string& name, const std::string& json, const std::string& query) {
      return posts ? post(path, "{\"" + name + "\": " + json + "}") : get(path + ("?" + name + "=" + query));
    };
    const Reply filter = say("gpu", R"("memory>>1")", "memory%3E%3E1");
    check(filter, 400, "bad_field");
    CHECK(contains(filter.json["error"]["message"], "'gpu': 'memory>>1': a condition has >= or <="));
    const Reply little = say("memoryBytes", "1", "1");
    check(little, 400, "bad_field");
    CHECK(contains(little.json["error"]["message"], "1 MiB"));
    check(say("reason", "\"" + most + "r\"", most + "r"), 400, "bad_parameter");
    check(say("tenant", "\"" + tenant + "t\"", tenant + "t"), 400, "bad_parameter");
  }
  check(post("/v1/servers/a/cordon", "{\"reason\": \"" + most + "r\"}"), 400, "bad_parameter");
  const Reply member = post("/v1/servers/a/cordon", R"({"colour": 1})");
  check(member, 400, "unknown_field");
  CHECK(contains(member.json["error"]["message"], "'colour'"));
  CHECK(contains(get("/v1/leases?colour=red").json["error"]["message"], "'colour'"));
  check(post("/v1/servers/a/cordon", R"({"reason": 1})"), 400, "bad_field");
  check(post("/v1/servers/a/cordon"), 404, "server_unknown");
  const Reply wrongMethod = post("/v1/devices");
  check(wrongMethod, 405, "method_not_allowed");
  CHECK(wrongMethod.headers.at("Allow") == "GET, HEAD");
  CHECK(ask("GET", "/v1/health", "", "X-Request-Id: mine-7\r\n").headers.at("X-Request-Id") == "mine-7");
  CHECK(ask("GET", "/v1/health", "", "X-Request-Id: a b\r\n").headers.at("X-Request-Id").size() == 32);
}

TEST_CASE_METHOD(Fixture, "a request whose end is not certain is refused, and nothing behind it is read") {
  const auto send = [&](const std::string& headers) {
    const std::string all =
        exchange("POST /v1/servers/a/cordon HTTP/1.1\r\nHost: 127.0.0.1\r\n" + headers +
                 "\r\n10000000000000002\r\n{}\r\n0\r\n\r\nGET /v1/health HTTP/1.1\r\n\r\n");
    CHECK(all.find("HTTP/1.1 2") == std::string::npos);  // one answer
    CHECK(all.find("Connection: close") != std::string::npos);
    CHECK(all.find(".c++") == std::string::npos);
    return parse(all);
  };
  CHECK(send("Content-Length: -1\r\n").code() == "bad_framing");
  CHECK(send("Content-Length: +2\r\n").code() == "bad_framing");
  CHECK(send("Content-Length: 2\r\nContent-Length: 2\r\n").code() == "bad_framing");
  CHECK(send("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n").code() == "bad_framing");
  CHECK(send("Transfer-Encoding: gzip\r\n").code() == "bad_framing");
  CHECK(send("Transfer-Encoding: chunked\r\n").status == 411);
  CHECK(send("Content-Length: 65537\r\n").status == 413);
  CHECK(send("Content-Length: 18446744073709551617\r\n").status == 413);
  CHECK(send("Nonsense\r\n").status == 400);
  CHECK(parse(exchange("BREW / HTTP/1.1\r\n\r\n")).code() == "method_unknown");
}

TEST_CASE_METHOD(Hurried, "silent and half-open peers are sent away, and cost others nothing meanwhile") {
  std::vector<kj::Own<kj::AsyncIoStream>> silent;
  const std::string half = "POST /v1/servers/a/cordon HTTP/1.1\r\nContent-Length: 10\r\n\r\n{";
  for (int i = 0; i < 64; ++i) {
    silent.push_back(dial());
    const size_t part = i % 3 == 0 ? 0 : i % 3 == 1 ? 20 : half.size();
    if (part != 0) silent.back()->write(half.data(), part).wait(io.waitScope);
  }
  CHECK(get("/v1/health").status == 200);
  for (auto& stream : silent) await(stream->readAllText());  // ends
  CHECK(get("/v1/health").status == 200);
}

TEST_CASE_METHOD(Fixture, "leases are suspended, resumed, moved and released; each may be repeated") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  const Lease got = await(lease(*holder, wish()));
  const std::string path = "/v1/leases/" + got.id.text();
  for (int twice = 0; twice < 2; ++twice) {
    const Reply reply = post(path + "/suspend", R"({"drainMs": 5000})");
    CHECK(reply.status == 200);
    CHECK(reply.json["state"] == "suspended");
  }
  CHECK(server.drains == std::vector<uint32_t>{5000});
  for (int twice = 0; twice < 2; ++twice) CHECK(post(path + "/resume").json["state"] == "active");
  CHECK(post(path + "/migrate").json["place"] == "a GPU 0");
  CHECK(server.migrations.size() == 1);
  CHECK(post(path + "/migrate", R"({"server": "b"})").code() == "refused");
  CHECK(post(path + "/migrate", R"({"devices": [64]})").code() == "bad_field");
  server.refuseSuspend = "the driver does not answer";
  const Reply refused = post(path + "/suspend");
  CHECK(refused.status == 409);
  CHECK(contains(refused.json["error"]["message"], "the driver does not answer"));
  for (int twice = 0; twice < 2; ++twice) {
    const Reply reply = post(path + "/release");
    CHECK(reply.status == 200);
    CHECK(reply.json["state"] == "ended");
    CHECK(reply.json["reason"] == "somebody has released it (gpupool release)");
  }
  CHECK(server.leases.empty());
  CHECK(get(path).code() == "lease_ended");
  CHECK(post(path + "/suspend").code() == "lease_ended");
}

TEST_CASE_METHOD(Fixture, "a server is cordoned and put back") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  CHECK(post("/v1/servers/a/cordon", R"({"reason": "a new fan", "by": "eve"})").json["cordoned"] == true);
  const auto& cordons = service->pool().cordons();
  REQUIRE(cordons.contains("a"));
  CHECK(cordons.at("a").reason == "a new fan");
  const std::string by = "the operator (says: eve, REST, from 127.0.0.1)";  // who it was is not eve's to say
  CHECK(cordons.at("a").by == by);
  CHECK(get("/v1/audit").json["entries"].back()["by"] == by);
  CHECK(get("/v1/servers").json["servers"][0]["cordonReason"] == "a new fan");
  // However much he says, where it came from is told behind it.
  CHECK(post("/v1/servers/a/cordon", R"({"reason": "again", "by": ")" + std::string(150, 'e') + R"("})")
            .json["cordoned"] == true);
  CHECK(cordons.at("a").by.ends_with("e, REST, from 127.0.0.1)"));
  CHECK(get("/v1/audit").json["entries"].back()["by"] == cordons.at("a").by);
  for (int twice = 0; twice < 2; ++twice) CHECK(post("/v1/servers/a/uncordon").json["cordoned"] == false);
  CHECK(cordons.empty());
}

TEST_CASE_METHOD(WithTokens, "a token says who asks, and what he sees and may") {
  FakeServer server(io, "a", 2, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();  // the manager's own user
  LeaseRequest request = wish();
  request.tenant = "alice";
  const Lease got = await(lease(*holder, request));
  const std::string path = "/v1/leases/" + got.id.text();

  const Reply none = get("/v1/leases");
  CHECK(none.status == 401);
  CHECK(none.code() == "token_missing");
  CHECK(none.headers.contains("WWW-Authenticate"));
  CHECK(get("/v1/leases", "Authorization: Basic " + kAlice + "\r\n").code() == "token_missing");
  CHECK(get("/v1/leases", bearer(kAlice + "x")).code() == "token_wrong");
  CHECK(get("/v1/health").status == 200);
  CHECK(get("/v1/openapi.json").status == 200);
  CHECK(get("/metrics").status == 401);

  CHECK(get(path, bearer(kAlice)).json["holder"] == "tester");
  const Reply masked = get(path, bearer(kBob));
  CHECK(masked.json["holder"] == "in use");
  CHECK(masked.json["tenant"] == "");
  CHECK(masked.text.find("alice") == std::string::npos);
  CHECK(post(path + "/release", "", bearer(kBob)).code() == "forbidden");
  CHECK(post(path + "/release", "", bearer(kServersToken)).status == 403);
  CHECK(post("/v1/servers/a/cordon", "", bearer(kAlice)).code() == "operators_only");
  CHECK(metric(get("/metrics", bearer(kBob)), R"(gpupool_leases{state="active",tenant="other"})") == "1");
  CHECK(metric(get("/metrics", bearer(kAlice)), R"(gpupool_leases{state="active",tenant="alice"})") == "1");
  const Id counted = service->pool().leases().begin()->first;
  service->pool().setCounts("a", {{counted, 5, 0, 0, 0, -1}}, now);
  CHECK(contains(get("/metrics", bearer(kAlice)).text, "\ngpupool_lease_calls_total{"));
  CHECK(!contains(get("/metrics", bearer(kBob)).text, "\ngpupool_lease_calls_total{"));
  CHECK(post(path + "/release", "", bearer(kAlice)).status == 200);

  tokens["carol"] = kBob;
  CHECK(get("/v1/leases", bearer(kBob)).code() == "token_ambiguous");
  unsigned wrong = 0;
  while (wrong < 20 && get("/v1/leases", bearer(std::string(32, 'x'))).status == 401) ++wrong;
  CHECK(wrong < 20);
  CHECK(get("/v1/leases", bearer(kAlice)).status == 429);  // the same address: nothing is tried any more
}

TEST_CASE_METHOD(Fixture, "a web page in somebody's browser may not use the pool") {
  CHECK(get("/v1/health", "Origin: http://evil.example\r\n").code() == "cross_origin");
  CHECK(get("/v1/health", "Origin: http://127.0.0.1\r\n").status == 200);
  CHECK(
      parse(exchange("GET /v1/health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")).code() ==
      "host_not_allowed");
  CHECK(parse(exchange("GET /v1/health HTTP/1.1\r\nHost: localhost:1\r\nConnection: close\r\n\r\n")).status ==
        200);
  CHECK(parse(exchange("GET /v1/health HTTP/1.1\r\nHost: [::1]:1\r\nConnection: close\r\n\r\n")).status ==
        200);
}

TEST_CASE_METHOD(Fixture, "events tell what becomes of leases and servers, and when some were missed") {
  const auto open = [&](const std::string& headers) {
    auto stream = dial();
    const std::string request = "GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n" + headers + "\r\n";
    stream->write(request.data(), request.size()).wait(io.waitScope);
    return stream;
  };
  // What comes until `part` has come.
  const auto readUntil = [&](kj::AsyncIoStream& stream, const std::string& part) {
    std::string all;
    char bytes[4096];
    while (!contains(all, part)) {
      const size_t size = await(stream.tryRead(bytes, 1, sizeof bytes));
      REQUIRE(size != 0);
      all.append(bytes, size);
    }
    return all;
  };
  auto reader = open("");
  CHECK(contains(readUntil(*reader, "retry:"), "Content-Type: text/event-stream"));
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  readUntil(*reader, R"(event: server
data: {"name":"a","state":"alive","was":""})");
  auto holder = connect();
  const Lease got = await(lease(*holder, wish()));
  const std::string news = readUntil(*reader, R"("state":"active")");
  CHECK(contains(news, "event: lease\ndata: {\"holder\":\"tester\",\"id\":\"" + got.id.text()));
  await(release(*holder, got.id));
  const std::string end = readUntil(*reader, R"("state":"ended")");
  CHECK(contains(end, R"("reason":"released")"));

  // Who comes back is told what he has missed, or that it is not known any more.
  const size_t at = news.find("id: ") + 4;
  const std::string last = news.substr(at, news.find('\n', at) - at);
  readUntil(*open("Last-Event-ID: " + last + "\r\n"), R"("state":"ended")");
  readUntil(*open("Last-Event-ID: another-1\r\n"), "event: gap");
  CHECK(ask("HEAD", "/v1/events").status == 200);
}

TEST_CASE("what a store says of itself stays with the manager") {
  const auto problem =
      rest::toProblem(rpcError(kj::Exception::Type::OVERLOADED, "not stored: /var/x is full"));
  CHECK(problem.status == 503);
  CHECK(problem.code == "store_failed");
  CHECK(!contains(problem.message, "/var/x"));
  const auto suspended = rest::toProblem(
      rpcError(kj::Exception::Type::FAILED,
               "it is suspended, but not free before the manager can write its store: /var/x"));
  CHECK(suspended.code == "store_failed");
  CHECK(suspended.message == "it is suspended, but not free before the manager can write its store");
  const kj::Exception own(kj::Exception::Type::FAILED, "source.c++", 7, kj::heapString("expected x"));
  CHECK(rest::toProblem(own).code == "unavailable");
  CHECK(!contains(rest::toProblem(own).message, "expected"));
}

TEST_CASE_METHOD(Fixture,
                 "metrics tell what the programs of a lease have done, over restarts of its server") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  LeaseRequest asks = wish();
  asks.tenant = "alice";
  const Lease got = await(lease(*holder, asks));
  const std::string labels = R"({lease=")" + got.id.text() + R"(",tenant="alice"})";
  CHECK(!contains(get("/metrics").text, "\ngpupool_lease_calls_total{"));  // its server has said nothing yet
  const auto counts = [&](const LeaseCounts& said) { service->pool().setCounts("a", {said}, now); };
  counts({got.id, 100, 10, 4096, 64, 2500});
  counts({got.id, 150, 12, 8192, 64, 3000});
  counts({{7, 7}, 9, 9, 9, 9, 9});  // nobody's
  Reply reply = get("/metrics");
  CHECK(metric(reply, "gpupool_lease_calls_total" + labels) == "150");
  CHECK(metric(reply, "gpupool_lease_awaited_calls_total" + labels) == "12");
  CHECK(metric(reply, "gpupool_lease_copied_to_device_bytes_total" + labels) == "8192");
  CHECK(metric(reply, "gpupool_lease_copied_from_device_bytes_total" + labels) == "64");
  CHECK(metric(reply, "gpupool_lease_checkpoint_age_seconds" + labels) == "3");
  CHECK(metric(reply, "gpupool_leases_without_series") == "0");
  CHECK(!contains(reply.text, "lease=\"0000000000000007"));
  now += 1000;
  counts({got.id, 5, 1, 1, 0, -1});                                    // it counts from 0 again
  service->pool().setCounts("b", {{got.id, 1000, 0, 0, 0, -1}}, now);  // the lease is not there
  reply = get("/metrics");
  CHECK(metric(reply, "gpupool_lease_calls_total" + labels) == "155");
  CHECK(metric(reply, "gpupool_lease_awaited_calls_total" + labels) == "13");
  CHECK(!contains(reply.text, "\ngpupool_lease_checkpoint_age_seconds{"));
}

TEST_CASE_METHOD(Fixture, "metrics count leases, waits, grants and missed beats") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  LeaseRequest strange = wish();
  strange.tenant = "a\"\xff";
  const Lease got = await(lease(*holder, strange));
  const Reply reply = get("/metrics");
  CHECK(reply.headers.at("Content-Type") == "text/plain; version=0.0.4; charset=utf-8");
  CHECK(metric(reply, R"(gpupool_leases{state="active",tenant="a\")"
                      "\xef\xbf\xbd\"}") == "1");  // as UTF-8, whatever is asked for
  CHECK(metric(reply, "gpupool_lease_wait_seconds_count") == "1");
  CHECK(metric(reply, R"(gpupool_lease_wait_seconds_bucket{le="+Inf"})") == "1");
  CHECK(metric(reply, "gpupool_grant_seconds_count") == "1");
  CHECK(!metric(reply, "gpupool_manager_delay_seconds_count").empty());
  CHECK(metric(reply, "gpupool_lease_requests_waiting") == "0");
  CHECK(metric(reply, R"(gpupool_servers{state="alive"})") == "1");
  const std::string name = R"({server="a"})";
  CHECK(metric(reply, "gpupool_server_missed_beats_total" + name) == "0");
  CHECK(contains(reply.text, R"(gpu="0",UUID="GPU-)"));
  CHECK(!contains(reply.text, "\nDCGM_FI_DEV_GPU_UTIL{"));
  DeviceSample sample;
  sample.gpuPercent = 37;
  sample.powerMw = 300'400;
  sample.nvlinks = 18;
  service->pool().setSamples("a", {sample}, now);
  const Reply sampled = get("/metrics");
  const size_t labels = sampled.text.find("\nDCGM_FI_DEV_GPU_UTIL{") + 1;
  const std::string load = sampled.text.substr(labels, sampled.text.find('\n', labels) - labels);
  CHECK(load.ends_with(R"(",modelName="Fake GPU",Hostname="a"} 37)"));
  CHECK(contains(sampled.text, "\"} 300.4\n"));
  const size_t links = sampled.text.find("\ngpupool_device_nvlinks_up{") + 1;
  CHECK(sampled.text.substr(links, sampled.text.find('\n', links) - links).ends_with("Hostname=\"a\"} 18"));
  CHECK(!contains(sampled.text, "\nDCGM_FI_DEV_GPU_TEMP{"));  // not told
  now += 400;                                                 // four beats
  await(server.beatNow());
  CHECK(metric(get("/metrics"), "gpupool_server_missed_beats_total" + name) != "0");
}

namespace {

// A service whose store has the tokens of an operator and of alice.
struct WithMade : RestFixture {
  WithMade() : admin(make("operator", Role::admin)), alice(make("alice", Role::user)) {}
  std::string make(const std::string& tenant, Role role) {
    std::string text;
    service->tokens().create({tenant, "one", role}, "test",
                             [&](const MadeToken& token, const std::string&) { text = token.text; });
    for (int i = 0; i < 1000 && text.empty(); ++i)
      io.provider->getTimer().afterDelay(1 * kj::MILLISECONDS).wait(io.waitScope);
    return text;
  }
  std::string admin, alice;
};

}  // namespace

TEST_CASE_METHOD(WithMade, "operators make, list and revoke tokens; each is shown once") {
  CHECK(get("/v1/tokens").code() == "token_missing");
  CHECK(get("/v1/tokens", bearer(alice)).code() == "operators_only");
  CHECK(post("/v1/tokens", R"({"tenant": "eve", "name": "x", "role": "operator"})", bearer(alice)).status ==
        403);
  CHECK(post("/v1/tokens", R"({"tenant": "bob"})", bearer(admin)).code() == "bad_field");
  CHECK(post("/v1/tokens", R"({"tenant": "bob", "name": "x", "role": "king"})", bearer(admin)).code() ==
        "bad_field");
  const Reply made = post("/v1/tokens", R"({"tenant": "bob", "name": "x", "expiresInS": 60})", bearer(admin));
  REQUIRE(made.status == 200);
  const std::string bob = made.json["token"], id = made.json["id"];
  CHECK(made.json["role"] == "user");
  CHECK(made.json["expiresS"] == made.json["createdS"].get<uint64_t>() + 60);
  CHECK(post("/v1/tokens", R"({"tenant": "bob", "name": "x"})", bearer(admin)).code() == "token_exists");
  const Reply list = get("/v1/tokens", bearer(admin));
  CHECK(list.json["tokens"].size() == 3);
  CHECK(list.text.find(bob.substr(21)) == std::string::npos);
  CHECK(list.text.find("\"token\"") == std::string::npos);

  CHECK(get("/v1/leases", bearer(bob)).status == 200);
  auto stream = dial();
  const std::string events = "GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n" + bearer(bob) + "\r\n";
  stream->write(events.data(), events.size()).wait(io.waitScope);
  CHECK(post("/v1/tokens/" + id + "/revoke", "", bearer(alice)).status == 403);
  for (int twice = 0; twice < 2; ++twice)
    CHECK(post("/v1/tokens/" + id + "/revoke", "", bearer(admin)).json["revokedS"] != 0);
  CHECK(get("/v1/leases", bearer(bob)).code() == "token_ended");
  // The stream ends, too.
  const kj::String told =
      io.provider->getTimer().timeoutAfter(20 * kj::SECONDS, stream->readAllText()).wait(io.waitScope);
  CHECK(std::string(told.cStr()).find("text/event-stream") != std::string::npos);
  CHECK(post("/v1/tokens/0123456789abcdef/revoke", "", bearer(admin)).code() == "token_unknown");
}

TEST_CASE_METHOD(WithMade, "operators set quotas, and others see their own") {
  const std::string body = R"({"milliDevices": 2000, "deviceSeconds": 3600, "per": "week"})";
  CHECK(post("/v1/quotas/alice", body, bearer(alice)).code() == "operators_only");
  for (int twice = 0; twice < 2; ++twice) {
    const Reply set = post("/v1/quotas/alice", body, bearer(admin));
    CHECK(set.status == 200);
    CHECK(set.json["milliDevices"] == 2000);
    CHECK(set.json["per"] == "week");
  }
  post("/v1/quotas/bob", R"({"memoryBytes": 1, "protectMs": 2000})", bearer(admin));
  CHECK(get("/v1/tenants/bob", bearer(admin)).json["quota"]["protectMs"] == 2000);
  CHECK(post("/v1/quotas/bob", R"({"protectMs": 999})", bearer(admin)).status == 409);
  CHECK(get("/v1/quotas", bearer(admin)).json["quotas"].size() == 2);
  const auto own = get("/v1/quotas", bearer(alice)).json["quotas"];
  REQUIRE(own.size() == 1);
  CHECK(own[0]["tenant"] == "alice");
  CHECK(own[0]["quota"]["deviceSeconds"] == 3600);
  CHECK(own[0]["milliDevices"] == 0);
  CHECK(post("/v1/quotas/alice", R"({"per": "year"})", bearer(admin)).code() == "bad_field");
  CHECK(post("/v1/quotas/alice", "{}", bearer(admin)).json["milliDevices"] == 0);
  CHECK(get("/v1/quotas", bearer(admin)).json["quotas"].size() == 1);
}

TEST_CASE_METHOD(WithMade, "operators see all tenants, and others their own") {
  post("/v1/quotas/bob", R"({"milliDevices": 500, "per": "day"})", bearer(admin));
  const auto all = get("/v1/tenants", bearer(admin)).json["tenants"];
  REQUIRE(all.size() == 3);
  CHECK(all[0]["tenant"] == "alice");
  CHECK(all[1]["tenant"] == "bob");
  CHECK(all[1]["tokens"] == 0);
  CHECK(all[1]["quota"]["milliDevices"] == 500);
  CHECK(all[2]["tenant"] == "operator");
  const auto own = get("/v1/tenants", bearer(alice)).json["tenants"];
  REQUIRE(own.size() == 1);
  CHECK(own[0]["tenant"] == "alice");
  CHECK(own[0]["tokens"] == 1);
  CHECK(own[0]["leases"] == nlohmann::json::object());
  CHECK(get("/v1/tenants/alice", bearer(alice)).json == own[0]);
  CHECK(get("/v1/tenants/bob", bearer(admin)).json == all[1]);

  // Whether there is another one is not told.
  const Reply others = get("/v1/tenants/bob", bearer(alice)), nobody = get("/v1/tenants/eve", bearer(alice));
  CHECK(others.status == 404);
  CHECK(others.code() == "tenant_unknown");
  CHECK(others.json == nobody.json);
  CHECK(get("/v1/tenants", bearer(make("servers", Role::server))).code() == "forbidden");
  CHECK(get("/v1/tenants").code() == "token_missing");
}
