#include "server/front/front.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/log.h"
#include "base/process_name.h"
#include "schema/convert.h"
#include "schema/lease_memory.h"
#include "schema/protocol.h"
#include "server/front/beside.h"
#include "server/host_room.h"
#include "server/images/image_cache.h"

namespace gpupool::server {
namespace {

constexpr char kStopping[] = "the GPU server is shutting down";
constexpr kj::Duration kStoppingBound = 1 * kj::SECONDS;  // for the manager to hear so

kj::Duration duration(std::chrono::milliseconds time) { return time.count() * kj::MILLISECONDS; }

std::string readLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The host part of "host:port" or "[v6]:port".
std::string hostOf(const std::string& address) {
  std::string host = address.substr(0, address.rfind(':'));
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return host;
}

// Workers of other users open what they know the name of, and list nothing.
void openToWorkers(const std::string& cache) {
  namespace fs = std::filesystem;
  fs::permissions(cache, fs::perms{0711});
  for (fs::path above = fs::absolute(cache).parent_path(); above.has_relative_path();
       above = above.parent_path())
    if ((fs::status(above).permissions() & fs::perms::others_exec) == fs::perms::none)
      throw std::runtime_error(above.string() +
                               " is closed to the users of --worker-users: chmod o+x, or name another "
                               "--module-cache");
}

}  // namespace

Front::Front(kj::AsyncIoContext& io, ServerOptions options, WorkerParent& parent)
    : io_(io),
      timer_(io.provider->getTimer()),
      options_(std::move(options)),
      parent_(parent),
      program_(options_.worker),
      disturb_(disturbance()),
      walls_(wallsFor(options_)),
      bootId_(readLine("/proc/sys/kernel/random/boot_id")),
      tasks_(*this),
      accepting_(kj::heap<kj::TaskSet>(static_cast<kj::TaskSet::ErrorHandler&>(*this))) {}

Front::~Front() = default;

// "suspend:SEED" has workers ask for their sessions to be suspended and resumed, "move:SEED" to be moved to
// another worker, "stream:SEED" likewise, but as if to another server, "files:SEED" to be held in files and
// restored, at moments that the seed chooses; "kill:SEED" has workers of protected sessions kill themselves,
// and with "server:SEED" this server does so, too, when it sees that.
std::optional<Front::Disturbance> Front::disturbance() {
  const char* text = std::getenv("GPUPOOL_DISTURB");
  if (text == nullptr || *text == '\0') return std::nullopt;
  const std::string_view value(text);
  const size_t colon = std::min(value.find(':'), value.size());
  const std::string_view what = value.substr(0, colon),
                         seed = value.substr(std::min(colon + 1, value.size()));
  if ((what != "suspend" && what != "move" && what != "stream" && what != "files" && what != "kill" &&
       what != "server") ||
      seed.empty() || seed.find_first_not_of("0123456789") != seed.npos)
    throw options::OptionError("GPUPOOL_DISTURB: '" + std::string(value) +
                               "' is none of suspend:NUMBER, move:NUMBER, stream:NUMBER, files:NUMBER, "
                               "kill:NUMBER and server:NUMBER");
  return Disturbance{std::string(what), std::string(seed)};
}

walls::State Front::wallsFor(const ServerOptions& options) {
  auto state = walls::ofThisMachine(options.wallsMode());
  if (options.wallsMode() == walls::Mode::required && !state.missing.empty())
    throw options::OptionError("--walls required: missing is " + state.missing[0]);
  if (!state.standing.empty())  // none: somebody has said so
    for (const std::string& missing : state.missing)
      GPUPOOL_WARNING("no wall around workers: %s", missing.c_str());
  // By what starts them, whatever --walls says.
  if (!options.workerUsers.empty())
    state.standing.emplace_back(walls::kOwnUser);
  else if (!state.standing.empty())
    state.missing.push_back(std::string(walls::kOwnUser) + ": --worker-users is not set");
  return state;
}

kj::Promise<void> Front::start() {
  return kj::evalNow([this] {
           // First: a server that answers there is this one's twin.
           if (!options_.local.empty()) {
             std::filesystem::create_directories(std::filesystem::path(options_.local).parent_path());
             local_ = kj::heap<LocalListener>(*io_.lowLevelProvider, options_.local);
           }
           return inventory(500 * kj::MILLISECONDS, timer_.now());
         })
      .then([this](Inventory found) {
        return lookForWorkers(found.rowsHash).then([found = std::move(found)]() mutable {
          return std::move(found);
        });
      })
      .then([this](Inventory found) {
        run(std::move(found));
        lookedForWorkers();
        return checkpoints_->lookAtNotes();
      })
      .then([this] { return listenNetwork(); })
      .then([this] {
        Membership::Settings settings;
        settings.manager = options_.manager;
        if (!options_.tokenFile.empty() || !options_.tlsCa.empty())
          settings.credentials = credentialsOf(options_.tokenFile, kServersTenant, options_.tlsCa);
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
        facts.problems = [this] {
          lookAtHealth();
          return problems();
        };
        facts.samples = [this] { return health_->latest().samples; };
        facts.hindrances = [this] { return sessions_->hindrances(); };
        facts.protection = [this] { return keeper_->say(); };
        facts.warmWorkers = [this] { return pool_->warm(); };
        facts.fabric = [this] { return fabric_->latest(); };
        facts.workers = [this] { return pool_->versions(); };
        Control::Hooks hooks;
        hooks.granted = [this] { store(); };
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
        hooks.restore = [this](const Id& lease, const std::string& name) {
          return checkpoints_->restore(lease, name);
        };
        hooks.gone = [this](const Id& lease) { checkpoints_->notes().erase(lease); };
        hooks.earlierGone = [this](const Id& lease) { return claims_->gone(lease); };
        membership_ =
            kj::heap<Membership>(io_.provider->getNetwork(), timer_, std::move(settings), std::move(facts),
                                 kj::heap<Control>(*leases_, *sessions_, *suspension_, std::move(hooks)));
      });
}

// A driver that is broken now may be repaired later: a server waits for it, as long as it may.
kj::Promise<Inventory> Front::inventory(kj::Duration pause, kj::TimePoint began) {
  return takeInventory(io_.unixEventPort, timer_, program_, options_.driver)
      .then([this](Inventory found) {
        claim(found);
        return found;
      })
      .catch_([this, pause, began](kj::Exception&& exception) -> kj::Promise<Inventory> {
        if (options_.driverWait.count() != 0 && timer_.now() - began >= duration(options_.driverWait))
          return kj::mv(exception);
        GPUPOOL_ERROR("%s (next attempt in %lld ms)", exception.getDescription().cStr(),
                      static_cast<long long>(pause / kj::MILLISECONDS));
        return timer_.afterDelay(pause).then([this, pause, began] {
          return inventory(std::min(pause * 2, kj::Duration(30 * kj::SECONDS)), began);
        });
      });
}

void Front::claim(Inventory& found) {
  std::error_code error;
  std::filesystem::create_directories(options_.state, error);
  const std::string identity = options_.identity();
  state_ = std::make_unique<StateFile>(identity + ".state", bootId_);
  ServerState stored = state_->read();
  DeviceClaims::Settings settings;
  settings.lockFolder = options_.deviceLocks;
  settings.me = {options_.name, identity, getpid(), processStartTicks(getpid())};
  settings.wanted = options_.deviceList();
  settings.stop = duration(options_.stopTime);
  settings.parent = &parent_;
  claims_ = kj::heap<DeviceClaims>(io_.unixEventPort, timer_, std::move(settings), found.devices,
                                   std::move(stored.workers));
  claims_->onChange([this] { devicesChanged(); });
  found.devices = claims_->devices();
  storedEpochs_ = std::move(stored.epochs);
  storedHolds_ = std::move(stored.holds);
}

void Front::devicesChanged() {
  if (leases_.get() == nullptr) return;
  for (size_t device = 0; device < leases_->devices().size(); ++device)
    leases_->setBusy(device, claims_->busy(device));
  store();
}

void Front::store() {
  ServerState state;
  state.epochs = storedEpochs_;
  for (size_t device = 0; device < leases_->devices().size(); ++device)
    state.epochs[leases_->devices()[device].uuid] = leases_->epoch(device);
  state.workers = sessions_->workers();
  for (StoredWorker& worker : claims_->earlier()) state.workers.push_back(std::move(worker));
  state.holds = checkpoints_.get() == nullptr ? storedHolds_ : checkpoints_->notes().all();
  state_->write(state);
}

kj::Promise<void> Front::lookForWorkers(uint64_t currentRows) {
  if (options_.workers.empty()) return kj::READY_NOW;
  return beside<std::vector<OtherWorker>>(
             [folder = options_.workers, currentRows] { return findWorkers(folder, currentRows); })
      .then([this](std::vector<OtherWorker> found) { otherWorkers_ = std::move(found); });
}

void Front::lookAgain() {
  if (options_.workers.empty()) return GPUPOOL_WARNING("there is no folder --workers to look at again");
  lookAgain_ = true;
  if (!looking_) lookedForWorkers();
}

// One look at a time: files may have come behind the one that is under way.
void Front::lookedForWorkers() {
  looking_ = false;
  if (!std::exchange(lookAgain_, false)) return;
  looking_ = true;
  GPUPOOL_INFO("looking for worker programs in %s again", options_.workers.c_str());
  tasks_.add(lookForWorkers(inventory_.rowsHash)
                 .then([this] {
                   if (!pool_->replaceOthers(std::exchange(otherWorkers_, {}))) return;
                   std::string all;
                   for (const WorkerVersion& version : pool_->versions())
                     all += (all.empty() ? "" : ", ") + version.release;
                   GPUPOOL_INFO("clients of gpupool %s are served now", all.c_str());
                 })
                 .catch_([this](kj::Exception&& exception) { taskFailed(kj::mv(exception)); })
                 .then([this] { lookedForWorkers(); }));
}

void Front::run(Inventory found) {
  inventory_ = std::move(found);
  for (const auto& device : inventory_.devices)
    GPUPOOL_INFO("device %u: %s, %.1f GiB, by %s", device.ordinal, device.name.c_str(),
                 static_cast<double>(device.memoryBytes) / (1u << 30), inventory_.driver.c_str());
  watchFabric();
  watchHealth();
  leases_ = kj::heap<LeaseTable>(inventory_.devices, storedEpochs_, options_.overcommitPercent);
  sessions_ = kj::heap<SessionTable>(
      timer_, SessionTable::Bounds{.stop = duration(options_.stopTime)},
      [this](uint32_t ordinal, const std::string& error) { deviceLost(ordinal, error); });
  sessions_->onChange([this] { store(); });
  sessions_->onHostMemory([](uint64_t bytes) { return hostHasRoom(bytes); });
  devicesChanged();

  startSuspension();
  startTurns();
  hasCache_ = openCache();
  startWorkers();

  startAdmission();
  startMigration();
  startCheckpoints();
  startKeeper();
  if (local_.get() != nullptr) accepting_->add(accept(local_->receiver(), false));
}

void Front::startSuspension() {
  CopierChild::Settings copier;
  copier.program = program_;
  copier.driver = inventory_.driver;
  copier.budgetBytes = options_.suspendBytes;
  copier.folder = options_.suspendFolder;
  copier.aheadBytes = options_.suspendMemoryAhead.value;
  copier.verify = disturb_.has_value();
  copier_ = kj::heap<CopierChild>(io_.unixEventPort, timer_, std::move(copier));
  if (options_.suspendMemoryAhead.value != 0) copier_->startAhead();

  Suspension::Settings settings;
  settings.copier = [this] { return copier_->connect(); };
  if (options_.suspendBytes == 0)
    settings.refusal = "server " + options_.name +
                       " suspends no lease: its option --suspend-memory (suspend_memory in server.yaml) is 0";
  settings.disturb = disturb_.has_value() && disturb_->kind == "suspend";
  suspension_ = kj::heap<Suspension>(timer_, *leases_, *sessions_, std::move(settings));
}

void Front::startAdmission() {
  idle_ = kj::heap<IdleWatch>(timer_, *leases_, *sessions_);
  Admission::Settings admission;
  admission.server = options_.name;
  admission.starts.networkDevice = options_.networkDevice;
  admission.starts.networkWire = options_.networkWire;
  if (hasCache_) admission.starts.moduleCache = options_.moduleCache;
  if (const auto users = options_.userRange()) admission.starts.workersGroup = users->group();
  admission.starts.moduleCacheBytes = options_.moduleCacheSize.value;
  admission.messageBound = duration(options_.handshakeTime);
  admission.told = [this](const Id& lease) {
    if (turns_.get() != nullptr) turns_->asked(lease);
    idle_->asked(lease);
  };
  admission.failingOver = [this](const SessionFacts& client) { return keeper_->failingOver(client); };
  admission.keeps = [this](kj::Own<kj::AsyncIoStream> stream, const Id& lease) {
    keeper_->desk().keep(kj::mv(stream), lease);
  };
  admission.brings = [this](kj::Own<kj::AsyncIoStream> stream, const BroughtSession& brought) {
    keeper_->bring(kj::mv(stream), brought);
  };
  FigureDesk::Settings figures;
  figures.server = options_.name;
  figures_ = kj::heap<FigureDesk>(timer_, *leases_, *sessions_, *health_, std::move(figures));
  admission.asked = [this](kj::Own<kj::AsyncIoStream> stream, const Id& lease) {
    figures_->serve(kj::mv(stream), lease);
  };
  admission.starts.reportActivity = turns_.get() != nullptr;
  admission.starts.deviceLock = [this](size_t device) { return claims_->lock(device); };
  admission_ = kj::heap<Admission>(timer_, *leases_, *sessions_, *pool_, std::move(admission));
}

void Front::startMigration() {
  Migration::Settings settings;
  settings.server = options_.name;
  settings.copier = [this] { return copier_->connect(); };
  if (options_.suspendBytes == 0)
    settings.refusal = "server " + options_.name +
                       " moves no session: its option --suspend-memory (suspend_memory in server.yaml) is 0";
  settings.disturbStream = disturb_.has_value() && disturb_->kind == "stream";
  settings.disturb = settings.disturbStream || (disturb_.has_value() && disturb_->kind == "move");
  migration_ = kj::heap<Migration>(io_.provider->getNetwork(), timer_, *leases_, *sessions_, *suspension_,
                                   *pool_, admission_->starts(), std::move(settings));
}

void Front::startCheckpoints() {
  Checkpoints::Settings settings;
  settings.server = options_.name;
  settings.folder = options_.checkpointFolder;
  settings.holds = storedHolds_;
  settings.disturb = disturb_.has_value() && disturb_->kind == "files";
  checkpoints_ = kj::heap<Checkpoints>(timer_, *leases_, *sessions_, *suspension_, *pool_,
                                       admission_->starts(), std::move(settings));
  checkpoints_->notes().onChange([this] { store(); });
}

void Front::startKeeper() {
  Keeper::Settings settings;
  settings.mostBytes = options_.protectMemory.value;
  settings.diesToo = disturb_.has_value() && disturb_->kind == "server";
  settings.disturb = settings.diesToo || (disturb_.has_value() && disturb_->kind == "kill");
  if (settings.disturb) settings.drainMs = 2000;  // a busy machine's test is to have its checkpoints
  keeper_ =
      kj::heap<Keeper>(timer_, *leases_, *sessions_, *suspension_, *pool_, admission_->starts(), settings);
}

void Front::startTurns() {
  if (options_.overcommitPercent <= 100) return;
  uint64_t memory = 0;
  for (const Device& device : inventory_.devices) memory += device.memoryBytes;
  const uint64_t leasable = schema::leasableBytes(memory, options_.overcommitPercent);
  const std::string amounts = "--overcommit " + options_.overcommit + " leases " +
                              options::formatSize(leasable) + " on GPUs with " + options::formatSize(memory) +
                              ", and --suspend-memory is " + options::formatSize(options_.suspendBytes);
  const std::string remedy = ": raise --suspend-memory, or name a --suspend-folder";
  if (options_.suspendFolder.empty() && options_.suspendBytes < leasable - memory)
    kj::throwFatalException(kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__,
                                          kj::str(amounts, ", which does not hold the rest", remedy)));
  // While two leases change places, the memory of both is there.
  if (options_.suspendFolder.empty() && options_.suspendBytes < leasable)
    GPUPOOL_WARNING("%s: leases that use all of their memory may wait in vain for their turn%s",
                    amounts.c_str(), remedy.c_str());
  TurnTaker::Settings settings;
  settings.turns.turn = options_.turnTime;
  settings.opening = [this](const Id& lease) {
    return admission_.get() != nullptr && admission_->opening(lease);
  };
  turns_ = kj::heap<TurnTaker>(timer_, *leases_, *sessions_, *suspension_, std::move(settings));
}

