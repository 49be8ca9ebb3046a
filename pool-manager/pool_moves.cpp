// Moving: a lease whose sessions go to other workers, or are copied into files, of which only their server
// keeps anything; or go to other devices, of its server or of another one.
//
// A lease that moves to a target has two placements, and both count, from before anybody hears of the target
// until the store has accepted that the lease is on one of them. The other one has been left from then on:
// it counts until its server has said that it has given the devices up. Which sessions are where, only the
// servers know; so where it is unknown what became of an order, the lease keeps both placements, and whoever
// asks again has the order given again.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "pool-manager/pool.h"
#include "pool-manager/refusal.h"
#include "schema/server_name.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostPlacements = 8;     // of one lease, with those that it has left
constexpr uint64_t kWriteAgainMs = 1000;  // what the store refused is tried again after this
constexpr char kMoved[] = "moved";

// Whether that is where the lease is going already.
bool leadsTo(const MoveTarget& to, const LeaseRecord& record, const Placement& target) {
  const bool own = target.server.name == record.server().name;
  if (to.server.empty() ? to.elsewhere == own : to.server != target.server.name) return false;
  return to.devices.empty() ||
         std::equal(to.devices.begin(), to.devices.end(), target.devices.begin(), target.devices.end(),
                    [](uint32_t ordinal, const LeasedDevice& one) { return ordinal == one.info.ordinal; });
}

bool hasLeft(const LeaseRecord& record, const std::string& server) {
  return std::any_of(record.placements.begin(), record.placements.end(), [&](const Placement& one) {
    return one.role == PlacementRole::left && one.server.name == server;
  });
}

bool isHere(const LeaseRecord& record, const Placement& placement) {
  return record.isPlacedOn(placement.server.name);
}

}  // namespace

void Pool::migrate(const Principal& who, const Id& id, uint32_t drainMs, const MoveTarget& to, uint64_t now) {
  latestMs_ = now;
  LeaseRecord& record = demandRunning(who, id, kMoved);
  demandUnheld(record, kMoved);
  const Placement* target = record.target();
  if (target != nullptr && !to.empty() && !leadsTo(to, record, *target))
    refuse(record, "is moving to " + describe(*target) +
                       " already: it has to arrive there first (gpupool migrate " + shortId(id) + ")");
  if (isMove(record.change) && (to.empty() || target != nullptr)) return;  // the answer follows
  if (record.change != Change::none) refuseNow(record);
  if (record.state == LeaseState::suspended)
    refuse(record, "cannot be moved: it is suspended, and has to be resumed first");
  demandServer(record, record.primary(), kMoved, now);
  record.drainMs = drainMs;
  record.changedBy = who.text();
  if (target != nullptr) {
    demandServer(record, *target, kMoved, now);
    return sendPrepare(record);  // again: its server may have been started again, or never heard of it
  }
  if (to.empty()) return sendMigrate(record);
  addTarget(record, chooseTarget(record, who, to, now));
}

Choice Pool::chooseTarget(const LeaseRecord& record, const Principal& who, const MoveTarget& to,
                          uint64_t now) const {
  const std::string why = "cannot be moved: ";
  const Placement& from = record.primary();
  if (!to.devices.empty() && to.devices.size() != from.devices.size())
    refuse(record, why + "it has " + std::to_string(from.devices.size()) + " GPU(s), and " +
                       std::to_string(to.devices.size()) + " are named");
  if (!to.devices.empty() && to.server.empty() && to.elsewhere)
    refuse(record, why + "GPUs are named by their numbers on one server");
  const bool stays = to.server.empty() ? !to.elsewhere : to.server == from.server.name;
  if (stays && servers_.at(from.server.name).facts.overcommitPercent > 100)
    refuse(record, why + "leases of server " + from.server.name +
                       " take turns on the GPUs that they have; to another server they move");
  if (record.placements.size() >= kMostPlacements)
    refuse(record, why + "servers that it has left have not confirmed that yet");
  MoveWish wish{from.server.name, {}, printable(to.server, schema::kMostServerName), to.devices};
  if (to.server.empty() && !to.elsewhere) wish.server = from.server.name;
  wish.gpu = parseDeviceFilter(record.gpu);
  wish.policy = record.policy;
  wish.clients = clientsOf(record);
  for (size_t i = 0; i < from.devices.size(); ++i) wish.claims.push_back(claimOf(record, from, i, true));
  auto servers = inventory(who, now);
  for (ServerUse& use : servers)
    if (use.unusable.empty() &&
        (hasLeft(record, use.name) || servers_.at(use.name).strangers.contains(record.id)))
      use.unusable = "it has not confirmed yet that the lease has left it (ask again in a moment)";
  for (ServerUse& use : servers)  // sessions go there over the network
    if (use.unusable.empty() && use.name != from.server.name && servers_.at(use.name).facts.port == 0)
      use.unusable = "it takes no network sessions: start it with --listen";
  Choice choice = placeMove(wish, servers);
  if (choice.server.empty()) refuse(record, why + choice.missing);
  return choice;
}

