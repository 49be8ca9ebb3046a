// How a holder has its lease: it asks a manager for it, renews it, tells its end, and gives it back.
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/options.h"
#include "base/transport_names.h"
#include "pool-manager/cli/holder.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/convert.h"
#include "schema/fault.h"

namespace gpupool::cli {
namespace {

using holder::Status;

// A lease is renewed three times in its time; after a failure the next attempt follows sooner.
constexpr unsigned kUsual = 3, kSoon = 12;
// The end of a time limit is told a tenth of it ahead, and not earlier than this.
constexpr uint64_t kMostAheadMs = 300'000;

constexpr std::string_view kEnded = "the lease has ended: ";

// Says something of the lease. A token that has ended says only that another one has to be shown.
bool isAnswer(const kj::Exception& error) {
  const schema::Fault fault = schema::faultOf(error);
  return fault.remote && fault.kind != schema::FaultKind::token;
}

// Of what the manager says is missing: others have it, so that a part of it may be free.
bool isTaken(const std::string& missing) {
  for (const char* words : {" is held by ", " is in use", " may have "})
    if (missing.find(words) != std::string::npos) return true;
  return false;
}

}  // namespace

kj::Promise<void> Holder::connect(size_t at, const std::string& tried) {
  if (connection_.get() != nullptr) return kj::READY_NOW;
  if (at == settings_.addresses.size()) {
    kj::throwFatalException(toException({Status::noManager, noManagerText(settings_.addresses, tried)}));
  }
  return pool::connectManager(io_, settings_.addresses[at], settings_.connectLimit, settings_.credentials)
      .then(
          [this](kj::Own<pool::ManagerConnection> connection) -> kj::Promise<void> {
            connection_ = kj::mv(connection);
            return kj::READY_NOW;
          },
          [this, at, tried](kj::Exception&& error) {
            const schema::Fault fault = schema::faultOf(error);
            if (fault.kind == schema::FaultKind::version)
              kj::throwFatalException(toException({Status::mismatch, fault.text}));
            if (fault.kind == schema::FaultKind::token)
              kj::throwFatalException(toException({Status::refused, fault.text}));
            return connect(at + 1, tried + (tried.empty() ? "" : "; ") + pool::errorText(error));
          });
}

schema::Manager::Client Holder::manager() {
  if (connection_.get() == nullptr)
    kj::throwFatalException(KJ_EXCEPTION(DISCONNECTED, "the connection to the manager was lost"));
  return connection_->manager();
}

// For a manager that was there a moment ago.
kj::Promise<void> Holder::connectPatiently(int attempts) {
  return connect(0, "").catch_([this, attempts](kj::Exception&& error) -> kj::Promise<void> {
    if (attempts <= 1) return kj::mv(error);
    return io_.getTimer().afterDelay(500 * kj::MILLISECONDS).then([this, attempts]() {
      return connectPatiently(attempts - 1);
    });
  });
}

kj::Promise<void> Holder::requestLease(int attempts) {
  asked_ = true;
  const auto limit = (settings_.request.waitMs + 15'000) * kj::MILLISECONDS;
  auto asked = kj::evalNow([this] {
                 auto request = manager().leaseRequest();
                 pool::write(settings_.request, request.initRequest());
                 return kj::Promise<capnp::Response<schema::Manager::LeaseResults>>(request.send());
               }).attach(tellAwaited());
  return io_.getTimer()
      .timeoutAfter(limit, kj::mv(asked))
      .then(
          [this](capnp::Response<schema::Manager::LeaseResults>&& response) -> kj::Promise<void> {
            lease_ = pool::read(response.getLease());
            tasks_.add(renewLoop(kUsual));
            if (lease_->endsInMs != 0) tasks_.add(announceEnd());
            tellUnprotected();
            if (!lease_->terms.holderKeeps) keeper_.reset();
            if (keeper_) tasks_.add(keepLoop());
            return kj::READY_NOW;
          },
          [this, attempts](kj::Exception&& error) -> kj::Promise<void> {
            using Type = kj::Exception::Type;
            const schema::Fault fault = schema::faultOf(error);
            const bool answered = fault.remote;
            if (error.getType() == Type::DISCONNECTED && attempts > 1) {
              // A server that failed us: another lease. A manager that died: the same request once more.
              if (answered) settings_.request.id = Id::random();
              if (!answered) connection_ = nullptr;
              return io_.getTimer()
                  .afterDelay(500 * kj::MILLISECONDS)
                  .then([this]() { return connectPatiently(20); })
                  .then([this, attempts]() { return requestLease(attempts - 1); });
            }
            const Status status = !answered                                  ? Status::noManager
                                  : fault.kind == schema::FaultKind::version ? Status::mismatch
                                  : error.getType() == Type::OVERLOADED      ? Status::noDevice
                                  : error.getType() == Type::UNIMPLEMENTED   ? Status::nothingFits
                                  : error.getType() == Type::DISCONNECTED    ? Status::serverLost
                                                                             : Status::refused;
            const std::string text = pool::errorText(error);
            const std::string wait =
                settings_.request.waitMs == 0
                    ? "; wait with --wait TIME (GPUPOOL_WAIT)"
                    : "; nothing came within --wait " +
                          options::formatTime(std::chrono::milliseconds(settings_.request.waitMs)) +
                          ": wait longer";
            const bool sharing = settings_.request.memoryBytes == 0 && isTaken(text);
            const std::string remedy =
                status == Status::noDevice
                    ? wait + (sharing ? ", share with --memory SIZE, or" : ", or") + " see `gpupool leases`"
                : status == Status::nothingFits ? "; see `gpupool devices` for what there is"
                : status == Status::noManager   ? "; the pool manager went away: start the program again"
                : status == Status::serverLost  ? "; see `gpupool servers`, and start the program again"
                                                : "";
            kj::throwFatalException(toException({status, text + remedy}));
          });
}

kj::Promise<void> Holder::tellAwaited() {
  if (settings_.request.waitMs == 0 || adopts() || toldAwaited_) return kj::READY_NOW;
  return io_.getTimer()
      .afterDelay(settings_.awaitedPause)
      .then([this] {
        auto request = manager().explainRequest();
        pool::write(settings_.request, request.initRequest());
        return request.send();
      })
      .then([this](capnp::Response<schema::Manager::ExplainResults>&& response) {
        const pool::Explanation answer = pool::read(response.getExplanation());
        if (answer.outlook == pool::Outlook::now || answer.outlook == pool::Outlook::never) return;
        if (std::exchange(toldAwaited_, true)) return;
        onNews_("waiting (--wait " +
                options::formatTime(std::chrono::milliseconds(settings_.request.waitMs)) +
                "): " + answer.text);
      })
      .eagerlyEvaluate([](kj::Exception&& error) {
        GPUPOOL_INFO("what is waited for is not known: %s", pool::errorText(error).c_str());
      });
}

void Holder::tellUnprotected() {
  if (!isProtected()) return;
  const TransportFacts* chosen = findTransport(settings_.transport);
  if (chosen != nullptr && chosen->reach == TransportFacts::Reach::sameHost)
    onNews_("the lease is not protected: over --transport " + settings_.transport +
            " its programs share memory with their workers; leave it out, or use --transport " +
            std::string(transportWith(TransportFacts::Reach::anyHost).name));
  else if (settings_.transport.empty() && !takesNetwork(lease_->server))
    onNews_("the lease is not protected: server " + lease_->server.name + " takes no network sessions");
}

kj::Exception Holder::endedNow() const {
  return toException({Status::leaseEnded, std::string(kEnded) + lost_ + "; " + settings_.again});
}

bool Holder::saysEnded(const kj::Exception& error) { return pool::errorText(error).starts_with(kEnded); }

kj::Promise<void> Holder::acquire() {
  if (!lost_.empty()) return endedNow();
  if (lease_) return kj::READY_NOW;
  KJ_IF_MAYBE (already, acquiring_) return already->addBranch();
  auto fork = connect(0, "").then([this]() { return requestLease(4); }).fork();
  auto branch = fork.addBranch().then([this]() { acquiring_ = nullptr; },
                                      [this](kj::Exception&& error) {
                                        acquiring_ = nullptr;
                                        settings_.request.id =
                                            Id::random();  // the manager may remember that the old one failed
                                        kj::throwFatalException(kj::mv(error));
                                      });
  acquiring_ = kj::mv(fork);
  return branch;
}

kj::Promise<void> Holder::announceEnd() {
  const uint64_t limit = settings_.request.limitMs, left = lease_->endsInMs;
  // A claim's limit is not this request's: what is left of it counts.
  const uint64_t ahead = std::min({(adopts() ? left : limit) / 10, kMostAheadMs, left});
  const std::string named =
      adopts() ? "" : " (--time " + options::formatTime(std::chrono::milliseconds(limit)) + ")";
  const std::string text = "the lease ends in " + options::formatTime(std::chrono::milliseconds(ahead)) +
                           ": its time limit" + named + " is over then";
  return io_.getTimer().afterDelay((left - ahead) * kj::MILLISECONDS).then([this, text, id = lease_->id]() {
    if (lease_ && lease_->id == id) onNews_(text);
  });
}

// Of who keeps the checkpoints now.
void Holder::noteStandby(schema::Manager::RenewResults::Reader renewed) {
  if (!lease_ || !lease_->terms.standbyKeeps) return;
  const auto before = std::exchange(lease_->standby, std::nullopt);
  if (renewed.hasStandby()) lease_->standby = pool::read(renewed.getStandby());
  if (before && (!lease_->standby || lease_->standby->name != before->name)) formerStandby_ = before;
  if (lease_->standby.has_value() != before.has_value() && keepAnew_.get() != nullptr) keepAnew_->fulfill();
}

kj::Promise<void> Holder::renewOnce() {
  auto renewed = connect(0, "").then([this]() {
    auto request = manager().renewRequest();
    pool::write(lease_ ? lease_->id : Id{}, request.initId());
    const pool::LeaseRequest& asked = settings_.request;
    if (adopts()) pool::write(pool::Adopter{asked.id, asked.holder, asked.ttlMs}, request.initAdopter());
    auto clients = request.initClients(static_cast<unsigned>(clients_.size()));
    for (unsigned i = 0; i < clients.size(); ++i) pool::write(clients_[i], clients[i]);
    return request.send().then([this](auto&& renewed) {
      noteStandby(renewed);
      if (renewed.getNotice().size() == 0) noticed_ = false;
      if (renewed.getNotice().size() == 0 || std::exchange(noticed_, true)) return;
      const std::chrono::milliseconds left(renewed.getEndsInMs());
      onNews_("the lease ends in " + options::formatTime(left) + ": " + pool::text(renewed.getNotice()));
    });
  });
  // Several attempts must fit into the lease's time.
  const auto limit =
      kj::min(settings_.connectLimit, kj::max(1 * kj::SECONDS, lease_->ttlMs / 6 * kj::MILLISECONDS));
  return io_.getTimer().timeoutAfter(limit, kj::mv(renewed));
}

bool Holder::noteEnd(const kj::Exception& error) {
  if (!isAnswer(error) || error.getType() != kj::Exception::Type::FAILED) return false;
  if (!lease_) return true;
  lost_ = pool::errorText(error);
  if (lost_.starts_with(kEnded)) lost_.erase(0, kEnded.size());
  lease_.reset();
  onLost_(lost_, opened_);
  return true;
}

kj::Promise<void> Holder::renewLoop(unsigned partsOfTtl) {
  return io_.getTimer()
      .afterDelay(lease_->ttlMs / partsOfTtl * kj::MILLISECONDS)
      .then([this]() -> kj::Promise<void> {
        if (!lease_) return kj::READY_NOW;
        return renewOnce();
      })
      .then(
          [this]() {
            refused_ = false;
            return kUsual;
          },
          [this](kj::Exception&& error) {
            if (!lease_ || noteEnd(error)) return kUsual;
            // Its token has ended, say. Only another one helps, and its file is read again each time.
            if (const OpenFailure failure = toFailure(error);
                failure.status == Status::refused && !std::exchange(refused_, true))
              onNews_("the lease is not renewed, and ends within " +
                      options::formatTime(std::chrono::milliseconds(lease_->ttlMs)) + ": " + failure.text);
            // The manager is away; sessions do not need it. Try again soon, on a new connection.
            connection_ = nullptr;
            GPUPOOL_INFO("the manager is not reachable: %s", pool::errorText(error).c_str());
            return kSoon;
          })
      .then([this](unsigned parts) { return lease_ ? renewLoop(parts) : kj::Promise<void>(kj::READY_NOW); });
}

kj::Promise<void> Holder::release() {
  acquiring_ = nullptr;
  if (!asked_ || !lost_.empty()) return kj::READY_NOW;
  const Id id = lease_ && !adopts() ? lease_->id : settings_.request.id;
  const uint64_t ttlMs = lease_ ? lease_->ttlMs : settings_.request.ttlMs;
  lease_.reset();
  asked_ = false;
  return releaseLoop(id, io_.getTimer().now() + ttlMs * kj::MILLISECONDS);
}

kj::Promise<void> Holder::releaseOnce(Id id) {
  auto done = connect(0, "").then([this, id]() {
    auto request = manager().releaseRequest();
    if (adopts()) {  // the claim goes on without this one
      request.setClaim(settings_.request.adopts);
      request.setTenant(settings_.request.tenant);
      pool::write(id, request.initAdopter());
    } else {
      pool::write(id, request.initId());
    }
    return request.send().ignoreResult();
  });
  return io_.getTimer().timeoutAfter(settings_.releaseLimit, kj::mv(done));
}

kj::Promise<void> Holder::releaseLoop(Id id, kj::TimePoint until) {
  return releaseOnce(id).catch_([this, id, until](kj::Exception&& error) -> kj::Promise<void> {
    connection_ = nullptr;
    if (isAnswer(error) && error.getType() != kj::Exception::Type::DISCONNECTED) return kj::READY_NOW;
    if (io_.getTimer().now() >= until) {
      GPUPOOL_INFO("the lease could not be given back, it will expire: %s", pool::errorText(error).c_str());
      return kj::READY_NOW;
    }
    return io_.getTimer().afterDelay(settings_.releasePause).then([this, id, until]() {
      return releaseLoop(id, until);
    });
  });
}

}  // namespace gpupool::cli