void Front::startWorkers() {
  WorkerPool::Settings workers;
  workers.program = program_;
  workers.parent = &parent_;
  // The very library the inventory found: a search could end elsewhere once a device is gone.
  workers.arguments = {
      "--driver", inventory_.driver, "--client-stall-time", std::to_string(options_.clientStallTime.count()),
      "--walls",  options_.walls};
  if (hasCache_) workers.arguments.insert(workers.arguments.end(), {"--module-cache", options_.moduleCache});
  if (!options_.workerUsers.empty())
    workers.arguments.insert(workers.arguments.end(), {"--users", options_.workerUsers});
  if (disturb_)
    workers.arguments.insert(workers.arguments.end(), {disturb_->kind == "suspend"  ? "--disturb"
                                                       : disturb_->kind == "stream" ? "--disturb-streams"
                                                       : disturb_->kind == "kill"   ? "--disturb-kills"
                                                       : disturb_->kind == "server" ? "--disturb-kills"
                                                                                    : "--disturb-moves",
                                                       disturb_->seed});
  workers.warm = options_.warm;
  if (options_.warmContexts)
    for (const auto& device : inventory_.devices)
      workers.contexts.push_back(static_cast<int>(device.ordinal));
  workers.mayHold = [this](int ordinal) { return hasRoomForContext(ordinal); };
  workers.rowsHash = inventory_.rowsHash;
  workers.walls = walls_.standing;
  pool_ = kj::heap<WorkerPools>(io_.unixEventPort, timer_, std::move(workers), schema::release(),
                                std::exchange(otherWorkers_, {}));
}

