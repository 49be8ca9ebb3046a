#include "client/call_log.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/content.h"
#include "schema/rows.h"

namespace gpupool::client {

namespace {

using schema::Frame;
using schema::RowOf;
using EntryKind = CallLog::Entry::Kind;
using ImageData = RowOf<"sessionImageData">;

constexpr uint64_t kOverhead = sizeof(CallLog::Entry);
constexpr size_t kMostCuts = 64;
constexpr char kFull[] = "the log of its calls is full (protect_log in client.yaml)";
constexpr char kDataFull[] = "the log of its data is full (protect_log_data in client.yaml)";
constexpr size_t kHeader = sizeof(Frame);
constexpr size_t kReadPiece = size_t{1} << 20;

// Where arguments begin: every one takes 8 bytes and what does not fit there (client/codec.h).
constexpr size_t argument(size_t index) { return 8 * index; }

uint64_t wordAt(std::span<const std::byte> bytes, size_t offset) {
  uint64_t value = 0;
  if (offset + sizeof value <= bytes.size()) std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// Of memory that the program may unmap meanwhile, though it must not.
Digest digestOf(uint64_t address, uint64_t bytes) {
  ContentHash hash;
  std::vector<std::byte> piece(std::min<uint64_t>(bytes, kReadPiece));
  for (uint64_t at = 0; at < bytes;) {
    const size_t n = std::min<uint64_t>(piece.size(), bytes - at);
    const iovec to{piece.data(), n}, from{reinterpret_cast<void*>(address + at), n};
    if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != static_cast<ssize_t>(n)) break;
    hash.update(std::span(piece).first(n));
    at += n;
  }
  return hash.finish();
}

}  // namespace

void relocateArguments(uint32_t call, std::span<std::byte> arguments, uint64_t from, uint64_t to,
                       uint64_t bytes) {
  const auto move = [&](size_t offset) {
    const uint64_t known = wordAt(arguments, offset);
    if (known < from || known - from >= bytes || offset + sizeof known > arguments.size()) return;
    const uint64_t now = to + (known - from);
    std::memcpy(arguments.data() + offset, &now, sizeof now);
  };
  using Write = RowOf<"sessionWrite">;
  switch (call) {
    case Write::id:
      return move(argument(schema::parameterIndex<Write, "from">()));
    case RowOf<"sessionRead">::id:
      return move(argument(schema::parameterIndex<RowOf<"sessionRead">, "to">()));
    case RowOf<"cuMemcpyHtoDAsync_v2">::id:
      return move(argument(schema::parameterIndex<RowOf<"cuMemcpyHtoDAsync_v2">, "srcHost">()));
    case RowOf<"cuMemcpyDtoHAsync_v2">::id:
      return move(argument(schema::parameterIndex<RowOf<"cuMemcpyDtoHAsync_v2">, "dstHost">()));
    case RowOf<"cuMemcpy3DAsync_v2">::id:
      move(8 + offsetof(CUDA_MEMCPY3D_v2, srcHost));
      return move(8 + offsetof(CUDA_MEMCPY3D_v2, dstHost));
    default:
      return;
  }
}

bool CallLog::isPayload(const Entry& entry) {
  return entry.kind == EntryKind::put || entry.kind == EntryKind::printed;
}

// The code counts with its first piece.
uint64_t CallLog::payload(const Entry& entry) {
  if (isPayload(entry)) return entry.bytes.size();
  return entry.code != nullptr && entry.value == 0 ? entry.code->copy.size() : 0;
}

void CallLog::add(const Entry& entry) {
  ever_.frameBytes += kOverhead + (isPayload(entry) ? 0 : entry.bytes.size());
  ever_.payloadBytes += payload(entry);
  entries_.add(entry);
  lookWanted();
  const Size now = size();
  if (now.frameBytes > limits_.frameBytes) return breakOff(kFull);
  if (now.payloadBytes > limits_.payloadBytes) breakOff(kDataFull);
}

// What comes while nothing was sent since a cut is of calls before it: a restored worker does not bring it
// again.
void CallLog::addSeen(const Entry& entry) {
  const bool before = cuts_.back().position == entries_.end();
  if (before && cuts_.size() == 1) return;
  add(entry);
  if (!before || !recording()) return;
  cuts_.back().position = entries_.end();
  cuts_.back().before = ever_;
}

void CallLog::lookWanted() {
  // A log that was broken off waits for the next checkpoint in its turn.
  const Size now = size();
  const bool wanted = now.frameBytes > limits_.frameBytes / 2 || now.payloadBytes > limits_.payloadBytes / 2;
  if (wanted && !wanted_) turned_ = true;
  wanted_ = wanted;
  if (recorded() != recording()) recorded_ = recording();
}

void CallLog::breakOff(const std::string& why) {
  broken_ = why;
  for (Cut& cut : cuts_)
    if (cut.broken.empty()) cut.broken = why;
  trim(entries_.end(), ever_);
  landings_.clear();
  lookWanted();
}

std::vector<LogMemory::Piece> CallLog::trim(uint64_t position, const Size& before) {
  if (position <= entries_.begin()) return {};
  auto surplus = entries_.drop(position);
  dropped_ = before;
  while (!entriesCode_.empty() && entriesCode_.front().first < position) entriesCode_.pop_front();
  std::erase_if(landings_, [&](const Landing& landing) { return landing.position < position; });
  return surplus;
}

std::span<std::byte> CallLog::copy(std::span<const std::byte> bytes) {
  if (bytes.size() <= entries_.kMostCopied) return entries_.copy(bytes);
  auto piece = entries_.take(bytes.size());
  std::memcpy(piece.data(), bytes.data(), bytes.size());
  return entries_.adopt(std::move(piece), bytes.size());
}

void CallLog::sent(bool aside, std::span<const std::byte> message, uint8_t traits) {
  std::lock_guard lock(mutex_);
  if (!recording()) return;
  Frame frame;
  std::memcpy(&frame, message.data() + (aside ? sizeof(schema::Notice) : 0), sizeof frame);
  Entry entry;
  entry.kind = aside ? EntryKind::aside : EntryKind::frame;
  entry.traits = traits;
  entry.number = frame.seq;
  entry.bytes = copy(message);
  if (!aside && frame.call == ImageData::id) attachCode(entry, message.subspan(kHeader));
  add(entry);
  if (!aside && frame.call == RowOf<"sessionRead">::id && recording()) noteLanding(message.subspan(kHeader));
}

std::shared_ptr<const CallLog::Code> CallLog::keepCode(const schema::ImageName& name,
                                                       std::span<const std::byte> bytes, bool stays) {
  if (!recorded()) return nullptr;
  auto code = std::make_shared<Code>();
  std::memcpy(code->digest.data(), name.words, sizeof name.words);
  code->address = reinterpret_cast<uint64_t>(bytes.data());
  code->bytes = bytes.size();
  if (!stays && bytes.size() <= limits_.payloadBytes) code->copy.assign(bytes.begin(), bytes.end());
  std::lock_guard lock(mutex_);
  std::erase_if(codes_, [](const auto& known) { return known.second.expired(); });
  codes_[code->digest] = code;
  return code;
}

void CallLog::attachCode(Entry& entry, std::span<const std::byte> arguments) {
  static_assert(schema::parameterIndex<ImageData, "image">() == 0);
  constexpr size_t kOffset = sizeof(schema::ImageName), kLength = kOffset + sizeof(uint64_t);
  if (wordAt(arguments, kLength) != 0) return;
  Digest digest;
  std::memcpy(digest.data(), arguments.data(), digest.size());
  const auto known = codes_.find(digest);
  if (known == codes_.end()) return;
  auto code = known->second.lock();
  if (code == nullptr) return;
  entry.code = code.get();
  entry.value = wordAt(arguments, kOffset);
  entriesCode_.emplace_back(entries_.end(), std::move(code));
}

void CallLog::noteLanding(std::span<const std::byte> arguments) {
  using Read = RowOf<"sessionRead">;
  schema::RegionName region;
  std::memcpy(&region, arguments.data() + argument(schema::parameterIndex<Read, "region">()), sizeof region);
  if (region.id == 0) return;
  landings_.push_back({entries_.end() - 1,
                       wordAt(arguments, argument(schema::parameterIndex<Read, "word">())),
                       wordAt(arguments, argument(schema::parameterIndex<Read, "value">())),
                       wordAt(arguments, argument(schema::parameterIndex<Read, "to">())),
                       wordAt(arguments, argument(schema::parameterIndex<Read, "bytes">()))});
}

void CallLog::put(Place place, uint64_t at, const void* from, size_t bytes) {
  if (!recorded()) return;
  Entry entry;
  entry.kind = EntryKind::put;
  entry.place = place;
  entry.number = at;
  std::unique_lock lock(mutex_);
  if (!recording()) return;
  if (bytes > limits_.payloadBytes) return breakOff(kDataFull);
  if (bytes <= entries_.kMostCopied) {
    entry.bytes = entries_.copy({static_cast<const std::byte*>(from), bytes});
  } else {
    auto piece = entries_.take(bytes);
    lock.unlock();
    std::memcpy(piece.data(), from, bytes);
    lock.lock();
    if (!recording()) return entries_.giveBack(std::move(piece));
    entry.bytes = entries_.adopt(std::move(piece), bytes);
  }
  add(entry);
}

void CallLog::got(Place place, uint64_t at, std::span<const std::byte> bytes) {
  if (!recorded()) return;
  Entry entry;
  entry.kind = EntryKind::get;
  entry.place = place;
  entry.number = at;
  entry.value = bytes.size();
  entry.digest = contentDigest(bytes);
  std::lock_guard lock(mutex_);
  if (recording()) add(entry);
}

void CallLog::reached(uint64_t word, uint64_t value) {
  if (!recorded()) return;
  seeLandings(word, value);
  Entry entry;
  entry.kind = EntryKind::word;
  entry.number = word;
  entry.value = value;
  std::lock_guard lock(mutex_);
  if (recording()) addSeen(entry);
}

// Whoever has not seen the word does not touch what has landed: the digests are made without the lock.
void CallLog::seeLandings(uint64_t word, uint64_t value) {
  const auto isThere = [&](const Landing& l) { return l.word == word && l.value <= value; };
  std::vector<Landing> there, overtaken;
  {
    std::lock_guard lock(mutex_);
    for (const Landing& landing : landings_) {
      if (!isThere(landing)) continue;
      const bool late = std::ranges::any_of(landings_, [&](const Landing& other) {
        return other.position > landing.position && other.address < landing.address + landing.bytes &&
               landing.address < other.address + other.bytes;
      });
      (late ? overtaken : there).push_back(landing);
    }
  }
  if (there.empty() && overtaken.empty()) return;
  std::vector<Digest> digests;
  digests.reserve(there.size());
  for (const Landing& landing : there) digests.push_back(digestOf(landing.address, landing.bytes));
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < there.size(); ++i)
    // Two threads may hear of the word. The first one shows it; behind that the bytes are the program's.
    if (Entry* read = entryOf(there[i]); read != nullptr && !read->seen) {
      read->seen = true;
      read->compared = !read->mixed;
      read->digest = digests[i];
    }
  for (const Landing& landing : overtaken)
    if (Entry* read = entryOf(landing); read != nullptr) read->seen = true;
  std::erase_if(landings_, isThere);
}

