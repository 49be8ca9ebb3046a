#include "pool-manager/service_session.h"

#include <algorithm>
#include <span>

#include "pool-manager/administration.h"
#include "pool-manager/convert.h"
#include "pool-manager/roles.h"
#include "pool-manager/rpc.h"
#include "pool-manager/service_calls.h"
#include "schema/manager_login.h"
#include "schema/protocol.h"

namespace gpupool::pool {
namespace {

constexpr unsigned kMaxListed = 4096;   // ids in a beat
constexpr unsigned kMaxReasons = 64;    // of what hinders a lease
constexpr unsigned kMostEntries = 500;  // of the audit log, in one answer

capnp::Data::Reader asData(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

std::span<const std::byte> view(capnp::Data::Reader from) {
  return {reinterpret_cast<const std::byte*>(from.begin()), from.size()};
}

[[noreturn]] void refuse(const std::string& why) {
  kj::throwFatalException(rpcError(kj::Exception::Type::FAILED, why));
}

unsigned sizeOf(const std::vector<std::string>& list) { return static_cast<unsigned>(list.size()); }

}  // namespace

kj::Promise<void> Service::Session::login(LoginContext context) {
  const auto params = context.getParams();
  const schema::ProtocolRange theirs = schema::saidProtocols(params.getProtocol(), params.getOldest());
  const uint32_t common = schema::commonProtocol(schema::ownProtocols(), theirs);
  if (common == 0) service().refuseVersion(theirs);
  context.getResults().setProtocol(common);
  context.getResults().setOldest(std::min(common, schema::oldestPoolProtocol()));
  if (login_ == nullptr) return kj::READY_NOW;
  service();
  const auto nonce =
      login_->begin(text(params.getTenant()), view(params.getClientNonce()), text(params.getToken()));
  context.getResults().setNeeded(true);
  context.getResults().setServerNonce(asData(nonce));
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::prove(ProveContext context) {
  service();
  if (login_ == nullptr) refuseLogin("this connection needs no token");
  context.getResults().setProof(asData(login_->prove(view(context.getParams().getProof()))));
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::join(JoinContext context) {
  demand(Operation::serve);
  const auto params = context.getParams();
  const pool::Server facts = read(params.getInfo());
  KJ_REQUIRE(params.getReadopted().size() <= kMaxListed);
  guarded([&] {
    auto fabric = read(params.getInfo().getFabric(), facts.devices.size());
    std::map<Id, uint64_t> readopted;
    for (auto one : params.getReadopted()) readopted[read(one.getId())] = one.getDeviceEpoch();
    service().pool_.join(principal(), facts, read(params.getReports()), service().clock_.now(), readopted);
    service().pool_.setFabric(facts.name, std::move(fabric));
  });
  service().controls_.erase(facts.name);
  service().controls_.emplace(facts.name, Controlled{facts.incarnation, this, params.getControl()});
  context.getResults().setBeatMs(service().pool_.beatMs());
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::beat(BeatContext context) {
  demand(Operation::serve);
  const auto params = context.getParams();
  std::vector<Id> leases;
  std::vector<std::string> problems;
  KJ_REQUIRE(params.getActiveLeases().size() <= kMaxListed && params.getProblems().size() <= kMaxDevices);
  KJ_REQUIRE(params.getSuspended().size() <= kMaxListed && params.getTurns().size() <= kMaxListed);
  KJ_REQUIRE(params.getHindrances().size() <= kMaxListed && params.getUses().size() <= kMaxListed);
  KJ_REQUIRE(params.getCounts().size() <= kMaxListed && params.getKept().size() <= kMaxListed);
  for (auto id : params.getActiveLeases()) leases.push_back(read(id));
  std::vector<SuspendedLease> suspended;
  for (auto one : params.getSuspended()) suspended.push_back(read(one));
  std::vector<LeaseTurn> turns;
  for (auto one : params.getTurns()) turns.push_back(read(one));
  std::vector<LeaseHindrances> hindrances;
  for (auto one : params.getHindrances()) {
    KJ_REQUIRE(one.getReasons().size() <= kMaxReasons);
    hindrances.push_back(read(one));
  }
  std::vector<LeaseUse> uses;
  for (auto one : params.getUses()) uses.push_back(read(one));
  for (auto one : params.getProblems()) problems.push_back(text(one));
  const std::string name = text(params.getName());
  const auto control = service().controls_.find(name);
  const bool known = control != service().controls_.end() && control->second.session == this && guarded([&] {
                       service().noteBeat(name);
                       return service().pool_.beat(name, read(params.getIncarnation()), leases, problems,
                                                   params.getWarmWorkers(), service().clock_.now(), suspended,
                                                   turns, hindrances, uses);
                     });
  if (known && params.hasSamples()) {
    KJ_REQUIRE(params.getSamples().size() <= kMaxDevices);
    std::vector<DeviceSample> samples;
    for (auto one : params.getSamples()) samples.push_back(schema::read(one));
    service().pool_.setSamples(name, std::move(samples), service().clock_.now());
  }
  if (known) {
    std::vector<LeaseCounts> counts;
    for (auto one : params.getCounts()) counts.push_back(read(one));
    service().pool_.setCounts(name, counts, service().clock_.now());
    std::vector<KeptLease> kept;
    for (auto one : params.getKept()) kept.push_back(read(one));
    service().pool_.setKept(name, kept, service().clock_.now());
  }
  if (known && params.getWorkers().size() != 0)
    service().pool_.setWorkers(name, read(params.getWorkers()), service().clock_.now());
  if (known && params.hasFabric()) guarded([&] { service().newFabric(name, params.getFabric()); });
  context.getResults().setKnown(known);
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::leave(LeaveContext context) {
  demand(Operation::serve);
  const auto params = context.getParams();
  const std::string name = text(params.getName());
  const auto control = service().controls_.find(name);
  if (control == service().controls_.end() || control->second.session != this) return kj::READY_NOW;
  service().controls_.erase(control);
  guarded([&] { service().pool_.left(name, read(params.getIncarnation()), true, service().clock_.now()); });
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::lease(LeaseContext context) {
  LeaseRequest request = read(context.getParams().getRequest());
  demand(Operation::lease);
  request.process = identifyProcess(peer_);
  guarded([&] { service().pool_.nameClaim(principal(), request); });
  context.allowCancellation();  // a holder that went away leaves the queue
  const kj::TimePoint asked = service().timer_.now();
  return service()
      .ask(service().waiting_, request.id,
           [&](uint64_t now) { service().pool_.request(principal(), request, now); })
      .then([this, asked, context](Lease&& lease) mutable {
        service().counters_.leaseWaits.observe(service().timer_.now() - asked);
        write(lease, context.getResults().initLease(), Secrets::include);
      });
}

kj::Promise<void> Service::Session::renew(RenewContext context) {
  std::string why;
  const Id id = read(context.getParams().getId());
  demand(Operation::lease);
  Adopter adopter = read(context.getParams().getAdopter());
  for (auto client : context.getParams().getClients()) {
    if (adopter.clients.size() == kMostClients) break;
    adopter.clients.push_back(read(client));
  }
  adopter.process = identifyProcess(peer_);
  const auto ttl =
      guarded([&] { return service().pool_.renew(principal(), id, service().clock_.now(), &why, adopter); });
  if (!ttl) kj::throwFatalException(rpcError(kj::Exception::Type::FAILED, "the lease has ended: " + why));
  context.getResults().setTtlMs(*ttl);
  const Pool::Notice notice = service().pool_.noticeOf(id, service().clock_.now());
  context.getResults().setNotice(notice.text);
  context.getResults().setEndsInMs(notice.ms);
  if (const auto standby = service().pool_.standbyOf(id)) write(*standby, context.getResults().initStandby());
  return kj::READY_NOW;
}

// Answers when the devices are free again, so that the next request finds them, but not for ever. Of a lease
// that somebody else ends, who may take the pool down next, also when its holder knows.
kj::Promise<void> Service::Session::release(ReleaseContext context) {
  Id id = read(context.getParams().getId());
  demand(Operation::changeLease);
  const bool drop = context.getParams().getDrop();
  const std::string claim = text(context.getParams().getClaim());
  const Id adopter = read(context.getParams().getAdopter());
  const bool ends = guarded([&] {
    Pool& pool = service().pool_;
    const uint64_t now = service().clock_.now();
    if (!claim.empty()) id = pool.claimNamed(principal(), text(context.getParams().getTenant()), claim);
    if (adopter != Id{}) {
      pool.leave(principal(), id, adopter, now);
      return false;
    }
    return drop ? pool.drop(principal(), id, now) : pool.release(principal(), id, now);
  });
  if (!ends) return kj::READY_NOW;
  context.allowCancellation();
  if (!service().pool_.leases().contains(id)) return service().awaitHeard(id);
  return service()
      .ending_.add(id)
      .exclusiveJoin(service().timer_.afterDelay(service().limits_.call))
      .then([&service = service(), id] { return service.awaitHeard(id); });
}

kj::Promise<void> Service::Session::cordon(CordonContext context) {
  demand(Operation::cordon);
  const auto params = context.getParams();
  const std::string server = text(params.getServer());
  const bool cordoned = params.getCordoned();
  const Cordon cordon{text(params.getReason()), text(params.getBy()), calendarS()};
  auto stopped = cordoned ? kj::Promise<void>(kj::READY_NOW) : service().stopDrain(server);
  return stopped.then([this, server, cordoned, cordon] {
    return service().storeCordon(principal(), server, cordoned, cordon);
  });
}

// A cordon that is there already is left as it is, unless there is another reason now.
kj::Promise<void> Service::Session::drain(DrainContext context) {
  demand(Operation::cordon);
  const auto params = context.getParams();
  const std::string server = text(params.getServer()), reason = text(params.getReason());
  const bool there = reason.empty() && service().pool_.cordons().contains(server);
  auto cordoned =
      there ? kj::Promise<void>(kj::READY_NOW)
            : service().storeCordon(principal(), server, true, {reason, text(params.getBy()), calendarS()});
  return cordoned.then([this, context, server]() mutable {
    const auto order = context.getParams();
    const uint64_t tryMs = std::min(order.getTryMs(), Drains::kMostTryMs);
    // Before it is begun: what is said from then on comes after `latest`.
    const uint64_t latest = service().drains_.state(server, 0).latest;
    auto begun = order.getStay() ? kj::Promise<void>(kj::READY_NOW)
                                 : service().beginDrain(principal(), server, tryMs * kj::MILLISECONDS);
    return begun.then([this, context, server, latest]() mutable {
      write(service().drains_.state(server, latest), context.getResults().initState());
    });
  });
}

kj::Promise<void> Service::Session::drainState(DrainStateContext context) {
  demand(Operation::cordon);
  const auto params = context.getParams();
  write(service().drains_.state(text(params.getServer()), params.getAfter()),
        context.getResults().initState());
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::stopDrain(StopDrainContext context) {
  demand(Operation::cordon);
  return service().stopDrain(text(context.getParams().getServer()));
}

kj::Promise<void> Service::Session::suspend(SuspendContext context) {
  demand(Operation::changeLease);
  context.allowCancellation();  // what was begun goes on
  const auto params = context.getParams();
  return service()
      .suspendLease(principal(), read(params.getId()), params.getDrainMs(), text(params.getFolder()))
      .then([context](SuspendResult&& result) mutable { write(result, context.getResults().initResult()); });
}

kj::Promise<void> Service::Session::resume(ResumeContext context) {
  demand(Operation::changeLease);
  context.allowCancellation();  // who went away leaves the queue
  const auto params = context.getParams();
  return service().resumeLease(principal(), read(params.getId()), params.getWaitMs(),
                               text(params.getFolder()), read(params.getTo()));
}

kj::Promise<void> Service::Session::migrate(MigrateContext context) {
  demand(Operation::changeLease);
  context.allowCancellation();  // what was begun goes on
  const auto params = context.getParams();
  return service()
      .migrateLease(principal(), read(params.getId()), params.getDrainMs(), read(params.getTo()))
      .then([context](MigrateResult&& result) mutable { write(result, context.getResults().initResult()); });
}

kj::Promise<void> Service::Session::checkpoint(CheckpointContext context) {
  demand(Operation::changeLease);
  context.allowCancellation();  // what was begun goes on
  const auto params = context.getParams();
  return service()
      .checkpointLease(principal(), read(params.getId()), params.getDrainMs(), text(params.getFolder()))
      .then(
          [context](CheckpointResult&& result) mutable { write(result, context.getResults().initResult()); });
}

kj::Promise<void> Service::Session::failOver(FailOverContext context) {
  demand(Operation::lease);
  context.allowCancellation();  // who went away leaves the queue
  const auto params = context.getParams();
  const Id id = read(params.getId());
  return service()
      .failOverLease(principal(), id, {text(params.getServer()), read(params.getIncarnation())},
                     params.getWaitMs(), params.getCutOff())
      .then([this, context, id]() mutable {
        write(guarded([&] { return service().pool_.leaseOf(principal(), id); }),
              context.getResults().initLease(), Secrets::include);
      });
}

kj::Promise<void> Service::Session::places(PlacesContext context) {
  demand(Operation::lease);
  const Id id = read(context.getParams().getId());
  const auto servers = guarded([&] { return service().pool_.places(principal(), id); });
  auto list = context.getResults().initServers(static_cast<unsigned>(servers.size()));
  for (unsigned i = 0; i < list.size(); ++i) write(servers[i], list[i]);
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::explain(ExplainContext context) {
  demand(Operation::look);
  LeaseRequest request = read(context.getParams().getRequest());
  guarded([&] { service().pool_.nameClaim(principal(), request); });
  const auto answer =
      guarded([&] { return service().pool_.explain(principal(), request, service().clock_.now()); });
  write(answer, context.getResults().initExplanation());
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::audit(AuditContext context) {
  demand(Operation::look);
  const AuditQuery query = read(context.getParams());
  const auto entries = service().pool_.audit(principal(), query, kMostEntries + 1);
  auto list = context.getResults().initEntries(
      std::min<unsigned>(kMostEntries, static_cast<unsigned>(entries.size())));
  for (unsigned i = 0; i < list.size(); ++i) write(entries[i], list[i]);
  context.getResults().setMore(entries.size() > list.size());
  context.getResults().setLatest(service().pool_.latestAudit());
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::devices(DevicesContext context) {
  demand(Operation::look);
  const auto now = service().clock_.now();
  const auto inventory = service().pool_.inventory(principal(), now);
  unsigned count = 0;
  for (const auto& server : inventory) count += static_cast<unsigned>(server.devices.size());
  auto list = context.getResults().initDevices(count);
  unsigned at = 0;
  for (const auto& server : inventory)
    for (const auto& device : server.devices) {
      auto out = list[at++];
      fill(out, server, device);
      if (const auto sample = service().pool_.sample(server.name, device.info.uuid, now))
        schema::write(*sample, out.initSample());
    }
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::servers(ServersContext context) {
  demand(Operation::look);
  const auto now = service().clock_.now();
  const auto& servers = service().pool_.servers();
  const auto& cordons = service().pool_.cordons();
  std::vector<std::string> absent;
  for (const auto& [name, cordon] : cordons)
    if (!servers.contains(name)) absent.push_back(name);
  auto list = context.getResults().initServers(static_cast<unsigned>(servers.size() + absent.size()));
  unsigned at = 0;
  for (const auto& [name, server] : servers) {
    auto one = list[at++];
    write(server.facts, one.initInfo());
    write(server.facts.leftOut, one.getInfo().initLeftOut(sizeOf(server.facts.leftOut)));
    write(server.facts.walls, one.getInfo().initWalls(sizeOf(server.facts.walls)));
    write(server.facts.missingWalls, one.getInfo().initMissingWalls(sizeOf(server.facts.missingWalls)));
    one.setLastBeatMs(now - server.beatMs);
    one.setAlive(service().pool_.alive(server, now));
    one.setWarmWorkers(server.warmWorkers);
    if (const auto cordon = cordons.find(name); cordon != cordons.end()) tell(cordon->second, one);
    fabric::write(server.fabric, one.getInfo().initFabric());
  }
  for (const std::string& name : absent) {
    auto one = list[at++];
    one.initInfo().setName(name);
    one.setAbsent(true);
    tell(cordons.at(name), one);
  }
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::administration(AdministrationContext context) {
  demand(Operation::look);  // what each of its calls takes, that call asks
  context.getResults().setAdministration(
      administrationFor({[this](Operation operation) {
                           demand(operation);
                           return principal();
                         },
                         [this]() -> Service& { return service(); }, thisCap()}));
  return kj::READY_NOW;
}

kj::Promise<void> Service::Session::leases(LeasesContext context) {
  demand(Operation::look);
  const auto leases = service().pool_.list(principal(), service().clock_.now());
  auto list = context.getResults().initLeases(static_cast<unsigned>(leases.size()));
  for (unsigned i = 0; i < list.size(); ++i) write(leases[i], list[i], Secrets::leaveOut);
  return kj::READY_NOW;
}

void Service::Session::fill(schema::DeviceState::Builder out, const ServerUse& server,
                            const DeviceUse& device) {
  const bool usable = device.info.problem.empty() && device.duplicateOf.empty() && server.unusable.empty();
  write(device.info, out.initInfo());
  if (!device.duplicateOf.empty())
    out.getInfo().setProblem("the same device as " + device.duplicateOf + ", and leased there");
  out.setServer(server.name);
  out.setFreeBytes(usable ? device.freeBytes : 0);
  std::vector<Id> ids;
  for (const auto& [id, record] : service().pool_.leases())
    for (const Placement& placement : record.placements)
      for (const LeasedDevice& leased : placement.devices)
        if (placement.server.name == server.name && leased.info.uuid == device.info.uuid) ids.push_back(id);
  auto list = out.initLeases(static_cast<unsigned>(ids.size()));
  for (unsigned i = 0; i < ids.size(); ++i) write(ids[i], list[i]);
}

void Service::Session::tell(const Cordon& cordon, schema::ServerState::Builder out) {
  out.setCordoned(true);
  out.setCordonReason(cordon.reason);
  out.setCordonedBy(cordon.by);
  const uint64_t now = calendarS();
  if (cordon.sinceS != 0) out.setCordonedS(std::max<uint64_t>(1, now - std::min(now, cordon.sinceS)));
}

// Throws unless this connection may. Whose lease it may touch, the pool decides.
void Service::Session::demand(Operation operation) {
  if (login_ == nullptr && !known_) {
    if (open_ && service().tokens_.demanded())
      refuseLogin("the manager requires a token by now: connect again");
    return;
  }
  service();
  if (!known_ && !login_->proven()) refuse("the manager requires a token before anything else");
  const Principal who = principal();
  // Of the connection, and not of what is asked: a holder's lease goes on with another token.
  if (const std::string why = service().tokens_.endOf(who); !why.empty()) refuseLogin(why);
  if (const std::string why = refusalOf(who, operation); !why.empty()) refuse(why);
}

Principal Service::Session::principal() const {
  if (known_) return *known_;
  if (login_ == nullptr) return {Principal::Role::admin, "", "", open_};
  return login_->who();
}

Service& Service::Session::service() {
  if (tie_->service == nullptr)
    kj::throwFatalException(rpcError(kj::Exception::Type::DISCONNECTED, "the manager is shutting down"));
  return *tie_->service;
}

}  // namespace gpupool::pool
