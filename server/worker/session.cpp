#include "server/worker/session.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "schema/rows.h"
#include "server/arena_mmap.h"
#include "server/worker/dispatch.h"
#include "server/worker/loss.h"

namespace gpupool::server {

using schema::Frame;
using schema::Notice;
using schema::NoticeType;
using transport::Channel;
using transport::Peer;

namespace {

constexpr auto kTick = std::chrono::milliseconds(500);
constexpr auto kLettingGo = std::chrono::milliseconds(2000);
constexpr size_t kMostBeside = 64;
constexpr size_t kMostQueued =
    4096;  // a client's thread waits for its call, so it has no more threads than that
constexpr size_t kMostDeliveries = 8192;

transport::Deadline soon(std::chrono::milliseconds wait) { return transport::Clock::now() + wait; }

std::vector<CUdevice> driverDevices(const Driver& driver, const SessionStart& start) {
  std::vector<CUdevice> devices;
  for (auto& device : start.devices) {
    CUdevice handle = 0;
    driver.cuDeviceGet(&handle, static_cast<int>(device.info.ordinal));
    devices.push_back(handle);
  }
  return devices;
}

std::vector<uint64_t> limits(const SessionStart& start) {
  std::vector<uint64_t> bytes;
  bytes.reserve(start.devices.size());
  for (auto& device : start.devices)
    bytes.push_back(device.memoryBytes ? device.memoryBytes : device.info.memoryBytes);
  return bytes;
}

// A client that says or takes nothing may be stopped, or in a debugger: the transport says when it is lost.
bool waitsFor(const transport::Connection& client, const std::atomic<bool>& stopping) {
  return !stopping && client.peer() == Peer::alive;
}

std::byte* reserve(transport::Connection& client, const std::atomic<bool>& stopping, Channel channel,
                   size_t bytes) {
  if (bytes > client.maxMessage(channel)) return nullptr;
  std::byte* room = nullptr;
  do room = client.reserve(channel, bytes, soon(kTick));
  while (room == nullptr && waitsFor(client, stopping));
  return room;
}

// The client's line if a device was lost just now, with the calling thread's context; else empty.
std::string lossOf(const Driver& driver, const SessionStart& start, CUresult status, std::string_view call) {
  if (!isLoss(status, call) || start.devices.empty()) return "";
  uint32_t ordinal = start.devices[0].info.ordinal;
  CUdevice device = 0;
  for (const auto& leased : start.devices)
    if (CUdevice handle = 0;
        driver.cuCtxGetDevice(&device) == CUDA_SUCCESS &&
        driver.cuDeviceGet(&handle, static_cast<int>(leased.info.ordinal)) == CUDA_SUCCESS &&
        handle == device)
      ordinal = leased.info.ordinal;
  const std::string text = driver.describe(status);
  if (!deviceLost(ordinal, text)) return "";
  return "GPU " + std::to_string(ordinal) + " of the server is lost: " + text +
         "; the pool places nothing on it any more: start the program again";
}

}  // namespace

Session::Session(const Driver& driver, const SessionStart& start,
                 std::unique_ptr<transport::Connection> connection, HostPages pages,
                 std::unique_ptr<Account> account)
    : driver_(driver),
      start_(start),
      objects_(driverDevices(driver, start)),
      account_(account != nullptr ? std::move(account) : std::make_unique<OwnAccount>(limits(start))),
      objectMemory_(*account_),
      space_(driver, objects_.devices(), *account_),
      connection_(std::move(connection)),
      views_(driver, std::move(pages)),
      words_(
          driver, objects_, views_.words(),
          [this](const std::vector<schema::WordUpdate>& reached) {
            if (!mapsMemory())
              notice(NoticeType::words, reached.data(), reached.size() * sizeof reached[0], {});
          },
          [this](CUresult status) {
            sendErrors(status);
            schema::FailedBody body{completed_, static_cast<uint32_t>(status), 0};
            const std::string loss = lossOf(driver_, start_, status, "");
            notice(NoticeType::failed, &body, sizeof body, loss.empty() ? driver_.describe(status) : loss);
          }),
      images_(ImageCache(Descriptor(start.moduleCache), start.moduleCacheBytes)) {
  CUdevice device = 0;
  CUcontext warm = views_.warmContext();
  if (warm == nullptr || driver_.cuCtxPushCurrent_v2(warm) != CUDA_SUCCESS) return;
  if (driver_.cuCtxGetDevice(&device) == CUDA_SUCCESS) primaries_[device] = warm;
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
}

void Session::stop(const std::string& reason) {
  schema::FailedBody body{completed_, CUDA_ERROR_DEVICE_UNAVAILABLE, 0};
  notice(NoticeType::failed, &body, sizeof body, reason);
  words_.setSticky(CUDA_ERROR_DEVICE_UNAVAILABLE);
  end(reason);
}

void Session::describeDevices(schema::WorkerHello& hello) {
  hello.deviceCount = static_cast<uint32_t>(objects_.devices().size());
  auto bytes = limits(start_);
  for (size_t d = 0; d < objects_.devices().size(); ++d) {
    schema::DeviceProperties& properties = hello.devices[d];
    CUdevice device = objects_.devices()[d];
    driver_.cuDeviceGetName(properties.name, sizeof properties.name, device);
    (driver_.cuDeviceGetUuid_v2 ? driver_.cuDeviceGetUuid_v2 : driver_.cuDeviceGetUuid)(&properties.uuid,
                                                                                        device);
    properties.luidStatus = driver_.cuDeviceGetLuid
                                ? driver_.cuDeviceGetLuid(properties.luid, &properties.luidMask, device)
                                : CUDA_ERROR_NOT_SUPPORTED;
    driver_.cuDeviceGetPCIBusId(properties.pciBusId, sizeof properties.pciBusId, device);
    size_t total = 0;
    driver_.cuDeviceTotalMem_v2(&total, device);
    properties.totalBytes = total;
    properties.limitBytes = std::min<uint64_t>(bytes[d], total);
    for (int a = 1; a < schema::kDeviceAttributes; ++a)
      properties.attributeKnown[a] =
          driver_.cuDeviceGetAttribute(&properties.attributes[a], static_cast<CUdevice_attribute>(a),
                                       device) == CUDA_SUCCESS;
    for (size_t other = 0; other < objects_.devices().size(); ++other) {
      if (other == d) continue;
      driver_.cuDeviceCanAccessPeer(&properties.canAccessPeer[other], device, objects_.devices()[other]);
      for (int a = 1; a < schema::kP2PAttributes; ++a)
        if (driver_.cuDeviceGetP2PAttribute)
          driver_.cuDeviceGetP2PAttribute(&properties.p2p[other][a], static_cast<CUdevice_P2PAttribute>(a),
                                          device, objects_.devices()[other]);
    }
  }
}

bool Session::greet(std::string& reason) {
  std::span<const std::byte> message;
  while (message.empty() && waitsFor(*connection_, stopping_))
    message = connection_->receive(Channel::call, soon(kTick));
  schema::ClientHello client;
  auto hello = std::make_unique<schema::WorkerHello>();
  hello->protocol = schema::kProtocolVersion;
  hello->rowsHash = schema::rowsHash();
  hello->epoch = start_.epoch;
  CUresult refusal = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
  if (message.empty()) {
    reason = stopping_ ? endReason() : "the client sent no greeting";
    refusal = CUDA_ERROR_DEVICE_UNAVAILABLE;
  } else if (message.size() != sizeof client) {
    reason = "the client's greeting is not gpupool's";
  }
  if (reason.empty()) {
    std::memcpy(&client, message.data(), sizeof client);
    if (client.magic != schema::kClientMagic)
      reason = "the client's greeting is not gpupool's";
    else if (client.protocol != schema::kProtocolVersion || client.rowsHash != schema::rowsHash())
      reason = "version mismatch: client speaks protocol " + std::to_string(client.protocol) + ", worker " +
               std::to_string(schema::kProtocolVersion) +
               ", or their call rows differ; install the same gpupool on both";
    else if (client.epoch != start_.epoch)
      reason = "the client's epoch is not the session's";
  }
  if (reason.empty()) {
    int space = space_.reserve(client.spaces, reason);
    if (space >= 0) hello->space = static_cast<uint32_t>(space);
    if (space < 0) refusal = CUDA_ERROR_OUT_OF_MEMORY;
  }
  if (reason.empty()) {
    space_.addStaging(views_.staging());
    auto name = [](transport::Region region) { return schema::RegionName{region.id, region.generation}; };
    hello->words = name(connection_->share(words_.memory()));
    hello->staging = name(connection_->share(views_.staging()));
    hello->stagingAddress = reinterpret_cast<uint64_t>(views_.staging()->data());
    hello->stagingBytes = views_.staging()->size();
    driver_.cuDriverGetVersion(&hello->driverVersion);
    hello->softwareDriver = driver_.software();
    describeDevices(*hello);
  } else {
    hello->status = refusal;
    std::snprintf(hello->text, sizeof hello->text, "%s", reason.c_str());
  }
  std::byte* out = reserve(*connection_, stopping_, Channel::call, sizeof *hello);
  if (out == nullptr) {
    if (reason.empty()) reason = "the client went away while greeting: " + connection_->reason();
    return false;
  }
  std::memcpy(out, hello.get(), sizeof *hello);
  connection_->commit(Channel::call, sizeof *hello);
  return reason.empty();
}

CUresult Session::makeCurrent(uint64_t id, const HostView** view) {
  thread_local uint64_t current = 0, seen = 0;
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
  if (call.malformed != nullptr || call.deferred) return;
  if (__builtin_expect(call.status != CUDA_SUCCESS, 0)) {
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

void Session::deliver(std::shared_ptr<transport::SharedMemory> memory, uint64_t address, size_t bytes,
                      transport::Region region, uint64_t offset) {
  transport::Transfer sent = connection_->put(reinterpret_cast<const void*>(address), region, offset, bytes);
  if (sent == transport::kRefused) {
    if (connection_->peer() == Peer::alive)
      endMalformed("sessionRead: bytes for memory the client does not share");
    return;
  }
  std::lock_guard lock(deliveriesMutex_);
  deliveries_.emplace_back(sent, std::move(memory));
  dropDelivered();
}

// put waits at the transport's own bound, so what is older than that has ended, well or not.
void Session::dropDelivered() {
  while (!deliveries_.empty() && (deliveries_.size() > kMostDeliveries ||
                                  connection_->wait(deliveries_.front().first, transport::Deadline::min())))
    deliveries_.pop_front();
}

// A client that names the place again has its bytes: what is awaited is that the transport notices it, too.
bool Session::awaitReleased(uint64_t address, size_t bytes) {
  for (auto end = soon(kLettingGo); !space_.hostReleased(address, bytes);) {
    if (transport::Clock::now() > end) return false;
    {
      std::lock_guard lock(deliveriesMutex_);
      dropDelivered();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

void Session::dropRegion(uint64_t address) {
  auto found = regions_.find(address);
  if (found == regions_.end()) return;
  connection_->unshare(found->second);
  regions_.erase(found);
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
    }
    execute(call);
    if (call.malformed != nullptr)
      endMalformed(std::string(findHandler(call.frame.call)->name) + ": " + call.malformed);
  }
}

void Session::reply(const Call& call) {
  if (call.status != CUDA_SUCCESS) sendErrors(call.status);
  std::lock_guard lock(replyMutex_);
  std::string text = call.drained ? sendOutput(call) : std::string();
  auto outputs = call.out.span();
  size_t bytes = sizeof(schema::Reply) + outputs.size() + schema::padded(text.size());
  if (bytes > connection_->maxMessage(Channel::call)) {
    end("a reply of " + std::to_string(bytes) + " bytes does not fit a message");
    return;
  }
  std::byte* out = reserve(*connection_, stopping_, Channel::call, bytes);
  if (out == nullptr) {
    // Lost, or alive and not reading: either way somebody waits for this reply, and it must not be dropped in
    // silence.
    end("the client took no reply: " + connection_->reason());
    return;
  }
  schema::Reply header;
  header.seq = call.frame.seq;
  header.epoch = call.frame.epoch;
  // Past the end nothing succeeds: what it waited for was let go, not awaited. And memory is refused because
  // of the end (account.h): the client awaits the reason of this status.
  const bool ofTheEnd = call.status == CUDA_SUCCESS || call.status == CUDA_ERROR_UNKNOWN;
  header.status = ofTheEnd && stopping_ ? CUDA_ERROR_DEVICE_UNAVAILABLE : call.status;
  header.outputBytes = static_cast<uint32_t>(text.size());
  header.admitted = lastSeq_;
  header.completed = completed_;
  std::memcpy(out, &header, sizeof header);
  if (!outputs.empty()) std::memcpy(out + sizeof header, outputs.data(), outputs.size());
  if (!text.empty()) std::memcpy(out + sizeof header + outputs.size(), text.data(), text.size());
  connection_->commit(Channel::call, bytes);
}

// Device output too long for one reply goes ahead of it, in replies to nobody. The rest.
std::string Session::sendOutput(const Call& call) {
  std::string text = output_.take();
  for (; text.size() == Output::kMost; text = output_.take()) {
    size_t bytes = sizeof(schema::Reply) + schema::padded(text.size());
    std::byte* out = reserve(*connection_, stopping_, Channel::call, bytes);
    if (out == nullptr) break;  // the reply itself will not be taken either
    schema::Reply header;
    header.epoch = call.frame.epoch;
    header.outputBytes = static_cast<uint32_t>(text.size());
    std::memcpy(out, &header, sizeof header);
    std::memcpy(out + sizeof header, text.data(), text.size());
    connection_->commit(Channel::call, bytes);
  }
  return text;
}

// The driver writes what a failed assertion says when it notices the failure, at the latest when it
// synchronises. The client waits for this notice before it tells the application of the failure.
void Session::sendErrors(CUresult status) {
  const bool assertion = status == CUDA_ERROR_ASSERT;
  if (assertion && !assertionTold_) driver_.cuCtxSynchronize();
  std::string text = output_.takeErrors();
  if (text.empty() && (!assertion || assertionTold_)) return;
  notice(NoticeType::errors, nullptr, 0, text);
  if (assertion) assertionTold_ = true;
}

// The client was told "success" already. A device fault is CUDA's own asynchronous kind; anything else is a
// promise broken. Both stick: no call of the session succeeds any more, and the client prints which one it
// was.
void Session::postFailed(const Call& call) {
  const Handler* handler = findHandler(call.frame.call);
  schema::FailedBody body{call.frame.seq, static_cast<uint32_t>(call.status), call.frame.call};
  std::string text = std::string(handler->name) + ": " + driver_.describe(call.status);
  sendErrors(call.status);
  words_.setSticky(call.status);
  notice(NoticeType::failed, &body, sizeof body, text);
}

void Session::notice(NoticeType type, const void* body, size_t bytes, std::string_view text) {
  std::lock_guard lock(noticeMutex_);
  size_t whole =
      sizeof(Notice) + schema::padded(bytes) + (text.empty() ? 0 : 8 + schema::padded(text.size()));
  std::byte* out = reserve(*connection_, stopping_, Channel::control, whole);
  if (out == nullptr) return;
  schema::Writer writer(out, whole);
  writer.value(Notice{type, static_cast<uint32_t>(start_.epoch), ++effects_});
  writer.raw(body, bytes);
  if (!text.empty()) writer.text(text);
  connection_->commit(Channel::control, whole);
}

void Session::runCallback(uint64_t callback, CUresult status) {
  {
    std::lock_guard lock(callbackMutex_);
    if (stopping_) return;
    ++callbacksOpen_[callback];
  }
  schema::CallbackBody body{callback, static_cast<uint32_t>(status), 0};
  notice(NoticeType::callback, &body, sizeof body, {});
  std::unique_lock lock(callbackMutex_);
  // No bound of its own: the application's function may take as long as it likes. It ends with the session.
  callbackDone_.wait(lock, [&] { return stopping_ || callbacksOpen_.count(callback) == 0; });
}

void Session::controlLoop() {
  while (!stopping_) {
    bool over = false;
    auto message = connection_->next(Channel::control, soon(kTick), over);
    if (message.empty()) {
      if (over) return;
      sendErrors(CUDA_SUCCESS);
      continue;
    }
    if (!control(message)) return;
  }
}

bool Session::control(std::span<const std::byte> message) {
  schema::Reader in(message);
  auto header = in.value<Notice>();
  if (header.type == NoticeType::watch) {
    auto watch = in.value<schema::WordUpdate>();
    if (!in.bad() && !words_.watch(watch.index, watch.value)) {
      endMalformed("more completion words are watched than a client can wait for");
      return false;
    }
  } else if (header.type == NoticeType::callbackDone) {
    auto body = in.value<schema::CallbackBody>();
    std::lock_guard lock(callbackMutex_);
    auto open = callbacksOpen_.find(body.id);
    if (open != callbacksOpen_.end() && --open->second == 0) callbacksOpen_.erase(open);
    callbackDone_.notify_all();
  } else if (header.type == NoticeType::aside) {
    std::string reason;
    if (!serveAside(message.subspan(sizeof header), reason)) {
      endMalformed(reason);
      return false;
    }
  } else if (header.type == NoticeType::goodbye) {
    clientLeft_ = true;
    end("client closed the session");
    return false;
  }
  return true;
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
      const bool closed = connection_->peer() == Peer::closed;
      end(closed ? "client closed the session" : "client lost: " + connection_->reason());
    } else if (!message.empty() && !admit(message, call, reason)) {
      endMalformed(reason);
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
