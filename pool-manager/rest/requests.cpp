#include "pool-manager/rest/requests.h"

#include <span>
#include <stdexcept>

#include "base/hmac.h"
#include "base/log.h"
#include "pool-manager/claims.h"
#include "pool-manager/convert.h"
#include "pool-manager/listing_json.h"
#include "pool-manager/rest/claims.h"
#include "pool-manager/rest/listings.h"
#include "pool-manager/rpc.h"

namespace gpupool::pool::rest {
namespace {

constexpr size_t kMostKey = 64;
constexpr size_t kMostUnserved = 1024;

// The job that stands for the request's key.
std::string jobOf(const Request& request) {
  const std::string key = request.key.empty() ? Id::random().text() : request.key;
  const std::string job = "rest:" + key + ":0";
  try {
    if (key.size() > kMostKey) throw std::invalid_argument("");
    checkJob(job);
  } catch (const std::invalid_argument&) {
    refuse({400, "bad_key", "the Idempotency-Key is none that the manager takes",
            "send letters, digits and _.+- , at most 64: a UUID, for example"});
  }
  return job;
}

// The id that the lease has, or is to have.
Id nameLease(const Context& context, const Request& request, LeaseRequest& wish) {
  try {
    context.service.pool().nameClaim(request.who, wish);
  } catch (const std::invalid_argument& error) {
    refuse({409, "refused", error.what(), "GET /v1/leases and GET /v1/devices show what the pool holds"});
  }
  return wish.id;
}

// Of all that the request says: of two bodies that say the same in another order it is the same.
std::string fingerprintOf(const Request& request) {
  const std::string text = request.body.dump();
  const Digest digest = sha256(std::as_bytes(std::span(text)));
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// The same key with another body is a mistake, and not the same request again. Of a lease that an older
// manager has made, nobody knows.
void demandSame(const Context& context, const LeaseRequest& wish) {
  const std::string* first = context.service.pool().fingerprintOf(wish.id);
  if (first == nullptr || first->empty() || *first == wish.fingerprint) return;
  refuse({422, "key_reused", "this Idempotency-Key was sent with another request",
          "send another key, or the same body; the lease of this key is " + wish.id.text()});
}

Json toJson(const QueuedRequest& one, size_t position) {
  Json entry = {{"id", one.id.text()},
                {"state", "queued"},
                {"server", ""},
                {"devices", Json::array()},
                {"ttlMs", 0},
                {"ageMs", one.waitedMs},
                {"tenant", one.tenant},
                {"holder", one.holder},
                {"position", position},
                {"resumes", one.resumes},
                {"priority", name(one.priority)}};
  if (!one.reason.empty()) entry["reason"] = one.reason;
  if (!one.why.empty()) entry["why"] = one.why;
  return entry;
}

}  // namespace

const Problem* Orders::unserved(const Id& id) const {
  const auto at = unserved_.find(id);
  return at == unserved_.end() ? nullptr : &at->second;
}

void Orders::noteUnserved(const Id& id, Problem problem) {
  if (unserved_.insert_or_assign(id, std::move(problem)).second) noted_.push_back(id);
  if (noted_.size() <= kMostUnserved) return;
  unserved_.erase(noted_.front());
  noted_.pop_front();
}

void Orders::forget(const Id& id) {
  if (unserved_.erase(id) != 0) std::erase(noted_, id);
}

void Orders::taskFailed(kj::Exception&& error) {
  GPUPOOL_INFO("an order over REST, answered before its end, has failed: %s", errorText(error).c_str());
}

std::optional<Json> queued(const Context& context, const Request& request, const Id& id) {
  size_t position = 0;
  for (const QueuedRequest& one : context.service.pool().queue(request.who, context.service.now())) {
    ++position;
    if (one.id == id && !one.resumes) return toJson(one, position);
  }
  return std::nullopt;
}

kj::Promise<Answer> createLease(const Context& context, const Request& request) {
  LeaseRequest wish = leaseWish(request, jobOf(request));
  wish.fingerprint = fingerprintOf(request);
  const Id id = nameLease(context, request, wish);
  demandSame(context, wish);
  auto place = context.orders.place(request.peer);
  if (place == nullptr)
    refuse({429, "too_many_requests", "64 requests of this address wait already",
            "wait until some are served (GET /v1/queue), or release them"});
  context.orders.forget(id);
  auto order = context.service.managerFor(request.who).leaseRequest();
  write(wish, order.initRequest());
  auto fork = order.send().ignoreResult().attach(kj::mv(place)).fork();
  // It waits on when the answer has been given before: the one that asked may look (GET /v1/leases/{id}).
  context.orders.goOn(fork.addBranch().catch_(
      [context, id](kj::Exception&& error) { context.orders.noteUnserved(id, toProblem(error)); }));
  const auto limit = request.counts.at("answerMs") * kj::MILLISECONDS;
  auto granted =
      fork.addBranch().then([context, request, id] { return describeClaim(context, request, id); });
  return granted.exclusiveJoin(
      context.timer.afterDelay(limit).then([context, request, id]() -> kj::Promise<Answer> {
        if (auto json = queued(context, request, id)) return Answer{202, std::move(*json)};
        return describeClaim(context, request, id);
      }));
}

kj::Promise<Answer> renewLease(const Context& context, const Request& request) {
  const Id id = ownLease(context, request);
  auto order = context.service.managerFor(request.who).renewRequest();
  write(id, order.initId());
  return order.send().then([id](auto&& response) -> Answer {
    Json json = {{"id", id.text()}, {"ttlMs", response.getTtlMs()}};
    if (response.getNotice().size() != 0)
      json["notice"] = pool::text(response.getNotice()), json["endsInMs"] = response.getEndsInMs();
    return {200, std::move(json)};
  });
}

kj::Promise<Answer> listQueue(const Context& context, const Request& request) {
  Json list = Json::array();
  for (const QueuedRequest& one :
       context.service.pool().queue(request.who, context.service.now(), request.counts.at("why")))
    list.push_back(toJson(one, list.size() + 1));
  return Answer{200, {{"queue", std::move(list)}}};
}

kj::Promise<Answer> explainRequest(const Context& context, const Request& request) {
  auto order = context.service.managerFor(request.who).explainRequest();
  write(leaseWish(request, ""), order.initRequest());
  return order.send().then(
      [](auto&& response) -> Answer { return {200, pool::toJson(read(response.getExplanation()))}; });
}

kj::Promise<Answer> listAudit(const Context& context, const Request& request) {
  auto order = context.service.managerFor(request.who).auditRequest();
  order.setAfter(request.counts.at("after"));
  order.setSinceMs(request.counts.at("sinceMs"));
  order.setLease(text(request, "lease"));
  return order.send().then([](auto&& response) -> Answer {
    Json list = Json::array();
    for (auto one : response.getEntries()) list.push_back(pool::toJson(read(one)));
    return {200, {{"entries", std::move(list)}, {"more", response.getMore()}}};
  });
}

}  // namespace gpupool::pool::rest
