#include "pool-manager/cli/holder.h"

#include <fcntl.h>
#include <poll.h>
#include <pwd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "base/descriptor_passing.h"
#include "base/log.h"
#include "base/options.h"
#include "base/transport_names.h"
#include "pool-manager/convert.h"
#include "schema/fault.h"
#include "schema/protocol.h"

namespace gpupool::cli {
namespace {

using holder::OpenReply;
using holder::OpenRequest;
using holder::Status;

template <size_t size>
std::string field(const char (&from)[size]) {
  return {from, ::strnlen(from, size)};
}

template <size_t size>
void setField(char (&to)[size], const std::string& from) {
  const size_t length = std::min(from.size(), size - 1);
  std::memcpy(to, from.data(), length);
  to[length] = '\0';
}

// The reply, and the session's socket with it. A peer that does not read is a peer that is gone.
void sendReply(int socket, const OpenReply& reply, int passed) {
  sendWithDescriptors(socket, std::as_bytes(std::span(&reply, 1)), {&passed, passed >= 0 ? size_t{1} : 0});
}

// For the client library, which prints one line: lists become "a; b".
std::string oneLine(const std::string& text) {
  std::string line;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\n') {
      line += text[i];
      continue;
    }
    const char last = line.empty() ? ' ' : line.back();
    line += last == '.' || last == ':' ? "" : ";";
    while (i + 1 < text.size() && text[i + 1] == ' ') ++i;
    line += ' ';
  }
  return line;
}

// What a request named, which its answer repeats.
struct Moving {
  Id session;
  uint64_t epoch = 0;
};

OpenReply failureReply(const OpenFailure& failure, const Moving& moving = {}) {
  OpenReply reply;
  reply.status = failure.status;
  reply.sessionHigh = moving.session.high;
  reply.sessionLow = moving.session.low;
  reply.epoch = moving.epoch;
  setField(reply.text, oneLine(failure.text));
  return reply;
}

OpenReply waitingReply(const std::string& what) {
  OpenReply reply;
  reply.status = Status::waiting;
  setField(reply.text, what);
  return reply;
}

// Why its server begins no session now. It does not say whether the lease only waits for its turn.
std::string suspendedText(const pool::Lease& lease, bool held) {
  if (held)
    return "the lease is held in files; waiting until it is restored (gpupool restore " + lease.id.text() +
           " DIR)";
  const std::string resume = "gpupool resume " + lease.id.text();
  if (lease.server.overcommitPercent <= 100)
    return "the lease is suspended; waiting until it is resumed (" + resume + ")";
  return "the lease's memory is off its GPUs; waiting for its turn, or, if it is suspended, until it is "
         "resumed (" +
         resume + ")";
}

// What the checkpoints may take that are kept here.
BlockFile::Room roomOf(uint64_t most) {
  auto used = std::make_shared<uint64_t>(0);
  return {[used, most](uint64_t more) -> std::string {
            if (more > most || *used > most - more)
              return "no room for it: " + options::formatSize(*used) + " of --protect-size " +
                     options::formatSize(most) + " are used";
            *used += more;
            return "";
          },
          [used](uint64_t less) { *used -= less; }};
}

constexpr char kHeld[] = "the lease is held in files";

bool isSameHost(const std::string& transport) {
  const TransportFacts* facts = findTransport(transport);
  return facts == nullptr || facts->reach == TransportFacts::Reach::sameHost;
}

}  // namespace

std::optional<OpenFailure> check(const OpenRequest& request, ssize_t size) {
  if (size >= 8 && request.magic == holder::kMagic && request.version != holder::kVersion)
    return OpenFailure{Status::mismatch, "version mismatch: libcuda.so.1 speaks holder protocol " +
                                             std::to_string(request.version) + ", this gpupool speaks " +
                                             std::to_string(holder::kVersion) +
                                             "; use both from one installation"};
  if (size != sizeof request || request.magic != holder::kMagic)
    return OpenFailure{Status::refused, "that was no request to open a session"};
  const bool named = (request.sessionHigh | request.sessionLow) != 0;
  if (named ? request.epoch < 2 || request.transport[0] == 0 : request.epoch != 0)
    return OpenFailure{Status::refused,
                       "a session that moves is named by its id, its next epoch and its transport"};
  return std::nullopt;
}

