#include "server/worker/state_socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/descriptor_passing.h"
#include "server/worker/part_receiver.h"

namespace gpupool::server {
namespace {

constexpr int kLookAgainMs = 50;  // how often `stopping` is looked at
constexpr size_t kReceivedAtOnce = size_t{16} << 20;
constexpr int kUnixBuffer = 1 << 20;
// In a part's length: its bytes are in shared memory. Alone, from the receiver: so many parts are given back.
constexpr uint64_t kShared = uint64_t{1} << 63;
// In a part's length, with kShared: its checksum is that of its pages.
constexpr uint64_t kPaged = uint64_t{1} << 62;
// At the beginning of memory that is offered.
constexpr uint64_t kTakesPages = 0x9d3e'5a70'61c8'4f01;

struct PlacedPart {
  uint64_t length = 0;  // with kShared, and perhaps kPaged
  uint64_t offset = 0;
  Checksum checksum{};
};

void setOption(int socket, int level, int name, int value) {
  setsockopt(socket, level, name, &value, sizeof value);
}

bool isUnix(int socket) {
  int domain = 0;
  socklen_t length = sizeof domain;
  return getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 && domain == AF_UNIX;
}

}  // namespace

Checksum checksumOfPages(std::span<const Checksum> pages) {
  return pages.size() == 1 ? pages[0] : checksumOf(std::as_bytes(pages));
}

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

bool StateSocket::goesOn() {
  if (over_ != nullptr && *over_) return fail(kOtherEnded);
  return error_.empty() && (!stopping_() || fail("the session is ending"));
}

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

bool StateSocket::receiveBlock(std::vector<std::byte>& bytes, uint64_t most) {
  uint64_t length = 0;
  return receiveLength(length) && receiveBytes(bytes, length, most);
}

// Where parts were sent it may come behind words that give places back.
bool StateSocket::receiveLength(uint64_t& length, std::vector<Descriptor>* came) {
  const auto bytes = std::as_writable_bytes(std::span(&length, 1));
  while (came != nullptr) {
    if (!await(POLLIN)) return false;
    const auto received = receiveWithDescriptors(socket_, bytes, MSG_DONTWAIT);
    for (const int descriptor : received.descriptors) came->emplace_back(descriptor);
    if (received.bytes < 0 && errno == EAGAIN) continue;
    if (received.bytes <= 0) return fail(kOtherEnded);
    return receive(bytes.subspan(static_cast<size_t>(received.bytes)));
  }
  do {
    if (!receive(bytes)) return false;
  } while (roomIsShared_ && (length & kShared) != 0 && hearGivenBack(length));
  return error_.empty();
}

// The room grows with what has come: a length alone takes no memory.
bool StateSocket::receiveBytes(std::vector<std::byte>& bytes, uint64_t length, uint64_t most) {
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
  if (!isSilent()) return false;
  const bool placed = room_ && room_->isNext(bytes);
  if (placed && roomIsShared_) return sendPlaced(bytes, checksum, kShared);
  if (placed) room_->sent();
  if (!sendBlock(bytes) || !send(checksum)) return false;
  if (placed) room_->giveBack(1);
  return true;
}

bool StateSocket::sendPages(std::span<const std::byte> bytes, std::span<const Checksum> pages) {
  if (!isSilent()) return false;
  if (!takesPages_ || !room_->isNext(bytes)) return fail("pages are sent to who does not take them");
  return sendPlaced(bytes, checksumOfPages(pages), kShared | kPaged);
}

bool StateSocket::sendPlaced(std::span<const std::byte> bytes, const Checksum& checksum, uint64_t marks) {
  const auto offset = static_cast<uint64_t>(bytes.data() - room_->memory()->data());
  const PlacedPart part{marks | bytes.size(), offset, checksum};
  room_->sent();
  ++sharedParts_;
  return send(std::as_bytes(std::span(&part, 1)));
}

bool StateSocket::receivePart(std::span<std::byte> room, ReceivedPart& part) {
  PlacedPart said;
  if (!receive(std::as_writable_bytes(std::span(&said.length, 1)))) return false;
  part.shared = offered_ != nullptr && (said.length & kShared) != 0;
  part.paged = part.shared && (said.length & kPaged) != 0;
  if (part.shared) said.length &= ~(kShared | kPaged);
  if (said.length != room.size()) return fail("the other worker sends other contents than it said");
  if (!part.shared) {
    part.bytes = room;
    return receive(room) && receive(part.checksum);
  }
  if (!receive(std::as_writable_bytes(std::span(&said, 1)).subspan(sizeof said.length))) return false;
  if (said.offset > offered_->size() || said.length > offered_->size() - said.offset)
    return fail("the other worker names a place that is not in the shared memory");
  part.bytes = {offered_->data() + said.offset, said.length};
  part.checksum = said.checksum;
  ++sharedParts_;
  return true;
}

bool StateSocket::sendContent(std::span<const std::byte> bytes) {
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(kPartBytes, bytes.size()))) {
    const auto part = bytes.first(std::min(kPartBytes, bytes.size()));
    if (!sendPart(part, checksumOf(part))) return false;
  }
  return true;
}

