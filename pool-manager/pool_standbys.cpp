// The standby of a lease (TurnTerms::standbyKeeps): another server, which keeps the checkpoints of its
// sessions. It has GPUs like the lease's, and is on another host if there is one; nothing is reserved there.
// When the lease's server dies, the lease goes to its standby if that has room (Pool::placeHeld).
//
// It is named when the lease is placed, and another one when it cannot serve any more: it is silent, or
// cordoned, or the lease has come to it. Where there is none, the lease's holder keeps the checkpoints, and
// one is looked for again and again. What a standby is told it may not hear: its beats say what it keeps, and
// it is told again until that is what it is to keep. So it also hears that a lease has ended. The number of
// the standby (standbyEpoch) has the lease's server take none that was replaced.
#include <algorithm>

#include "base/log.h"
#include "pool-manager/pool.h"

namespace gpupool::pool {
namespace {

constexpr uint64_t kLookAgainMs = 2'000;     // where there is none
constexpr uint64_t kLookForHostMs = 10'000;  // where the one that there is dies with the lease's host
constexpr unsigned kMostLooks = 8;           // at one moment, for all leases: each looks at every server

}  // namespace

// Not of one that is held in files: there are its sessions.
bool Pool::wantsStandby(const LeaseRecord& record) {
  return record.runs() && record.terms.standbyKeeps && (!record.hold || record.hold->atHolder);
}

bool Pool::standbyServes(const LeaseRecord& record, uint64_t now) const {
  const auto at = servers_.find(record.standby);
  return at != servers_.end() && alive(at->second, now) && !isCordoned(record.standby) &&
         at->second.facts.keepBytes != 0 && !record.isPlacedOn(record.standby);
}

bool Pool::standbyOnHost(const LeaseRecord& record) const {
  const auto at = servers_.find(record.standby);
  return at != servers_.end() && record.isPlaced() && at->second.facts.bootId == record.server().bootId;
}

StandbyChoice Pool::chooseStandby(const LeaseRecord& record, uint64_t now) const {
  MoveWish wish = placeWanted(record, {});
  wish.from = record.server().name;
  const auto uses = inventory({}, now, {.named = false});
  std::vector<KeeperUse> keepers;
  for (const ServerUse& use : uses) {
    const Server& facts = servers_.at(use.name).facts;
    const auto leases = standbyFor_.find(use.name);
    keepers.push_back({&use, facts.bootId == record.server().bootId, facts.keepBytes,
                       leases == standbyFor_.end() ? 0 : leases->second.size()});
  }
  return placeStandby(wish, keepers);
}

void Pool::nameStandby(LeaseRecord& record, uint64_t now) {
  const StandbyChoice choice = chooseStandby(record, now);
  record.standbyLookedMs = now;
  record.standbyMissing = choice.missing;
  // One that is as good is not worth a whole checkpoint.
  if (choice.sameHost && standbyOnHost(record) && standbyServes(record, now)) return;
  if (choice.server == record.standby) return;
  GPUPOOL_INFO("lease %s: its checkpoints are kept %s", record.id.text().c_str(),
               choice.server.empty() ? ("by its holder: " + choice.missing).c_str()
                                     : ("on server " + choice.server).c_str());
  if (!record.standby.empty()) standbyFor_[record.standby].erase(record.id);
  record.standby = choice.server;
  record.standbyEpoch = ++epoch_;
  if (!record.standby.empty()) standbyFor_[record.standby].insert(record.id);
  if (record.unborn) return;  // it is written as a whole
  storePlacements(record);
  tellStandby(record);
}

// While it is on its way to another server it has the standby that it had there: nobody else may have its
// checkpoints.
void Pool::lookAtStandby(LeaseRecord& record, uint64_t now) {
  if (!record.terms.standbyKeeps || now < settledMs_) return;
  if (!wantsStandby(record) || record.hold || record.state != LeaseState::active ||
      record.change != Change::none)
    return;
  const bool missing =
      record.standby.empty() ? now >= record.standbyLookedMs + kLookAgainMs : !standbyServes(record, now);
  const bool betterWanted = standbyOnHost(record) && now >= record.standbyLookedMs + kLookForHostMs;
  if (!missing && !betterWanted) return;
  if (standbyLooks_.first != now) standbyLooks_ = {now, 0};
  if (standbyLooks_.second++ < kMostLooks) nameStandby(record, now);
}

void Pool::tellStandby(const LeaseRecord& record) {
  if (!wantsStandby(record) || record.standby.empty() || !record.isPlaced()) return;
  if (record.state == LeaseState::granting || record.isPlacedOn(record.standby)) return;
  const auto at = servers_.find(record.standby);
  if (at != servers_.end() && at->second.connected) events_.keep(at->second.facts.life(), tell(record));
}

void Pool::setKept(const std::string& name, const std::vector<KeptLease>& kept, uint64_t now) {
  latestMs_ = now;
  const auto server = servers_.find(name);
  if (server == servers_.end()) return;
  std::set<Id> right;
  const auto& leases = leases_.quietly();
  for (const KeptLease& one : kept) {
    const auto at = leases.find(one.id);
    if (at == leases.end() || !wantsStandby(at->second) || at->second.standby != name ||
        at->second.standbyEpoch != one.standbyEpoch)
      events_.dropKept(server->second.facts.life(), one.id);
    else if (!at->second.isPlaced() || at->second.primary().epoch == one.deviceEpoch)
      right.insert(one.id);
  }
  const auto named = standbyFor_.find(name);
  if (named == standbyFor_.end()) return;
  std::erase_if(named->second, [&](const Id& id) {
    const auto at = leases.find(id);
    return at == leases.end() || !at->second.runs() || at->second.standby != name;
  });
  for (const Id& id : named->second)
    if (!right.contains(id)) tellStandby(leases.at(id));
}

std::optional<Server> Pool::standbyOf(const LeaseRecord& record) const {
  const auto at = servers_.find(record.standby);
  if (!wantsStandby(record) || at == servers_.end()) return std::nullopt;
  Server standby = at->second.facts;
  standby.devices.clear();  // nothing of them is the lease's
  return standby;
}

std::optional<Server> Pool::standbyOf(const Id& id) const {
  const auto at = leases_.find(id);
  return at == leases_.end() ? std::nullopt : standbyOf(at->second);
}

std::string Pool::standbyText(const LeaseRecord& record) const {
  if (!wantsStandby(record)) return "";
  if (record.standby.empty())
    return "has no standby, and its holder keeps its checkpoints" +
           (record.standbyMissing.empty() ? "" : ": " + record.standbyMissing);
  return "has its checkpoints kept by its standby, server " + record.standby +
         (standbyOnHost(record) ? ", which is on the same host" : "");
}

}  // namespace gpupool::pool