// Its devices are reserved from now on; its server hears of it when the store has accepted it.
void Pool::addTarget(LeaseRecord& record, Choice choice) {
  record.placements.push_back({servers_.at(choice.server).facts,
                               std::move(choice.devices),
                               ++epoch_,
                               record.primary().key,
                               PlacementRole::target,
                               {},
                               false});
  setState(record, LeaseState::moving);
  record.change = Change::placing;
  write(
      {{kLeasePrefix + record.id.text(), encodeLease(record, bootId_)}, {kEpochKey, std::to_string(epoch_)}},
      {entryOf(AuditEvent::moving, record, record.changedBy, "to " + describe(*record.target()))},
      [this, id = record.id](const std::string& why) { placed(id, why); });
}

void Pool::placed(const Id& id, const std::string& why) {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.change != Change::placing) return;  // it has ended meanwhile
  LeaseRecord& record = at->second;
  const std::string name = record.target()->server.name;
  const auto server = servers_.find(name);
  if (why.empty() && server != servers_.end() && server->second.connected && !ofEarlierLife(*record.target()))
    return sendPrepare(record);
  stayAfter(record, record.primary(),
            why.empty() ? Failure{Failure::Kind::serverLost, "lost the connection to server " + name}
                        : Failure{Failure::Kind::refused, "the manager cannot write its store: " + why});
}

void Pool::sendPrepare(LeaseRecord& record) {
  const Placement& target = *record.target();
  record.change = Change::preparing;
  record.order = ++orders_;
  record.orderedAt = target.server.name;
  events_.prepare(wireLease(record, target), isHere(record, target), record.order);
}

void Pool::prepareDone(const Id& id, uint64_t order, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::preparing, order);
  if (record == nullptr) return;
  const auto server = servers_.find(record->server().name);
  if (server != servers_.end() && server->second.connected && !ofEarlierLife(record->primary()))
    return sendMigrate(*record);
  endChange(*record, {Failure::Kind::serverLost, "lost the connection to server " + record->server().name});
}

void Pool::prepareFailed(const Id& id, uint64_t order, const std::string& why, bool refused, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::preparing, order);
  if (record == nullptr) return;
  const std::string text = "server " + record->target()->server.name + ": " + why;
  if (refused) return sendGiveBack(*record, {Failure::Kind::refused, text});
  keepBoth(*record, {Failure::Kind::serverLost, text});
}

// The lease stays what it is, whatever becomes of it; but nothing else is begun meanwhile, since the server
// would do it behind this.
void Pool::sendMigrate(LeaseRecord& record) {
  std::optional<Lease> target;
  if (record.target() != nullptr) target = wireLease(record, *record.target());
  record.change = Change::migrating;
  record.order = ++orders_;
  record.orderedAt = record.server().name;
  events_.migrate(record.orderedAt, record.id, record.drainMs, target ? &*target : nullptr, record.order);
}

void Pool::migrateDone(const Id& id, uint64_t order, const MigrateResult& result, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::migrating, order);
  if (record == nullptr) return;
  record->moved = result;
  record->failure.reset();
  if (record->target() != nullptr) return stayOn(*record, *record->target(), "all of its sessions are there");
  record->change = Change::none;
  answerMove(*record);
}

void Pool::migrateFailed(const Id& id, uint64_t order, const std::string& why, bool refused, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::migrating, order);
  if (record == nullptr) return;
  const Failure failure{refused ? Failure::Kind::refused : Failure::Kind::serverLost,
                        "server " + record->server().name + ": " + why};
  if (record->target() == nullptr) return endChange(*record, failure);
  refused ? sendGiveBack(*record, failure) : keepBoth(*record, failure);
}

