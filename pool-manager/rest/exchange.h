#pragma once
// One request of the REST interface and its answer, without HTTP's framing (http_front.h has that).

#include <kj/async-io.h>
#include <kj/compat/http.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "pool-manager/principal.h"
#include "pool-manager/roles.h"

namespace gpupool::pool::rest {

using Json = nlohmann::json;

struct Request {
  kj::HttpMethod method = kj::HttpMethod::GET;
  std::vector<std::string> path;             // "/v1/leases/x": {"v1", "leases", "x"}; decoded
  std::map<std::string, std::string> query;  // decoded
  std::map<std::string, std::string> named;  // what the route's path names: "/v1/leases/{id}": id
  Json body = Json::object();
  std::map<std::string, uint64_t> counts;  // all of the route's, of query or body: as given, or as usual
  Principal who;
  std::string peer;       // its address; for people
  std::string lastEvent;  // the header Last-Event-ID
  std::string key;        // the header Idempotency-Key
  std::string known;      // the header If-None-Match
};

struct Answer {
  unsigned status = 200;
  Json json;         // if text is empty
  std::string text;  // of contentType
  std::string contentType = "application/json";
  std::string cacheControl = "no-store";
  std::vector<std::pair<std::string, std::string>> headers = {};
  // Not empty: writes the answer, for as long as it likes.
  std::function<kj::Promise<void>(kj::AsyncOutputStream&)> stream = {};
};

// An error's status, its code (stable: programs may compare it), one line on what is wrong, and one on what
// to do; empty: what toAnswer says for its code. Of 405: the methods that there are.
struct Problem {
  unsigned status;
  std::string code, message, hint = {};
};

// A problem on its way through promises, which carry no other exceptions.
kj::Exception toException(const Problem& problem);
[[noreturn]] void refuse(Problem problem);
// Refuses unless the caller may.
void demand(const Principal& who, Operation operation);
// Of whatever an operation failed with. What is not a Problem nor the pool's own words is not told.
Problem toProblem(const kj::Exception& error);
// {"error": {...}}, with the headers that the status demands.
Answer toAnswer(const Problem& problem);

}  // namespace gpupool::pool::rest
