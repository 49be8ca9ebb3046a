#include "server/copier/connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/descriptor_passing.h"
#include "base/log.h"

namespace gpupool::server {
namespace {

constexpr long kFirstPauseNs = 20'000, kLongestPauseNs = 500'000;  // between looks at a copy
constexpr long kHoardPauseNs = 20'000'000;
constexpr int kAnswerMs = 30'000;  // for a worker to read what it asked for

// What stands behind a message for each that it counts.
size_t eachBehind(CopierVerb verb) {
  switch (verb) {
    case CopierVerb::plan:
      return sizeof(CopierPlanned);
    case CopierVerb::takeOut:
      return sizeof(uint32_t);
    case CopierVerb::bringIn:
      return sizeof(CopierPlaced);
    case CopierVerb::across:
      return sizeof(CopierCrossing);
    default:
      return 0;
  }
}

// Likewise, of descriptors.
size_t descriptorsEach(CopierVerb verb) {
  if (verb == CopierVerb::across) return 2;
  return verb == CopierVerb::takeOut || verb == CopierVerb::bringIn ? 1 : 0;
}

}  // namespace

CopierConnection::CopierConnection(Descriptor socket, CopierDevices& devices, CopierStore& store, bool verify)
    : socket_(std::move(socket)),
      devices_(devices),
      store_(store),
      verify_(verify),
      room_(kCopierDatagram),
      hoard_(devices) {
  for (auto& batch : batches_) batch = std::make_unique<CopierBatch>(devices_, verify_);
}

CopierConnection::~CopierConnection() {
  for (auto& batch : batches_) {
    if (batch->running()) batch->finish();
    if (batch->stuck() && holding_ != nullptr) holding_->abandon();
  }
}

std::string CopierConnection::serve() {
  while (wait()) {
  }
  return ended_;
}

bool CopierConnection::breach(const char* what) {
  ended_ = std::string("it broke the protocol: ") + what;
  return false;
}

// For the first of: a batch is done, the worker says something (if there is room for another batch), the time
// to look again.
bool CopierConnection::wait() {
  if (!underWay_.empty() && underWay_.front().batch->done()) {
    pauseNs_ = 0;
    return finishOldest();
  }
  const bool listening = underWay_.size() < kCopierBatches;
  timespec pause{0, kHoardPauseNs};
  const bool forEver = underWay_.empty() && !hoard_.wanting();
  if (!underWay_.empty()) {
    pauseNs_ = std::clamp(2 * pauseNs_, kFirstPauseNs, kLongestPauseNs);
    pause.tv_nsec = pauseNs_;
  }
  pollfd waiting{socket_, POLLIN, 0};
  const int ready = ppoll(&waiting, listening ? 1 : 0, forEver ? nullptr : &pause, nullptr);
  if (ready < 0 && errno != EINTR) {
    ended_ = "poll: " + std::string(strerror(errno));
    return false;
  }
  if (ready > 0) return receive();
  if (ready == 0 && underWay_.empty()) hoard_.take();
  return true;
}

bool CopierConnection::receive() {
  auto received = receiveWithDescriptors(socket_, room_, MSG_DONTWAIT);
  Request request;
  request.descriptors.reserve(received.descriptors.size());
  for (int descriptor : received.descriptors) request.descriptors.emplace_back(descriptor);
  if (received.bytes < 0 && errno == EAGAIN) return true;
  if (received.bytes <= 0) return false;  // it has gone
  const auto bytes = static_cast<size_t>(received.bytes);
  if (bytes < sizeof request.message) return breach("a message is too short");
  std::memcpy(&request.message, room_.data(), sizeof request.message);
  if (request.message.magic != kCopierMagic) return breach("a message is of another version");
  request.behind =
      std::span<const std::byte>(room_).subspan(sizeof request.message, bytes - sizeof request.message);
  if (lacksDescriptors(request, received.whole))
    return refuseInTurn(
        request, "the copier has no file descriptors left for pieces of memory (ulimit -n of the server)");
  if (!received.whole) return breach("a message is too long");
  return handle(request);
}

// This process could not take all that came with a batch.
bool CopierConnection::lacksDescriptors(const Request& request, bool whole) const {
  const size_t count = request.message.count, each = descriptorsEach(request.message.verb);
  return !whole && each != 0 && count <= kMostInBatch / each &&
         request.behind.size() == count * eachBehind(request.message.verb) &&
         request.descriptors.size() < count * each;
}

bool CopierConnection::refuseInTurn(const Request& request, std::string_view why) {
  while (!underWay_.empty())
    if (!finishOldest()) return false;
  return answer(request.message.sequence, why);
}

bool CopierConnection::handle(Request& request) {
  const CopierVerb verb = request.message.verb;
  const size_t each = eachBehind(verb);
  if (request.behind.size() != each * request.message.count && each != 0)
    return breach("a message is not as long as it says");
  if (request.behind.size() != 0 && each == 0) return breach("a message is longer than its kind");
  if (request.descriptors.size() != descriptorsEach(verb) * request.message.count)
    return breach("other descriptors came than a message says");
  switch (verb) {
    case CopierVerb::plan:
      return plan(request);
    case CopierVerb::reserve:
      return reserve(request);
    case CopierVerb::takeOut:
    case CopierVerb::bringIn:
      return startBatch(request);
    case CopierVerb::across:
      return startCrossing(request);
    case CopierVerb::beginBringIn:
      return beginBringIn(request);
    default:
      return breach("a message of no known kind");
  }
}

bool CopierConnection::plan(const Request& request) {
  const size_t count = request.message.count;
  if (holding_ != nullptr) return breach("a plan after room was reserved");
  if (count == 0 || count > kMostPieces - planned_.size())
    return breach("a plan of too many pieces, or none");
  const size_t before = planned_.size();
  planned_.resize(before + count);
  std::memcpy(planned_.data() + before, request.behind.data(), request.behind.size());
  for (size_t i = before; i < planned_.size(); ++i) {
    if (planned_[i].units == 0 || planned_[i].units > kMostPieceBytes / kCopierUnit)
      return breach("a piece of an impossible size");
  }
  return true;
}

// kMostPieces × kMostPieceBytes is less than 2^64.
bool CopierConnection::reserve(const Request& request) {
  if (holding_ != nullptr) return breach("room was reserved already");
  if (planned_.empty() || request.message.count != planned_.size())
    return breach("room for other pieces than were planned");
  std::string why;
  std::vector<uint64_t> sizes;
  sizes.reserve(planned_.size());
  for (const auto& piece : planned_) {
    if (why.empty()) why = devices_.use(piece.ordinal);
    sizes.push_back(piece.units * kCopierUnit);
  }
  if (why.empty()) holding_ = store_.reserve(sizes, why);
  if (holding_ == nullptr) {
    planned_.clear();
    GPUPOOL_WARNING("a session is not suspended: %s", why.c_str());
  } else {
    states_.assign(planned_.size(), State::onDevice);
  }
  return answer(request.message.sequence, why);
}

std::vector<CopierPlaced> CopierConnection::namedIn(const Request& request) {
  std::vector<CopierPlaced> named(request.message.count);
  if (request.message.verb == CopierVerb::bringIn) {
    std::memcpy(named.data(), request.behind.data(), request.behind.size());
    return named;
  }
  for (size_t i = 0; i < named.size(); ++i)
    std::memcpy(&named[i].index, request.behind.data() + i * sizeof(uint32_t), sizeof(uint32_t));
  return named;
}

bool CopierConnection::startBatch(Request& request) {
  const bool out = request.message.verb == CopierVerb::takeOut;
  const size_t count = request.message.count;
  if (holding_ == nullptr) return breach("pieces before room was reserved");
  if (out == bringsIn_) return breach(out ? "pieces out after pieces in" : "pieces in that were not begun");
  if (count == 0 || count > kMostInBatch) return breach("a batch of too many pieces, or none");
  const std::vector<CopierPlaced> named = namedIn(request);
  const State from = out ? State::onDevice : State::kept;
  std::vector<CopierBatch::Piece> pieces;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t index = named[i].index;
    if (index >= states_.size()) return breach("a piece that was not planned");
    if (states_[index] != from) return breach(out ? "a piece out twice" : "a piece in that was not out");
    states_[index] = out ? State::takingOut : State::bringingIn;
    const uint32_t ordinal = out ? planned_[index].ordinal : named[i].ordinal;
    pieces.push_back({index, ordinal, planned_[index].units * kCopierUnit, holding_->piece(index),
                      std::move(request.descriptors[i])});
  }
  for (const auto& piece : pieces) {
    const std::string why = out ? "" : devices_.use(piece.ordinal);
    if (why.empty()) continue;
    for (const auto& refused : pieces) states_[refused.index] = State::kept;
    return refuseInTurn(request, why);
  }
  return start(request, out ? CopierBatch::Direction::out : CopierBatch::Direction::in, std::move(pieces));
}

