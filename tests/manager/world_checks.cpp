// The checker: what must never be, whatever has happened.
#include <algorithm>

#include "tests/manager/simulated_world.h"

namespace gpupool::history {

void World::checkCordon(const Lease& lease) {
  if (const auto cordoned = cordoned_.find(lease.server.name);
      cordoned != cordoned_.end() && !cordoned->second.contains(lease.id))
    fault("a lease came to be on a cordoned server");
}

// A manager that has lost its store may take another lease for this one.
void World::checkRevoke(const SimulatedServer& server, const ServerLife& life, const Id& id) {
  const auto record = pool_->leases().find(id);
  const auto there = server.leases.find(id);
  if (record != pool_->leases().end() && record->second.ending == LeaseState::revoked &&
      record->second.reason.starts_with("preempted"))
    ++result_.noticed;
  if (stores_ != 0 || record == pool_->leases().end() || !record->second.runs() ||
      there == server.leases.end() || server.facts.life() != life)
    return;
  if (there->second.closing) return;  // by an order of the manager's earlier life, which was checked then
  if (there->second.sessions + there->second.onTarget != 0)
    fault("sessions are ended although their lease goes on");
}

void World::check() {
  if (!pool_ && managerStartAt_ <= now_) startManager();
  std::map<std::string, Gpu> gpus;
  for (const SimulatedServer& server : servers_)
    for (const Device& device : server.facts.devices)
      for (const auto& [id, use] : server.on(device.uuid)) {
        Gpu& gpu = gpus[device.uuid];
        gpu.uses[id] = use;
        gpu.percent = std::min(gpu.percent, server.overcommitPercent);
      }
  for (const auto& [uuid, gpu] : gpus) checkGpu(uuid, gpu);
}

void World::checkGpu(const std::string& uuid, const Gpu& gpu) {
  uint64_t sum = 0, aside = 0, most = 0, shares = 0;
  for (const auto& [id, use] : gpu.uses) {
    sum += use.now, aside += use.aside, shares += use.share;
    if (use.resident != 0) most = std::max(most, use.resident - use.aside);
  }
  if (sum > kMemory / 100 * gpu.percent + kMemory % 100 * gpu.percent / 100)
    fault(gpu.percent == 100 ? "a GPU was granted twice: " + uuid
                             : "more of a GPU was granted than its server overcommits: " + uuid);
  if (gpu.percent == 100) return;
  if (aside + most > kMemory) fault("a lease cannot have its turn beside what the others keep: " + uuid);
  if (shares > 100) fault("more of a GPU's time was promised than there is: " + uuid);
}

// What is in files does not end with a server or a manager.
void World::checkHolds() {
  for (const auto& [id, record] : pool_->leases()) {
    if (record.hold && !record.runs() && record.ending == LeaseState::lost)
      fault("a lease was lost although it is in files: " + record.reason);
    if (record.state == LeaseState::held) wasHeld_.insert({stores_, id});
    if (record.runs() && !record.hold && wasHeld_.contains({stores_, id}))
      fault("a lease that is in files is not known to be there any more");
  }
}

// Not because its server was restarted.
void World::checkReadopted() {
  if (stores_ != 0) return;
  for (const SimulatedServer& server : servers_)
    for (const auto& [id, epoch] : server.readopted) {
      const auto record = pool_->leases().find(id);
      if (record == pool_->leases().end() || record->second.runs()) continue;
      const auto there = server.leases.find(id);
      if (server.alive && there != server.leases.end() && !there->second.closing &&
          record->second.reason == "its server " + server.facts.name + " was restarted")
        fault("a lease was lost although its restarted server goes on with it");
    }
}

// Who was well for a whole TTL has renewed, and the manager had only to read it. Judged when the lease
// expires: a holder that was stopped may be well again before the manager, stopped too, has told it. And
// the manager, too, must have run for so long meanwhile: one that is stopped shortly before a deadline, and
// goes on behind it, looks at its clock before it reads what the holder wrote when it was well again.
void World::checkExpiries() {
  for (const Holder& holder : holders_) {
    if (holder.is != Holder::Is::holding) continue;
    const auto lease = pool_->leases().find(holder.id);
    if (lease == pool_->leases().end() || lease->second.state != LeaseState::revoking ||
        lease->second.ending != LeaseState::expired || !expired_.insert(holder.id).second)
      continue;
    const auto created = created_.find({stores_, holder.id});
    if (holder.limitMs != 0 && created != created_.end() &&
        (refused_.contains(holder.id) || now_ + kStep >= created->second.atMs + holder.limitMs))
      continue;  // its time is over
    if (!holder.job.empty()) {
      checkUnused(holder);
      continue;
    }
    if (!holder.dead && now_ >= holder.stalledUntil && holder.healthySince + kTtlMs + kStep < now_ &&
        holder.managerRan + kTtlMs + kStep < managerRan_)
      fault("a lease expired although its holder renewed it");
  }
}

// A claim has ended since nobody has used it for its TTL.
void World::checkUnused(const Holder& holder) {
  ++result_.unused;
  for (const Program& one : holder.programs)
    if (one.is == Program::Is::using_ && now_ < one.heardAt + kTtlMs)
      fault("a claim ended although a program used it");
}

// A lease of which more is known than its id: its request.
const Holder* World::holderOf(const Id& id) const {
  for (const Holder& holder : holders_)
    if (holder.id == id) return &holder;
  return nullptr;
}

bool World::isModel(const std::string& gpu, const Device& device) {
  return gpu.empty() || gpu.starts_with("memory") || (gpu == "gpu x") == (device.name == "GPU x");
}

void World::checkModel(const Lease& lease) {
  const Holder* holder = holderOf(lease.id);
  for (const LeasedDevice& one : lease.devices)
    if (holder != nullptr && !isModel(holder->gpu, one.info))
      fault("a lease has another model than it named");
}

// After whatever the pool has done: the leases that are new.
void World::noteCreated() {
  if (!pool_ || !choosy_ || probing_) return;
  // One that the store has refused may be asked for again, by the same id.
  std::erase_if(created_, [&](const auto& one) { return !pool_->leases().contains(one.first.second); });
  for (const auto& [id, record] : pool_->leases()) {
    if (record.stillborn) refused_.insert(id);
    if (!created_.try_emplace({stores_, id}, Created{now_}).second) continue;
    const auto request = waiting_.find(id);
    if (request == waiting_.end()) continue;
    for (const auto& [other, before] : waiting_)
      if (!pool_->leases().contains(other)) checkOrder(request->second, before, record);
  }
  std::erase_if(waiting_, [&](const auto& one) { return pool_->leases().contains(one.first); });
}

// One of a higher class, or of the same tenant and earlier, waits: so the lease has only what that one
// could never have, or ends some day.
void World::checkOrder(const Waiting& served, const Waiting& waits, const LeaseRecord& lease) {
  const LeaseRequest &now = served.request, &before = waits.request;
  const Holder* holder = holderOf(before.id);
  if (holder == nullptr || holder->is != Holder::Is::asking || holder->dead || now.limitMs != 0) return;
  const bool precedes = before.turns.priority != now.turns.priority
                            ? before.turns.priority > now.turns.priority
                            : before.tenant == now.tenant && waits.arrival < served.arrival;
  if (!precedes) return;
  if (!lease.isPlaced()) return;
  const ServerRecord& server = pool_->servers().at(lease.server().name);
  std::set<std::string> could;
  for (size_t i = 0; i < server.facts.devices.size(); ++i)
    if (server.duplicates.at(i).empty() && isModel(before.gpu, server.facts.devices[i]))
      could.insert(server.facts.devices[i].uuid);
  if (could.size() < before.deviceCount) return;
  ++result_.ordered;
  for (const LeasedDevice& one : lease.primary().devices)
    if (could.contains(one.info.uuid)) fault("a request was served before another one that precedes it");
}

// Also over what the manager was stopped for, or away.
void World::checkLimits() {
  for (const auto& [id, record] : pool_->leases()) {
    const auto created = created_.find({stores_, id});
    const Holder* holder = holderOf(id);
    if (created == created_.end() || holder == nullptr || holder->limitMs == 0) continue;
    if (refused_.contains(id)) continue;  // asked for again, or the store had it all the same: since when?
    if (record.runs() && now_ > created->second.atMs + holder->limitMs + 2 * kStep)
      fault("a lease outlives its time limit");
    if (record.runs() || record.reason.find("time limit") == std::string::npos) continue;
    if (limited_.insert(id).second) ++result_.limited;
    if (now_ + kStep < created->second.atMs + holder->limitMs) fault("a lease ended before its time limit");
  }
}

// For whoever looks for the fault.
std::string World::state(const LeaseRecord& record) const {
  if (!record.isPlaced()) return ", nowhere";
  const auto server = pool_->servers().find(record.server().name);
  if (server == pool_->servers().end()) return ", which is not there";
  std::string text = server->second.connected ? ", connected" : ", away";
  if (server->second.facts.incarnation != record.server().incarnation) text += ", of an earlier life";
  if (!record.ordered.empty()) text += ", told";
  if (anyGone(record)) text += ", gone";
  if (record.closing) text += ", closing";
  for (const LeasedDevice& device : record.primary().devices)
    for (const Device& one : server->second.facts.devices)
      if (one.uuid == device.info.uuid && !one.problem.empty()) text += ", " + one.problem;
  return text;
}

// All faults are over, and all holders are gone: so are the leases, and every GPU can be had.
void World::checkQuiet() {
  if (!pool_) return fault("the manager did not start again");
  for (const auto& [id, record] : pool_->leases())
    return fault("a lease did not end: it is " + std::string(name(record.state)) + ", on server " +
                 (record.isPlaced() ? record.server().name : "-") + state(record));
  // How many leases may have the whole of it: by turns, if they keep nothing there.
  std::map<std::string, size_t> gpus;
  for (const SimulatedServer& server : servers_) {
    if (!server.leases.empty()) return fault("a server still holds a lease");
    for (const Device& device : server.facts.devices)
      gpus[device.uuid] = device.software ? server.facts.overcommitPercent / 100 : 1;
  }
  size_t whole = 0;
  for (const auto& [uuid, count] : gpus) whole += count;
  probing_ = true;
  for (size_t i = 0; i < whole + 1; ++i) {
    LeaseRequest request;
    request.id = newId();
    pool_->request({}, request, clock_->now());
  }
  if (pool_->leases().size() != whole)
    fault("of " + std::to_string(gpus.size()) + " GPUs that " + std::to_string(whole) +
          " leases could have, " + std::to_string(pool_->leases().size()) + " can when all is over");
}

}  // namespace gpupool::history
