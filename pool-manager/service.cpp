#include "pool-manager/service.h"

#include <capnp/rpc-twoparty.h>
#include <unistd.h>

#include <stdexcept>

#include "base/log.h"
#include "pool-manager/convert.h"
#include "pool-manager/rpc.h"

namespace gpupool::pool {
namespace {

constexpr unsigned kMaxListed = 4096;  // ids in a beat

// Turns the Pool's exceptions into RPC errors with nothing but their text.
template <class Body>
auto guarded(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const kj::Exception&) {
    throw;  // is a std::exception too, as it is thrown
  } catch (const std::exception& error) {
    kj::throwFatalException(rpcError(kj::Exception::Type::FAILED, error.what()));
  }
}

kj::Exception::Type typeOf(Failure::Kind kind) {
  switch (kind) {
    case Failure::Kind::noDevice:
      return kj::Exception::Type::OVERLOADED;
    case Failure::Kind::nothingFits:
      return kj::Exception::Type::UNIMPLEMENTED;
    case Failure::Kind::serverLost:
      return kj::Exception::Type::DISCONNECTED;
    case Failure::Kind::refused:
      break;
  }
  return kj::Exception::Type::FAILED;
}

}  // namespace

// What an RPC system lets go of, it lets go of later: a session may outlive the service.
struct Service::Tie : kj::Refcounted {
  explicit Tie(Service* service) : service(service) {}
  Service* service;
};

class Service::Session final : public schema::Manager::Server {
 public:
  explicit Session(kj::Own<Tie> tie) : tie_(kj::mv(tie)) {}
  ~Session() noexcept(false) {
    if (tie_->service != nullptr) tie_->service->closed(*this);
  }

 protected:
  kj::Promise<void> join(JoinContext context) override {
    const auto params = context.getParams();
    const pool::Server facts = read(params.getInfo());
    guarded([&] { service().pool_.join(facts, service().now_()); });
    service().controls_.erase(facts.name);
    service().controls_.emplace(facts.name, Controlled{facts.incarnation, this, params.getControl()});
    context.getResults().setBeatMs(service().pool_.beatMs());
    return kj::READY_NOW;
  }

  kj::Promise<void> beat(BeatContext context) override {
    const auto params = context.getParams();
    std::vector<Id> leases;
    std::vector<bool> healthy;
    KJ_REQUIRE(params.getActiveLeases().size() <= kMaxListed && params.getHealthy().size() <= kMaxDevices);
    for (auto id : params.getActiveLeases()) leases.push_back(read(id));
    for (bool one : params.getHealthy()) healthy.push_back(one);
    const std::string name = text(params.getName());
    const auto control = service().controls_.find(name);
    const bool known =
        control != service().controls_.end() && control->second.session == this && guarded([&] {
          return service().pool_.beat(name, read(params.getIncarnation()), leases, healthy,
                                      params.getWarmWorkers(), service().now_());
        });
    context.getResults().setKnown(known);
    return kj::READY_NOW;
  }

  kj::Promise<void> leave(LeaveContext context) override {
    const auto params = context.getParams();
    const std::string name = text(params.getName());
    const auto control = service().controls_.find(name);
    if (control == service().controls_.end() || control->second.session != this) return kj::READY_NOW;
    service().controls_.erase(control);
    guarded([&] { service().pool_.left(name, read(params.getIncarnation()), true, service().now_()); });
    return kj::READY_NOW;
  }

  kj::Promise<void> lease(LeaseContext context) override {
    const LeaseRequest request = read(context.getParams().getRequest());
    context.allowCancellation();  // a holder that went away leaves the queue
    auto answer = kj::newPromiseAndFulfiller<Lease>();
    service().waiting_[request.id].push_back(kj::mv(answer.fulfiller));
    guarded([&] { service().pool_.request(request, service().now_()); });
    return answer.promise.then([context](Lease&& lease) mutable {
      write(lease, context.getResults().initLease(), Secrets::include);
    });
  }

