#include "pool-manager/pool.h"

#include <algorithm>
#include <ctime>
#include <set>
#include <span>
#include <stdexcept>

#include "base/hmac.h"
#include "base/log.h"
#include "base/options.h"
#include "pool-manager/records.h"

namespace gpupool::pool {
namespace {

constexpr size_t kMaxWaiters = 4096;
constexpr uint64_t kStoreEveryMs = 60'000;  // renewals are written no more often
constexpr uint64_t kForgetServerMs = 3'600'000;
constexpr uint64_t kEndingMs = 1000;  // a released lease's devices are free within this, almost always
constexpr size_t kMostProblem = 200;  // bytes of a device's problem
constexpr char kReleased[] = "released";

std::string age(uint64_t ms) {
  if (ms < 1000) return std::to_string(ms) + " ms";
  const uint64_t s = ms / 1000;
  if (s < 120) return std::to_string(s) + " s";
  if (s < 7200) return std::to_string(s / 60) + " min";
  return std::to_string(s / 3600) + " h";
}

void checkServer(const Server& facts) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
  if (facts.name.empty() || facts.name.size() > 63 || printable(facts.name, 63) != facts.name)
    refuse("a server's name has 1 to 63 printable bytes");
  if (facts.devices.size() > kMaxDevices)
    refuse("a server has at most " + std::to_string(kMaxDevices) + " devices");
  if (facts.localPath.empty() && (facts.host.empty() || facts.port == 0))
    refuse("the server offers neither a local path nor a network address for sessions");
  std::set<uint32_t> ordinals;
  for (const Device& device : facts.devices)
    if (!ordinals.insert(device.ordinal).second) refuse("two devices have the same ordinal");
}

}  // namespace

Pool::Pool(Store& store, PoolEvents& events, const PoolTimes& times, std::string bootId, uint64_t now)
    : store_(store), events_(events), times_(times), bootId_(std::move(bootId)) {
  load(now);
}

void Pool::load(uint64_t now) {
  const auto epoch = store_.get(kEpochKey);
  // A fresh store must not hand out epochs that a living server has seen: start from the calendar.
  epoch_ = epoch ? std::stoull(epoch->value) : static_cast<uint64_t>(std::time(nullptr)) << 20;
  for (const Entry& entry : store_.range(kLeasePrefix)) {
    LeaseRecord record = decodeRecord(entry.value, bootId_);
    // What the store says of time is from before: the holder gets a full TTL to come back.
    record.deadlineMs = now + record.lease.ttlMs;
    record.storedMs = record.deadlineMs;
    record.grantedMs = now;
    record.revokingMs = now;
    leases_[record.lease.id] = std::move(record);
  }
  for (const Entry& entry : store_.range(kEndedPrefix)) {
    Id id;
    if (fromText(entry.key.substr(kEndedPrefix.size()), id)) tombstones_[id] = {entry.value, now};
  }
}

uint64_t Pool::nextEpoch() const { return epoch_ + 1; }

std::string Pool::encode(const LeaseRecord& record) const { return encodeRecord(record, bootId_); }

// --- servers
// ---------------------------------------------------------------------------------------------------------

void Pool::join(const Server& facts, uint64_t now) {
  checkServer(facts);
  const auto at = servers_.find(facts.name);
  // A silent one may be the same machine before its crash, on a connection that nobody closed.
  if (at != servers_.end() && alive(at->second, now) && at->second.facts.incarnation != facts.incarnation)
    throw std::invalid_argument("a server named " + facts.name + " is already in the pool (process " +
                                std::to_string(at->second.facts.pid) + "): give this one another name");
  std::vector<Id> lost;
  for (auto& [id, record] : leases_) {
    if (record.lease.server.name != facts.name) continue;
    record.ordered = false;
    if (record.lease.server.incarnation != facts.incarnation) lost.push_back(id);
  }
  for (const Id& id : lost) end(id, "its server " + facts.name + " was restarted", now);
  ServerRecord& server = servers_[facts.name];
  if (server.facts.incarnation != facts.incarnation) server.fabric = {};
  server.facts = facts;
  server.connected = true;
  server.reported = false;  // its first beat names the leases it holds
  server.beatMs = now;
  server.suspect.clear();
  GPUPOOL_INFO("server %s joined with %zu devices", facts.name.c_str(), facts.devices.size());
}

