#include "pool-manager/rest/changes.h"

#include <algorithm>

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

// Only what is said: who it was the manager knows by itself, and tells first. Where it came from is not cut.
std::string said(const Request& request) {
  const std::string from = "REST, from " + request.peer, by = text(request, "by");
  const std::string between = by.empty() ? "" : ", ";
  const size_t room = kMostSaid - std::min(kMostSaid, from.size() + between.size());
  return printable(by, room) + between + from;
}

kj::Promise<Answer> cordon(const Context& context, const Request& request, bool cordoned) {
  const std::string server = checkedServer(context, request);
  note(request, (cordoned ? "cordons server " : "uncordons server ") + printable(server, 255));
  auto order = context.service.managerFor(request.who).cordonRequest();
  order.setServer(server);
  order.setCordoned(cordoned);
  order.setReason(text(request, "reason"));
  order.setBy(said(request));
  return order.send().then(
      [server, cordoned](auto&&) -> Answer { return {200, {{"name", server}, {"cordoned", cordoned}}}; });
}

std::string demandFolder(const Request& request) {
  std::string folder = text(request, "folder");
  if (folder.empty())
    refuse({400, "bad_field", "'folder' is required", "name a folder in the server's checkpoint folder"});
  return folder;
}

MoveTarget targetOf(const Request& request) {
  MoveTarget to;
  to.server = text(request, "server");
  if (const auto at = request.body.find("devices"); at != request.body.end())
    to.devices = at->get<std::vector<uint32_t>>();
  to.elsewhere = flag(request, "elsewhere");
  return to;
}

kj::Promise<Answer> suspend(const Context& context, const Request& request, const std::string& folder) {
  const Id id = ownLease(context, request);
  note(request, (folder.empty() ? "suspends lease " : "holds in files lease ") + id.text());
  auto order = context.service.managerFor(request.who).suspendRequest();
  write(id, order.initId());
  order.setDrainMs(static_cast<uint32_t>(request.counts.at("drainMs")));
  order.setFolder(folder);
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

kj::Promise<Answer> resume(const Context& context, const Request& request, const std::string& folder) {
  const Id id = ownLease(context, request);
  note(request, (folder.empty() ? "resumes lease " : "restores lease ") + id.text());
  auto order = context.service.managerFor(request.who).resumeRequest();
  write(id, order.initId());
  order.setWaitMs(static_cast<uint32_t>(request.counts.at("waitMs")));
  order.setFolder(folder);
  write(folder.empty() ? MoveTarget() : targetOf(request), order.initTo());
  return orLater(context, id,
                 order.send().then([context, id](auto&&) -> Answer { return {200, describe(context, id)}; }));
}

}  // namespace

Id ownLease(const Context& context, const Request& request) {
  const Id id = leaseId(request);
  const auto at = context.service.pool().leases().find(id);
  if (at == context.service.pool().leases().end()) {
    if (queued(context, request, id))
      refuse(
          {409, "queued", "the lease waits for its devices", "GET /v1/queue shows its place in the queue"});
    refuseUnknown(context, id);
  }
  if (!request.who.owns(at->second.tenant))
    refuse({403, "forbidden", "that lease is another tenant's", "use that tenant's token"});
  return id;
}

kj::Promise<Answer> releaseLease(const Context& context, const Request& request) {
  const Id named = leaseId(request);
  if (context.service.pool().endedBecause(named) != nullptr) return Answer{200, describe(context, named)};
  if (queued(context, request, named)) {
    note(request, "releases lease " + named.text() + ", which waits");
    auto order = context.service.managerFor(request.who).releaseRequest();
    write(named, order.initId());
    return order.send().then([context, named](auto&&) -> Answer { return {200, describe(context, named)}; });
  }
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
  return suspend(context, request, "");
}

kj::Promise<Answer> resumeLease(const Context& context, const Request& request) {
  return resume(context, request, "");
}

kj::Promise<Answer> holdLease(const Context& context, const Request& request) {
  return suspend(context, request, demandFolder(request));
}

kj::Promise<Answer> restoreLease(const Context& context, const Request& request) {
  return resume(context, request, demandFolder(request));
}

kj::Promise<Answer> checkpointLease(const Context& context, const Request& request) {
  const Id id = ownLease(context, request);
  const std::string folder = demandFolder(request);
  note(request, "writes a checkpoint of lease " + id.text());
  auto order = context.service.managerFor(request.who).checkpointRequest();
  write(id, order.initId());
  order.setDrainMs(static_cast<uint32_t>(request.counts.at("drainMs")));
  order.setFolder(folder);
  return orLater(context, id, order.send().then([context, id](auto&& response) -> Answer {
    const CheckpointResult result = read(response.getResult());
    Json json = describe(context, id);
    json["sessions"] = result.sessions;
    json["bytes"] = result.bytes;
    json["longestPauseMs"] = result.longestPauseMs;
    json["folder"] = result.folder;
    json["place"] = result.server;
    return {200, std::move(json)};
  }));
}

kj::Promise<Answer> migrateLease(const Context& context, const Request& request) {
  const Id id = ownLease(context, request);
  note(request, "moves lease " + id.text());
  auto order = context.service.managerFor(request.who).migrateRequest();
  write(id, order.initId());
  write(targetOf(request), order.initTo());
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

kj::Promise<Answer> drainServer(const Context& context, const Request& request) {
  const std::string server = checkedServer(context, request);
  if (!flag(request, "stay")) note(request, "drains server " + printable(server, 255));
  auto order = context.service.managerFor(request.who).drainRequest();
  order.setServer(server);
  order.setReason(text(request, "reason"));
  order.setBy(said(request));
  order.setStay(flag(request, "stay"));
  return order.send().then([server](auto&& response) -> Answer {
    const DrainState state = read(response.getState());
    Json leases = Json::array();
    for (const DrainedLease& one : state.leases)
      leases.push_back({{"id", one.id.text()}, {"state", one.state}, {"note", one.note}});
    return {state.moving ? 202u : 200u,
            {{"name", server},
             {"cordoned", true},
             {"drained", leases.empty()},
             {"pending", state.moving},
             {"leases", std::move(leases)}}};
  });
}

kj::Promise<Answer> uncordonServer(const Context& context, const Request& request) {
  return cordon(context, request, false);
}

}  // namespace gpupool::pool::rest
