#include "pool-manager/rest/drain.h"

#include "pool-manager/convert.h"
#include "pool-manager/listing_json.h"
#include "pool-manager/rest/changes.h"
#include "pool-manager/rpc.h"

namespace gpupool::pool::rest {
namespace {

constexpr uint32_t kDrainMs = 30'000;

bool isMovable(LeaseState state) { return state == LeaseState::active || state == LeaseState::moving; }

bool isThere(const LeaseRecord& lease, const std::string& server) {
  const Placement* placement = lease.on(server);
  return placement != nullptr && !placement->gone;
}

// Those that the server has anything of, and why each that was to move has not, as far as that is known.
Json remaining(const Context& context, const std::string& server) {
  const auto said = context.orders.said(server);
  Json list = Json::array();
  for (const auto& [id, lease] : context.service.pool().leases()) {
    if (!isThere(lease, server)) continue;
    const auto why = said.find(id);
    list.push_back(
        {{"id", id.text()}, {"state", name(lease.state)}, {"note", why == said.end() ? "" : why->second}});
  }
  return list;
}

// One after the other; those that have ended meanwhile are left out.
kj::Promise<void> moveAway(Context context, Principal who, std::string server, std::vector<Id> leases) {
  if (leases.empty()) return kj::READY_NOW;
  const Id id = leases.back();
  leases.pop_back();
  const auto at = context.service.pool().leases().find(id);
  const bool moves = at != context.service.pool().leases().end() && isMovable(at->second.state) &&
                     at->second.isPlacedOn(server) && context.service.pool().cordons().contains(server);
  if (!moves) return moveAway(context, who, server, std::move(leases));
  auto order = context.service.managerFor(who).migrateRequest();
  write(id, order.initId());
  MoveTarget elsewhere;
  elsewhere.elsewhere = true;
  write(elsewhere, order.initTo());
  order.setDrainMs(kDrainMs);
  return order.send()
      .then(
          [context, server, id](auto&&) { context.orders.say(server, id, ""); },
          [context, server, id](kj::Exception&& error) { context.orders.say(server, id, errorText(error)); })
      .then([context, who, server, leases = std::move(leases)]() mutable {
        return moveAway(context, who, server, std::move(leases));
      });
}

}  // namespace

kj::Promise<Answer> drainServer(const Context& context, const Request& request) {
  return cordonServer(context, request).then([context, request](Answer&& cordoned) -> Answer {
    const std::string& server = request.named.at("name");
    std::vector<Id> leases;
    for (const auto& [id, lease] : context.service.pool().leases())
      if (isMovable(lease.state) && lease.isPlacedOn(server)) leases.push_back(id);
    if (!flag(request, "stay") && !leases.empty() && context.orders.begin(server))
      context.orders.goOn(
          moveAway(context, request.who, server, std::move(leases)).attach(kj::defer([context, server] {
            context.orders.end(server);
          })));
    Json left = remaining(context, server);
    const bool pending = context.orders.isUnderWay(server);
    cordoned.json["drained"] = left.empty();
    cordoned.json["pending"] = pending;
    cordoned.json["leases"] = std::move(left);
    if (pending) cordoned.status = 202;
    return kj::mv(cordoned);
  });
}

}  // namespace gpupool::pool::rest