void Pool::setProblem(Server& server, size_t index, const std::string& said) {
  Device& device = server.devices[index];
  const std::string problem = printable(said, kMostProblem);
  if (problem == device.problem) return;
  if (problem.empty())
    GPUPOOL_INFO("server %s: GPU %u is in order again", server.name.c_str(), device.ordinal);
  else
    GPUPOOL_WARNING("server %s: GPU %u: %s", server.name.c_str(), device.ordinal, problem.c_str());
  device.problem = problem;
}

bool Pool::beat(const std::string& name, const Id& incarnation, const std::vector<Id>& leases,
                const std::vector<std::string>& problems, uint32_t warmWorkers, uint64_t now) {
  const auto at = servers_.find(name);
  if (at == servers_.end() || !at->second.connected || at->second.facts.incarnation != incarnation)
    return false;
  ServerRecord& server = at->second;
  server.beatMs = now;
  server.warmWorkers = warmWorkers;
  server.suspect.clear();
  for (size_t i = 0; i < std::min(problems.size(), server.facts.devices.size()); ++i)
    setProblem(server.facts, i, problems[i]);

  const std::set<Id> reported(leases.begin(), leases.end());
  for (const Id& id : reported) {
    const auto lease = leases_.find(id);
    if (lease != leases_.end() && lease->second.lease.server.name == name) continue;
    GPUPOOL_WARNING("server %s holds a lease that this manager does not know; revoking it", name.c_str());
    events_.revoke(name, id, "the manager does not know this lease");
  }
  std::vector<Id> lost;
  for (auto& [id, record] : leases_) {
    if (record.lease.server.name != name) continue;
    const bool held = reported.contains(id);
    if (record.state == LeaseState::revoking && !record.ordered) sendRevoke(record);
    if (record.state == LeaseState::granting && !record.ordered) {
      // Left over from an earlier life of this manager: the server has it already, or is told again.
      if (held)
        record.state = LeaseState::active;
      else
        sendGrant(record);
      if (held) events_.granted(record.lease);
    } else if (record.state == LeaseState::active && !held && now > record.grantedMs + 2 * times_.beatMs) {
      lost.push_back(id);
    }
  }
  for (const Id& id : lost) end(id, "its server " + name + " no longer holds it", now);
  server.reported = true;
  serveWaiters(now);
  return true;
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
  at->second.fabric = std::move(fabric);
}

void Pool::left(const std::string& name, const Id& incarnation, bool goodbye, uint64_t now) {
  const auto at = servers_.find(name);
  if (at == servers_.end() || at->second.facts.incarnation != incarnation) return;
  at->second.connected = false;
  at->second.reported = false;
  for (auto& [id, record] : leases_)
    if (record.lease.server.name == name) record.ordered = false;
  if (!goodbye) {
    GPUPOOL_WARNING("lost the connection to server %s", name.c_str());
    return;
  }
  servers_.erase(at);
  std::vector<Id> lost;
  for (const auto& [id, record] : leases_)
    if (record.lease.server.name == name) lost.push_back(id);
  for (const Id& id : lost) end(id, "its server " + name + " left the pool", now);
}

bool Pool::alive(const ServerRecord& server, uint64_t now) const {
  return server.connected && now < server.beatMs + times_.silentMs;
}

// --- holders
// -----------------------------------------------------------------------------------------------------------

