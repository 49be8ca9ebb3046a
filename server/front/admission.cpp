#include "server/front/admission.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>
#include <capnp/serialize.h>
#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "base/transport_names.h"
#include "schema/convert.h"
#include "schema/server_name.h"

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

// It is about what is kept of a session, and goes to the standby of its lease.
bool isHandWish(schema::SessionHello::Reader hello) {
  const bool names = hello.hasHandsTo() && schema::read(hello.getHandsTo()) != Id{};
  return (names || hello.getOver()) && !hello.getArrives() && !hello.hasBrings() && !hello.getKeeps() &&
         !hello.getAsks();
}

bool isNoSession(schema::SessionHello::Reader hello) {
  if (isHandWish(hello)) return true;
  return (hello.getAsks() || hello.getKeeps()) && !hello.getArrives() && !hello.hasBrings();
}

// A standby comes with its number, and a holder as if it were a new session.
AwayKeeper keeperOf(const SessionFacts& facts) {
  if (facts.epoch <= 1) return {};
  return {facts.epoch, schema::isServerName(facts.command) ? facts.command : "?"};
}

// What a peer says that has proven nothing goes into a log.
std::string plain(capnp::Text::Reader release) {
  constexpr size_t kMostRelease = 32;
  std::string text;
  for (const char c : release)
    if (c > ' ' && c < '\x7f' && text.size() < kMostRelease) text.push_back(c);
  return text;
}

}  // namespace

struct Admission::Attempt {
  kj::Own<kj::AsyncIoStream> stream;
  std::string peer;
  uint32_t protocol =
      0;  // this and rowsHash: what the challenge says; the server's own until the peer's are known
  uint64_t rowsHash = 0;
  SessionFacts facts;
  std::string clientNonce;
  std::byte serverNonce[schema::kNonceBytes];
  std::vector<std::byte> key;
  std::vector<int> ordinals;  // the driver's, of the devices where it is to begin
  bool arrives = false;       // it comes from another server
  bool asks = false;          // it is no session
  bool keeps = false;         // likewise
  std::optional<FileFacts> brings;
  std::optional<HandWish> hands;
  int workersLost = 0;
  bool hostile = false;   // counted against the peer
  bool unproven = false;  // in unproven_
  bool proven = false;    // in proven_
  kj::Own<kj::PromiseFulfiller<void>> displaced;
  kj::Own<void> beginning;  // SessionTable's: the holder is told that it has a session

  int socket() const {
    KJ_IF_MAYBE (descriptor, stream->getFd()) {
      return *descriptor;
    }
    KJ_FAIL_REQUIRE("the stream has no descriptor");
  }
  schema::HandshakeFacts handshake(const std::string& server) const {
    return {facts.session, facts.epoch, std::as_bytes(std::span(clientNonce)), serverNonce, server};
  }
};

Admission::Admission(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, WorkerPools& pool,
                     Settings settings)
    : timer_(timer),
      leases_(leases),
      sessions_(sessions),
      pool_(pool),
      settings_(std::move(settings)),
      starts_(leases, settings_.starts),
      limit_(settings_.failureBurst, settings_.failureInterval),
      tasks_(*this) {}

Admission::~Admission() = default;

