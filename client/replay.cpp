#include "client/replay.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "base/content.h"
#include "client/codec.h"
#include "schema/rows.h"
#include "schema/wire.h"

namespace gpupool::client {

using schema::Frame;
using schema::Notice;
using schema::NoticeType;
using schema::RowOf;
using transport::Channel;
using transport::Clock;
using transport::Peer;

namespace {

constexpr std::chrono::microseconds kNap{50};
constexpr std::chrono::milliseconds kSendLook{2};
constexpr size_t kHeader = sizeof(Frame);
constexpr size_t kRegion = 8 * schema::parameterIndex<RowOf<"sessionRead">, "region">(),
                 kOffset = 8 * schema::parameterIndex<RowOf<"sessionRead">, "offset">(),
                 kTo = 8 * schema::parameterIndex<RowOf<"sessionRead">, "to">(),
                 kBytes = 8 * schema::parameterIndex<RowOf<"sessionRead">, "bytes">(),
                 kWord = 8 * schema::parameterIndex<RowOf<"sessionRead">, "word">(),
                 kValue = 8 * schema::parameterIndex<RowOf<"sessionRead">, "value">();

constexpr char kLacksCode[] =
    "the server where it goes on lacks code that the program has loaded since the checkpoint";

template <class T>
T valueAt(std::span<const std::byte> bytes, size_t offset) {
  T value{};
  if (offset + sizeof value <= bytes.size()) std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}
template <class T>
void setAt(std::span<std::byte> bytes, size_t offset, const T& value) {
  if (offset + sizeof value <= bytes.size()) std::memcpy(bytes.data() + offset, &value, sizeof value);
}

Frame frameOf(const CallLog::Entry& entry) {
  return valueAt<Frame>(entry.bytes, entry.kind == CallLog::Entry::Kind::aside ? sizeof(Notice) : 0);
}

std::string nameOf(const CallLog::Entry& call) {
  const uint32_t row = frameOf(call).call;
  const std::string_view name = row == RowOf<"sessionMirrorCollect">::id
                                    ? "memory of the host that kernels and graphs write"
                                    : schema::callName(row);
  return std::string(name) + " (call " + std::to_string(call.number & ~schema::kAside) + ")";
}

Digest imageOf(std::span<const std::byte> arguments) { return valueAt<Digest>(arguments, 0); }

// With its end, but the last one may have none.
template <class Each>
void eachLine(std::string_view text, Each&& each) {
  while (!text.empty()) {
    const auto line = text.substr(0, std::min(text.find('\n'), text.size() - 1) + 1);
    each(line);
    text.remove_prefix(line.size());
  }
}

// Of code whose bytes are in the server's cache.
bool isLoad(uint32_t call) {
  return call == RowOf<"sessionLibraryLoad">::id || call == RowOf<"sessionModuleLoad">::id;
}

}  // namespace

Replay::Replay(std::vector<CallLog::Entry*> entries, Target target, Settings settings)
    : entries_(std::move(entries)), target_(std::move(target)), settings_(std::move(settings)) {
  for (const Entry* entry : entries_) {
    if (entry->kind == Entry::Kind::frame || entry->kind == Entry::Kind::aside) calls_[entry->number] = entry;
    if (entry->kind == Entry::Kind::reply) replies_[entry->number] = entry;
  }
}

Replay::~Replay() {
  for (const Scratch& scratch : scratch_) target_.connection.unshare(scratch.region);
}

std::string Replay::run() {
  lastHeard_ = Clock::now();
  for (const Entry* entry : entries_) {
    if (!why_.empty()) break;
    step(*entry);
  }
  if (why_.empty()) comparePrints();
  for (Message& message : callbacks_) unseenNotices_.push_back(std::move(message));
  return why_;
}

void Replay::step(const Entry& entry) {
  switch (entry.kind) {
    case Entry::Kind::frame:
      return sendFrame(entry);
    case Entry::Kind::aside:
      return send(entry);
    case Entry::Kind::put:
      return put(entry);
    case Entry::Kind::get:
      return get(entry);
    case Entry::Kind::word:
      return awaitWord(entry.number, entry.value);
    case Entry::Kind::reply:
      return awaitReply(entry.number);
    case Entry::Kind::printed:
      return;  // it may come with another answer than it did: comparePrints
    case Entry::Kind::called:
      return awaitCallback(entry);
    case Entry::Kind::returned:
      return endCallback(entry);
  }
}

// ---- sending

void Replay::send(const Entry& entry) {
  buffer_.assign(entry.bytes.begin(), entry.bytes.end());
  Frame frame = frameOf(entry);
  frame.epoch = target_.epoch;
  setAt(buffer_, sizeof(Notice), frame);
  setAt(buffer_, 0, Notice{NoticeType::aside, target_.epoch, 0});
  ++counts_.calls;
  commit(Channel::control, buffer_);
}

void Replay::sendFrame(const Entry& entry) {
  buffer_.assign(entry.bytes.begin(), entry.bytes.end());
  Frame frame = frameOf(entry);
  frame.epoch = target_.epoch;
  if (entry.code != nullptr && !images_.contains(entry.code->digest)) return sendCode(entry, frame);
  const auto known = replies_.find(entry.number);
  if ((entry.traits & CallLog::kPolls) != 0 && known != replies_.end() &&
      known->second->status == CUDA_SUCCESS)
    frame.flags |= Frame::kUntilDone;
  setAt(buffer_, 0, frame);
  const auto arguments = std::span(buffer_).subspan(kHeader);
  if (frame.call == RowOf<"sessionRead">::id) redirect(entry, arguments);
  noteHostCall(frame, arguments);
  ++counts_.calls;
  if (frame.call == RowOf<"sessionLaunch">::id || frame.call == RowOf<"cuGraphLaunch">::id) ++counts_.kernels;
  commit(Channel::call, buffer_);
}

void Replay::sendCode(const Entry& entry, Frame frame) {
  using Row = RowOf<"sessionImageData">;
  const auto bytes = bytesOf(*entry.code);
  if (entry.value >= bytes.size())
    return fail(std::string(kLacksCode) + ", and that is not in its memory any more");
  const auto piece =
      bytes.subspan(entry.value).first(std::min<size_t>(CallLog::kCodePiece, bytes.size() - entry.value));
  const Row::Arguments arguments{valueAt<schema::ImageName>(entry.bytes, kHeader), entry.value,
                                 reinterpret_cast<const unsigned char*>(piece.data()), piece.size()};
  buffer_.resize(kHeader + RowCodec<Row>::measure(arguments));
  setAt(buffer_, 0, frame);
  schema::Writer out(buffer_.data() + kHeader, buffer_.size() - kHeader);
  RowCodec<Row>::encode(out, arguments);
  ++counts_.calls;
  commit(Channel::call, buffer_);
}

// Empty: it is not there any more.
std::span<const std::byte> Replay::bytesOf(const CallLog::Code& code) {
  if (!code.copy.empty()) return code.copy;
  if (read_ == &code) return code_;
  read_ = &code;
  code_.resize(code.bytes);
  const iovec to{code_.data(), code_.size()}, from{reinterpret_cast<void*>(code.address), code_.size()};
  if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != static_cast<ssize_t>(code_.size()) ||
      contentDigest(code_) != code.digest)
    code_.clear();
  return code_;
}