void CallLog::printed(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  std::lock_guard lock(mutex_);
  if (!recording()) return;
  if (bytes.size() > limits_.payloadBytes) return breakOff(kDataFull);
  Entry entry;
  entry.kind = EntryKind::printed;
  entry.bytes = copy(bytes);
  addSeen(entry);
}

// Under mutex_. Null: it is dropped.
CallLog::Entry* CallLog::entryOf(const Landing& landing) {
  const bool kept = landing.position >= entries_.begin() && landing.position < entries_.end();
  return kept ? &entries_.at(landing.position) : nullptr;
}

// What other streams bring may be there before the function runs, and nobody here has seen that yet.
void CallLog::called(uint64_t function, uint32_t status, uint64_t word) {
  std::lock_guard lock(mutex_);
  if (!recording()) return;
  for (const Landing& landing : landings_)
    if (Entry* read = entryOf(landing); read != nullptr && landing.word != word) read->mixed = true;
  Entry entry;
  entry.kind = EntryKind::called;
  entry.number = function;
  entry.status = status;
  add(entry);
}

void CallLog::returned(uint64_t function) {
  std::lock_guard lock(mutex_);
  if (!recording()) return;
  Entry entry;
  entry.kind = EntryKind::returned;
  entry.number = function;
  add(entry);
}