// The order was refused. Where no session has moved, now or when it was given before, the lease is again what
// it was. The target's server knows.
void Pool::sendGiveBack(LeaseRecord& record, const Failure& failure) {
  const Placement& target = *record.target();
  const auto server = servers_.find(target.server.name);
  record.change = Change::returning;
  record.failure = failure;
  if (server == servers_.end() || !server->second.connected || ofEarlierLife(target))
    return keepBoth(record, failure);
  record.order = ++orders_;
  record.orderedAt = target.server.name;
  events_.giveBack(wireLease(record, target), isHere(record, target), record.order);
}

void Pool::returned(const Id& id, uint64_t order, bool unused, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::returning, order);
  if (record == nullptr) return;
  if (!unused) return keepBoth(*record, record->failure.value());
  record->target()->gone = isHere(*record, *record->target());
  stayOn(*record, record->primary(), record->failure.value().text);
}

void Pool::returnFailed(const Id& id, uint64_t order, const std::string& why, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::returning, order);
  if (record == nullptr) return;
  Failure failure = record->failure.value();
  failure.text += "; server " + record->target()->server.name + " does not say what is there: " + why;
  keepBoth(*record, failure);
}

void Pool::keepBoth(LeaseRecord& record, Failure failure) {
  failure.text +=
      "; the lease may have sessions in both places: it is moving to " + describe(*record.target()) +
      " still, and goes on when it is asked to again (gpupool migrate " + shortId(record.id) + ")";
  endChange(record, failure);
}

// It is there and nowhere else from now on.
void Pool::stayOn(LeaseRecord& record, Placement& kept, const std::string& arrival) {
  const bool stayed = &kept == &record.primary();
  if (!stayed) record.turn.reset();
  for (Placement& one : record.placements)
    one.role = &one == &kept ? PlacementRole::primary : PlacementRole::left;
  if (record.state == LeaseState::moving) setState(record, LeaseState::active);
  record.change = Change::settling;
  record.arrival = arrival;
  record.arrivalEvent = stayed ? AuditEvent::stayed : AuditEvent::moved;
  storePlacements(record);
}

// It is on that server no longer, and stays where it is besides.
void Pool::abandon(LeaseRecord& record, const std::string& server, const std::string& reason) {
  Placement& kept = *livesBeside(record, server);
  GPUPOOL_WARNING("lease %s is on %s only, since %s", record.id.text().c_str(), describe(kept).c_str(),
                  reason.c_str());
  stayAfter(record, kept,
            {Failure::Kind::serverLost, "the lease is on " + describe(kept) + " now: " + reason});
}

// Whatever was under way has ended with that.
void Pool::stayAfter(LeaseRecord& record, Placement& kept, const Failure& failure) {
  endChange(record, failure);
  record.failure = failure;
  stayOn(record, kept, failure.text);
}

// What is gone is free when the store has accepted that, and what has been left is told of it then.
void Pool::storePlacements(LeaseRecord& record) {
  record.rewrite = true;
  if (record.rewriting) return;  // placementsStored() looks again
  record.rewrite = false;
  record.rewriting = true;
  record.rewrittenMs = latestMs_;
  std::set<uint64_t> gone = record.goneEpochs();
  if (isBeingHeld(record)) gone.erase(record.primary().epoch);  // storedSuspended() says where it was
  StoredLease stored = toStore(record);
  stored.forget(gone);
  std::vector<AuditEntry> entries;
  const std::string arrival = std::exchange(record.arrival, "");
  if (!arrival.empty()) entries.push_back(entryOf(record.arrivalEvent, record, record.changedBy, arrival));
  write({{kLeasePrefix + record.id.text(), encodeLease(stored, bootId_)}}, std::move(entries),
        [this, id = record.id, gone, arrival](const std::string& why) {
          const auto at = leases_.find(id);
          if (!why.empty() && at != leases_.end() && at->second.arrival.empty()) at->second.arrival = arrival;
          placementsStored(id, gone, why);
        });
}

void Pool::storePlacementsAgain(LeaseRecord& record, uint64_t now) {
  if (record.rewrite && !record.rewriting && record.runs() && now >= record.rewrittenMs + kWriteAgainMs)
    storePlacements(record);
}

