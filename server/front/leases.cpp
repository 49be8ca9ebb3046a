
#include "server/front/leases.h"
#include "schema/convert.h"

#include <algorithm>

namespace gpupool::server {

LeaseTable::LeaseTable(std::vector<Device> devices, const std::map<std::string, uint64_t>& epochs)
    : devices_(std::move(devices)),
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
  grant.epoch = lease.getDeviceEpoch();
  grant.holder = lease.getHolder().cStr();
  grant.tenant = lease.getTenant().cStr();
  const auto key = lease.getSessionKey();
  if (key.size() != schema::kSessionKeyBytes)
    return "its session key has " + std::to_string(key.size()) + " bytes";
  const auto* bytes = reinterpret_cast<const std::byte*>(key.begin());
  grant.key.assign(bytes, bytes + key.size());
  if (lease.getDevices().size() == 0) return "it names no device";

  const auto found = leases_.find(grant.id);
  if (found != leases_.end()) {
    if (found->second.closing) return "it is being revoked";
    if (found->second.epoch != grant.epoch) return "it was granted before with another epoch";
    found->second.key = std::move(grant.key);
    return std::nullopt;
  }
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
    for (const auto& other : grant.devices)
      if (other.index == index) return "it names a device twice";
    if (grant.epoch <= epochs_[index])
      return "its epoch " + std::to_string(grant.epoch) + " is not higher than " +
             std::to_string(epochs_[index]) + ", the last one of device " + std::to_string(at->ordinal);
    const uint64_t amount = wanted.getMemoryBytes() != 0 ? wanted.getMemoryBytes() : at->memoryBytes;
    if (auto missing = lacks(index, amount)) return missing;
    grant.devices.push_back({index, amount});
  }
  for (const auto& device : grant.devices) epochs_[device.index] = grant.epoch;
  leases_.emplace(grant.id, std::move(grant));
  return std::nullopt;
}

std::optional<std::string> LeaseTable::lacks(size_t device, uint64_t amount) const {
  const uint64_t all = devices_[device].memoryBytes;
  const uint64_t taken = std::min(reserved(device), all);
  if (amount <= all - taken) return std::nullopt;
  return "device " + std::to_string(devices_[device].ordinal) + " has " + std::to_string(all - taken) +
         " bytes free, it wants " + std::to_string(amount);
}

void LeaseTable::pause(const Id& id) {
  if (Grant* lease = admissible(id)) lease->paused = true;
}

void LeaseTable::unpause(const Id& id) {
  Grant* lease = admissible(id);
  if (lease == nullptr) return;
  lease->paused = lease->resuming = false;
  lease->suspended.reset();
}

void LeaseTable::setSuspended(const Id& id, Suspended suspended) {
  Grant* lease = admissible(id);
  if (lease == nullptr) return;
  lease->paused = true;
  lease->resuming = false;
  lease->suspended = std::move(suspended);
}

std::optional<std::string> LeaseTable::reserveAgain(const Id& id) {
  Grant* lease = admissible(id);
  if (lease == nullptr || !lease->suspended || lease->resuming) return std::nullopt;
  for (size_t place = 0; place < lease->devices.size(); ++place) {
    // What it keeps is reserved already.
    const auto [device, amount] = lease->devices[place];
    const uint64_t kept = lease->suspended->kept[place];
    if (kept >= amount) continue;
    if (auto missing = lacks(device, amount - kept)) return missing;
  }
  lease->resuming = true;
  return std::nullopt;
}

std::vector<std::pair<Id, std::vector<uint64_t>>> LeaseTable::suspended() const {
  std::vector<std::pair<Id, std::vector<uint64_t>>> list;
  for (const auto& [id, lease] : leases_)
    if (!lease.closing && lease.suspended && !lease.resuming) list.emplace_back(id, lease.suspended->kept);
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

bool LeaseTable::close(const Id& id) {
  const auto found = leases_.find(id);
  if (found == leases_.end()) return false;
  found->second.closing = true;
  return true;
}

void LeaseTable::remove(const Id& id) { leases_.erase(id); }

std::vector<Id> LeaseTable::active() const {
  std::vector<Id> list;
  for (const auto& [id, lease] : leases_)
    if (!lease.closing) list.push_back(id);
  return list;
}

uint64_t LeaseTable::reserved(size_t device) const {
  uint64_t total = 0;
  for (const auto& [id, lease] : leases_)
    for (size_t place = 0; place < lease.devices.size(); ++place)
      if (lease.devices[place].index == device)
        total += lease.suspended && !lease.resuming ? lease.suspended->kept[place]
                                                    : lease.devices[place].memoryBytes;
  return total;
}

uint64_t LeaseTable::promised(size_t device) const {
  uint64_t total = 0;
  for (const auto& [id, lease] : leases_)
    for (const auto& granted : lease.devices)
      if (granted.index == device) total += granted.memoryBytes;
  return total;
}

std::vector<Id> LeaseTable::holders(size_t device) const {
  std::vector<Id> ids;
  for (const auto& [id, lease] : leases_)
    for (const auto& granted : lease.devices)
      if (granted.index == device) ids.push_back(id);
  return ids;
}

}  // namespace gpupool::server
