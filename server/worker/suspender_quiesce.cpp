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

std::string Suspender::quiesce(const Until& deadline, bool waits) {
  FrameGate& gate = session_.gate();
  std::string why;
  for (bool first = true; first || (waits && !deadline.over()); first = false) {
    gate.close();
    why = awaitFrames(deadline);
    if (why.empty() && !captureOpen()) {
      why = session_.shared() != 0 ? session_.whyShared() : awaitDevice(deadline);
      if (why.empty()) why = awaitCopies(deadline);
      if (why.empty()) return "";
      break;
    }
    if (!why.empty()) break;
    why = kCaptureOpen;
    gate.open();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  gate.open();
  return stopping() ? "the session is ending" : why;
}

std::string Suspender::awaitFrames(const Until& deadline) {
  const auto done = [this] { return (session_.gate().empty() && session_.besideIdle()) || stopping(); };
  if (lookUntil(deadline, done)) return stopping() ? "the session is ending" : "";
  return "a call of the program is still under way in the driver" + whatRuns();
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

std::string Suspender::awaitDevice(const Until& deadline) {
  const auto finished = [&] {
    std::unique_lock lock(idle_->mutex);
    idle_->changed.wait_until(lock, deadline.next(std::chrono::milliseconds(100)),
                              [&] { return idle_->done; });
    return idle_->done;
  };
  const auto wait = [&] {
    while (!finished())
      if (deadline.over() || stopping()) {
        std::lock_guard lock(idle_->mutex);
        idle_->givenUp = true;
        return idle_->done;
      }
    return true;
  };
  std::vector<CUcontext> contexts;
  session_.objects().forEach(HandleKind::context, [&](uint64_t, uint64_t real) {
    contexts.push_back(reinterpret_cast<CUcontext>(real));
  });
  // One that was given up earlier may have passed a context that has work again.
  if (idle_ != nullptr && !wait()) return "its GPU has been busy since the last attempt" + whatRuns();
  idle_ = std::make_shared<Idle>();
  std::thread([idle = idle_, contexts = std::move(contexts), &driver = session_.driver()] {
    relaxCaptures(driver);
    CUresult status = CUDA_SUCCESS;
    for (CUcontext context : contexts) {
      if (std::lock_guard lock(idle->mutex); idle->givenUp) break;
      if (status == CUDA_SUCCESS) status = driver.cuCtxSetCurrent(context);
      if (status == CUDA_SUCCESS) status = driver.cuCtxSynchronize();
      // A primary context keeps its name when the program has reset it: nothing of it runs.
      if (status == CUDA_ERROR_CONTEXT_IS_DESTROYED) status = CUDA_SUCCESS;
    }
    std::lock_guard lock(idle->mutex);
    idle->status = status;
    idle->done = true;
    idle->changed.notify_all();
  }).detach();
  if (!wait()) return stopping() ? "the session is ending" : "its GPU is still busy" + whatRuns();
  const CUresult status = idle_->status;
  idle_ = nullptr;
  return status == CUDA_SUCCESS ? "" : "its GPU reports a fault: " + session_.driver().describe(status);
}

// What the idle device has copied for the program is on its way to it: the session is nowhere whole before.
std::string Suspender::awaitCopies(const Until& deadline) {
  if (lookUntil(deadline, [this] { return session_.words().settled() || stopping(); }))
    return stopping() ? "the session is ending" : "";
  return "what its GPU has copied is still on its way to the program";
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