void Pool::placementsStored(const Id& id, const std::set<uint64_t>& gone, const std::string& why) {
  const auto at = leases_.find(id);
  if (at == leases_.end()) return;
  LeaseRecord& record = at->second;
  record.rewriting = false;
  if (!record.runs()) return;  // its end says what is free
  if (record.change == Change::restored && !record.rewrite) {
    if (why.empty()) record.change = Change::none;
    events_.resumed(id);  // its sessions are there, whatever the store says
  }
  if (!why.empty()) {  // tick() tries again
    record.rewrite = true;
    if (record.change != Change::settling) return;
    const Failure unwritten{
        Failure::Kind::refused,
        "the lease is on " + describe(record.primary()) +
            ", but what it has left is not free before the manager can write its store: " + why};
    return events_.notMigrated(id, record.failure.value_or(unwritten));
  }
  record.forget(gone);
  if (record.rewrite) return storePlacements(record);
  if (record.change == Change::settling) {
    record.change = Change::none;
    answerMove(record);
  }
  for (const Placement& placement : record.placements)
    if (placement.role == PlacementRole::left) tellLeft(record, placement);
  serveWaiters(latestMs_);
}

void Pool::answerMove(LeaseRecord& record) {
  if (const auto failure = std::exchange(record.failure, std::nullopt))
    return events_.notMigrated(record.id, *failure);
  record.moved.server = describe(record.primary());
  events_.migrated(record.id, record.moved);
}

// Again with every beat, until its server has confirmed it.
void Pool::tellLeft(LeaseRecord& record, const Placement& left) {
  const std::string& name = left.server.name;
  const auto server = servers_.find(name);
  if (left.role != PlacementRole::left || !record.runs() || record.rewrite || record.rewriting || left.gone)
    return;
  if (server == servers_.end() || !server->second.connected || ofEarlierLife(left)) return;
  if (!isHere(record, left)) {
    if (!record.ordered.contains(name))
      sendRevoke(
          record, name,
          record.hold ? "its sessions are held in files" : "its sessions have moved to another server");
    return;
  }
  if (record.settleOrder != 0 || record.state == LeaseState::granting) return;
  record.settleOrder = ++orders_;
  events_.settle(name, record.id, record.settleOrder);
}

void Pool::settled(const Id& id, uint64_t order, uint64_t now) {
  latestMs_ = now;
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.settleOrder != order || order == 0) return;
  LeaseRecord& record = at->second;
  record.settleOrder = 0;
  if (!record.runs()) return;
  for (Placement& one : record.placements)
    if (one.role == PlacementRole::left && isHere(record, one)) one.gone = true;
  storePlacements(record);
}

// The next beat takes it from here.
void Pool::settleFailed(const Id& id, uint64_t order, uint64_t now) {
  latestMs_ = now;
  const auto at = leases_.find(id);
  if (at != leases_.end() && at->second.settleOrder == order) at->second.settleOrder = 0;
}

std::vector<Server> Pool::places(const Principal& who, const Id& id) const {
  demandOwner(who, id);
  const auto at = leases_.find(id);
  if (at == leases_.end() || !at->second.runs()) {
    const auto dead = tombstones_.find(id);
    unheard_.erase(id);
    throw std::invalid_argument("the lease has ended: " + (at != leases_.end()         ? at->second.reason
                                                           : dead != tombstones_.end() ? dead->second.reason
                                                                                       : "it is gone"));
  }
  const LeaseRecord& record = at->second;
  std::vector<Server> servers;
  if (record.hold) return servers;  // whoever waits for it asks again
  if (record.target() != nullptr && !isHere(record, *record.target()))
    servers.push_back(record.target()->server);
  servers.push_back(record.server());
  return servers;
}

// --- into files

void Pool::checkpoint(const Principal& who, const Id& id, uint32_t drainMs, const std::string& folder,
                      uint64_t now) {
  latestMs_ = now;
  LeaseRecord& record = demandRunning(who, id, "written into files");
  demandArrived(record, "written into files");
  demandUnheld(record, "written into files");
  if (record.change != Change::none) refuseNow(record);
  if (record.state == LeaseState::suspended)
    refuse(record, "cannot be written into files: it is suspended, and has to be resumed first");
  demandServer(record, record.primary(), "written into files", now);
  record.change = Change::copying;
  record.order = ++orders_;
  record.orderedAt = record.server().name;
  events_.checkpoint(record.orderedAt, id, drainMs, folder, record.order);
}

void Pool::checkpointDone(const Id& id, uint64_t order, CheckpointResult result, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::copying, order);
  if (record == nullptr) return;
  record->change = Change::none;
  result.server = record->server().name;
  events_.checkpointed(id, result);
}

void Pool::checkpointFailed(const Id& id, uint64_t order, const std::string& why, uint64_t now) {
  latestMs_ = now;
  LeaseRecord* record = ordered(id, Change::copying, order);
  if (record == nullptr) return;
  endChange(*record, {Failure::Kind::refused, "server " + record->server().name + ": " + why});
}

}  // namespace gpupool::pool