  kj::Promise<void> renew(RenewContext context) override {
    std::string why;
    const auto ttl = guarded(
        [&] { return service().pool_.renew(read(context.getParams().getId()), service().now_(), &why); });
    if (!ttl) kj::throwFatalException(rpcError(kj::Exception::Type::FAILED, "the lease has ended: " + why));
    context.getResults().setTtlMs(*ttl);
    return kj::READY_NOW;
  }

  // Answers when the devices are free again, so that the next request finds them, but not for ever.
  kj::Promise<void> release(ReleaseContext context) override {
    const Id id = read(context.getParams().getId());
    if (!guarded([&] { return service().pool_.release(id, service().now_()); })) return kj::READY_NOW;
    if (!service().pool_.leases().contains(id)) return kj::READY_NOW;
    context.allowCancellation();
    auto over = kj::newPromiseAndFulfiller<void>();
    service().ending_[id].push_back(kj::mv(over.fulfiller));
    return over.promise.exclusiveJoin(service().timer_.afterDelay(service().limits_.call));
  }

  kj::Promise<void> devices(DevicesContext context) override {
    const auto now = service().now_();
    const auto inventory = service().pool_.inventory(now);
    unsigned count = 0;
    for (const auto& server : inventory) count += static_cast<unsigned>(server.devices.size());
    auto list = context.getResults().initDevices(count);
    unsigned at = 0;
    for (const auto& server : inventory)
      for (const auto& device : server.devices) fill(list[at++], server, device);
    return kj::READY_NOW;
  }

  kj::Promise<void> servers(ServersContext context) override {
    const auto now = service().now_();
    const auto& servers = service().pool_.servers();
    auto list = context.getResults().initServers(static_cast<unsigned>(servers.size()));
    unsigned at = 0;
    for (const auto& [name, server] : servers) {
      auto one = list[at++];
      write(server.facts, one.initInfo());
      one.setLastBeatMs(now - server.beatMs);
      one.setAlive(service().pool_.alive(server, now));
      one.setWarmWorkers(server.warmWorkers);
    }
    return kj::READY_NOW;
  }

  kj::Promise<void> leases(LeasesContext context) override {
    const auto now = service().now_();
    const auto& leases = service().pool_.leases();
    auto list = context.getResults().initLeases(static_cast<unsigned>(leases.size()));
    unsigned at = 0;
    for (const auto& [id, record] : leases) {
      Lease lease = record.lease;
      lease.ageMs = now - record.grantedMs;
      write(lease, list[at++], Secrets::leaveOut);
    }
    return kj::READY_NOW;
  }

 private:
  void fill(schema::DeviceState::Builder out, const ServerUse& server, const DeviceUse& device) {
    write(device.info, out.initInfo());
    out.setServer(server.name);
    out.setFreeBytes(device.info.healthy && server.unusable.empty() ? device.freeBytes : 0);
    std::vector<Id> ids;
    for (const auto& [id, record] : service().pool_.leases())
      for (const auto& leased : record.lease.devices)
        if (record.lease.server.name == server.name && leased.info.ordinal == device.info.ordinal)
          ids.push_back(id);
    auto list = out.initLeases(static_cast<unsigned>(ids.size()));
    for (unsigned i = 0; i < ids.size(); ++i) write(ids[i], list[i]);
  }

  Service& service() {
    if (tie_->service == nullptr)
      kj::throwFatalException(rpcError(kj::Exception::Type::DISCONNECTED, "the manager is shutting down"));
    return *tie_->service;
  }

  kj::Own<Tie> tie_;
};

Service::Service(kj::Timer& timer, Store& store, const PoolTimes& times, const ServiceLimits& limits,
                 std::function<uint64_t()> now)
    : timer_(timer),
      limits_(limits),
      now_(kj::mv(now)),
      pool_(store, *this, times, bootId(), now_()),
      tie_(kj::refcounted<Tie>(this)),
      tasks_(*this) {}

Service::~Service() noexcept { tie_->service = nullptr; }

void Service::serve(kj::Own<kj::ConnectionReceiver> listener, bool local) {
  tasks_.add(acceptLoop(*listener, local));
  listeners_.add(kj::mv(listener));
}