void Admission::admit(kj::Own<kj::AsyncIoStream> stream, std::string peer) {
  auto attempt = kj::heap<Attempt>();
  attempt->stream = kj::mv(stream);
  attempt->peer = std::move(peer);
  attempt->protocol = settings_.protocols.latest;
  attempt->rowsHash = pool_.currentRows();
  ++underWay_;
  kj::Promise<void> displaced = takePlace(*attempt);
  kj::Promise<void> done = nullptr;
  if (stopped_) {
    done = refuseChallenge(*attempt, "the server is shutting down", {});
  } else if (!limit_.allowed(attempt->peer, FailureLimit::Clock::now())) {
    done = refuseChallenge(*attempt, "too many failed attempts from " + attempt->peer + "; wait a while", {});
  } else {
    done = readHello(*attempt);
  }
  Attempt& kept = *attempt;
  tasks_.add(done.exclusiveJoin(kj::mv(displaced))
                 .catch_([this, &kept](kj::Exception&& exception) {
                   const bool late = exception.getType() == kj::Exception::Type::OVERLOADED;
                   if (exception.getType() != kj::Exception::Type::DISCONNECTED) kept.hostile = true;
                   // Whoever goes on is not logged without end.
                   if (limit_.allowed(kept.peer, FailureLimit::Clock::now()))
                     GPUPOOL_WARNING("session from %s: handshake failed: %s", kept.peer.c_str(),
                                     late ? "the peer was too slow" : exception.getDescription().cStr());
                 })
                 .then([this, attempt = kj::mv(attempt)]() mutable {
                   --underWay_;
                   leavePlace(*attempt);
                   if (attempt->proven && --proven_[attempt->facts.lease] == 0)
                     proven_.erase(attempt->facts.lease);
                   if (attempt->hostile) limit_.failed(attempt->peer, FailureLimit::Clock::now());
                 }));
}

kj::Promise<void> Admission::takePlace(Attempt& attempt) {
  const auto held = places_.find(attempt.peer);
  if (held != places_.end() && held->second >= settings_.perPeer) {
    displace(attempt.peer);
  } else if (unproven_.size() >= settings_.atOnce) {
    displace(heaviest());
  }
  unproven_.push_back(&attempt);
  ++places_[attempt.peer];
  attempt.unproven = true;
  auto pair = kj::newPromiseAndFulfiller<void>();
  attempt.displaced = kj::mv(pair.fulfiller);
  return kj::mv(pair.promise);
}

void Admission::leavePlace(Attempt& attempt) {
  if (!attempt.unproven) return;
  attempt.unproven = false;
  unproven_.remove(&attempt);
  const auto held = places_.find(attempt.peer);
  if (--held->second == 0) places_.erase(held);
}

const std::string& Admission::heaviest() const {
  const std::string* most = nullptr;
  uint32_t places = 0;
  // Of equals the one that came first: it has had the longest time.
  for (const Attempt* attempt : unproven_) {
    const uint32_t held = places_.at(attempt->peer);
    if (held <= places) continue;
    most = &attempt->peer;
    places = held;
  }
  return *most;
}

void Admission::displace(const std::string& peer) {
  const auto oldest = std::find_if(unproven_.begin(), unproven_.end(),
                                   [&](const Attempt* attempt) { return attempt->peer == peer; });
  Attempt& attempt = **oldest;
  leavePlace(attempt);
  attempt.displaced->reject(
      KJ_EXCEPTION(FAILED, "it was the oldest of too many that had proven nothing yet"));
}

kj::Promise<void> Admission::readHello(Attempt& attempt) {
  return timer_.timeoutAfter(settings_.messageBound, capnp::readMessage(*attempt.stream, handshakeLimits()))
      .then([this, &attempt](kj::Own<capnp::MessageReader> message) {
        return challenge(attempt, message->getRoot<schema::SessionHello>());
      });
}

std::string Admission::judgeVersion(schema::SessionHello::Reader hello) const {
  const auto theirs = schema::saidProtocols(hello.getProtocol(), hello.getOldest());
  if (schema::commonProtocol(settings_.protocols, theirs) == 0)
    return schema::protocolMismatch("the server", settings_.protocols, "the client", theirs);
  if (isNoSession(hello)) return "";
  return pool_.refuses(hello.getRowsHash(), plain(hello.getRelease()));
}

