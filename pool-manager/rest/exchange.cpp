#include "pool-manager/rest/exchange.h"

#include "base/log.h"
#include "pool-manager/rpc.h"

namespace gpupool::pool::rest {
namespace {

constexpr std::string_view kMark = "rest problem ";

struct Hint {
  std::string_view code;
  const char* text;
};

// For those that know no better one.
constexpr Hint kHints[] = {
    {"bad_address", "write the address as GET /v1/openapi.json does, and what is no letter or digit as %XX"},
    {"bad_parameter", "GET /v1/openapi.json says what each parameter may be"},
    {"unknown_parameter", "GET /v1/openapi.json lists each route's parameters"},
    {"bad_json", "send one JSON object that names no member twice, or no body at all"},
    {"bad_field", "GET /v1/openapi.json says what each member of the body may be"},
    {"unknown_field", "GET /v1/openapi.json lists the members of each route's body"},
    {"bad_framing", "send the whole body, with its length in bytes as one Content-Length"},
    {"bad_request", "send HTTP/1.1: a request line, headers of the form 'Name: value', and an empty line"},
    {"headers_too_large", "send fewer and shorter headers: a token and a Content-Length are enough"},
    {"method_unknown", "use GET, HEAD or POST"},
    {"request_timeout", "send the whole request at once, on a new connection"},
    {"lease_ended", "GET /v1/audit?lease=ID says what has become of it; ask for a new one"},
};

const char kDocument[] = "GET /v1/openapi.json describes every request";

std::string hintOf(const Problem& problem) {
  if (problem.status == 405) return "use " + problem.hint;
  if (!problem.hint.empty()) return problem.hint;
  for (const Hint& one : kHints)
    if (one.code == problem.code) return one.text;
  return kDocument;
}

const char kAsk[] = "`gpupool leases` and GET /v1/leases show what the pool holds";

// What the pool says of its store, but for why: that may name its file. "": it is about something else.
std::string ofStore(const std::string& text) {
  constexpr std::string_view kStore = "write its store";
  if (text.starts_with("not stored")) return "the manager cannot write its store";
  const size_t at = text.find(kStore);
  return at == std::string::npos ? "" : text.substr(0, at + kStore.size());
}

}  // namespace

kj::Exception toException(const Problem& problem) {
  const Json json = {problem.status, problem.code, problem.message, problem.hint};
  return rpcError(kj::Exception::Type::FAILED,
                  std::string(kMark) + json.dump(-1, ' ', true, Json::error_handler_t::replace));
}

void refuse(Problem problem) { kj::throwFatalException(toException(problem)); }

void demand(const Principal& who, Operation operation) {
  if (may(who, operation)) return;
  const bool operators = !may({Role::user, ""}, operation);
  refuse({403, operators ? "operators_only" : "forbidden", refusalOf(who, operation),
          operators ? "use an operator's token, or the manager's Unix socket as the user that runs it"
                    : "use a user's token"});
}

Problem toProblem(const kj::Exception& error) {
  const std::string_view description = error.getDescription().cStr();
  if (description.starts_with(kMark)) {
    const Json json = Json::parse(description.substr(kMark.size()), nullptr, false);
    if (json.is_array() && json.size() == 4)
      return {json[0].get<unsigned>(), json[1].get<std::string>(), json[2].get<std::string>(),
              json[3].get<std::string>()};
  }
  const std::string text = errorText(error);
  if (const std::string said = ofStore(text); !said.empty()) {
    GPUPOOL_ERROR("a REST request failed: %s", text.c_str());
    return {503, "store_failed", said, "look into the manager's log, and ask again"};
  }
  switch (error.getType()) {
    case kj::Exception::Type::OVERLOADED:
      if (error.getLine() != 0) break;  // KJ's own: a time limit
      return {409, "no_room", text, "ask again when devices are free, or name a longer waitMs"};
    case kj::Exception::Type::UNIMPLEMENTED:
      return {409, "nothing_fits", text, "GET /v1/devices shows what the pool has"};
    case kj::Exception::Type::DISCONNECTED:
      return {503, "server_lost", text, "ask again when the server is back"};
    case kj::Exception::Type::FAILED:
      break;
  }
  // The pool's own words come without a file's name (rpcError).
  if (error.getLine() == 0 && error.getType() == kj::Exception::Type::FAILED)
    return {409, "refused", text, kAsk};
  GPUPOOL_ERROR("a REST request failed: %s", text.c_str());
  return {503, "unavailable", "the manager could not do that", "look into the manager's log"};
}

Answer toAnswer(const Problem& problem) {
  Answer answer{problem.status};
  answer.json = {
      {"error", {{"code", problem.code}, {"message", problem.message}, {"hint", hintOf(problem)}}}};
  if (problem.status == 401) answer.headers.emplace_back("WWW-Authenticate", "Bearer realm=\"gpupool\"");
  if (problem.status == 405) answer.headers.emplace_back("Allow", problem.hint);
  if (problem.status == 429) answer.headers.emplace_back("Retry-After", "60");
  if (problem.status == 503) answer.headers.emplace_back("Retry-After", "5");
  return answer;
}

}  // namespace gpupool::pool::rest
