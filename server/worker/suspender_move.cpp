// Suspender: the session goes to another worker or into a file, or is copied into one.
#include <fcntl.h>

#include <cstring>

#include "base/log.h"
#include "server/worker/session_state.h"
#include "server/worker/suspender.h"
#include "server/worker/suspender_waits.h"

namespace gpupool::server {
namespace {

constexpr std::chrono::seconds kOtherEnds{30};
constexpr std::chrono::seconds kNextBegins{60};  // with its first context
constexpr std::chrono::milliseconds kLook{100};
constexpr int kLooks = 300;  // for the server's end, where its writer has ended: one is not without the other
constexpr int kRoundsAhead = 3;  // of records; what has been made meanwhile is less each time

// And takes it.
uint64_t bytesInStock(Space& space) {
  uint64_t bytes = 0;
  for (const Space::Piece& piece : space.takeStock()) bytes += piece.bytes;
  return bytes;
}

}  // namespace

// The program runs on while the next worker, of this server, makes its first context. "" or why there is
// none.
std::string Suspender::awaitNext(int state) {
  const auto deadline = Clock::now() + kNextBegins;
  const auto late = [deadline] { return Clock::now() >= deadline; };
  StateSocket socket{Descriptor(fcntl(state, F_DUPFD_CLOEXEC, 3)), [&] { return givesUp() || late(); }};
  const uint32_t ahead = session_.contextAhead();
  const std::string why =
      socket.send(std::as_bytes(std::span(&ahead, 1))) ? socket.hearAnswer() : socket.error();
  return !why.empty() && late() ? "the next worker has not begun in time" : why;
}

// The program runs on while the next worker makes what needs no memory of the session's. "" or why the
// session cannot go there.
std::string Suspender::goAhead(int state, ParallelSockets* parallel) {
  StateSocket socket{Descriptor(fcntl(state, F_DUPFD_CLOEXEC, 3)), [this] { return givesUp(); }};
  const auto began = Clock::now();
  std::string why;
  size_t entries = 1;
  for (int i = 0; i < kRoundsAhead && entries != 0 && why.empty(); ++i)
    why = sendAhead(session_, socket, parallel, entries);
  GPUPOOL_INFO("%zu calls of the session went ahead, in %u ms", session_.record().ahead(),
               millisecondsSince(began));
  return why;
}

MoveOutcome Suspender::carryOutMove(Order& order) {
  MoveOutcome outcome;
  Descriptor state(order.state);
  if (link_ != nullptr) {
    outcome.error = "the session is suspended";
    return outcome;
  }
  if (order.link != nullptr) outcome.error = awaitNext(state);
  if (!outcome.error.empty()) {
    outcome.error = session_.whyNotMoved(outcome.error);
    return outcome;
  }
  const auto began = Clock::now();
  // Of a session that has just come here the server may know the client before this worker does.
  if (!lookUntil({began + order.drain, &alone_}, [this] { return session_.connected() || stopping(); }) ||
      stopping()) {
    outcome.error = stopping() ? "the session is ending" : "the program has not come to this worker yet";
    return outcome;
  }
  if (order.pages) return carryOutPages(order, state);
  order.state = state;
  ParallelSockets parallel([this] { return givesUp(); });
  order.parallel = &parallel;
  if (order.copy || order.hold) parallel.ask();  // who writes a file takes one stream
  if (!order.copy && !order.hold) outcome.error = goAhead(state, order.link == nullptr ? &parallel : nullptr);
  if (outcome.error.empty()) handOverStill(order, outcome);
  session_.record().callBack();
  if (!outcome.error.empty()) outcome.error = session_.whyNotMoved(outcome.error);
  const char* done = order.copy ? "copied" : "moved";
  std::string way;
  if (order.direct) way = " straight from device to device";
  if (parallel.shares() > 1) way = " over " + std::to_string(parallel.shares()) + " connections";
  if (outcome.error.empty())
    GPUPOOL_INFO("%s: %llu bytes%s, %u ms after %u ms of waiting for the device", done,
                 static_cast<unsigned long long>(outcome.movedBytes), way.c_str(), outcome.pauseMs,
                 outcome.drainMs);
  else
    GPUPOOL_WARNING("not %s: %s", done, outcome.error.c_str());
  if (order.copy || !outcome.error.empty()) session_.letClientStay();
  return outcome;
}

void Suspender::handOverStill(Order& order, MoveOutcome& outcome) {
  const auto began = Clock::now();
  outcome.error = standStill({began + order.drain, &alone_}, order.link == nullptr && !order.copy,
                             !order.copy && !order.hold);
  outcome.drainMs = millisecondsSince(began);
  if (!outcome.error.empty()) return;
  const auto still = Clock::now();
  outcome.error = handOver(order, outcome);
  outcome.pauseMs = millisecondsSince(still);
}

// The client sends nothing any more, all it has sent is done, and the gate is closed. "" or why not, and then
// the gate is open.
std::string Suspender::standStill(const Until& deadline, bool apart, bool goes) {
  std::string why;
  // A capture cannot be ended by a client that has stopped: it is let go on for a moment.
  for (bool first = true; first || (why == kCaptureOpen && !deadline.over()); first = false) {
    if (!first) {
      session_.letClientStay();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const std::string moves = session_.stopClient(deadline, apart);
    // With no time left for another look, what the last one saw is still the reason.
    if (!moves.empty()) return first || stopping() ? moves : why;
    why = quiesce(deadline, true);
  }
  if (!why.empty()) return why;
  why = session_.quietClient(deadline, goes);
  if (!why.empty()) session_.gate().open();
  return why;
}

// Everything stands still. "" or why the session goes on here; of a copy it does in any case.
std::string Suspender::handOver(Order& order, MoveOutcome& outcome) {
  session_.tellOutput();
  session_.parkWords(true);
  std::string why = order.link != nullptr ? sendByCopier(order, outcome) : sendByStream(order, outcome);
  if ((why.empty() && !order.copy) || stopping()) return why;
  link_ = nullptr;
  movedBytes_ = 0;
  session_.parkWords(false);
  session_.gate().open();
  return why;
}

// Both: "" if the client has gone, or a copy is made. Else the session's memory is where it was, or the
// session ends.
std::string Suspender::sendByCopier(Order& order, MoveOutcome& outcome) {
  link_ = std::move(order.link);
  SuspendOutcome aside;
  Digests seen;
  std::string why = lookAtContents(HostDigests::ofIdentity, seen);
  if (order.direct)
    aside.movedBytes = bytesInStock(session_.space());
  else if (why.empty())
    why = takeAside(aside);
  const bool some = why.empty() && aside.movedBytes != 0, away = some && !order.direct;
  outcome.movedBytes = aside.movedBytes;
  movedBytes_ = away ? aside.movedBytes : 0;
  StateSocket socket{Descriptor(fcntl(order.state, F_DUPFD_CLOEXEC, 3)), [this] { return givesUp(); }};
  uint32_t sequence = 0;
  if (why.empty())
    why = sendState(session_, socket, some ? link_.get() : nullptr, order.direct, sequence, seen);
  if (why.empty()) why = sendClientAway(order);
  if (why.empty() || stopping() || !away) return why;
  link_->goOn(sequence);
  if (const std::string lost = comeHome(); !lost.empty())
    lose("the session's memory was lost in a move (" + lost + ")", session_.start().isProtected);
  return why;
}

std::string Suspender::sendByStream(Order& order, MoveOutcome& outcome) {
  outcome.movedBytes = bytesInStock(session_.space());
  StateSocket socket{Descriptor(fcntl(order.state, F_DUPFD_CLOEXEC, 3)), [this] { return givesUp(); }};
  Digests seen;
  const bool shared = session_.mapsMemory();
  std::string why = lookAtContents(shared ? HostDigests::none : HostDigests::ofBytes, seen);
  bool accepted = false;
  if (why.empty()) why = streamState(session_, socket, *order.parallel, accepted, seen);
  const bool cut = !socket.error().empty() && (socket.ended() || alone_);  // and not one that says nothing
  if (order.hold && accepted && cut) why = awaitDecision(why);
  return why.empty() && !order.copy ? sendClientAway(order) : why;
}

// The server has died without a word of whether all the lease's files have their place, and its other
// sessions have perhaps gone there. Its next life knows. Until then this session goes neither there nor on:
// else it could be in two places, or in none. "": it goes there.
std::string Suspender::awaitDecision(const std::string& why) {
  std::unique_lock lock(mutex_);
  const auto ends = [this] { return ending_ || session_.stopping(); };
  // Looks, and not time: this process may be stopped meanwhile.
  for (int look = 0; look < kLooks && !serverGone_ && !ends(); ++look) changed_.wait_for(lock, kLook);
  if (!serverGone_ || ends()) return why;
  GPUPOOL_INFO("the session stands still: whether it is held in files, the next server says");
  decision_ = Decision::awaited;
  changed_.notify_all();
  while (decision_ == Decision::awaited && !ends()) changed_.wait_for(lock, kLook);
  return std::exchange(decision_, Decision::none) == Decision::leaves ? "" : why;
}

bool Suspender::decided(bool held) {
  std::lock_guard lock(mutex_);
  serverGone_ = false;
  const bool awaited = decision_ == Decision::awaited;
  if (held && !awaited && !leaves_) return false;
  if (awaited) decision_ = held ? Decision::leaves : Decision::stays;
  leaves_ = held;
  changed_.notify_all();
  return true;
}

MoveOutcome Suspender::carryOutPages(const Order& order, Descriptor& state) {
  MoveOutcome outcome;
  StateSocket socket{std::move(state), [this] { return givesUp(); }};
  std::vector<std::byte> said;
  Id base;
  const bool heard = socket.receiveBlock(said, sizeof base);
  if (!heard || (!said.empty() && said.size() != sizeof base)) {
    outcome.error = heard ? "who keeps the checkpoint names another one" : socket.error();
    return outcome;
  }
  if (!said.empty()) std::memcpy(&base, said.data(), sizeof base);
  const auto began = Clock::now();
  outcome.error = standStill({began + order.drain, &alone_});
  outcome.drainMs = millisecondsSince(began);
  if (!outcome.error.empty()) outcome.error = session_.whyNotMoved(outcome.error);
  if (outcome.error.empty()) {
    outcome.error = copyPages(socket, base, outcome);
  } else {
    session_.letClientStay();
  }
  if (!outcome.error.empty()) GPUPOOL_WARNING("not copied: %s", outcome.error.c_str());
  return outcome;
}

// Everything stands still, until goOn.
std::string Suspender::copyPages(StateSocket& socket, const Id& base, MoveOutcome& outcome) {
  const auto still = Clock::now();
  session_.tellOutput();
  session_.parkWords(true);
  session_.space().takeStock();
  auto copy = std::make_unique<PageCopy>(session_, sent_);
  std::string why = copy->look(base);
  const uint32_t lookMs = millisecondsSince(still);
  const bool aside = why.empty() && copy->setAside();
  const auto goesOn = [&] {
    goOn();
    outcome.pauseMs = millisecondsSince(still);
  };
  sendsPages_ = aside;
  if (aside) goesOn();
  if (why.empty())
    GPUPOOL_INFO("a checkpoint is sent%s: %zu of %zu pages",
                 aside ? "" : " while the session stands still, for it has no spare memory", copy->changed(),
                 copy->pages());
  if (why.empty()) why = copy->ship(socket);
  outcome.movedBytes = copy->bytes();
  const size_t pages = copy->pages(), changed = copy->changed();
  const uint32_t describeMs = copy->describeMs();
  copy = nullptr;
  sendsPages_ = false;
  if (!aside) goesOn();
  if (why.empty())
    GPUPOOL_INFO(
        "copied: %zu of %zu pages, %llu bytes; stood still for %u ms, %u of them to find those "
        "(%u to describe the session), after %u ms of waiting for the device",
        changed, pages, static_cast<unsigned long long>(outcome.movedBytes), outcome.pauseMs, lookMs,
        describeMs, outcome.drainMs);
  return why;
}

void Suspender::goOn() {
  if (stopping()) return;
  session_.parkWords(false);
  session_.gate().open();
  session_.letClientStay();
}

std::string Suspender::lookAtContents(HostDigests hostBy, Digests& seen) {
  if (!compares_) return "";
  session_.space().takeStock();
  Contents contents;
  const std::string why = findContents(session_, contents);
  return why.empty() ? contentDigests(session_, contents, hostBy, seen) : why;
}

std::string Suspender::sendClientAway(const Order& order) {
  {
    std::lock_guard lock(mutex_);
    leaves_ = order.hold;
    changed_.notify_all();
  }
  if (session_.sendClientAway(order.epoch, order.hold)) return "";
  {
    std::lock_guard lock(mutex_);
    leaves_ = false;
  }
  return stopping() ? "the session is ending" : "the program does not reach the other worker";
}

// The other worker may hold some of the device's memory for a moment longer: its process ends.
std::string Suspender::comeHome() {
  const auto deadline = Clock::now() + kOtherEnds;
  session_.makeAnyCurrent();
  std::string why = bringPiecesIn(session_, *link_);
  while (!why.empty() && !link_->lost() && !stopping() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    why = bringPiecesIn(session_, *link_);
  }
  return why;
}

}  // namespace gpupool::server
