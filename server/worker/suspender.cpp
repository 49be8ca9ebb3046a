#include "server/worker/suspender.h"

#include <unistd.h>

#include <algorithm>

#include "base/log.h"
#include "server/worker/suspender_waits.h"

namespace gpupool::server {
namespace {

constexpr std::chrono::milliseconds kLookAtCopier{1000};
constexpr std::chrono::milliseconds kApart{2000};

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
    changed_.wait_until(lock, std::min(deadline, Clock::now() + std::chrono::milliseconds(100)), over);
  return over();
}

std::string Suspender::apart() {
  std::unique_lock lock(mutex_);
  const auto stays = [this] {
    if (leaves_ || decision_ == Decision::awaited) return true;
    return !(busy_ && moves_) &&
           std::none_of(orders_.begin(), orders_.end(), [](const Order& order) { return order.streams(); });
  };
  alone_ = serverGone_ = true;
  changed_.notify_all();
  const bool alone = changed_.wait_for(lock, kApart, stays);
  alone_ = !alone;
  return alone ? "" : "it is being moved";
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
    const bool moves = moves_ = order.streams();
    lock.unlock();
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
// death; while its lease is suspended only the holder has one. One over shared memory is not protected.
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

}  // namespace gpupool::server