std::string Admission::judge(schema::SessionHello::Reader hello) {
  if (hello.getClientNonce().size() != schema::kNonceBytes)
    return "malformed hello: the nonce is not 32 bytes";
  if (findTransport(hello.getTransport().cStr()) == nullptr)
    return "unknown transport; this server has " + transportChoices(" and ");
  const Id id = schema::read(hello.getLease());
  Grant* grant = leases_.admissible(id);
  if (isHandWish(hello) && (grant != nullptr || !settings_.keptKey(id).empty()))
    return hello.getEpoch() < 2 ? "a session that is handed on has an epoch of 2 at least" : "";
  if (grant == nullptr) return "lease " + id.text() + " is not known on server " + settings_.server;
  const auto last = grant->sessionEpochs.find(schema::read(hello.getSession()));
  const uint64_t lastEpoch = last == grant->sessionEpochs.end() ? 0 : last->second;
  if (hello.getArrives()) return judgeArrival(hello, lastEpoch);
  if (hello.hasBrings()) return judgeBrought(hello, lastEpoch);
  if (hello.getKeeps()) return grant->holderKeeps ? "" : "the lease's checkpoints are not kept by its holder";
  if (hello.getAsks()) return hello.getEpoch() == 1 ? "" : "who asks for figures has no session";
  if (hello.getEpoch() <= lastEpoch)
    return "this session was opened before with epoch " + std::to_string(lastEpoch);
  return hello.getEpoch() == 1 ? crowded(id) : "";
}

// Of a move that failed the client may have been here with that epoch already; the next try is that one
// again.
std::string Admission::judgeArrival(schema::SessionHello::Reader hello, uint64_t lastEpoch) {
  if (hello.getEpoch() < 2) return "a session that moves has an epoch of 2 at least";
  if (hello.getEpoch() < lastEpoch)
    return "this session was opened before with epoch " + std::to_string(lastEpoch);
  const TransportFacts* transport = findTransport(hello.getTransport().cStr());
  if (transport->reach == TransportFacts::Reach::sameHost)
    return "the session shares memory with its server (transport " + std::string(transport->name) + ")";
  return "";
}

// It may have been brought before, and its client not have come.
std::string Admission::judgeBrought(schema::SessionHello::Reader hello, uint64_t lastEpoch) {
  if (!leases_.admissible(schema::read(hello.getLease()))->holderKeeps)
    return "the lease's checkpoints are not kept by its holder";
  const auto brings = hello.getBrings();
  const size_t digest = brings.getBytes() == 0 ? 0 : Digest{}.size();
  if (brings.getDigest().size() != digest ||
      schema::read(brings.getSession()) != schema::read(hello.getSession()))
    return "malformed hello: that is no session's checkpoint";
  return judgeArrival(hello, lastEpoch);
}

std::string Admission::crowded(const Id& lease) const {
  const auto waiting = proven_.find(lease);
  const size_t sessions =
      sessions_.living(lease) + sessions_.arriving(lease) + (waiting == proven_.end() ? 0 : waiting->second);
  if (sessions < settings_.sessionsPerLease) return "";
  return "the lease has " + std::to_string(settings_.sessionsPerLease) + " sessions already";
}

void Admission::place(Attempt& attempt, const Grant& grant) {
  attempt.facts.place(grant, leases_.devices());
  attempt.ordinals = leases_.ordinals(grant);
}