void Pool::request(const LeaseRequest& asked, uint64_t now) {
  LeaseRequest request = asked;
  request.holder = printable(request.holder, 160);
  request.tenant = printable(request.tenant, 64);
  request.ttlMs = std::clamp(request.ttlMs, times_.minTtlMs, times_.maxTtlMs);
  const auto refuse = [&](const std::string& why) {
    events_.failed(request.id, {Failure::Kind::refused, why});
  };
  if (request.deviceCount == 0 || request.deviceCount > kMaxDevices)
    return refuse("a lease has 1 to " + std::to_string(kMaxDevices) + " devices");
  if (const auto dead = tombstones_.find(request.id); dead != tombstones_.end())
    return refuse("this lease has ended: " + dead->second.reason);
  if (const auto at = leases_.find(request.id); at != leases_.end()) {
    if (at->second.state == LeaseState::active) events_.granted(at->second.lease);
    if (at->second.state == LeaseState::revoking) refuse("this lease is ending: " + at->second.reason);
    return;  // granting: the answer follows
  }
  for (const Waiter& waiter : waiters_)
    if (waiter.request.id == request.id) return;
  if (waiters_.size() >= kMaxWaiters) return refuse("too many requests wait for devices; try again later");
  waiters_.push_back({request, now + request.waitMs});
  serveWaiters(now);
}

// First come, first served: who waits for any server holds back everybody behind, who waits for one server
// those that could take it.
void Pool::serveWaiters(uint64_t now) {
  std::deque<Waiter> waiting;
  waiting.swap(waiters_);
  std::set<std::string> taken;
  bool closed = false;
  size_t before = 0;
  for (Waiter& waiter : waiting) {
    if (!events_.wanted(waiter.request.id)) continue;
    Choice missing;
    const bool mayTry = !closed && !taken.contains(waiter.request.server) &&
                        (taken.empty() || !waiter.request.server.empty());
    try {
      if (mayTry && tryPlace(waiter.request, now, &missing)) continue;
    } catch (const std::runtime_error& error) {
      events_.failed(waiter.request.id, {Failure::Kind::refused, error.what()});
      continue;
    }
    if (now >= waiter.untilMs && (!ending(now) || now >= waiter.untilMs + kEndingMs)) {
      if (!mayTry) {
        const Wish wish{waiter.request.deviceCount, waiter.request.memoryBytes, waiter.request.server};
        missing = place(wish, inventory(now));
        if (missing.missing.empty())
          missing.missing = "the devices that are free are for those who waited longer";
        missing.missing += "; " + std::to_string(before) + " earlier request(s) are waiting";
      }
      events_.failed(waiter.request.id,
                     {missing.never ? Failure::Kind::nothingFits : Failure::Kind::noDevice, missing.missing});
      continue;
    }
    ++before;
    closed = closed || waiter.request.server.empty();
    taken.insert(waiter.request.server);
    waiters_.push_back(std::move(waiter));
  }
}

// Devices are about to be free: a program started right behind another one's end gets them, as it would
// natively, instead of hearing that its predecessor holds them.
bool Pool::ending(uint64_t now) const {
  return std::any_of(leases_.begin(), leases_.end(), [&](const auto& one) {
    const LeaseRecord& record = one.second;
    return record.state == LeaseState::revoking && record.ordered && record.reason == kReleased &&
           now < record.revokingMs + kEndingMs;
  });
}

bool Pool::tryPlace(const LeaseRequest& request, uint64_t now, Choice* missing) {
  const auto servers = inventory(now);
  Choice choice = place({request.deviceCount, request.memoryBytes, request.server}, servers);
  if (choice.server.empty()) {
    *missing = std::move(choice);
    return false;
  }
  LeaseRecord record;
  record.lease.id = request.id;
  record.lease.server = servers_.at(choice.server).facts;
  record.lease.devices = std::move(choice.devices);
  record.lease.ttlMs = request.ttlMs;
  record.lease.epoch = nextEpoch();
  record.lease.key.resize(32);
  randomBytes(std::as_writable_bytes(std::span(record.lease.key)));
  record.lease.holder = request.holder;
  record.lease.tenant = request.tenant;
  record.process = request.process;
  record.deadlineMs = record.storedMs = now + request.ttlMs;
  record.grantedMs = now;
  const std::string key = kLeasePrefix + toText(request.id);
  const Compare absent{key, 0};
  const Write writes[] = {{key, encode(record)}, {kEpochKey, std::to_string(record.lease.epoch)}};
  if (!store_.commit({&absent, 1}, writes))
    throw std::runtime_error("store: somebody else writes this store");
  epoch_ = record.lease.epoch;
  sendGrant(leases_[request.id] = std::move(record));
  return true;
}

