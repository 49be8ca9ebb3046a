// Servers: joining, beats, and which server a GPU belongs to.
#include <algorithm>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "pool-manager/pool.h"
#include "pool-manager/roles.h"
#include "schema/server_name.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMostProblem = 200;  // bytes of a device's problem
constexpr size_t kUuidBytes = 16;
constexpr size_t kMostNote = 200;                                  // of what a server says of a lease's turn
constexpr size_t kMostHindrances = 8, kMostHindrance = 200;        // of a lease on a server; bytes of one
constexpr uint32_t kLeastOvercommit = 100, kMostOvercommit = 800;  // percent
constexpr uint64_t kMostMemory = uint64_t{1} << 50;                // of a device: sums stay far from 2^64
constexpr uint64_t kMostEpoch = uint64_t{1} << 62;                 // more than any calendar gives

void checkServer(const Server& facts, const std::vector<DeviceReport>& reports) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
  if (!schema::isServerName(facts.name))
    refuse("'" + printable(facts.name, schema::kMostServerName) +
           "' is no name for a server: " + schema::kServerNameRule);
  if (facts.devices.size() > kMaxDevices)
    refuse("a server has at most " + std::to_string(kMaxDevices) + " devices");
  if (facts.localPath.empty() && (facts.host.empty() || facts.port == 0))
    refuse("the server offers neither a local path nor a network address for sessions");
  if (facts.overcommitPercent < kLeastOvercommit || facts.overcommitPercent > kMostOvercommit)
    refuse("a server leases 100% to 800% of its devices' memory, not " +
           std::to_string(facts.overcommitPercent) + "%");
  std::set<uint32_t> ordinals;
  std::set<std::string> uuids;
  for (const Device& device : facts.devices) {
    if (!ordinals.insert(device.ordinal).second) refuse("two devices have the same ordinal");
    if (device.memoryBytes > kMostMemory) refuse("a device's memory is absurd");
    if (device.uuid.size() != kUuidBytes) refuse("a device's UUID has 16 bytes");
    if (!uuids.insert(device.uuid).second) refuse("two devices have the same UUID");
  }
  if (!reports.empty() && reports.size() != facts.devices.size())
    refuse("the server reports on more or fewer devices than it has");
  for (const DeviceReport& report : reports)
    if (report.highestEpoch > kMostEpoch) refuse("a device's highest epoch is absurd");
}

std::string whichGpu(const Server& server, const std::string& uuid) {
  for (const Device& device : server.devices)
    if (device.uuid == uuid) return "GPU " + std::to_string(device.ordinal) + " of server " + server.name;
  return "a GPU of server " + server.name;
}

bool uses(const Placement& placement, const std::string& uuid) {
  return std::any_of(placement.devices.begin(), placement.devices.end(),
                     [&](const LeasedDevice& device) { return device.info.uuid == uuid; });
}

// A device that the server does not offer may still be used there.
bool hasProblem(const Server& server, const std::vector<LeasedDevice>& devices) {
  return std::any_of(devices.begin(), devices.end(), [&](const LeasedDevice& leased) {
    const auto at = std::find_if(server.devices.begin(), server.devices.end(),
                                 [&](const Device& one) { return one.uuid == leased.info.uuid; });
    return at == server.devices.end() || !at->problem.empty();
  });
}

bool hasProblem(const Server& server, const StoredLease& lease) {
  return std::any_of(lease.placements.begin(), lease.placements.end(), [&](const Placement& one) {
    return one.server.name == server.name && hasProblem(server, one.devices);
  });
}

// Than another server on the same machine.
bool isOfLaterBoot(const ServerRecord& server, const ServerRecord& other) {
  return server.facts.bootId != other.facts.bootId && server.joined > other.joined;
}

AuditEntry cordonEntry(AuditEvent event, const std::string& server, const std::string& by,
                       const std::string& reason) {
  AuditEntry entry;
  entry.event = event;
  entry.server = server;
  entry.by = by;
  entry.reason = reason;
  return entry;
}

}  // namespace