kj::Promise<void> Admission::challenge(Attempt& attempt, schema::SessionHello::Reader hello) {
  const auto theirs = schema::saidProtocols(hello.getProtocol(), hello.getOldest());
  if (const std::string why = judgeVersion(hello); !why.empty()) {
    attempt.hostile = true;
    return refuseChallenge(attempt, why, {.otherVersion = true});
  }
  attempt.protocol = schema::commonProtocol(settings_.protocols, theirs);
  attempt.rowsHash = hello.getRowsHash();
  if (const std::string why = judge(hello); !why.empty()) {
    attempt.hostile = true;
    const bool unknown = leases_.admissible(schema::read(hello.getLease())) == nullptr;
    return refuseChallenge(attempt, why, {.unknownLease = unknown});
  }
  attempt.facts = {schema::read(hello.getSession()),
                   schema::read(hello.getLease()),
                   hello.getEpoch(),
                   hello.getPid(),
                   std::string(hello.getCommand().cStr()).substr(0, kCommandBytes),
                   0,
                   {},
                   {},
                   {},
                   hello.getRowsHash()};
  attempt.arrives = hello.getArrives();
  attempt.asks = hello.getAsks() && !attempt.arrives;
  attempt.keeps = hello.getKeeps() && !attempt.arrives && !hello.hasBrings();
  if (hello.hasBrings() && !attempt.arrives) attempt.brings = fileFactsOf(hello.getBrings());
  if (isHandWish(hello)) {
    attempt.hands.emplace();
    attempt.hands->over = hello.getOver();
    if (hello.hasHandsTo()) attempt.hands->to = schema::read(hello.getHandsTo());
  }
  attempt.facts.transport = hello.getTransport().cStr();
  attempt.facts.transportNamed = hello.getTransportNamed();
  attempt.clientNonce.assign(reinterpret_cast<const char*>(hello.getClientNonce().begin()),
                             schema::kNonceBytes);
  if (const Grant* grant = leases_.admissible(attempt.facts.lease)) {
    attempt.key = grant->key;
    place(attempt, *grant);
  } else {
    attempt.key = settings_.keptKey(attempt.facts.lease);
  }
  randomBytes(attempt.serverNonce);

  capnp::MallocMessageBuilder message;
  auto challenge = message.initRoot<schema::SessionChallenge>();
  challenge.setServerNonce(asData(attempt.serverNonce));
  challenge.setProof(
      asData(schema::handshakeProof(attempt.key, schema::kRoleServer, attempt.handshake(settings_.server))));
  challenge.setProtocol(attempt.protocol);
  challenge.setRowsHash(attempt.rowsHash);
  return send(attempt, message).then([this, &attempt] { return readProof(attempt); });
}

kj::Promise<void> Admission::readProof(Attempt& attempt) {
  return timer_.timeoutAfter(settings_.messageBound, capnp::readMessage(*attempt.stream, handshakeLimits()))
      .then([this, &attempt](kj::Own<capnp::MessageReader> message) {
        const auto proof = message->getRoot<schema::SessionProof>().getProof();
        const auto expected =
            schema::handshakeProof(attempt.key, schema::kRoleHolder, attempt.handshake(settings_.server));
        if (equalConstantTime(bytes(proof), expected)) return begin(attempt);
        attempt.hostile = true;
        GPUPOOL_WARNING("session from %s: wrong key for lease %s", attempt.peer.c_str(),
                        attempt.facts.lease.text().c_str());
        return answer(attempt, "the proof of the session key is wrong");
      });
}

kj::Promise<void> Admission::begin(Attempt& attempt) {
  leavePlace(attempt);
  const Id lease = attempt.facts.lease;
  if (attempt.asks)
    return answer(attempt, "").then([this, &attempt] {
      settings_.asked(kj::mv(attempt.stream), attempt.facts.lease);
    });
  if (attempt.keeps)
    return answer(attempt, "").then([this, &attempt] {
      settings_.keeps(kj::mv(attempt.stream), attempt.facts.lease, keeperOf(attempt.facts));
    });
  if (attempt.hands)
    return answer(attempt, "").then([this, &attempt] {
      attempt.hands->facts = attempt.facts;
      settings_.handed(kj::mv(attempt.stream), *attempt.hands);
    });
  if (attempt.brings)
    return answer(attempt, "").then([this, &attempt] {
      settings_.brings(kj::mv(attempt.stream), {attempt.facts, *attempt.brings});
    });
  // This and what follows no earlier: it concerns those alone who have the key.
  if (attempt.facts.epoch != 1 && !attempt.arrives) return bringClient(attempt);
  if (const Grant* grant = leases_.admissible(lease); grant != nullptr && grant->paused)
    return answerPaused(attempt, *grant);
  return attempt.arrives ? arrive(attempt) : startCounted(attempt);
}