void Front::watchFabric() {
  fabric::Watch::Settings settings;
  // The software GPU answers with an address of its own invention.
  for (const auto& device : inventory_.devices)
    settings.gpus.push_back(device.software ? "" : device.pciBusId);
  fabric_ = fabric::watchFabric(options_.fabric, std::move(settings));
}

void Front::watchHealth() {
  std::vector<std::string> uuids;
  bool software = true;
  for (const auto& device : inventory_.devices) {
    uuids.push_back(uuidText(device.uuid));
    software = software && device.software;
  }
  if (software && options_.nvml.empty())
    health_ = std::make_unique<health::Watch>("software GPUs have none");
  else
    health_ = health::watchGpus(options_.nvml, inventory_.driver, uuids);
}

void Front::lookAtHealth() {
  const std::vector<std::string> broken = health_->latest().broken;
  for (size_t device = 0; device < broken.size(); ++device)
    if (!broken[device].empty()) deviceLost(inventory_.devices[device].ordinal, broken[device]);
}

bool Front::openCache() {
  if (options_.moduleCache.empty()) return false;
  try {
    std::filesystem::create_directories(options_.moduleCache);
    if (!options_.workerUsers.empty()) openToWorkers(options_.moduleCache);
  } catch (const std::exception& error) {
    GPUPOOL_WARNING("no module cache: %s", error.what());
    return false;
  }
  tasks_.add(trimCache());
  return true;
}

