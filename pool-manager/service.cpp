#include "pool-manager/service.h"

#include <capnp/rpc-twoparty.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "base/log.h"
#include "pool-manager/call_limit.h"
#include "pool-manager/convert.h"
#include "pool-manager/patient_stream.h"
#include "pool-manager/rpc.h"
#include "pool-manager/service_calls.h"
#include "pool-manager/service_session.h"
#include "schema/manager_login.h"
#include "schema/protocol.h"

namespace gpupool::pool {
namespace {

constexpr uint32_t kDrainMs =
    30'000;  // of a server that is drained: what runs on its devices has so long to finish
constexpr kj::Duration kLastWords = 100 * kj::MILLISECONDS, kLookAtMissed = 10 * kj::SECONDS;

constexpr size_t kMostUnfinished = 256;                           // calls of one connection
constexpr uint64_t kMostWords = (1 << 20) / sizeof(capnp::word);  // of a message, and of calls under way

// Failures are counted by address: a port is as good as the next one.
std::string withoutPort(std::string address) {
  if (const size_t colon = address.rfind(':'); colon != std::string::npos) address.erase(colon);
  return address;
}

}  // namespace

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
      drains_(
          timer, pool_,
          [this](const Principal& who, const Id& lease) {
            return migrateLease(who, lease, kDrainMs, {"", {}, true});
          },
          pool::calendarMs),
      tasks_(*this) {
  tokens_.load(store.range(kTokenPrefix));
  drains_.load(store.range(kDrainPrefix));
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
void Service::refuseVersion(const schema::ProtocolRange& theirs) {
  constexpr size_t kMostVersions = 16;
  const std::string text = schema::loginMismatch(schema::ownProtocols(), theirs);
  if (otherVersions_.size() < kMostVersions && otherVersions_.insert(theirs.latest).second)
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
  const kj::TimePoint due = timer_.now() + limits_.tick;
  return timer_.atTime(due).then([this, due]() {
    counters_.delays.observe(timer_.now() - due);
    try {
      pool_.tick(clock_.now());
      if (due > missedSeenAt_ + kLookAtMissed) {
        missedSeenAt_ = due;
        std::erase_if(counters_.missedBeats,
                      [&](const auto& one) { return !pool_.servers().contains(one.first); });
      }
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