std::optional<uint32_t> Pool::renew(const Id& id, uint64_t now, std::string* why) {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.state == LeaseState::revoking) {
    const auto dead = tombstones_.find(id);
    *why = at != leases_.end()         ? at->second.reason
           : dead != tombstones_.end() ? dead->second.reason
                                       : "the manager does not know it";
    return std::nullopt;
  }
  LeaseRecord& record = at->second;
  record.deadlineMs = now + record.lease.ttlMs;
  if (record.deadlineMs > record.storedMs + kStoreEveryMs) {
    const Write write{kLeasePrefix + toText(id), encode(record)};
    store_.commit({}, {&write, 1});
    record.storedMs = record.deadlineMs;
  }
  return record.lease.ttlMs;
}

std::optional<std::string> Pool::tenantOf(const Id& id) const {
  if (const auto at = leases_.find(id); at != leases_.end()) return at->second.lease.tenant;
  for (const Waiter& waiter : waiters_)
    if (waiter.request.id == id) return waiter.request.tenant;
  return std::nullopt;
}

bool Pool::release(const Id& id, uint64_t now) {
  const auto waiter =
      std::find_if(waiters_.begin(), waiters_.end(), [&](const Waiter& one) { return one.request.id == id; });
  if (waiter != waiters_.end()) {
    waiters_.erase(waiter);
    events_.failed(id, {Failure::Kind::refused, "released while it waited"});
    serveWaiters(now);
    return false;
  }
  const auto at = leases_.find(id);
  if (at == leases_.end()) {
    // Perhaps it overtook its own request: that one must not be granted any more.
    if (!tombstones_.contains(id)) bury(id, "released", now);
    return false;
  }
  if (at->second.state == LeaseState::granting) events_.failed(id, {Failure::Kind::refused, "released"});
  if (at->second.state != LeaseState::revoking) startRevoke(at->second, kReleased, now);
  return true;
}

// --- what the servers answered
// -------------------------------------------------------------------------------------

void Pool::sendGrant(LeaseRecord& record) {
  record.ordered = true;
  events_.grant(record.lease);
}

void Pool::granted(const Id& id, uint64_t now) {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.state != LeaseState::granting) return;
  LeaseRecord& record = at->second;
  record.state = LeaseState::active;
  record.ordered = false;
  record.deadlineMs = now + record.lease.ttlMs;
  record.grantedMs = now;
  events_.granted(record.lease);
}

void Pool::grantFailed(const Id& id, const std::string& why, bool refused, uint64_t now) {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.state != LeaseState::granting) return;
  const std::string server = at->second.lease.server.name;
  if (const auto known = servers_.find(server); known != servers_.end()) known->second.suspect = why;
  at->second.ordered = false;
  events_.failed(id, {Failure::Kind::serverLost, "server " + server + " did not take the lease: " + why});
  if (refused)
    end(id, "server " + server + " refused it: " + why, now);
  else
    startRevoke(at->second, "server " + server + " did not answer: " + why, now);
}

void Pool::startRevoke(LeaseRecord& record, const std::string& reason, uint64_t now) {
  record.state = LeaseState::revoking;
  record.reason = reason;
  record.revokingMs = now;
  record.ordered = false;
  const Write write{kLeasePrefix + toText(record.lease.id), encode(record)};
  store_.commit({}, {&write, 1});
  sendRevoke(record);
}

void Pool::sendRevoke(LeaseRecord& record) {
  const auto server = servers_.find(record.lease.server.name);
  if (server == servers_.end() || !server->second.connected) return;
  record.ordered = true;
  events_.revoke(server->first, record.lease.id, record.reason);
}

void Pool::revoked(const Id& id, uint64_t now) {
  const auto at = leases_.find(id);
  if (at != leases_.end() && at->second.state == LeaseState::revoking) end(id, at->second.reason, now);
}

void Pool::revokeFailed(const Id& id, uint64_t) {
  // The next beat, or the clock, takes it from here.
  if (const auto at = leases_.find(id); at != leases_.end()) at->second.ordered = false;
}

