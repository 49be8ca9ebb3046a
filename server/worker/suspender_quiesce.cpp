// Suspender: until the session's work is done and nothing of it runs, and what runs where that takes too
// long.
#include <cstring>

#include "base/log.h"
#include "server/worker/suspender.h"
#include "server/worker/suspender_waits.h"

namespace gpupool::server {

// cuCtxSynchronize has no deadline, so a thread waits in it; one at a time, however often it was given up.
struct Suspender::Idle {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  bool givenUp = false;  // the session runs on, and may end a context at any time: no further one is touched
  CUresult status = CUDA_SUCCESS;
};

std::string Suspender::quiesce(const Until& deadline, bool clientStopped) {
  Steps steps(Clock::now(), deadline.left());
  std::string why;
  session_.gate().close();
  while (why.empty()) {
    const bool mayStep = session_.mayWaitForProgram();
    const Still still = lookStill(deadline.sooner(steps.next(Clock::now(), mayStep)), deadline);
    if (still == Still::yes) {
      if (steps.count() != 0)
        GPUPOOL_INFO("the device was waiting for the program: %u calls went one by one", steps.count());
      return "";
    }
    const bool waits = still == Still::call || still == Still::busy;
    if (stopping()) {
      why = "the session is ending";
    } else if (deadline.over() || (!waits && (still != Still::capture || clientStopped))) {
      why = whyNotStill(still, steps);  // a client that has stopped cannot end a capture
    } else if (!waits) {
      letCallsGo();
    } else if (mayStep && steps.due(Clock::now()) && (!clientStopped || session_.gate().empty())) {
      why = letOneGo(deadline, clientStopped, steps, still);
    }
  }
  session_.gate().open();
  return why;
}

void Suspender::letCallsGo() {
  session_.gate().open();
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  session_.gate().close();
}

// A client that has stopped has no frame at the gate: it is asked for one. Returns "" or why it has not
// stopped again; where that was asked late, it is not the client's fault.
std::string Suspender::letOneGo(const Until& deadline, bool clientStopped, Steps& steps, Still still) {
  constexpr std::chrono::milliseconds kComes{20}, kLate{1000};
  FrameGate& gate = session_.gate();
  if (!clientStopped) {
    if (gate.letOne(kComes)) steps.gone();
    return "";
  }
  const bool late = deadline.left() < kLate;
  const uint64_t before = session_.admitted();
  gate.open();
  const std::string why = session_.stepClient(deadline);
  gate.close();
  if (session_.admitted() != before) steps.gone();
  return !why.empty() && late && !session_.isEnding() ? whyNotStill(still, steps) : why;
}

// The gate is closed.
Suspender::Still Suspender::lookStill(const Until& look, const Until& deadline) {
  const auto done = [this] { return (session_.gate().empty() && session_.besideIdle()) || stopping(); };
  if (!lookUntil(look, done) || stopping()) return Still::call;
  if (captureOpen()) return Still::capture;
  if (session_.shared() != 0) return Still::shared;
  const Still still = awaitDevice(look);
  return still == Still::yes ? awaitCopies(deadline) : still;
}

std::string Suspender::whyNotStill(Still still, const Steps& steps) {
  std::string gone;
  if (steps.count() != 0)
    gone =
        "; its GPU was not idle between calls that went one by one (" + std::to_string(steps.count()) + ")";
  switch (still) {
    case Still::call:
      return "a call of the program is still under way in the driver" + whatRuns() + gone;
    case Still::capture:
      return kCaptureOpen;
    case Still::shared:
      return session_.whyShared();
    case Still::fault:
      return "its GPU reports a fault: " + session_.driver().describe(fault_);
    case Still::copies:
      return "what its GPU has copied is still on its way to the program";
    default:
      return "its GPU is still busy" + whatRuns() + gone;
  }
}

// Each stream with its own context current: without one, the driver answers nothing.
template <class Ask>
void Suspender::askStreams(Ask&& ask) {
  const Driver& driver = session_.driver();
  CUcontext before = nullptr;  // the executor's, which remembers it
  driver.cuCtxGetCurrent(&before);
  if (before == nullptr) session_.makeAnyCurrent();
  session_.objects().forEach(HandleKind::stream, [&](uint64_t, uint64_t real) {
    const auto stream = reinterpret_cast<CUstream>(real);
    CUcontext context = nullptr;
    if (driver.cuStreamGetCtx(stream, &context) == CUDA_SUCCESS) driver.cuCtxSetCurrent(context);
    ask(stream);
  });
  driver.cuCtxSetCurrent(before);
}

bool Suspender::captureOpen() {
  bool open = false;
  askStreams([&](CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    const CUresult result = session_.driver().cuStreamIsCapturing(stream, &status);
    open |= result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
  });
  return open;
}

// A wait that was given up may have passed a context that has work again: another one follows it.
Suspender::Still Suspender::awaitDevice(const Until& look) {
  while (true) {
    if (idle_ == nullptr && look.over()) return Still::busy;
    if (idle_ == nullptr) beginIdle();
    std::unique_lock lock(idle_->mutex);
    const auto wake = [&] { return idle_->done; };
    while (!idle_->changed.wait_until(lock, look.next(std::chrono::milliseconds(100)), wake))
      if (look.over() || stopping()) {
        idle_->givenUp = true;
        return Still::busy;
      }
    const bool whole = !idle_->givenUp;
    fault_ = idle_->status;
    lock.unlock();
    idle_ = nullptr;
    if (whole) return fault_ == CUDA_SUCCESS ? Still::yes : Still::fault;
  }
}

void Suspender::beginIdle() {
  std::vector<CUcontext> contexts;
  session_.objects().forEach(HandleKind::context, [&](uint64_t, uint64_t real) {
    contexts.push_back(reinterpret_cast<CUcontext>(real));
  });
  idle_ = std::make_shared<Idle>();
  std::thread([idle = idle_, contexts = std::move(contexts), &driver = session_.driver()] {
    relaxCaptures(driver);
    CUresult status = CUDA_SUCCESS;
    for (CUcontext context : contexts) {
      {
        // Once it is given up, no context that may have ended is named; this call waits for no device.
        std::lock_guard lock(idle->mutex);
        if (idle->givenUp) break;
        if (status == CUDA_SUCCESS) status = driver.cuCtxSetCurrent(context);
      }
      if (status == CUDA_SUCCESS) status = driver.cuCtxSynchronize();
      // A primary context keeps its name when the program has reset it: nothing of it runs.
      if (status == CUDA_ERROR_CONTEXT_IS_DESTROYED) status = CUDA_SUCCESS;
    }
    std::lock_guard lock(idle->mutex);
    idle->status = status;
    idle->done = true;
    idle->changed.notify_all();
  }).detach();
}

// What the idle device has copied for the program is on its way to it: the session is nowhere whole before.
Suspender::Still Suspender::awaitCopies(const Until& deadline) {
  const bool settled = lookUntil(deadline, [this] { return session_.words().settled() || stopping(); });
  return settled && !stopping() ? Still::yes : Still::copies;
}

// For people: what keeps the device from being idle, as far as can be told. No capture is open.
std::string Suspender::whatRuns() {
  const Driver& driver = session_.driver();
  unsigned busy = 0;
  if (session_.gate().empty() && !captureOpen())
    askStreams(
        [&](CUstream stream) { busy += driver.cuStreamQuery(stream) == CUDA_ERROR_NOT_READY ? 1 : 0; });
  std::string text;
  if (busy != 0)
    text += ": " + std::to_string(busy) + (busy == 1 ? " stream has work" : " streams have work");
  if (const size_t open = session_.hostFunctionsOpen(); open != 0)
    text += (text.empty() ? ": " : ", ") + std::to_string(open) +
            (open == 1 ? " host function of the program runs" : " host functions of the program run");
  return text;
}

}  // namespace gpupool::server