void Replay::hearOffer(const Entry& offer, std::span<const std::byte> outputs) {
  const Digest image = imageOf(offer.bytes.subspan(kHeader));
  if (valueAt<unsigned>(outputs, 0) != 0)
    images_.insert(image);
  else
    images_.erase(image);
}

// What the program has seen goes to memory of its own, and is compared there.
void Replay::redirect(const Entry& entry, std::span<std::byte> arguments) {
  if (valueAt<schema::RegionName>(arguments, kRegion).id == 0) return;
  const auto address = valueAt<uint64_t>(arguments, kTo), bytes = valueAt<uint64_t>(arguments, kBytes);
  transport::Region region;
  uint64_t offset = 0;
  if (entry.seen || !target_.lent(address, region, offset)) {
    Scratch scratch{entry.compared ? &entry : nullptr,
                    valueAt<uint64_t>(arguments, kWord),
                    valueAt<uint64_t>(arguments, kValue),
                    bytes,
                    nullptr,
                    {}};
    try {
      scratch.memory = transport::SharedMemory::create(bytes);
      scratch.region = target_.connection.share(scratch.memory);
    } catch (const std::exception& e) {
      return fail(std::string("no memory to compare a copy in: ") + e.what());
    }
    if (scratch.region == transport::Region{}) return fail("no memory to compare a copy in");
    region = scratch.region;
    offset = 0;
    scratch_.push_back(std::move(scratch));
  }
  setAt(arguments, kRegion, schema::RegionName{region.id, region.generation});
  setAt(arguments, kOffset, offset);
}