bool CopierConnection::startCrossing(Request& request) {
  const size_t count = request.message.count;
  if (count == 0 || count > kMostInCrossing) return breach("a batch of too many pieces, or none");
  std::vector<CopierCrossing> crossings(count);
  std::memcpy(crossings.data(), request.behind.data(), request.behind.size());
  std::vector<CopierBatch::Piece> pieces(2 * count);
  std::string why;
  for (size_t i = 0; i < count; ++i) {
    const CopierCrossing& one = crossings[i];
    if (one.units == 0 || one.units > kMostPieceBytes / kCopierUnit)
      return breach("a piece of an impossible size");
    for (const uint32_t ordinal : {one.from, one.to})
      if (why.empty()) why = devices_.use(ordinal);
    const auto index = static_cast<uint32_t>(i);
    const uint64_t bytes = one.units * kCopierUnit;
    pieces[i] = {index, one.from, bytes, {}, std::move(request.descriptors[i])};
    pieces[count + i] = {index, one.to, bytes, {}, std::move(request.descriptors[count + i])};
  }
  if (!why.empty()) return refuseInTurn(request, why);
  return start(request, CopierBatch::Direction::across, std::move(pieces));
}

bool CopierConnection::start(const Request& request, CopierBatch::Direction direction,
                             std::vector<CopierBatch::Piece> pieces) {
  for (auto& batch : batches_) {
    if (batch->running()) continue;
    underWay_.push_back({batch.get(), request.message.verb, request.message.sequence});
    batch->start(direction, std::move(pieces));
    return true;
  }
  return breach("too many batches");  // never: nothing is read while all are under way
}

