#include "pool-manager/service.h"

#include <capnp/rpc-twoparty.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <span>
#include <stdexcept>

#include "base/log.h"
#include "pool-manager/administration.h"
#include "pool-manager/call_limit.h"
#include "pool-manager/convert.h"
#include "pool-manager/patient_stream.h"
#include "pool-manager/roles.h"
#include "pool-manager/rpc.h"
#include "pool-manager/service_calls.h"
#include "schema/manager_login.h"
#include "schema/protocol.h"

namespace gpupool::pool {
namespace {

constexpr kj::Duration kLastWords = 100 * kj::MILLISECONDS;
constexpr unsigned kMaxListed = 4096;   // ids in a beat
constexpr unsigned kMaxReasons = 64;    // of what hinders a lease
constexpr unsigned kMostEntries = 500;  // of the audit log, in one answer

constexpr size_t kMostUnfinished = 256;                           // calls of one connection
constexpr uint64_t kMostWords = (1 << 20) / sizeof(capnp::word);  // of a message, and of calls under way

capnp::Data::Reader asData(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

std::span<const std::byte> view(capnp::Data::Reader from) {
  return {reinterpret_cast<const std::byte*>(from.begin()), from.size()};
}

[[noreturn]] void refuse(const std::string& why) {
  kj::throwFatalException(rpcError(kj::Exception::Type::FAILED, why));
}

uint64_t calendarS() { return static_cast<uint64_t>(std::time(nullptr)); }

// Failures are counted by address: a port is as good as the next one.
std::string withoutPort(std::string address) {
  if (const size_t colon = address.rfind(':'); colon != std::string::npos) address.erase(colon);
  return address;
}

unsigned sizeOf(const std::vector<std::string>& list) { return static_cast<unsigned>(list.size()); }

}  // namespace

// What an RPC system lets go of, it lets go of later: a session may outlive the service.
struct Service::Tie : kj::Refcounted {
  explicit Tie(Service* service) : service(service) {}
  Service* service;
};

class Service::Session final : public schema::Manager::Server {
 public:
  // login: null where everything is allowed. peer: the other end's process, if it is on this machine; else 0.
  // open: see Principal.
  Session(kj::Own<Tie> tie, std::shared_ptr<Login> login, int peer, bool open)
      : tie_(kj::mv(tie)), login_(std::move(login)), peer_(peer), open_(open) {}
  // Of somebody who has proven already who he is.
  Session(kj::Own<Tie> tie, Principal known) : tie_(kj::mv(tie)), known_(std::move(known)) {}
  ~Session() noexcept(false) {
    if (tie_->service != nullptr) tie_->service->closed(*this);
  }

 protected:
  kj::Promise<void> login(LoginContext context) override {
    const auto params = context.getParams();
    context.getResults().setProtocol(schema::poolProtocol());
    if (params.getProtocol() != schema::poolProtocol()) service().refuseVersion(params.getProtocol());
    if (login_ == nullptr) return kj::READY_NOW;
    service();
    const auto nonce =
        login_->begin(text(params.getTenant()), view(params.getClientNonce()), text(params.getToken()));
    context.getResults().setNeeded(true);
    context.getResults().setServerNonce(asData(nonce));
    return kj::READY_NOW;
  }

  kj::Promise<void> prove(ProveContext context) override {
    service();
    if (login_ == nullptr) refuseLogin("this connection needs no token");
    context.getResults().setProof(asData(login_->prove(view(context.getParams().getProof()))));
    return kj::READY_NOW;
  }

  kj::Promise<void> join(JoinContext context) override {
    demand(Operation::serve);
    const auto params = context.getParams();
    const pool::Server facts = read(params.getInfo());
    guarded([&] {
      auto fabric = read(params.getInfo().getFabric(), facts.devices.size());
      service().pool_.join(principal(), facts, read(params.getReports()), service().clock_.now());
      service().pool_.setFabric(facts.name, std::move(fabric));
    });
    service().controls_.erase(facts.name);
    service().controls_.emplace(facts.name, Controlled{facts.incarnation, this, params.getControl()});
    context.getResults().setBeatMs(service().pool_.beatMs());
    return kj::READY_NOW;
  }

