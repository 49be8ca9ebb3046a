#include "server/worker/session.h"

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "server/arena_mmap.h"
#include "server/worker/dispatch.h"
#include "server/worker/loss.h"
#include "server/worker/session_wire.h"

namespace gpupool::server {

using schema::Frame;
using schema::NoticeType;
using transport::Channel;
using transport::Peer;

namespace {

constexpr size_t kMostBeside = 64;
constexpr std::chrono::microseconds kPoll{100};
constexpr std::chrono::seconds kLeavingBound{5};
constexpr size_t kMostQueued =
    4096;  // a client's thread waits for its call, so it has no more threads than that

std::vector<CUdevice> driverDevices(const Driver& driver, const SessionStart& start) {
  std::vector<CUdevice> devices;
  for (size_t index = 0; index < start.devices.size(); ++index) {
    CUdevice handle = 0;
    driver.cuDeviceGet(&handle, start.ordinal(index));
    devices.push_back(handle);
  }
  return devices;
}

// The client's line if a device was lost just now, with the calling thread's context; else empty.
std::string lossOf(const Driver& driver, const SessionStart& start, CUresult status, std::string_view call) {
  if (!isLoss(status, call) || start.devices.empty()) return "";
  uint32_t ordinal = start.devices[0].info.ordinal;
  CUdevice device = 0;
  for (size_t index = 0; index < start.devices.size(); ++index)
    if (CUdevice handle = 0; driver.cuCtxGetDevice(&device) == CUDA_SUCCESS &&
                             driver.cuDeviceGet(&handle, start.ordinal(index)) == CUDA_SUCCESS &&
                             handle == device)
      ordinal = start.devices[index].info.ordinal;
  const std::string text = driver.describe(status);
  if (!deviceLost(ordinal, text)) return "";
  return "GPU " + std::to_string(ordinal) + " of the server is lost: " + text +
         "; the pool places nothing on it any more: start the program again";
}

}  // namespace

std::vector<uint64_t> Session::limits(const SessionStart& start) {
  std::vector<uint64_t> bytes;
  bytes.reserve(start.devices.size());
  for (auto& device : start.devices)
    bytes.push_back(device.memoryBytes ? device.memoryBytes : device.info.memoryBytes);
  return bytes;
}

Session::Session(const Driver& driver, const SessionStart& start,
                 std::unique_ptr<transport::Connection> connection, HostPages pages,
                 std::unique_ptr<Account> account)
    : driver_(driver),
      start_(start),
      objects_(driverDevices(driver, start)),
      account_(account != nullptr ? std::move(account) : std::make_unique<OwnAccount>(limits(start))),
      objectMemory_(*account_),
      space_(driver, objects_.devices(), *account_),
      hashers_(driver, start.isProtected),
      connected_(connection != nullptr),
      connection_(std::move(connection)),
      views_(driver, std::move(pages)),
      words_(
          driver, objects_, views_.words(),
          [this](const std::vector<schema::WordUpdate>& reached) {
            if (!mapsMemory()) tellWords(reached);
          },
          [this](CUresult status) {
            awaitLeaving(status, "");
            sendErrors(status);
            schema::FailedBody body{completed_, static_cast<uint32_t>(status), 0};
            const std::string loss = lossOf(driver_, start_, status, "");
            notice(NoticeType::failed, &body, sizeof body, loss.empty() ? driver_.describe(status) : loss);
          }),
      images_(ImageCache(Descriptor(start.moduleCache), start.moduleCacheBytes)),
      sharedEvents_(driver, *account_) {
  space_.onFull([this] { return reclaimSpare(); });
  adoptContextAhead();
}

// The server ends this process, and the client hears nothing of the loss but that: it makes its calls again
// on another device. Where the session has nothing to go on from, the server lets it be.
void Session::awaitLeaving(CUresult status, std::string_view call) {
  if (!start_.holderKeeps || !isLoss(status, call)) return;
  const std::string told = lossOf(driver_, start_, status, call);
  for (const auto until = std::chrono::steady_clock::now() + kLeavingBound;
       !stopping_ && std::chrono::steady_clock::now() < until;)
    std::this_thread::sleep_for(kPoll);
  if (told.empty()) return;
  schema::FailedBody body{completed_, static_cast<uint32_t>(status), 0};
  notice(NoticeType::failed, &body, sizeof body, told);
}

void Session::adoptContextAhead() {
  CUdevice device = 0;
  CUcontext warm = views_.warmContext();
  if (warm == nullptr || driver_.cuCtxPushCurrent_v2(warm) != CUDA_SUCCESS) return;
  if (driver_.cuCtxGetDevice(&device) == CUDA_SUCCESS) {
    primaries_[device] = warm;
    const auto& mine = objects_.devices();
    const auto at = std::find(mine.begin(), mine.end(), device);
    if (at != mine.end()) contextAhead_ = static_cast<unsigned>(at - mine.begin()) + 1;
  }
  driver_.cuCtxPopCurrent_v2(&warm);
}

Session::~Session() {
  end("worker shuts down");
  besideReady_.notify_all();
  callbackDone_.notify_all();
  for (auto& thread : besideThreads_) thread.join();
  if (control_.joinable()) control_.join();
  words_.stop();
}

void Session::end(const std::string& reason) {
  {
    std::lock_guard lock(endMutex_);
    if (endReason_.empty()) endReason_ = reason;
  }
  {
    std::lock_guard lock(besideMutex_);
    stopping_ = true;
  }
  besideReady_.notify_all();
  {
    std::lock_guard lock(callbackMutex_);
  }
  callbackDone_.notify_all();
  {
    std::lock_guard lock(asideMutex_);
  }
  asideServed_.notify_all();
  gate_.cut();
}

void Session::stop(const std::string& reason) {
  // Its words are the client's still where another worker of it runs: before it came here, and when it has
  // left.
  if (connection_ == nullptr || clientLeft_) return end(reason);
  schema::FailedBody body{completed_, CUDA_ERROR_DEVICE_UNAVAILABLE, 0};
  notice(NoticeType::failed, &body, sizeof body, reason);
  words_.setSticky(CUDA_ERROR_DEVICE_UNAVAILABLE);
  end(reason);
}

namespace {
thread_local uint64_t current = 0;  // the id of the context that makeCurrent left current on this thread
}  // namespace

CUresult Session::makeCurrentAgain(uint64_t id) {
  current = 0;
  return makeCurrent(id);
}

CUresult Session::makeCurrent(uint64_t id, const HostView** view) {
  thread_local uint64_t seen = 0;
  thread_local const HostView* currentView = nullptr;
  thread_local bool relaxed = false;
  const uint64_t ended = contextsEnded_.load(std::memory_order_acquire);
  if (!relaxed) {
    // Captures begin relaxed here and every thread is relaxed: mode and ownership are enforced by the client.
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (driver_.cuThreadExchangeStreamCaptureMode) driver_.cuThreadExchangeStreamCaptureMode(&mode);
    relaxed = true;
  }
  if (view != nullptr && seen == ended) *view = currentView;
  if (id == 0) return CUDA_SUCCESS;
  CUresult result = CUDA_SUCCESS;
  if (current != id || seen != ended) {  // handlers leave the current context as they found it
    CUcontext real = nullptr;
    if (!objects_.find(id, real)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    result = driver_.cuCtxSetCurrent(real);
    current = result == CUDA_SUCCESS ? id : 0;
    currentView = result == CUDA_SUCCESS ? views_.of(real) : nullptr;
    seen = ended;
    if (view != nullptr) *view = currentView;
  }
  if (result == CUDA_SUCCESS && hostLost_.load(std::memory_order_acquire) && hostLost_.exchange(false))
    space_.registerHostAgain();
  return result;
}

// One message of a sequence: its header and private arguments.
const Handler* Session::decode(std::span<const std::byte> message, uint64_t expected, Call& call,
                               std::string& reason) {
  call.reset();
  if (message.size() < sizeof(Frame)) {
    reason = "a frame is shorter than its header";
    return nullptr;
  }
  std::memcpy(&call.frame, message.data(), sizeof call.frame);
  call.bytes.assign(message.begin() + sizeof(Frame), message.end());
  const bool aside = (expected & schema::kAside) != 0;
  const auto number = [&](uint64_t seq) {
    return std::string((seq & schema::kAside) != 0 ? "aside " : "") + std::to_string(seq & ~schema::kAside);
  };
  if (call.frame.epoch != start_.epoch || call.frame.seq != expected) {
    reason = "frame " + number(call.frame.seq) + " of epoch " + std::to_string(call.frame.epoch) +
             " is out of order: expected " + number(expected) + " of epoch " + std::to_string(start_.epoch);
    return nullptr;
  }
  const Handler* handler = findHandler(call.frame.call);
  if (handler == nullptr) {
    reason = "frame " + number(call.frame.seq) + " names no call of the rows";
  } else if (handler->aside != aside) {
    reason = std::string(handler->name) + " is on the wrong channel";
    handler = nullptr;
  }
  return handler;
}

const Handler* Session::check(std::span<const std::byte> message, Call& call, std::string& reason) {
  const Handler* handler = decode(message, lastSeq_ + 1, call, reason);
  if (handler != nullptr) lastSeq_ = call.frame.seq;
  return handler;
}

bool Session::admit(std::span<const std::byte> message, Call& call, std::string& reason) {
  const Handler* handler = check(message, call, reason);
  if (handler == nullptr) return false;
  counts_.frame((call.frame.flags & Frame::kAwait) != 0);
  if (__builtin_expect(call.frame.aside > asides_.load(std::memory_order_acquire), 0))
    awaitAsides(call.frame.aside);
  if (handler->beside) {
    runBeside(std::move(call));
    return true;
  }
  execute(call);
  if (call.malformed != nullptr) {
    reason = std::string(handler->name) + ": " + call.malformed;
    return false;
  }
  completed_ = call.frame.seq;
  return true;
}

// An honest client sent them before the frame. They end with the session at the latest.
void Session::awaitAsides(uint64_t through) {
  std::unique_lock lock(asideMutex_);
  while (asides_ < through && waitsFor(*connection_, stopping_)) asideServed_.wait_for(lock, kTick);
}

bool Session::serveAside(std::span<const std::byte> message, std::string& reason) {
  Call& call = asideCall_;
  const Handler* handler = decode(message, schema::kAside | (asides_ + 1), call, reason);
  if (handler == nullptr) return false;
  execute(call);
  if (call.malformed != nullptr) {
    reason = std::string(handler->name) + ": " + call.malformed;
    return false;
  }
  {
    std::lock_guard lock(asideMutex_);
    ++asides_;
  }
  asideServed_.notify_one();
  return true;
}

void Session::execute(Call& call) {
  const Handler* handler = findHandler(call.frame.call);
  if (!handler->aside) call.status = makeCurrent(call.frame.context, &call.view);
  if (call.status == CUDA_SUCCESS) handler->serve(*this, call);
  const bool untilDone = handler->polls && (call.frame.flags & Frame::kUntilDone) != 0;
  while (untilDone && call.status == CUDA_ERROR_NOT_READY && waitsFor(*connection_, stopping_)) {
    std::this_thread::sleep_for(kPoll);
    call.out.clear();
    handler->serve(*this, call);
  }
  if (call.malformed != nullptr || call.deferred) return;
  if (__builtin_expect(call.status != CUDA_SUCCESS, 0)) {
    awaitLeaving(call.status, handler->name);
    // Ahead of the reply: who sees the error may end at once.
    if (const std::string loss = lossOf(driver_, start_, call.status, handler->name); !loss.empty()) {
      schema::FailedBody body{call.frame.seq, static_cast<uint32_t>(call.status), 0};
      notice(NoticeType::failed, &body, sizeof body, loss);
    }
  }
  GPUPOOL_DEBUG("%llu %s -> %d", static_cast<unsigned long long>(call.frame.seq), handler->name.data(),
                call.status);
  if (call.frame.flags & Frame::kAwait)
    reply(call);
  else if (call.status != CUDA_SUCCESS)
    postFailed(call);
}

CUresult Session::shareHost(uint64_t address, transport::Region region) {
  constexpr auto kAnnounced = std::chrono::seconds(2);  // it was sent ahead of the call
  if (!mapsMemory()) return CUDA_ERROR_NOT_SUPPORTED;
  const auto deadline = transport::Clock::now() + kAnnounced;
  const size_t bytes = connection_->sizeOf(region, deadline);
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (!awaitReleased(address, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  return space_.mapFile(address, bytes, [&](void* at) { return connection_->map(region, at, deadline); });
}

void Session::dropRegion(uint64_t address) {
  std::unique_lock lock(regionsMutex_);
  const auto kept = regions_.extract(address);
  lock.unlock();
  if (kept.empty()) return;
  connection_->unshare(kept.mapped());
  forgetMirror(address);
}

void Session::runBeside(Call call) {
  std::unique_lock lock(besideMutex_);
  if (beside_.size() >= kMostQueued) {
    lock.unlock();
    return endMalformed("more than " + std::to_string(kMostQueued) + " waiting calls at once");
  }
  beside_.push_back(std::move(call));
  if (besideIdle_ < beside_.size() && besideThreads_.size() < kMostBeside)
    besideThreads_.emplace_back([this] { besideLoop(); });
  besideReady_.notify_one();
}

void Session::besideLoop() {
  while (true) {
    Call call;
    {
      std::unique_lock lock(besideMutex_);
      ++besideIdle_;
      besideReady_.wait(lock, [&] { return stopping_ || !beside_.empty(); });
      --besideIdle_;
      if (beside_.empty()) return;
      call = std::move(beside_.front());
      beside_.pop_front();
      ++besideBusy_;
    }
    execute(call);
    {
      std::lock_guard lock(besideMutex_);
      --besideBusy_;
    }
    if (call.malformed != nullptr)
      endMalformed(std::string(findHandler(call.frame.call)->name) + ": " + call.malformed);
  }
}

// False: the session ends.
bool Session::passGate() {
  if (__builtin_expect(beforeFrame_ != nullptr, 0)) beforeFrame_();
  while (!gate_.enter()) {
    if (gate_.awaitOpen(kTick)) return true;
    if (!waitsFor(*connection_, stopping_)) return false;
  }
  return true;
}

uint64_t Session::captureOf(CUstream stream) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  const CUresult result =
      driver_.cuStreamGetCaptureInfo_v3(stream, &status, &id, nullptr, nullptr, nullptr, nullptr);
  return result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE ? id : 0;
}

bool Session::besideIdle() {
  std::lock_guard lock(besideMutex_);
  return beside_.empty() && besideBusy_ == 0;
}

std::vector<uint64_t> Session::keptBytes() const {
  std::vector<uint64_t> bytes;
  bytes.reserve(start_.devices.size());
  for (unsigned device = 0; device < start_.devices.size(); ++device)
    bytes.push_back(objectMemory_.bytes(device));
  return bytes;
}

unsigned Session::architecture() const {
  int major = 0, minor = 0;
  const CUdevice device = objects_.devices().at(0);
  driver_.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  driver_.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  return static_cast<unsigned>(major * 10 + minor);
}

void Session::makeAnyCurrent() {
  bool made = false;
  objects_.forEach(HandleKind::context, [&](uint64_t, uint64_t real) {
    made = made || driver_.cuCtxSetCurrent(reinterpret_cast<CUcontext>(real)) == CUDA_SUCCESS;
  });
}

void Session::endMalformed(const std::string& reason) {
  schema::FailedBody body{lastSeq_, CUDA_ERROR_UNKNOWN, 0};
  notice(NoticeType::failed, &body, sizeof body, reason);
  words_.setSticky(CUDA_ERROR_UNKNOWN);
  end("malformed frame: " + reason);
}

std::string Session::run() {
  std::string reason;
  if (!greet(reason)) return reason;
  reserveGlobalArena();
  control_ = std::thread([this] { controlLoop(); });
  Call call;  // one for all frames: its buffers keep their room
  while (!stopping_) {
    // The clock is read only when nothing is there yet.
    auto message = connection_->receive(Channel::call, transport::Deadline::min());
    bool over = false;
    if (message.empty()) message = connection_->next(Channel::call, soon(kTick), over);
    if (over) {
      awaitParting();
      const bool closed = connection_->peer() == Peer::closed;
      end(closed ? "client closed the session" : "client lost: " + connection_->reason());
    } else if (!message.empty() && passGate()) {
      if (!admit(message, call, reason)) endMalformed(reason);
      gate_.leave();
    }
  }
  output_.takeErrors();  // to the log, what is not for the client
  return endReason();
}

std::string Session::endReason() {
  std::lock_guard lock(endMutex_);
  return endReason_;
}

}  // namespace gpupool::server
