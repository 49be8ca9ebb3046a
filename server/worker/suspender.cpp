#include "server/worker/suspender.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "server/worker/session_state.h"
#include "server/worker/suspender_waits.h"

namespace gpupool::server {
namespace {

constexpr std::chrono::milliseconds kLookAtCopier{1000};
constexpr std::chrono::seconds kOtherEnds{30};
constexpr std::chrono::seconds kNextBegins{60};  // with its first context

// And takes it.
uint64_t bytesInStock(Space& space) {
  uint64_t bytes = 0;
  for (const Space::Piece& piece : space.takeStock()) bytes += piece.bytes;
  return bytes;
}

uint32_t millisecondsSince(std::chrono::steady_clock::time_point begin) {
  const auto time = std::chrono::steady_clock::now() - begin;
  return static_cast<uint32_t>(std::chrono::ceil<std::chrono::milliseconds>(time).count());
}

}  // namespace

Suspender::Suspender(Session& session, Report report, ReportMove reportMove)
    : session_(session),
      report_(std::move(report)),
      reportMove_(std::move(reportMove)),
      thread_([this] { run(); }) {}

Suspender::~Suspender() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool Suspender::stopping() const {
  std::lock_guard lock(mutex_);
  return ending_ || session_.stopping();
}

void Suspender::suspend(std::chrono::milliseconds drain, int copier) {
  auto link = std::make_unique<CopierLink>(Descriptor(copier), [this] { return stopping(); });
  {
    std::lock_guard lock(mutex_);
    orders_.push_back({true, drain, std::move(link), 0, -1, false, false});
  }
  changed_.notify_all();
}

void Suspender::resume() {
  {
    std::lock_guard lock(mutex_);
    orders_.push_back({});
  }
  changed_.notify_all();
}

void Suspender::move(std::chrono::milliseconds drain, uint64_t epoch, int copier, int state, bool direct) {
  std::unique_ptr<CopierLink> link;
  if (copier >= 0) link = std::make_unique<CopierLink>(Descriptor(copier), [this] { return stopping(); });
  {
    std::lock_guard lock(mutex_);
    orders_.push_back({false, drain, std::move(link), epoch, state, false, false, false, direct});
  }
  changed_.notify_all();
}

void Suspender::hold(std::chrono::milliseconds drain, uint64_t epoch, int state) {
  {
    std::lock_guard lock(mutex_);
    orders_.push_back({false, drain, nullptr, epoch, state, false, true});
  }
  changed_.notify_all();
}

void Suspender::copy(std::chrono::milliseconds drain, int state) {
  {
    std::lock_guard lock(mutex_);
    orders_.push_back({false, drain, nullptr, 0, state, true, false});
  }
  changed_.notify_all();
}

void Suspender::copyPages(std::chrono::milliseconds drain, int state) {
  {
    std::lock_guard lock(mutex_);
    orders_.push_back({false, drain, nullptr, 0, state, true, false, true});
  }
  changed_.notify_all();
}

void Suspender::settle(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, time, [this] { return !busy_; });
}

uint64_t Suspender::carriedOut() const {
  std::lock_guard lock(mutex_);
  return carriedOut_;
}

bool Suspender::awaitCycle(uint64_t seen, std::chrono::milliseconds time) {
  const auto deadline = Clock::now() + time;
  const auto over = [&] { return carriedOut_ > seen && !suspended_ && orders_.empty(); };
  std::unique_lock lock(mutex_);
  while (!over() && !ending_ && !session_.stopping() && Clock::now() < deadline)
    changed_.wait_for(lock, std::chrono::milliseconds(100), over);
  return over();
}

