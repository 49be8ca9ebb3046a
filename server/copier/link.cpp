#include "server/copier/link.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

namespace gpupool::server {
namespace {

constexpr int kLookMs = 50;  // how often `stopping` is looked at
const char kLost[] = "the copier has ended: what it kept is lost";
const char kStopping[] = "the session ends";

// Device 0's first, device 1's first, ..., device 0's second, ...
std::vector<uint32_t> takeTurns(std::span<const CopierPiece> pieces) {
  std::map<uint32_t, std::vector<uint32_t>> byDevice;
  for (size_t i = 0; i < pieces.size(); ++i) byDevice[pieces[i].ordinal].push_back(static_cast<uint32_t>(i));
  std::vector<uint32_t> order;
  order.reserve(pieces.size());
  for (size_t turn = 0; order.size() < pieces.size(); ++turn) {
    for (const auto& [ordinal, indices] : byDevice)
      if (turn < indices.size()) order.push_back(indices[turn]);
  }
  return order;
}

std::string checkPieces(std::span<const CopierPiece> pieces) {
  if (pieces.empty()) return "no pieces to make room for";
  if (pieces.size() > kMostPieces)
    return "too many pieces of memory: " + std::to_string(pieces.size()) + " of at most " +
           std::to_string(kMostPieces);
  for (const CopierPiece& piece : pieces) {
    if (piece.bytes == 0 || piece.bytes % kCopierUnit != 0 || piece.bytes > kMostPieceBytes)
      return "a piece of " + std::to_string(piece.bytes) + " bytes cannot be moved";
  }
  return "";
}

}  // namespace

CopierLink::CopierLink(Descriptor socket, std::function<bool()> stopping)
    : socket_(std::move(socket)), stopping_(std::move(stopping)) {}

std::string CopierLink::broken(std::string why) {
  if (broken_.empty()) broken_ = std::move(why);
  return broken_;
}

bool CopierLink::lost() const {
  if (socket_ < 0) return true;
  pollfd waiting{socket_, 0, 0};
  return poll(&waiting, 1, 0) > 0 && (waiting.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0;
}

// False: broken_ says why.
bool CopierLink::waitFor(short events) {
  for (;;) {
    pollfd waiting{socket_, events, 0};
    const int ready = poll(&waiting, 1, kLookMs);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return broken("poll: " + std::string(strerror(errno))).empty();
    if (stopping_ && stopping_()) return broken(kStopping).empty();
  }
}

std::string CopierLink::send(CopierVerb verb, uint32_t count, std::span<const std::byte> behind,
                             std::span<const int> descriptors) {
  CopierMessage message;
  message.verb = verb;
  message.sequence = ++sequence_;
  message.count = count;
  std::vector<std::byte> bytes(sizeof message + behind.size());
  std::memcpy(bytes.data(), &message, sizeof message);
  if (!behind.empty()) std::memcpy(bytes.data() + sizeof message, behind.data(), behind.size());
  for (;;) {
    const ssize_t sent = sendWithDescriptors(socket_, bytes, descriptors, MSG_DONTWAIT);
    if (sent == static_cast<ssize_t>(bytes.size())) return "";
    if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) return broken(kLost);
    if (sent >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS && errno != ETOOMANYREFS))
      return broken("the copier cannot be spoken to: " + std::string(strerror(errno)));
    // ETOOMANYREFS: too many descriptors are on their way, of all processes of this user; ENOBUFS likewise.
    const bool full = errno == EAGAIN || errno == EWOULDBLOCK;
    if (!full) {
      if (stopping_ && stopping_()) return broken(kStopping);
      poll(nullptr, 0, 1);
    } else if (!waitFor(POLLOUT)) {
      return broken_;
    }
  }
}

void CopierLink::goOn(uint32_t sequence) { sequence_ = overheard_ = std::max(sequence_, sequence); }

