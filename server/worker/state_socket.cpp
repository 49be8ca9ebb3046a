#include "server/worker/state_socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/descriptor_passing.h"
#include "base/ordered_work.h"

namespace gpupool::server {
namespace {

constexpr int kLookAgainMs = 50;  // how often `stopping` is looked at
constexpr size_t kReceivedAtOnce = size_t{16} << 20;
constexpr int kUnixBuffer = 1 << 20;

void setOption(int socket, int level, int name, int value) {
  setsockopt(socket, level, name, &value, sizeof value);
}

bool isUnix(int socket) {
  int domain = 0;
  socklen_t length = sizeof domain;
  return getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 && domain == AF_UNIX;
}

}  // namespace

StateSocket::StateSocket(Descriptor socket, std::function<bool()> stopping)
    : socket_(std::move(socket)), stopping_(std::move(stopping)) {
  // As far as the machine permits (net.core.wmem_max): the sender need not wake as often. TCP finds its own.
  if (isUnix(socket_)) {
    setOption(socket_, SOL_SOCKET, SO_SNDBUF, kUnixBuffer);
    return;
  }
  setOption(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
  setOption(socket_, IPPROTO_TCP, TCP_USER_TIMEOUT, kUnreachableSeconds * 1000);
  setOption(socket_, IPPROTO_TCP, TCP_KEEPIDLE, kUnreachableSeconds / 3);
  setOption(socket_, IPPROTO_TCP, TCP_KEEPINTVL, kUnreachableSeconds / 6);
  setOption(socket_, SOL_SOCKET, SO_KEEPALIVE, 1);
}

bool StateSocket::fail(std::string why) {
  if (error_.empty()) error_ = std::move(why);
  return false;
}

bool StateSocket::goesOn() { return error_.empty() && (!stopping_() || fail("the session is ending")); }

bool StateSocket::await(short events) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(kSilenceSeconds);
  while (goesOn()) {
    pollfd waiting{socket_, events, 0};
    const int ready = poll(&waiting, 1, kLookAgainMs);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return fail("poll: " + std::string(strerror(errno)));
    if (std::chrono::steady_clock::now() > until) return fail("the other worker does not answer");
  }
  return false;
}

// It waits only where the socket has no room, or no bytes.
bool StateSocket::send(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (!goesOn()) return false;
    const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) bytes = bytes.subspan(static_cast<size_t>(sent));
    if (sent < 0 && errno != EAGAIN && errno != EINTR) return fail(kOtherEnded);
    if (sent < 0 && errno == EAGAIN && !await(POLLOUT)) return false;
  }
  return true;
}

bool StateSocket::receive(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    if (!goesOn()) return false;
    const ssize_t got = ::recv(socket_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) bytes = bytes.subspan(static_cast<size_t>(got));
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return fail(kOtherEnded);
    if (got < 0 && errno == EAGAIN && !await(POLLIN)) return false;
  }
  return true;
}

bool StateSocket::sendBlock(std::span<const std::byte> bytes) {
  const uint64_t length = bytes.size();
  return send(std::as_bytes(std::span(&length, 1))) && send(bytes);
}

// The room grows with what has come: a length alone takes no memory.
bool StateSocket::receiveBlock(std::vector<std::byte>& bytes, uint64_t most) {
  uint64_t length = 0;
  if (!receive(std::as_writable_bytes(std::span(&length, 1)))) return false;
  if (length > most) return fail("the other worker sends more than a session can be");
  bytes.clear();
  while (bytes.size() < length) {
    const size_t before = bytes.size();
    bytes.resize(std::min<uint64_t>(length, before + kReceivedAtOnce));
    if (!receive(std::span(bytes).subspan(before))) return false;
  }
  return true;
}

bool StateSocket::sendPart(std::span<const std::byte> bytes, const Checksum& checksum) {
  if (readable()) return fail(kOtherEnded);
  return sendBlock(bytes) && send(checksum);
}

bool StateSocket::receivePart(std::span<std::byte> bytes, Checksum& checksum) {
  uint64_t length = 0;
  if (!receive(std::as_writable_bytes(std::span(&length, 1)))) return false;
  if (length != bytes.size()) return fail("the other worker sends other contents than it said");
  return receive(bytes) && receive(checksum);
}

