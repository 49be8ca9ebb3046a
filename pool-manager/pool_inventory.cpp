// The inventory: what is kept of it, and what is made of it for people.
#include <algorithm>

#include "pool-manager/pool.h"

namespace gpupool::pool {
namespace {

// For whoever could be placed there.
std::string cordonText(const std::map<std::string, Cordon>& cordons, const std::string& server) {
  const auto at = cordons.find(server);
  const bool unsaid = at == cordons.end() || at->second.reason.empty();
  return "cordoned by an operator" + (unsaid ? "" : ": " + at->second.reason);
}

// Takes what a placement has off its devices.
void count(const LeaseRecord& record, const Placement& placement, bool whole, bool named,
           const std::string& holder, ServerUse& use) {
  // What moves, is suspended or ends may be gone at any moment; so may what has no limit.
  const bool steady = record.state == LeaseState::granting || record.state == LeaseState::active;
  const uint64_t firstEndMs = steady && record.endsMs != kNever ? record.endsMs : 0;
  for (size_t i = 0; i < placement.devices.size(); ++i) {
    const Claim claim = claimOf(record, placement, i, whole);
    for (DeviceUse& device : use.devices) {
      if (device.info.uuid != claim.device.info.uuid) continue;
      occupy(claim, device);
      device.firstEndMs = std::min(device.firstEndMs, firstEndMs);
      if (named) device.holders.push_back(holder);
    }
  }
}

}  // namespace

// Why a server cannot be asked for anything now; "": it can.
std::string Pool::absence(const ServerRecord& server, uint64_t now) const {
  if (!server.connected) return "not connected; last heard of " + age(now - server.beatMs) + " ago";
  if (!alive(server, now)) return "silent for " + age(now - server.beatMs);
  return server.reported ? "" : "has just come back and has not yet said which leases it holds";
}

std::vector<ServerUse> Pool::inventory(const Principal& who, uint64_t now) const {
  return inventory(who, now, {});
}

std::vector<ServerUse> Pool::inventory(const Principal& who, uint64_t now, const Unlike& unlike) const {
  std::vector<ServerUse> uses;
  uses.reserve(servers_.size());
  for (const auto& [name, server] : servers_) uses.push_back(useOf(server, who, now, unlike));
  return uses;
}

ServerUse Pool::useOf(const ServerRecord& server, const Principal& who, uint64_t now,
                      const Unlike& unlike) const {
  const std::string& name = server.facts.name;
  ServerUse use{name, absence(server, now), {}, isCordoned(name)};
  for (const WorkerVersion& worker : server.facts.workers) use.rows.push_back(worker.rowsHash);
  if (use.rows.empty() && server.facts.rowsHash != 0) use.rows.push_back(server.facts.rowsHash);
  if (!use.unusable.empty()) {
    // Nothing else matters.
  } else if (!server.suspect.empty())
    use.unusable = "did not take its last lease: " + server.suspect;
  else if (use.cordoned)
    use.unusable = cordonText(cordons_, name);
  for (size_t i = 0; i < server.facts.devices.size(); ++i) {
    const Device& device = server.facts.devices[i];
    const uint32_t percent = server.facts.overcommitPercent;
    use.devices.push_back(
        {device, leasableBytes(device.memoryBytes, percent), {}, server.duplicates.at(i), percent});
    if (device.problem.empty()) use.devices.back().info.problem = strangerOn(server, i);
    if (i < server.fabric.nvlinks.size()) use.devices.back().joined = server.fabric.nvlinks[i];
    if (i < server.adapters.size()) use.devices.back().adapter = server.adapters[i];
  }
  for (const Id& id : leases_.on(name)) {
    if (unlike.without != nullptr && id == *unlike.without) continue;
    const LeaseRecord& record = leases_.all().at(id);
    const bool whole = unlike.resumed != nullptr && unlike.resumed->contains(id);
    for (const Placement& placement : record.placements)
      if (placement.server.name == name)
        count(record, placement, whole, unlike.named,
              unlike.named ? describeHolder(record, who, now) : std::string(), use);
  }
  return use;
}

// Those that have not beaten for too long since the last time that this was asked.
void Pool::touchSilent(uint64_t now) {
  if (now < silentAtMs_) return;
  silentAtMs_ = kNever;
  for (auto& [name, server] : servers_) {
    if (!server.connected) continue;
    if (alive(server, now)) {
      silentAtMs_ = std::min(silentAtMs_, server.beatMs + times_.silentMs);
      continue;
    }
    inventory_.touch(name);
    noteGone(server, AuditEvent::serverLost, "it has not been heard of for " + age(times_.silentMs), now);
  }
}

void Pool::refreshInventory(uint64_t now) {
  for (const std::string& server : leases_.takeTouched()) inventory_.touch(server);
  touchSilent(now);
  inventory_.refresh([&](const std::string& name) -> std::optional<ServerUse> {
    const auto at = servers_.find(name);
    if (at == servers_.end()) return std::nullopt;
    if (alive(at->second, now)) silentAtMs_ = std::min(silentAtMs_, at->second.beatMs + times_.silentMs);
    return useOf(at->second, {}, now, {.without = nullptr, .resumed = &resuming_, .named = false});
  });
}

// By every lease, and not by what is known of where they are. Texts may tell of another time.
std::string Pool::inventoryFault(uint64_t now) {
  refreshInventory(now);
  std::map<std::string, std::set<Id>> owners;
  for (const auto& [id, record] : leases_.all()) owners[record.tenant].insert(id);
  for (const auto& [tenant, owned] : owners)
    if (owned != leases_.of(tenant)) return "tenant " + tenant + " has other leases";
  const auto& kept = inventory_.servers();
  if (kept.size() != servers_.size()) return "there are more or fewer servers";
  size_t at = 0;
  for (const auto& [name, server] : servers_) {
    ServerUse use = kept[at++], anew = useOf(server, {}, now, {.named = false});
    std::set<Id> there;
    for (const auto& [id, record] : leases_.all())
      if (record.on(name) != nullptr) there.insert(id);
    if (there != leases_.on(name)) return "server " + name + " has other leases";
    if (use.unusable.empty() != anew.unusable.empty()) return "server " + name + ": " + anew.unusable;
    use.unusable = anew.unusable;
    if (use != anew) return "server " + name + " has something else free";
  }
  return "";
}

}  // namespace gpupool::pool