std::unique_ptr<CopierLink> CopierLink::takeOver(Descriptor socket, std::function<bool()> stopping,
                                                 std::vector<CopierPiece> pieces, uint32_t sequence) {
  auto link = std::make_unique<CopierLink>(std::move(socket), std::move(stopping));
  link->order_ = takeTurns(pieces);
  link->taken_.assign(pieces.size(), true);
  link->pieces_ = std::move(pieces);
  link->reserved_ = link->takeOutBegun_ = true;
  link->goOn(sequence);
  return link;
}

std::string CopierLink::answer(uint32_t sequence) {
  std::array<std::byte, sizeof(CopierMessage) + kMostRefusalText> room;
  if (!waitFor(POLLIN)) return broken_;
  const auto received = receiveWithDescriptors(socket_, room, MSG_DONTWAIT);
  for (int descriptor : received.descriptors) close(descriptor);
  if (received.bytes == 0 || (received.bytes < 0 && errno == ECONNRESET)) return broken(kLost);
  if (received.bytes < 0) return broken("the copier cannot be heard: " + std::string(strerror(errno)));
  CopierMessage message;
  if (received.whole && static_cast<size_t>(received.bytes) >= sizeof message) {
    std::memcpy(&message, room.data(), sizeof message);
    const size_t text = static_cast<size_t>(received.bytes) - sizeof message;
    if (message.magic == kCopierMagic && message.sequence <= overheard_) return answer(sequence);
    const bool right = message.magic == kCopierMagic && message.sequence == sequence && message.count == text;
    if (right && message.verb == CopierVerb::done && text == 0) return "";
    if (right && message.verb == CopierVerb::refused && text != 0)
      return std::string(reinterpret_cast<const char*>(room.data() + sizeof message), text);
  }
  return broken("the copier answered nonsense");
}

std::string CopierLink::ask(CopierVerb verb, uint32_t count) {
  std::string error = send(verb, count, {});
  return error.empty() ? answer(sequence_) : error;
}

std::string CopierLink::reserve(std::span<const CopierPiece> pieces) {
  if (!broken_.empty()) return broken_;
  if (reserved_) return "room was reserved already";
  if (std::string error = checkPieces(pieces); !error.empty()) return error;
  reserved_ = true;
  std::vector<CopierPlanned> planned;
  for (size_t at = 0; at < pieces.size(); at += planned.size()) {
    planned.clear();
    for (const auto& piece : pieces.subspan(at, std::min(kMostInPlan, pieces.size() - at)))
      planned.push_back({piece.ordinal, static_cast<uint32_t>(piece.bytes / kCopierUnit)});
    std::string error = send(CopierVerb::plan, static_cast<uint32_t>(planned.size()),
                             std::as_bytes(std::span<const CopierPlanned>(planned)));
    if (!error.empty()) return error;
  }
  if (std::string error = ask(CopierVerb::reserve, static_cast<uint32_t>(pieces.size())); !error.empty())
    return error;
  pieces_.assign(pieces.begin(), pieces.end());
  order_ = takeTurns(pieces);
  taken_.assign(pieces.size(), false);
  return "";
}

std::string CopierLink::takeOut(const Export& exported, const Taken& taken) {
  if (!broken_.empty()) return broken_;
  if (pieces_.empty()) return "no room was reserved";
  if (std::exchange(takeOutBegun_, true)) return "the pieces were taken out already";
  return move(CopierVerb::takeOut, exported, [&](size_t index) {
    taken_[index] = true;
    taken(index);
  });
}

std::string CopierLink::bringIn(const Export& exported, const Where& where) {
  if (!broken_.empty()) return broken_;
  if (!takeOutBegun_) return "nothing was taken out";
  if (std::string error = ask(CopierVerb::beginBringIn, 0); !error.empty()) return error;
  return move(CopierVerb::bringIn, exported, [](size_t) {}, where);
}

