#include "fake_server.h"

#include <capnp/serialize-async.h>

#include <utility>

#include "pool-manager/convert.h"
#include "schema/handshake.h"
#include "schema/protocol.h"
#include "schema/session.capnp.h"

namespace gpupool::test {
namespace {

std::span<const std::byte> view(const std::string& text) { return std::as_bytes(std::span(text)); }

}  // namespace

class FakeServer::Control final : public schema::ServerControl::Server {
 public:
  explicit Control(FakeServer& server) : server_(server) {}

 protected:
  kj::Promise<void> grant(GrantContext context) override {
    if (!server_.refuseGrants.empty())
      kj::throwFatalException(pool::rpcError(kj::Exception::Type::FAILED, server_.refuseGrants));
    const auto lease = pool::read(context.getParams().getLease());
    server_.leases[lease.id] = lease;
    server_.terms.push_back(lease.terms);
    return server_.speaks(server_.muteGrants);
  }
  kj::Promise<void> revoke(RevokeContext context) override {
    server_.revokeReasons.push_back(pool::text(context.getParams().getReason()));
    if (server_.muteRevokes) return kj::NEVER_DONE;
    server_.leases.erase(pool::read(context.getParams().getId()));
    server_.suspended.erase(pool::read(context.getParams().getId()));
    return kj::READY_NOW;
  }
  kj::Promise<void> suspend(SuspendContext context) override {
    if (server_.oldServer) return schema::ServerControl::Server::suspend(context);
    if (!server_.refuseSuspend.empty())
      kj::throwFatalException(pool::rpcError(kj::Exception::Type::FAILED, server_.refuseSuspend));
    if (server_.muteSuspend) return kj::NEVER_DONE;
    const Id id = pool::read(context.getParams().getId());
    server_.drains.push_back(context.getParams().getDrainMs());
    auto& kept = server_.suspended[id];
    kept.assign(server_.leases.at(id).devices.size(), uint64_t{16} << 20);
    pool::write(pool::SuspendResult{kept, uint64_t{3} << 30, 7, 9}, context.getResults().initResult());
    return kj::READY_NOW;
  }
  kj::Promise<void> resume(ResumeContext context) override {
    if (server_.oldServer) return schema::ServerControl::Server::resume(context);
    if (!server_.refuseResume.empty())
      kj::throwFatalException(pool::rpcError(kj::Exception::Type::FAILED, server_.refuseResume));
    server_.suspended.erase(pool::read(context.getParams().getId()));
    return kj::READY_NOW;
  }

  kj::Promise<void> migrate(MigrateContext context) override {
    if (server_.oldServer) return schema::ServerControl::Server::migrate(context);
    server_.migrations.push_back(context.getParams().getDrainMs());
    if (context.getParams().hasTarget())
      server_.movedTo.push_back(pool::read(context.getParams().getTarget()));
    if (!server_.refuseMigrate.empty())
      kj::throwFatalException(pool::rpcError(kj::Exception::Type::FAILED, server_.refuseMigrate));
    if (server_.muteMigrate) return kj::NEVER_DONE;
    pool::write(pool::MigrateResult{2, uint64_t{3} << 30, 700}, context.getResults().initResult());
    return kj::READY_NOW;
  }
  kj::Promise<void> checkpoint(CheckpointContext context) override {
    if (server_.oldServer) return schema::ServerControl::Server::checkpoint(context);
    server_.checkpoints.push_back(pool::text(context.getParams().getFolder()));
    server_.drains.push_back(context.getParams().getDrainMs());
    if (!server_.refuseCheckpoint.empty())
      kj::throwFatalException(pool::rpcError(kj::Exception::Type::FAILED, server_.refuseCheckpoint));
    pool::write(pool::CheckpointResult{2, uint64_t{3} << 30, 700, "/srv/" + server_.checkpoints.back(), ""},
                context.getResults().initResult());
    return kj::READY_NOW;
  }
  kj::Promise<void> addTarget(AddTargetContext context) override {
    if (!server_.refuseTargets.empty())
      kj::throwFatalException(pool::rpcError(kj::Exception::Type::FAILED, server_.refuseTargets));
    const auto target = pool::read(context.getParams().getTarget());
    server_.targets[target.id] = target;
    return kj::READY_NOW;
  }
  kj::Promise<void> settle(SettleContext context) override {
    const Id id = pool::read(context.getParams().getId());
    const bool moved = context.getParams().getMoved();
    server_.settles.push_back(moved);
    if (!moved && !server_.refuseSettle.empty())
      kj::throwFatalException(pool::rpcError(kj::Exception::Type::FAILED, server_.refuseSettle));
    const auto target = server_.targets.extract(id);
    if (moved && !target.empty()) server_.leases[id] = target.mapped();
    return kj::READY_NOW;
  }
  kj::Promise<void> sessions(SessionsContext context) override {
    ++server_.asked;
    auto list = context.getResults().initSessions(static_cast<unsigned>(server_.living.size()));
    for (unsigned i = 0; i < list.size(); ++i) {
      pool::write(server_.living[i], list[i].initLease());
      list[i].setEnded(server_.livingEnded);
    }
    return kj::READY_NOW;
  }