SessionWish wishOf(const OpenRequest& request) {
  return {request.rowsHash,
          field(request.transport),
          static_cast<uint32_t>(request.pid),
          pool::printable(field(request.command), sizeof request.command),
          Id{request.sessionHigh, request.sessionLow},
          request.epoch,
          request.left != 0,
          request.left == 2,
          {},
          false,
          request.mayShare != 0};
}

struct Holder::Peer {
  Peer(kj::UnixEventPort& port, kj::AutoCloseFd descriptor)
      : socket(kj::mv(descriptor)), observer(port, socket, kj::UnixEventPort::FdObserver::OBSERVE_READ) {}
  kj::AutoCloseFd socket;
  kj::UnixEventPort::FdObserver observer;
  std::string waitingFor;              // besides a lease
  std::map<Id, SessionWish> sessions;  // that were opened for it: what would bring each back from files
  std::set<Id> away;                   // of these, it has asked for its next epoch, for it has left for files
  kj::Duration pause = 0 * kj::SECONDS;

  bool gone() const {
    char byte;
    const ssize_t size = ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR);
  }
};

Holder::Holder(kj::AsyncIoProvider& io, kj::UnixEventPort& port, HolderSettings settings,
               std::function<void(const std::string&, bool)> onLost,
               std::function<void(const std::string&)> onNews)
    : io_(io),
      port_(port),
      settings_(std::move(settings)),
      onLost_(std::move(onLost)),
      onNews_(std::move(onNews)),
      figures_(io, {settings_.transport}),
      tasks_(*this) {
  if (settings_.request.id == Id{}) settings_.request.id = Id::random();
  if (settings_.request.turns.holderKeeps && !adopts()) {
    schema::CheckpointKeeper::Settings keeper{settings_.keepFolder, roomOf(settings_.keepBytes)};
    keeper.roomBound = settings_.failOverWaitMs * kj::MILLISECONDS;
    keeper_.emplace(io.getTimer(), std::move(keeper));
  }
}

kj::Promise<void> Holder::serve(kj::AutoCloseFd socket) {
  ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
  auto peer = kj::heap<Peer>(port_, kj::mv(socket));
  auto served = serveNext(*peer);
  return served.attach(kj::mv(peer));
}

kj::Promise<void> Holder::serveNext(Peer& peer) {
  OpenRequest request{};
  const ssize_t size = ::recv(peer.socket, &request, sizeof request, MSG_TRUNC);
  if (size < 0 && errno == EINTR) return serveNext(peer);
  if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
    return peer.observer.whenBecomesReadable().then([this, &peer]() { return serveNext(peer); });
  if (size <= 0) {
    endSessions(peer);
    return kj::READY_NOW;
  }
  if (request.magic == holder::kFiguresMagic && size == sizeof(holder::FiguresRequest)) {
    holder::FiguresRequest asked;
    std::memcpy(static_cast<void*>(&asked), &request, sizeof asked);
    return tellFigures(peer, asked).then([this, &peer]() { return serveNext(peer); });
  }
  if (const auto failure = check(request, size)) {
    sendReply(peer.socket, failureReply(*failure), -1);
    return serveNext(peer);
  }
  return open(peer, request).then([this, &peer]() { return serveNext(peer); });
}

