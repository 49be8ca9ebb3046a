// Leases that are held in files, and come back: onto devices like those that they had, there or on another
// server. What goes into files is suspended (pool_suspends.cpp); of what it has left its server is told as of
// a lease that has moved away (pool_moves.cpp).
//
// A held lease has no devices. To be restored it is placed as a new one is, and granted with its files'
// checkpoint, so that the server begins no session of it; then the server is ordered to rebuild them. `hold`
// stays until it says that all are rebuilt. Whatever goes wrong before, the lease has left that server again,
// and is held as before: the files are what they were, and its clients have not come yet.
//
// It goes into other files only when the store has accepted that it has come from these (Change::restored).
// Otherwise a manager that is started again would find the old ones there, and restore what the lease was
// once.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "pool-manager/pool.h"
#include "pool-manager/refusal.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostRestoring = 4096;
constexpr size_t kMostToLeave = 8;  // of one lease, with those that it has left

// As it would be asked for, for those who wait behind it.
Wish wishOf(const LeaseRecord& record, const MoveWish& move) {
  Wish wish;
  wish.deviceCount = static_cast<uint32_t>(move.claims.size());
  wish.memoryBytes = move.claims.front().device.memoryBytes;
  wish.server = move.server;
  wish.gpu = move.gpu;
  wish.policy = record.policy;
  wish.clients = move.clients;
  return wish;
}

}  // namespace

// Throws for a lease that is held.
void Pool::demandUnheld(const LeaseRecord& record, const char* what) const {
  if (record.state == LeaseState::held && record.hold->atHolder)
    refuse(record, std::string("cannot be ") + what + ": its server is gone, and it waits for another one");
  if (record.state == LeaseState::held)
    refuse(record, std::string("cannot be ") + what + ": it is held in files (gpupool restore " +
                       shortId(record.id) + " " + record.hold->held.folder + ")");
}

void Pool::restore(LeaseRecord& record, const Principal& who, uint32_t waitMs, uint64_t now,
                   const std::string& folder, const MoveTarget& to) {
  const size_t had = record.hold->was.devices.size();
  if (!to.devices.empty() && to.devices.size() != had)
    refuse(record, "cannot be restored: it has " + std::to_string(had) + " GPU(s), and " +
                       std::to_string(to.devices.size()) + " are named");
  const bool waits = std::any_of(waiters_.begin(), waiters_.end(), [&](const Waiter& one) {
    return one.resumes && one.request.id == record.id && events_.resumeWanted(record.id);
  });
  if (waits) refuse(record, "waits already to be restored");
  if (waiters_.size() >= kMostRestoring)
    refuse(record, "cannot be restored: too many requests wait for devices");
  LeaseRequest place;
  place.id = record.id;
  enqueue({place, who, now + waitMs, true, 0, wishOf(record, placeWanted(record, to)), false, folder, to},
          now);
}

// It runs, and its server restores it from a checkpoint that it has not gone on from. Nothing of that is
// stored: it keeps its devices. Where it comes to stay in the files, its server says so with a beat.
void Pool::goBack(LeaseRecord& record, const Principal& who, uint64_t now, const std::string& folder,
                  const MoveTarget& to) {
  if (!to.empty())
    refuse(record,
           "cannot be restored elsewhere: it runs (gpupool checkpoint --hold " + shortId(record.id) +
               " writes it into files that it can be restored from elsewhere; gpupool migrate moves it)");
  demandServer(record, record.primary(), "restored", now);
  record.changedBy = who.text();
  record.change = Change::goingBack;
  record.order = ++orders_;
  record.orderedAt = record.server().name;
  events_.resume(record.orderedAt, record.id, folder, true, record.order);
}

MoveWish Pool::placeWanted(const LeaseRecord& record, const MoveTarget& to) const {
  const Placement& was = record.hold ? record.hold->was : record.primary();
  MoveWish wish;
  if (record.hold && !record.hold->atHolder) wish.server = to.server.empty() ? was.server.name : to.server;
  wish.ordinals = to.devices;
  wish.gpu = parseDeviceFilter(record.gpu);
  wish.policy = record.policy;
  wish.clients = clientsOf(record);
  for (const LeasedDevice& device : was.devices) {
    wish.claims.push_back({device, 0, record.terms.sharePercent, false});
    wish.claims.back().device.info.uuid.clear();  // they are not the lease's own any more
  }
  return wish;
}

Choice Pool::placeHeld(const LeaseRecord& record, const MoveWish& wish,
                       std::vector<ServerUse> servers) const {
  for (ServerUse& use : servers) {
    // All of a lease on one server is of one placement: what it has left there has to be gone first.
    if (use.unusable.empty() &&
        (record.on(use.name) != nullptr || servers_.at(use.name).strangers.contains(record.id)))
      use.unusable = "it has not confirmed yet that the lease has left it (ask again in a moment)";
    std::erase_if(use.devices, [](const DeviceUse& device) { return device.claimedMs != kNever; });
  }
  if (record.standby.empty() || !wish.server.empty()) return placeMove(wish, servers);
  // Its checkpoints need not travel there.
  MoveWish near = wish;
  near.server = record.standby;
  Choice choice = placeMove(near, servers);
  return choice.server.empty() ? placeMove(wish, servers) : choice;
}