// The new worker names its pinned memory anew.
void Replay::noteHostCall(const Frame& frame, std::span<const std::byte> arguments) {
  if (frame.call == RowOf<"sessionHostMap">::id) hostMaps_[frame.seq] = valueAt<uint64_t>(arguments, 0);
  if (frame.call == RowOf<"sessionHostUnmap">::id) target_.pinned.erase(valueAt<uint64_t>(arguments, 0));
}

void Replay::commit(Channel channel, std::span<const std::byte> message) {
  transport::Connection& to = target_.connection;
  std::byte* room = nullptr;
  while (why_.empty() && room == nullptr) {
    room = to.reserve(channel, message.size(), Clock::now() + kSendLook);
    if (room == nullptr) pump();
  }
  if (room == nullptr) return;
  std::memcpy(room, message.data(), message.size());
  to.commit(channel, message.size());
  lastHeard_ = Clock::now();
}

// The bound is of waiting: it begins where a transfer does, and where an answer is waited for.
bool Replay::arrives(transport::Transfer transfer) {
  lastHeard_ = Clock::now();
  if (transfer == transport::kRefused) return false;
  while (why_.empty()) {
    if (target_.connection.wait(transfer, Clock::now() + kSendLook)) return true;
    if (target_.connection.peer() != Peer::alive) return false;
    pump();
  }
  return false;
}

bool Replay::place(const Entry& entry, uint64_t bytes, transport::Region& region, uint64_t& offset) {
  if (entry.place == CallLog::Place::staging) {
    region = target_.staging;
    offset = entry.number;
    return true;
  }
  auto after = target_.pinned.upper_bound(entry.number);
  if (after == target_.pinned.begin()) return false;
  --after;
  region = after->second;
  offset = entry.number - after->first;
  return bytes != 0;
}

void Replay::put(const Entry& entry) {
  transport::Region region;
  uint64_t offset = 0;
  if (!place(entry, entry.bytes.size(), region, offset))
    return fail("the other worker does not have all of the session's pinned memory");
  ++counts_.transfers;
  const auto transfer = target_.connection.put(entry.bytes.data(), region, offset, entry.bytes.size());
  if (!arrives(transfer)) fail("data did not reach the other worker again");
}

void Replay::get(const Entry& entry) {
  transport::Region region;
  uint64_t offset = 0;
  Message bytes(entry.value);
  if (!place(entry, bytes.size(), region, offset))
    return fail("the other worker does not have all of the session's pinned memory");
  const auto transfer = target_.connection.get(bytes.data(), region, offset, bytes.size());
  if (!arrives(transfer)) return fail("data did not come from the other worker again");
  ++counts_.compared;
  if (contentDigest(bytes) != entry.digest) differs("a copy from the device", true);
}

