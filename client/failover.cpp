// The session's worker has died, and its server restores the session in another one, from a checkpoint
// (server/front/keeper.h). What was sent since is sent again from the log of calls (client/call_log.h),
// before anybody else sends anything; where that cannot be done exactly, the session ends, and says why.
//
// The service thread carries it out; nothing comes from a worker meanwhile. As in a move, what it holds keeps
// every other thread from sending. A thread that is inside a call meets a dead connection: what it puts and
// sends then goes into the log alone, as if it had been sent just before the death, and what it waits for
// comes from the new worker. So the old one is not needed any more, and nobody stays inside for long.
#include "base/log.h"
#include "client/replay.h"
#include "client/session.h"
#include "transports/last_words.h"
#include "transports/waiting.h"

namespace gpupool::client {

namespace {

constexpr std::chrono::seconds kMoverBound{5};  // a move that the death has ended winds up
constexpr std::chrono::milliseconds kLook{1};
constexpr std::chrono::milliseconds kTellPause{500};
constexpr unsigned kMostReplays = 4;  // in a row: calls that kill workers must come to an end

std::string plural(uint64_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

}  // namespace

bool Session::isFailover(const std::string& reason) { return reason.starts_with(transport::kFailoverWords); }

// It says so where it is shut down; where it dies, nobody says anything.
bool Session::isServerLost(const transport::Connection& gone) const {
  if (log_ == nullptr || !holderKeeps_) return false;
  return gone.reason().starts_with(transport::kLeavingWords) ||
         (gone.peer() == transport::Peer::lost && !gone.saidReason());
}

bool Session::mayGoOver(const transport::Connection& gone) const {
  return isFailover(gone.reason()) || isServerLost(gone);
}

bool Session::goesOver(const transport::Connection& gone) const {
  return !closing_ && words_->sticky() == CUDA_SUCCESS && gone.peer() != transport::Peer::alive &&
         mayGoOver(gone);
}

bool Session::failOver(const transport::Connection& gone) {
  if (closing_ || log_ == nullptr || !mayGoOver(gone)) return false;
  serverLost_ = !isFailover(gone.reason());
  if (serverLost_)
    GPUPOOL_INFO("the session has lost its server: %s", transport::plainWords(gone.reason()).c_str());
  {
    std::unique_lock lock(moveMutex_);
    for (transport::TimeLeft time(kMoverBound); moverRuns_ && time.any();)
      moveChanged_.wait_for(lock, time.step());
    if (moverRuns_ || !course_.failOver(epoch_ + 1)) return false;
    moverRuns_ = true;
  }
  const bool done = goOn();
  std::lock_guard lock(moveMutex_);
  course_.arrive();
  moverRuns_ = false;
  if (course_.end()) startMover();  // the new worker has asked for a move already
  moveChanged_.notify_all();
  return done;
}

// Ends with the service thread's decision: it goes over, or makes the loss sticky.
bool Session::awaitFailover(const std::shared_ptr<transport::Connection>& gone) {
  if (log_ == nullptr) return false;
  if (!provesGone(*gone) || !mayGoOver(*gone)) return false;
  const Transfers::Outside outside(transfers_);
  while (link() == gone && words_->sticky() == CUDA_SUCCESS && !closing_) std::this_thread::sleep_for(kLook);
  return link() != gone;
}

CUresult Session::fetch(CallLog::Place place, uint64_t at, std::span<std::byte> to,
                        const std::function<bool(transport::Region&, uint64_t&)>& where) {
  std::shared_ptr<transport::Connection> used;
  do {
    const Transfers::Inside inside(transfers_, Transfers::alone);
    transport::Region region;
    uint64_t offset = 0;
    if (!where(region, offset)) return CUDA_ERROR_INVALID_VALUE;
    used = link();
    const transport::Transfer transfer = used->get(to.data(), region, offset, to.size());
    if (transfer != transport::kRefused && used->wait(transfer, transport::kForever)) {
      if (log_ != nullptr) log_->got(place, at, to);
      return CUDA_SUCCESS;
    }
  } while (awaitFailover(used));
  return transferFailed();
}

// Whoever read has met the end of the connection.
bool Session::keepReadersAway() {
  std::unique_lock lock(replyMutex_);
  away_ = true;
  while (receiving_ && !lost_) replied_.wait_for(lock, kTick);
  return !lost_;
}

bool Session::goOn() {
  const auto cancelled = [this] { return closing_ || words_->sticky() != CUDA_SUCCESS; };
  const Transfers::Closed named(transfers_, Transfers::named, cancelled);
  if (!named) return false;
  std::lock_guard frames(enqueueMutex_);
  const Transfers::Closed alone(transfers_, Transfers::alone, cancelled);
  if (!alone) return false;
  std::lock_guard control(controlMutex_);
  const bool readersAway = keepReadersAway();
  std::string why;
  setStill(kMoving, true);
  NextWorker next;
  std::string lost = serverLost_ ? transport::plainWords(link()->reason()) : "";
  link()->close();  // nothing that the old worker has sent arrives any more
  bool done = false, again = readersAway && !cancelled();
  for (unsigned tries = kMostReplays; again && tries != 0; --tries) {
    why.clear();
    next = NextWorker{.replaces = true};
    if (reachNext(next, why))
      why = makeAgain(next);
    else if (log_->state().kept)
      why += " (the checkpoint is " + std::to_string(log_->keptAge().count()) + "s old)";
    done = why.empty();
    again = !done && !cancelled() && nextHasDied(next, why);
    if (again) lost = lossOf(next, why);
  }
  if (!done) {
    GPUPOOL_INFO("the session does not go on: %s", why.c_str());
    if (next.connection != nullptr) next.connection->close();
    beside_ = nullptr;
    if (!closing_)
      tellReason(
          (lost.empty() ? "the GPU server's worker has died" : "the GPU server is gone (" + lost + ")") +
          ", and the session cannot go on from its checkpoint: " + why + "; start the program again");
    words_->setSticky(CUDA_ERROR_DEVICE_UNAVAILABLE);
  }
  {
    std::lock_guard lock(replyMutex_);
    away_ = false;
  }
  replied_.notify_all();
  setStill(kMoving, false);
  return done;
}

// The log still has all that was sent since the checkpoint. The server says whether there is one more worker:
// it restores a checkpoint twice at most. Of one that died before it was reached, or with its server, nobody
// here can tell which: the holder finds out.
bool Session::nextHasDied(const NextWorker& next, const std::string& why) {
  const bool unreached = next.connection == nullptr;
  if (unreached ? !next.given : !provesGone(*next.connection) || !mayGoOver(*next.connection)) return false;
  serverLost_ = unreached ? holderKeeps_ : !isFailover(next.connection->reason());
  GPUPOOL_INFO("the worker of epoch %u has died, too, before the session went on: %s", next.epoch,
               why.c_str());
  beside_ = nullptr;
  std::lock_guard lock(moveMutex_);
  return course_.failOverAgain(next.epoch + 1);
}

std::string Session::lossOf(const NextWorker& next, const std::string& why) const {
  if (!serverLost_) return "";
  return next.connection == nullptr ? why : transport::plainWords(next.connection->reason());
}

std::string Session::makeAgain(NextWorker& next) {
  const schema::WorkerHello& hello = next.hello;
  std::string why;
  const auto entries = log_->since(hello.lastFrame, hello.lastAside, why);
  const auto age = [&]() -> std::string {
    if (hello.lastFrame == 0 && hello.lastAside == 0)
      return log_->state().kept ? " (its last checkpoint, " + std::to_string(log_->keptAge().count()) +
                                      "s old, was lost with whoever kept it)"
                                : " (it had no checkpoint yet)";
    return " (the checkpoint is " + std::to_string(log_->age(hello.lastFrame, hello.lastAside).count()) +
           "s old)";
  };
  if (!entries) return why + age();
  log_->relocate(hello_->stagingAddress, hello.stagingAddress, hello.stagingBytes);
  hello_->stagingAddress = hello.stagingAddress;
  const MoveHooks* hooks = moveHooks_;
  Replay::Target target{*next.connection, next.epoch, {hello.staging.id, hello.staging.generation}, {}, {}};
  for (const schema::MovedRegion& region : next.regions)
    target.pinned[region.address] = {region.region.id, region.region.generation};
  target.lent = [hooks](uint64_t address, transport::Region& region, uint64_t& offset) {
    return hooks != nullptr && hooks->lent(address, region, offset);
  };
  Replay::Settings settings;
  settings.goOnDifferent = goesOnDifferent_;
  settings.cancelled = [this] { return closing_ || words_->sticky() != CUDA_SUCCESS; };
  Replay replay(*entries, std::move(target), settings);
  why = replay.run();
  if (!why.empty() || (hooks != nullptr && !hooks->arrive(replay.pinned(), why))) return why + age();
  switchTo(next);
  hearUnseen(replay);
  const Replay::Counts& counts = replay.counts();
  GPUPOOL_INFO(
      "the session's %s, and it goes on at another one as epoch %u: %s made again, %llu of "
      "kernels, %s repeated, %s compared",
      serverLost_ ? "server is gone" : "worker has died", epoch_, plural(counts.calls, "call").c_str(),
      static_cast<unsigned long long>(counts.kernels), plural(counts.transfers, "transfer").c_str(),
      plural(counts.compared, "answer").c_str());
  if (counts.different != 0)
    GPUPOOL_WARNING(
        "the session goes on at another worker, with other data than the program has seen: %llu of %s "
        "differ, "
        "the first one of %s",
        static_cast<unsigned long long>(counts.different), plural(counts.compared, "answer").c_str(),
        counts.first.c_str());
  return "";
}

// What the program had not seen before the death, in the order that it would have come in.
void Session::hearUnseen(const Replay& replay) {
  {
    std::lock_guard lock(replyMutex_);
    for (const auto& message : replay.unseenReplies()) deliver(message);
  }
  for (const auto& message : replay.unseenNotices()) handleNotice(message);
  if (!replay.unseenOutput().empty()) hearOutput(replay.unseenOutput());
  for (const auto& [index, value] : replay.words()) logWord(index, value);
  for (const auto& [index, value] : replay.words()) showWord(index, value);
  words_->ring();
}

// ---- the log of calls

void Session::logCall(bool aside, std::span<const std::byte> message, uint8_t traits) {
  log_->sent(aside, message, traits);
  if (!aside && log_->turnsWanted()) tellLog(true);  // under this channel's lock only
}

void Session::logPut(CallLog::Place place, uint64_t at, const void* from, size_t bytes) {
  log_->put(place, at, from, bytes);
  if (log_->turnsWanted()) tellLog(true);
}

void Session::tellLog(bool soon) {
  if (log_ == nullptr) return;
  std::unique_lock control(controlMutex_, std::try_to_lock);
  const auto now = transport::Clock::now();
  if (!control.owns_lock() || (!soon && now - logToldAt_ < kTellPause)) return;
  CallLog::State state = log_->state();
  connection_->setStallTimeout(silenceBorne());
  if (state.frameBytes == logTold_.frameBytes && state.payloadBytes == logTold_.payloadBytes &&
      state.wanted == logTold_.wanted && state.obstacle == logTold_.obstacle)
    return;
  const size_t bytes =
      sizeof(schema::Notice) + sizeof(schema::LogBody) + 8 + schema::padded(state.obstacle.size());
  std::byte* room = connection_->reserve(transport::Channel::control, bytes, transport::Deadline::min());
  if (room == nullptr) return;
  Writer out(room, bytes);
  out.value(schema::Notice{schema::NoticeType::log, epoch_, 0});
  out.value(schema::LogBody{state.frameBytes, state.payloadBytes, state.wanted ? 1u : 0u, 0});
  out.text(state.obstacle);
  connection_->commit(transport::Channel::control, bytes);
  logTold_ = std::move(state);
  logToldAt_ = now;
}

std::byte* Session::unsentRoom(transport::Channel channel, size_t bytes) {
  auto& room = unsent_[static_cast<size_t>(channel)];
  if (room.size() < bytes) room.resize(bytes);
  return room.data();
}

}  // namespace gpupool::client