void Pool::join(const Principal& who, const Server& facts, const std::vector<DeviceReport>& reports,
                uint64_t now, const std::map<Id, uint64_t>& readopted) {
  latestMs_ = now;
  if (!who.mayServe()) throw std::invalid_argument(refusalOf(who, Operation::serve));
  checkServer(facts, reports);
  const auto at = servers_.find(facts.name);
  // A silent one may be the same machine before its crash, on a connection that nobody closed.
  if (at != servers_.end() && alive(at->second, now) && at->second.facts.incarnation != facts.incarnation)
    throw std::invalid_argument("a server named " + facts.name + " is already in the pool (process " +
                                std::to_string(at->second.facts.pid) + "): give this one another name");
  ServerRecord& server = servers_[facts.name];
  const bool again = at != servers_.end(), other = server.facts.incarnation != facts.incarnation;
  server.arrival = !again ? "it has joined" : other ? "it was started again" : "its connection is back";
  if (other) {
    noteGone(server, AuditEvent::serverLost, "another process of it has come", now);
    server.fabric = {};
    server.adapters.clear();
    server.samples.clear();
  }
  server.facts = facts;
  server.connected = true;
  server.joined = ++joins_;
  server.reported = false;  // its first beat names the leases it holds
  server.beatMs = now;
  silentAtMs_ = std::min(silentAtMs_, now + times_.silentMs);
  inventory_.touch(facts.name);
  server.suspect.clear();
  server.running.clear();
  server.readopted = readopted;
  for (size_t i = 0; i < reports.size(); ++i) {
    epoch_ = std::max(epoch_, reports[i].highestEpoch);
    for (const Id& id : reports[i].running) server.running[id].insert(i);
  }
  GPUPOOL_INFO("server %s joined with %zu devices", facts.name.c_str(), facts.devices.size());
  server.duplicates.resize(facts.devices.size());
  disconnected(facts.name);  // orders that went over an earlier connection
}

// Its first beat since it joined, which it sent when it had the answer: this process of the server lives, so
// those before it do not. A join alone does not say that: it may have been under way for longer than its
// process lived, and arrive behind the join of the process after that.
void Pool::settle(ServerRecord& server, uint64_t now) {
  const std::string restarted = "its server " + server.facts.name + " was restarted";
  std::vector<Id> lost;
  for (const Id& id : std::set<Id>(leases_.on(server.facts.name))) {
    LeaseRecord& record = leases_.at(id);
    const Placement* there = record.on(server.facts.name);
    if (there->server.incarnation != server.facts.incarnation && !goesOn(server, record)) {
      if (server.running.contains(id) && there->server.bootId == server.facts.bootId)
        outlive(record, server.facts.name, restarted, now);
      else
        lost.push_back(id);
    }
    server.running.erase(id);
  }
  server.strangers = std::exchange(server.running, {});
  for (const Id& id : lost) vacate(id, server.facts.name, restarted, now);
}

// The process has what one before it had of the lease: then it is as if that one had gone on, and had lost
// its connection: if it has been told since it joined that the lease is to end, it is heard about that. It
// has to be that very placement: the store may be older than the lease is.
bool Pool::goesOn(const ServerRecord& server, LeaseRecord& record) {
  const Server& facts = server.facts;
  const auto said = server.readopted.find(record.id);
  if (said == server.readopted.end()) return false;
  const bool known =
      std::any_of(record.placements.begin(), record.placements.end(), [&](const Placement& one) {
        return one.server.name == facts.name && one.server.bootId == facts.bootId && !one.gone &&
               one.epoch == said->second;
      });
  if (!known) return false;
  for (Placement& one : record.placements)
    if (one.server.name == facts.name) one.server = facts;
  GPUPOOL_INFO("lease %s goes on at server %s, which was started again", record.id.text().c_str(),
               facts.name.c_str());
  if (record.runs()) storePlacements(record);
  return true;
}

// One UUID is one device. It stays with the server that offered it first while that one is connected, or
// while something of it may still run there. All are looked at before a lease elsewhere is ended, which has
// requests served: they must find each device as what it is.
void Pool::claimDevices(ServerRecord& server, uint64_t now) {
  std::vector<std::string> claimed;
  server.duplicates.resize(server.facts.devices.size());
  for (size_t i = 0; i < server.facts.devices.size(); ++i) {
    const std::string& uuid = server.facts.devices[i].uuid;
    const auto owner = owners_.find(uuid);
    const bool own = owner != owners_.end() && owner->second == server.facts.name;
    if (own && server.duplicates[i].empty() && !leases_.hasElsewhere(uuid, server.facts.name))
      continue;  // with each beat, almost always
    const std::string other = whoseElse(uuid, server);
    if (other.empty()) {
      owners_[uuid] = server.facts.name;
      claimed.push_back(uuid);
    }
    if (!other.empty() && server.duplicates[i].empty())
      GPUPOOL_WARNING("GPU %u of server %s is the same device as %s: it is leased there only",
                      server.facts.devices[i].ordinal, server.facts.name.c_str(), other.c_str());
    server.duplicates[i] = other;
  }
  inventory_.touch(server.facts.name);  // requests may have been served since this beat began
  for (const std::string& uuid : claimed) endElsewhere(uuid, server.facts.name, now);
}