// ---- what comes of it

void Replay::awaitWord(uint64_t index, uint64_t value) {
  bool asked = false;
  lastHeard_ = Clock::now();
  while (why_.empty() && words_[index] < value) {
    if (!std::exchange(asked, true)) {
      Message watch(sizeof(Notice) + sizeof(schema::WordUpdate));
      setAt<Notice>(watch, 0, {NoticeType::watch, target_.epoch, 0});
      setAt<schema::WordUpdate>(watch, sizeof(Notice), {index, value});
      commit(Channel::control, watch);
      continue;
    }
    pump();
  }
  compareScratch();
}

void Replay::awaitReply(uint64_t seq) {
  if (!calls_.contains(seq)) return;  // its answer was one to a call before the checkpoint
  lastHeard_ = Clock::now();
  while (why_.empty() && !answered_[seq]) pump();
}

void Replay::awaitCallback(const Entry& called) {
  const auto found = [&] {
    return std::ranges::find_if(callbacks_, [&](const Message& message) {
      return valueAt<schema::CallbackBody>(message, sizeof(Notice)).id == called.number;
    });
  };
  lastHeard_ = Clock::now();
  auto message = found();
  for (; why_.empty() && message == callbacks_.end(); message = found()) pump();
  if (!why_.empty()) return;
  const auto body = valueAt<schema::CallbackBody>(*message, sizeof(Notice));
  callbacks_.erase(message);
  if (body.status != called.status) differs("what a host function is told", false);
}

void Replay::endCallback(const Entry& returned) {
  const schema::CallbackBody body{returned.number, 0, 0};
  Message message(sizeof(Notice) + sizeof body);
  setAt(message, 0, Notice{NoticeType::callbackDone, target_.epoch, 0});
  setAt(message, sizeof(Notice), body);
  commit(Channel::control, message);
}

void Replay::compareScratch() {
  std::erase_if(scratch_, [&](const Scratch& scratch) {
    if (!why_.empty() || words_[scratch.word] < scratch.value) return false;
    if (scratch.read != nullptr) {
      ++counts_.compared;
      if (contentDigest({scratch.memory->data(), scratch.bytes}) != scratch.read->digest)
        differs(nameOf(*scratch.read), true);
    }
    target_.connection.unshare(scratch.region);
    return true;
  });
}

// Threads of a kernel print in any order, and a line may come with another answer than before.
void Replay::comparePrints() {
  std::map<std::string_view, size_t> seen;
  std::string text;
  for (const Entry* entry : entries_)
    if (entry->kind == Entry::Kind::printed)
      text.append(reinterpret_cast<const char*>(entry->bytes.data()), entry->bytes.size());
  eachLine(text, [&](std::string_view line) { ++seen[line]; });
  counts_.compared += seen.empty() ? 0 : 1;
  eachLine(printed_, [&](std::string_view line) {
    const auto known = seen.find(line);
    if (known == seen.end())
      unseenOutput_ += line;
    else if (--known->second == 0)
      seen.erase(known);
  });
  if (!seen.empty()) differs("what kernels print", false);
}

void Replay::pump() {
  transport::Connection& from = target_.connection;
  bool heard = false, over = false, overToo = false;
  for (auto message = from.next(Channel::call, transport::Deadline::min(), over); !message.empty();
       message = from.next(Channel::call, transport::Deadline::min(), over)) {
    hearReply(message);
    heard = true;
  }
  for (auto message = from.next(Channel::control, transport::Deadline::min(), overToo); !message.empty();
       message = from.next(Channel::control, transport::Deadline::min(), overToo)) {
    hearNotice(message);
    heard = true;
  }
  if (heard) {
    lastHeard_ = Clock::now();
    return;
  }
  if (over && overToo) return fail("the other worker is gone: " + from.reason());
  if (settings_.cancelled()) return fail("the program ends");
  if (Clock::now() - lastHeard_ > settings_.stall)
    return fail("the other worker does not get as far as the dead one within " +
                std::to_string(settings_.stall.count()) + " s");
  std::this_thread::sleep_for(kNap);
}

