#include "pool-manager/records.h"

#include <capnp/message.h>
#include <capnp/serialize.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "pool-manager/convert.h"
#include "schema/store.capnp.h"

namespace gpupool::pool {
namespace {

constexpr unsigned kMostStoredPlacements = 16;
constexpr size_t kMostStoredClients = 1024;  // of one lease
constexpr size_t kMostRelease = 64;
constexpr size_t kMostDrainText = 255;  // of an operator's tenant, and of his token's id

template <class List>
auto find(List& placements, PlacementRole role) {
  return std::find_if(placements.begin(), placements.end(),
                      [role](const Placement& one) { return one.role == role; });
}

template <class List>
auto findTarget(List& placements) {
  const auto at = find(placements, PlacementRole::target);
  return at == placements.end() ? nullptr : &*at;
}

void writePlacement(const Placement& from, schema::StoredPlacement::Builder to) {
  pool::write(from.server, to.initServer());
  auto devices = to.initDevices(static_cast<unsigned>(from.devices.size()));
  for (unsigned i = 0; i < devices.size(); ++i) pool::write(from.devices[i], devices[i]);
  to.setEpoch(from.epoch);
  to.setKey(data(from.key));
  to.setRole(static_cast<schema::PlacementRole>(from.role));
  schema::writeKept(from.kept, to);
}

Placement readPlacement(schema::StoredPlacement::Reader from) {
  Placement to{pool::read(from.getServer()), {}, from.getEpoch(), bytes(from.getKey()), {}, {}, false};
  to.devices = readLeasedDevices(from.getDevices());
  to.role = static_cast<PlacementRole>(from.getRole());
  if (to.role > PlacementRole::left)
    throw std::runtime_error("store: a lease has a placement of unknown role");
  to.kept = readKept(from.getKept());
  if (!to.kept.empty() && to.kept.size() != to.devices.size())
    throw std::runtime_error("store: a lease keeps memory on more or fewer devices than it has");
  return to;
}

TurnTerms readTerms(schema::TurnTerms::Reader from) {
  const TurnTerms to = pool::read(from);
  if (to.sharePercent > 100 || to.priority > Priority::high)
    throw std::runtime_error("store: a lease takes turns in an unknown way");
  return to;
}

LeaseState readState(schema::LeaseState from) {
  if (static_cast<uint32_t>(from) >= kLeaseStates)
    throw std::runtime_error("store: a lease is in an unknown state");
  return static_cast<LeaseState>(from);
}

}  // namespace

bool StoredLease::isPlaced() const { return find(placements, PlacementRole::primary) != placements.end(); }
bool StoredLease::isPlacedOn(const std::string& name) const { return isPlaced() && server().name == name; }
const Placement& StoredLease::primary() const { return *find(placements, PlacementRole::primary); }
Placement& StoredLease::primary() { return *find(placements, PlacementRole::primary); }
const Placement* StoredLease::target() const { return findTarget(placements); }
Placement* StoredLease::target() { return findTarget(placements); }

const Placement* StoredLease::on(const std::string& server) const {
  const auto at = std::find_if(placements.begin(), placements.end(),
                               [&](const Placement& one) { return one.server.name == server; });
  return at == placements.end() ? nullptr : &*at;
}

std::set<uint64_t> StoredLease::goneEpochs() const {
  std::set<uint64_t> epochs;
  for (const Placement& one : placements)
    if (one.gone) epochs.insert(one.epoch);
  return epochs;
}

void StoredLease::forget(const std::set<uint64_t>& epochs) {
  std::erase_if(placements, [&](const Placement& one) { return epochs.contains(one.epoch); });
  if (state != LeaseState::held && !placements.empty() && !isPlaced())
    placements.front().role = PlacementRole::primary;
}

void StoredLease::holdIn(const HeldLease& held) {
  Placement& left = primary();
  if (!hold) hold = Hold{held, left};  // one that was not restored is held where it was written
  left.role = PlacementRole::left;
  left.kept.assign(left.devices.size(), 0);
  state = LeaseState::held;
}

std::string describe(const Placement& placement) {
  std::string ordinals;
  for (const LeasedDevice& device : placement.devices)
    ordinals += (ordinals.empty() ? "" : ",") + std::to_string(device.info.ordinal);
  return placement.server.name + (placement.devices.size() == 1 ? " GPU " : " GPUs ") + ordinals;
}

Lease wireLease(const StoredLease& lease) {
  return wireLease(lease, lease.isPlaced() ? lease.primary() : lease.hold.value().was);
}

Lease wireLease(const StoredLease& lease, const Placement& placement) {
  Lease wire{lease.id,      placement.server, placement.devices, lease.ttlMs, placement.epoch,
             placement.key, lease.holder,     lease.tenant,      0,           {},
             lease.terms};
  if (lease.hold && !lease.hold->atHolder) wire.held = lease.hold->held;
  return wire;
}

std::string encodeLease(const StoredLease& lease, const std::string& bootId) {
  capnp::MallocMessageBuilder message;
  auto root = message.initRoot<schema::StoredLease>();
  write(lease.id, root.initId());
  root.setState(static_cast<schema::LeaseState>(lease.state));
  auto placements = root.initPlacements(static_cast<unsigned>(lease.placements.size()));
  for (unsigned i = 0; i < placements.size(); ++i) writePlacement(lease.placements[i], placements[i]);
  root.setTtlMs(lease.ttlMs);
  root.setTenant(lease.tenant);
  root.setHolder(lease.holder);
  root.setEnding(static_cast<schema::LeaseState>(lease.ending));
  root.setReason(lease.reason);
  root.setBootId(bootId);
  root.setHolderPid(static_cast<uint32_t>(lease.process.pid));
  root.setHolderStartTicks(lease.process.startTicks);
  write(lease.terms, root.initTerms());
  root.setGpu(lease.gpu);
  root.setPolicy(static_cast<schema::Policy>(lease.policy));
  root.setPurpose(lease.purpose);
  root.setLimitMs(lease.limitMs);
  root.setEndsAtMs(lease.endsAtMs);
  root.setEndsAtBootMs(lease.endsAtBootMs);
  root.setJob(lease.job);
  if (lease.hold) {
    auto hold = root.initHold();
    write(lease.hold->held, hold.initHeld());
    writePlacement(lease.hold->was, hold.initWas());
    hold.setAtHolder(lease.hold->atHolder);
  }
  root.setSuspendedBy(lease.suspendedBy);
  write(lease.preemptor, root.initPreemptor());
  if (lease.client.rowsHash != 0) write(lease.client, root.initClient());
  root.setFingerprint(data(lease.fingerprint));
  root.setStandby(lease.standby);
  root.setStandbyEpoch(lease.standbyEpoch);
  root.setGrantedAtMs(lease.grantedAtMs);
  const auto words = capnp::messageToFlatArray(message);
  return {words.asChars().begin(), words.asChars().size()};
}

StoredLease decodeLease(const std::string& bytes, const std::string& bootId) try {
  auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
  std::memcpy(words.begin(), bytes.data(), words.size() * sizeof(capnp::word));
  capnp::FlatArrayMessageReader message(words);
  const auto root = message.getRoot<schema::StoredLease>();
  StoredLease lease;
  lease.id = read(root.getId());
  lease.state = readState(root.getState());
  if (root.getPlacements().size() > kMostStoredPlacements)
    throw std::runtime_error("store: a lease lies on too many servers");
  for (auto placement : root.getPlacements()) lease.placements.push_back(readPlacement(placement));
  const auto primaries =
      std::count_if(lease.placements.begin(), lease.placements.end(),
                    [](const Placement& one) { return one.role == PlacementRole::primary; });
  const bool nowhere = lease.state == LeaseState::held || lease.placements.empty();
  if (root.hasHold())
    lease.hold = {read(root.getHold().getHeld()), readPlacement(root.getHold().getWas()),
                  root.getHold().getAtHolder()};
  if (primaries != (nowhere ? 0 : 1)) throw std::runtime_error("store: a lease needs one primary placement");
  if (nowhere && !lease.hold) throw std::runtime_error("store: a lease is nowhere, and in no files");
  lease.ttlMs = root.getTtlMs();
  lease.tenant = text(root.getTenant());
  lease.holder = text(root.getHolder());
  lease.ending = readState(root.getEnding());
  lease.reason = text(root.getReason());
  lease.terms = readTerms(root.getTerms());
  lease.gpu = text(root.getGpu());
  lease.policy = static_cast<Policy>(root.getPolicy());
  if (lease.policy > Policy::spread) throw std::runtime_error("store: a lease has an unknown policy");
  lease.purpose = text(root.getPurpose());
  lease.limitMs = root.getLimitMs();
  lease.endsAtMs = root.getEndsAtMs();
  lease.job = text(root.getJob());
  lease.suspendedBy = text(root.getSuspendedBy());
  if (root.hasPreemptor()) lease.preemptor = read(root.getPreemptor());
  lease.client = read(root.getClient());
  lease.fingerprint = pool::bytes(root.getFingerprint());
  lease.standby = text(root.getStandby());
  lease.standbyEpoch = root.getStandbyEpoch();
  lease.grantedAtMs = root.getGrantedAtMs();
  if (text(root.getBootId()) == bootId) {
    lease.process = {static_cast<int>(root.getHolderPid()), root.getHolderStartTicks()};
    lease.endsAtBootMs = root.getEndsAtBootMs();
  }
  return lease;
} catch (const kj::Exception& error) {
  throw std::runtime_error(std::string("store: a lease cannot be read: ") + error.getDescription().cStr());
}

std::string encodeCordon(const Cordon& cordon) {
  return std::to_string(cordon.sinceS) + "\n" + cordon.by + "\n" + cordon.reason;
}

Cordon decodeCordon(const std::string& text) {
  const size_t first = text.find('\n');
  const size_t second = first == std::string::npos ? first : text.find('\n', first + 1);
  Cordon cordon{text, "", 0};
  if (second == std::string::npos) return cordon;
  if (std::from_chars(text.data(), text.data() + first, cordon.sinceS).ptr != text.data() + first)
    return {text, "", 0};
  cordon.by = text.substr(first + 1, second - first - 1);
  cordon.reason = text.substr(second + 1);
  return cordon;
}

std::string encodeDrain(const StoredDrain& drain) {
  return std::to_string(drain.untilMs) + "\n" + printable(drain.who.tenant, kMostDrainText) + "\n" +
         printable(drain.who.token, kMostDrainText) + "\n";
}

std::optional<StoredDrain> decodeDrain(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t from = 0, to; lines.size() < 3; from = to + 1) {
    to = text.find('\n', from);
    if (to == std::string::npos) return std::nullopt;
    lines.push_back(text.substr(from, to - from));
  }
  StoredDrain drain{{Principal::Role::admin, lines[1], lines[2]}, 0};
  const char* const end = lines[0].data() + lines[0].size();
  if (lines[0].empty() || std::from_chars(lines[0].data(), end, drain.untilMs).ptr != end)
    return std::nullopt;
  return drain;
}

std::string encodeClients(const std::vector<WorkerVersion>& clients) {
  std::string text;
  for (const WorkerVersion& client : clients) {
    char rows[17];
    std::snprintf(rows, sizeof rows, "%016llx", static_cast<unsigned long long>(client.rowsHash));
    text += std::string(rows) + " " + printable(client.release, kMostRelease) + "\n";
  }
  return text;
}

std::vector<WorkerVersion> decodeClients(const std::string& text) {
  constexpr size_t kDigits = 16;
  std::vector<WorkerVersion> clients;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line) && clients.size() < kMostStoredClients;) {
    WorkerVersion client;
    if (line.size() <= kDigits || line[kDigits] != ' ') continue;
    if (std::from_chars(line.data(), line.data() + kDigits, client.rowsHash, 16).ptr != line.data() + kDigits)
      continue;
    client.release = line.substr(kDigits + 1);
    if (client.rowsHash != 0) clients.push_back(std::move(client));
  }
  return clients;
}

}  // namespace gpupool::pool