// Of what is wrong the first counts.
bool StateSocket::receiveContent(std::span<std::byte> bytes) {
  constexpr size_t kMost = 4;
  const size_t threads = bytes.size() > kPageBytes ? OrderedWork::helpers() : 0;
  PartReceiver parts(*this, kMost, threads, PartReceiver::copied);
  std::string wrong;
  while (wrong.empty() && (!bytes.empty() || !parts.empty())) {
    if (!bytes.empty() && !parts.full()) {
      const auto part = bytes.first(std::min(kPartBytes, bytes.size()));
      bytes = parts.receive(part) ? bytes.subspan(part.size()) : std::span<std::byte>();
      continue;
    }
    wrong = parts.await();
    if (wrong.empty()) parts.drop();
  }
  if (!wrong.empty()) error_ = wrong;
  return error_.empty();
}

// ---- shared memory

bool StateSocket::canOffer() const { return isUnix(socket_); }

bool StateSocket::offerRoom(std::shared_ptr<transport::SharedMemory> memory) {
  if (memory == nullptr || !canOffer()) return answer("");
  const uint64_t nothing = 0;
  const int descriptor = memory->descriptor();
  std::memcpy(memory->data(), &kTakesPages, sizeof kTakesPages);
  while (await(POLLOUT)) {
    const ssize_t sent = sendWithDescriptors(socket_, std::as_bytes(std::span(&nothing, 1)),
                                             std::span(&descriptor, 1), MSG_DONTWAIT);
    if (sent == sizeof nothing) {
      offered_ = std::move(memory);
      return true;
    }
    // Too many descriptors are on their way, of all processes of this user, or the kernel lacks room for one.
    if (sent < 0 && (errno == ETOOMANYREFS || errno == ENOBUFS)) return answer("");  // the bytes travel
    if (sent >= 0 || errno != EAGAIN) return fail(kOtherEnded);
  }
  return false;
}

std::string StateSocket::hearOffer() {
  uint64_t length = 0;
  std::vector<std::byte> text;
  std::vector<Descriptor> came;
  if (!receiveLength(length, &came) || !receiveBytes(text, length, kMostAnswerBytes)) return error();
  if (came.size() > 1) fail("the other worker sends other descriptors than it said");
  if (came.size() == 1 && text.empty()) takeRoom(std::move(came[0]));
  return error_.empty() ? std::string(reinterpret_cast<const char*>(text.data()), text.size()) : error();
}

bool StateSocket::takeRoom(Descriptor memory) {
  struct stat file{};
  if (fstat(memory, &file) != 0 || file.st_size <= 0 || static_cast<uint64_t>(file.st_size) > kMostRoomBytes)
    return fail("the other worker offers memory that it cannot offer");
  try {
    room_.emplace(transport::SharedMemory::adopt(memory.release(), static_cast<size_t>(file.st_size)));
  } catch (const std::exception& e) {
    return fail(e.what());
  }
  roomIsShared_ = true;
  uint64_t said = 0;
  std::memcpy(&said, room_->memory()->data(), sizeof said);
  takesPages_ = said == kTakesPages;
  return true;
}

size_t StateSocket::partsAtOnce(size_t bytes, size_t most) const {
  return offered_ == nullptr ? most : std::clamp<size_t>(offered_->size() / bytes / 2, 1, most);
}

bool StateSocket::giveBack(const ReceivedPart& part) {
  const uint64_t one = kShared | 1;
  return !part.shared || send(std::as_bytes(std::span(&one, 1)));
}

bool StateSocket::hearGivenBack(uint64_t word) {
  return room_->giveBack(word & ~kShared) || fail("the other worker gives back more than it has");
}

bool StateSocket::awaitRoom() {
  if (!roomIsShared_) return fail("there is no memory to send parts through");
  return await(POLLIN) && isSilent();
}

// But for what gives places back.
bool StateSocket::isSilent() {
  while (readable()) {
    uint64_t word = 0;
    const ssize_t got = ::recv(socket_, &word, sizeof word, MSG_PEEK | MSG_DONTWAIT);
    if (!roomIsShared_ || got != sizeof word || (word & kShared) == 0) return fail(kOtherEnded);
    if (!receive(std::as_writable_bytes(std::span(&word, 1))) || !hearGivenBack(word)) return false;
  }
  return true;
}

// ---- answers

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