// The device of another server that must not be leased again as one of `server`; "": none. What runs on a
// machine does not outlive that machine's boot, so a GPU that shows up under a later boot is free. Whoever
// beats has lived since it joined: so of two boots that is the later one whose server has joined later. A
// beat of the earlier one may have been under way for longer than its machine was up.
std::string Pool::whoseElse(const std::string& uuid, const ServerRecord& server) const {
  if (const auto owner = owners_.find(uuid); owner != owners_.end() && owner->second != server.facts.name) {
    const auto at = servers_.find(owner->second);
    if (at != servers_.end() && holdsOn(at->second, uuid, server)) return whichGpu(at->second.facts, uuid);
  }
  if (!leases_.hasElsewhere(uuid, server.facts.name)) return "";
  const auto mayRun = [&](const Server& there) {
    if (there.bootId == server.facts.bootId) return true;
    const auto at = servers_.find(there.name);
    return at != servers_.end() && at->second.facts.bootId == there.bootId &&
           isOfLaterBoot(at->second, server);
  };
  for (const Id& id : leases_.elsewhere(uuid, server.facts.name))
    for (const Placement& placement : leases_.all().at(id).placements)
      if (placement.server.name != server.facts.name && uses(placement, uuid) && mayRun(placement.server))
        return whichGpu(placement.server, uuid);
  return "";
}

bool Pool::holdsOn(const ServerRecord& server, const std::string& uuid, const ServerRecord& asks) const {
  for (size_t i = 0; i < server.facts.devices.size(); ++i) {
    const Device& device = server.facts.devices[i];
    if (device.uuid != uuid) continue;
    if (server.connected || isOfLaterBoot(server, asks)) return true;
    return server.facts.bootId == asks.facts.bootId &&
           (!device.problem.empty() || !strangerOn(server, i).empty());
  }
  return false;
}

// What else runs there and is no lease of this pool's; "": nothing.
std::string Pool::strangerOn(const ServerRecord& server, size_t device) const {
  for (const auto& [id, devices] : server.strangers)
    if (devices.empty() || devices.contains(device))
      return "a lease that this manager has ended or never knew still runs there (" + id.text() + ")";
  return "";
}

// The GPU has come up in another server: on another boot of its machine, or in another machine.
void Pool::endElsewhere(const std::string& uuid, const std::string& server, uint64_t now) {
  std::vector<std::pair<Id, std::string>> over;
  for (const Id& id : leases_.elsewhere(uuid, server))
    for (const Placement& placement : leases_.all().at(id).placements)
      if (placement.server.name != server && uses(placement, uuid))
        over.emplace_back(id, placement.server.name);
  for (const auto& [id, was] : over) vacate(id, was, "its GPU is now one of server " + server, now);
}

void Pool::setProblem(Server& server, size_t index, const std::string& said) {
  Device& device = server.devices[index];
  const std::string problem = printable(said, kMostProblem);
  if (problem == device.problem) return;
  if (problem.empty())
    GPUPOOL_INFO("server %s: GPU %u works again", server.name.c_str(), device.ordinal);
  else
    GPUPOOL_WARNING("server %s: GPU %u: %s", server.name.c_str(), device.ordinal, problem.c_str());
  device.problem = problem;
}

