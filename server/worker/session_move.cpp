// What session and client say to each other when the session goes to another worker (schema/frame.h, "A
// move").
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "server/worker/session.h"
#include "server/worker/session_wire.h"

namespace gpupool::server {

using schema::NoticeType;
using transport::Channel;

namespace {

constexpr auto kLook = std::chrono::milliseconds(1);
constexpr auto kStay = std::chrono::seconds(2);
constexpr auto kPartingBound = std::chrono::seconds(1);  // an aside call may keep the reader
constexpr size_t kTextAtOnce = size_t{16} << 10;
constexpr char kEnding[] = "the session is ending";
// Of one that has been asked to send nothing more, and has not answered.
constexpr char kSaysNothing[] =
    "the program does not say that it stands still: is it stopped, or its machine overloaded?";

}  // namespace

// What answers a move that has been given up meanwhile is passed over.
void Session::hearMove(const schema::Notice& said, uint64_t last) {
  std::lock_guard lock(moveMutex_);
  if (asked_ == 0 || said.effect != asked_) return;
  if (said.type == NoticeType::stopped) stoppedAt_ = last, ++clientStops_;
  if (said.type == NoticeType::quiet) quietAt_ = last;
  if (said.type == NoticeType::left || said.type == NoticeType::stays) left_ = said.type == NoticeType::left;
  // At once: the server may have this worker stopped before leave(), and the client still reads here.
  if (said.type == NoticeType::left) clientLeft_ = true;
  moveHeard_.notify_all();
}

std::string Session::stopClient(const Until& deadline, bool apart) {
  if (!sayStay(deadline)) return whyNotTold();  // of the move before
  const auto prepare = apart && mapsMemory() ? NoticeType::prepareApart : NoticeType::prepare;
  const bool told = noticeUntil(prepare, deadline, [this](uint64_t number) {
    std::lock_guard lock(moveMutex_);
    stoppedAt_ = quietAt_ = std::nullopt;
    left_ = std::nullopt;
    asked_ = number;
    prepared_ = true;
  });
  return told ? awaitStopped(deadline) : whyNotTold();
}

std::string Session::stepClient(const Until& deadline) {
  {
    std::lock_guard lock(moveMutex_);
    stoppedAt_ = std::nullopt;
  }
  return noticeUntil(NoticeType::step, deadline) ? awaitStopped(deadline) : whyNotTold();
}

std::string Session::awaitStopped(const Until& deadline) {
  std::unique_lock lock(moveMutex_);
  while (!stopping_) {
    if (stoppedAt_ && lastSeq_ >= *stoppedAt_) return "";
    if (left_) return "the program cannot go on over a network; it has said why on its stderr";
    if (deadline.over()) return stoppedAt_ ? "frames of the program are still under way" : kSaysNothing;
    moveHeard_.wait_for(lock, kLook);
  }
  return whyNotTold();
}

// A client that has just closed its connection ends; the control thread may not have heard of it yet.
bool Session::isEnding() const {
  return stopping_ || (connected() && connection_->peer() != transport::Peer::alive);
}

std::string Session::whyNotTold() const {
  return isEnding() ? kEnding : "the program does not take messages of its session in time";
}

std::string Session::whyNotMoved(const std::string& why) const {
  return why.starts_with(kEnding) || !isEnding() ? why : std::string(kEnding) + " (" + why + ")";
}

std::string Session::quietClient(const Until& deadline, bool goes) {
  const auto drained = goes && !standsOnHost() ? NoticeType::drainedToShare : NoticeType::drained;
  if (!noticeUntil(drained, deadline)) return whyNotTold();
  std::unique_lock lock(moveMutex_);
  while (!stopping_) {
    if (quietAt_ && asides_ >= *quietAt_) return "";
    if (deadline.over()) return "the program does not become quiet";
    moveHeard_.wait_for(lock, kLook);
  }
  return kEnding;
}

void Session::tellOutput() {
  std::lock_guard lock(replyMutex_);
  for (std::string text = output_.take(); !text.empty(); text = output_.take())
    for (size_t at = 0; at < text.size(); at += kTextAtOnce)
      notice(NoticeType::output, nullptr, 0, std::string_view(text).substr(at, kTextAtOnce));
  sendErrors(CUDA_SUCCESS);
}

void Session::letClientStay() {
  {
    std::lock_guard lock(moveMutex_);
    asked_ = 0;
  }
  if (prepared_.exchange(false)) stayOwed_ = true;
  sayStay(std::chrono::steady_clock::now() + kStay);
}

// Where there is no room for it, the control thread says it later: nothing else of the move waits for it.
bool Session::sayStay(const Until& deadline) {
  std::lock_guard lock(stayMutex_);
  if (!stayOwed_.exchange(false)) return true;
  if (noticeUntil(NoticeType::stay, deadline) || stopping_) return true;
  stayOwed_ = true;
  return false;
}

bool Session::noticeUntil(NoticeType type, const Until& deadline,
                          const std::function<void(uint64_t)>& committing) {
  const auto late = [&] { return stopping_ || deadline.over(); };
  // Whoever holds it may wait for room, too.
  std::unique_lock lock(noticeMutex_, std::try_to_lock);
  for (; !lock.owns_lock() && !late(); (void)lock.try_lock()) std::this_thread::sleep_for(kLook);
  if (!lock.owns_lock() || connection_ == nullptr) return false;
  std::byte* out = nullptr;
  while (out == nullptr && !late() && connection_->peer() == transport::Peer::alive)
    out = connection_->reserve(Channel::control, sizeof(schema::Notice), deadline.next(kTick));
  if (out == nullptr) return false;
  const schema::Notice header{type, static_cast<uint32_t>(start_.epoch), ++effects_};
  std::memcpy(out, &header, sizeof header);
  if (committing) committing(header.effect);
  connection_->commit(Channel::control, sizeof header);
  return true;
}

// No bound: a client may be stopped for as long as somebody likes, and only it knows where it goes on. It
// ends with the connection.
bool Session::sendClientAway(uint64_t epoch, bool held) {
  const schema::MovedBody body{static_cast<uint32_t>(epoch), held ? 1u : 0u};
  notice(NoticeType::moved, &body, sizeof body, {});
  std::unique_lock lock(moveMutex_);
  while (!left_ && !stopping_) moveHeard_.wait_for(lock, kTick);
  asked_ = 0;
  return left_.value_or(false);
}

// An executable graph that copies pinned memory faults when that has been registered anew, at the same
// address (H200, driver 580). Who names such an address in what is recorded is taken for the like.
bool Session::standsOnHost() const {
  const schema::AddressSpace& space = schema::kSpaces[static_cast<size_t>(std::max(space_.reserved(), 0))];
  const auto named = [&](const Record::Entry& entry) {
    uint64_t word = 0;
    for (size_t at = 0; at + sizeof word <= entry.arguments.size(); at += sizeof word) {
      std::memcpy(&word, entry.arguments.data() + at, sizeof word);
      if (word - space.hostBase < space.hostBytes) return true;
    }
    return false;
  };
  return record_.any(named);
}

// A client that has gone over closes this connection at once: its word lies in the control channel still.
void Session::awaitParting() {
  std::unique_lock lock(moveMutex_);
  if (asked_ != 0) moveHeard_.wait_for(lock, kPartingBound, [this] { return controlRead_ || left_; });
}

Session::Numbers Session::numbers() {
  std::lock_guard lock(noticeMutex_);
  return {lastSeq_, asides_, completed_, effects_};
}

void Session::setNumbers(const Numbers& numbers) {
  std::lock_guard lock(noticeMutex_);
  lastSeq_ = numbers.lastFrame;
  asides_ = numbers.lastAside;
  completed_ = numbers.completed;
  effects_ = numbers.effects;
}

bool Session::nameHostRegions() {
  std::vector<schema::MovedRegion> regions;
  for (const auto& [address, memory] : space_.hostPieces()) {
    const transport::Region region = connection_->share(memory);
    keepRegion(address, region);
    regions.push_back({address, {region.id, region.generation}});
  }
  if (regions.empty()) regions.emplace_back();  // no message is empty
  const size_t bytes = regions.size() * sizeof(schema::MovedRegion);
  std::byte* out = reserveFor(*connection_, stopping_, Channel::call, bytes);
  if (out == nullptr) return false;
  std::memcpy(out, regions.data(), bytes);
  connection_->commit(Channel::call, bytes);
  return true;
}

}  // namespace gpupool::server