// What was sent here before of the same session is of a move that has failed.
kj::Promise<void> Admission::arrive(Attempt& attempt) {
  return sessions_.displaceArrival(attempt.facts).then([this, &attempt] {
    const std::string why = sessions_.refusesArrival(attempt.facts);
    return why.empty() ? startCounted(attempt) : answer(attempt, why);
  });
}

kj::Promise<void> Admission::startCounted(Attempt& attempt) {
  const Id lease = attempt.facts.lease;
  if (const std::string why = crowded(lease); !why.empty()) return answer(attempt, why);
  ++proven_[lease];
  attempt.proven = true;
  return start(attempt);
}

kj::Promise<kj::Own<WorkerChild>> Admission::takeWorker(const Attempt& attempt) {
  return pool_.take(attempt.facts.rowsHash, {attempt.ordinals, !attempt.arrives}, settings_.workerBound);
}

kj::Promise<void> Admission::start(Attempt& attempt) {
  return takeWorker(attempt).then(
      [this, &attempt](kj::Own<WorkerChild> worker) { return handOver(attempt, kj::mv(worker)); },
      [this, &attempt](kj::Exception&& exception) {
        GPUPOOL_ERROR("session refused: %s", exception.getDescription().cStr());
        return answer(attempt, "server " + settings_.server + ": " + exception.getDescription().cStr());
      });
}

kj::Promise<void> Admission::handOver(Attempt& attempt, kj::Own<WorkerChild> worker) {
  // Anything may have happened while a worker was awaited.
  Grant* grant = leases_.admissible(attempt.facts.lease);
  if (grant == nullptr || stopped_) return answer(attempt, "the lease was revoked");
  if (grant->paused) return answerPaused(attempt, *grant);
  if (grant->epoch != attempt.facts.deviceEpoch) {  // the lease has moved to other devices
    place(attempt, *grant);
    return start(attempt);
  }
  uint64_t& epoch = grant->sessionEpochs[attempt.facts.session];
  if (attempt.facts.epoch + (attempt.arrives ? 1 : 0) <= epoch)
    return answer(attempt, "this session was opened by somebody else meanwhile");
  if (attempt.arrives) {
    if (const std::string why = sessions_.refusesArrival(attempt.facts); !why.empty())
      return answer(attempt, why);
  }
  epoch = attempt.facts.epoch - (attempt.arrives ? 1 : 0);  // its client's is yet to come

  // From here on it is one of the lease's sessions, also if that is to be suspended now.
  attempt.beginning = sessions_.beginning(attempt.facts.lease);
  // Before the worker has the socket: what it writes comes after the answer.
  return answer(attempt, "").then([this, &attempt, worker = kj::mv(worker)]() mutable {
    return launch(attempt, kj::mv(worker));
  });
}

kj::Promise<void> Admission::launch(Attempt& attempt, kj::Own<WorkerChild> worker) {
  Grant* grant = leases_.admissible(attempt.facts.lease);
  // Where not, the closed socket tells it.
  if (grant == nullptr || stopped_ || grant->placement(attempt.facts.deviceEpoch) == nullptr)
    return kj::READY_NOW;
  const int socket = attempt.socket();
  sessions_.announce(attempt.facts, worker->pid());
  const auto from = attempt.arrives ? WorkerStarts::From::stream : WorkerStarts::From::client;
  if (starts_.send(*worker, attempt.facts, *grant, socket, from)) {
    if (attempt.arrives) {
      attempt.stream = nullptr;
      sessions_.arrive(attempt.facts, kj::mv(worker));
      return kj::READY_NOW;
    }
    kj::AutoCloseFd client(fcntl(socket, F_DUPFD_CLOEXEC, 0));
    attempt.stream = nullptr;
    sessions_.add(attempt.facts, kj::mv(worker), kj::mv(client));
    return kj::READY_NOW;
  }
  sessions_.withdraw();
  GPUPOOL_WARNING("worker %d died before its session began; taking another", worker->pid());
  return replaceWorker(attempt);
}