bool StateSocket::sendContent(std::span<const std::byte> bytes) {
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(kPartBytes, bytes.size()))) {
    const auto part = bytes.first(std::min(kPartBytes, bytes.size()));
    if (!sendPart(part, checksumOf(part))) return false;
  }
  return true;
}

// A part is compared while the next one comes. Of what is wrong the first counts.
bool StateSocket::receiveContent(std::span<std::byte> bytes) {
  struct Part {
    std::span<std::byte> bytes;
    Checksum checksum{};
  };
  std::array<Part, 2> parts;
  OrderedWork comparing(parts.size(), bytes.size() > kPartBytes ? 1 : 0, [&](size_t slot) -> std::string {
    return checksumOf(parts[slot].bytes) == parts[slot].checksum ? "" : kDamagedOnItsWay;
  });
  std::string wrong;
  while (wrong.empty() && (!bytes.empty() || !comparing.empty())) {
    if (!bytes.empty() && !comparing.full()) {
      Part& part = parts[comparing.next()];
      part.bytes = bytes.first(std::min(kPartBytes, bytes.size()));
      bytes = bytes.subspan(part.bytes.size());
      if (!receivePart(part.bytes, part.checksum))
        bytes = {};
      else
        comparing.give();
      continue;
    }
    wrong = comparing.await();
    comparing.drop();
  }
  if (!wrong.empty()) error_ = wrong;
  return error_.empty();
}

bool StateSocket::answer(const std::string& why) {
  return sendBlock(std::as_bytes(std::span(why.data(), std::min<size_t>(why.size(), kMostAnswerBytes))));
}

std::string StateSocket::hearAnswer() {
  std::vector<std::byte> text;
  if (!receiveBlock(text, kMostAnswerBytes)) return error();
  return {reinterpret_cast<const char*>(text.data()), text.size()};
}

void StateSocket::endSending() { shutdown(socket_, SHUT_WR); }

void StateSocket::hearOut(std::chrono::milliseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  std::vector<std::byte> room(size_t{1} << 20);
  forgetError();
  while (!stopping_() && std::chrono::steady_clock::now() < until) {
    pollfd waiting{socket_, POLLIN, 0};
    if (poll(&waiting, 1, kLookAgainMs) <= 0) continue;
    const ssize_t got = ::recv(socket_, room.data(), room.size(), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return;
  }
}

bool StateSocket::readable() const {
  pollfd waiting{socket_, POLLIN, 0};
  return poll(&waiting, 1, 0) > 0;
}

bool StateSocket::ended() const {
  char next = 0;
  const ssize_t got = ::recv(socket_, &next, 1, MSG_DONTWAIT | MSG_PEEK);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

bool StateSocket::sendDescriptors(std::span<const int> descriptors) {
  while (!descriptors.empty()) {
    const size_t count = std::min(kMostDescriptors, descriptors.size());
    if (!await(POLLOUT)) return false;
    const std::byte mark{static_cast<unsigned char>(count)};
    const ssize_t sent =
        sendWithDescriptors(socket_, std::span(&mark, 1), descriptors.first(count), MSG_DONTWAIT);
    if (sent == 1) descriptors = descriptors.subspan(count);
    // ETOOMANYREFS: too many descriptors are on their way, of all processes of this user.
    if (sent < 0 && (errno == ETOOMANYREFS || errno == ENOBUFS))
      poll(nullptr, 0, 1);
    else if (sent < 0 && errno != EAGAIN)
      return fail(kOtherEnded);
  }
  return true;
}

bool StateSocket::receiveDescriptors(std::vector<Descriptor>& descriptors, size_t count) {
  while (descriptors.size() < count) {
    if (!await(POLLIN)) return false;
    std::byte mark{};
    auto received = receiveWithDescriptors(socket_, std::span(&mark, 1), MSG_DONTWAIT);
    const size_t expected = std::min(kMostDescriptors, count - descriptors.size());
    const size_t came = received.descriptors.size();
    for (const int descriptor : received.descriptors) descriptors.emplace_back(descriptor);
    if (received.bytes < 0 && errno == EAGAIN) continue;
    if (received.bytes <= 0) return fail(kOtherEnded);
    if (came != expected) return fail("the other worker sends other descriptors than it said");
  }
  return true;
}

}  // namespace gpupool::server