kj::Promise<void> Service::acceptLoop(kj::ConnectionReceiver& listener, bool local) {
  return listener.acceptAuthenticated().then([this, &listener, local](kj::AuthenticatedStream&& peer) {
    bool admitted = true;
    if (local && !limits_.anyUser) {
      auto* identity = dynamic_cast<kj::LocalPeerIdentity*>(peer.peerIdentity.get());
      admitted = false;
      if (identity != nullptr) {
        KJ_IF_MAYBE (uid, identity->getCredentials().uid) admitted = *uid == geteuid() || *uid == 0;
      }
    }
    if (admitted)
      accept(kj::mv(peer.stream));
    else
      GPUPOOL_WARNING("turned away a connection of another user");
    return acceptLoop(listener, local);
  });
}

void Service::accept(kj::Own<kj::AsyncIoStream> stream) {
  endWithHost(*stream);
  auto server =
      kj::heap<capnp::TwoPartyServer>(schema::Manager::Client(kj::heap<Session>(kj::addRef(*tie_))));
  auto done = server->accept(*stream);
  tasks_.add(done.attach(kj::mv(server), kj::mv(stream)));
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
    pool_.left(name, incarnation, false, now_());
  }
}

kj::Promise<void> Service::run() {
  return timer_.afterDelay(limits_.tick).then([this]() {
    try {
      pool_.tick(now_());
    } catch (const std::exception& error) {
      GPUPOOL_ERROR("housekeeping failed: %s", error.what());
    }
    return run();
  });
}

// --- PoolEvents
// --------------------------------------------------------------------------------------------------------

void Service::grant(const Lease& lease) {
  const Id id = lease.id;
  const auto control = controls_.find(lease.server.name);
  if (control == controls_.end()) return;  // left(): the lease's deadline takes it from here
  auto request = control->second.control.grantRequest();
  write(lease, request.initLease(), Secrets::include);
  tasks_.add(timer_.timeoutAfter(limits_.call, request.send().ignoreResult())
                 .then([this, id]() { pool_.granted(id, now_()); },
                       [this, id](kj::Exception&& error) {
                         const bool refused = error.getType() == kj::Exception::Type::FAILED;
                         pool_.grantFailed(id, errorText(error), refused, now_());
                       }));
}

void Service::revoke(const std::string& server, const Id& id, const std::string& reason) {
  const auto control = controls_.find(server);
  if (control == controls_.end() || !revoking_.insert(id).second) return;
  auto request = control->second.control.revokeRequest();
  write(id, request.initId());
  request.setReason(reason);
  tasks_.add(timer_.timeoutAfter(limits_.call, request.send().ignoreResult())
                 .then(
                     [this, id]() {
                       revoking_.erase(id);
                       pool_.revoked(id, now_());
                     },
                     [this, id](kj::Exception&& error) {
                       revoking_.erase(id);
                       GPUPOOL_WARNING("a server did not confirm the end of a lease: %s",
                                       errorText(error).c_str());
                       pool_.revokeFailed(id, now_());
                     }));
}

void Service::granted(const Lease& lease) {
  auto node = waiting_.extract(lease.id);
  if (node.empty()) return;
  for (auto& waiter : node.mapped()) waiter->fulfill(Lease(lease));
}

void Service::failed(const Id& id, const Failure& failure) {
  auto node = waiting_.extract(id);
  if (node.empty()) return;
  for (auto& waiter : node.mapped()) waiter->reject(rpcError(typeOf(failure.kind), failure.text));
}

void Service::ended(const Id& id) {
  auto node = ending_.extract(id);
  if (node.empty()) return;
  for (auto& waiter : node.mapped()) waiter->fulfill();
}

bool Service::wanted(const Id& id) {
  const auto at = waiting_.find(id);
  if (at == waiting_.end()) return false;
  for (auto& waiter : at->second)
    if (waiter->isWaiting()) return true;
  waiting_.erase(at);
  return false;
}

void Service::taskFailed(kj::Exception&& error) {
  if (error.getType() != kj::Exception::Type::DISCONNECTED)
    GPUPOOL_WARNING("a connection failed: %s", errorText(error).c_str());
}

}  // namespace gpupool::pool
