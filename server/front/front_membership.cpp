// What the pool's manager hears of this server, and what it may order.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "base/log.h"
#include "base/tokens.h"
#include "schema/convert.h"
#include "server/front/front.h"

namespace gpupool::server {
namespace {

constexpr kj::Duration kStoppingBound = 1 * kj::SECONDS;  // for the manager to hear so

}  // namespace

void Front::join() {
  Membership::Settings settings;
  settings.manager = options_.manager;
  if (!options_.tokenFile.empty() || !options_.tlsCa.empty())
    settings.credentials = credentialsOf(options_.tokenFile, kServersTenant, options_.tlsCa);
  auto control = kj::heap<Control>(*leases_, *sessions_, *suspension_, hooks());
  control->goOnEnding();
  membership_ =
      kj::heap<Membership>(io_.provider->getNetwork(), timer_, std::move(settings), facts(), kj::mv(control));
}

Membership::Facts Front::facts() {
  Membership::Facts facts;
  facts.name = options_.name;
  facts.incarnation = incarnation_;
  facts.describe = [this](schema::Manager::JoinParams::Builder join) { describe(join); };
  facts.activeLeases = [this] { return leases_->active(); };
  facts.suspended = [this] {
    auto suspended = leases_->suspended();
    for (const Id& lease : checkpoints_->notes().found())
      suspended.emplace_back(lease, std::vector<uint64_t>());
    return suspended;
  };
  facts.held = [this](const Id& lease) {
    const HeldFiles* held = leases_->held(lease);
    return held != nullptr ? held : checkpoints_->notes().found(lease);
  };
  if (turns_.get() != nullptr)
    facts.turns = [this](schema::Manager::BeatParams::Builder beat) {
      turns_->report([&](unsigned count) { return beat.initTurns(count); });
    };
  facts.uses = [this](schema::Manager::BeatParams::Builder beat) {
    idle_->report([&](unsigned count) { return beat.initUses(count); });
  };
  facts.counts = [this](schema::Manager::BeatParams::Builder beat) {
    tally_->report(keeper_->ages(), [&](unsigned count) { return beat.initCounts(count); });
  };
  facts.kept = [this](schema::Manager::BeatParams::Builder beat) { standby_->report(beat); };
  facts.problems = [this] {
    lookAtHealth();
    return problems();
  };
  facts.samples = [this] { return health_->latest().samples; };
  facts.hindrances = [this] {
    return sessions_->hindrances([this](const Id& lease) {
      const Grant* grant = leases_->admissible(lease);
      return grant != nullptr && grant->protectMs != 0;
    });
  };
  facts.protection = [this] { return keeper_->say(); };
  facts.lent = [this] {
    std::map<Id, std::string> lent;
    for (const Id& lease : sessions_->lenders())
      if (leases_->contains(lease) && leases_->admissible(lease) == nullptr)
        lent[lease] = sessions_->borrowers(lease);
    return lent;
  };
  facts.warmWorkers = [this] { return pool_->warm(); };
  facts.fabric = [this] { return fabric(); };
  facts.workers = [this] { return pool_->versions(); };
  return facts;
}

// What two watches say; the same object while neither says something else.
std::shared_ptr<const fabric::Fabric> Front::fabric() {
  const auto adapters = fabric_->latest();
  auto nvlinks = health_->nvlinks();
  if (nvlinks.size() != inventory_.devices.size()) nvlinks.clear();
  if (toldFabric_ == nullptr || adapters != toldAdapters_ || nvlinks != toldFabric_->nvlinks) {
    auto now = std::make_shared<fabric::Fabric>(*adapters);
    now->nvlinks = std::move(nvlinks);
    toldFabric_ = std::move(now);
    toldAdapters_ = adapters;
  }
  return toldFabric_;
}

Control::Hooks Front::hooks() {
  Control::Hooks hooks;
  hooks.granted = [this](const Id& lease) {
    store();
    const Grant* grant = leases_->admissible(lease);
    if (grant != nullptr) pool_->expect(leases_->ordinals(grant->target ? *grant->target : *grant));
  };
  if (turns_.get() != nullptr) hooks.resumed = [this](const Id& lease) { turns_->asked(lease); };
  hooks.migrate = [this](const Id& lease, uint32_t drainMs, std::optional<MoveTarget> target) {
    return migration_->migrate(lease, drainMs, std::move(target));
  };
  hooks.settle = [this](const Id& lease, bool moved) { return migration_->settle(lease, moved); };
  hooks.checkpoint = [this](const Id& lease, uint32_t drainMs, const std::string& name) {
    return checkpoints_->checkpoint(lease, drainMs, name);
  };
  hooks.hold = [this](const Id& lease, uint32_t drainMs, const std::string& name) {
    return checkpoints_->hold(lease, drainMs, name);
  };
  hooks.restore = [this](const Id& lease, const std::string& name, bool running) {
    return checkpoints_->restore(lease, name, running);
  };
  hooks.keep = [this](schema::Lease::Reader lease) { return standby_->keep(lease); };
  hooks.dropKept = [this](const Id& lease) { standby_->drop(lease); };
  hooks.gone = [this](const Id& lease) { checkpoints_->notes().erase(lease); };
  hooks.earlierGone = [this](const Id& lease) { return claims_->gone(lease); };
  return hooks;
}

void Front::describe(schema::Manager::JoinParams::Builder join) {
  auto info = join.initInfo();
  info.setName(options_.name);
  schema::write(incarnation_, info.initIncarnation());
  info.setLocalPath(options_.local.empty() ? "" : std::filesystem::absolute(options_.local).string());
  info.setHost(host_);
  info.setPort(port_);
  info.setBootId(bootId_);
  const auto found = problems();
  auto list = info.initDevices(static_cast<unsigned>(found.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    Device device = inventory_.devices[i];
    device.problem = found[i];
    schema::write(device, list[i]);
  }
  info.setRowsHash(inventory_.rowsHash);
  info.setPid(static_cast<uint32_t>(getpid()));
  info.setOvercommitPercent(options_.overcommitPercent);
  info.setKeepBytes(options_.protectMemory.value);
  schema::write(walls_.standing, info.initWalls(static_cast<unsigned>(walls_.standing.size())));
  schema::write(walls_.missing, info.initMissingWalls(static_cast<unsigned>(walls_.missing.size())));
  schema::write(claims_->leftOut(), info.initLeftOut(static_cast<unsigned>(claims_->leftOut().size())));

  const auto readopted = leases_->readopted();
  auto adopted = join.initReadopted(static_cast<unsigned>(readopted.size()));
  for (unsigned i = 0; i < adopted.size(); ++i) {
    schema::write(readopted[i].first, adopted[i].initId());
    adopted[i].setDeviceEpoch(readopted[i].second);
  }
  auto living = sessions_->workers();
  for (StoredWorker& worker : claims_->earlier()) living.push_back(std::move(worker));
  auto reports = join.initReports(list.size());
  for (unsigned i = 0; i < list.size(); ++i) {
    reports[i].setHighestEpoch(leases_->epoch(i));
    std::set<Id> running;
    for (const StoredWorker& worker : living)
      for (const std::string& uuid : worker.devices)
        if (uuid == inventory_.devices[i].uuid) running.insert(worker.lease);
    auto ids = reports[i].initRunning(static_cast<unsigned>(running.size()));
    unsigned at = 0;
    for (const Id& id : running) schema::write(id, ids[at++]);
  }
}

void Front::deviceLost(uint32_t ordinal, const std::string& error) {
  const std::string problem = error + "; repair or reset it, and restart gpupool-server";
  if (leases_->setBroken(ordinal, problem))
    GPUPOOL_ERROR("device %u is lost: %s; until then nothing is placed on it (see nvidia-smi and dmesg)",
                  ordinal, problem.c_str());
  leaveDevice(ordinal, error);
}

// What is protected goes on elsewhere, also what has not met the loss yet. The leases are closed first: the
// manager, which is told at once, places them anew, and not on this device; their holders find them gone from
// here.
void Front::leaveDevice(uint32_t ordinal, const std::string& error) {
  if (membership_.get() == nullptr || keeper_.get() == nullptr) return;
  std::vector<Id> leaving;
  for (const auto& [id, grant] : leases_->all())
    if (!grant.closing && !grant.suspended &&
        std::ranges::count(leases_->ordinals(grant), static_cast<int>(ordinal)) != 0 &&
        keeper_->anyLeaves(id))
      leaving.push_back(id);
  if (leaving.empty()) return;
  for (const Id& id : leaving) leases_->close(id);
  const std::string reason = "GPU " + std::to_string(ordinal) + " is lost: " + error;
  accepting_->add(
      membership_->beatNow(kStoppingBound).then([this, leaving = std::move(leaving), reason](bool heard) {
        if (!heard)
          GPUPOOL_WARNING("no pool manager has heard that a device is lost: what was on it waits for one");
        for (const Id& id : leaving) sessions_->leave(id, reason);
      }));
}

void Front::lookAtHealth() {
  const std::vector<std::string> broken = health_->latest().broken;
  for (size_t device = 0; device < broken.size(); ++device)
    if (!broken[device].empty()) deviceLost(inventory_.devices[device].ordinal, broken[device]);
}

std::vector<std::string> Front::problems() const {
  std::vector<std::string> list;
  for (size_t device = 0; device < leases_->devices().size(); ++device) {
    list.push_back(leases_->problem(device));
    if (list.back().empty() && !pool_->healthy()) list.back() = pool_->lastFailure();
    if (stopping_) list.back() = kStopping;
  }
  return list;
}

// The manager must not place what leaves this server here again. Without one, nothing has anywhere to go: a
// pool that is taken down as a whole ends its manager first.
kj::Promise<bool> Front::sayStopping() {
  stopping_ = true;
  if (membership_.get() == nullptr || !keeper_->anyLeaves()) return false;
  return membership_->beatNow(kStoppingBound).then([](bool heard) {
    if (!heard) GPUPOOL_WARNING("no pool manager has heard of the shutdown: protected programs end, too");
    return heard;
  });
}

}  // namespace gpupool::server