void CopierConnection::markBatch(const UnderWay& finished, bool moved) {
  if (finished.verb == CopierVerb::across) return;  // nothing of it is kept
  const bool out = finished.verb == CopierVerb::takeOut;
  for (const auto& piece : finished.batch->pieces()) {
    states_[piece.index] = out && !moved ? State::onDevice : State::kept;
    if (out && moved && verify_) hoard_.expect(piece.ordinal, piece.bytes);
  }
}

bool CopierConnection::finishOldest() {
  const UnderWay oldest = underWay_.front();
  underWay_.pop_front();
  const std::string error = oldest.batch->finish();
  markBatch(oldest, error.empty());
  if (oldest.batch->stuck()) {
    if (holding_ != nullptr) holding_->abandon();
    GPUPOOL_ERROR("%s: the memory of a session that was being moved is lost to everybody", error.c_str());
    answer(oldest.sequence, error);
    ended_ = error;
    return false;
  }
  return answer(oldest.sequence, error);
}

bool CopierConnection::beginBringIn(const Request& request) {
  if (request.message.count != 0) return breach("a message with a count too many");
  if (holding_ == nullptr) return breach("pieces in before room was reserved");
  if (!underWay_.empty()) return breach("pieces in while others are under way");
  hoard_.release();
  bringsIn_ = true;
  return answer(request.message.sequence, "");
}

bool CopierConnection::answer(uint32_t sequence, std::string_view refusal) {
  refusal = refusal.substr(0, kMostRefusalText);
  CopierMessage message;
  message.verb = refusal.empty() ? CopierVerb::done : CopierVerb::refused;
  message.sequence = sequence;
  message.count = static_cast<uint32_t>(refusal.size());
  std::vector<std::byte> bytes(sizeof message + refusal.size());
  std::memcpy(bytes.data(), &message, sizeof message);
  std::copy_n(reinterpret_cast<const std::byte*>(refusal.data()), refusal.size(),
              bytes.data() + sizeof message);
  for (;;) {
    if (sendWithDescriptors(socket_, bytes, {}, MSG_DONTWAIT) >= 0) return true;
    if (errno == EPIPE || errno == ECONNRESET) return false;
    pollfd waiting{socket_, POLLOUT, 0};
    if (errno == EAGAIN && poll(&waiting, 1, kAnswerMs) > 0) continue;
    ended_ = "it does not read its answers";
    return false;
  }
}

}  // namespace gpupool::server
