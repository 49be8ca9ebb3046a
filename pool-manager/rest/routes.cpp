#include "pool-manager/rest/routes.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "pool-manager/claims.h"
#include "pool-manager/lease_state.h"
#include "pool-manager/rest/changes.h"
#include "pool-manager/rest/claims.h"
#include "pool-manager/rest/listings.h"
#include "pool-manager/rest/metrics.h"
#include "pool-manager/rest/openapi.h"
#include "pool-manager/rest/self.h"
#include "pool-manager/rest/tenants.h"
#include "pool-manager/tokens.h"

namespace gpupool::pool::rest {
namespace {

constexpr auto kGet = kj::HttpMethod::GET, kPost = kj::HttpMethod::POST;
constexpr uint64_t kMostWaitMs = 3'600'000, kMostQueuedMs = 7 * uint64_t{86'400'000};
constexpr uint64_t kMostAnswerMs = 40'000;

using Kind = Field::Kind;

// What a request for devices names.
std::vector<Field> wishFields() {
  return {
      {Kind::text, "tenant",
       "Whose programs use it: schedulers and operators may name others. Empty: the token's.", 64},
      {Kind::count, "devices", "How many GPUs, of one server.", kMostLeased, 1, 1},
      {Kind::count, "memoryBytes", "On each GPU, at least 1 MiB. 0: whole GPUs.", uint64_t{1} << 60, 0},
      {Kind::text, "gpu", "Which GPUs, as --gpu: h200, memory>=80GiB. Empty: any.", 255},
      {Kind::text, "server", "On this server. Empty: on any.", 255},
      {Kind::yes, "spread", "Where most is free, not where least is."},
      {Kind::text, "priority", "The class: low, normal or high. Empty: normal.", 8},
      {Kind::count, "sharePercent", "Of the GPUs' time, where leases take turns. 0: an equal part.", 100, 0},
      {Kind::text, "reason", "What it is for; for people.", kMostReason},
      {Kind::count, "limitMs", "It ends so long after its grant. 0: no limit.", uint64_t{366} * 86'400'000,
       0}};
}

// Of what is reserved, besides.
std::vector<Field> leaseFields(std::vector<Field> more) {
  std::vector<Field> fields = wishFields();
  fields.push_back({Kind::count, "unusedMs",
                    "It ends when no program has used it, and nobody renewed it, for so long.", kMostWaitMs,
                    kUnusedMs, 1000});
  fields.insert(fields.end(), more.begin(), more.end());
  return fields;
}

std::vector<Route> makeRoutes() {
  const Field drain{Kind::count, "drainMs", "What runs on the devices has so long to finish.", kMostWaitMs,
                    30'000};
  return {
      {kGet,
       "/v1/health",
       "health",
       "Whether the manager answers.",
       health,
       "Health",
       Operation::look,
       {},
       "application/json",
       true},
      {kGet, "/v1/self", "showSelf", "Who asks, by the token that was sent, and what he may.", showSelf,
       "Self"},
      {kGet, "/v1/devices", "listDevices", "The GPUs of the pool.", listDevices, "DeviceList"},
      {kGet, "/v1/servers", "listServers", "The servers of the pool.", listServers, "ServerList"},
      {kGet,
       "/v1/leases",
       "listLeases",
       "The leases, by id, a page at a time.",
       listLeases,
       "LeaseList",
       Operation::look,
       {{Kind::state, "state", "Only leases in this state."},
        {Kind::text, "tenant", "Only leases of this tenant."},
        {Kind::text, "server", "Only leases on this server."},
        {Kind::count, "limit", "The most leases of a page.", 1000, 100, 1},
        {Kind::text, "cursor", "Where the page begins: nextCursor of the page before.", 32}}},
      {kPost, "/v1/leases", "createLease",
       "Leases GPUs for programs that use them by GPUPOOL_CLAIM, with the lease's id. Asked again with the "
       "same Idempotency-Key, it is the same lease; with another body that is refused (422). 202: it waits, "
       "and has a position in the queue.",
       createLease, "Lease", Operation::lease,
       leaseFields({{Kind::count, "waitMs", "How long to wait for GPUs.", kMostQueuedMs, 0},
                    {Kind::count, "answerMs", "The answer comes after so long, also while it waits.",
                     kMostAnswerMs, kMostAnswerMs}})},
      {kGet, "/v1/leases/{id}", "getLease", "One lease, or one that waits in the queue.", getLease, "Lease"},
      {kPost, "/v1/leases/{id}/renew", "renewLease",
       "Keeps a lease for another unusedMs, in its holder's place. May be repeated.", renewLease, "Renewal",
       Operation::lease},
      {kPost, "/v1/leases/{id}/release", "releaseLease",
       "Ends a lease in its holder's place, or drops one that is lost with its server. May be repeated.",
       releaseLease, "LeaseChange", Operation::changeLease},
      {kPost,
       "/v1/leases/{id}/suspend",
       "suspendLease",
       "Takes the memory of a lease's programs off its devices. May be repeated.",
       suspendLease,
       "LeaseChange",
       Operation::changeLease,
       {drain}},
      {kPost,
       "/v1/leases/{id}/resume",
       "resumeLease",
       "Brings a suspended lease back to its devices when there is room. May be repeated.",
       resumeLease,
       "LeaseChange",
       Operation::changeLease,
       {{Kind::count, "waitMs", "How long to wait for room.", 40'000, 0}}},
      {kPost,
       "/v1/leases/{id}/migrate",
       "migrateLease",
       "Moves a lease's sessions while its programs run. Without a target: to other workers on the same "
       "devices.",
       migrateLease,
       "LeaseChange",
       Operation::changeLease,
       {{Kind::text, "server", "To this server. Empty: the lease's own, or with elsewhere any other.", 255},
        {Kind::ordinals, "devices", "To these GPUs there, one for each of the lease's.", 64},
        {Kind::yes, "elsewhere", "To any other server that has room."},
        drain}},
      {kPost,
       "/v1/leases/{id}/checkpoint",
       "checkpointLease",
       "Writes a lease's sessions into files of its server while its programs run.",
       checkpointLease,
       "LeaseChange",
       Operation::changeLease,
       {{Kind::text, "folder", "In the server's checkpoint folder. Required.", 255}, drain}},
      {kPost,
       "/v1/leases/{id}/hold",
       "holdLease",
       "Writes a lease's sessions into files of its server, and has them leave its GPUs. May be repeated.",
       holdLease,
       "LeaseChange",
       Operation::changeLease,
       {{Kind::text, "folder", "In the server's checkpoint folder. Required.", 255}, drain}},
      {kPost,
       "/v1/leases/{id}/restore",
       "restoreLease",
       "Brings a lease back from the files in which it is held, when there is room.",
       restoreLease,
       "LeaseChange",
       Operation::changeLease,
       {{Kind::text, "folder", "The files. Required.", 255},
        {Kind::text, "server", "On this server. Empty: the one that has written the files.", 255},
        {Kind::ordinals, "devices", "These GPUs there. Empty: any like those that it had.", 64},
        {Kind::count, "waitMs", "How long to wait for room.", 40'000, 5000}}},
      {kGet,
       "/v1/queue",
       "listQueue",
       "What waits for GPUs, in the order in which it is served.",
       listQueue,
       "Queue",
       Operation::look,
       {{Kind::count, "why", "Says of so many, from the first on, why they wait.", 100, 0}}},
      {kGet, "/v1/explain", "explainRequest",
       "What would become of a request that is made now, and for each GPU why not. Nothing is leased.",
       explainRequest, "Explanation", Operation::look, wishFields()},
      {kGet,
       "/v1/audit",
       "listAudit",
       "What has happened to leases and servers, the oldest first.",
       listAudit,
       "AuditList",
       Operation::look,
       {{Kind::count, "after", "Only what comes after the entry of this number.", uint64_t{1} << 60, 0},
        {Kind::count, "sinceMs", "Only what is not older. 0: everything.", uint64_t{1} << 60, 0},
        {Kind::digits, "lease", "Only of leases whose id begins so.", 32}}},
      {kGet, "/v1/claims", "listClaims", "The claims: leases that job schedulers have reserved for jobs.",
       listClaims, "ClaimList"},
      {kPost, "/v1/claims", "createClaim",
       "Reserves GPUs for a job; its programs adopt the claim by GPUPOOL_CLAIM. Asked again for the same "
       "job, "
       "it is the same claim.",
       createClaim, "Lease", Operation::lease,
       leaseFields(
           {{Kind::text, "job", "The scheduler's job, CLUSTER:ID:RESTARTS[:SUBMITTED]. Required.", 255},
            {Kind::count, "waitMs", "How long to wait for GPUs.", 40'000, 0}})},
      {kPost,
       "/v1/claims/{claim}/release",
       "releaseClaim",
       "Ends a claim, named by its id or its job, whoever uses it. May be repeated.",
       releaseClaim,
       "ClaimEnd",
       Operation::changeLease,
       {{Kind::text, "tenant", "Whose it is, where it is named by its job. Empty: the token's.", 64}}},
      {kPost,
       "/v1/servers/{name}/cordon",
       "cordonServer",
       "Places nothing new on a server; what it has goes on. Operators only. May be repeated.",
       cordonServer,
       "ServerChange",
       Operation::cordon,
       {{Kind::text, "reason", "Why; for people.", kMostReason},
        {Kind::text, "by", "On whose word; for people.", 160}}},
      {kPost, "/v1/servers/{name}/uncordon", "uncordonServer",
       "Puts a server back into service. Operators only. May be repeated.", uncordonServer, "ServerChange",
       Operation::cordon},
      {kPost,
       "/v1/servers/{name}/drain",
       "drainServer",
       "Cordons a server, begins to move its leases to other servers, and says what is left there: with 202, "
       "moves are under way. Ask again until it is drained. A manager that is started again goes on with it. "
       "Operators only.",
       drainServer,
       "Drain",
       Operation::cordon,
       {{Kind::text, "reason", "Why; for people.", kMostReason},
        {Kind::text, "by", "On whose word; for people.", 160},
        {Kind::yes, "stay", "Moves no lease."}}},
      {kGet, "/v1/tokens", "listTokens", "The tokens that operators have made, but not what they are.",
       listTokens, "TokenList", Operation::tokens},
      {kPost,
       "/v1/tokens",
       "createToken",
       "Makes a token; the answer is the only place where it is shown. Fails if the tenant has a valid one "
       "of "
       "this name.",
       createToken,
       "NewToken",
       Operation::tokens,
       {{Kind::text, "tenant", "Whose it is. Required.", 64},
        {Kind::text, "name",
         "What it is for, for people. Required, so that a repeated request makes no other.", 64},
        {Kind::text, "role", "viewer, user, scheduler, server or operator. Empty: user.", 16},
        {Kind::count, "expiresInS", "It ends after so many seconds. 0: never.", kMostExpiryS, 0}}},
      {kPost, "/v1/tokens/{token}/revoke", "revokeToken",
       "Ends a token, and the connections that have shown it. May be repeated.", revokeToken, "Token",
       Operation::tokens},
      {kGet, "/v1/quotas", "listQuotas",
       "The tenants' quotas, and what they have of them; to users and viewers their own.", listQuotas,
       "QuotaList", Operation::seeQuotas},
      {kPost,
       "/v1/quotas/{tenant}",
       "setQuota",
       "Replaces a tenant's quota; one without a limit takes it away. '*': of each tenant that has none of "
       "its "
       "own. May be repeated.",
       setQuota,
       "Quota",
       Operation::setQuota,
       {{Kind::count, "milliDevices", "GPUs at once, in thousandths; 0: no limit.", 1'000'000'000, 0},
        {Kind::count, "memoryBytes", "Of GPUs' memory at once; 0: no limit.", uint64_t{1} << 60, 0},
        {Kind::count, "deviceSeconds", "In each window; 0: no limit.", uint64_t{1} << 40, 0},
        {Kind::text, "per", "The window: day, week or month. Empty: month.", 8},
        {Kind::count, "protectMs",
         "No limit: the tenant's leases that name nothing else are protected, with a checkpoint so often; 0: "
         "they are "
         "not.",
         kMostProtectMs, 0}}},
      {kGet, "/v1/tenants", "listTenants",
       "The tenants: their tokens, quotas, and what they have of the pool; to users and viewers their own.",
       listTenants, "TenantList", Operation::seeTenants},
      {kGet, "/v1/tenants/{tenant}", "getTenant", "One tenant.", getTenant, "Tenant", Operation::seeTenants},
      {kGet,
       "/v1/events",
       "events",
       "Server-sent events, until the reader closes the connection: 'lease' and 'server', when one of them "
       "is in "
       "another state, and 'gap', when some were missed.",
       events,
       nullptr,
       Operation::look,
       {},
       "text/event-stream"},
      {kGet,
       "/metrics",
       "metrics",
       "Prometheus' text form 0.0.4.",
       metrics,
       nullptr,
       Operation::look,
       {},
       "text/plain; version=0.0.4; charset=utf-8"},
      {kGet,
       "/v1/openapi.json",
       "openapi",
       "This document.",
       openapi,
       "OpenApi",
       Operation::look,
       {},
       "application/json",
       true},
  };
}

// The names in the route's path, where it is the request's.
std::optional<std::map<std::string, std::string>> match(const Route& route,
                                                        const std::vector<std::string>& path) {
  std::map<std::string, std::string> named;
  const std::string pattern = route.path;
  size_t at = 1;
  for (const std::string& segment : path) {
    if (at > pattern.size()) return std::nullopt;
    const size_t end = std::min(pattern.find('/', at), pattern.size());
    const std::string part = pattern.substr(at, end - at);
    if (part.starts_with('{') && !segment.empty())
      named[part.substr(1, part.size() - 2)] = segment;
    else if (part != segment)
      return std::nullopt;
    at = end + 1;
  }
  if (at <= pattern.size()) return std::nullopt;
  return named;
}

std::string quoted(const Field& field) { return "'" + std::string(field.name) + "'"; }

void checkCount(const Field& field, uint64_t value) {
  if (value < field.least || value > field.most)
    refuse({400, "bad_parameter",
            quoted(field) + ": " + std::to_string(field.least) + " to " + std::to_string(field.most)});
}

void checkText(const Field& field, const std::string& value) {
  if (value.size() > field.most)
    refuse({400, "bad_parameter", quoted(field) + ": at most " + std::to_string(field.most) + " bytes"});
}

void checkQuery(const Field& field, const std::string& value, Request& request) {
  if (field.kind == Field::Kind::count) {
    uint64_t number = 0;
    const auto parsed = std::from_chars(value.data(), value.data() + value.size(), number);
    if (parsed.ec != std::errc() || parsed.ptr != value.data() + value.size())
      refuse({400, "bad_parameter", quoted(field) + " is not a number"});
    checkCount(field, number);
    request.counts[field.name] = number;
    return;
  }
  if (field.kind == Field::Kind::yes && value != "true" && value != "false")
    refuse({400, "bad_parameter", quoted(field) + " is not true or false"});
  checkText(field, value);
  if (field.kind == Field::Kind::digits && value.find_first_not_of("0123456789abcdef") != std::string::npos)
    refuse({400, "bad_parameter", quoted(field) + " is not the beginning of a lease's id",
            "an id has 32 hexadecimal digits: GET /v1/leases"});
  if (field.kind != Field::Kind::state) return;
  for (uint32_t i = 0; i < kLeaseStates; ++i)
    if (value == name(static_cast<LeaseState>(i))) return;
  refuse({400, "bad_parameter", "there is no such state",
          "queued, granting, active, suspended, held, moving, revoking or lost"});
}

void checkBody(const Field& field, const Json& value, Request& request) {
  const auto wrong = [&](const char* kind) { refuse({400, "bad_field", quoted(field) + " is not " + kind}); };
  switch (field.kind) {
    case Field::Kind::count:
      if (!value.is_number_unsigned()) wrong("a whole number");
      checkCount(field, value.get<uint64_t>());
      request.counts[field.name] = value.get<uint64_t>();
      return;
    case Field::Kind::yes:
      if (!value.is_boolean()) wrong("true or false");
      return;
    case Field::Kind::ordinals:
      if (!value.is_array() || value.size() > field.most) wrong("a list of at most 64 GPUs");
      for (const Json& one : value)
        if (!one.is_number_unsigned() || one.get<uint64_t>() >= kMaxDevices) wrong("a list of GPUs: 0 to 63");
      return;
    case Field::Kind::text:
    case Field::Kind::state:
    case Field::Kind::digits:
      if (!value.is_string()) wrong("a text");
      return checkText(field, value.get<std::string>());
  }
}

const Field* find(const Route& route, const std::string& name) {
  for (const Field& field : route.fields)
    if (name == field.name) return &field;
  return nullptr;
}

void check(const Route& route, Request& request) {
  const bool inQuery = route.method == kGet;
  for (const Field& field : route.fields)
    if (field.kind == Field::Kind::count) request.counts[field.name] = field.usual;
  for (const auto& [name, value] : request.query) {
    const Field* field = inQuery ? find(route, name) : nullptr;
    if (field == nullptr)
      refuse({400, "unknown_parameter", "there is no parameter '" + printable(name, 64) + "'"});
    checkQuery(*field, value, request);
  }
  for (const auto& [name, value] : request.body.items()) {
    const Field* field = inQuery ? nullptr : find(route, name);
    if (field == nullptr)
      refuse(
          {400, "unknown_field", "the body has a member that is not known: '" + printable(name, 64) + "'"});
    checkBody(*field, value, request);
  }
}

const char* nameOf(kj::HttpMethod method) { return method == kGet ? "GET, HEAD" : "POST"; }

}  // namespace

const std::vector<Route>& routes() {
  static const std::vector<Route> all = makeRoutes();
  return all;
}

const Route& routeOf(Request& request) {
  std::string others;
  for (const Route& route : routes()) {
    auto named = match(route, request.path);
    if (!named) continue;
    if (route.method != request.method) {
      others += (others.empty() ? "" : ", ") + std::string(nameOf(route.method));
      continue;
    }
    request.named = std::move(*named);
    check(route, request);
    return route;
  }
  if (!others.empty()) refuse({405, "method_not_allowed", "that cannot be done here", others});
  refuse({404, "not_found", "there is no such address", "GET /v1/openapi.json lists what there is"});
}

bool isOpen(const Request& request) {
  return std::any_of(routes().begin(), routes().end(), [&](const Route& route) {
    return route.open && route.method == request.method && match(route, request.path);
  });
}

std::string text(const Request& request, const char* name) {
  if (const auto at = request.query.find(name); at != request.query.end()) return at->second;
  if (const auto at = request.body.find(name); at != request.body.end()) return at->get<std::string>();
  return "";
}

bool flag(const Request& request, const char* name) {
  if (const auto at = request.query.find(name); at != request.query.end()) return at->second == "true";
  return request.body.value(name, false);
}

}  // namespace gpupool::pool::rest