kj::Promise<void> Holder::open(Peer& peer, const OpenRequest& request) {
  SessionWish wish = wishOf(request);
  peer.waitingFor.clear();
  peer.pause = wish.lost ? settings_.lostPause : settings_.suspendedPause;
  wish.transportNamed = !settings_.transport.empty() || (!wish.moves() && !wish.transport.empty());
  if (wish.transport.empty()) wish.transport = settings_.transport;
  wish.mayShare = wish.mayShare && wish.moves() && !wish.transportNamed && !isProtected();
  const pool::WorkerVersion client{request.rowsHash, schema::release()};
  if (!lease_) settings_.request.client = client;
  if (!lease_ && settings_.request.holder.empty())
    settings_.request.holder = holderName(request.pid, wish.command);
  if (wish.left) {
    SessionWish& known = peer.sessions[wish.session];
    wish.ranAt = known.ranAt;
    known = wish;
    peer.away.insert(wish.session);
  }
  auto opening =
      openPatiently(peer, wish)
          .then(
              [this, &peer, wish, client](OpenSession&& session) {
                if (std::find(clients_.begin(), clients_.end(), client) == clients_.end() &&
                    clients_.size() < pool::kMostClients)
                  clients_.push_back(client);
                OpenReply reply;
                reply.deviceCount = lease_ ? static_cast<uint32_t>(lease_->devices.size()) : 0;
                reply.sessionHigh = session.id.high;
                reply.sessionLow = session.id.low;
                reply.epoch = session.epoch;
                setField(reply.transport, session.transport);
                setField(reply.networkDevice, settings_.networkDevice);
                reply.stallMs = settings_.stallMs;
                if (isProtected() && !isSameHost(session.transport)) {  // else there is no use for it
                  reply.logFrameBytes = settings_.logFrameBytes;
                  reply.logPayloadBytes = settings_.logPayloadBytes;
                }
                reply.goOnDifferent = settings_.goOnDifferent;
                reply.keeps = keeper_ ? 1 : 0;
                // Where leases take turns, none goes on elsewhere.
                const bool turns = lease_ && lease_->server.overcommitPercent > 100;
                reply.silenceMs = turns || !isProtected() ? 0 : settings_.silenceMs;
                setField(reply.server, session.server.name);
                opened_ = true;
                peer.away.erase(session.id);
                SessionWish& next = peer.sessions[session.id];
                next = wish;
                next.session = session.id;
                next.epoch = session.epoch + 1;
                next.transport = session.transport;
                next.left = true;
                next.mayShare = false;
                next.ranAt = session.server;
                sendReply(peer.socket, reply, session.socket);
              },
              [&peer, moving = Moving{wish.session, wish.epoch}](kj::Exception&& error) {
                sendReply(peer.socket, failureReply(toFailure(error), moving), -1);
              });
  return opening.exclusiveJoin(sayWaiting(peer));
}

kj::Promise<void> Holder::tellFigures(Peer& peer, holder::FiguresRequest request) {
  if (request.version != holder::kVersion) {
    sendFigures(peer, request, Status::mismatch, "the holder and libnvidia-ml.so.1 are of different builds");
    return kj::READY_NOW;
  }
  if (!lease_) {
    sendFigures(peer, request, Status::leaseEnded, lost_.empty() ? "there is no lease yet" : lost_);
    return kj::READY_NOW;
  }
  return refreshFigures(request.maxAgeMs * kj::MILLISECONDS)
      .then([this, &peer, request]() { sendFigures(peer, request, Status::ok, ""); },
            [this, &peer, request](kj::Exception&& error) {
              sendFigures(peer, request, lease_ ? Status::serverLost : Status::leaseEnded,
                          toFailure(error).text);
            });
}

kj::Promise<void> Holder::refreshFigures(kj::Duration age) {
  return kj::evalNow([&] { return figures_.refresh(*lease_, age); })
      .catch_([this](kj::Exception&& error) -> kj::Promise<void> {
        // It may have moved: where to is learnt for the next question, since a program waits for this one.
        if (lease_ && !locating_) {
          locating_ = true;
          tasks_.add(places().then([](std::vector<pool::Server>&&) {}, [](kj::Exception&&) {}).then([this] {
            locating_ = false;
          }));
        }
        return kj::mv(error);
      });
}