void Replay::hearReply(std::span<const std::byte> message) {
  auto header = valueAt<schema::Reply>(message, 0);
  if (message.size() < sizeof header) return fail("the other worker sent nonsense");
  const size_t rest = message.size() - sizeof header,
               text = std::min<size_t>(schema::padded(header.outputBytes), rest);
  const auto outputs = message.subspan(sizeof header, rest - text);
  printed_.append(reinterpret_cast<const char*>(outputs.data()) + outputs.size(),
                  std::min<size_t>(header.outputBytes, text));
  if (const auto map = hostMaps_.find(header.seq); map != hostMaps_.end() && header.status == CUDA_SUCCESS) {
    const auto name = valueAt<schema::RegionName>(outputs, 0);
    target_.pinned[map->second] = {name.id, name.generation};
  }
  answered_[header.seq] = true;
  const auto reply = replies_.find(header.seq);
  const auto call = calls_.find(header.seq);
  if (call != calls_.end() && header.status == CUDA_SUCCESS &&
      frameOf(*call->second).call == RowOf<"sessionImageOffer">::id)
    hearOffer(*call->second, outputs);
  if (reply == replies_.end() || call == calls_.end()) {
    header.outputBytes = 0;
    unseenReplies_.emplace_back(message.begin(), message.end() - static_cast<ptrdiff_t>(text));
    setAt(unseenReplies_.back(), 0, header);
    return;
  }
  compare(*call->second, *reply->second, header, outputs);
}

void Replay::compare(const Entry& call, const Entry& reply, const schema::Reply& header,
                     std::span<const std::byte> outputs) {
  const bool polls = (call.traits & CallLog::kPolls) != 0;
  if (polls && reply.status == CUDA_ERROR_NOT_READY) return;
  ++counts_.compared;
  if (isLoad(frameOf(call).call) && header.status == CUDA_ERROR_INVALID_IMAGE && reply.status == CUDA_SUCCESS)
    return fail(kLacksCode);
  if (header.status != reply.status)
    return differs(nameOf(call) + " (status " + std::to_string(header.status) + ", not " +
                       std::to_string(reply.status) + ")",
                   false);
  if ((call.traits & CallLog::kVaries) != 0 || contentDigest(outputs) == reply.digest) return;
  differs(nameOf(call), (call.traits & CallLog::kContents) != 0);
}

void Replay::differs(const std::string& what, bool contents) {
  if (counts_.different++ == 0) counts_.first = what;
  if (contents && settings_.goOnDifferent) return;
  fail(what + " gave another answer than before" +
       (contents ? ", for the program's results differ from run to run (--on-divergence)" : ""));
}

void Replay::hearNotice(std::span<const std::byte> message) {
  schema::Reader in(message);
  const auto header = in.value<Notice>();
  if (header.type == NoticeType::words || header.type == NoticeType::wordsUnchanged) {
    if (header.type == NoticeType::wordsUnchanged) in.value<uint64_t>();
    while (in.remaining() >= sizeof(schema::WordUpdate)) {
      const auto update = in.value<schema::WordUpdate>();
      uint64_t& known = words_[update.index];
      known = std::max(known, update.value);
    }
    return;
  }
  if (header.type == NoticeType::failed) {
    in.value<schema::FailedBody>();
    return fail("the other worker's session has failed: " + std::string(in.text()));
  }
  if (header.type == NoticeType::output) {
    printed_ += in.text();
    return;
  }
  auto& kept = header.type == NoticeType::callback ? callbacks_ : unseenNotices_;
  kept.emplace_back(message.begin(), message.end());
}

}  // namespace gpupool::client