void Pool::end(const Id& id, const std::string& why, uint64_t now) {
  const std::string reason = why;  // may lie in the record
  const bool answered = leases_.at(id).state != LeaseState::granting;
  const Write writes[] = {{kLeasePrefix + toText(id), std::nullopt}, {kEndedPrefix + toText(id), reason}};
  store_.commit({}, writes);
  leases_.erase(id);
  tombstones_[id] = {reason, now};
  if (!answered) events_.failed(id, {Failure::Kind::serverLost, "the lease has ended: " + reason});
  events_.ended(id);
  serveWaiters(now);
}

void Pool::bury(const Id& id, const std::string& reason, uint64_t now) {
  const Write write{kEndedPrefix + toText(id), reason};
  store_.commit({}, {&write, 1});
  tombstones_[id] = {reason, now};
}

void Pool::tick(uint64_t now) {
  std::vector<Id> over;
  for (auto& [id, record] : leases_) {
    if (record.state != LeaseState::revoking && now > record.deadlineMs + times_.driftMs) {
      if (record.state == LeaseState::granting)
        events_.failed(
            id, {Failure::Kind::serverLost, "server " + record.lease.server.name + " does not answer"});
      startRevoke(record, "its holder has not renewed it for " + age(record.lease.ttlMs), now);
    } else if (record.state != LeaseState::revoking && record.process.pid != 0 &&
               events_.hasEnded(record.process)) {
      startRevoke(record, "its holder, process " + std::to_string(record.process.pid) + ", was killed", now);
    }
    if (record.state == LeaseState::revoking &&
        now > std::max(record.deadlineMs, record.revokingMs) + times_.driftMs + times_.killMs)
      over.push_back(id);
  }
  for (const Id& id : over) end(id, leases_.at(id).reason, now);

  std::vector<Write> forgotten;
  std::erase_if(tombstones_, [&](const auto& one) {
    if (now < one.second.endedMs + times_.tombstoneMs) return false;
    forgotten.push_back({kEndedPrefix + toText(one.first), std::nullopt});
    return true;
  });
  if (!forgotten.empty()) store_.commit({}, forgotten);
  std::erase_if(servers_, [&](const auto& one) {
    return !one.second.connected && now > one.second.beatMs + kForgetServerMs;
  });
  serveWaiters(now);
}

// --- for people
// ---------------------------------------------------------------------------------------------------------

std::string Pool::describeHolder(const LeaseRecord& record, uint64_t now) const {
  std::string text = record.lease.holder.empty() ? "lease " + toText(record.lease.id) : record.lease.holder;
  text += " (" + (record.lease.tenant.empty() ? "" : "tenant " + record.lease.tenant + ", ") +
          age(now - record.grantedMs);
  if (record.state == LeaseState::revoking) text += ", ending";
  return text + ")";
}

std::vector<ServerUse> Pool::inventory(uint64_t now) const {
  std::vector<ServerUse> uses;
  for (const auto& [name, server] : servers_) {
    ServerUse use{name, {}, {}};
    if (!alive(server, now))
      use.unusable = (server.connected ? "silent for " : "not connected; last heard of ") +
                     age(now - server.beatMs) + (server.connected ? "" : " ago");
    else if (!server.reported)
      use.unusable = "has just come back and has not yet said which leases it holds";
    else if (!server.suspect.empty())
      use.unusable = "did not take its last lease: " + server.suspect;
    for (const Device& device : server.facts.devices) use.devices.push_back({device, device.memoryBytes, {}});
    for (const auto& [id, record] : leases_) {
      if (record.lease.server.name != name) continue;
      for (const LeasedDevice& leased : record.lease.devices)
        for (DeviceUse& device : use.devices) {
          if (device.info.ordinal != leased.info.ordinal) continue;
          device.freeBytes -= std::min(device.freeBytes, reservedBytes(leased));
          device.holders.push_back(describeHolder(record, now));
        }
    }
    uses.push_back(std::move(use));
  }
  return uses;
}

}  // namespace gpupool::pool
