// The web page as the manager serves it: addresses, headers, methods, and that it asks nobody but the
// manager. What it does in a browser: tests/manager/web_page.
#include "rest_fixture.h"

#include <regex>

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

const std::string& kToken = kAlice;

// Strangers need a token for what is not the page.
struct Closed : RestFixture {
  Closed() {
    service->demandTokens([this]() -> const Tokens& { return tokens; });
  }
  Tokens tokens{{"alice", kToken}, {kServersTenant, kServersToken}};
};

std::vector<std::string> found(const std::string& text, const std::string& pattern) {
  std::vector<std::string> all;
  const std::regex regex(pattern);
  for (std::sregex_iterator at(text.begin(), text.end(), regex), end; at != end; ++at)
    all.push_back((*at)[1]);
  return all;
}

// Every file of the page: those that it names, and those that these import.
std::map<std::string, Reply> wholePage(RestFixture& fixture) {
  std::map<std::string, Reply> files;
  std::vector<std::string> open{"/"};
  while (!open.empty()) {
    const std::string path = open.back();
    open.pop_back();
    if (files.contains(path)) continue;
    const Reply& reply = files[path] = fixture.get(path);
    for (const auto& one : found(reply.text, R"re((?:src|href)="(/[^"]*)")re")) open.push_back(one);
    for (const auto& one : found(reply.text, R"re(from "\./([^"]*)")re")) open.push_back("/web/" + one);
  }
  return files;
}

}  // namespace

TEST_CASE_METHOD(Closed, "the page needs no token, and may load nothing but its own files") {
  const auto files = wholePage(*this);
  CHECK(files.size() == 10);
  for (const auto& [path, reply] : files) {
    INFO(path);
    REQUIRE(reply.status == 200);
    CHECK(reply.headers.at("Content-Security-Policy").starts_with("default-src 'self';"));
    CHECK(reply.headers.at("Content-Security-Policy").find("unsafe") == std::string::npos);
    CHECK(reply.headers.at("X-Content-Type-Options") == "nosniff");
    CHECK(reply.headers.at("Referrer-Policy") == "no-referrer");
    CHECK(reply.headers.at("Cache-Control") == "no-cache");
    const std::string type = path == "/"              ? "text/html; charset=utf-8"
                             : path.ends_with(".css") ? "text/css; charset=utf-8"
                             : path.ends_with(".svg") ? "image/svg+xml"
                                                      : "text/javascript; charset=utf-8";
    CHECK(reply.headers.at("Content-Type") == type);
  }
  CHECK(get("/web/index.html").text == files.at("/").text);
  CHECK(get("/v1/leases").code() == "token_missing");
  CHECK(get("/v1/self").code() == "token_missing");
}

TEST_CASE_METHOD(RestFixture, "the page's files name no other host, and make no markup of text") {
  for (const auto& [path, reply] : wholePage(*this)) {
    INFO(path);
    std::string text = reply.text;
    const std::string name = "xmlns=\"http://www.w3.org/2000/svg\"";  // a name, which nobody fetches
    if (const size_t at = text.find(name); at != std::string::npos) text.erase(at, name.size());
    for (const char* part :
         {"http:", "https:", "url(", "@import", "innerHTML", "outerHTML", "insertAdjacentHTML",
          "document.write", "eval(", "new Function", "localStorage", "style=", "onclick="})
      CHECK(!contains(text, part));
    CHECK(found(text, R"re(((?:src|href)="//))re").empty());
    CHECK(found(text, R"re((<script(?![^>]* src=)))re").empty());
  }
}

TEST_CASE_METHOD(RestFixture, "a file that the browser has is not sent again; others may only GET and HEAD") {
  const Reply first = get("/web/app.js");
  const std::string tag = first.headers.at("ETag");
  CHECK(tag.size() == 34);
  CHECK(tag != get("/web/style.css").headers.at("ETag"));
  for (const std::string& known : {tag, "\"x\", W/" + tag, std::string("*")}) {
    const Reply again = get("/web/app.js", "If-None-Match: " + known + "\r\n");
    CHECK(again.status == 304);
    CHECK(again.text.empty());
    CHECK(again.headers.at("ETag") == tag);
  }
  CHECK(get("/web/app.js", "If-None-Match: \"x\"\r\n").text == first.text);
  // The connection lives on behind an answer without a body.
  const std::string both = exchange(
      "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nIf-None-Match: *\r\n\r\n"
      "GET /v1/health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
  CHECK(both.starts_with("HTTP/1.1 304 "));
  CHECK(contains(both, "{\"status\":\"ok\""));

  for (const char* path : {"/", "/web/app.js"}) {
    const Reply head = ask("HEAD", path);
    CHECK(head.status == 200);
    CHECK(head.text.empty());
    CHECK(head.headers.at("Content-Length") == std::to_string(get(path).text.size()));
    const Reply posted = post(path);
    CHECK(posted.code() == "method_not_allowed");
    CHECK(posted.headers.at("Allow") == "GET, HEAD");
  }
  for (const char* path :
       {"/web", "/web/", "/web/x.js", "/web/../app.js", "/web/%2e%2e/app.js", "/app.js", "//"})
    CHECK(get(path).code() == "not_found");
  CHECK(get("/", "Origin: http://evil.example\r\n").code() == "cross_origin");
}

TEST_CASE_METHOD(Closed, "whoever asks is told who he is, and what he may") {
  const Reply alice = get("/v1/self", "Authorization: Bearer " + kToken + "\r\n");
  CHECK(alice.json["role"] == "user");
  CHECK(alice.json["tenant"] == "alice");
  CHECK(alice.json["tokens"] == true);
  CHECK(alice.json["allTenants"] == false);
  CHECK(alice.json["may"] == nlohmann::json({"look", "see_quotas", "see_tenants", "lease", "change_lease"}));
  const Reply server = get("/v1/self", "Authorization: Bearer " + kServersToken + "\r\n");
  CHECK(server.json["role"] == "server");
  CHECK(server.json["may"] == nlohmann::json({"look"}));
}

TEST_CASE_METHOD(RestFixture, "the queue says why its first ones wait, if it is asked") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  LeaseRequest first = wish();
  first.holder = "the first one";
  await(lease(*holder, first));
  const std::string body = R"({"waitMs": 60000, "answerMs": 0})";
  for (int i = 0; i < 2; ++i) CHECK(post("/v1/leases", body).status == 202);
  CHECK(!get("/v1/queue").json["queue"][0].contains("why"));
  const auto one = get("/v1/queue?why=1").json["queue"];
  REQUIRE(one.size() == 2);
  CHECK(contains(one[0]["why"], "the first one"));
  CHECK(!one[1].contains("why"));
  CHECK(contains(get("/v1/queue?why=2").json["queue"][1]["why"], "the first one"));
  CHECK(get("/v1/queue?why=101").code() == "bad_parameter");
}

TEST_CASE_METHOD(Closed,
                 "of others' requests nobody is told why they wait, nor by whom his own are held up") {
  tokens["bob"] = std::string(32, 'b');
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();  // the manager's own user
  LeaseRequest first = wish();
  first.tenant = "bob";
  first.holder = "bob's program";
  await(lease(*holder, first));
  const std::string body = R"({"waitMs": 60000, "answerMs": 0})";
  const std::string alice = "Authorization: Bearer " + kToken + "\r\n",
                    bob = "Authorization: Bearer " + tokens["bob"] + "\r\n";
  CHECK(post("/v1/leases", body, alice).status == 202);
  CHECK(post("/v1/leases", body, bob).status == 202);
  const Reply seen = get("/v1/queue?why=2", alice);
  REQUIRE(seen.json["queue"].size() == 2);
  for (const auto& one : seen.json["queue"]) CHECK(one.contains("why") == (one["tenant"] == "alice"));
  CHECK(contains(seen.text, "in use"));
  CHECK(!contains(seen.text, "bob"));
  const Reply others = get("/v1/queue?why=2", bob);
  CHECK(contains(others.text, "bob's program"));
  CHECK(!contains(others.text, "alice"));
}

TEST_CASE_METHOD(RestFixture, "a lease that waits to be resumed says what for") {
  FakeServer server(io, "a", 1, folder.path + "/server");
  server.join(address);
  await(server.joined());
  auto holder = connect();
  LeaseRequest first = wish(), second = wish();
  first.memoryBytes = second.memoryBytes = uint64_t{1} << 30;
  second.holder = "the second one";
  const Lease got = await(lease(*holder, first));
  const std::string path = "/v1/leases/" + got.id.text();
  CHECK(post(path + "/suspend").json["state"] == "suspended");
  second.memoryBytes = get("/v1/devices").json["devices"][0]["freeBytes"];
  await(lease(*holder, second));
  auto stream = dial();
  const std::string request = "POST " + path +
                              "/resume HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 17\r\n\r\n" +
                              R"({"waitMs": 30000})";
  stream->write(request.data(), request.size()).wait(io.waitScope);
  nlohmann::json queue;
  for (int i = 0; i < 200 && queue.empty(); ++i) queue = get("/v1/queue?why=1").json["queue"];
  REQUIRE(queue.size() == 1);
  CHECK(queue[0]["resumes"] == true);
  CHECK(contains(queue[0]["why"], "the second one"));
}
