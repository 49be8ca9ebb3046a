// The progress thread of a Ucx connection: the only one that calls UCX once the connection is set up.

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/log.h"
#include "transports/network_address.h"
#include "transports/ucx.h"

namespace gpupool::transport {
namespace {

// Enough to fill any wire; smaller batches leave sooner.
constexpr size_t kBatchBytes = 256 << 10;
// Puts under way at once, at least one: enough to keep the wire full while an answer travels.
constexpr size_t kPutWindow = 16 << 20;
// How long close() tries to get rid of what was committed and to hear that it arrived.
constexpr std::chrono::milliseconds kCloseBound{1000};
// After end-of-file on the bootstrap socket, what UCX has already received is still delivered.
constexpr std::chrono::milliseconds kGrace{100};
// Signs of life, at least this often: the peer may be less patient than this side.
constexpr std::chrono::milliseconds kBeat{125};
constexpr std::chrono::milliseconds kIdleBeat{500}, kIdleAfter{2000};
constexpr std::chrono::milliseconds kRareBeat{5000}, kLongSilence{10000};

}  // namespace

void Ucx::run() {
  Clock::time_point idleSince{};
  const auto spin = spinTime();
  for (;;) {
    bool busy = false;
    try {
      busy = step();
    } catch (const std::exception& error) {
      lose(error.what());
    }
    Clock::time_point now = Clock::now();
    if (finished(now)) break;
    if (busy) {
      idleSince = {};
      continue;
    }
    if (idleSince == Clock::time_point{}) idleSince = now;
    if (now - idleSince < spin) {
      relaxCpu();
      continue;
    }
    sleep();
    idleSince = {};
  }
  link_->shutdown();  // from here on nothing touches the memory of transfers under way
  if (registered_) registered_->stop();
  peerRegions_->clear();
  {
    std::lock_guard lock(sharedMutex_);
    sharingEnded_ = true;
    shared_.clear();
  }
  link_.reset();
  transfers_->stop();
  // A client that did not take the worker's goodbye in time hears from the server why: over this very socket.
  const bool unheard = isWorker_ && peer() == Peer::alive && !goodbyeSeen_;
  if (!unheard) ::shutdown(bootstrap_.get(), SHUT_RDWR);
  {
    std::lock_guard lock(endMutex_);
    runEnded_ = true;
  }
  ended_.notify_all();
}

bool Ucx::step() {
  bool busy = false;
  for (int i = 0; i < 64 && link_->progress(); ++i) busy = true;
  if (work_.exchange(false, std::memory_order_seq_cst)) {
    busy = true;
    takeRequests();
    returnCredits();
  }
  busy |= startPuts();
  for (int channel = 0; channel < kChannels; ++channel) busy |= pump(channel);
  Clock::time_point now = Clock::now();
  if (busy) lastBusy_ = now;
  if (now >= nextBeat()) beat(now);
  if (closing_.load(std::memory_order_acquire) && !goodbyeSent_) {
    if (closeDeadline_ == Clock::time_point{}) closeDeadline_ = now + kCloseBound;
    if (peer() != Peer::alive || drained() || now >= closeDeadline_ - kCloseBound / 4) {
      goodbyeSent_ = true;
      WireHeader goodbye{.kind = WireKind::goodbye, .number = lanes_[0].sent, .offset = lanes_[1].sent};
      link_->send(goodbye, nullptr, 0, UCP_AM_SEND_FLAG_EAGER, {});
      busy = true;
    }
  }
  return busy;
}

// Sends the next records of a channel, if none are in flight and the peer has room.
bool Ucx::pump(int channel) {
  Lane& lane = lanes_[channel];
  if (lane.inFlight || peer() != Peer::alive) return false;
  size_t room = lane.size - (lane.sent - lane.peerConsumed);
  auto records = lane.drain->peek(lane.sent, std::min(room, kBatchBytes));
  if (records.empty() && room > kBatchBytes)
    records = lane.drain->peek(lane.sent, room);  // one large message
  if (records.empty()) return false;
  records = records.first(upToNextPut(lane, channel, records.size()));
  WireHeader header{.kind = WireKind::messages,
                    .channel = static_cast<uint32_t>(channel),
                    .number = lane.sent,
                    .landed = lane.follows};
  lane.inFlight = true;
  lane.sent += records.size();
  size_t bytes = records.size();
  link_->send(header, records.data(), bytes, UCP_AM_SEND_FLAG_EAGER, [this, &lane, bytes](bool) {
    lane.inFlight = false;
    if (lane.drain->release(bytes)) futexWake(lane.drain->words()->producerArmed);
  });
  return true;
}

// How many of the next `bytes` bytes of records follow the same put, lane.follows. Looks at requests after
// the ring: every put that was asked for before any of these records was committed is marked by now, and
// every region that they name is announced.
size_t Ucx::upToNextPut(Lane& lane, int channel, size_t bytes) {
  if (work_.load(std::memory_order_acquire) || putsAsked_.load(std::memory_order_acquire) != putsMarked_)
    takeRequests();
  for (; !lane.marks.empty(); lane.marks.pop_front()) {
    const PutMark& next = lane.marks.front();
    if (next.position[channel] > lane.sent)
      return std::min<uint64_t>(bytes, next.position[channel] - lane.sent);
    lane.follows = next.number;
  }
  return bytes;
}

void Ucx::takeRequests() {
  std::vector<Request> requests;
  std::vector<PutMark> marks;
  {
    std::lock_guard lock(requestsMutex_);
    requests.swap(requests_);
    marks.swap(marks_);
  }
  for (const PutMark& mark : marks) {
    for (int channel = 0; channel < kChannels; ++channel) {
      auto& known =
          lanes_[channel].marks;  // nothing was committed since the last put: this one stands for both
      if (!known.empty() && known.back().position[channel] == mark.position[channel]) known.pop_back();
      known.push_back(mark);
    }
    putsMarked_ = mark.number;
  }
  for (Request& request : requests) {
    if (isPut(request.header.kind))
      queue_.push_back(std::move(request));
    else
      sendRequest(request);
  }
}

bool Ucx::startPuts() {
  bool any = false;
  for (; !queue_.empty(); queue_.pop_front()) {
    if (putBytes_ != 0 && putBytes_ + queue_.front().header.length > kPutWindow) break;
    sendRequest(queue_.front());
    any = true;
  }
  return any;
}

void Ucx::sendRequest(Request& request) {
  WireHeader& header = request.header;
  if (isPut(header.kind)) return sendPut(request);
  if (header.kind == WireKind::get && getDirectly(request)) return;
  if (header.kind == WireKind::get || header.kind == WireKind::fill) {
    header.number = request.transfer;
    gets_[header.number] = request;
  }
  sendWithPlace(request, {});
}

void Ucx::sendPut(Request& request) {
  const WireHeader& header = request.header;
  PutState& state = puts_[header.number];
  state.transfer = request.transfer;
  state.bytes = header.length;
  state.registered = request.registered;
  putBytes_ += state.bytes;
  auto sent = [this, number = header.number](bool ok) {
    PutState& put = puts_[number];
    put.sent = true;
    put.ok &= ok;
    settle(number);
  };
  if (header.kind == WireKind::fetch) return sendWithPlace(request, sent);
  if (placeDirectly(request)) return;
  copied_ += header.length;
  link_->send(header, request.source, header.length, bulkFlags(header.length), sent);
}

void Ucx::returnCredits() {
  for (int channel = 0; channel < kChannels; ++channel) {
    Lane& lane = lanes_[channel];
    uint64_t position = in_[channel]->position();
    if (position - lane.creditSaid < lane.size / 4) continue;
    lane.creditSaid = position;
    creditSaid_[channel].store(position, std::memory_order_relaxed);
    WireHeader credit{
        .kind = WireKind::credit, .channel = static_cast<uint32_t>(channel), .number = position};
    link_->send(credit, nullptr, 0, UCP_AM_SEND_FLAG_EAGER, {});
  }
}

bool Ucx::silentForLong() const { return lastSaid_ - lastHeard_ > kLongSilence; }

// A stopped peer does not read what is said to it: said often, it would fill the socket within hours, and a
// full socket looks like a dead host. Where nothing moves, seldom is enough; but over RDMA each beat also
// finds what an event was missed for.
std::chrono::milliseconds Ucx::beatInterval() const {
  const bool idle = !link_->rdma() && lastSaid_ - lastBusy_ > kIdleAfter;
  return std::min(silentForLong() ? kRareBeat : idle ? kIdleBeat : kBeat, stallTimeout_.load() / 4);
}

Clock::time_point Ucx::nextBeat() const {
  return std::min(lastSaid_ + beatInterval(), lastHeard_ + stallTimeout_.load());
}

void Ucx::beat(Clock::time_point now) {
  readBootstrap();
  // Only time in which this process ran itself counts as the peer's silence: both may have been stopped.
  if (now - lastSaid_ > beatInterval() + std::chrono::seconds(1)) lastHeard_ += now - lastSaid_;
  lastSaid_ = now;
  if (peer() != Peer::alive || endOfFile_) return;
  const std::byte byte = LastWords::kBeatByte;
  [[maybe_unused]] ssize_t sent = ::send(bootstrap_.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  const std::chrono::milliseconds bound = stallTimeout_;
  if (now - lastHeard_ >= bound)
    lose("nothing was heard from the peer's process for " + std::to_string(bound.count()) +
         " ms (stopped, or starved)");
}

void Ucx::readBootstrap() {
  std::byte bytes[64];
  while (!endOfFile_) {
    ssize_t got = ::recv(bootstrap_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0) {
      lastHeard_ = Clock::now();
      if (!isWorker_) lastWords_.take({bytes, static_cast<size_t>(got)});
    } else if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    } else {
      endOfFile_ = true;
      hostSilent_ = got < 0 && errno == ETIMEDOUT;
      endOfFileAt_ = Clock::now();
    }
  }
}

// A worker that dies takes UCX's connection along, and its server is about to say what it died of. Nothing
// moves any more: who waits here delays nobody.
void Ucx::failed(const std::string& why) {
  if (peer() != Peer::alive) return;
  TimeLeft time(isWorker_ ? std::chrono::milliseconds(0) : kLastWordsBound);
  do readBootstrap();
  while (!endOfFile_ && time.any() && pollFor(bootstrap_.get(), POLLIN, time));
  loseWith(lastWords_.text(), why);
}

bool Ucx::drained() const {
  for (const Lane& lane : lanes_) {
    if (lane.inFlight || lane.drain->words()->tail.load(std::memory_order_acquire) != lane.sent) return false;
  }
  return true;
}

bool Ucx::finished(Clock::time_point now) {
  if (severed_.load(std::memory_order_acquire)) return true;
  if (endOfFile_ && peer() == Peer::alive && (hostSilent_ || now - endOfFileAt_ >= kGrace)) {
    const std::string said = lastWords_.text();
    if (peerGoodbye_) {
      markGone(Peer::closed,
               said.empty() ? "the peer closed the connection before all it sent had arrived" : said);
    } else {
      loseWith(said, hostSilent_ ? "the peer's host does not answer"
                                 : "the peer's process ended or dropped its socket");
    }
  }
  if (closing_.load(std::memory_order_acquire)) {
    if (goodbyeSeen_ || peer() != Peer::alive) return link_->operations() == 0 || now >= closeDeadline_;
    return closeDeadline_ != Clock::time_point{} && now >= closeDeadline_;
  }
  if (peer() == Peer::lost) return true;
  if (peer() == Peer::alive) return false;
  // It said goodbye: stay until it has heard that we know.
  if (goneAt_ == Clock::time_point{}) goneAt_ = now;
  return endOfFile_ || now - goneAt_ >= kCloseBound;
}

// UCX and the lanes are armed. The peer's beats do not wake this side, which looks when it says its own; but
// one from a peer that was silent for long does. Each beat of its own ends the sleep, and UCX makes progress:
// over RDMA it may miss an event (Soft-RoCE, UCX 1.13: 12 of 1,000 round trips slept to the end without).
void Ucx::awaitEvent() {
  const bool ending = closing_.load() || endOfFile_ || peer() != Peer::alive;
  const bool eager = ending || silentForLong();
  const auto next = ending ? Clock::now() + std::chrono::milliseconds(5) : nextBeat();
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now());
  const auto heard = static_cast<short>(eager ? POLLIN : POLLRDHUP);
  pollfd watched[3] = {{link_->descriptor(), POLLIN, 0},
                       {event_.get(), POLLIN, 0},
                       {endOfFile_ ? -1 : bootstrap_.get(), heard, 0}};
  if (::poll(watched, 3, static_cast<int>(std::max<int64_t>(left.count(), 0))) <= 0) return;
  if (watched[1].revents) clearEvent(event_);
  if (watched[2].revents) readBootstrap();
}

// Sleeps until UCX, another thread or the bootstrap socket has something, or the next beat is due.
void Ucx::sleep() {
  bool expedited = lanes_[0].drain->expedited();
  progressArmed_.store(1, std::memory_order_seq_cst);
  for (Lane& lane : lanes_) {
    if (!lane.inFlight) lane.drain->words()->consumerArmed.store(1, std::memory_order_seq_cst);
  }
  if (expedited) heavyBarrier();
  bool work = work_.load(std::memory_order_seq_cst);
  for (int channel = 0; channel < kChannels && !work; ++channel) work = pump(channel);
  if (!work && link_->arm()) awaitEvent();
  progressArmed_.store(0, std::memory_order_relaxed);
  for (Lane& lane : lanes_) lane.drain->words()->consumerArmed.store(0, std::memory_order_relaxed);
}

}  // namespace gpupool::transport