std::string CopierLink::sendBatch(CopierVerb verb, const Export& exported, const Where& where, Batch& batch) {
  std::vector<Descriptor> owners;
  std::vector<int> descriptors;
  for (uint32_t index : batch.indices) {
    const int descriptor = exported(index);
    if (descriptor < 0) return "a piece of the device's memory cannot be exported";
    owners.emplace_back(descriptor);
    descriptors.push_back(descriptor);
  }
  std::vector<CopierPlaced> placed;
  if (verb == CopierVerb::bringIn)
    for (uint32_t index : batch.indices)
      placed.push_back({index, where ? where(index) : pieces_[index].ordinal});
  std::string error =
      send(verb, static_cast<uint32_t>(batch.indices.size()),
           verb == CopierVerb::bringIn ? std::as_bytes(std::span<const CopierPlaced>(placed))
                                       : std::as_bytes(std::span<const uint32_t>(batch.indices)),
           descriptors);
  batch.sequence = sequence_;
  return error;
}

std::string CopierLink::sendCrossings(std::span<const CopierCrossing> crossings, size_t first,
                                      const Export& from, const Export& to) {
  std::vector<Descriptor> owners;
  std::vector<int> descriptors;
  for (const Export* exported : {&from, &to})
    for (size_t i = 0; i < crossings.size(); ++i) {
      owners.emplace_back((*exported)(first + i));
      if (owners.back() < 0) return "a piece of the device's memory cannot be exported";
      descriptors.push_back(owners.back());
    }
  return send(CopierVerb::across, static_cast<uint32_t>(crossings.size()), std::as_bytes(crossings),
              descriptors);
}

std::string CopierLink::across(std::span<const CopierCrossing> crossings, const Export& from,
                               const Export& to) {
  std::deque<Batch> underWay;
  std::string error = broken_;
  const auto finishOne = [&] {
    const std::string late = finish(underWay, [](size_t) {});
    if (error.empty()) error = late;
  };
  for (size_t at = 0; at < crossings.size() && error.empty(); at += kMostInCrossing) {
    if (underWay.size() == kCopierBatches) finishOne();
    const auto batch = crossings.subspan(at, std::min(kMostInCrossing, crossings.size() - at));
    if (error.empty()) error = sendCrossings(batch, at, from, to);
    if (error.empty()) underWay.push_back({sequence_, {}});
  }
  while (!underWay.empty() && broken_.empty()) finishOne();
  return error;
}

std::string CopierLink::finish(std::deque<Batch>& underWay, const std::function<void(size_t)>& moved) {
  const Batch batch = std::move(underWay.front());
  underWay.pop_front();
  std::string error = answer(batch.sequence);
  if (error.empty())
    for (uint32_t index : batch.indices) moved(index);
  return error;
}

std::string CopierLink::move(CopierVerb verb, const Export& exported,
                             const std::function<void(size_t)>& moved, const Where& where) {
  std::deque<Batch> underWay;
  std::string error;
  for (size_t at = 0; at < order_.size() && error.empty();) {
    Batch batch;
    uint64_t bytes = 0;
    for (; at < order_.size() && batch.indices.size() < kMostInBatch; ++at) {
      const uint32_t index = order_[at];
      if (verb == CopierVerb::bringIn && !taken_[index]) continue;
      if (!batch.indices.empty() && bytes + pieces_[index].bytes > kCopierBatchBytes) break;
      batch.indices.push_back(index);
      bytes += pieces_[index].bytes;
    }
    if (batch.indices.empty()) break;
    if (underWay.size() == kCopierBatches) error = finish(underWay, moved);
    if (error.empty()) error = sendBatch(verb, exported, where, batch);
    if (error.empty()) underWay.push_back(std::move(batch));
  }
  // Also after an error: what the copier does by then counts, and its answers are nobody else's.
  while (!underWay.empty() && broken_.empty()) {
    std::string late = finish(underWay, moved);
    if (error.empty()) error = std::move(late);
  }
  return error;
}

}  // namespace gpupool::server