kj::Promise<void> Admission::replaceWorker(Attempt& attempt) {
  KJ_REQUIRE(++attempt.workersLost < 3, "three workers in a row died before the session began");
  return takeWorker(attempt).then(
      [this, &attempt](kj::Own<WorkerChild> worker) { return launch(attempt, kj::mv(worker)); });
}

// Of a session that moves: its new worker waits for it. So it begins none, also where the lease is paused.
kj::Promise<void> Admission::bringClient(Attempt& attempt) {
  Grant* grant = leases_.admissible(attempt.facts.lease);
  // It may be held in files, and come back elsewhere: that the manager knows.
  if (grant == nullptr) return answer(attempt, "the lease has left this server", true);
  if (stopped_) return answer(attempt, "the lease was revoked");
  if (grant->held) return answerPaused(attempt, *grant);  // not before all of its sessions are there
  if (const auto why = settings_.failingOver(attempt.facts))
    return why->empty() ? answer(attempt, "the session is being restored", true) : answer(attempt, *why);
  if (const std::string why = sessions_.refusesClient(attempt.facts); !why.empty()) {
    // It has just left for files, and comes when restored; or its worker died while the lease is suspended,
    // and its holder brings it when that runs again.
    if (grant->holding || grant->suspended) return answerPaused(attempt, *grant);
    GPUPOOL_INFO("session %s from %s refused: %s", attempt.facts.session.text().c_str(), attempt.peer.c_str(),
                 why.c_str());
    return answer(attempt, why);
  }
  uint64_t& epoch = grant->sessionEpochs[attempt.facts.session];
  if (attempt.facts.epoch <= epoch)
    return answer(attempt, "this session was opened by somebody else meanwhile");
  epoch = attempt.facts.epoch;
  return answer(attempt, "").then([this, &attempt] {
    const int socket = attempt.socket();
    // If it could not: the closed socket tells the client.
    sessions_.giveClient(attempt.facts, socket, kj::AutoCloseFd(fcntl(socket, F_DUPFD_CLOEXEC, 0)));
    attempt.stream = nullptr;
  });
}

kj::Promise<void> Admission::refuseChallenge(Attempt& attempt, const std::string& why, Refusal what) {
  GPUPOOL_INFO("session from %s refused: %s", attempt.peer.c_str(), why.c_str());
  capnp::MallocMessageBuilder message;
  auto challenge = message.initRoot<schema::SessionChallenge>();
  challenge.setProtocol(attempt.protocol);
  challenge.setRowsHash(attempt.rowsHash);
  challenge.setError(why);
  challenge.setUnknownLease(what.unknownLease);
  challenge.setOtherVersion(what.otherVersion);
  return send(attempt, message);
}

kj::Promise<void> Admission::answer(Attempt& attempt, const std::string& error, bool suspended) {
  capnp::MallocMessageBuilder message;
  auto answer = message.initRoot<schema::SessionAnswer>();
  answer.setOk(error.empty());
  answer.setError(error);
  answer.setSuspended(suspended);
  return send(attempt, message);
}

kj::Promise<void> Admission::answerPaused(Attempt& attempt, const Grant& grant) {
  settings_.told(grant.id);
  return answer(attempt,
                grant.aside    ? "the lease waits for its turn"
                : grant.moving ? "a session of the lease is moving"
                               : "the lease is suspended",
                true);
}

kj::Promise<void> Admission::send(Attempt& attempt, capnp::MessageBuilder& message) {
  auto words = capnp::messageToFlatArray(message);
  auto write = attempt.stream->write(words.asBytes().begin(), words.asBytes().size());
  return timer_.timeoutAfter(settings_.messageBound, write.attach(kj::mv(words)));
}

void Admission::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("admission: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
