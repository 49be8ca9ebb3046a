#include "pool-manager/convert.h"

#include <kj/debug.h>

#include <stdexcept>

namespace gpupool::pool {
namespace {

// A list of empty structs takes no bytes in a message, whatever its length says, and much memory here.
template <class List>
List devicesOf(List list) {
  if (list.size() > 16 * kMaxDevices)  // fewer are refused in words: Pool::join
    kj::throwFatalException(
        KJ_EXCEPTION(FAILED, "more devices than a server or a lease can have", list.size()));
  return list;
}

constexpr size_t kMostWalls = 32;
constexpr size_t kMostWorkers = 16;

// At most so many.
std::vector<std::string> texts(capnp::List<capnp::Text>::Reader from, size_t most) {
  std::vector<std::string> to;
  for (auto one : from) {
    if (to.size() == most) break;
    to.push_back(text(one));
  }
  return to;
}

}  // namespace

Server read(schema::ServerInfo::Reader from) {
  Server to{text(from.getName()),
            read(from.getIncarnation()),
            text(from.getLocalPath()),
            text(from.getHost()),
            from.getPort(),
            text(from.getBootId()),
            {},
            from.getRowsHash(),
            from.getPid(),
            {},
            from.getOvercommitPercent()};
  for (auto device : devicesOf(from.getDevices())) to.devices.push_back(read(device));
  to.leftOut = texts(from.getLeftOut(), kMaxDevices);
  to.walls = texts(from.getWalls(), kMostWalls);
  to.missingWalls = texts(from.getMissingWalls(), kMostWalls);
  to.workers = read(from.getWorkers());
  to.keepBytes = from.getKeepBytes();
  return to;
}

std::vector<WorkerVersion> read(capnp::List<schema::WorkerVersion>::Reader from) {
  std::vector<WorkerVersion> to;
  for (auto worker : from) {
    if (to.size() == kMostWorkers) break;
    to.push_back(read(worker));
  }
  return to;
}

WorkerVersion read(schema::WorkerVersion::Reader from) {
  return {from.getRowsHash(), printable(text(from.getRelease()), 32)};
}

std::vector<DeviceReport> read(capnp::List<schema::DeviceReport>::Reader from) {
  constexpr unsigned kMostRunning = 4096;  // as many as a beat names
  std::vector<DeviceReport> to;
  for (auto one : devicesOf(from)) {
    DeviceReport& report = to.emplace_back(DeviceReport{one.getHighestEpoch(), {}});
    if (one.getRunning().size() > kMostRunning)
      kj::throwFatalException(KJ_EXCEPTION(FAILED, "too many leases on one device"));
    for (auto id : one.getRunning()) report.running.push_back(read(id));
  }
  return to;
}

LeaseRequest read(schema::LeaseRequest::Reader from) {
  return {read(from.getId()),
          from.getDeviceCount(),
          from.getMemoryBytes(),
          text(from.getTenant()),
          text(from.getHolder()),
          text(from.getServer()),
          from.getTtlMs(),
          from.getWaitMs(),
          read(from.getTurns()),
          text(from.getGpu()),
          static_cast<Policy>(from.getPolicy()),
          text(from.getReason()),
          from.getLimitMs(),
          text(from.getJob()),
          text(from.getAdopts()),
          read(from.getClient()),
          bytes(from.getFingerprint())};
}

Adopter read(schema::Adopter::Reader from) {
  return {read(from.getId()), text(from.getHolder()), from.getTtlMs()};
}

TurnTerms read(schema::TurnTerms::Reader from) {
  return {from.getSharePercent(), static_cast<Priority>(from.getPriority()),
          from.getProtectMs(),    from.getIdleMs(),
          from.getHolderKeeps(),  from.getProtectByTenant(),
          from.getStandbyKeeps()};
}

LeaseUse read(schema::LeaseUse::Reader from) {
  return {read(from.getId()), from.getIdleMs(), from.getSessions(), from.getWanted()};
}

LeaseCounts read(schema::LeaseCounts::Reader from) {
  return {read(from.getId()),      from.getCalls(),           from.getAwaited(),
          from.getToDeviceBytes(), from.getFromDeviceBytes(), from.getCheckpointAgeMs()};
}

LeaseTurn read(schema::LeaseTurn::Reader from) {
  return {read(from.getId()),   static_cast<TurnPlace>(from.getPlace()),
          from.getServedMs(),   from.getTurns(),
          text(from.getNote()), readKept(from.getKept())};
}

LeaseHindrances read(schema::LeaseHindrances::Reader from) {
  LeaseHindrances to{read(from.getId()), {}, {}, text(from.getLentTo())};
  for (auto one : from.getReasons()) to.reasons.push_back(text(one));
  for (auto one : from.getProtection()) to.protection.push_back(text(one));
  return to;
}

std::vector<LeasedDevice> readLeasedDevices(capnp::List<schema::LeasedDevice>::Reader from) {
  std::vector<LeasedDevice> to;
  for (auto device : devicesOf(from)) to.push_back(read(device));
  return to;
}

Lease read(schema::Lease::Reader from) {
  Lease to;
  to.id = read(from.getId());
  to.server = read(from.getServer());
  to.devices = readLeasedDevices(from.getDevices());
  to.ttlMs = from.getTtlMs();
  to.epoch = from.getDeviceEpoch();
  to.key = bytes(from.getSessionKey());
  to.holder = text(from.getHolder());
  to.tenant = text(from.getTenant());
  to.ageMs = from.getAgeMs();
  to.state = text(from.getState());
  to.terms = read(from.getTerms());
  if (from.hasTurn()) to.turn = read(from.getTurn());
  to.movesTo = text(from.getMovesTo());
  for (auto one : from.getHindrances()) to.hindrances.push_back(text(one));
  to.reason = text(from.getReason());
  to.endsInMs = from.getEndsInMs();
  for (auto one : from.getProtection()) to.protection.push_back(text(one));
  to.job = text(from.getJob());
  for (auto one : from.getAdopters()) to.adopters.push_back(text(one));
  to.held = read(from.getHeld());
  to.why = text(from.getWhy());
  to.idleMs = from.getIdleMs();
  if (from.hasStandby()) to.standby = read(from.getStandby());
  to.standbyEpoch = from.getStandbyEpoch();
  return to;
}

KeptLease read(schema::KeptLease::Reader from) {
  return {read(from.getId()), from.getStandbyEpoch(), from.getDeviceEpoch()};
}

std::vector<uint64_t> readKept(capnp::List<uint64_t>::Reader from) {
  std::vector<uint64_t> to;
  for (const uint64_t bytes : devicesOf(from)) to.push_back(bytes);
  return to;
}

SuspendResult read(schema::SuspendResult::Reader from) {
  return {readKept(from.getKept()), from.getMovedBytes(), from.getDrainMs(), from.getMoveMs(),
          read(from.getHeld())};
}

HeldLease read(schema::HeldLease::Reader from) {
  return {read(from.getCheckpoint()), text(from.getFolder()), text(from.getServer())};
}

MigrateResult read(schema::MigrateResult::Reader from) {
  return {from.getSessions(), from.getMovedBytes(), from.getLongestPauseMs(), text(from.getServer())};
}

CheckpointResult read(schema::CheckpointResult::Reader from) {
  return {from.getSessions(), from.getBytes(), from.getLongestPauseMs(), text(from.getFolder()),
          text(from.getServer())};
}

MoveTarget read(schema::MoveTarget::Reader from) {
  MoveTarget to{text(from.getServer()), {}, from.getElsewhere()};
  for (const uint32_t ordinal : devicesOf(from.getDevices())) to.devices.push_back(ordinal);
  return to;
}

SuspendedLease read(schema::SuspendedLease::Reader from) {
  return {read(from.getId()), readKept(from.getKept()), read(from.getHeld())};
}

Explanation read(schema::Explanation::Reader from) {
  Explanation to{static_cast<Outlook>(from.getOutlook()), text(from.getText()), from.getAhead(), {}};
  for (auto server : from.getServers()) {
    ServerVerdict& one =
        to.servers.emplace_back(ServerVerdict{text(server.getName()), text(server.getReason()), {}});
    for (auto device : devicesOf(server.getDevices()))
      one.devices.push_back({device.getOrdinal(), text(device.getName()), text(device.getReason())});
  }
  return to;
}

AuditEntry read(schema::AuditEntry::Reader from) {
  return {from.getNumber(),       from.getTimeMs(),       static_cast<AuditEvent>(from.getEvent()),
          read(from.getLease()),  text(from.getServer()), text(from.getTenant()),
          text(from.getHolder()), text(from.getBy()),     text(from.getReason())};
}

AuditQuery read(schema::Manager::AuditParams::Reader from) {
  return {from.getAfter(), from.getSinceMs(), text(from.getLease())};
}

void write(const Server& from, schema::ServerInfo::Builder to) {
  to.setName(from.name);
  write(from.incarnation, to.initIncarnation());
  to.setLocalPath(from.localPath);
  to.setHost(from.host);
  to.setPort(from.port);
  to.setBootId(from.bootId);
  auto devices = to.initDevices(static_cast<unsigned>(from.devices.size()));
  for (unsigned i = 0; i < devices.size(); ++i) write(from.devices[i], devices[i]);
  to.setRowsHash(from.rowsHash);
  to.setPid(from.pid);
  to.setOvercommitPercent(from.overcommitPercent);
  auto workers = to.initWorkers(static_cast<unsigned>(from.workers.size()));
  for (unsigned i = 0; i < workers.size(); ++i) write(from.workers[i], workers[i]);
  to.setKeepBytes(from.keepBytes);
}

void write(const WorkerVersion& from, schema::WorkerVersion::Builder to) {
  to.setRowsHash(from.rowsHash);
  to.setRelease(from.release);
}

void write(const LeaseRequest& from, schema::LeaseRequest::Builder to) {
  write(from.id, to.initId());
  to.setDeviceCount(from.deviceCount);
  to.setMemoryBytes(from.memoryBytes);
  to.setTenant(from.tenant);
  to.setHolder(from.holder);
  to.setTtlMs(from.ttlMs);
  to.setServer(from.server);
  to.setWaitMs(from.waitMs);
  write(from.turns, to.initTurns());
  to.setGpu(from.gpu);
  to.setPolicy(static_cast<schema::Policy>(from.policy));
  to.setReason(from.reason);
  to.setLimitMs(from.limitMs);
  to.setJob(from.job);
  to.setAdopts(from.adopts);
  if (from.client.rowsHash != 0) write(from.client, to.initClient());
  to.setFingerprint(data(from.fingerprint));
}

void write(const Adopter& from, schema::Adopter::Builder to) {
  write(from.id, to.initId());
  to.setHolder(from.holder);
  to.setTtlMs(from.ttlMs);
}

void write(const TurnTerms& from, schema::TurnTerms::Builder to) {
  to.setSharePercent(from.sharePercent);
  to.setPriority(static_cast<schema::Priority>(from.priority));
  to.setProtectMs(from.protectMs);
  to.setIdleMs(from.idleMs);
  to.setHolderKeeps(from.holderKeeps);
  to.setProtectByTenant(from.protectByTenant);
  to.setStandbyKeeps(from.standbyKeeps);
}

void write(const LeaseTurn& from, schema::LeaseTurn::Builder to) {
  write(from.id, to.initId());
  to.setPlace(static_cast<schema::TurnPlace>(from.place));
  to.setServedMs(from.servedMs);
  to.setTurns(from.turns);
  to.setNote(from.note);
  schema::writeKept(from.kept, to);
}

void write(const LeaseHindrances& from, schema::LeaseHindrances::Builder to) {
  write(from.id, to.initId());
  write(from.reasons, to.initReasons(static_cast<unsigned>(from.reasons.size())));
  write(from.protection, to.initProtection(static_cast<unsigned>(from.protection.size())));
  to.setLentTo(from.lentTo);
}

void write(const Lease& from, schema::Lease::Builder to, Secrets secrets) {
  write(from.id, to.initId());
  write(from.server, to.initServer());
  auto devices = to.initDevices(static_cast<unsigned>(from.devices.size()));
  for (unsigned i = 0; i < devices.size(); ++i) write(from.devices[i], devices[i]);
  to.setTtlMs(from.ttlMs);
  to.setDeviceEpoch(from.epoch);
  if (secrets == Secrets::include) to.setSessionKey(data(from.key));
  to.setHolder(from.holder);
  to.setTenant(from.tenant);
  to.setAgeMs(from.ageMs);
  to.setState(from.state);
  write(from.terms, to.initTerms());
  if (from.turn) write(*from.turn, to.initTurn());
  to.setMovesTo(from.movesTo);
  write(from.hindrances, to.initHindrances(static_cast<unsigned>(from.hindrances.size())));
  to.setReason(from.reason);
  to.setEndsInMs(from.endsInMs);
  write(from.protection, to.initProtection(static_cast<unsigned>(from.protection.size())));
  to.setJob(from.job);
  write(from.adopters, to.initAdopters(static_cast<unsigned>(from.adopters.size())));
  if (from.held) write(from.held, to.initHeld());
  to.setWhy(from.why);
  to.setIdleMs(from.idleMs);
  if (from.standby) write(*from.standby, to.initStandby());
  to.setStandbyEpoch(from.standbyEpoch);
}

void write(const HeldLease& from, schema::HeldLease::Builder to) {
  write(from.checkpoint, to.initCheckpoint());
  to.setFolder(from.folder);
  to.setServer(from.server);
}

void write(const SuspendResult& from, schema::SuspendResult::Builder to) {
  schema::writeKept(from.kept, to);
  to.setMovedBytes(from.movedBytes);
  to.setDrainMs(from.drainMs);
  to.setMoveMs(from.moveMs);
  if (from.held) write(from.held, to.initHeld());
}

void write(const MigrateResult& from, schema::MigrateResult::Builder to) {
  to.setSessions(from.sessions);
  to.setMovedBytes(from.movedBytes);
  to.setLongestPauseMs(from.longestPauseMs);
  to.setServer(from.server);
}

void write(const CheckpointResult& from, schema::CheckpointResult::Builder to) {
  to.setSessions(from.sessions);
  to.setBytes(from.bytes);
  to.setLongestPauseMs(from.longestPauseMs);
  to.setFolder(from.folder);
  to.setServer(from.server);
}

void write(const MoveTarget& from, schema::MoveTarget::Builder to) {
  to.setServer(from.server);
  auto devices = to.initDevices(static_cast<unsigned>(from.devices.size()));
  for (unsigned i = 0; i < devices.size(); ++i) devices.set(i, from.devices[i]);
  to.setElsewhere(from.elsewhere);
}

void write(const SuspendedLease& from, schema::SuspendedLease::Builder to) {
  write(from.id, to.initId());
  schema::writeKept(from.kept, to);
  if (from.held) write(from.held, to.initHeld());
}

void write(const Explanation& from, schema::Explanation::Builder to) {
  to.setOutlook(static_cast<schema::Outlook>(from.outlook));
  to.setText(from.text);
  to.setAhead(from.ahead);
  auto servers = to.initServers(static_cast<unsigned>(from.servers.size()));
  for (unsigned i = 0; i < servers.size(); ++i) {
    const ServerVerdict& server = from.servers[i];
    servers[i].setName(server.name);
    servers[i].setReason(server.reason);
    auto devices = servers[i].initDevices(static_cast<unsigned>(server.devices.size()));
    for (unsigned j = 0; j < devices.size(); ++j) {
      devices[j].setOrdinal(server.devices[j].ordinal);
      devices[j].setName(server.devices[j].name);
      devices[j].setReason(server.devices[j].reason);
    }
  }
}

schema::Role wireRole(Role role) {
  switch (role) {
    case Role::viewer:
      return schema::Role::VIEWER;
    case Role::user:
      return schema::Role::USER;
    case Role::scheduler:
      return schema::Role::SCHEDULER;
    case Role::server:
      return schema::Role::SERVER;
    case Role::admin:
      break;
  }
  return schema::Role::OPERATOR;
}

Role readRole(schema::Role role) {
  switch (role) {
    case schema::Role::VIEWER:
      return Role::viewer;
    case schema::Role::USER:
      return Role::user;
    case schema::Role::SCHEDULER:
      return Role::scheduler;
    case schema::Role::SERVER:
      return Role::server;
    case schema::Role::OPERATOR:
      return Role::admin;
  }
  throw std::invalid_argument("there is no such role: the other side runs another version of gpupool");
}

StoredToken read(schema::TokenInfo::Reader from) {
  StoredToken to;
  to.id = text(from.getId());
  to.tenant = text(from.getTenant());
  to.name = text(from.getName());
  to.role = readRole(from.getRole());
  to.createdS = from.getCreatedS();
  to.expiresS = from.getExpiresS();
  to.usedS = from.getUsedS();
  to.revokedS = from.getRevokedS();
  to.createdBy = text(from.getCreatedBy());
  return to;
}

void write(const StoredToken& from, schema::TokenInfo::Builder to) {
  to.setId(from.id);
  to.setTenant(from.tenant);
  to.setName(from.name);
  to.setRole(wireRole(from.role));
  to.setCreatedS(from.createdS);
  to.setExpiresS(from.expiresS);
  to.setUsedS(from.usedS);
  to.setRevokedS(from.revokedS);
  to.setCreatedBy(from.createdBy);
}

Quota read(schema::Quota::Reader from) {
  return {text(from.getTenant()),
          from.getMilliDevices(),
          from.getMemoryBytes(),
          from.getDeviceSeconds(),
          static_cast<QuotaWindow>(from.getWindow()),
          from.getProtectMs()};
}

void write(const Quota& from, schema::Quota::Builder to) {
  to.setTenant(from.tenant);
  to.setMilliDevices(from.milliDevices);
  to.setMemoryBytes(from.memoryBytes);
  to.setDeviceSeconds(from.deviceSeconds);
  to.setWindow(static_cast<schema::QuotaWindow>(from.window));
  to.setProtectMs(from.protectMs);
}

QuotaUse read(schema::QuotaUse::Reader from) {
  return {read(from.getQuota()), from.getMilliDevices(), from.getMemoryBytes(), from.getDeviceSeconds(),
          from.getWindowEndsS()};
}

void write(const QuotaUse& from, schema::QuotaUse::Builder to) {
  write(from.quota, to.initQuota());
  to.setMilliDevices(from.milliDevices);
  to.setMemoryBytes(from.memoryBytes);
  to.setDeviceSeconds(from.deviceSeconds);
  to.setWindowEndsS(from.windowEndsS);
}

TenantUse read(schema::TenantUse::Reader from) {
  TenantUse use;
  use.quota = read(from.getQuota());
  use.tokens = from.getTokens();
  for (auto one : from.getLeases()) use.leases[text(one.getState())] = one.getCount();
  use.claims = from.getClaims();
  use.queued = from.getQueued();
  use.usage = from.getUsage();
  return use;
}

void write(const TenantUse& from, schema::TenantUse::Builder to) {
  write(from.quota, to.initQuota());
  to.setTokens(from.tokens);
  auto leases = to.initLeases(static_cast<unsigned>(from.leases.size()));
  unsigned i = 0;
  for (const auto& [state, count] : from.leases) {
    leases[i].setState(state);
    leases[i++].setCount(count);
  }
  to.setClaims(from.claims);
  to.setQueued(from.queued);
  to.setUsage(from.usage);
}

void write(const AuditEntry& from, schema::AuditEntry::Builder to) {
  to.setNumber(from.number);
  to.setTimeMs(from.timeMs);
  to.setEvent(static_cast<schema::AuditEvent>(from.event));
  write(from.lease, to.initLease());
  to.setServer(from.server);
  to.setTenant(from.tenant);
  to.setHolder(from.holder);
  to.setBy(from.by);
  to.setReason(from.reason);
}

}  // namespace gpupool::pool
