#include "server/front/admission.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "base/log.h"

namespace gpupool::server {
namespace {

std::span<const std::byte> bytes(capnp::Data::Reader data) {
  return {reinterpret_cast<const std::byte*>(data.begin()), data.size()};
}

capnp::Data::Reader asData(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()};
}

capnp::ReaderOptions handshakeLimits() {
  capnp::ReaderOptions options;
  options.traversalLimitInWords = Admission::kMaxWords;
  options.nestingLimit = 4;
  return options;
}

constexpr size_t kCommandBytes = 256;  // shown to people, kept for every session

std::string hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

struct Admission::Attempt {
  kj::Own<kj::AsyncIoStream> stream;
  std::string peer;
  SessionFacts facts;
  std::string transport;
  std::string clientNonce;
  std::byte serverNonce[schema::kNonceBytes];
  std::vector<std::byte> key;
  std::vector<int> ordinals;  // the driver's, of the lease's devices
  int workersLost = 0;
  bool hostile = false;  // counted against the peer

  schema::HandshakeFacts handshake(const std::string& server) const {
    return {facts.session.high, facts.session.low,
            facts.epoch,        std::as_bytes(std::span(clientNonce)),
            serverNonce,        server};
  }
};

Admission::Admission(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, WorkerPool& pool,
                     Settings settings)
    : timer_(timer),
      leases_(leases),
      sessions_(sessions),
      pool_(pool),
      settings_(std::move(settings)),
      limit_(settings_.failureBurst, settings_.failureInterval),
      tasks_(*this) {}

Admission::~Admission() = default;

void Admission::admit(kj::Own<kj::AsyncIoStream> stream, std::string peer) {
  auto attempt = kj::heap<Attempt>();
  attempt->stream = kj::mv(stream);
  attempt->peer = std::move(peer);
  if (underWay_ >= settings_.atOnce) {
    GPUPOOL_WARNING("session refused: %zu handshakes are under way already (%s)", underWay_,
                    attempt->peer.c_str());
    return;  // closes
  }
  ++underWay_;
  kj::Promise<void> done = nullptr;
  if (stopped_) {
    done = refuseChallenge(*attempt, "the server is shutting down");
  } else if (!limit_.allowed(attempt->peer, FailureLimit::Clock::now())) {
    done = refuseChallenge(*attempt, "too many failed attempts from " + attempt->peer + "; wait a while");
  } else {
    done = readHello(*attempt);
  }
  Attempt& kept = *attempt;
  tasks_.add(done.catch_([this, &kept](kj::Exception&& exception) {
                   const bool late = exception.getType() == kj::Exception::Type::OVERLOADED;
                   if (exception.getType() != kj::Exception::Type::DISCONNECTED) kept.hostile = true;
                   GPUPOOL_WARNING("session from %s: handshake failed: %s", kept.peer.c_str(),
                                   late ? "the peer was too slow" : exception.getDescription().cStr());
                 })
                 .then([this, attempt = kj::mv(attempt)]() mutable {
                   --underWay_;
                   if (attempt->hostile) limit_.failed(attempt->peer, FailureLimit::Clock::now());
                 }));
}

kj::Promise<void> Admission::readHello(Attempt& attempt) {
  return timer_.timeoutAfter(settings_.messageBound, capnp::readMessage(*attempt.stream, handshakeLimits()))
      .then([this, &attempt](kj::Own<capnp::MessageReader> message) {
        return challenge(attempt, message->getRoot<schema::SessionHello>());
      });
}

std::string Admission::judge(schema::SessionHello::Reader hello) {
  if (hello.getProtocol() != settings_.protocol)
    return "version mismatch: protocol " + std::to_string(hello.getProtocol()) + " here, " +
           std::to_string(settings_.protocol) + " on the server; install the same gpupool on both";
  if (hello.getRowsHash() != settings_.rowsHash)
    return "version mismatch: call rows " + hex(hello.getRowsHash()) + " here, " + hex(settings_.rowsHash) +
           " on the server; install the same gpupool on both";
  if (hello.getClientNonce().size() != schema::kNonceBytes)
    return "malformed hello: the nonce is not 32 bytes";
  if (hello.getTransport() != "shm" && hello.getTransport() != "ucx")
    return "unknown transport; this server has shm and ucx";
  const Id id = Id::read(hello.getLease());
  Grant* grant = leases_.admissible(id);
  if (grant == nullptr) return "lease " + id.text() + " is not known on server " + settings_.server;
  const auto last = grant->sessionEpochs.find(Id::read(hello.getSession()));
  if (last != grant->sessionEpochs.end() && hello.getEpoch() <= last->second)
    return "this session was opened before with epoch " + std::to_string(last->second);
  if (sessions_.living(id) >= settings_.sessionsPerLease)
    return "the lease has " + std::to_string(settings_.sessionsPerLease) + " sessions already";
  return "";
}

kj::Promise<void> Admission::challenge(Attempt& attempt, schema::SessionHello::Reader hello) {
  const std::string why = judge(hello);
  if (!why.empty()) {
    attempt.hostile = true;
    return refuseChallenge(attempt, why);
  }
  attempt.facts = {Id::read(hello.getSession()), Id::read(hello.getLease()), hello.getEpoch(), hello.getPid(),
                   std::string(hello.getCommand().cStr()).substr(0, kCommandBytes)};
  attempt.transport = hello.getTransport().cStr();
  attempt.clientNonce.assign(reinterpret_cast<const char*>(hello.getClientNonce().begin()),
                             schema::kNonceBytes);
  const Grant& grant = *leases_.admissible(attempt.facts.lease);
  attempt.key = grant.key;
  for (const auto& device : grant.devices)
    attempt.ordinals.push_back(static_cast<int>(leases_.devices()[device.index].ordinal));
  randomBytes(attempt.serverNonce);

  capnp::MallocMessageBuilder message;
  auto challenge = message.initRoot<schema::SessionChallenge>();
  challenge.setServerNonce(asData(attempt.serverNonce));
  challenge.setProof(
      asData(schema::handshakeProof(attempt.key, schema::kRoleServer, attempt.handshake(settings_.server))));
  challenge.setProtocol(settings_.protocol);
  challenge.setRowsHash(settings_.rowsHash);
  return send(attempt, message).then([this, &attempt] { return readProof(attempt); });
}

kj::Promise<void> Admission::readProof(Attempt& attempt) {
  return timer_.timeoutAfter(settings_.messageBound, capnp::readMessage(*attempt.stream, handshakeLimits()))
      .then([this, &attempt](kj::Own<capnp::MessageReader> message) {
        const auto proof = message->getRoot<schema::SessionProof>().getProof();
        const auto expected =
            schema::handshakeProof(attempt.key, schema::kRoleHolder, attempt.handshake(settings_.server));
        if (equalConstantTime(bytes(proof), expected)) return start(attempt);
        attempt.hostile = true;
        GPUPOOL_WARNING("session from %s: wrong key for lease %s", attempt.peer.c_str(),
                        attempt.facts.lease.text().c_str());
        return answer(attempt, "the proof of the session key is wrong");
      });
}

kj::Promise<void> Admission::start(Attempt& attempt) {
  return pool_.take(attempt.ordinals, settings_.workerBound)
      .then([this, &attempt](kj::Own<WorkerChild> worker) { return handOver(attempt, kj::mv(worker)); },
            [this, &attempt](kj::Exception&& exception) {
              GPUPOOL_ERROR("session refused: %s", exception.getDescription().cStr());
              return answer(attempt, "server " + settings_.server + ": " + exception.getDescription().cStr());
            });
}

kj::Promise<void> Admission::handOver(Attempt& attempt, kj::Own<WorkerChild> worker) {
  // Anything may have happened while a worker was awaited.
  Grant* grant = leases_.admissible(attempt.facts.lease);
  if (grant == nullptr || stopped_) return answer(attempt, "the lease was revoked");
  uint64_t& epoch = grant->sessionEpochs[attempt.facts.session];
  if (attempt.facts.epoch <= epoch)
    return answer(attempt, "this session was opened by somebody else meanwhile");
  epoch = attempt.facts.epoch;

  // Before the worker has the socket: what it writes comes after the answer.
  return answer(attempt, "").then([this, &attempt, worker = kj::mv(worker)]() mutable {
    return launch(attempt, kj::mv(worker));
  });
}

kj::Promise<void> Admission::launch(Attempt& attempt, kj::Own<WorkerChild> worker) {
  Grant* grant = leases_.admissible(attempt.facts.lease);
  if (grant == nullptr || stopped_) return kj::READY_NOW;  // the closed socket tells it
  capnp::MallocMessageBuilder message;
  fillStart(attempt, *grant, message.initRoot<schema::WorkerStart>());
  int socket = -1;
  KJ_IF_MAYBE (descriptor, attempt.stream->getFd()) {
    socket = *descriptor;
  }
  KJ_REQUIRE(socket >= 0, "the stream has no descriptor");
  if (worker->sendStart(message, socket)) {
    kj::AutoCloseFd client(fcntl(socket, F_DUPFD_CLOEXEC, 0));
    attempt.stream = nullptr;
    sessions_.add(attempt.facts, kj::mv(worker), kj::mv(client));
    return kj::READY_NOW;
  }
  GPUPOOL_WARNING("worker %d died before its session began; taking another", worker->pid());
  return replaceWorker(attempt);
}

kj::Promise<void> Admission::replaceWorker(Attempt& attempt) {
  KJ_REQUIRE(++attempt.workersLost < 3, "three workers in a row died before the session began");
  return pool_.take(attempt.ordinals, settings_.workerBound)
      .then([this, &attempt](kj::Own<WorkerChild> worker) { return launch(attempt, kj::mv(worker)); });
}

kj::Promise<void> Admission::refuseChallenge(Attempt& attempt, const std::string& why) {
  GPUPOOL_INFO("session from %s refused: %s", attempt.peer.c_str(), why.c_str());
  capnp::MallocMessageBuilder message;
  auto challenge = message.initRoot<schema::SessionChallenge>();
  challenge.setProtocol(settings_.protocol);
  challenge.setRowsHash(settings_.rowsHash);
  challenge.setError(why);
  return send(attempt, message);
}

kj::Promise<void> Admission::answer(Attempt& attempt, const std::string& error) {
  capnp::MallocMessageBuilder message;
  auto answer = message.initRoot<schema::SessionAnswer>();
  answer.setOk(error.empty());
  answer.setError(error);
  return send(attempt, message);
}

kj::Promise<void> Admission::send(Attempt& attempt, capnp::MessageBuilder& message) {
  auto words = capnp::messageToFlatArray(message);
  auto write = attempt.stream->write(words.asBytes().begin(), words.asBytes().size());
  return timer_.timeoutAfter(settings_.messageBound, write.attach(kj::mv(words)));
}

void Admission::fillStart(const Attempt& attempt, const Grant& grant, schema::WorkerStart::Builder start) {
  attempt.facts.session.write(start.initSession());
  start.setEpoch(attempt.facts.epoch);
  start.setTransport(attempt.transport);
  auto list = start.initDevices(static_cast<unsigned>(grant.devices.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    leases_.devices()[grant.devices[i].index].write(list[i].initInfo());
    list[i].setMemoryBytes(grant.devices[i].memoryBytes);
  }
  start.setNetworkDevice(settings_.networkDevice);
  start.setNetworkWire(settings_.networkWire);
  start.setModuleCache(cacheFolder(grant.tenant));
  start.setModuleCacheBytes(settings_.moduleCacheBytes);
  start.setClientPid(attempt.facts.clientPid);
}

// Code is never shared between tenants; their names come from outside, so the folder's is a digest.
std::string Admission::cacheFolder(const std::string& tenant) const {
  if (settings_.moduleCache.empty()) return "";
  const Digest digest = sha256(std::as_bytes(std::span(tenant)));
  uint64_t name = 0;
  std::memcpy(&name, digest.data(), sizeof name);
  const std::string folder = settings_.moduleCache + "/" + hex(name);
  if (mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST) return folder;
  GPUPOOL_WARNING("module cache %s: %s; the session runs without it", folder.c_str(), strerror(errno));
  return "";
}

void Admission::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("admission: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