  kj::Promise<void> beat(BeatContext context) override {
    demand(Operation::serve);
    const auto params = context.getParams();
    std::vector<Id> leases;
    std::vector<std::string> problems;
    KJ_REQUIRE(params.getActiveLeases().size() <= kMaxListed && params.getProblems().size() <= kMaxDevices);
    KJ_REQUIRE(params.getSuspended().size() <= kMaxListed && params.getTurns().size() <= kMaxListed);
    KJ_REQUIRE(params.getHindrances().size() <= kMaxListed && params.getUses().size() <= kMaxListed);
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
    const bool known =
        control != service().controls_.end() && control->second.session == this && guarded([&] {
          service().noteBeat(name);
          return service().pool_.beat(name, read(params.getIncarnation()), leases, problems,
                                      params.getWarmWorkers(), service().clock_.now(), suspended, turns,
                                      hindrances, uses);
        });
    if (known && params.hasSamples()) {
      KJ_REQUIRE(params.getSamples().size() <= kMaxDevices);
      std::vector<DeviceSample> samples;
      for (auto one : params.getSamples()) samples.push_back(schema::read(one));
      service().pool_.setSamples(name, std::move(samples), service().clock_.now());
    }
    if (known && params.hasFabric()) guarded([&] { service().newFabric(name, params.getFabric()); });
    context.getResults().setKnown(known);
    return kj::READY_NOW;
  }

  kj::Promise<void> leave(LeaveContext context) override {
    demand(Operation::serve);
    const auto params = context.getParams();
    const std::string name = text(params.getName());
    const auto control = service().controls_.find(name);
    if (control == service().controls_.end() || control->second.session != this) return kj::READY_NOW;
    service().controls_.erase(control);
    guarded([&] { service().pool_.left(name, read(params.getIncarnation()), true, service().clock_.now()); });
    return kj::READY_NOW;
  }

