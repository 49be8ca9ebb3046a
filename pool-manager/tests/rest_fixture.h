#pragma once
// The REST interface in process, in front of ServiceFixture's service; requests go over TCP as text.

#include <map>
#include <nlohmann/json.hpp>

#include "pool-manager/rest/api.h"
#include "service_fixture.h"

namespace gpupool::test {

// Tokens.
inline const std::string kAlice(32, 'a'), kBob(32, 'b'), kServersToken(32, 's');

struct Reply {
  unsigned status = 0;  // 0: the connection was closed without an answer
  std::map<std::string, std::string> headers;
  std::string text;
  nlohmann::json json;
  std::string code() const { return json.contains("error") ? json["error"]["code"].get<std::string>() : ""; }
};

struct RestFixture : ServiceFixture {
  explicit RestFixture(const rest::HttpLimits& limits = {})
      : api(io.provider->getTimer(), *service), front(io.provider->getTimer(), *service, api, limits) {
    auto parsed = io.provider->getNetwork().parseAddress("127.0.0.1:0").wait(io.waitScope);
    auto listener = parsed->listen();
    port = listener->getPort();
    front.serve(kj::mv(listener), false);
  }

  kj::Own<kj::AsyncIoStream> dial() {
    const std::string there = "127.0.0.1:" + std::to_string(port);
    return io.provider->getNetwork()
        .parseAddress(there.c_str())
        .wait(io.waitScope)
        ->connect()
        .wait(io.waitScope);
  }
  // All that comes back before the connection is closed.
  std::string exchange(const std::string& request) {
    auto stream = dial();
    stream->write(request.data(), request.size()).wait(io.waitScope);
    const kj::String all =
        io.provider->getTimer().timeoutAfter(20 * kj::SECONDS, stream->readAllText()).wait(io.waitScope);
    return {all.begin(), all.size()};
  }
  static Reply parse(const std::string& all) {
    Reply reply;
    const size_t end = all.find("\r\n\r\n");
    if (end == std::string::npos) return reply;
    reply.status = static_cast<unsigned>(std::stoul(all.substr(all.find(' ') + 1)));
    for (size_t at = all.find("\r\n") + 2; at < end;) {
      const size_t line = all.find("\r\n", at), colon = all.find(": ", at);
      reply.headers[all.substr(at, colon - at)] = all.substr(colon + 2, line - colon - 2);
      at = line + 2;
    }
    reply.text = all.substr(end + 4);
    reply.json = nlohmann::json::parse(reply.text, nullptr, false);
    return reply;
  }
  // headers: whole lines.
  Reply ask(const std::string& method, const std::string& target, const std::string& body = "",
            const std::string& headers = "") {
    const std::string length = body.empty() ? "" : "Content-Length: " + std::to_string(body.size()) + "\r\n";
    return parse(exchange(method + " " + target + " HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" +
                          headers + length + "\r\n" + body));
  }
  Reply get(const std::string& target, const std::string& headers = "") {
    return ask("GET", target, "", headers);
  }
  Reply post(const std::string& target, const std::string& body = "", const std::string& headers = "") {
    return ask("POST", target, body, headers);
  }

  rest::Api api;
  rest::HttpFront front;
  unsigned port = 0;
};

}  // namespace gpupool::test
