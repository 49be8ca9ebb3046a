#pragma once
// What the REST interface has: one table, from which come the answers, the checks of what a request says, and
// the OpenAPI document (openapi.h).

#include <kj/timer.h>

#include <string>
#include <vector>

#include "pool-manager/rest/events.h"
#include "pool-manager/rest/exchange.h"
#include "pool-manager/rest/requests.h"
#include "pool-manager/roles.h"
#include "pool-manager/service.h"

namespace gpupool::pool::rest {

// A member of a request's body, or of its query. A request that has others is refused.
struct Field {
  enum class Kind { text, count, yes, ordinals, state, digits } kind;
  const char* name;
  const char* what;  // for people
  // Of a text, or of an id's first digits: bytes; of a count: its value; of ordinals: how many.
  uint64_t most = 1024;
  uint64_t usual = 0;  // a count that is not given
  uint64_t least = 0;  // of a count
};

struct Context {
  Service& service;
  kj::Timer& timer;
  Events& events;
  Orders& orders;
};

using Handler = kj::Promise<Answer> (*)(const Context& context, const Request& request);

struct Route {
  kj::HttpMethod method;
  const char* path;     // "/v1/leases/{id}"
  const char* name;     // operationId
  const char* summary;  // for people
  Handler handler;
  const char* schema;                 // of what is answered with status 200, in openapi.cpp; null: not JSON
  Operation needs = Operation::look;  // what the caller has to be allowed, unless it is open
  std::vector<Field> fields = {};     // of the query (GET), or of the body
  const char* contentType = "application/json";
  bool open = false;  // answered without a token
};

const std::vector<Route>& routes();
// Fills Request::named and counts, and checks what the request says. Throws a Problem if there is no such
// route.
const Route& routeOf(Request& request);
// Whether a path is one of a route that is open; for a path of none, false.
bool isOpen(const Request& request);

// What query or body say, "" if nothing; of a request that routeOf() has checked.
std::string text(const Request& request, const char* name);
bool flag(const Request& request, const char* name);

}  // namespace gpupool::pool::rest
