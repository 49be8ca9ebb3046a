// What a session says to its client, and what it hears on the control channel.
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "schema/rows.h"
#include "server/worker/dispatch.h"
#include "server/worker/session.h"
#include "server/worker/session_wire.h"

namespace gpupool::server {

using schema::Notice;
using schema::NoticeType;
using transport::Channel;
using transport::Peer;

namespace {

constexpr auto kLettingGo = std::chrono::milliseconds(2000);
constexpr size_t kMostDeliveries = 8192;
constexpr size_t kMostObstacle = 200;
// What is compared before words are told. 64 KiB take some 5 us.
constexpr size_t kMostMirrors = 64, kMostMirrored = size_t{512} << 10;

}  // namespace

std::byte* reserveFor(transport::Connection& client, const std::atomic<bool>& stopping, Channel channel,
                      size_t bytes) {
  if (bytes > client.maxMessage(channel)) return nullptr;
  std::byte* room = nullptr;
  do room = client.reserve(channel, bytes, soon(kTick));
  while (room == nullptr && waitsFor(client, stopping));
  return room;
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
  std::byte* out = reserveFor(*connection_, stopping_, Channel::call, bytes);
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
    std::byte* out = reserveFor(*connection_, stopping_, Channel::call, bytes);
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

// ---- words, and what they say about mirrors

void Session::mirrorAsked(uint64_t set, uint64_t address, size_t bytes) {
  if (set == 0) return;
  if (askedMirrors_.set != set / 2) askedMirrors_ = {set / 2, false, {}};
  const std::pair mirror(address, bytes);
  const bool there = std::ranges::find(askedMirrors_.mirrors, mirror) != askedMirrors_.mirrors.end();
  if (!there && askedMirrors_.mirrors.size() >= kMostMirrors) return;
  if (!there) askedMirrors_.mirrors.push_back(mirror);
  askedMirrors_.complete |= set % 2 == 1;
}

// The set of mirrors, all of which the client knows as they are now; 0: there is no such set.
uint64_t Session::unchangedMirrors() {
  // Not waited for: who holds it may wait for a device, and so for words.
  const std::unique_lock lock(mirrorsMutex_, std::try_to_lock);
  if (!lock.owns_lock() || !askedMirrors_.complete) return 0;
  size_t all = 0;
  for (const auto& [address, bytes] : askedMirrors_.mirrors) {
    all += bytes;
    const auto known = mirrors_.find(address);
    const auto memory = space_.hostMemory(address, bytes);
    // Not managed symbols: looking at them would take their pages away from the device.
    if (all > kMostMirrored || known == mirrors_.end() || memory == nullptr || memory->isOfFile() ||
        known->second.more() || known->second.base().size() < bytes ||
        std::memcmp(reinterpret_cast<const void*>(address), known->second.base().data(), bytes) != 0)
      return 0;
  }
  return askedMirrors_.set;
}

void Session::tellWords(const std::vector<schema::WordUpdate>& reached) {
  const size_t bytes = reached.size() * sizeof reached[0];
  const uint64_t set = unchangedMirrors();
  if (set == 0) {
    notice(NoticeType::words, reached.data(), bytes, {});
    return;
  }
  std::vector<std::byte> body(sizeof set + bytes);
  std::memcpy(body.data(), &set, sizeof set);
  std::memcpy(body.data() + sizeof set, reached.data(), bytes);
  notice(NoticeType::wordsUnchanged, body.data(), body.size(), {});
}

uint64_t Session::notice(NoticeType type, const void* body, size_t bytes, std::string_view text) {
  std::lock_guard lock(noticeMutex_);
  if (connection_ == nullptr) return 0;  // a session that is being rebuilt has nobody to tell yet
  size_t whole =
      sizeof(Notice) + schema::padded(bytes) + (text.empty() ? 0 : 8 + schema::padded(text.size()));
  std::byte* out = reserveFor(*connection_, stopping_, Channel::control, whole);
  if (out == nullptr) return 0;
  schema::Writer writer(out, whole);
  writer.value(Notice{type, static_cast<uint32_t>(start_.epoch), ++effects_});
  writer.raw(body, bytes);
  if (!text.empty()) writer.text(text);
  connection_->commit(Channel::control, whole);
  return effects_;
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
      if (over) {
        std::lock_guard lock(moveMutex_);
        controlRead_ = true;
        moveHeard_.notify_all();
        return;
      }
      if (stayOwed_) sayStay(soon(std::chrono::milliseconds(10)));
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
  } else if (header.type >= NoticeType::stopped && header.type <= NoticeType::stays) {
    const bool numbered = header.type == NoticeType::stopped || header.type == NoticeType::quiet;
    const auto body = numbered ? in.value<schema::StoppedBody>() : schema::StoppedBody{};
    if (!in.bad()) hearMove(header, body.last);
  } else if (header.type == NoticeType::log) {
    const auto body = in.value<schema::LogBody>();
    const auto text = in.text();
    if (!in.bad() && heardLog_)
      heardLog_(
          {body.frameBytes, body.payloadBytes, body.wanted != 0, std::string(text.substr(0, kMostObstacle))});
  } else if (header.type == NoticeType::goodbye) {
    clientLeft_ = true;
    end("client closed the session");
    return false;
  }
  return true;
}

size_t Session::hostFunctionsOpen() {
  std::lock_guard lock(callbackMutex_);
  return callbacksOpen_.size();
}

void Session::tellKept(uint64_t frame, uint64_t aside) {
  ++checkpointsKept_;
  const schema::KeptBody body{frame, aside};
  notice(NoticeType::kept, &body, sizeof body, {});
}

void Session::setSuspended(bool suspended) {
  words_.park(suspended);
  notice(suspended ? NoticeType::suspended : NoticeType::resumed, nullptr, 0, {});
}

}  // namespace gpupool::server
