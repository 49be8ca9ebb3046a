#include "pool-manager/rest/changes.h"

#include "base/log.h"
#include "pool-manager/convert.h"
#include "pool-manager/rest/listings.h"
#include "pool-manager/roles.h"

namespace gpupool::pool::rest {
namespace {

constexpr kj::Duration kAnswerWithin = 50 * kj::SECONDS;  // proxies give up after 60 s, most of them

// The lease as it is now.
Json describe(const Context& context, const Id& id) {
  const auto at = context.service.pool().leases().find(id);
  if (at != context.service.pool().leases().end())
    return {{"id", id.text()}, {"state", name(at->second.state)}, {"reason", at->second.reason}};
  const std::string* why = context.service.pool().endedBecause(id);
  return {{"id", id.text()}, {"state", "ended"}, {"reason", why == nullptr ? "" : *why}};
}

// Of whoever may change it.
Id ownLease(const Context& context, const Request& request) {
  const Id id = leaseId(request);
  const auto at = context.service.pool().leases().find(id);
  if (at == context.service.pool().leases().end()) refuseUnknown(context, id);
  if (!request.who.owns(at->second.tenant))
    refuse({403, "forbidden", "that lease is another tenant's", "use that tenant's token"});
  return id;
}

std::string checkedServer(const Context& context, const Request& request) {
  const std::string& server = request.named.at("name");
  if (!context.service.pool().servers().contains(server) &&
      !context.service.pool().cordons().contains(server))
    refuse({404, "server_unknown", "there is no such server", "GET /v1/servers lists those that there are"});
  return server;
}

void note(const Request& request, const std::string& what) {
  GPUPOOL_INFO("over HTTP, %s%s: %s", request.peer.c_str(),
               request.who.tenant.empty() ? "" : (", tenant " + request.who.tenant).c_str(), what.c_str());
}

// The answer, or after a while that it goes on.
kj::Promise<Answer> orLater(const Context& context, const Id& id, kj::Promise<Answer>&& answer) {
  return answer.exclusiveJoin(context.timer.afterDelay(kAnswerWithin).then([context, id]() -> Answer {
    Json json = describe(context, id);
    json["pending"] = true;
    return {202, std::move(json)};
  }));
}

kj::Promise<Answer> cordon(const Context& context, const Request& request, bool cordoned) {
  const std::string server = checkedServer(context, request);
  note(request, (cordoned ? "cordons server " : "uncordons server ") + printable(server, 255));
  auto order = context.service.managerFor(request.who).cordonRequest();
  order.setServer(server);
  order.setCordoned(cordoned);
  order.setReason(text(request, "reason"));
  const std::string by = text(request, "by");
  order.setBy(by.empty() ? "REST, from " + request.peer : by);
  return order.send().then(
      [server, cordoned](auto&&) -> Answer { return {200, {{"name", server}, {"cordoned", cordoned}}}; });
}

}  // namespace

kj::Promise<Answer> releaseLease(const Context& context, const Request& request) {
  const Id named = leaseId(request);
  if (context.service.pool().endedBecause(named) != nullptr) return Answer{200, describe(context, named)};
  const Id id = ownLease(context, request);
  const LeaseRecord& record = context.service.pool().leases().at(id);
  if (record.state == LeaseState::lost) demand(request.who, Operation::dropLost);
  note(request, "releases lease " + id.text());
  auto order = context.service.managerFor(request.who).releaseRequest();
  write(id, order.initId());
  order.setDrop(true);
  return order.send().then([context, id](auto&&) -> Answer { return {200, describe(context, id)}; });
}

kj::Promise<Answer> suspendLease(const Context& context, const Request& request) {
  const Id id = ownLease(context, request);
  note(request, "suspends lease " + id.text());
  auto order = context.service.managerFor(request.who).suspendRequest();
  write(id, order.initId());
  order.setDrainMs(static_cast<uint32_t>(request.counts.at("drainMs")));
  return orLater(context, id, order.send().then([context, id](auto&& response) -> Answer {
    const SuspendResult result = read(response.getResult());
    Json json = describe(context, id);
    json["keptBytes"] = result.kept;
    json["movedBytes"] = result.movedBytes;
    json["drainMs"] = result.drainMs;
    json["moveMs"] = result.moveMs;
    return {200, std::move(json)};
  }));
}

kj::Promise<Answer> resumeLease(const Context& context, const Request& request) {
  const Id id = ownLease(context, request);
  note(request, "resumes lease " + id.text());
  auto order = context.service.managerFor(request.who).resumeRequest();
  write(id, order.initId());
  order.setWaitMs(static_cast<uint32_t>(request.counts.at("waitMs")));
  return orLater(context, id,
                 order.send().then([context, id](auto&&) -> Answer { return {200, describe(context, id)}; }));
}

kj::Promise<Answer> migrateLease(const Context& context, const Request& request) {
  const Id id = ownLease(context, request);
  MoveTarget to;
  to.server = text(request, "server");
  if (const auto at = request.body.find("devices"); at != request.body.end())
    to.devices = at->get<std::vector<uint32_t>>();
  to.elsewhere = request.body.value("elsewhere", false);
  note(request, "moves lease " + id.text());
  auto order = context.service.managerFor(request.who).migrateRequest();
  write(id, order.initId());
  write(to, order.initTo());
  order.setDrainMs(static_cast<uint32_t>(request.counts.at("drainMs")));
  return orLater(context, id, order.send().then([context, id](auto&& response) -> Answer {
    const MigrateResult result = read(response.getResult());
    Json json = describe(context, id);
    json["sessions"] = result.sessions;
    json["movedBytes"] = result.movedBytes;
    json["longestPauseMs"] = result.longestPauseMs;
    json["place"] = result.server;
    return {200, std::move(json)};
  }));
}

kj::Promise<Answer> cordonServer(const Context& context, const Request& request) {
  return cordon(context, request, true);
}

kj::Promise<Answer> uncordonServer(const Context& context, const Request& request) {
  return cordon(context, request, false);
}

}  // namespace gpupool::pool::rest
