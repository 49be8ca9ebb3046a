#include "server/front/front.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "base/log.h"
#include "base/process_name.h"
#include "schema/fault.h"
#include "schema/lease_memory.h"
#include "schema/protocol.h"
#include "server/front/beside.h"
#include "server/host_room.h"

namespace gpupool::server {
namespace {

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

}  // namespace

Front::Front(kj::AsyncIoContext& io, ServerOptions options, WorkerParent& parent,
             std::optional<walls::State> walls)
    : io_(io),
      timer_(io.provider->getTimer()),
      options_(std::move(options)),
      parent_(parent),
      program_(options_.worker),
      disturb_(disturbOfEnvironment()),
      walls_(walls ? std::move(*walls) : wallsFor(options_)),
      bootId_(readLine("/proc/sys/kernel/random/boot_id")),
      accepting_(kj::heap<kj::TaskSet>(static_cast<kj::TaskSet::ErrorHandler&>(*this))),
      tasks_(*this) {}

Front::~Front() = default;

walls::State Front::wallsFor(const ServerOptions& options) {
  const auto users = options.userRange();
  auto state = walls::ofThisMachine(options.wallsMode(), users ? users->last : 0);
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
      .then([this] { return readopt(); })
      .then([this] {
        if (local_.get() != nullptr) accepting_->add(accept(local_->receiver(), false));
        return listenNetwork();
      })
      .then([this] { join(); });
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
  sharing_ = stored.sharing ? std::move(*stored.sharing) : newSharing();
  ++sharing_.life;
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
  storedLeases_ = std::move(stored.leases);
  storedCopier_ = stored.copier;
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
  if (!readopted_)
    state.leases = storedLeases_;
  else if (!stopping_ && options_.restartTime.count() != 0)
    state.leases = leases_->readoptable(sessions_->lenders());
  state.copier = readopted_ ? copier_->stored() : storedCopier_;
  state.sharing = sharing_;
  state.sharing->sessions = sessions_->allNumbers();
  if (!readopted_)
    state.sharing->sessions.insert(state.sharing->sessions.end(), sharing_.sessions.begin(),
                                   sharing_.sessions.end());
  for (const StoredWorker& worker : claims_->earlier()) state.sharing->sessions.push_back(worker.number);
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
  sessions_->share(sharing_);
  sessions_->onChange([this] { store(); });
  leases_->onChange([this] { store(); });
  sessions_->onLimits([this](const Id& lease, uint64_t epoch) { return leases_->limits(lease, epoch); });
  sessions_->onHostMemory([](uint64_t bytes) { return hostHasRoom(bytes); });
  sessions_->onSharing(
      [this](const Id& owner, const Id& lease) { return leases_->ofOneTenant(owner, lease); });
  devicesChanged();

  startSuspension();
  startTurns();
  cache_ = kj::heap<ModuleCache>(timer_, options_.moduleCache, options_.moduleCacheSize.value,
                                 !options_.workerUsers.empty());
  startWorkers();

  startAdmission();
  startMigration();
  startCheckpoints();
  startKeeper();
}

kj::Promise<void> Front::readopt() {
  auto copier = storedCopier_ ? copier_->readopt(*storedCopier_) : kj::Promise<void>(kj::READY_NOW);
  auto sessions = copier.then([this] {
    Readoption::Settings settings;
    settings.parent = &parent_;
    if (const auto readopted = copier_->stored()) settings.copier = readopted->pid;
    readoption_ = kj::heap<Readoption>(io_.unixEventPort, timer_, *leases_, *sessions_, *claims_,
                                       Doors(options_.doors()), settings);
    const auto found = checkpoints_->notes().found();
    return readoption_->run(options_.restartTime.count() != 0 ? storedLeases_ : std::vector<StoredGrant>{},
                            {found.begin(), found.end()}, sharing_.sessions);
  });
  return sessions.then([this] {
    readopted_ = true;
    devicesChanged();
    for (const auto& [id, epoch] : leases_->readopted()) tasks_.add(suspension_->settle(id));
    if (turns_.get() != nullptr && !stopping_) turns_->begin();
    if (options_.suspendMemoryAhead.value != 0) copier_->startAhead();
  });
}

void Front::startSuspension() {
  CopierChild::Settings copier;
  copier.program = program_;
  copier.driver = inventory_.driver;
  copier.budgetBytes = options_.suspendBytes;
  copier.folder = options_.suspendFolder;
  copier.aheadBytes = options_.suspendMemoryAhead.value;
  copier.verify = disturb_.any();
  copier.away = options_.restartTime;
  copier.doors = options_.doors();
  copier_ = kj::heap<CopierChild>(io_.unixEventPort, timer_, std::move(copier));
  copier_->onChange([this] { store(); });

  Suspension::Settings settings;
  settings.copier = [this] { return copier_->connect(); };
  if (options_.suspendBytes == 0)
    settings.refusal = "server " + options_.name +
                       " suspends no lease: its option --suspend-memory (suspend_memory in server.yaml) is 0";
  settings.disturb = disturb_.kind == Disturb::Kind::suspend;
  suspension_ = kj::heap<Suspension>(timer_, *leases_, *sessions_, std::move(settings));
}

void Front::startAdmission() {
  idle_ = kj::heap<IdleWatch>(timer_, *leases_, *sessions_);
  tally_ = kj::heap<LeaseTally>(*leases_);
  sessions_->onCounts([this](const Id& lease, const SessionCounts& more) { tally_->add(lease, more); });
  Admission::Settings admission;
  admission.server = options_.name;
  admission.starts.networkDevice = options_.networkDevice;
  admission.starts.networkWire = options_.networkWire;
  admission.starts.moduleCache = cache_->folder();
  if (const auto users = options_.userRange()) admission.starts.workersGroup = users->group();
  admission.starts.moduleCacheBytes = options_.moduleCacheSize.value;
  admission.starts.away = options_.restartTime;
  admission.starts.doors = options_.doors();
  admission.messageBound = duration(options_.handshakeTime);
  admission.told = [this](const Id& lease) {
    if (turns_.get() != nullptr) turns_->asked(lease);
    idle_->asked(lease);
  };
  admission.failingOver = [this](const SessionFacts& client) { return keeper_->failingOver(client); };
  admission.keeps = [this](kj::Own<kj::AsyncIoStream> stream, const Id& lease, AwayKeeper who) {
    keeper_->desk().keep(kj::mv(stream), lease, std::move(who));
  };
  admission.keptKey = [this](const Id& lease) { return standby_->key(lease); };
  admission.handed = [this](kj::Own<kj::AsyncIoStream> stream, const HandWish& wish) {
    standby_->ask(kj::mv(stream), wish);
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
  settings.disturbStream = disturb_.kind == Disturb::Kind::stream;
  settings.disturb = settings.disturbStream || disturb_.kind == Disturb::Kind::move;
  if (turns_.get() != nullptr) settings.wake = [this](const Id& lease) { turns_->asked(lease); };
  migration_ = kj::heap<Migration>(io_.provider->getNetwork(), timer_, *leases_, *sessions_, *suspension_,
                                   *pool_, admission_->starts(), std::move(settings));
}

void Front::startCheckpoints() {
  Checkpoints::Settings settings;
  settings.server = options_.name;
  settings.folder = options_.checkpointFolder;
  settings.holds = storedHolds_;
  settings.network = !options_.listen.empty();
  settings.disturb = disturb_.kind == Disturb::Kind::files;
  checkpoints_ = kj::heap<Checkpoints>(timer_, *leases_, *sessions_, *suspension_, *pool_,
                                       admission_->starts(), std::move(settings));
  checkpoints_->notes().onChange([this] { store(); });
}

void Front::startKeeper() {
  Keeper::Settings settings;
  settings.mostBytes = options_.protectMemory.value;
  settings.diesToo = disturb_.kind == Disturb::Kind::server;
  settings.disturb = settings.diesToo || disturb_.kind == Disturb::Kind::kill;
  if (disturb_.kind == Disturb::Kind::begin) settings.mostBytes = 0;
  if (settings.disturb) settings.drainMs = 2000;  // a busy machine's test is to have its checkpoints
  settings.shipped = [this](const Id& lease, const Id& session) { standby_->superseded(lease, session); };
  settings.tight = [this](const Id& lease, const Id& session) { standby_->superseded(lease, session); };
  keeper_ =
      kj::heap<Keeper>(timer_, *leases_, *sessions_, *suspension_, *pool_, admission_->starts(), settings);
  Standby::Settings standby;
  standby.server = options_.name;
  standby.incarnation = incarnation_;
  standby.inPool = [this] { return membership_.get() == nullptr || membership_->joined(); };
  standby.bring = [this](kj::Own<kj::AsyncIoStream> stream, const BroughtSession& brought) {
    keeper_->bring(kj::mv(stream), brought);
  };
  standby_ = kj::heap<Standby>(*io_.provider, *leases_, keeper_->budget(), std::move(standby));
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
  settings.waits = true;  // for what is readopted
  settings.turns.turn = options_.turnTime;
  settings.opening = [this](const Id& lease) {
    return admission_.get() != nullptr && admission_->opening(lease);
  };
  turns_ = kj::heap<TurnTaker>(timer_, *leases_, *sessions_, *suspension_, std::move(settings));
}

// What of /dev the workers have: known only with the devices.
void Front::chooseDevices(WorkerPool::Settings& workers) {
  const auto stands = std::find(walls_.standing.begin(), walls_.standing.end(), walls::kOwnDevices);
  if (stands == walls_.standing.end()) return;
  // A session names its wire when it comes; UCX_TLS overrides what this server says.
  workers.rdma =
      !options_.listen.empty() && (options_.networkWire != "tcp" || std::getenv("UCX_TLS") != nullptr);
  for (const Device& device : inventory_.devices) {
    if (device.software) continue;
    if (walls::nodeOf(device.pciBusId).empty()) {
      const std::string why = std::string(walls::kOwnDevices) + ": the node of device " +
                              std::to_string(device.ordinal) + ", " + device.pciBusId + ", is not known";
      if (options_.wallsMode() == walls::Mode::required)
        throw options::OptionError("--walls required: missing is " + why);
      GPUPOOL_WARNING("no wall around workers: %s", why.c_str());
      walls_.standing.erase(stands);
      walls_.missing.insert(walls_.missing.begin(), why);
      workers.gpus.clear();
      return;
    }
    workers.gpus[static_cast<int>(device.ordinal)] = device.pciBusId;
  }
  if (workers.gpus.empty())
    workers.arguments.insert(workers.arguments.end(), {"--devices", walls::Devices{{}, workers.rdma}.text()});
}

void Front::startWorkers() {
  WorkerPool::Settings workers;
  workers.program = program_;
  workers.parent = &parent_;
  // The very library the inventory found: a search could end elsewhere once a device is gone.
  workers.arguments = {
      "--driver", inventory_.driver, "--client-stall-time", std::to_string(options_.clientStallTime.count()),
      "--walls",  options_.walls};
  const auto add = [&workers](const std::vector<std::string>& words) {
    workers.arguments.insert(workers.arguments.end(), words.begin(), words.end());
  };
  if (!cache_->folder().empty()) add({"--module-cache", cache_->folder()});
  if (!options_.workerUsers.empty()) add({"--users", options_.workerUsers});
  add(disturb_.workerArguments());
  workers.warm = options_.warm;
  if (options_.warmContexts)
    for (const auto& device : inventory_.devices)
      workers.contexts.push_back(static_cast<int>(device.ordinal));
  workers.mayHold = [this](int ordinal) { return hasRoomForContext(ordinal); };
  workers.rowsHash = inventory_.rowsHash;
  chooseDevices(workers);
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
      })
      .catch_([this](kj::Exception&& error) {
        throw std::runtime_error("--listen " + options_.listen + ": " + schema::plainText(error));
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
  auto said = sayStopping();
  store();  // if this process is killed now, the next one goes on with nothing
  return said
      .then([this](bool said) {
        return sessions_->endAll(
            kStopping, [this, said](const SessionFacts& facts) { return said && keeper_->leaves(facts); });
      })
      .then([this] { return pool_->stop(); })
      .then([this] { return copier_->stop(); })
      .then([this]() -> kj::Promise<void> {
        claims_->release();
        Doors(options_.doors()).remove();
        if (membership_.get() == nullptr) return kj::READY_NOW;
        return membership_->leave();
      });
}

void Front::taskFailed(kj::Exception&& exception) { GPUPOOL_ERROR("%s", exception.getDescription().cStr()); }

}  // namespace gpupool::server
