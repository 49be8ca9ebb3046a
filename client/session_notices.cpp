// What the worker says unasked: words, failures, output, host functions to run, the session's being
// suspended.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>

#include "base/log.h"
#include "base/signals.h"
#include "base/write_all.h"
#include "client/process.h"
#include "client/session.h"
#include "transports/waiting.h"

namespace gpupool::client {

using schema::Notice;
using schema::NoticeType;
using transport::Channel;
using transport::Peer;

thread_local bool Session::runningHostFunction __attribute__((tls_model("initial-exec"))) = false;

namespace {

// The device broke: the worker says so ahead of the error.
std::atomic<bool> lossSaid{false};

}  // namespace

bool Session::isLoss(CUresult status) {
  return status == CUDA_ERROR_ECC_UNCORRECTABLE || status == CUDA_ERROR_NVLINK_UNCORRECTABLE;
}

void Session::awaitLoss() {
  constexpr auto kBound = std::chrono::milliseconds(500);
  for (auto end = transport::Clock::now() + kBound; !lossSaid && transport::Clock::now() < end;)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  lossSaid = true;  // or it never will be
}

void Session::writeOutput(int descriptor, std::string_view text) {
  if (descriptor == STDOUT_FILENO) std::fflush(stdout);  // the application's own text first
  writeAll(descriptor, text);
}

void Session::hearOutput(std::string_view text) {
  if (log_ != nullptr) log_->printed(text);
  writeOutput(STDOUT_FILENO, text);
}

void Session::awaitErrors() const {
  constexpr auto kBound = std::chrono::seconds(2);  // it was sent ahead; a worker that died sends nothing
  for (auto end = transport::Clock::now() + kBound; !errorsWritten_ && transport::Clock::now() < end;)
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  errorsWritten_ = true;  // or never will be: the bound is the session's, not every later call's
}

void Session::serviceLoop() {
  while (!closing_) {
    const auto connection = link();
    bool over = false;
    auto message = connection->next(Channel::control, transport::Clock::now() + kTick, over);
    tellLog(false);
    if (!message.empty())
      handleNotice(message);
    else if (over && !wentOver(connection.get()) && !failOver(*connection)) {
      if (!closing_) tellGone();
      return;
    }
  }
}

void Session::setStill(Stillness why, bool still) {
  {
    std::lock_guard lock(suspendedMutex_);
    still_ = still ? still_ | why : still_ & ~why;
    words_->setStill(still_ != 0);
  }
  resumed_.notify_all();
}

void Session::nap(std::chrono::nanoseconds time) {
  if (__builtin_expect(still_.load(std::memory_order_relaxed) == 0, 1)) {
    std::this_thread::sleep_for(time);
    return;
  }
  std::unique_lock lock(suspendedMutex_);
  // A worker that is left may go first: the move ends by itself.
  while (still_ != 0 && words_->sticky() == CUDA_SUCCESS &&
         ((still_ & kMoving) != 0 || link()->peer() == Peer::alive))
    resumed_.wait_for(lock, kTick);
}

void Session::handleNotice(std::span<const std::byte> message) {
  Reader in(message);
  auto header = in.value<Notice>();
  switch (header.type) {
    case NoticeType::wordsUnchanged:
    case NoticeType::words: {
      // A protected program's answers are all compared when calls are made again, so each is asked for.
      const uint64_t set = header.type == NoticeType::wordsUnchanged ? in.value<uint64_t>() : 0;
      const bool known = set != 0 && log_ == nullptr && set == mirrorSet_.load(std::memory_order_acquire);
      if (log_ != nullptr)
        for (Reader ahead = in; ahead.remaining() >= sizeof(schema::WordUpdate);) {
          const auto update = ahead.value<schema::WordUpdate>();
          logWord(update.index, update.value);
        }
      while (in.remaining() >= sizeof(schema::WordUpdate)) {
        const auto update = in.value<schema::WordUpdate>();
        if (known) words_->setUnchanged(update.index, update.value);
        showWord(update.index, update.value);
      }
      words_->ring();
      break;
    }
    case NoticeType::kept: {
      const auto body = in.value<schema::KeptBody>();
      if (log_ != nullptr) log_->kept(body.frame, body.aside);
      break;
    }
    case NoticeType::failed: {
      auto body = in.value<schema::FailedBody>();
      auto text = in.text();
      auto status = static_cast<CUresult>(body.status);
      bool deviceFault = body.call == 0 || isFault(status) || words_->sticky() != CUDA_SUCCESS;
      if (isLoss(status)) {
        static bool printed =
            false;  // this thread's alone; a second notice may follow from the watcher of words
        if (!printed) GPUPOOL_ERROR("%.*s", static_cast<int>(text.size()), text.data());
        printed = lossSaid = true;
      } else if (deviceFault && status != CUDA_ERROR_DEVICE_UNAVAILABLE && status != CUDA_ERROR_UNKNOWN)
        GPUPOOL_INFO("device fault: %.*s", static_cast<int>(text.size()), text.data());
      else if (status == CUDA_ERROR_DEVICE_UNAVAILABLE)
        tellReason(text);
      else
        GPUPOOL_ERROR("%.*s", static_cast<int>(text.size()), text.data());
      words_->setSticky(status);
      break;
    }
    case NoticeType::callback: {
      auto body = in.value<schema::CallbackBody>();
      noteCalled(body.id, body.status);
      observed();
      std::lock_guard lock(hostMutex_);
      hostQueue_.emplace_back(body.id, static_cast<CUresult>(body.status));
      if (!hostThread_) {
        hostThread_ = true;
        SignalsBlocked blocked;
        std::thread([this] { callbackLoop(); }).detach();
      }
      hostReady_.notify_one();
      break;
    }
    case NoticeType::suspended:
    case NoticeType::resumed:
      setStill(kSuspended, header.type == NoticeType::suspended);
      break;
    case NoticeType::prepare:
    case NoticeType::prepareApart:
    case NoticeType::step:
    case NoticeType::drained:
    case NoticeType::drainedToShare:
    case NoticeType::moved:
    case NoticeType::stay:
      hearMove(header,
               header.type == NoticeType::moved ? in.value<schema::MovedBody>() : schema::MovedBody{});
      break;
    case NoticeType::output:
      hearOutput(in.text());
      break;
    case NoticeType::errors:
      if (in.remaining() != 0) writeOutput(STDERR_FILENO, in.text());
      errorsWritten_ = true;
      break;
    default:
      GPUPOOL_WARNING("the worker sent a notice of unknown type %u", static_cast<unsigned>(header.type));
  }
}

uint64_t Session::addHostFunction(const HostFunction& function) {
  std::lock_guard lock(hostMutex_);
  uint64_t id = nextHostFunction_++;
  hostFunctions_[id] = function;
  return id;
}

// Before anybody here can see it.
void Session::noteCalled(uint64_t id, uint32_t status) {
  HostFunction function;
  if (log_ == nullptr || !findHostFunction(id, function)) return;
  log_->called(id, status, function.word);
}

bool Session::findHostFunction(uint64_t id, HostFunction& out) {
  std::lock_guard lock(hostMutex_);
  auto found = hostFunctions_.find(id);
  if (found == hostFunctions_.end()) return false;
  out = found->second;
  return true;
}

void Session::callbackLoop() {
  while (true) {
    std::pair<uint64_t, CUresult> next;
    {
      std::unique_lock lock(hostMutex_);
      hostReady_.wait(lock, [&] { return !hostQueue_.empty(); });
      next = hostQueue_.front();
      hostQueue_.pop_front();
    }
    runHostFunction(next.first, next.second);
  }
}

void Session::runHostFunction(uint64_t id, CUresult status) {
  HostFunction function;
  bool known = findHostFunction(id, function);
  if (known) {
    if (function.prepare) function.prepare();
    if (function.streamCallback != nullptr) fetchOutput();  // the driver has it written before a callback
    {
      const Transfers::Exempt exempt;
      runningHostFunction = true;
      if (function.streamCallback != nullptr)
        function.streamCallback(function.stream, status, function.data);
      else
        function.function(function.data);
      runningHostFunction = false;
    }
    if (function.publish) function.publish();
  }
  if (known && function.once) {
    std::lock_guard lock(hostMutex_);
    hostFunctions_.erase(id);
  }
  std::lock_guard lock(controlMutex_);
  if (log_ != nullptr && known) log_->returned(id);
  const schema::CallbackBody body{id, 0, 0};
  sayControl(NoticeType::callbackDone, &body, sizeof body, transport::kForever);
}

void Session::fetchOutput() {
  if (printing() && !capturing() && link()->peer() == Peer::alive && words_->sticky() == CUDA_SUCCESS)
    await<"sessionOutput">(CUcontext{nullptr});
}

CUresult Session::awaitAsides() {
  if (asidesServed_ >= asides_.load(std::memory_order_acquire)) return CUDA_SUCCESS;
  return await<"sessionOutput">(CUcontext{nullptr});
}

}  // namespace gpupool::client