// A worker keeps its tenant's folder within the bound; that all of them together stay within it is seen to
// here.
kj::Promise<void> Front::trimCache() {
  trimImages(openFolder(options_.moduleCache), options_.moduleCacheSize.value, 1);
  return timer_.afterDelay(1 * kj::MINUTES).then([this] { return trimCache(); });
}

bool Front::hasRoomForContext(int ordinal) const {
  constexpr uint64_t kContext = uint64_t{1} << 30;  // 527 MiB on an H200, and what it grows to
  const auto& devices = leases_->devices();
  for (size_t index = 0; index < devices.size(); ++index) {
    if (static_cast<int>(devices[index].ordinal) != ordinal) continue;
    if (!leases_->problem(index).empty()) return false;
    // A lease that is suspended wants all of it again when it is resumed.
    if (leases_->promised(index) + kContext <= devices[index].memoryBytes) return true;
    const auto holders = leases_->holders(index);
    return std::all_of(holders.begin(), holders.end(),
                       [this](const Id& lease) { return sessions_->living(lease) == 0; });
  }
  return false;
}

kj::Promise<void> Front::listenNetwork() {
  if (options_.listen.empty()) return kj::READY_NOW;
  return io_.provider->getNetwork()
      .parseAddress(options_.listen)
      .then([this](kj::Own<kj::NetworkAddress> address) {
        network_ = address->listen();
        port_ = static_cast<uint16_t>(network_->getPort());
        host_ = options_.advertise.empty() ? hostOf(options_.listen) : options_.advertise;
        if (options_.advertise.empty() &&
            (host_ == "*" || host_ == "0.0.0.0" || host_ == "::" || host_.empty())) {
          char name[256] = "";
          gethostname(name, sizeof name - 1);
          host_ = name;
        }
        GPUPOOL_INFO("sessions from the network: %s port %u", host_.c_str(), port_);
        accepting_->add(accept(*network_, true));
      });
}

