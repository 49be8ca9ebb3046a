#include "server/worker/session_pages.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/ordered_work.h"
#include "server/worker/session_state.h"
#include "server/worker/stream_layout.h"
#include "server/worker/suspender_waits.h"

namespace gpupool::server {
namespace {

constexpr uint64_t kMostHostAside = uint64_t{256} << 20;

}  // namespace

size_t SentCheckpoint::Hash::operator()(const Checksum& checksum) const {
  size_t first = 0;
  std::memcpy(&first, checksum.data(), sizeof first);
  return first;
}

void SentCheckpoint::makeIndex() {
  if (!index_.empty()) return;
  index_.reserve(hashes_.size());
  for (size_t i = 0; i < hashes_.size(); ++i) index_.emplace(hashes_[i], i);
}

uint64_t SentCheckpoint::find(const Checksum& hash, uint64_t near) {
  if (near < hashes_.size() && hashes_[near] == hash) return near;
  makeIndex();
  const auto at = index_.find(hash);
  return at == index_.end() ? kNewPage : at->second;
}

SentCheckpoint* SentPages::held(const Id& id) {
  std::erase_if(known_, [&](const SentCheckpoint& one) { return one.id() != id; });
  return known_.empty() ? nullptr : &known_.front();
}

void SentPages::makeIndexes() {
  for (SentCheckpoint& one : known_) one.makeIndex();
}

// ---- what has changed

// What is large is hashed while the rest is described.
std::string PageCopy::look(const Id& base) {
  const auto memory = [&](const transport::SharedMemory& from) {
    sources_.emplace_back(from.data(), from.size());
  };
  memory(*session_.views().words());
  memory(*session_.views().staging());
  for (const auto& [address, piece] : session_.space().hostPieces()) memory(*piece);
  std::string why = pieces_->prepare();
  if (!why.empty()) return why;
  ContentHashes hashes(session_, *pieces_);
  why = hashes.begin(sources_);
  if (why.empty()) why = describe();
  if (std::string late = hashes.finish(); why.empty()) why = std::move(late);
  if (!why.empty()) return why;
  takeHashes(hashes);
  compare(sent_.held(base));
  return "";
}

std::string PageCopy::describe() {
  const auto began = std::chrono::steady_clock::now();
  Contents contents;
  auto out = message_.initRoot<schema::SessionRecord>();
  std::string why = describeSession(session_, {}, out, contents);
  if (!why.empty()) return why;
  why = readContents(session_, contents, [&](const std::string&, std::span<const std::byte> bytes) {
    copied_.insert(copied_.end(), bytes.begin(), bytes.end());
    return "";
  });
  if (!why.empty()) return why;
  const auto lengths = contentsOf(out.asReader());
  if (!lengths) return "the session is larger than a checkpoint can be";
  deviceContent_ = sources_.size();
  sources_.emplace_back();
  std::span<const std::byte> rest(copied_);
  while (sources_.size() < lengths->size()) {
    sources_.push_back(rest.first((*lengths)[sources_.size()]));
    rest = rest.subspan(sources_.back().size());
  }
  uint64_t begin = 0;
  for (const Space::PieceState& piece : pieces_->all()) {
    begins_.push_back(begin);
    begin += piece.bytes;
  }
  cut(*lengths);
  describeMs_ = millisecondsSince(began);
  return "";
}

void PageCopy::cut(std::span<const uint64_t> lengths) {
  Page at;
  for (const uint32_t bytes : pagesOf(lengths)) {
    while (at.offset == lengths[at.content]) at = {at.content + 1, 0, 0};
    all_.push_back({at.content, at.offset, bytes});
    for (uint64_t left = bytes; left != 0;) {
      const uint64_t taken = std::min(left, lengths[at.content] - at.offset);
      left -= taken;
      at.offset += taken;
      if (left != 0) at = {at.content + 1, 0, 0};
    }
  }
}

void PageCopy::takeHashes(const ContentHashes& hashes) {
  hashes_.reserve(all_.size());
  std::vector<std::byte> room;
  for (const Page& page : all_) {
    const size_t place = page.offset / kPageBytes;
    if (onDevice(page))
      hashes_.push_back(hashes.device()[place]);
    else if (page.content < deviceContent_ && !hashes.host(page.content).empty())
      hashes_.push_back(hashes.host(page.content)[place]);
    else
      hashes_.push_back(checksumOf(read(page, room)));
  }
}

std::span<const std::byte> PageCopy::read(const Page& page, std::vector<std::byte>& room) const {
  const auto source = sources_[page.content].subspan(page.offset);
  if (source.size() >= page.bytes) return source.first(page.bytes);
  room.assign(source.begin(), source.end());
  for (size_t content = page.content + 1; room.size() < page.bytes; ++content)
    room.insert(room.end(), sources_[content].begin(), sources_[content].end());
  return room;
}

void PageCopy::compare(SentCheckpoint* base) {
  header_ = {base == nullptr ? Id() : base->id(), Id::random()};
  places_.reserve(all_.size());
  for (size_t i = 0; i < all_.size(); ++i) {
    places_.push_back(base == nullptr ? kNewPage : base->find(hashes_[i], i));
    if (places_.back() != kNewPage) continue;
    changed_.push_back(i);
    bytes_ += all_[i].bytes;
  }
}

// ---- what travels

std::string PageCopy::ship(StateSocket& socket) {
  sent_.sent({header_.id, std::move(hashes_)});
  sent_.makeIndexes();
  std::string why = streamRecord(session_, socket, message_);
  if (why.empty() && !sendPlaces(socket)) why = socket.error();
  // On a thread of its own, for the context that is current behind it is another one.
  if (why.empty()) why = beside([&] { return sendPages(socket); }).get();
  return why.empty() ? socket.hearAnswer() : hearRefusal(socket, why);
}

bool PageCopy::sendPlaces(StateSocket& socket) {
  std::vector<std::byte> block(sizeof header_ + places_.size() * sizeof places_[0]);
  std::memcpy(block.data(), &header_, sizeof header_);
  std::memcpy(block.data() + sizeof header_, places_.data(), block.size() - sizeof header_);
  return socket.sendBlock(block);
}

// ---- aside

// Host memory too, as far as it is little.
bool PageCopy::setAside() {
  std::vector<SparePages::Place> places;
  uint64_t host = 0;
  for (const size_t index : changed_) {
    const Page& page = all_[index];
    if (onDevice(page))
      places.push_back(placeOf(page));
    else
      host += page.bytes;
  }
  if (host > kMostHostAside || session_.hasReclaimedSpare()) return false;
  auto spare = std::make_shared<SparePages>(session_);
  if (!spare->take(*pieces_, places)) return false;
  aside_.resize(host);
  std::byte* room = aside_.data();
  for (const size_t index : changed_) {
    if (onDevice(all_[index])) continue;
    readHost(all_[index], room);
    room += all_[index].bytes;
  }
  pieces_.reset();
  spare_ = spare;
  session_.setSpare(std::move(spare));
  return true;
}

void Session::setSpare(std::shared_ptr<SparePages> spare) {
  std::lock_guard lock(spareMutex_);
  spare_ = std::move(spare);
}

bool Session::endSpare() {
  std::unique_lock lock(spareMutex_);
  const auto spare = spare_;
  lock.unlock();
  if (spare != nullptr) spare->end();
  return spare != nullptr;
}

bool Session::reclaimSpare() {
  if (!endSpare()) return false;
  if (!reclaimedSpare_.exchange(true))
    GPUPOOL_INFO("the program needs the memory that checkpoints take for a moment: they take none any more");
  return true;
}

SparePages::Place PageCopy::placeOf(const Page& page) const {
  const auto next = std::upper_bound(begins_.begin(), begins_.end(), page.offset);
  const size_t piece = static_cast<size_t>(next - begins_.begin()) - 1;
  return {piece, page.offset - begins_[piece]};
}

void PageCopy::readHost(const Page& page, std::byte* room) {
  std::vector<std::byte> several;
  const auto bytes = read(page, several);
  std::memcpy(room, bytes.data(), bytes.size());
}

PageCopy::~PageCopy() {
  // Until it has ended, whoever ends a context finds it, and waits for that.
  if (spare_ != nullptr) {
    spare_->end();
    session_.setSpare(nullptr);
  }
  if (room_ == nullptr) return;
  pieces_->enter(pieces_->all().front().device);
  session_.driver().cuMemHostUnregister(room_->data());
}

// The device copies into what the keeper reads.
std::string PageCopy::prepareRoom(StateSocket& socket) {
  try {
    if (socket.room() == nullptr || socket.room()->bytes() < kPageBytes)
      socket.ownRoom(transport::SharedMemory::create(2 * StateSocket::kPartBytes));
  } catch (const std::exception& e) {
    return std::string("no host memory to send pages through: ") + e.what();
  }
  if (!pieces_ || pieces_->bytes() == 0) return "";
  if (std::string why = pieces_->enter(pieces_->all().front().device); !why.empty()) return why;
  // Without it copies are slower. Where the session runs, its contexts are its own.
  const auto& memory = socket.room()->memory();
  const size_t used = std::min(memory->size(), changed_.size() * kPageBytes);
  const CUresult result = session_.driver().cuMemHostRegister_v2(memory->data(), used, kHostRegistration);
  if (result == CUDA_SUCCESS) room_ = memory;
  return "";
}

std::string PageCopy::sendPages(StateSocket& socket) {
  if (changed_.empty()) return "";
  if (std::string why = prepareRoom(socket); !why.empty()) return why;
  std::array<Batch, kBatches> batches;
  OrderedWork hashing(batches.size(), std::min(batches.size(), OrderedWork::helpers()),
                      [&](size_t slot) { return hash(batches[slot]); });
  for (std::span<const size_t> rest(changed_); !rest.empty() || !hashing.empty();) {
    Batch& next = batches[hashing.next()];
    if (!rest.empty() && !hashing.full() && findRoom(socket, rest, next)) {
      if (std::string why = fill(next); !why.empty()) return why;
      hashing.give();
    } else if (hashing.empty()) {
      if (!socket.awaitRoom()) return socket.error();
    } else {
      if (std::string why = hashing.await(); !why.empty()) return why;
      if (!send(socket, batches[hashing.oldest()])) return socket.error();
      hashing.drop();
    }
  }
  return "";
}

// For as many of the pages as there is room for now, which are then the batch's. False: for none.
bool PageCopy::findRoom(StateSocket& socket, std::span<const size_t>& pages, Batch& batch) const {
  size_t count = 0;
  while (count < std::min(pages.size(), kAtOnce) &&
         (batch.room[count] = socket.room()->take(kPageBytes)) != nullptr)
    ++count;
  batch.pages = pages.first(count);
  pages = pages.subspan(count);
  return count != 0;
}

std::string PageCopy::fill(const Batch& batch) {
  for (size_t i = 0; i < batch.pages.size();) {
    std::byte* room = batch.room[i];
    size_t end = i;
    while (end < batch.pages.size() && onDevice(all_[batch.pages[end]]) &&
           batch.room[end] == room + (end - i) * kPageBytes)
      ++end;
    if (end != i) {
      std::string why = fillFromDevice(batch.pages.subspan(i, end - i), room);
      if (!why.empty()) return why;
      i = end;
      continue;
    }
    const Page& page = all_[batch.pages[i++]];
    if (pieces_) {
      readHost(page, room);
    } else {
      std::memcpy(room, aside_.data() + asideRead_, page.bytes);
      asideRead_ += page.bytes;
    }
  }
  return "";
}

// On any thread.
std::string PageCopy::hash(Batch& batch) const {
  for (size_t i = 0; i < batch.pages.size(); ++i)
    batch.checksums[i] = checksumOf({batch.room[i], all_[batch.pages[i]].bytes});
  return "";
}

bool PageCopy::send(StateSocket& socket, const Batch& batch) const {
  for (size_t i = 0; i < batch.pages.size(); ++i)
    if (!socket.sendPart({batch.room[i], all_[batch.pages[i]].bytes}, batch.checksums[i])) return false;
  return true;
}

// Pages that follow one another in a piece go as one copy.
std::string PageCopy::fillFromDevice(std::span<const size_t> pages, std::byte* room) {
  if (!pieces_) return spare_->read({room, pages.size() * kPageBytes});
  std::vector<SparePages::Place> places;
  for (const size_t index : pages) places.push_back(placeOf(all_[index]));
  for (std::span<const SparePages::Place> rest(places); !rest.empty();) {
    const size_t count = SparePages::inARow(rest), bytes = count * kPageBytes;
    CUdeviceptr address = 0;
    if (std::string why = pieces_->open(rest[0].piece, address); !why.empty()) return why;
    const CUresult result = session_.driver().cuMemcpyDtoH_v2(room, address + rest[0].offset, bytes);
    if (result != CUDA_SUCCESS) return pieces_->failed("cuMemcpyDtoH", result);
    room += bytes;
    rest = rest.subspan(count);
  }
  return "";
}

}  // namespace gpupool::server
