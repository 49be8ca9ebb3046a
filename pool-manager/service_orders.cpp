// What the pool orders and answers (PoolEvents), as calls to servers and answers to callers; and the calls
// that suspend, resume and move leases.
#include <algorithm>

#include "base/log.h"
#include "pool-manager/convert.h"
#include "pool-manager/service.h"
#include "pool-manager/service_calls.h"
#include "pool-manager/stored.h"
#include "schema/fault.h"

namespace gpupool::pool {
namespace {

constexpr uint32_t kMostDrainMs = 3'600'000;
constexpr kj::Duration kMove = 300 * kj::SECONDS;      // a server moves a lease's memory within this
constexpr kj::Duration kMigrate = 3600 * kj::SECONDS;  // and its sessions, one after the other, within this
constexpr uint64_t kUnheardMs = 30'000;  // but one that says nothing at all for so long is not waited for

kj::Exception toError(const Failure& failure) {
  if (failure.kind == Failure::Kind::otherVersion)
    return schema::faultException(schema::FaultKind::version, failure.text);
  return rpcError(typeOf(failure.kind), failure.text);
}

constexpr char kSilent[] = "it does not answer", kSuspends[] = "suspend leases", kMoves[] = "move sessions",
               kCopies[] = "write sessions into files";
constexpr kj::Duration kBetweenLooks = 100 * kj::MILLISECONDS;

kj::Exception notConnected() { return rpcError(kj::Exception::Type::DISCONNECTED, "it is not connected"); }

// Else it is unknown what became of the order.
bool isRefusal(const kj::Exception& error) { return error.getType() != kj::Exception::Type::DISCONNECTED; }

// Why an order was not carried out. what: "suspend leases".
std::string refusal(const kj::Exception& error, const char* what) {
  if (error.getType() == kj::Exception::Type::UNIMPLEMENTED)
    return std::string("it cannot ") + what + " (it runs another version of gpupool)";
  if (error.getType() == kj::Exception::Type::DISCONNECTED && errorText(error) != kSilent)
    return "lost the connection to it";
  if (errorText(error) == kSilent) return std::string(kSilent) + "; it may carry the order out when it does";
  return errorText(error);
}

}  // namespace

void Service::grant(const Lease& lease) {
  const Id id = lease.id;
  const auto control = controls_.find(lease.server.name);
  // left(): the lease's deadline takes it from here
  if (control == controls_.end() || control->second.incarnation != lease.server.incarnation) return;
  auto request = control->second.control.grantRequest();
  write(lease, request.initLease(), Secrets::include);
  const kj::TimePoint asked = timer_.now();
  tasks_.add(timer_.timeoutAfter(limits_.call, request.send().ignoreResult())
                 .then(
                     [this, id, asked]() {
                       counters_.grants.observe(timer_.now() - asked);
                       pool_.granted(id, clock_.now());
                     },
                     [this, id](kj::Exception&& error) {
                       const bool refused = error.getType() == kj::Exception::Type::FAILED;
                       pool_.grantFailed(id, errorText(error), refused, clock_.now());
                     }));
}

void Service::revoke(const ServerLife& server, const Id& id, const std::string& reason) {
  const auto control = controls_.find(server.name);
  if (control == controls_.end() || control->second.incarnation != server.incarnation) return;
  if (!revoking_.insert({server, id}).second) return;
  auto request = control->second.control.revokeRequest();
  write(id, request.initId());
  request.setReason(reason);
  tasks_.add(timer_.timeoutAfter(limits_.call, request.send().ignoreResult())
                 .then(
                     [this, server, id]() {
                       revoking_.erase({server, id});
                       pool_.revoked(server, id, clock_.now());
                     },
                     [this, server, id](kj::Exception&& error) {
                       revoking_.erase({server, id});
                       if (!pool_.isLent(id))
                         GPUPOOL_WARNING("a server did not confirm the end of a lease: %s",
                                         errorText(error).c_str());
                       pool_.revokeFailed(server, id, clock_.now());
                     }));
}

// What is not heard is told again: the standby's next beat does not say that it has done it.
void Service::keep(const ServerLife& standby, const Lease& lease) {
  const auto control = controls_.find(standby.name);
  if (control == controls_.end() || control->second.incarnation != standby.incarnation) return;
  auto request = control->second.control.keepRequest();
  write(lease, request.initLease(), Secrets::include);
  tasks_.add(timer_.timeoutAfter(limits_.call, request.send().ignoreResult())
                 .catch_([id = lease.id, name = standby.name](kj::Exception&& error) {
                   GPUPOOL_INFO("server %s does not keep the checkpoints of lease %s yet: %s", name.c_str(),
                                id.text().c_str(), errorText(error).c_str());
                 }));
}

void Service::dropKept(const ServerLife& standby, const Id& id) {
  const auto control = controls_.find(standby.name);
  if (control == controls_.end() || control->second.incarnation != standby.incarnation) return;
  auto request = control->second.control.dropKeptRequest();
  write(id, request.initId());
  tasks_.add(timer_.timeoutAfter(limits_.call, request.send().ignoreResult()).catch_([](kj::Exception&&) {}));
}

void Service::granted(const Lease& lease) { waiting_.fulfill(lease.id, lease); }
void Service::adopted(const Id& adopter, const Lease& lease) { waiting_.fulfill(adopter, lease); }
void Service::failed(const Id& id, const Failure& failure) { waiting_.reject(id, toError(failure)); }
void Service::ended(const Id& id) { ending_.fulfill(id); }
bool Service::wanted(const Id& id) { return waiting_.wanted(id); }

void Service::superseded() {
  if (superseded_.get() == nullptr) return;
  superseded_->reject(
      rpcError(kj::Exception::Type::FAILED, "another gpupool-manager has taken over this one's store"));
}

kj::Promise<void> Service::awaitHeard(const Id& id) {
  if (pool_.hasHeard(id, clock_.now())) return kj::READY_NOW;
  return timer_.afterDelay(kBetweenLooks).then([this, id] { return awaitHeard(id); });
}

// --- suspending and resuming

kj::Promise<SuspendResult> Service::suspendLease(const Principal& who, const Id& id, uint32_t drainMs,
                                                 const std::string& folder) {
  return ask(suspending_, id,
             [&](uint64_t now) { pool_.suspend(who, id, std::min(drainMs, kMostDrainMs), now, folder); });
}

kj::Promise<void> Service::resumeLease(const Principal& who, const Id& id, uint32_t waitMs,
                                       const std::string& folder, const MoveTarget& to) {
  pool_.dropUnwanted(id);  // before this one waits for an answer, too
  return ask(resuming_, id, [&](uint64_t now) { pool_.resume(who, id, waitMs, now, folder, to); });
}

kj::Promise<void> Service::failOverLease(const Principal& who, const Id& id, const ServerLife& lost,
                                         uint32_t waitMs, bool cutOff) {
  return ask(resuming_, id, [&](uint64_t now) { pool_.failOver(who, id, lost, waitMs, now, cutOff); });
}

kj::Promise<MigrateResult> Service::migrateLease(const Principal& who, const Id& id, uint32_t drainMs,
                                                 const MoveTarget& to) {
  return ask(migrating_, id,
             [&](uint64_t now) { pool_.migrate(who, id, std::min(drainMs, kMostDrainMs), to, now); });
}

kj::Promise<void> Service::storeCordon(const Principal& who, const std::string& server, bool cordoned,
                                       const Cordon& cordon) {
  Stored stored;
  guarded([&] {
    cordoned ? pool_.cordon(who, server, cordon, stored.done())
             : pool_.uncordon(who, server, stored.done(), cordon.by);
  });
  return timer_.timeoutAfter(limits_.call, kj::mv(stored.promise));
}

kj::Promise<void> Service::beginDrain(const Principal& who, const std::string& server, kj::Duration tryFor) {
  return timer_.timeoutAfter(limits_.call, drains_.begin(who, server, tryFor));
}

kj::Promise<void> Service::stopDrain(const std::string& server) {
  return timer_.timeoutAfter(limits_.call, drains_.stop(server));
}

kj::Promise<CheckpointResult> Service::checkpointLease(const Principal& who, const Id& id, uint32_t drainMs,
                                                       const std::string& folder) {
  return ask(checkpointing_, id,
             [&](uint64_t now) { pool_.checkpoint(who, id, std::min(drainMs, kMostDrainMs), folder, now); });
}

// An order that is not answered in time is told from one that was refused: it may be carried out still.
template <class T>
kj::Promise<T> Service::within(kj::Duration limit, kj::Promise<T>&& answer) {
  return answer.exclusiveJoin(timer_.afterDelay(limit).then(
      []() -> kj::Promise<T> { return rpcError(kj::Exception::Type::DISCONNECTED, kSilent); }));
}

kj::Promise<void> Service::unheard(const std::string& server) {
  const auto at = pool_.servers().find(server);
  if (at != pool_.servers().end() && clock_.now() >= at->second.beatMs + kUnheardMs) return kj::READY_NOW;
  return timer_.afterDelay(1 * kj::SECONDS).then([this, server] { return unheard(server); });
}

template <class T>
kj::Promise<T> Service::whileHeard(const std::string& server, kj::Duration limit, kj::Promise<T>&& answer) {
  return within(limit, kj::mv(answer)).exclusiveJoin(unheard(server).then([]() -> kj::Promise<T> {
    return rpcError(kj::Exception::Type::DISCONNECTED, kSilent);
  }));
}

void Service::suspend(const std::string& server, const Id& id, uint32_t drainMs, const std::string& folder,
                      uint64_t order) {
  const auto control = controls_.find(server);
  kj::Promise<SuspendResult> answer = nullptr;
  if (control == controls_.end()) {
    answer = notConnected();
  } else {
    auto request = control->second.control.suspendRequest();
    write(id, request.initId());
    request.setDrainMs(drainMs);
    request.setFolder(folder);
    answer = request.send().then([](auto&& response) { return read(response.getResult()); });
  }
  const kj::Duration limit = drainMs * kj::MILLISECONDS + (folder.empty() ? kMove : kMigrate) + limits_.call;
  tasks_.add(whileHeard(server, limit, kj::mv(answer))
                 .then([this, id, order](
                           SuspendResult&& result) { pool_.suspendDone(id, order, result, clock_.now()); },
                       [this, id, order](kj::Exception&& error) {
                         pool_.suspendFailed(id, order, refusal(error, kSuspends), clock_.now());
                       }));
}

void Service::resume(const std::string& server, const Id& id, const std::string& folder, bool running,
                     uint64_t order) {
  const auto control = controls_.find(server);
  kj::Promise<void> answer = nullptr;
  if (control == controls_.end()) {
    answer = notConnected();
  } else {
    auto request = control->second.control.resumeRequest();
    write(id, request.initId());
    request.setFolder(folder);
    request.setRunning(running);
    answer = request.send().ignoreResult();
  }
  tasks_.add(whileHeard(server, (folder.empty() ? kMove : kMigrate) + limits_.call, kj::mv(answer))
                 .then([this, id, order]() { pool_.resumeDone(id, order, clock_.now()); },
                       [this, id, order](kj::Exception&& error) {
                         pool_.resumeFailed(id, order, refusal(error, kSuspends), isRefusal(error),
                                            clock_.now());
                       }));
}

// --- moves

void Service::migrate(const std::string& server, const Id& id, uint32_t drainMs, const Lease* target,
                      uint64_t order) {
  const auto control = controls_.find(server);
  kj::Promise<MigrateResult> answer = nullptr;
  if (control == controls_.end()) {
    answer = notConnected();
  } else {
    auto request = control->second.control.migrateRequest();
    write(id, request.initId());
    request.setDrainMs(drainMs);
    if (target != nullptr) write(*target, request.initTarget(), Secrets::include);
    answer = request.send().then([](auto&& response) { return read(response.getResult()); });
  }
  const kj::Duration limit = drainMs * kj::MILLISECONDS + kMigrate + limits_.call;
  tasks_.add(whileHeard(server, limit, kj::mv(answer))
                 .then([this, id, order](
                           MigrateResult&& result) { pool_.migrateDone(id, order, result, clock_.now()); },
                       [this, id, order](kj::Exception&& error) {
                         pool_.migrateFailed(id, order, refusal(error, kMoves), isRefusal(error),
                                             clock_.now());
                       }));
}

void Service::checkpoint(const std::string& server, const Id& id, uint32_t drainMs, const std::string& folder,
                         uint64_t order) {
  const auto control = controls_.find(server);
  kj::Promise<CheckpointResult> answer = nullptr;
  if (control == controls_.end()) {
    answer = notConnected();
  } else {
    auto request = control->second.control.checkpointRequest();
    write(id, request.initId());
    request.setDrainMs(drainMs);
    request.setFolder(folder);
    answer = request.send().then([](auto&& response) { return read(response.getResult()); });
  }
  const kj::Duration limit = drainMs * kj::MILLISECONDS + kMigrate + limits_.call;
  tasks_.add(
      whileHeard(server, limit, kj::mv(answer))
          .then([this, id,
                 order](CheckpointResult&& result) { pool_.checkpointDone(id, order, result, clock_.now()); },
                [this, id, order](kj::Exception&& error) {
                  pool_.checkpointFailed(id, order, refusal(error, kCopies), clock_.now());
                }));
}

void Service::prepare(const Lease& target, bool here, uint64_t order) {
  const Id id = target.id;
  const auto control = controls_.find(target.server.name);
  kj::Promise<void> answer = nullptr;
  if (control == controls_.end()) {
    answer = notConnected();
  } else if (here) {
    auto request = control->second.control.addTargetRequest();
    write(target, request.initTarget(), Secrets::include);
    answer = request.send().ignoreResult();
  } else {
    auto request = control->second.control.grantRequest();
    write(target, request.initLease(), Secrets::include);
    answer = request.send().ignoreResult();
  }
  tasks_.add(within(limits_.call, kj::mv(answer))
                 .then([this, id, order]() { pool_.prepareDone(id, order, clock_.now()); },
                       [this, id, order](kj::Exception&& error) {
                         pool_.prepareFailed(id, order, refusal(error, kMoves), isRefusal(error),
                                             clock_.now());
                       }));
}

// How many sessions of the lease are there. One that was to arrive and did not may be there for a moment.
kj::Promise<uint32_t> Service::sessionsOf(const std::string& server, const Id& id, kj::TimePoint until) {
  const auto control = controls_.find(server);
  if (control == controls_.end()) return notConnected();
  return control->second.control.sessionsRequest().send().then(
      [this, server, id, until](auto&& response) -> kj::Promise<uint32_t> {
        uint32_t count = 0;
        for (auto session : response.getSessions())
          count += read(session.getLease()) == id && !session.getEnded();
        if (count == 0 || timer_.now() >= until) return count;
        return timer_.afterDelay(kBetweenLooks).then([this, server, id, until]() {
          return sessionsOf(server, id, until);
        });
      });
}

void Service::giveBack(const Lease& target, bool here, uint64_t order) {
  const Id id = target.id;
  const auto control = controls_.find(target.server.name);
  kj::Promise<bool> unused = nullptr;
  if (control == controls_.end()) {
    unused = notConnected();
  } else if (here) {
    auto request = control->second.control.settleRequest();
    write(id, request.initId());
    unused = request.send().then([](auto&&) -> kj::Promise<bool> { return true; },
                                 [](kj::Exception&& error) -> kj::Promise<bool> {
                                   if (isRefusal(error)) return false;
                                   return kj::mv(error);
                                 });
  } else {
    unused = sessionsOf(target.server.name, id, timer_.now() + limits_.call / 2).then([](uint32_t count) {
      return count == 0;
    });
  }
  tasks_.add(within(limits_.call, kj::mv(unused))
                 .then([this, id, order](bool is) { pool_.returned(id, order, is, clock_.now()); },
                       [this, id, order](kj::Exception&& error) {
                         pool_.returnFailed(id, order, refusal(error, kMoves), clock_.now());
                       }));
}

void Service::settle(const std::string& server, const Id& id, uint64_t order) {
  const auto control = controls_.find(server);
  kj::Promise<void> answer = nullptr;
  if (control == controls_.end()) {
    answer = notConnected();
  } else {
    auto request = control->second.control.settleRequest();
    write(id, request.initId());
    request.setMoved(true);
    answer = request.send().ignoreResult();
  }
  tasks_.add(within(limits_.call, kj::mv(answer))
                 .then([this, id, order]() { pool_.settled(id, order, clock_.now()); },
                       [this, id, order](kj::Exception&& error) {
                         GPUPOOL_WARNING("a server did not confirm that a lease has left its devices: %s",
                                         errorText(error).c_str());
                         pool_.settleFailed(id, order, clock_.now());
                       }));
}

void Service::suspended(const Id& id, const SuspendResult& result) { suspending_.fulfill(id, result); }
void Service::notSuspended(const Id& id, const Failure& failure) { suspending_.reject(id, toError(failure)); }
void Service::resumed(const Id& id) { resuming_.fulfill(id); }
void Service::notResumed(const Id& id, const Failure& failure) { resuming_.reject(id, toError(failure)); }
void Service::migrated(const Id& id, const MigrateResult& result) { migrating_.fulfill(id, result); }
void Service::notMigrated(const Id& id, const Failure& failure) { migrating_.reject(id, toError(failure)); }
void Service::checkpointed(const Id& id, const CheckpointResult& result) {
  checkpointing_.fulfill(id, result);
}
void Service::notCheckpointed(const Id& id, const Failure& failure) {
  checkpointing_.reject(id, toError(failure));
}
bool Service::resumeWanted(const Id& id) { return resuming_.wanted(id); }

}  // namespace gpupool::pool