bool Pool::beat(const std::string& name, const Id& incarnation, const std::vector<Id>& leases,
                const std::vector<std::string>& problems, uint32_t warmWorkers, uint64_t now,
                const std::vector<SuspendedLease>& suspended, const std::vector<LeaseTurn>& turns,
                const std::vector<LeaseHindrances>& hindrances, const std::vector<LeaseUse>& uses) {
  latestMs_ = now;
  const auto at = servers_.find(name);
  if (at == servers_.end() || !at->second.connected || at->second.facts.incarnation != incarnation)
    return false;
  ServerRecord& server = at->second;
  server.beatMs = now;
  silentAtMs_ = std::min(silentAtMs_, now + times_.silentMs);
  inventory_.touch(name);
  server.warmWorkers = warmWorkers;
  server.suspect.clear();
  for (size_t i = 0; i < std::min(problems.size(), server.facts.devices.size()); ++i)
    setProblem(server.facts, i, problems[i]);
  const std::set<Id> has{leases.begin(), leases.end()};
  noteFound(server, has, suspended, now);
  if (!server.reported) {
    settle(server, now);
    noteFound(server, has, suspended, now);  // for it knows other strangers now
  }
  compareLeases(server, has, suspended, now);
  noteTurns(server, turns);
  noteHindrances(server, hindrances);
  server.reported = true;
  noteAlive(server, now);
  claimDevices(server, now);
  noteUses(name, incarnation, uses, now);
  serveWaiters(now);
  return true;
}

// What the server holds, beside what this manager thinks that it holds.
void Pool::compareLeases(ServerRecord& server, const std::set<Id>& reported,
                         const std::vector<SuspendedLease>& suspended, uint64_t now) {
  const std::string& name = server.facts.name;
  for (const Id& id : reported) {
    const auto lease = leases_.find(id);
    const Placement* there = lease == leases_.end() ? nullptr : lease->second.on(name);
    if (there != nullptr && there->server.incarnation == server.facts.incarnation) continue;
    if (server.strangers.try_emplace(id).second)
      GPUPOOL_WARNING("server %s holds a lease that this manager does not know; revoking it", name.c_str());
  }
  // Told again with every beat, until the server has confirmed it.
  for (const auto& [id, devices] : server.strangers)
    events_.revoke(server.facts.life(), id, "the manager does not know this lease");
  std::vector<Id> over;
  for (const Id& id : std::set<Id>(leases_.on(name))) {
    LeaseRecord& record = leases_.at(id);
    const Placement* there = record.on(name);
    if (there->server.incarnation != server.facts.incarnation) {
      // The server says of a device that workers of an earlier life run there, for as long as they do.
      if (!hasProblem(server.facts, record)) over.push_back(id);
      continue;
    }
    if (!record.runs() && !record.ordered.contains(name) && !there->gone)
      sendRevoke(record, name, record.reason);
    const auto at = std::find_if(suspended.begin(), suspended.end(),
                                 [&](const SuspendedLease& one) { return one.id == record.id; });
    if (record.isPlacedOn(name))
      comparePrimary(record, reported.contains(id), at == suspended.end() ? nullptr : &*at, now);
    else
      compareOther(record, *there, reported.contains(id));
  }
  for (const Id& id : over) vacate(id, name, "its server " + name + " was restarted", now);
}

void Pool::comparePrimary(LeaseRecord& record, bool held, const SuspendedLease* suspended, uint64_t now) {
  const std::string lost = "its server " + record.server().name + " no longer holds it";
  if (record.state == LeaseState::granting && !record.ordered.contains(record.server().name) &&
      !record.unborn && record.change == Change::none) {
    // Left over from an earlier life of this manager: the server has it already, or is told again.
    if (!held && record.hold)
      return stayHeld(record, {Failure::Kind::serverLost, "the manager was restarted"});
    if (held)
      setState(record, LeaseState::active);
    else
      sendGrant(record);
    if (held && !record.hold) events_.granted(tell(record));
  } else if (!held && record.runs() && record.state != LeaseState::granting &&
             now > record.grantedMs + uint64_t{2} * times_.beatMs) {
    if (livesBeside(record, record.server().name) != nullptr)
      return abandon(record, record.server().name, lost);
    if (record.hold) return stayHeld(record, {Failure::Kind::serverLost, lost});
    if (leavesForHolder(record, record.server().name, lost)) return;
    startRevoke(record, LeaseState::lost, lost, now);
  }
  if (held) compareSuspended(record, suspended, now);
  for (const Placement& placement : record.placements)
    if (placement.role == PlacementRole::left && placement.server.name == record.server().name)
      tellLeft(record, placement);
}