  kj::Promise<void> lease(LeaseContext context) override {
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

  kj::Promise<void> renew(RenewContext context) override {
    std::string why;
    const Id id = read(context.getParams().getId());
    demand(Operation::lease);
    Adopter adopter = read(context.getParams().getAdopter());
    adopter.process = identifyProcess(peer_);
    const auto ttl = guarded(
        [&] { return service().pool_.renew(principal(), id, service().clock_.now(), &why, adopter); });
    if (!ttl) kj::throwFatalException(rpcError(kj::Exception::Type::FAILED, "the lease has ended: " + why));
    context.getResults().setTtlMs(*ttl);
    const Pool::Notice notice = service().pool_.noticeOf(id, service().clock_.now());
    context.getResults().setNotice(notice.text);
    context.getResults().setEndsInMs(notice.ms);
    return kj::READY_NOW;
  }

  // Answers when the devices are free again, so that the next request finds them, but not for ever.
  kj::Promise<void> release(ReleaseContext context) override {
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
    if (!service().pool_.leases().contains(id)) return kj::READY_NOW;
    context.allowCancellation();
    return service().ending_.add(id).exclusiveJoin(service().timer_.afterDelay(service().limits_.call));
  }

  kj::Promise<void> cordon(CordonContext context) override {
    demand(Operation::cordon);
    const auto params = context.getParams();
    const std::string server = text(params.getServer());
    const Cordon cordon{text(params.getReason()), text(params.getBy()), calendarS()};
    auto stored = kj::newPromiseAndFulfiller<void>();
    // Shared, for a std::function is copied.
    auto fulfiller = std::make_shared<kj::Own<kj::PromiseFulfiller<void>>>(kj::mv(stored.fulfiller));
    const Journal::Done done = [fulfiller](const std::string& why) {
      if (why.empty()) return (*fulfiller)->fulfill();
      (*fulfiller)->reject(rpcError(kj::Exception::Type::OVERLOADED, "not stored: " + why));
    };
    guarded([&] {
      Pool& pool = service().pool_;
      params.getCordoned() ? pool.cordon(principal(), server, cordon, done)
                           : pool.uncordon(principal(), server, done, cordon.by);
    });
    return service().timer_.timeoutAfter(service().limits_.call, kj::mv(stored.promise));
  }

  kj::Promise<void> suspend(SuspendContext context) override {
    demand(Operation::changeLease);
    context.allowCancellation();  // what was begun goes on
    const auto params = context.getParams();
    return service()
        .suspendLease(principal(), read(params.getId()), params.getDrainMs(), text(params.getFolder()))
        .then(
            [context](SuspendResult&& result) mutable { write(result, context.getResults().initResult()); });
  }

  kj::Promise<void> resume(ResumeContext context) override {
    demand(Operation::changeLease);
    context.allowCancellation();  // who went away leaves the queue
    const auto params = context.getParams();
    return service().resumeLease(principal(), read(params.getId()), params.getWaitMs(),
                                 text(params.getFolder()), read(params.getTo()));
  }

  kj::Promise<void> migrate(MigrateContext context) override {
    demand(Operation::changeLease);
    context.allowCancellation();  // what was begun goes on
    const auto params = context.getParams();
    return service()
        .migrateLease(principal(), read(params.getId()), params.getDrainMs(), read(params.getTo()))
        .then(
            [context](MigrateResult&& result) mutable { write(result, context.getResults().initResult()); });
  }

  kj::Promise<void> checkpoint(CheckpointContext context) override {
    demand(Operation::changeLease);
    context.allowCancellation();  // what was begun goes on
    const auto params = context.getParams();
    return service()
        .checkpointLease(principal(), read(params.getId()), params.getDrainMs(), text(params.getFolder()))
        .then([context](CheckpointResult&& result) mutable {
          write(result, context.getResults().initResult());
        });
  }

  kj::Promise<void> failOver(FailOverContext context) override {
    demand(Operation::lease);
    context.allowCancellation();  // who went away leaves the queue
    const auto params = context.getParams();
    const Id id = read(params.getId());
    return service()
        .failOverLease(principal(), id, {text(params.getServer()), read(params.getIncarnation())},
                       params.getWaitMs())
        .then([this, context, id]() mutable {
          write(guarded([&] { return service().pool_.leaseOf(principal(), id); }),
                context.getResults().initLease(), Secrets::include);
        });
  }

  kj::Promise<void> places(PlacesContext context) override {
    demand(Operation::lease);
    const Id id = read(context.getParams().getId());
    const auto servers = guarded([&] { return service().pool_.places(principal(), id); });
    auto list = context.getResults().initServers(static_cast<unsigned>(servers.size()));
    for (unsigned i = 0; i < list.size(); ++i) write(servers[i], list[i]);
    return kj::READY_NOW;
  }

  kj::Promise<void> explain(ExplainContext context) override {
    demand(Operation::look);
    const LeaseRequest request = read(context.getParams().getRequest());
    const auto answer =
        guarded([&] { return service().pool_.explain(principal(), request, service().clock_.now()); });
    write(answer, context.getResults().initExplanation());
    return kj::READY_NOW;
  }

  kj::Promise<void> audit(AuditContext context) override {
    demand(Operation::look);
    const AuditQuery query = read(context.getParams());
    const auto entries = service().pool_.audit(principal(), query, kMostEntries + 1);
    auto list = context.getResults().initEntries(
        std::min<unsigned>(kMostEntries, static_cast<unsigned>(entries.size())));
    for (unsigned i = 0; i < list.size(); ++i) write(entries[i], list[i]);
    context.getResults().setMore(entries.size() > list.size());
    return kj::READY_NOW;
  }

  kj::Promise<void> devices(DevicesContext context) override {
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

  kj::Promise<void> servers(ServersContext context) override {
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

  kj::Promise<void> administration(AdministrationContext context) override {
    demand(Operation::look);  // what each of its calls takes, that call asks
    context.getResults().setAdministration(
        administrationFor({[this](Operation operation) {
                             demand(operation);
                             return principal();
                           },
                           [this]() -> Service& { return service(); }, thisCap()}));
    return kj::READY_NOW;
  }

  kj::Promise<void> leases(LeasesContext context) override {
    demand(Operation::look);
    const auto leases = service().pool_.list(principal(), service().clock_.now());
    auto list = context.getResults().initLeases(static_cast<unsigned>(leases.size()));
    for (unsigned i = 0; i < list.size(); ++i) write(leases[i], list[i], Secrets::leaveOut);
    return kj::READY_NOW;
  }

 private:
  void fill(schema::DeviceState::Builder out, const ServerUse& server, const DeviceUse& device) {
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

  static void tell(const Cordon& cordon, schema::ServerState::Builder out) {
    out.setCordoned(true);
    out.setCordonReason(cordon.reason);
    out.setCordonedBy(cordon.by);
    const uint64_t now = calendarS();
    if (cordon.sinceS != 0) out.setCordonedS(std::max<uint64_t>(1, now - std::min(now, cordon.sinceS)));
  }

  // Throws unless this connection may. Whose lease it may touch, the pool decides.
  void demand(Operation operation) {
    if (login_ == nullptr && !known_) {
      if (open_ && service().tokens_.demanded()) refuse("the manager requires a token by now: connect again");
      return;
    }
    service();
    if (!known_ && !login_->proven()) refuse("the manager requires a token before anything else");
    const Principal who = principal();
    if (const std::string why = service().tokens_.endOf(who); !why.empty()) refuse(why);
    if (const std::string why = refusalOf(who, operation); !why.empty()) refuse(why);
  }

  Principal principal() const {
    if (known_) return *known_;
    if (login_ == nullptr) return {Principal::Role::admin, "", "", open_};
    return login_->who();
  }

  Service& service() {
    if (tie_->service == nullptr)
      kj::throwFatalException(rpcError(kj::Exception::Type::DISCONNECTED, "the manager is shutting down"));
    return *tie_->service;
  }

  kj::Own<Tie> tie_;
  std::shared_ptr<Login> login_;
  std::optional<Principal> known_;
  int peer_ = 0;
  bool open_ = false;
};

// One connection's network and RPC system. What comes before a proof is bounded like everything after it.
struct Service::Connection {
  Connection(kj::Own<kj::AsyncIoStream> from, schema::Manager::Client manager)
      : stream(kj::mv(from)),
        messages(limitCalls(*stream, kMostUnfinished)),
        network(*messages, capnp::rpc::twoparty::Side::SERVER,
                capnp::ReaderOptions{.traversalLimitInWords = kMostWords, .nestingLimit = 16}),
        system(capnp::makeRpcServer(network, kj::mv(manager))) {
    system.setFlowLimit(kMostWords);
  }
  kj::Own<kj::AsyncIoStream> stream;
  kj::Own<capnp::MessageStream> messages;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> system;
};

Service::Service(kj::Timer& timer, Store& store, const PoolTimes& times, const ServiceLimits& limits,
                 std::function<uint64_t()> now)
    : timer_(timer),
      limits_(limits),
      clock_(kj::mv(now), limits.mostStepMs),
      connections_("connections", limits.connections),
      store_(store),
      pool_(store, *this, times, {bootId(), clock_.now(), calendarS(), Id::random().text()}),
      tokens_([this](auto writes, auto entries,
                     auto done) { pool_.write(std::move(writes), std::move(entries), std::move(done)); },
              calendarS),
      tie_(kj::refcounted<Tie>(this)),
      tasks_(*this) {
  tokens_.load(store.range(kTokenPrefix));
  tasks_.add(deliverStore());
}

Service::~Service() noexcept {
  store_.whenReady({});
  tie_->service = nullptr;
}

void Service::serve(kj::Own<kj::ConnectionReceiver> listener, bool local) {
  serve(kj::mv(listener), local, nullptr);
}

void Service::serve(kj::Own<kj::ConnectionReceiver> listener, bool local, Accept accept) {
  tasks_.add(acceptLoop(*listener, local, std::move(accept)));
  listeners_.add(kj::mv(listener));
}

schema::Manager::Client Service::managerFor(const Principal& who) {
  return kj::heap<Session>(kj::addRef(*tie_), who);
}

void Service::demandTls(tls::Certificate& certificate) {
  certificate_ = &certificate;
  door_ = kj::heap<TlsDoor>(timer_, certificate, limits_.login, limits_.plainFromLoopback);
}

std::vector<Fingerprint> Service::certificates() const {
  if (certificate_ == nullptr) return {};
  return {certificate_->fingerprint()};
}

// other: null: by RPC.
kj::Promise<void> Service::acceptLoop(kj::ConnectionReceiver& listener, bool local, Accept other) {
  return listener.acceptAuthenticated()
      .then(
          [this, local, other](kj::AuthenticatedStream&& peer) -> kj::Promise<void> {
            acceptPeer(kj::mv(peer), local, other);
            return kj::READY_NOW;
          },
          [this](kj::Exception&& error) {
            // Out of descriptors, most likely: pause instead of serving nobody ever after.
            GPUPOOL_ERROR("accept: %s", errorText(error).c_str());
            return timer_.afterDelay(100 * kj::MILLISECONDS);
          })
      .then([this, &listener, local, other]() { return acceptLoop(listener, local, other); });
}

void Service::acceptPeer(kj::AuthenticatedStream peer, bool local, const Accept& other) {
  bool own = false;
  int process = 0;
  std::string name = withoutPort(peer.peerIdentity->toString().cStr());
  if (auto* identity = dynamic_cast<kj::LocalPeerIdentity*>(peer.peerIdentity.get())) {
    const auto credentials = identity->getCredentials();
    KJ_IF_MAYBE (pid, credentials.pid) process = *pid;
    KJ_IF_MAYBE (uid, credentials.uid) {
      own = *uid == geteuid() || *uid == 0;
      name = "uid " + std::to_string(*uid);
    }
  }
  endWithHost(*peer.stream);
  if (local && !own && !limits_.anyUser)
    GPUPOOL_WARNING("refused a connection of another user (see --any-user)");
  else if (!local && door_.get() != nullptr)
    tasks_.add(enter(kj::mv(peer.stream), name, other));
  else if (other)
    other(kj::mv(peer.stream), own, name);
  else
    accept(kj::mv(peer.stream), own, name, process);
}

kj::Promise<void> Service::enter(kj::Own<kj::AsyncIoStream> stream, const std::string& peer, Accept other) {
  return door_->enter(kj::mv(stream), peer)
      .then(
          [this, peer, other](TlsDoor::Entered&& entered) {
            if (entered.stream.get() == nullptr) return;
            if (other)
              other(kj::mv(entered.stream), false, peer);
            else
              accept(kj::mv(entered.stream), false, peer, 0, entered.certificate);
          },
          [peer](kj::Exception&& error) {
            GPUPOOL_DEBUG("%s did not begin TLS: %s", peer.c_str(), errorText(error).c_str());
          });
}

void Service::accept(kj::Own<kj::AsyncIoStream> stream, bool trusted, const std::string& peer, int process,
                     const std::optional<Fingerprint>& certificate) {
  auto place = connections_.take(peer);
  if (place == nullptr) return;
  std::shared_ptr<Login> login;
  if (!trusted && tokens_.demanded()) {
    auto unproven = unproven_.take(peer);
    if (unproven == nullptr) return;
    login = std::make_shared<Login>(tokens_, failures_, peer, std::move(unproven), certificate);
  }
  auto connection = kj::heap<Connection>(
      patientStream(kj::mv(stream)),
      schema::Manager::Client(kj::heap<Session>(kj::addRef(*tie_), login, process, !trusted)));
  auto done = connection->network.onDisconnect();
  if (login != nullptr)
    done = done.exclusiveJoin(timer_.afterDelay(limits_.login).then([login]() -> kj::Promise<void> {
      if (login->proven()) return kj::NEVER_DONE;
      return kj::READY_NOW;
    }));
  if (!trusted) {
    auto over = kj::newPromiseAndFulfiller<void>();
    // An answer that is on its way gets there.
    done = done.exclusiveJoin(over.promise.then([this] { return timer_.afterDelay(kLastWords); }));
    live_.push_back({login, kj::mv(over.fulfiller)});
    done = done.attach(kj::defer([this, at = std::prev(live_.end())] { live_.erase(at); }));
  }
  tasks_.add(done.attach(kj::mv(connection), kj::mv(place)));
}

void Service::endConnections(const std::string& token) {
  for (Live& one : live_)
    if (one.login != nullptr && one.login->proven() && one.login->who().token == token) one.end->fulfill();
}

void Service::endOpenConnections() {
  for (Live& one : live_)
    if (one.login == nullptr) one.end->fulfill();
}

// Logged once a version: servers try again and again.
void Service::refuseVersion(uint32_t theirs) {
  constexpr size_t kMostVersions = 16;
  const std::string text = schema::protocolMismatch(schema::poolProtocol(), theirs);
  if (otherVersions_.size() < kMostVersions && otherVersions_.insert(theirs).second)
    GPUPOOL_WARNING("%s", text.c_str());
  refuseLogin(text, schema::FaultKind::version);
}

void Service::closed(Session& session) {
  for (auto at = controls_.begin(); at != controls_.end();) {
    if (at->second.session != &session) {
      ++at;
      continue;
    }
    const std::string name = at->first;
    const Id incarnation = at->second.incarnation;
    at = controls_.erase(at);
    pool_.left(name, incarnation, false, clock_.now());
  }
}

// Before the pool hears of it: how many have not come since the last one.
void Service::noteBeat(const std::string& name) {
  const auto server = pool_.servers().find(name);
  if (server == pool_.servers().end()) return;
  const uint64_t late = (clock_.now() - server->second.beatMs) / pool_.beatMs();
  if (late >= 2) counters_.missedBeats[name] += late - 1;
}

void Service::newFabric(const std::string& name, schema::Fabric::Reader report) {
  const auto server = pool_.servers().find(name);
  if (server == pool_.servers().end()) return;
  pool_.setFabric(name, read(report, server->second.facts.devices.size()));
}

// What the store has done is told on this thread, whichever did it.
kj::Promise<void> Service::deliverStore() {
  auto ready = kj::newPromiseAndCrossThreadFulfiller<void>();
  auto fulfiller = std::make_shared<decltype(ready.fulfiller)>(kj::mv(ready.fulfiller));
  store_.whenReady([fulfiller] { (*fulfiller)->fulfill(); });
  return ready.promise.then([this] {
    try {
      store_.deliver();
    } catch (const std::exception& error) {
      GPUPOOL_ERROR("what the store has written was not acted on: %s", error.what());
    }
    return deliverStore();
  });
}

kj::Promise<void> Service::run() {
  auto over = kj::newPromiseAndFulfiller<void>();
  superseded_ = kj::mv(over.fulfiller);
  return housekeeping().exclusiveJoin(kj::mv(over.promise));
}

kj::Promise<void> Service::housekeeping() {
  return timer_.afterDelay(limits_.tick).then([this]() {
    try {
      pool_.tick(clock_.now());
      std::erase_if(counters_.missedBeats,
                    [&](const auto& one) { return !pool_.servers().contains(one.first); });
      for (const std::string& token : tokens_.tick()) endConnections(token);
    } catch (const std::exception& error) {
      GPUPOOL_ERROR("housekeeping failed: %s", error.what());
    }
    return housekeeping();
  });
}

void Service::taskFailed(kj::Exception&& error) {
  if (error.getType() != kj::Exception::Type::DISCONNECTED)
    GPUPOOL_WARNING("a connection failed: %s", errorText(error).c_str());
}

}  // namespace gpupool::pool
