#include "server/worker/parallel_sockets.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <future>
#include <span>
#include <thread>
#include <utility>

#include "base/hmac.h"
#include "base/log.h"

namespace gpupool::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kMost = 7, kCoresForOne = 4;
constexpr int kPollMs = 20;
constexpr size_t kStrangers = 32;  // who have connected, and not said the secret
constexpr std::chrono::seconds kConnects{1}, kComes{10};

std::atomic<int> wantedInstead{-1};

struct Address {
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_storage);

  sockaddr* any() { return reinterpret_cast<sockaddr*>(&storage); }
  // Null: it is of no network.
  in_port_t* port() {
    if (storage.ss_family == AF_INET) return &reinterpret_cast<sockaddr_in*>(&storage)->sin_port;
    if (storage.ss_family == AF_INET6) return &reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port;
    return nullptr;
  }
};

bool isReady(int socket, short events) {
  pollfd waiting{socket, events, 0};
  return poll(&waiting, 1, kPollMs) > 0;
}

// True: it has said the secret. Else it is dropped, unless it has said nothing yet.
bool saysSecret(Descriptor& stranger, const ParallelSockets::Secret& secret) {
  ParallelSockets::Secret said{};
  const ssize_t got = recv(stranger, said.data(), said.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (got == static_cast<ssize_t>(said.size()) && equalConstantTime(said, secret)) return true;
  stranger = Descriptor();
  return false;
}

}  // namespace

unsigned ParallelSockets::wanted() {
  if (const int instead = wantedInstead; instead >= 0) return static_cast<unsigned>(instead);
  return std::clamp(std::thread::hardware_concurrency() / kCoresForOne, 1u, kMost);
}

void ParallelSockets::want(unsigned connections) { wantedInstead = static_cast<int>(connections); }

// ---- the receiver

std::optional<ParallelSockets::Offer> ParallelSockets::offer(const StateSocket& stream, unsigned most) {
  Offer offer;
  offer.most = static_cast<uint16_t>(std::min(most, wanted()));
  Address address;
  if (offer.most == 0 || std::exchange(asked_, true) ||
      getsockname(stream.descriptor(), address.any(), &address.length) != 0 || address.port() == nullptr)
    return std::nullopt;
  *address.port() = 0;
  Descriptor listener(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (listener < 0 || bind(listener, address.any(), address.length) != 0 ||
      listen(listener, static_cast<int>(kStrangers)) != 0 ||
      getsockname(listener, address.any(), &address.length) != 0) {
    GPUPOOL_DEBUG("no parallel connections: %s", strerror(errno));
    return std::nullopt;
  }
  randomBytes(secret_);
  offer.port = ntohs(*address.port());
  offer.secret = secret_;
  listener_ = std::move(listener);
  return offer;
}

// The sender has connected all that it tells of: they are in the listener's queue, perhaps behind strangers.
bool ParallelSockets::accept(StateSocket& stream) {
  uint64_t connected = 0;
  if (!stream.receive(std::as_writable_bytes(std::span(&connected, 1)))) return false;
  const Descriptor listener = std::move(listener_);
  if (connected > kMost) return stream.fail("the other worker has more connections than were offered");
  std::vector<Descriptor> strangers;
  const auto until = Clock::now() + kComes;
  while (sockets_.size() < connected) {
    if (stopping_()) return stream.fail("the session is ending");
    if (Clock::now() > until) return stream.fail("the other worker's connections do not arrive");
    if (strangers.size() < kStrangers && isReady(listener, POLLIN)) {
      Descriptor next(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
      if (next >= 0) strangers.push_back(std::move(next));
    }
    for (Descriptor& stranger : strangers)
      if (sockets_.size() < connected && saysSecret(stranger, secret_))
        sockets_.push_back(std::make_unique<StateSocket>(std::move(stranger), stopping_));
    std::erase_if(strangers, [](const Descriptor& stranger) { return stranger < 0; });
    // Whoever holds all places and says nothing lets the others in.
    if (strangers.size() == kStrangers) strangers.erase(strangers.begin());
  }
  return true;
}

// ---- the sender

bool ParallelSockets::connectOne(const StateSocket& stream, const Offer& offer,
                                 std::chrono::milliseconds time) {
  Address address;
  if (getpeername(stream.descriptor(), address.any(), &address.length) != 0 || address.port() == nullptr)
    return false;
  *address.port() = htons(offer.port);
  Descriptor socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket < 0) return false;
  if (::connect(socket, address.any(), address.length) != 0 && errno != EINPROGRESS) return false;
  for (const auto until = Clock::now() + time; !isReady(socket, POLLOUT);)
    if (stopping_() || Clock::now() > until) return false;
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) return false;
  auto connected = std::make_unique<StateSocket>(std::move(socket), stopping_);
  if (!connected->send(offer.secret)) return false;
  sockets_.push_back(std::move(connected));
  return true;
}

bool ParallelSockets::connect(StateSocket& stream, const Offer& offer) {
  const auto until = Clock::now() + kConnects;
  const auto left = [&] { return std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()); };
  for (size_t most = std::min<size_t>(offer.most, kMost); sockets_.size() < most;)
    if (left().count() <= 0 || !connectOne(stream, offer, left())) break;
  if (offer.most != 0 && sockets_.empty())
    GPUPOOL_INFO("the other worker is reached by one connection only: its port %u does not answer",
                 offer.port);
  const uint64_t connected = sockets_.size();
  return stream.send(std::as_bytes(std::span(&connected, 1)));
}

// ---- both

std::string ParallelSockets::together(StateSocket& stream, const Work& work) {
  std::atomic<bool> over{false};
  std::string first;
  bool onTheWire = false;  // the other end may say why
  const auto share = [&](StateSocket& socket, size_t number) {
    const std::string why = work(socket, number);
    if (why.empty() || over.exchange(true)) return;
    first = why;
    onTheWire = !socket.error().empty();
    // The other end may wait for any of them; on the stream it is told.
    for (const auto& one : sockets_) shutdown(one->descriptor(), SHUT_RDWR);
  };
  std::vector<std::future<void>> others;
  stream.endWith(&over);
  for (const auto& socket : sockets_) socket->endWith(&over);
  for (size_t i = 0; i < sockets_.size(); ++i)
    others.push_back(std::async(std::launch::async | std::launch::deferred,
                                [&share, this, i] { share(*sockets_[i], i + 1); }));
  share(stream, 0);
  for (auto& other : others) other.get();
  stream.endWith(nullptr);
  for (const auto& socket : sockets_) socket->endWith(nullptr);
  if (!over) return "";
  stream.forgetError();
  if (onTheWire) stream.fail(first);
  return first;
}

}  // namespace gpupool::server