kj::Promise<void> Front::accept(kj::ConnectionReceiver& receiver, bool network) {
  return receiver.accept()
      .then(
          [this, network](kj::Own<kj::AsyncIoStream> stream) -> kj::Promise<void> {
            if (network) tuneNetworkSocket(*stream);
            auto peer = peerName(*stream);
            admission_->admit(kj::mv(stream), std::move(peer));
            return kj::READY_NOW;
          },
          [this](kj::Exception&& exception) {
            // Out of descriptors, most likely: pause instead of spinning.
            GPUPOOL_ERROR("accept: %s", exception.getDescription().cStr());
            return timer_.afterDelay(100 * kj::MILLISECONDS);
          })
      .then([this, &receiver, network] { return accept(receiver, network); });
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
  schema::write(walls_.standing, info.initWalls(static_cast<unsigned>(walls_.standing.size())));
  schema::write(walls_.missing, info.initMissingWalls(static_cast<unsigned>(walls_.missing.size())));
  schema::write(claims_->leftOut(), info.initLeftOut(static_cast<unsigned>(claims_->leftOut().size())));

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

kj::Promise<void> Front::stop() {
  if (pool_.get() == nullptr) return kj::READY_NOW;  // the inventory never came
  accepting_ = nullptr;
  admission_->stop();
  migration_->stop();
  checkpoints_->stop();
  keeper_->stop();
  if (turns_.get() != nullptr) turns_->stop();
  local_ = nullptr;
  network_ = nullptr;
  return sayStopping()
      .then([this](bool said) {
        return sessions_->endAll(
            kStopping, [this, said](const SessionFacts& facts) { return said && keeper_->leaves(facts); });
      })
      .then([this] { return pool_->stop(); })
      .then([this] { return copier_->stop(); })
      .then([this]() -> kj::Promise<void> {
        claims_->release();
        if (membership_.get() == nullptr) return kj::READY_NOW;
        return membership_->leave();
      });
}

void Front::taskFailed(kj::Exception&& exception) { GPUPOOL_ERROR("%s", exception.getDescription().cStr()); }

}  // namespace gpupool::server