void CallLog::answered(uint64_t seq, uint32_t status, std::span<const std::byte> outputs) {
  if (!recorded()) return;
  Entry entry;
  entry.kind = EntryKind::reply;
  entry.status = status;
  entry.number = seq;
  entry.digest = contentDigest(outputs);
  std::lock_guard lock(mutex_);
  if (recording()) addSeen(entry);
}

void CallLog::refuse(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (recording()) breakOff(why);
}

const CallLog::Cut* CallLog::find(uint64_t frame, uint64_t aside) const {
  for (const Cut& cut : cuts_)
    if (cut.frame == frame && cut.aside == aside) return &cut;
  return nullptr;
}

// A cut whose entries were dropped stays so, though nothing was sent since: something was put.
void CallLog::cut(uint64_t frame, uint64_t aside) {
  std::lock_guard lock(mutex_);
  broken_.clear();
  lookWanted();
  if (find(frame, aside) != nullptr) return;
  if (cuts_.size() >= kMostCuts) cuts_.erase(cuts_.begin() + 1);
  cuts_.push_back({frame, aside, entries_.end(), Clock::now(), ever_, ""});
  lookWanted();
}

void CallLog::kept(uint64_t frame, uint64_t aside) {
  std::vector<LogMemory::Piece> surplus;  // ends without the lock
  std::lock_guard lock(mutex_);
  const Cut* known = find(frame, aside);
  if (known == nullptr) return;
  kept_ = true;
  while (cuts_.front().frame != frame || cuts_.front().aside != aside) cuts_.pop_front();
  surplus = trim(cuts_.front().position, cuts_.front().before);
  lookWanted();
}