// Where the lease is to go, or has been. Its server names what it was granted from its answer on.
void Pool::compareOther(LeaseRecord& record, const Placement& there, bool held) {
  if (there.role == PlacementRole::left) return tellLeft(record, there);
  const bool told = record.change != Change::placing && record.change != Change::preparing;
  if (record.state == LeaseState::moving && !held && told)
    abandon(record, there.server.name, "server " + there.server.name + " no longer holds it");
}

// For people; but for what stays when a lease is aside, which every other lease has to fit beside. A lease
// that is suspended by order, or about to be, is not named.
void Pool::noteTurns(const ServerRecord& server, const std::vector<LeaseTurn>& turns) {
  for (const Id& id : std::set<Id>(leases_.on(server.facts.name)))
    if (LeaseRecord& record = leases_.at(id); record.isPlacedOn(server.facts.name)) record.turn.reset();
  if (server.facts.overcommitPercent == kLeastOvercommit) return;
  for (const LeaseTurn& turn : turns) {
    const auto at = leases_.find(turn.id);
    if (at == leases_.end() || !at->second.isPlaced() || at->second.server().life() != server.facts.life())
      continue;
    LeaseTurn& noted = at->second.turn.emplace(turn);
    noted.note = printable(turn.note, kMostNote);
    if (!turn.kept.empty()) noted.kept = checkedKept(at->second.primary(), turn.kept);
  }
}

void Pool::setSamples(const std::string& name, std::vector<DeviceSample> samples, uint64_t now) {
  const auto at = servers_.find(name);
  if (at == servers_.end() || samples.size() != at->second.facts.devices.size()) return;
  at->second.samples = std::move(samples);
  at->second.samplesMs = now;
}

std::optional<DeviceSample> Pool::sample(const std::string& name, const std::string& uuid,
                                         uint64_t now) const {
  const auto at = servers_.find(name);
  if (at == servers_.end() || at->second.samples.empty()) return std::nullopt;
  const std::vector<Device>& devices = at->second.facts.devices;
  const auto device =
      std::find_if(devices.begin(), devices.end(), [&](const Device& one) { return one.uuid == uuid; });
  if (device == devices.end()) return std::nullopt;
  DeviceSample sample = at->second.samples[static_cast<size_t>(device - devices.begin())];
  const uint64_t ageMs = sample.ageMs + (now - at->second.samplesMs);
  if (ageMs > times_.sampleMs) return std::nullopt;
  sample.ageMs = static_cast<uint32_t>(ageMs);
  return sample;
}

// For people; but a lease of whose memory others have some is not given up (expire).
void Pool::noteHindrances(const ServerRecord& server, const std::vector<LeaseHindrances>& hindrances) {
  const std::string& name = server.facts.name;
  // Of one that is there no more nothing is shown (saidOf).
  for (const Id& id : leases_.on(name)) {
    LeaseRecord& record = leases_.quietly().at(id);
    record.hindrances.erase(name);
    record.protection.erase(name);
    record.lentTo.erase(name);
  }
  const auto note = [](const std::vector<std::string>& told, std::vector<std::string>& noted) {
    noted.clear();
    for (size_t i = 0; i < std::min(told.size(), kMostHindrances); ++i)
      noted.push_back(printable(told[i], kMostHindrance));
  };
  for (const LeaseHindrances& told : hindrances) {
    const auto at = leases_.find(told.id);
    const Placement* there = at == leases_.end() ? nullptr : at->second.on(name);
    if (there == nullptr || there->server.incarnation != server.facts.incarnation) continue;
    note(told.reasons, at->second.hindrances[name]);
    note(told.protection, at->second.protection[name]);
    if (told.lentTo.empty()) continue;
    at->second.lentTo[name] = printable(told.lentTo, kMostHindrance);
    if (at->second.state == LeaseState::revoking) events_.ended(told.id);  // for its holder it is over
  }
}

void Pool::setFabric(const std::string& name, fabric::Fabric fabric) {
  const auto at = servers_.find(name);
  if (at == servers_.end()) return;
  for (const fabric::Change& change : changes(at->second.fabric, fabric)) {
    if (change.worse)
      GPUPOOL_WARNING("server %s: fabric: %s", name.c_str(), change.text.c_str());
    else
      GPUPOOL_INFO("server %s: fabric: %s", name.c_str(), change.text.c_str());
  }
  at->second.adapters = nearestAdapters(fabric, at->second.facts.devices.size());
  at->second.fabric = std::move(fabric);
  inventory_.touch(name);
}