 private:
  FakeServer& server_;
};

FakeServer::FakeServer(kj::AsyncIoContext& io, std::string name, uint32_t devices,
                       const std::string& socketPath)
    : io_(io),
      membership_(kj::heap<kj::TaskSet>(static_cast<kj::TaskSet::ErrorHandler&>(*this))),
      tasks_(*this) {
  facts.name = std::move(name);
  facts.incarnation = Id::random();
  facts.localPath = socketPath;
  facts.port = 4790;  // leases may move to it
  facts.bootId = pool::bootId();
  facts.rowsHash = rowsHash;
  for (uint32_t i = 0; i < devices; ++i) {
    Device device;
    device.uuid = (facts.name + std::string(16, '.')).substr(0, 15) + static_cast<char>('a' + i);
    device.name = "Fake GPU";
    device.memoryBytes = uint64_t{8} << 30;
    device.ordinal = i;
    device.software = true;
    facts.devices.push_back(device);
  }
  auto address = io.provider->getNetwork().parseAddress(("unix:" + socketPath).c_str()).wait(io.waitScope);
  listener_ = address->listen();
  tasks_.add(accept());
}

void FakeServer::join(const std::string& address) { membership_->add(membership(address)); }

void FakeServer::disconnect() {
  membership_ = kj::heap<kj::TaskSet>(static_cast<kj::TaskSet::ErrorHandler&>(*this));
  connection_ = nullptr;
  isJoined_ = false;
}

kj::Promise<void> FakeServer::leave() {
  auto request = connection_->manager().leaveRequest();
  request.setName(facts.name);
  pool::write(facts.incarnation, request.initIncarnation());
  return request.send().ignoreResult().then([this] {
    leases.clear();
    suspended.clear();
    disconnect();
  });
}

kj::Promise<void> FakeServer::membership(const std::string& address) {
  return pool::connectManager(*io_.provider, address, 2 * kj::SECONDS, [this] { return credentials; })
      .then([this](kj::Own<pool::ManagerConnection> connection) {
        connection_ = kj::mv(connection);
        auto request = connection_->manager().joinRequest();
        pool::write(facts, request.initInfo());
        fabric::write(fabric, request.getInfo().initFabric());
        auto told = request.initReports(static_cast<unsigned>(reports.size()));
        for (unsigned i = 0; i < told.size(); ++i) {
          told[i].setHighestEpoch(reports[i].highestEpoch);
          auto running = told[i].initRunning(static_cast<unsigned>(reports[i].running.size()));
          for (unsigned k = 0; k < running.size(); ++k) pool::write(reports[i].running[k], running[k]);
        }
        request.setControl(kj::heap<Control>(*this));
        return request.send().ignoreResult();
      })
      .then([this]() { return beatNow(); })
      .then([this]() {
        isJoined_ = true;
        return beats().exclusiveJoin(connection_->onDisconnect());
      })
      .catch_([](kj::Exception&&) {})
      .then([this, address]() {
        isJoined_ = false;
        connection_ = nullptr;
        return io_.provider->getTimer().afterDelay(50 * kj::MILLISECONDS);
      })
      .then([this, address]() { return membership(address); });
}

kj::Promise<void> FakeServer::joined() {
  if (isJoined_) return kj::READY_NOW;
  return io_.provider->getTimer().afterDelay(5 * kj::MILLISECONDS).then([this]() { return joined(); });
}

kj::Promise<void> FakeServer::beatNow() {
  auto request = connection_->manager().beatRequest();
  request.setName(facts.name);
  pool::write(facts.incarnation, request.initIncarnation());
  auto list = request.initActiveLeases(static_cast<unsigned>(leases.size()));
  unsigned at = 0;
  for (const auto& [id, lease] : leases) pool::write(id, list[at++]);
  auto told = request.initSuspended(static_cast<unsigned>(suspended.size()));
  at = 0;
  for (const auto& [id, kept] : suspended) pool::write(pool::SuspendedLease{id, kept}, told[at++]);
  auto taken = request.initTurns(static_cast<unsigned>(turns.size()));
  for (unsigned i = 0; i < taken.size(); ++i) pool::write(turns[i], taken[i]);
  auto hindered = request.initHindrances(static_cast<unsigned>(hindrances.size()));
  for (unsigned i = 0; i < hindered.size(); ++i) pool::write(hindrances[i], hindered[i]);
  request.setWarmWorkers(1);
  if (std::exchange(tellFabric, false)) fabric::write(fabric, request.initFabric());
  return request.send().then([](auto&& response) {
    const bool known = response.getKnown();
    KJ_REQUIRE(known);
  });
}

kj::Promise<void> FakeServer::beats() {
  return io_.provider->getTimer()
      .afterDelay(100 * kj::MILLISECONDS)
      .then([this]() { return muteBeats ? kj::Promise<void>(kj::READY_NOW) : beatNow(); })
      .then([this]() { return beats(); });
}

kj::Promise<void> FakeServer::accept() {
  return listener_->accept().then([this](kj::Own<kj::AsyncIoStream> stream) {
    auto& served = *stream;
    tasks_.add(session(served).attach(kj::mv(stream)));
    return accept();
  });
}

kj::Promise<void> FakeServer::speaks(const bool& mute) {
  if (!mute) return kj::READY_NOW;
  return io_.provider->getTimer().afterDelay(5 * kj::MILLISECONDS).then([this, &mute] {
    return speaks(mute);
  });
}

kj::Promise<void> FakeServer::session(kj::AsyncIoStream& stream) {
  struct Exchange {
    schema::HandshakeFacts facts;
    std::string clientNonce, serverNonce = std::string(32, 's'), key;
    capnp::MallocMessageBuilder challenge, answer;
    char byte = 0;
  };
  auto owned = kj::heap<Exchange>();
  Exchange& exchange = *owned;
  return speaks(muteSessions)
      .then([&stream] { return capnp::readMessage(stream); })
      .then([this, &stream, &exchange](kj::Own<capnp::MessageReader> message) {
        const auto hello = message->getRoot<schema::SessionHello>();
        auto out = exchange.challenge.initRoot<schema::SessionChallenge>();
        const auto lease = leases.find(pool::read(hello.getLease()));
        if (hello.getRowsHash() != rowsHash) {
          out.setError("rows differ");
          out.setOtherVersion(true);
        }
        if (!refuseSessions.empty()) {
          out.setError(refuseSessions);
          out.setProtocol(schema::poolProtocol());
          out.setRowsHash(rowsHash);
        }
        if (lease == leases.end()) {
          out.setError("unknown lease");
          out.setUnknownLease(true);
          out.setProtocol(schema::poolProtocol());
          out.setRowsHash(rowsHash);
        }
        exchange.key = lease == leases.end() || forgeProof ? std::string(32, 'x') : lease->second.key;
        exchange.clientNonce = pool::bytes(hello.getClientNonce());
        exchange.facts = {pool::read(hello.getSession()), hello.getEpoch(), view(exchange.clientNonce),
                          view(exchange.serverNonce), facts.name};
        const Digest proof = schema::handshakeProof(view(exchange.key), schema::kRoleServer, exchange.facts);
        out.setServerNonce(pool::data(exchange.serverNonce));
        out.setProof(kj::arrayPtr(reinterpret_cast<const kj::byte*>(proof.data()), proof.size()));
        return capnp::writeMessage(stream, exchange.challenge);
      })
      .then([this, &stream]() -> kj::Promise<kj::Own<capnp::MessageReader>> {
        if (cutsOff == 0) return capnp::readMessage(stream);
        --cutsOff;
        return KJ_EXCEPTION(DISCONNECTED, "cut off");
      })
      .then([this, &stream, &exchange](kj::Own<capnp::MessageReader> message) {
        const std::string proof = pool::bytes(message->getRoot<schema::SessionProof>().getProof());
        const Digest expected =
            schema::handshakeProof(view(exchange.key), schema::kRoleHolder, exchange.facts);
        auto out = exchange.answer.initRoot<schema::SessionAnswer>();
        out.setOk(equalConstantTime(expected, view(proof)));
        if (!out.getOk()) out.setError("wrong proof");
        if (out.getOk() && sessionsSuspended) {
          ++toldSuspended;
          out.setOk(false);
          out.setSuspended(true);
          out.setError("the lease is suspended");
        }
        if (out.getOk()) {
          ++sessions;
          lastSession = exchange.facts.session;
          lastEpoch = exchange.facts.epoch;
        }
        return capnp::writeMessage(stream, exchange.answer);
      })
      .then([&stream, &exchange]() { return stream.read(&exchange.byte, 1); })
      .then([&stream]() { return stream.write("hello", 5); })
      .attach(kj::mv(owned));
}

}  // namespace gpupool::test