// A peer that does not read is a peer that is gone.
void Holder::sendFigures(Peer& peer, const holder::FiguresRequest& request, Status status,
                         const std::string& text) {
  const std::string datagram = figures_.datagram(request, status, oneLine(text));
  if (::send(peer.socket, datagram.data(), datagram.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
    GPUPOOL_DEBUG("figures: %s", std::strerror(errno));
}

kj::Promise<OpenSession> Holder::openPatiently(Peer& peer, const SessionWish& wish) {
  // evalNow: what acquire() throws at once is an answer too.
  return kj::evalNow([&]() {
           // A session moves within its lease: it gets no other one.
           if (wish.moves() && !lease_ && lost_.empty())
             kj::throwFatalException(toException({Status::leaseEnded, "the session's lease has ended"}));
           return acquire();
         })
      .then([this, wish]() {
        SessionWish there = wish;
        there.transport = transportOf(wish);
        return there.lost ? recover(there) : there.moves() ? openMoved(there) : openNew(there);
      })
      .catch_([this, &peer, wish](kj::Exception&& error) -> kj::Promise<OpenSession> {
        const OpenFailure failure = toFailure(error);
        if (wish.lost && failure.status != Status::waiting) return kj::mv(error);
        if (wish.left && !wish.lost && keeper_ && failure.status == Status::serverLost) {
          SessionWish again = wish;
          again.lost = true;
          return openPatiently(peer, again);
        }
        // It has no other place to go on: its server may be away for a while, and so may the manager.
        if (wish.left && lease_ && failure.status != Status::refused) return waitForResume(peer, wish);
        if (failure.status != Status::waiting) return kj::mv(error);
        // Its worker is there and waits for it, or the move has failed: the client goes on where it was.
        if (wish.moves())
          kj::throwFatalException(
              toException({Status::serverLost, "the session cannot move: " + failure.text}));
        return waitForResume(peer, wish);
      });
}

std::string Holder::transportOf(const SessionWish& wish) const {
  const bool mayChoose = wish.transport.empty() && isProtected() && takesNetwork(lease_->server);
  return mayChoose ? std::string(transportWith(TransportFacts::Reach::anyHost).name) : wish.transport;
}

kj::Promise<OpenSession> Holder::openMoved(const SessionWish& wish) {
  return places().then(
      [this, wish](std::vector<pool::Server>&& servers) -> kj::Promise<OpenSession> {
        if (servers.empty()) return toException({Status::waiting, kHeld});
        return openAt(servers, wish);
      },
      [this](kj::Exception&& error) -> kj::Promise<OpenSession> {
        if (!lost_.empty()) return endedNow();
        return toException(
            {Status::noManager,
             "the session cannot move: the manager does not say where to: " + pool::errorText(error)});
      });
}

kj::Promise<OpenSession> Holder::openNew(const SessionWish& wish) {
  const pool::ServerLife tried = lease_->server.life();
  const kj::TimePoint until = io_.getTimer().now() + settings_.restartLimit;
  auto opened = openAt({lease_->server}, wish);
  if (!keeper_ || opened_)
    return opened.catch_([this, wish, tried, until](kj::Exception&& error) {
      return openNewElsewhere(wish, tried, until, kj::mv(error));
    });
  return lookAt(tried, wish, kj::mv(opened))
      .then([this, wish, tried, until](std::shared_ptr<Look> look) -> kj::Promise<OpenSession> {
        KJ_IF_MAYBE (session, look->session) return kj::mv(*session);
        KJ_IF_MAYBE (error, look->failure) return openNewElsewhere(wish, tried, until, kj::mv(*error));
        return failOver(tried).then([this, wish] { return openAt({lease_->server}, wish); });
      });
}

kj::Promise<OpenSession> Holder::openNewElsewhere(const SessionWish& wish, const pool::ServerLife& tried,
                                                  kj::TimePoint until, kj::Exception why) {
  const Status status = toFailure(why).status;
  if (status != Status::leaseEnded && status != Status::serverLost) return kj::mv(why);
  return places().then(
      [this, wish, tried, until, status,
       why = kj::cp(why)](std::vector<pool::Server>&& servers) mutable -> kj::Promise<OpenSession> {
        if (servers.empty()) return toException({Status::waiting, kHeld});
        // A server that did not know the lease may do so now: it has been restored there.
        if (status == Status::serverLost)
          std::erase_if(servers, [&](const pool::Server& one) { return one.life() == tried; });
        if (!servers.empty() && lease_) return openAt({servers.rbegin(), servers.rend()}, wish);
        // Nothing of the lease was ever there, so that nothing is lost.
        if (keeper_ && lease_ && !opened_)
          return failOver(tried).then([this, wish] { return openAt({lease_->server}, wish); });
        if (status != Status::serverLost || !lease_) return kj::mv(why);
        return awaitRestart(wish, tried, until, kj::mv(why));
      },
      [why = kj::cp(why)](kj::Exception&&) mutable -> kj::Promise<OpenSession> { return kj::mv(why); });
}

// Its server takes no connection: it may be started again just now. One that does has given its answer.
kj::Promise<OpenSession> Holder::awaitRestart(const SessionWish& wish, const pool::ServerLife& tried,
                                              kj::TimePoint until, kj::Exception why) {
  auto connected = kj::evalNow([&] { return connectServer(io_, lease_->server, wish.transport); });
  return io_.getTimer()
      .timeoutAfter(settings_.connectLimit, kj::mv(connected))
      .then([](ServerConnection&&) { return true; }, [](kj::Exception&&) { return false; })
      .then([this, wish, tried, until, why = kj::mv(why)](bool lives) mutable -> kj::Promise<OpenSession> {
        if (lives || io_.getTimer().now() >= until) return kj::mv(why);
        return io_.getTimer()
            .afterDelay(settings_.placesPause)
            .then([this, wish, tried, until, why = kj::mv(why)]() mutable {
              return openNewElsewhere(wish, tried, until, kj::mv(why));
            });
      });
}

kj::Promise<OpenSession> Holder::openAt(std::vector<pool::Server> servers, const SessionWish& wish) {
  if (!lease_) return toException({Status::leaseEnded, "the lease has ended: " + lost_});
  // The lease may end while the session opens.
  auto lease = kj::heap<pool::Lease>(*lease_);
  lease->server = servers.front();
  SessionWish sharing = wish;
  sharing.transport = wish.mayShare ? sharingTransport(servers.front(), wish.transport) : "";
  servers.erase(servers.begin());
  auto opened = kj::evalNow([&] {
    if (sharing.transport.empty()) return openSession(io_, *lease, wish, settings_.sessionLimit);
    // A server that does not take it over this one takes it over the other.
    return openSession(io_, *lease, sharing, settings_.sessionLimit)
        .catch_([this, wish, &lease = *lease](kj::Exception&& error) {
          GPUPOOL_DEBUG("no session over shared memory: %s", toFailure(error).text.c_str());
          return openSession(io_, lease, wish, settings_.sessionLimit);
        });
  });
  return opened.attach(kj::mv(lease))
      .catch_([this, servers = std::move(servers),
               wish](kj::Exception&& error) mutable -> kj::Promise<OpenSession> {
        if (!servers.empty()) return openAt(std::move(servers), wish);
        OpenFailure failure = toFailure(error);
        if (failure.status != Status::leaseEnded) return kj::mv(error);
        failure.text += "; " + settings_.again;
        return toException(failure);
      });
}

kj::Promise<std::vector<pool::Server>> Holder::places() {
  return io_.getTimer().timeoutAfter(settings_.placesLimit, askPlaces());
}

kj::Promise<std::vector<pool::Server>> Holder::askPlaces() {
  if (!lease_) return KJ_EXCEPTION(FAILED, "the lease has ended");
  return connect(0, "")
      .then([this]() {
        auto request = manager().placesRequest();
        pool::write(lease_ ? lease_->id : Id{}, request.initId());
        return request.send();
      })
      .then(
          [this](capnp::Response<schema::Manager::PlacesResults>&& response)
              -> kj::Promise<std::vector<pool::Server>> {
            std::vector<pool::Server> servers;
            for (auto server : response.getServers()) servers.push_back(pool::read(server));
            held_ = servers.empty();
            if (servers.size() == 1 && lease_) lease_->server = servers.front();  // it has arrived
            return kj::mv(servers);
          },
          [this](kj::Exception&& error) -> kj::Promise<std::vector<pool::Server>> {
            if (schema::faultOf(error).remote && error.getType() == kj::Exception::Type::FAILED) {
              // The next renewal may come when the manager is there no more.
              if (saysEnded(error)) noteEnd(error);
              return kj::mv(error);
            }
            connection_ = nullptr;
            return io_.getTimer().afterDelay(settings_.placesPause).then([this]() { return askPlaces(); });
          });
}

kj::Promise<OpenSession> Holder::waitForResume(Peer& peer, const SessionWish& wish) {
  if (lease_ && peer.waitingFor.empty()) {
    peer.waitingFor = suspendedText(*lease_, held_);
    sendReply(peer.socket, waitingReply(peer.waitingFor), -1);
  }
  const kj::Duration pause = peer.pause;
  peer.pause = kj::min(pause * 5 / 4, settings_.mostSuspendedPause);
  return io_.getTimer().afterDelay(pause).then([this, &peer, wish]() -> kj::Promise<OpenSession> {
    if (!peer.gone()) return openPatiently(peer, wish);
    return KJ_EXCEPTION(DISCONNECTED, "the application is gone");
  });
}

// Where a worker has the session it knows that its client is gone, and its server refuses this.
void Holder::endSessions(const Peer& peer) {
  for (const auto& [id, wish] : peer.sessions) {
    if (keeper_) keeper_->forget(id);
    for (const pool::Server& keeper : keepersElsewhere())
      tasks_.add(askKeeper(keeper, wish, true).ignoreResult());  // the end of the lease tells it, too
    if (lease_ && (!isSameHost(wish.transport) || peer.away.contains(id))) tasks_.add(endHeld(wish));
  }
}

// Its server cannot know that nobody comes: a restored session's worker waits for its client.
kj::Promise<void> Holder::endHeld(const SessionWish& wish) {
  return kj::evalNow([&] { return openMoved(wish); })
      .then([](OpenSession&&) -> kj::Promise<void> { return kj::READY_NOW; },  // the closed socket tells it
            [this, wish](kj::Exception&& error) -> kj::Promise<void> {
              if (!lease_ || toFailure(error).status == Status::refused) return kj::READY_NOW;
              return io_.getTimer().afterDelay(settings_.mostSuspendedPause).then([this, wish] {
                return endHeld(wish);
              });
            });
}

// Until the answer is there: an application cannot tell a holder that waits from one that is stuck.
kj::Promise<void> Holder::sayWaiting(Peer& peer) {
  return io_.getTimer().afterDelay(settings_.waitingInterval).then([this, &peer]() {
    sendReply(peer.socket, waitingReply(peer.waitingFor), -1);
    return sayWaiting(peer);
  });
}

kj::Promise<void> Holder::listen(int listeningSocket) {
  for (;;) {
    const int accepted = ::accept4(listeningSocket, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (accepted < 0) break;
    kj::AutoCloseFd socket(accepted);
    if (holder::peerIsOurs(accepted)) tasks_.add(serve(kj::mv(socket)));
  }
  auto observer = kj::heap<kj::UnixEventPort::FdObserver>(port_, listeningSocket,
                                                          kj::UnixEventPort::FdObserver::OBSERVE_READ);
  auto readable = observer->whenBecomesReadable();
  return readable.attach(kj::mv(observer)).then([this, listeningSocket]() {
    return listen(listeningSocket);
  });
}

void Holder::taskFailed(kj::Exception&& error) {
  GPUPOOL_INFO("a connection of the holder failed: %s", pool::errorText(error).c_str());
}

void refuseApplication(int socket, const std::string& text) {
  pollfd wait{socket, POLLIN, 0};
  OpenRequest request;
  if (::poll(&wait, 1, 5000) <= 0 || ::recv(socket, &request, sizeof request, MSG_DONTWAIT) <= 0) return;
  sendReply(socket, failureReply({Status::refused, text}), -1);
}

std::string userAndHost() {
  char host[HOST_NAME_MAX + 1] = "?";
  ::gethostname(host, sizeof host - 1);
  const passwd* user = ::getpwuid(::geteuid());
  return (user != nullptr ? user->pw_name : std::to_string(::geteuid())) + "@" + host;
}

std::string holderName(int pid, const std::string& command) {
  return userAndHost() + " pid " + std::to_string(pid) + (command.empty() ? "" : " " + command);
}

}  // namespace gpupool::cli