void Suspender::run() {
  relaxCaptures(session_.driver());
  std::unique_lock lock(mutex_);
  while (!ending_) {
    // Before each order too: those who ask for it again and again must not keep it from ending.
    if (suspended_ && movedBytes_ != 0 && link_->lost()) {
      lock.unlock();
      return lose("the session was suspended, and the server's copier, which kept its memory, has died",
                  session_.start().holderKeeps);
    }
    if (orders_.empty()) {
      const auto wake = [this] { return ending_ || !orders_.empty(); };
      if (suspended_) {
        changed_.wait_for(lock, kLookAtCopier, wake);
      } else {
        changed_.wait(lock, wake);
      }
      continue;
    }
    Order order = std::move(orders_.front());
    orders_.pop_front();
    busy_ = true;
    lock.unlock();
    const bool moves = order.streams();
    const MoveOutcome moved = moves ? carryOutMove(order) : MoveOutcome{};
    const SuspendOutcome outcome = moves ? SuspendOutcome{} : carryOut(order);
    // The program may destroy the context that was current here; the driver must not meet it again.
    session_.driver().cuCtxSetCurrent(nullptr);
    lock.lock();
    suspended_ = moves ? link_ != nullptr : outcome.suspended;
    ++carriedOut_;
    lock.unlock();
    if (moves)
      reportMove_(moved);
    else
      report_(outcome);
    if (moves && !order.copy && moved.error.empty()) session_.leave();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

// A protected session is restored from its checkpoint when its worker ends without a word, as after any other
// death; while its lease is suspended only the holder has one. One over shared memory is never checkpointed.
void Suspender::lose(const std::string& why, bool hasCheckpoint) {
  if (hasCheckpoint && !session_.mapsMemory()) {
    GPUPOOL_ERROR("%s: this worker ends, and the session goes on from its checkpoint", why.c_str());
    _exit(1);
  }
  session_.stop(why + "; start the program again");
}

SuspendOutcome Suspender::carryOut(Order& order) {
  const bool aside = link_ != nullptr;
  if (order.suspend == aside) {  // it is so already
    SuspendOutcome outcome;
    outcome.suspended = aside;
    outcome.movedBytes = aside ? movedBytes_ : 0;
    if (aside) outcome.kept = session_.keptBytes();
    return outcome;
  }
  SuspendOutcome outcome = order.suspend ? goAside(order) : comeBack();
  if (!outcome.error.empty()) {
    GPUPOOL_WARNING("%s: %s", order.suspend ? "not suspended" : "not resumed", outcome.error.c_str());
  } else {
    GPUPOOL_INFO("%s: %llu bytes in %u ms, after %u ms of waiting for the device",
                 order.suspend ? "suspended" : "resumed", static_cast<unsigned long long>(outcome.movedBytes),
                 outcome.moveMs, outcome.drainMs);
  }
  return outcome;
}

SuspendOutcome Suspender::goAside(Order& order) {
  SuspendOutcome outcome;
  const auto began = Clock::now();
  outcome.error = quiesce(began + order.drain);
  outcome.drainMs = millisecondsSince(began);
  if (!outcome.error.empty()) return outcome;
  const auto idle = Clock::now();
  session_.setSuspended(true);
  link_ = std::move(order.link);
  outcome.error = takeAside(outcome);
  outcome.moveMs = millisecondsSince(idle);
  outcome.suspended = outcome.error.empty();
  if (outcome.suspended) {
    outcome.kept = session_.keptBytes();
    movedBytes_ = outcome.movedBytes;
    return outcome;
  }
  link_ = nullptr;
  // It ends, perhaps without its memory: no frame may meet addresses that have none.
  if (session_.stopping()) return outcome;
  session_.setSuspended(false);
  session_.gate().open();
  return outcome;
}

// Every piece to the copier, and its memory to the device. "" or why not, and then all is as it was, or the
// session ends.
std::string Suspender::takeAside(SuspendOutcome& outcome) {
  Space& space = session_.space();
  std::vector<CopierPiece> pieces;
  for (const Space::Piece& piece : space.takeStock()) {
    pieces.push_back({session_.ordinal(piece.device), piece.bytes});
    outcome.movedBytes += piece.bytes;
  }
  if (pieces.empty()) return "";
  session_.makeAnyCurrent();
  if (std::string why = link_->reserve(pieces); !why.empty()) return why;
  size_t taken = 0;
  std::string why = link_->takeOut([&](size_t index) { return space.exportPiece(index); },
                                   [&](size_t index) {
                                     space.letGo(index);
                                     ++taken;
                                   });
  if (why.empty() || taken == 0) return why;
  const std::string lost = bringPiecesIn(session_, *link_);
  if (lost.empty() || stopping()) return why;
  why = "the session's memory was lost on its way to the copier: " + why;
  GPUPOOL_ERROR("what the copier had does not come back: %s", lost.c_str());
  lose(why, session_.start().holderKeeps);
  return why;
}

std::string bringPiecesIn(Session& session, CopierLink& link) {
  Space& space = session.space();
  // Not before the copier has let go of what it may hold of the device (--verify): when it asks for a piece.
  CUresult made = CUDA_ERROR_NOT_READY;
  const std::vector<Space::PieceState> pieces = space.describe();
  std::string why = link.bringIn(
      [&](size_t index) {
        if (made == CUDA_ERROR_NOT_READY) made = space.comeBack();
        return made == CUDA_SUCCESS ? space.exportPiece(index) : -1;
      },
      [&](size_t index) { return session.ordinal(pieces.at(index).device); });
  if (made != CUDA_SUCCESS && made != CUDA_ERROR_NOT_READY)
    why = "no memory for the session on its GPU: " + session.driver().describe(made);
  return why;
}

SuspendOutcome Suspender::comeBack() {
  SuspendOutcome outcome;
  outcome.suspended = true;
  outcome.kept = session_.keptBytes();
  const auto began = Clock::now();
  Space& space = session_.space();
  session_.makeAnyCurrent();
  if (movedBytes_ != 0) outcome.error = bringPiecesIn(session_, *link_);
  if (!outcome.error.empty()) {
    for (size_t i = space.pieces(); i-- > 0;) space.letGo(i);
    return outcome;
  }
  link_ = nullptr;
  outcome.suspended = false;
  outcome.kept.clear();
  outcome.movedBytes = movedBytes_;
  outcome.moveMs = millisecondsSince(began);
  session_.setSuspended(false);
  session_.gate().open();
  return outcome;
}

// The program runs on while the next worker, of this server, makes its first context. "" or why there is
// none.
std::string Suspender::awaitNext(int state) {
  const auto deadline = Clock::now() + kNextBegins;
  const auto late = [deadline] { return Clock::now() >= deadline; };
  StateSocket socket{Descriptor(fcntl(state, F_DUPFD_CLOEXEC, 3)), [&] { return stopping() || late(); }};
  const uint32_t ahead = session_.contextAhead();
  const std::string why =
      socket.send(std::as_bytes(std::span(&ahead, 1))) ? socket.hearAnswer() : socket.error();
  return !why.empty() && late() ? "the next worker has not begun in time" : why;
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
  if (!lookUntil(began + order.drain, [this] { return session_.connected() || stopping(); }) || stopping()) {
    outcome.error = stopping() ? "the session is ending" : "the program has not come to this worker yet";
    return outcome;
  }
  if (order.link == nullptr && !order.copy && session_.mapsMemory()) {
    outcome.error = "the session shares memory with its client";
    return outcome;
  }
  if (order.pages) return carryOutPages(order, state);
  outcome.error = standStill(began + order.drain);
  outcome.drainMs = millisecondsSince(began);
  if (outcome.error.empty()) {
    const auto still = Clock::now();
    order.state = state;
    outcome.error = handOver(order, outcome);
    outcome.pauseMs = millisecondsSince(still);
  }
  if (!outcome.error.empty()) outcome.error = session_.whyNotMoved(outcome.error);
  const char* done = order.copy ? "copied" : "moved";
  if (outcome.error.empty())
    GPUPOOL_INFO("%s: %llu bytes%s, %u ms after %u ms of waiting for the device", done,
                 static_cast<unsigned long long>(outcome.movedBytes),
                 order.direct ? " straight from device to device" : "", outcome.pauseMs, outcome.drainMs);
  else
    GPUPOOL_WARNING("not %s: %s", done, outcome.error.c_str());
  if (order.copy || !outcome.error.empty()) session_.letClientStay();
  return outcome;
}

// The client sends nothing any more, all it has sent is done, and the gate is closed. "" or why not, and then
// the gate is open.
std::string Suspender::standStill(Clock::time_point deadline) {
  std::string why;
  // A capture cannot be ended by a client that has stopped: it is let go on for a moment.
  for (bool first = true; first || (why == kCaptureOpen && Clock::now() < deadline); first = false) {
    if (!first) {
      session_.letClientStay();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const std::string moves = session_.stopClient(deadline);
    // With no time left for another look, what the last one saw is still the reason.
    if (!moves.empty()) return first || stopping() ? moves : why;
    why = quiesce(deadline, false);
  }
  if (!why.empty()) return why;
  why = session_.quietClient(deadline);
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
  std::string why = lookAtContents(true, seen);
  if (order.direct)
    aside.movedBytes = bytesInStock(session_.space());
  else if (why.empty())
    why = takeAside(aside);
  const bool some = why.empty() && aside.movedBytes != 0, away = some && !order.direct;
  outcome.movedBytes = aside.movedBytes;
  movedBytes_ = away ? aside.movedBytes : 0;
  StateSocket socket{Descriptor(fcntl(order.state, F_DUPFD_CLOEXEC, 3)), [this] { return stopping(); }};
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
  StateSocket socket{Descriptor(fcntl(order.state, F_DUPFD_CLOEXEC, 3)), [this] { return stopping(); }};
  Digests seen;
  std::string why = lookAtContents(false, seen);
  if (why.empty()) why = streamState(session_, socket, seen);
  return why.empty() && !order.copy ? sendClientAway(order) : why;
}

MoveOutcome Suspender::carryOutPages(const Order& order, Descriptor& state) {
  MoveOutcome outcome;
  StateSocket socket{std::move(state), [this] { return stopping(); }};
  std::vector<std::byte> said;
  Id base;
  const bool heard = socket.receiveBlock(said, sizeof base);
  if (!heard || (!said.empty() && said.size() != sizeof base)) {
    outcome.error = heard ? "who keeps the checkpoint names another one" : socket.error();
    return outcome;
  }
  if (!said.empty()) std::memcpy(&base, said.data(), sizeof base);
  const auto began = Clock::now();
  outcome.error = standStill(began + order.drain);
  outcome.drainMs = millisecondsSince(began);
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
  copy = nullptr;
  sendsPages_ = false;
  if (!aside) goesOn();
  if (why.empty())
    GPUPOOL_INFO(
        "copied: %zu of %zu pages, %llu bytes; stood still for %u ms, %u of them to find those, after %u ms "
        "of "
        "waiting for the device",
        changed, pages, static_cast<unsigned long long>(outcome.movedBytes), outcome.pauseMs, lookMs,
        outcome.drainMs);
  return why;
}

void Suspender::goOn() {
  if (stopping()) return;
  session_.parkWords(false);
  session_.gate().open();
  session_.letClientStay();
}

std::string Suspender::lookAtContents(bool shared, Digests& seen) {
  if (!compares_) return "";
  session_.space().takeStock();
  Contents contents;
  const std::string why = findContents(session_, contents);
  return why.empty() ? contentDigests(session_, contents, shared, seen) : why;
}

std::string Suspender::sendClientAway(const Order& order) {
  if (session_.sendClientAway(order.epoch, order.hold)) return "";
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
