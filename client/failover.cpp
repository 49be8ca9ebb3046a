// The session's worker has died, and its server restores the session in another one, from a checkpoint
// (server/front/keeper.h). It goes on there only if the checkpoint has everything that the session has sent:
// every frame, every aside call, and every put and get. What was sent later is lost, and nothing is sent
// again: then the session ends, and says so.
//
// The service thread carries it out; nothing comes from a worker meanwhile. As in a move, what it holds keeps
// every other thread from sending. A thread that was inside a call has failed by then, or fails now: the
// session's sticky error is set before it lets go of what this thread waits for.
#include "base/log.h"
#include "client/session.h"
#include "transports/last_words.h"
#include "transports/waiting.h"

namespace gpupool::client {

namespace {

constexpr std::chrono::seconds kMoverBound{5};  // a move that the death has ended winds up

std::string plural(uint64_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

}  // namespace

bool Session::isFailover(const std::string& reason) { return reason.starts_with(transport::kFailoverWords); }

// Under both channels' locks, with nobody inside transfers_: a copy of the session is being made, or is
// given up. Of several at one frame the first counts.
void Session::noteCut() {
  const uint64_t asides = asides_.load(std::memory_order_relaxed);
  if (cut_ && cut_->frame == seq_ && cut_->aside == asides) return;
  cut_ = Cut{seq_, asides, transfers_.entered(), transport::Clock::now()};
}

// "": all that the session has sent is in what the new worker has.
std::string Session::sentSince(const schema::WorkerHello& restored) const {
  const uint64_t asides = asides_.load(std::memory_order_relaxed);
  if (restored.lastFrame > seq_ || restored.lastAside > asides)
    return "the checkpoint is of a later moment than the program has come to";
  const uint64_t calls = seq_ - restored.lastFrame + (asides - restored.lastAside);
  if (calls != 0)
    return plural(calls, "call") + (calls == 1 ? " was" : " were") + " sent since the checkpoint";
  if (!cut_ || cut_->frame != seq_ || cut_->aside != asides || cut_->transfers != transfers_.entered())
    return "data was transferred since the checkpoint";
  return "";
}

bool Session::failOver(const transport::Connection& gone) {
  if (closing_ || !isFailover(gone.reason())) return false;
  {
    std::unique_lock lock(moveMutex_);
    for (transport::TimeLeft time(kMoverBound); moverRuns_ && time.any();) moveChanged_.wait_for(lock, kTick);
    if (moverRuns_ || !course_.failOver(epoch_ + 1)) return false;
    moverRuns_ = true;
  }
  const bool done = goOn();
  std::lock_guard lock(moveMutex_);
  course_.arrive();
  course_.end();
  moverRuns_ = false;
  moveChanged_.notify_all();
  return done;
}

// Inside transfers_ what was prepared belongs to the worker that is gone. Ends with the service thread's
// decision: it goes over, or makes the loss sticky.
bool Session::awaitFailover() const {
  constexpr auto kLook = std::chrono::milliseconds(1);
  const auto gone = link();
  if (gone->peer() == transport::Peer::alive || !isFailover(gone->reason()) || Transfers::inside())
    return false;
  while (link() == gone && words_->sticky() == CUDA_SUCCESS && !closing_) std::this_thread::sleep_for(kLook);
  return link() != gone;
}

bool Session::goOn() {
  const auto cancelled = [this] { return closing_ || words_->sticky() != CUDA_SUCCESS; };
  const Transfers::Closed named(transfers_, Transfers::named, cancelled);
  if (!named) return false;
  std::lock_guard frames(enqueueMutex_);
  const Transfers::Closed alone(transfers_, Transfers::alone, cancelled);
  if (!alone) return false;
  std::lock_guard control(controlMutex_);
  {
    std::lock_guard lock(replyMutex_);
    if (cancelled() || lost_ || receiving_ || !waiters_.empty()) return false;
  }
  setStill(kMoving, true);
  NextWorker next;
  std::string why;
  bool reached = reachNext(next, why);
  if (reached) {
    why = sentSince(next.hello);
    reached = why.empty();
  }
  if (reached) {
    switchTo(next);
    GPUPOOL_INFO("the session's worker has died, and it goes on at another one as epoch %u", epoch_);
  } else {
    if (next.connection != nullptr) next.connection->close();
    beside_ = nullptr;
    tellReason("the GPU server's worker has died, and the session cannot go on from its checkpoint: " + why +
               "; start the program again");
    words_->setSticky(CUDA_ERROR_DEVICE_UNAVAILABLE);
  }
  setStill(kMoving, false);
  return reached;
}

}  // namespace gpupool::client