// True: it has been answered, or will be by what was begun.
bool Pool::serveRestore(const Waiter& waiter, LeaseRecord& record, Queue& before, uint64_t now) {
  const MoveWish wish = placeWanted(record, waiter.to);
  const auto fail = [&](const std::string& missing) {
    events_.notResumed(record.id, {Failure::Kind::noDevice,
                                   "lease " + shortId(record.id) + " cannot be restored: " + missing});
    return true;
  };
  const auto there = inventory(waiter.who, now);
  const auto server =
      std::find_if(there.begin(), there.end(), [&](const ServerUse& use) { return use.name == wish.server; });
  if (server != there.end() && server->unusable.empty() && !couldMove(wish, *server))
    return fail(placeMove(wish, there).missing);
  Choice choice = placeHeld(record, wish, before.servers);
  const std::string overQuota = quotaHindersResume(record, before);
  if (!choice.server.empty() && overQuota.empty() && record.placements.size() < kMostToLeave) {
    beginRestore(waiter, record, std::move(choice));
    refresh(before, now);
    return true;
  }
  if (tooLate(waiter, now)) {
    std::string missing = placeHeld(record, wish, there).missing;
    if (missing.empty()) missing = overQuota;
    if (missing.empty() && record.placements.size() >= kMostToLeave)
      missing = "servers that it has left have not confirmed that yet";
    if (missing.empty()) missing = "the devices that are free are for those who waited longer";
    missing += behind(before);
    return fail(missing);
  }
  if (overQuota.empty()) stay(waiter, before, now);
  return false;
}

// Its devices are reserved from now on; their server hears of it when the store has accepted it.
void Pool::beginRestore(const Waiter& waiter, LeaseRecord& record, Choice choice) {
  record.placements.push_back({servers_.at(choice.server).facts,
                               std::move(choice.devices),
                               ++epoch_,
                               record.hold->was.key,
                               PlacementRole::primary,
                               {},
                               false});
  record.folder = waiter.folder;
  record.changedBy = waiter.who.text();
  record.change = Change::restoring;
  setState(record, LeaseState::granting);
  write(
      {{kLeasePrefix + record.id.text(), encodeLease(record, bootId_)}, {kEpochKey, std::to_string(epoch_)}},
      {}, [this, id = record.id](const std::string& why) { restorePlaced(id, why); });
}

void Pool::restorePlaced(const Id& id, const std::string& why) {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.change != Change::restoring) return;  // it has ended meanwhile
  LeaseRecord& record = at->second;
  const std::string name = record.server().name;
  if (why.empty()) sendGrant(record);
  if (record.ordered.contains(name)) return;
  record.primary().gone = true;
  stayHeld(record, why.empty()
                       ? Failure{Failure::Kind::serverLost, "lost the connection to server " + name}
                       : Failure{Failure::Kind::refused, "the manager cannot write its store: " + why});
}

void Pool::sendRestore(LeaseRecord& record) {
  if (record.hold->atHolder) return comeFromHolder(record);
  const std::string& server = record.server().name;
  const auto at = servers_.find(server);
  if (at == servers_.end() || !at->second.connected)
    return stayHeld(record, {Failure::Kind::serverLost, "lost the connection to server " + server});
  record.change = Change::resuming;
  if (record.folder.empty()) record.folder = record.hold->held.folder;  // of an earlier life of the manager
  record.order = ++orders_;
  record.orderedAt = server;
  events_.resume(server, record.id, record.folder, false, record.order);
}

// It is not restored, or is known no longer to be: what it has there is left.
void Pool::stayHeld(LeaseRecord& record, const Failure& failure) {
  GPUPOOL_WARNING("lease %s is held in %s still: %s", record.id.text().c_str(),
                  record.hold->held.folder.c_str(), failure.text.c_str());
  record.primary().role = PlacementRole::left;
  record.unheard = false;
  record.turn.reset();
  setState(record, LeaseState::held);
  endChange(record, {failure.kind, failure.text + "; the lease is held as before"});
  storePlacements(record);
  serveWaiters(latestMs_);
}

// It is held in files as far as its server goes, and as far as its next life goes; the store follows.
bool Pool::isBeingHeld(const LeaseRecord& record) {
  return record.change == Change::storing && record.suspension.held;
}

// Leases that the server does not have, and of which it says that an earlier life of it has held them. It
// says so until it is told that they have left it.
void Pool::noteFound(ServerRecord& server, const std::set<Id>& has,
                     const std::vector<SuspendedLease>& suspended, uint64_t now) {
  for (const SuspendedLease& found : suspended) {
    if (has.contains(found.id)) continue;
    const auto at = leases_.find(found.id);
    LeaseRecord* record = at == leases_.end() ? nullptr : &at->second;
    if (record != nullptr && isBeingHeld(*record)) continue;
    const bool wasHere = record != nullptr && record->isPlacedOn(server.facts.name) &&
                         record->server().incarnation != server.facts.incarnation;
    const bool ran = record != nullptr && !record->hold && record->change == Change::none &&
                     (record->state == LeaseState::active || record->state == LeaseState::granting);
    if (!wasHere || !ran || !found.held) {
      server.strangers.try_emplace(found.id);
      continue;
    }
    GPUPOOL_INFO("server %s says that lease %s was held when it was started again", server.facts.name.c_str(),
                 found.id.text().c_str());
    record->changedBy.clear();
    storeSuspended(*record, {{}, 0, 0, 0, found.held}, now);
  }
}

// Its sessions are with its server, and wait for their clients, or have them already.
void Pool::restored(LeaseRecord& record) {
  record.arrival = "from " + record.hold->held.folder +
                   (record.hold->atHolder ? ", on " + describe(record.primary()) : "");
  record.arrivalEvent = AuditEvent::restored;
  record.hold.reset();
  record.suspension = {};
  storePlacements(record);
}

}  // namespace gpupool::pool
