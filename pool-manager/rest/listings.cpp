#include "pool-manager/rest/listings.h"

#include "pool-manager/convert.h"
#include "pool-manager/listing_json.h"

namespace gpupool::pool::rest {
namespace {

Answer ok(Json json) { return {200, std::move(json)}; }

}  // namespace

Id leaseId(const Request& request) {
  const std::string& text = request.named.at("id");
  if (const auto id = Id::parse(text)) return *id;
  refuse({404, "lease_unknown", "that is no lease's id", "an id has 32 hexadecimal digits: GET /v1/leases"});
}

void refuseUnknown(const Context& context, const Id& id) {
  if (const std::string* why = context.service.pool().endedBecause(id))
    refuse({404, "lease_ended", "the lease has ended: " + *why});
  refuse(
      {404, "lease_unknown", "there is no lease " + id.text(), "GET /v1/leases lists those that there are"});
}

kj::Promise<Answer> health(const Context&, const Request&) {
  return ok({{"status", "ok"}, {"version", GPUPOOL_VERSION}});
}

kj::Promise<Answer> listDevices(const Context& context, const Request& request) {
  auto manager = context.service.managerFor(request.who);
  auto devices = manager.devicesRequest().send();
  auto servers = manager.serversRequest().send();
  auto leases = manager.leasesRequest().send();
  return devices.then([servers = kj::mv(servers), leases = kj::mv(leases)](auto&& first) mutable {
    return servers.then([leases = kj::mv(leases), first = kj::mv(first)](auto&& second) mutable {
      return leases.then([first = kj::mv(first), second = kj::mv(second)](auto&& third) -> Answer {
        const PoolView view(read(third.getLeases()), read(second.getServers()));
        Json list = Json::array();
        for (const ListedDevice& device : read(first.getDevices())) list.push_back(toJson(device, view));
        return ok({{"devices", std::move(list)}});
      });
    });
  });
}

kj::Promise<Answer> listServers(const Context& context, const Request& request) {
  return context.service.managerFor(request.who).serversRequest().send().then([](auto&& response) -> Answer {
    Json list = Json::array();
    for (const ListedServer& server : read(response.getServers())) list.push_back(toJson(server));
    return ok({{"servers", std::move(list)}});
  });
}

kj::Promise<Answer> listLeases(const Context& context, const Request& request) {
  std::optional<Id> after;
  if (request.query.contains("cursor")) {
    after = Id::parse(text(request, "cursor"));
    if (!after) refuse({400, "bad_parameter", "'cursor' is none", "take nextCursor of the page before"});
  }
  const auto matches = [after, state = text(request, "state"), query = request.query](const Lease& lease) {
    const auto is = [&](const char* name, const std::string& value) {
      const auto at = query.find(name);
      return at == query.end() || at->second == value;
    };
    return (!after || *after < lease.id) && is("state", lease.state) && is("tenant", lease.tenant) &&
           is("server", lease.server.name);
  };
  return context.service.managerFor(request.who)
      .leasesRequest()
      .send()
      .then([matches, most = request.counts.at("limit")](auto&& response) -> Answer {
        Json list = Json::array();
        std::string last;
        for (auto one : response.getLeases()) {
          const Lease lease = read(one);
          if (!matches(lease)) continue;
          if (list.size() == most) return ok({{"leases", std::move(list)}, {"nextCursor", last}});
          list.push_back(toJson(lease));
          last = lease.id.text();
        }
        return ok({{"leases", std::move(list)}});
      });
}

kj::Promise<Answer> getLease(const Context& context, const Request& request) {
  const Id id = leaseId(request);
  return context.service.managerFor(request.who)
      .leasesRequest()
      .send()
      .then([context, request, id](auto&& response) -> Answer {
        for (auto one : response.getLeases())
          if (read(one.getId()) == id) return ok(toJson(read(one)));
        if (auto waiting = queued(context, request, id)) return ok(std::move(*waiting));
        // Who may not see the lease knows its id all the same: it says nothing of who asked.
        if (const Problem* why = context.orders.unserved(id))
          refuse({404, "lease_unserved", "the request got no lease: " + why->message, why->hint});
        refuseUnknown(context, id);
      });
}

kj::Promise<Answer> events(const Context& context, const Request& request) {
  return context.events.subscribe(request);
}

}  // namespace gpupool::pool::rest
