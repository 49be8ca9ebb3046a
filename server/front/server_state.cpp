#include "server/front/server_state.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/hmac.h"
#include "base/log.h"
#include "base/write_all.h"
#include "schema/convert.h"
#include "schema/store.capnp.h"
#include "server/worker_interface.h"

namespace gpupool::server {
namespace {

std::optional<StoredSession> readSession(schema::StoredWorker::Reader worker) {
  if (!worker.hasSession()) return std::nullopt;
  const auto from = worker.getSession();
  return StoredSession{schema::read(from.getId()),
                       from.getEpoch(),
                       from.getDeviceEpoch(),
                       from.getClientPid(),
                       schema::text(from.getCommand()),
                       schema::text(from.getTransport()),
                       from.getRowsHash(),
                       from.getTransportNamed()};
}

void writeSession(const StoredSession& from, schema::StoredSession::Builder to) {
  schema::write(from.id, to.initId());
  to.setEpoch(from.epoch);
  to.setDeviceEpoch(from.deviceEpoch);
  to.setClientPid(from.clientPid);
  to.setCommand(from.command);
  to.setTransport(from.transport);
  to.setRowsHash(from.rowsHash);
  to.setTransportNamed(from.transportNamed);
}

StoredSharing readSharing(schema::StoredSharing::Reader from) {
  const auto seal = std::as_bytes(std::span(from.getSeal().begin(), from.getSeal().size()));
  StoredSharing sharing{schema::read(from.getServer()), {seal.begin(), seal.end()}, from.getLife(), {}};
  for (const uint64_t number : from.getSessions()) sharing.sessions.push_back(number);
  return sharing;
}

void writeSharing(const StoredSharing& from, schema::StoredSharing::Builder to) {
  schema::write(from.server, to.initServer());
  to.setSeal({reinterpret_cast<const kj::byte*>(from.seal.data()), from.seal.size()});
  to.setLife(from.life);
  to.setSessions(kj::arrayPtr(from.sessions.data(), from.sessions.size()));
}

using StoredDevices = std::vector<std::pair<std::string, uint64_t>>;

StoredDevices readDevices(schema::Lease::Reader from) {
  StoredDevices devices;
  for (auto device : from.getDevices())
    devices.emplace_back(schema::bytes(device.getInfo().getUuid()), device.getMemoryBytes());
  return devices;
}

void writeDevices(const StoredDevices& from, schema::Lease::Builder to) {
  auto devices = to.initDevices(static_cast<unsigned>(from.size()));
  for (unsigned i = 0; i < devices.size(); ++i) {
    devices[i].initInfo().setUuid(schema::data(from[i].first));
    devices[i].setMemoryBytes(from[i].second);
  }
}

StoredGrant readGrant(schema::Lease::Reader from) {
  StoredGrant lease;
  lease.id = schema::read(from.getId());
  lease.epoch = from.getDeviceEpoch();
  const auto* key = reinterpret_cast<const std::byte*>(from.getSessionKey().begin());
  lease.key.assign(key, key + from.getSessionKey().size());
  lease.devices = readDevices(from);
  lease.holder = schema::text(from.getHolder());
  lease.tenant = schema::text(from.getTenant());
  const auto terms = from.getTerms();
  lease.sharePercent = terms.getSharePercent();
  lease.priority = std::min(terms.getPriority(), schema::Priority::HIGH);
  lease.protectMs = terms.getProtectMs();
  lease.idleMs = terms.getIdleMs();
  return lease;
}

void writeGrant(const StoredGrant& from, schema::Lease::Builder to) {
  schema::write(from.id, to.initId());
  to.setDeviceEpoch(from.epoch);
  to.setSessionKey({reinterpret_cast<const kj::byte*>(from.key.data()), from.key.size()});
  writeDevices(from.devices, to);
  to.setHolder(from.holder);
  to.setTenant(from.tenant);
  auto terms = to.initTerms();
  terms.setSharePercent(from.sharePercent);
  terms.setPriority(from.priority);
  terms.setProtectMs(from.protectMs);
  terms.setIdleMs(from.idleMs);
}

StoredGrant readAside(schema::StoredAside::Reader from) {
  StoredGrant lease = readGrant(from.getLease());
  StoredAside& aside = lease.aside.emplace();
  aside.byTurns = from.getByTurns();
  aside.changing = from.getChanging();
  for (const uint64_t bytes : from.getKept()) aside.kept.push_back(bytes);
  aside.movedBytes = from.getMovedBytes();
  return lease;
}

void writeAside(const StoredGrant& from, schema::StoredAside::Builder to) {
  writeGrant(from, to.initLease());
  to.setByTurns(from.aside->byTurns);
  to.setChanging(from.aside->changing);
  auto kept = to.initKept(static_cast<unsigned>(from.aside->kept.size()));
  for (unsigned i = 0; i < kept.size(); ++i) kept.set(i, from.aside->kept[i]);
  to.setMovedBytes(from.aside->movedBytes);
}

// Each kind has a list of its own.
void writeLeases(const std::vector<StoredGrant>& from, schema::StoredServer::Builder to) {
  const auto count = [&](auto&& is) { return static_cast<unsigned>(std::ranges::count_if(from, is)); };
  const unsigned aside = count([](const StoredGrant& one) { return !one.ending && one.aside; });
  const unsigned ending = count([](const StoredGrant& one) { return one.ending; });
  auto leases = to.initLeases(static_cast<unsigned>(from.size()) - aside - ending);
  auto others = to.initAside(aside);
  auto ends = to.initEnding(ending);
  unsigned lease = 0, other = 0, end = 0;
  for (const StoredGrant& one : from) {
    if (one.ending)
      writeGrant(one, ends[end++]);
    else if (one.aside)
      writeAside(one, others[other++]);
    else
      writeGrant(one, leases[lease++]);
  }
  auto targets = to.initTargets(count([](const StoredGrant& one) { return one.target.has_value(); }));
  unsigned target = 0;
  for (const StoredGrant& one : from) {
    if (!one.target) continue;
    schema::write(one.id, targets[target].initId());
    targets[target].setDeviceEpoch(one.target->epoch);
    writeDevices(one.target->devices, targets[target++]);
  }
}

void readLeases(schema::StoredServer::Reader from, std::vector<StoredGrant>& leases) {
  for (auto lease : from.getLeases()) leases.push_back(readGrant(lease));
  for (auto lease : from.getAside()) leases.push_back(readAside(lease));
  for (auto lease : from.getEnding()) {
    leases.push_back(readGrant(lease));
    leases.back().ending = true;
  }
  for (auto target : from.getTargets())
    for (StoredGrant& lease : leases)
      if (lease.id == schema::read(target.getId()))
        lease.target = StoredTarget{target.getDeviceEpoch(), readDevices(target)};
}

}  // namespace

StoredSharing newSharing() {
  StoredSharing sharing{Id::random(), std::vector<std::byte>(std::tuple_size_v<Digest>), 0};
  randomBytes(sharing.seal);
  return sharing;
}

ServerState StateFile::read() {
  // Of a server that was killed while it wrote.
  if (!path_.empty()) unlink((path_ + ".new").c_str());
  const kj::AutoCloseFd file(path_.empty() ? -1 : open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return {};
  ServerState state;
  try {
    capnp::StreamFdMessageReader reader(file.get());
    const auto stored = reader.getRoot<schema::StoredServer>();
    for (auto device : stored.getDevices())
      state.epochs[schema::bytes(device.getUuid())] = device.getHighestEpoch();
    if (stored.getBootId() == bootId_.c_str()) {
      const bool ofThisInterface = stored.getWorkerInterface() == kWorkerInterface;
      if (ofThisInterface) readLeases(stored, state.leases);
      if (stored.hasSharing()) state.sharing = readSharing(stored.getSharing());
      if (stored.hasCopier())
        state.copier =
            StoredCopier{static_cast<pid_t>(stored.getCopier().getPid()), stored.getCopier().getStartTicks()};
      for (auto worker : stored.getWorkers()) {
        StoredWorker one{
            static_cast<pid_t>(worker.getPid()), worker.getStartTicks(), schema::read(worker.getLease()), {}};
        for (auto uuid : worker.getDevices()) one.devices.push_back(schema::bytes(uuid));
        if (ofThisInterface) one.session = readSession(worker);
        one.number = worker.getNumber();
        state.workers.push_back(std::move(one));
      }
      for (auto hold : stored.getHolds()) {
        const auto held = hold.getHeld();
        state.holds.push_back({schema::read(hold.getLease()), schema::read(held.getCheckpoint()),
                               schema::text(held.getFolder()), schema::text(held.getServer())});
      }
    }
  } catch (const kj::Exception& error) {
    GPUPOOL_WARNING("%s cannot be read, and is started anew: %s", path_.c_str(),
                    error.getDescription().cStr());
    return {};
  }
  stored_ = state;
  return state;
}

void StateFile::write(const ServerState& state) {
  if (path_.empty() || state == stored_) return;
  if (replace(state)) {
    stored_ = state;
    failed_ = false;
  } else if (!failed_) {
    GPUPOOL_WARNING("%s cannot be written: %s; a restart of this server would not know what runs now",
                    path_.c_str(), std::strerror(errno));
    failed_ = true;
  }
}

bool StateFile::replace(const ServerState& state) const {
  capnp::MallocMessageBuilder message;
  auto root = message.initRoot<schema::StoredServer>();
  root.setBootId(bootId_);
  auto devices = root.initDevices(static_cast<unsigned>(state.epochs.size()));
  unsigned at = 0;
  for (const auto& [uuid, epoch] : state.epochs) {
    devices[at].setUuid(schema::data(uuid));
    devices[at++].setHighestEpoch(epoch);
  }
  auto workers = root.initWorkers(static_cast<unsigned>(state.workers.size()));
  for (unsigned i = 0; i < workers.size(); ++i) {
    const StoredWorker& worker = state.workers[i];
    workers[i].setPid(static_cast<uint32_t>(worker.pid));
    workers[i].setStartTicks(worker.startTicks);
    schema::write(worker.lease, workers[i].initLease());
    auto uuids = workers[i].initDevices(static_cast<unsigned>(worker.devices.size()));
    for (unsigned d = 0; d < uuids.size(); ++d) uuids.set(d, schema::data(worker.devices[d]));
    if (worker.session) writeSession(*worker.session, workers[i].initSession());
    workers[i].setNumber(worker.number);
  }
  auto holds = root.initHolds(static_cast<unsigned>(state.holds.size()));
  for (unsigned i = 0; i < holds.size(); ++i) {
    schema::write(state.holds[i].lease, holds[i].initLease());
    auto held = holds[i].initHeld();
    schema::write(state.holds[i].checkpoint, held.initCheckpoint());
    held.setFolder(state.holds[i].folder);
    held.setServer(state.holds[i].server);
  }
  root.setWorkerInterface(kWorkerInterface);
  writeLeases(state.leases, root);
  if (state.sharing) writeSharing(*state.sharing, root.initSharing());
  if (state.copier) {
    auto copier = root.initCopier();
    copier.setPid(static_cast<uint32_t>(state.copier->pid));
    copier.setStartTicks(state.copier->startTicks);
  }
  const auto words = capnp::messageToFlatArray(message);
  const auto flat = words.asChars();
  const std::string fresh = path_ + ".new";
  const kj::AutoCloseFd file(open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  return file.get() >= 0 && writeAll(file.get(), {flat.begin(), flat.size()}) &&
         rename(fresh.c_str(), path_.c_str()) == 0;
}

}  // namespace gpupool::server
