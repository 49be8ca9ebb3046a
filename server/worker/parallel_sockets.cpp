#include "server/worker/parallel_sockets.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include "base/hmac.h"
#include "base/log.h"

namespace gpupool::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kMost = 7, kCoresForOne = 4;
constexpr int kPollMs = 20;
constexpr size_t kStrangers = 32;  // who have connected, and not greeted
constexpr std::chrono::seconds kConnects{1};
constexpr uint16_t kFirstPort = 1024;

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

struct Stranger {
  Descriptor socket;
  // Its greeting, when all of it is there. It is dropped if it has gone, or says something else.
  std::optional<uint64_t> number(const ParallelSockets::Secret& secret) {
    ParallelSockets::Greeting said;
    const ssize_t got = recv(socket, &said, sizeof said, MSG_DONTWAIT | MSG_PEEK);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
    if (got > 0 && got < static_cast<ssize_t>(sizeof said)) return std::nullopt;
    const bool greets = got == static_cast<ssize_t>(sizeof said) &&
                        recv(socket, &said, sizeof said, MSG_DONTWAIT) == got &&
                        said.magic == ParallelSockets::Greeting::kMagic;
    if (greets && equalConstantTime(said.secret, secret)) return said.number;
    socket = Descriptor();
    return std::nullopt;
  }
};

// An address of IPv4 may be written as one of IPv6, whatever the system's default for such sockets is.
Descriptor socketFor(const Address& address) {
  const int family = address.storage.ss_family;
  Descriptor made(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int both = 0;
  if (made >= 0 && family == AF_INET6) setsockopt(made, IPPROTO_IPV6, IPV6_V6ONLY, &both, sizeof both);
  return made;
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
  Descriptor listener = socketFor(address);
  if (listener < 0 || bind(listener, address.any(), address.length) != 0 ||
      listen(listener, static_cast<int>(kStrangers)) != 0 ||
      getsockname(listener, address.any(), &address.length) != 0) {
    GPUPOOL_INFO("no parallel connections: %s", strerror(errno));
    return std::nullopt;
  }
  randomBytes(offer.secret);
  offer.port = ntohs(*address.port());
  listener_ = std::move(listener);
  return offered_ = offer;
}

// In any order, and behind strangers perhaps. What is made may not come: another machine may have answered.
bool ParallelSockets::accept(StateSocket& stream) {
  uint64_t made = 0;
  const Descriptor listener = std::move(listener_);
  if (!stream.receive(std::as_writable_bytes(std::span(&made, 1)))) return false;
  if (made > offered_.most) return stream.fail("the other worker has more connections than were offered");
  std::vector<Stranger> strangers;
  Sockets came;
  for (const auto until = Clock::now() + kComes; came.size() < made && Clock::now() < until;) {
    if (stopping_()) return stream.fail("the session is ending");
    if (isReady(listener, POLLIN)) {
      Descriptor next(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
      if (next < 0) poll(nullptr, 0, kPollMs);  // too many descriptors are open
      // Whoever holds all places and says nothing lets the others in.
      if (strangers.size() == kStrangers) strangers.erase(strangers.begin());
      if (next >= 0) strangers.push_back({std::move(next)});
    }
    for (Stranger& stranger : strangers)
      if (const auto number = stranger.number(offered_.secret); number && *number < made)
        came.try_emplace(*number, std::make_unique<StateSocket>(std::move(stranger.socket), stopping_));
    std::erase_if(strangers, [](const Stranger& stranger) { return stranger.socket < 0; });
  }
  uint64_t numbers = 0;
  for (const auto& [number, socket] : came) numbers |= uint64_t{1} << number;
  take(came, numbers);
  return stream.send(std::as_bytes(std::span(&numbers, 1)));
}

void ParallelSockets::take(Sockets& from, uint64_t numbers) {
  for (auto& [number, socket] : from)
    if ((numbers >> number & 1) != 0) sockets_.push_back(std::move(socket));
}

// ---- the sender

bool ParallelSockets::connectOne(const StateSocket& stream, const Offer& offer, Sockets& made,
                                 std::chrono::milliseconds time) {
  Address address;
  if (getpeername(stream.descriptor(), address.any(), &address.length) != 0 || address.port() == nullptr)
    return false;
  *address.port() = htons(offer.port);
  Descriptor socket = socketFor(address);
  if (socket < 0) return false;
  if (::connect(socket, address.any(), address.length) != 0 && errno != EINPROGRESS) return false;
  for (const auto until = Clock::now() + time; !isReady(socket, POLLOUT);)
    if (stopping_() || Clock::now() > until) return false;
  int error = 0;
  socklen_t length = sizeof error;
  if (getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) return false;
  auto connected = std::make_unique<StateSocket>(std::move(socket), stopping_);
  Greeting greeting;
  greeting.number = made.size();
  greeting.secret = offer.secret;
  if (!connected->send(std::as_bytes(std::span(&greeting, 1)))) return false;
  made.emplace(greeting.number, std::move(connected));
  return true;
}

// What it is told is not believed: no port of a service, and no more than it wants.
bool ParallelSockets::connect(StateSocket& stream, const Offer& offer) {
  const auto until = Clock::now() + kConnects;
  const auto left = [&] { return std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()); };
  const size_t most = offer.port < kFirstPort ? 0 : std::min<size_t>({offer.most, wanted(), kMost});
  Sockets made;
  while (made.size() < most && left().count() > 0 && connectOne(stream, offer, made, left())) {
  }
  const uint64_t count = made.size();
  uint64_t numbers = 0;
  if (!stream.send(std::as_bytes(std::span(&count, 1))) ||
      !stream.receive(std::as_writable_bytes(std::span(&numbers, 1))))
    return false;
  take(made, numbers);
  if (most != 0 && sockets_.empty())
    GPUPOOL_INFO("the other worker is reached by one connection only: not at its port %u", offer.port);
  return true;
}

// ---- both

std::string ParallelSockets::together(StateSocket& stream, size_t shares, const Work& work) {
  std::atomic<bool> over{false};
  std::string first;
  bool onTheWire = false;  // the other end may say why
  const auto fails = [&](const std::string& why, const StateSocket& socket) {
    if (over.exchange(true)) return;
    first = why;
    onTheWire = !socket.error().empty();
    // The other end may wait for any of them; on the stream it is told.
    for (const auto& one : sockets_) shutdown(one->descriptor(), SHUT_RDWR);
  };
  const auto share = [&](StateSocket& socket, size_t number) {
    socket.endWith(&over);
    try {
      if (const std::string why = work(socket, number); !why.empty()) fails(why, socket);
    } catch (const std::exception& error) {
      fails(error.what(), socket);
    }
    socket.endWith(nullptr);
  };
  std::vector<std::thread> others;
  try {
    for (size_t i = 1; i < shares; ++i)
      others.emplace_back([&share, this, i] { share(*sockets_[i - 1], i); });
    share(stream, 0);
  } catch (const std::system_error& error) {
    fails(std::string("no threads for the connections: ") + error.what(), stream);
  }
  for (std::thread& other : others) other.join();
  if (!over) return "";
  stream.forgetError();
  if (onTheWire) stream.fail(first);
  return first;
}

}  // namespace gpupool::server