void Pool::setWorkers(const std::string& name, std::vector<WorkerVersion> workers, uint64_t now) {
  latestMs_ = now;
  const auto at = servers_.find(name);
  if (at == servers_.end() || at->second.facts.workers == workers) return;
  at->second.facts.workers = std::move(workers);
  GPUPOOL_INFO("server %s has worker programs for %zu versions of clients now", name.c_str(),
               at->second.facts.workers.size());
  inventory_.touch(name);
  serveWaiters(now);
}

void Pool::left(const std::string& name, Id incarnation, bool goodbye, uint64_t now) {
  latestMs_ = now;
  const auto at = servers_.find(name);
  if (at == servers_.end() || at->second.facts.incarnation != incarnation) return;
  const bool settled = at->second.reported;
  at->second.connected = false;
  at->second.reported = false;
  inventory_.touch(name);
  if (goodbye)
    noteGone(at->second, AuditEvent::serverLeft, "it has ended", now);
  else
    noteGone(at->second, AuditEvent::serverLost, "its connection has ended", now);
  disconnected(name);
  if (!goodbye) {
    GPUPOOL_WARNING("lost the connection to server %s", name.c_str());
    return;
  }
  servers_.erase(at);
  std::vector<Id> lost;
  for (const Id& id : leases_.on(name))
    if (settled || leases_.all().at(id).on(name)->server.incarnation == incarnation) lost.push_back(id);
  for (const Id& id : lost) vacate(id, name, "its server " + name + " left the pool", now);
}

bool Pool::alive(const ServerRecord& server, uint64_t now) const {
  return server.connected && now < server.beatMs + times_.silentMs;
}

// Also while the store has not said that it has it: what is placed meanwhile would come to be there behind
// the answer.
bool Pool::isCordoned(const std::string& server) const {
  return cordons_.contains(server) || cordoning_.contains(server);
}

void Pool::cordon(const Principal& who, const std::string& server, Cordon cordon, Journal::Done done) {
  if (const std::string why = refusalOf(who, Operation::cordon); !why.empty())
    throw std::invalid_argument(why);
  if (!servers_.contains(server) && !cordons_.contains(server))
    throw std::invalid_argument("there is no server " + server);
  if (cordon.reason.size() > kMostReason) throw std::invalid_argument(kLongReason);
  cordon.reason = printable(cordon.reason, kMostReason);
  cordon.by = who.saying(cordon.by);
  ++cordoning_[server];
  inventory_.touch(server);
  write({{kCordonPrefix + server, encodeCordon(cordon)}},
        {cordonEntry(AuditEvent::cordoned, server, cordon.by, cordon.reason)},
        [this, server, cordon, done = std::move(done)](const std::string& why) {
          if (const auto at = cordoning_.find(server); --at->second == 0) cordoning_.erase(at);
          inventory_.touch(server);
          if (why.empty()) {
            cordons_[server] = cordon;
            GPUPOOL_WARNING("server %s is cordoned (%s): %s", server.c_str(), cordon.by.c_str(),
                            cordon.reason.empty() ? "no reason" : cordon.reason.c_str());
          } else {
            serveWaiters(latestMs_);
          }
          done(why);
        });
}

// What the store has of it is erased also where this manager knows of none: a write that failed may be there.
void Pool::uncordon(const Principal& who, const std::string& server, Journal::Done done,
                    const std::string& by) {
  if (const std::string why = refusalOf(who, Operation::cordon); !why.empty())
    throw std::invalid_argument(why);
  if (!servers_.contains(server) && !isCordoned(server))
    throw std::invalid_argument("there is no server " + server);
  std::vector<AuditEntry> entries;  // of one in service there is nothing to tell
  if (isCordoned(server)) entries.push_back(cordonEntry(AuditEvent::uncordoned, server, who.saying(by), ""));
  write({{kCordonPrefix + server, {}}}, std::move(entries),
        [this, server, done = std::move(done)](const std::string& why) {
          inventory_.touch(server);
          if (why.empty() && cordons_.erase(server) != 0) {
            GPUPOOL_WARNING("server %s is no longer cordoned", server.c_str());
            serveWaiters(latestMs_);
          }
          done(why);
        });
}

}  // namespace gpupool::pool
