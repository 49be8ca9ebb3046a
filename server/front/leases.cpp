#include "server/front/leases.h"
#include "schema/convert.h"
#include "schema/lease_memory.h"

#include <algorithm>

namespace gpupool::server {

void write(const HeldFiles& from, schema::HeldLease::Builder to) {
  schema::write(from.checkpoint, to.initCheckpoint());
  to.setFolder(from.folder);
  to.setServer(from.server);
}

LeaseTable::LeaseTable(std::vector<Device> devices, const std::map<std::string, uint64_t>& epochs,
                       uint32_t overcommitPercent)
    : devices_(std::move(devices)),
      overcommitPercent_(overcommitPercent),
      epochs_(devices_.size(), 0),
      problems_(devices_.size()),
      busy_(devices_.size()) {
  for (size_t device = 0; device < devices_.size(); ++device)
    if (const auto known = epochs.find(devices_[device].uuid); known != epochs.end())
      epochs_[device] = known->second;
}

std::optional<std::string> LeaseTable::grant(schema::Lease::Reader lease) {
  Grant grant;
  grant.id = schema::read(lease.getId());
  grant.epoch = lease.getDeviceEpoch();  // readPlacement's, too
  grant.holder = lease.getHolder().cStr();
  grant.tenant = lease.getTenant().cStr();
  grant.sharePercent = std::min<uint32_t>(lease.getTerms().getSharePercent(), 100);
  grant.protectMs = lease.getTerms().getProtectMs();
  grant.holderKeeps = grant.protectMs != 0 && lease.getTerms().getHolderKeeps();
  grant.standbyKeeps = grant.holderKeeps && lease.getTerms().getStandbyKeeps();
  grant.idleMs = lease.getTerms().getIdleMs();
  grant.priority = std::min(lease.getTerms().getPriority(), schema::Priority::HIGH);
  const auto key = lease.getSessionKey();
  if (key.size() != schema::kSessionKeyBytes)
    return "its session key has " + std::to_string(key.size()) + " bytes";
  const auto* bytes = reinterpret_cast<const std::byte*>(key.begin());
  grant.key.assign(bytes, bytes + key.size());
  if (lease.getDevices().size() == 0) return "it names no device";
  if (lease.getDevices().size() > schema::kMostLeasedDevices)
    return "it has " + std::to_string(lease.getDevices().size()) + " devices, and a session at most " +
           std::to_string(schema::kMostLeasedDevices);

  const auto found = leases_.find(grant.id);
  if (found != leases_.end()) {
    if (found->second.closing) return "it is being revoked";
    if (found->second.placement(grant.epoch) == nullptr) return "it was granted before with another epoch";
    found->second.key = std::move(grant.key);
    changed_();
    return std::nullopt;
  }
  if (auto why = readPlacement(lease, grant)) return why;
  if (const Id checkpoint = schema::read(lease.getHeld().getCheckpoint()); checkpoint != Id{}) {
    if (overcommitted()) return "leases take turns here (overcommit), and those are not held in files";
    grant.held = HeldFiles{checkpoint, schema::text(lease.getHeld().getFolder()),
                           schema::text(lease.getHeld().getServer())};
  }
  if (auto missing = findRoom(grant)) return missing;
  if (grant.held) {
    grant.paused = true;
    grant.suspended = Suspended{.kept = std::vector<uint64_t>(grant.devices.size())};
  }
  for (const auto& device : grant.devices) epochs_[device.index] = grant.epoch;
  leases_.emplace(grant.id, std::move(grant));
  changed_();
  return std::nullopt;
}

std::vector<StoredGrant> LeaseTable::readoptable(const std::set<Id>& lend) const {
  std::vector<StoredGrant> list;
  for (const auto& [id, lease] : leases_) {
    // What others have of it is theirs still, also where it does not go on itself.
    const bool goes = outlives(lease) && !lease.closing && !lease.held;
    const bool ending = !goes && lend.contains(id);
    if (!goes && !ending) continue;
    StoredGrant& one = list.emplace_back(StoredGrant{id,
                                                     lease.epoch,
                                                     lease.key,
                                                     {},
                                                     lease.holder,
                                                     lease.tenant,
                                                     lease.sharePercent,
                                                     lease.priority,
                                                     lease.protectMs,
                                                     lease.idleMs});
    one.ending = ending;
    one.devices = named(lease);
    if (lease.target) one.target = StoredTarget{lease.target->epoch, named(*lease.target)};
    // What moves is in one worker or in the other; what goes into files is there as a whole, or not at all
    // (Readoption).
    if (!lease.paused || lease.moving) continue;
    StoredAside& aside = one.aside.emplace();
    aside.byTurns = lease.aside;
    aside.changing = !lease.suspended || lease.resuming;
    if (!aside.changing) aside.kept = lease.suspended->kept;
    if (!aside.changing) aside.movedBytes = lease.suspended->movedBytes;
  }
  return list;
}

std::vector<std::pair<std::string, uint64_t>> LeaseTable::named(const Placement& placement) const {
  std::vector<std::pair<std::string, uint64_t>> list;
  for (const GrantedDevice& device : placement.devices)
    list.emplace_back(devices_[device.index].uuid, device.memoryBytes);
  return list;
}

std::vector<std::pair<Id, uint64_t>> LeaseTable::readopted() const {
  std::vector<std::pair<Id, uint64_t>> list;
  for (const auto& [id, lease] : leases_)
    if (lease.readopted) list.emplace_back(id, lease.epoch);
  return list;
}

std::optional<std::string> LeaseTable::readopt(uint64_t epoch,
                                               const std::vector<std::pair<std::string, uint64_t>>& named,
                                               Placement& placement) const {
  placement.epoch = epoch;
  for (const auto& [uuid, bytes] : named) {
    const auto at = std::find_if(devices_.begin(), devices_.end(),
                                 [&, uuid = uuid](const Device& device) { return device.uuid == uuid; });
    if (at == devices_.end()) return "this server does not have its device any more";
    const GrantedDevice device{static_cast<size_t>(at - devices_.begin()), bytes};
    if (epoch > epochs_[device.index]) return "its device has not been granted with that epoch";
    placement.devices.push_back(device);
  }
  return std::nullopt;
}

std::optional<std::string> LeaseTable::readopt(const StoredGrant& lease,
                                               std::map<Id, uint64_t> sessionEpochs) {
  Grant grant;
  grant.id = lease.id;
  if (auto why = readopt(lease.epoch, lease.devices, grant)) return why;
  if (lease.target)
    if (auto why = readopt(lease.target->epoch, lease.target->devices, grant.target.emplace())) return why;
  grant.key = lease.key;
  grant.holder = lease.holder;
  grant.tenant = lease.tenant;
  grant.sharePercent = lease.sharePercent;
  grant.priority = lease.priority;
  grant.protectMs = lease.protectMs;
  grant.idleMs = lease.idleMs;
  grant.readopted = true;
  grant.closing = lease.ending;
  grant.sessionEpochs = std::move(sessionEpochs);
  if (lease.aside) {
    grant.paused = true;
    grant.aside = lease.aside->byTurns && overcommitted();  // else nobody would bring it back
    if (!lease.aside->changing) {
      if (lease.aside->kept.size() != grant.devices.size()) return "what it keeps is not known";
      grant.lastKept = lease.aside->kept;
      grant.suspended = Suspended{.kept = lease.aside->kept, .movedBytes = lease.aside->movedBytes};
    }
  }
  for (size_t place = 0; place < grant.devices.size(); ++place)
    if (auto missing = lacks(grant.devices[place].index, reserved(grant, place))) return missing;
  if (grant.target)
    for (const GrantedDevice& device : grant.target->devices)
      if (auto missing = lacks(device.index, whole(device))) return missing;
  leases_.emplace(grant.id, std::move(grant));
  return std::nullopt;
}

std::optional<std::string> LeaseTable::addTarget(schema::Lease::Reader target) {
  Grant* lease = admissible(schema::read(target.getId()));
  if (lease == nullptr) return "it is not known here, or is ending";
  if (overcommitted())
    return "leases take turns here (overcommit), and those stay on the GPUs that they have; they can move to "
           "another server";
  if (lease->suspended) return "it is suspended: resume it first";
  if (lease->paused && !lease->moving) return "it is being suspended or resumed";
  const uint64_t epoch = target.getDeviceEpoch();
  if (lease->target && lease->target->epoch == epoch) return std::nullopt;
  if (lease->target) return "it is moving to other GPUs already";
  if (epoch <= lease->epoch)  // an epoch names one placement
    return "its epoch " + std::to_string(epoch) + " is not higher than " + std::to_string(lease->epoch) +
           ", the lease's own";
  if (target.getDevices().size() != lease->devices.size())
    return "it has " + std::to_string(lease->devices.size()) + " devices, and would have " +
           std::to_string(target.getDevices().size());
  Placement placement;
  if (auto why = readPlacement(target, placement)) return why;
  for (const GrantedDevice& device : placement.devices)
    if (auto missing = lacks(device.index, whole(device))) return missing;
  for (const GrantedDevice& device : placement.devices) epochs_[device.index] = epoch;
  lease->target = std::move(placement);
  changed_();
  return std::nullopt;
}

void LeaseTable::settle(const Id& id, bool moved) {
  Grant* lease = admissible(id);
  if (lease == nullptr || !lease->target) return;
  if (moved) static_cast<Placement&>(*lease) = std::move(*lease->target);
  lease->target.reset();
  lease->lastKept.clear();  // it was of the devices that it had
  changed_();
}

std::optional<std::string> LeaseTable::readPlacement(schema::Lease::Reader lease,
                                                     Placement& placement) const {
  placement.epoch = lease.getDeviceEpoch();
  for (auto wanted : lease.getDevices()) {
    const auto uuid = wanted.getInfo().getUuid();
    const std::string name(reinterpret_cast<const char*>(uuid.begin()), uuid.size());
    const auto at =
        std::find_if(devices_.begin(), devices_.end(), [&](const Device& d) { return d.uuid == name; });
    if (at == devices_.end()) return "this server has no device of the uuid it names";
    const size_t index = at - devices_.begin();
    if (!problems_[index].empty())
      return "device " + std::to_string(at->ordinal) + " is broken: " + problems_[index];
    if (!busy_[index].empty()) return "device " + std::to_string(at->ordinal) + " is busy: " + busy_[index];
    for (const auto& other : placement.devices)
      if (other.index == index) return "it names a device twice";
    if (placement.epoch <= epochs_[index])
      return "its epoch " + std::to_string(placement.epoch) + " is not higher than " +
             std::to_string(epochs_[index]) + ", the last one of device " + std::to_string(at->ordinal);
    const uint64_t amount = wanted.getMemoryBytes() != 0 ? wanted.getMemoryBytes() : at->memoryBytes;
    placement.devices.push_back({index, amount});
  }
  return std::nullopt;
}

std::optional<std::string> LeaseTable::lacks(size_t device, uint64_t amount) const {
  const uint64_t all = devices_[device].memoryBytes;
  const uint64_t taken = std::min(reserved(device), all);
  if (amount <= all - taken) return std::nullopt;
  return "device " + std::to_string(devices_[device].ordinal) + " has " + std::to_string(all - taken) +
         " bytes free, it wants " + std::to_string(amount);
}

std::optional<std::string> LeaseTable::findRoom(Grant& lease) const {
  for (const GrantedDevice& device : lease.devices) {
    if (overcommitted()) {
      if (auto why = crowds(lease.id, device)) return why;
      if (!waitedFor_(device.index) && !lacks(device.index, whole(device))) continue;
      lease.paused = lease.aside = true;
      lease.suspended = Suspended{.kept = std::vector<uint64_t>(lease.devices.size())};
    } else if (auto missing = lacks(device.index, whole(device))) {
      return missing;
    }
  }
  return std::nullopt;
}

std::optional<std::string> LeaseTable::crowded(const Id& id) const {
  const auto found = leases_.find(id);
  if (!overcommitted() || found == leases_.end()) return std::nullopt;
  for (const GrantedDevice& device : found->second.devices)
    if (auto why = crowds(id, device)) return why;
  return std::nullopt;
}

std::optional<std::string> LeaseTable::crowds(const Id& id, const GrantedDevice& wanted) const {
  const Device& device = devices_[wanted.index];
  uint64_t leased = 0, aside = std::min(whole(wanted), overhead(wanted.index));
  uint64_t largest = whole(wanted) - aside;  // that has to fit beside all that are aside
  for (const auto& [other, lease] : leases_)
    for (size_t place = 0; place < lease.devices.size(); ++place) {
      if (other == id || lease.devices[place].index != wanted.index) continue;
      const uint64_t all = whole(lease.devices[place]);
      const uint64_t kept = lease.suspended ? lease.suspended->kept[place] : 0;
      const uint64_t left = std::min(all, kept + overhead(wanted.index));
      const bool takesTurns = !lease.suspended || lease.aside || lease.resuming;
      aside += left;
      leased += takesTurns ? all : left;
      if (takesTurns) largest = std::max(largest, all - left);
    }
  const uint64_t leasable = schema::leasableBytes(device.memoryBytes, overcommitPercent_);
  const std::string name = "device " + std::to_string(device.ordinal);
  if (leased > leasable || whole(wanted) > leasable - leased)
    return name + " has " + std::to_string(leasable - std::min(leased, leasable)) + " of " +
           std::to_string(leasable) + " bytes left to lease (overcommit), it wants " +
           std::to_string(whole(wanted));
  if (aside <= device.memoryBytes && largest <= device.memoryBytes - aside) return std::nullopt;
  return name + " has " + std::to_string(device.memoryBytes) + " bytes; " + std::to_string(aside) +
         " that leases leave there while others have their turn and " + std::to_string(largest) +
         " that the largest of them needs beside are more";
}

uint64_t LeaseTable::overhead(size_t device) const {
  return overcommitted() && !devices_[device].software ? schema::kLeaseOverheadBytes : 0;
}

uint64_t LeaseTable::whole(const GrantedDevice& device) const {
  const uint64_t all = devices_[device.index].memoryBytes;
  if (device.memoryBytes >= all) return device.memoryBytes;
  return std::min(all, device.memoryBytes + overhead(device.index));
}

uint64_t LeaseTable::left(const Grant& lease, size_t place) const {
  const GrantedDevice& device = lease.devices[place];
  const uint64_t kept = lease.suspended ? lease.suspended->kept[place] : 0;
  // One that has never had a session has no context.
  const uint64_t more = lease.sessionEpochs.empty() ? 0 : overhead(device.index);
  return std::min(whole(device), kept + more);
}

uint64_t LeaseTable::reserved(const Grant& lease, size_t place) const {
  return lease.suspended && !lease.resuming ? left(lease, place) : whole(lease.devices[place]);
}

void LeaseTable::pause(const Id& id, bool aside) {
  Grant* lease = admissible(id);
  if (lease == nullptr) return;
  lease->paused = true;
  lease->aside = aside;
  changed_();
}

void LeaseTable::pauseToMove(const Id& id) {
  if (Grant* lease = admissible(id)) lease->moving = true;
  pause(id);
}

void LeaseTable::unpause(const Id& id) {
  Grant* lease = admissible(id);
  if (lease == nullptr) return;
  lease->paused = lease->aside = lease->moving = lease->resuming = false;
  lease->suspended.reset();
  lease->held.reset();
  lease->holding = false;
  changed_();
}

void LeaseTable::pauseToHold(const Id& id) {
  if (Grant* lease = admissible(id)) lease->holding = true;
  pauseToMove(id);
}

void LeaseTable::setHeld(const Id& id, HeldFiles held, Suspended suspended) {
  Grant* lease = admissible(id);
  if (lease == nullptr) return;
  suspended.kept.assign(lease->devices.size(), 0);
  lease->held =
      std::move(held);  // before it is told to be suspended: that its next life could not bring back
  setSuspended(id, std::move(suspended));
  lease->holding = lease->moving = false;
}

void LeaseTable::setSuspended(const Id& id, Suspended suspended) {
  Grant* lease = admissible(id);
  if (lease == nullptr) return;
  lease->paused = true;
  lease->resuming = false;
  lease->lastKept = suspended.kept;
  lease->suspended = std::move(suspended);
  changed_();
}

std::optional<std::string> LeaseTable::reserveAgain(const Id& id) {
  Grant* lease = admissible(id);
  if (lease == nullptr || !lease->suspended || lease->resuming) return std::nullopt;
  for (size_t place = 0; place < lease->devices.size(); ++place) {
    // What it keeps is reserved already.
    const uint64_t amount = whole(lease->devices[place]), kept = left(*lease, place);
    if (kept >= amount) continue;
    if (auto missing = lacks(lease->devices[place].index, amount - kept)) return missing;
  }
  lease->resuming = true;
  changed_();
  return std::nullopt;
}

std::vector<std::pair<Id, std::vector<uint64_t>>> LeaseTable::suspended() const {
  std::vector<std::pair<Id, std::vector<uint64_t>>> list;
  for (const auto& [id, lease] : leases_)
    if (!lease.closing && lease.suspended && !lease.resuming && !lease.aside)
      list.emplace_back(id, lease.suspended->kept);
  return list;
}

const HeldFiles* LeaseTable::held(const Id& id) const {
  const auto found = leases_.find(id);
  return found == leases_.end() || !found->second.held ? nullptr : &*found->second.held;
}

std::vector<int> LeaseTable::ordinals(const Placement& placement) const {
  std::vector<int> list;
  list.reserve(placement.devices.size());
  for (const auto& device : placement.devices)
    list.push_back(static_cast<int>(devices_[device.index].ordinal));
  return list;
}

bool LeaseTable::setBroken(uint32_t ordinal, const std::string& problem) {
  for (size_t index = 0; index < devices_.size(); ++index) {
    if (devices_[index].ordinal != ordinal || !problems_[index].empty()) continue;
    problems_[index] = problem;
    return true;
  }
  return false;
}

Grant* LeaseTable::admissible(const Id& id) {
  const auto found = leases_.find(id);
  return found == leases_.end() || found->second.closing ? nullptr : &found->second;
}

bool LeaseTable::ofOneTenant(const Id& one, const Id& other) {
  const Grant *first = admissible(one), *second = admissible(other);
  return first != nullptr && second != nullptr && first->tenant == second->tenant;
}

std::vector<uint64_t> LeaseTable::limits(const Id& id, uint64_t deviceEpoch) const {
  const auto found = leases_.find(id);
  const Placement* placement = found == leases_.end() ? nullptr : found->second.placement(deviceEpoch);
  std::vector<uint64_t> list;
  if (placement != nullptr)
    for (const GrantedDevice& device : placement->devices) list.push_back(device.memoryBytes);
  return list;
}

bool LeaseTable::close(const Id& id) {
  const auto found = leases_.find(id);
  if (found == leases_.end()) return false;
  found->second.closing = true;
  changed_();
  return true;
}

void LeaseTable::remove(const Id& id) {
  leases_.erase(id);
  changed_();
}

std::vector<Id> LeaseTable::active() const {
  std::vector<Id> list;
  for (const auto& [id, lease] : leases_)
    if (!lease.closing) list.push_back(id);
  return list;
}

template <class F>
void LeaseTable::eachDevice(const Grant& lease, F&& see) {
  for (const auto& device : lease.devices) see(device);
  if (lease.target)
    for (const auto& device : lease.target->devices) see(device);
}

uint64_t LeaseTable::reserved(size_t device) const {
  uint64_t total = 0;
  for (const auto& [id, lease] : leases_) {
    for (size_t place = 0; place < lease.devices.size(); ++place)
      if (lease.devices[place].index == device) total += reserved(lease, place);
    if (!lease.target) continue;
    for (const auto& granted : lease.target->devices)
      if (granted.index == device) total += whole(granted);
  }
  return total;
}

uint64_t LeaseTable::promised(size_t device) const {
  uint64_t total = 0;
  for (const auto& [id, lease] : leases_)
    eachDevice(lease, [&](const GrantedDevice& granted) {
      if (granted.index == device) total += granted.memoryBytes;
    });
  return total;
}

std::vector<Id> LeaseTable::holders(size_t device) const {
  std::vector<Id> ids;
  for (const auto& [id, lease] : leases_)
    eachDevice(lease, [&, id = id](const GrantedDevice& granted) {
      if (granted.index == device && (ids.empty() || ids.back() != id)) ids.push_back(id);
    });
  return ids;
}

}  // namespace gpupool::server