CallLog::State CallLog::state() const {
  std::lock_guard lock(mutex_);
  const Size now = size();
  return {now.frameBytes, now.payloadBytes, wanted_, cuts_.empty() ? "" : cuts_.front().broken, kept_};
}

std::optional<std::vector<CallLog::Entry*>> CallLog::since(uint64_t frame, uint64_t aside, std::string& why) {
  std::lock_guard lock(mutex_);
  const Cut* from = find(frame, aside);
  if (from == nullptr) {
    why = "the checkpoint is of a moment that the program does not know";
    return std::nullopt;
  }
  if (!from->broken.empty()) {
    const bool beginning = frame == 0 && aside == 0;
    why = std::string("calls were sent since ") + (beginning ? "its beginning" : "the checkpoint") +
          " that cannot be made again: " + from->broken;
    return std::nullopt;
  }
  std::vector<Entry*> entries;
  for (uint64_t at = from->position; at < entries_.end(); ++at) {
    entries.push_back(&entries_.at(at));
    if (!entries.back()->mixed || entries.back()->seen) continue;
    why = "a host function ran while a copy of another stream was on its way";
    return std::nullopt;
  }
  return entries;
}

std::chrono::seconds CallLog::age(uint64_t frame, uint64_t aside) const {
  std::lock_guard lock(mutex_);
  const Cut* cut = find(frame, aside);
  return std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - (cut ? cut->at : Clock::now()));
}

std::chrono::seconds CallLog::keptAge() const {
  std::lock_guard lock(mutex_);
  if (cuts_.empty()) return std::chrono::seconds(0);
  return std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - cuts_.front().at);
}

void CallLog::relocate(uint64_t from, uint64_t to, uint64_t bytes) {
  if (from == to) return;
  std::lock_guard lock(mutex_);
  for (uint64_t at = entries_.begin(); at < entries_.end(); ++at) {
    const Entry& entry = entries_.at(at);
    if (entry.kind != EntryKind::frame) continue;
    Frame frame;
    std::memcpy(&frame, entry.bytes.data(), sizeof frame);
    relocateArguments(frame.call, entry.bytes.subspan(kHeader), from, to, bytes);
  }
}

}  // namespace gpupool::client
