#include "server/files/kept_pages.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <stdexcept>

#include "base/log.h"
#include "base/ordered_work.h"
#include "server/files/stream_plan.h"

namespace gpupool::server {

std::shared_ptr<PageStore> PageStore::create(BlockFile::Room room) {
  std::string why;
  Files files;
  for (auto& file : files) {
    file = BlockFile::inMemory("gpupool-checkpoints", room, why);
    if (file == nullptr) throw std::runtime_error(why);
  }
  return std::shared_ptr<PageStore>(new PageStore(std::move(files)));
}

std::shared_ptr<const PageStore::Page> PageStore::reserve(uint64_t bytes, const Checksum& checksum,
                                                          std::string& why) {
  auto block = files_[next_++ % kFiles]->reserve(bytes, why);
  return block == nullptr ? nullptr : std::make_shared<Page>(std::move(block), checksum);
}

std::string PageStore::put(std::span<const std::byte> bytes, const Checksum& checksum, Pages& pages) {
  std::string why;
  auto page = reserve(bytes.size(), checksum, why);
  if (page == nullptr) return why;
  if (why = page->write(bytes); !why.empty()) return why;
  pages.push_back(std::move(page));
  return "";
}

std::string PageStore::Page::write(std::span<const std::byte> bytes, uint64_t at) const {
  const std::string why = block_->write(bytes, at);
  return why.empty() ? "" : "the checkpoint cannot be kept: " + why;
}

std::string PageStore::Page::copy(std::span<std::byte> room) const {
  const std::string why = block_->read(room);
  return why.empty() ? "" : "the checkpoint cannot be read: " + why;
}

std::string PageStore::Page::read(std::span<std::byte> room) const {
  if (std::string why = copy(room); !why.empty()) return why;
  return checksumOf(room) == checksum_ ? "" : "the checkpoint is damaged";
}

namespace {

constexpr size_t kCopiedAtOnce = size_t{128} << 10;  // stays in a processor's cache

// Of a worker that sends: half of them is for what these threads work on.
size_t roomPages() { return std::max<size_t>(4 * OrderedWork::helpers(), 16); }

// Null: there is none, and why.
std::shared_ptr<transport::SharedMemory> makeRoom(size_t bytes, std::string& why) {
  try {
    return transport::SharedMemory::create(bytes);
  } catch (const std::exception& e) {
    why = std::string("no memory to pass pages through: ") + e.what();
    return nullptr;
  }
}

std::string readAll(const PageStore::Pages& pages, std::vector<std::byte>& bytes) {
  uint64_t total = 0;
  for (const auto& page : pages) total += page->bytes();
  bytes.resize(total);
  std::span<std::byte> rest(bytes);
  for (const auto& page : pages) {
    if (std::string why = page->read(rest.first(page->bytes())); !why.empty()) return why;
    rest = rest.subspan(page->bytes());
  }
  return "";
}

// ---- receiving

// Pages are checked and written by several threads while the next ones come. They lie in memory that the
// worker may change at any time: what is checked and written is a copy.
class PageTaker {
 public:
  PageTaker(StateSocket& socket, PageStore& store, const KeptPages* base, KeptPages& made)
      : socket_(socket), store_(store), base_(base), made_(made) {}
  // A worker that keeps the descriptor keeps nothing of ours.
  ~PageTaker() {
    if (room_ != nullptr)
      fallocate(room_->descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                static_cast<off_t>(room_->size()));
  }
  PageTaker(const PageTaker&) = delete;
  PageTaker& operator=(const PageTaker&) = delete;

  std::string run() {
    if (!socket_.receiveBlock(plan_.bytes, kMostRecordBytes) || !socket_.receive(plan_.digest))
      return socket_.error();
    std::string why = plan_.read();
    if (why.empty()) why = putAll(plan_.bytes, made_.recordPages);
    if (why.empty()) why = takeImages();
    if (why.empty()) why = takePlaces();
    if (why.empty()) why = takeContents();
    if (why.empty()) tell();
    return why;
  }

 private:
  struct Slot {
    ReceivedPart part;
    std::vector<std::byte> copy;
    std::shared_ptr<const PageStore::Page> page;  // null: they are kept already, or there is
    std::string noRoom;
  };
  std::string putAll(std::span<const std::byte> bytes, PageStore::Pages& pages) {
    while (!bytes.empty()) {
      const auto piece = bytes.first(std::min<uint64_t>(bytes.size(), kPageBytes));
      if (std::string why = store_.put(piece, checksumOf(piece), pages); !why.empty()) return why;
      bytes = bytes.subspan(piece.size());
    }
    return "";
  }
  const KeptPages::Image* known(const schema::ImageName& name) const {
    if (base_ == nullptr) return nullptr;
    const auto at = std::find_if(base_->images.begin(), base_->images.end(),
                                 [&](const KeptPages::Image& image) { return sameImage(image.name, name); });
    return at == base_->images.end() ? nullptr : &*at;
  }
  std::string takeImages() {
    std::vector<schema::ImageName> lacking;
    for (const schema::ImageName& name : plan_.images) {
      const KeptPages::Image* image = known(name);
      made_.images.push_back(image != nullptr ? *image : KeptPages::Image{name, {}});
      if (image == nullptr) lacking.push_back(name);
    }
    if (std::string why = offerRoom(); !why.empty()) return why;
    if (!socket_.sendBlock(std::as_bytes(std::span(lacking)))) return socket_.error();
    for (KeptPages::Image& image : made_.images) {
      if (known(image.name) != nullptr) continue;
      if (std::string why = takeImage(image); !why.empty()) return why;
    }
    return "";
  }
  std::string offerRoom() {
    std::string why;
    lengths_ = pagesOf(plan_.contents);
    if (!lengths_.empty()) {
      room_ = makeRoom(std::min(lengths_.size(), roomPages()) * kPageBytes, why);
      if (room_ == nullptr) return why;
    }
    return socket_.offerRoom(room_) ? "" : socket_.error();
  }
  std::string takeImage(KeptPages::Image& image) {
    ContentHash hash;
    std::vector<std::byte> bytes;
    for (uint64_t left = image.name.bytes; left != 0; left -= bytes.size()) {
      bytes.resize(std::min<uint64_t>(left, kImageAtOnce));
      if (!socket_.receive(bytes)) return socket_.error();
      hash.update(bytes);
      if (std::string why = store_.put(bytes, checksumOf(bytes), image.pages); !why.empty()) return why;
    }
    const Digest digest = hash.finish();
    return std::memcmp(digest.data(), image.name.words, digest.size()) == 0 ? "" : kDamagedOnItsWay;
  }
  // Which pages it names of the base, and which follow.
  std::string takePlaces() {
    std::vector<std::byte> block;
    const uint64_t expected = sizeof(PagesHeader) + lengths_.size() * sizeof(uint64_t);
    if (!socket_.receiveBlock(block, expected)) return socket_.error();
    PagesHeader header;
    if (block.size() != expected) return "the worker tells of other pages than its session has";
    std::memcpy(&header, block.data(), sizeof header);
    places_.resize(lengths_.size());
    std::memcpy(places_.data(), block.data() + sizeof header, block.size() - sizeof header);
    if (header.base != Id() && (base_ == nullptr || header.base != base_->id))
      return "the worker tells what has changed since another checkpoint than the one that is held";
    made_.id = header.id;
    all_ = header.base == Id();
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i] == kNewPage) continue;
      if (header.base == Id() || places_[i] >= base_->contents.size() ||
          base_->contents[places_[i]]->bytes() != lengths_[i])
        return "the worker names a page that the checkpoint before has not";
    }
    return "";
  }
  std::string takeContents() {
    // A worker that has just rebuilt the session sends all of it: nearly all is here already.
    if (base_ != nullptr && all_)
      for (const auto& page : base_->contents) byChecksum_.emplace(page->checksum(), page);
    if (room_ != nullptr) slots_.resize(socket_.partsAtOnce(kPageBytes, room_->size() / kPageBytes));
    OrderedWork keeping(slots_.size(), OrderedWork::helpers(),
                        [this](size_t slot) { return keep(slots_[slot]); });
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i] != kNewPage) {
        made_.contents.push_back(base_->contents[places_[i]]);
        continue;
      }
      if (keeping.full())
        if (std::string why = endOldest(keeping); !why.empty()) return why;
      if (std::string why = takePage(keeping, lengths_[i]); !why.empty()) return endAll(keeping, why);
    }
    return endAll(keeping, "");
  }
  // Of what is wrong the first counts.
  std::string endAll(OrderedWork& keeping, const std::string& last) {
    while (!keeping.empty())
      if (std::string why = endOldest(keeping); !why.empty()) return why;
    return last;
  }
  std::string endOldest(OrderedWork& keeping) {
    std::string why = keeping.await();
    if (why.empty() && !socket_.giveBack(slots_[keeping.oldest()].part)) why = socket_.error();
    keeping.drop();
    return why;
  }
  // Its checksum is believed here: where it is another one, all of the checkpoint is refused.
  std::string takePage(OrderedWork& keeping, uint32_t bytes) {
    const size_t index = keeping.next();
    Slot& slot = slots_[index];
    if (!socket_.receivePart({room_->data() + index * kPageBytes, bytes}, slot.part)) return socket_.error();
    const Checksum& checksum = slot.part.checksum;
    slot.page = nullptr;
    slot.noRoom.clear();
    if (slot.part.shared) ++made_.shared;
    if (auto same = findSame(checksum, bytes)) {
      made_.contents.push_back(std::move(same));
    } else if ((slot.page = store_.reserve(bytes, checksum, slot.noRoom)) != nullptr) {
      made_.contents.push_back(slot.page);
      byChecksum_.emplace(checksum, slot.page);
    }
    keeping.give();
    return slot.noRoom;
  }
  // On any thread.
  static std::string keep(Slot& slot) {
    ChecksumMaker checksum;
    std::string why = slot.noRoom;
    slot.copy.resize(kCopiedAtOnce);
    for (size_t at = 0; at < slot.part.bytes.size(); at += kCopiedAtOnce) {
      const auto from = slot.part.bytes.subspan(at, std::min(kCopiedAtOnce, slot.part.bytes.size() - at));
      std::memcpy(slot.copy.data(), from.data(), from.size());
      const std::span<const std::byte> copy(slot.copy.data(), from.size());
      checksum.update(copy);
      if (why.empty() && slot.page != nullptr) why = slot.page->write(copy, at);
    }
    return checksum.finish() == slot.part.checksum ? why : kDamagedOnItsWay;
  }
  // Memory that was mapped and not used yet is all alike.
  std::shared_ptr<const PageStore::Page> findSame(const Checksum& checksum, uint32_t bytes) const {
    const auto at = byChecksum_.find(checksum);
    return at != byChecksum_.end() && at->second->bytes() == bytes ? at->second : nullptr;
  }
  void tell() {
    Sha256 hash;
    hash.update(plan_.digest);
    const auto count = [&](const PageStore::Pages& pages) {
      for (const auto& page : pages) {
        made_.facts.bytes += page->bytes();
        hash.update(page->checksum());
      }
    };
    count(made_.recordPages);
    for (const KeptPages::Image& image : made_.images) count(image.pages);
    count(made_.contents);
    made_.record = plan_.digest;
    made_.facts.digest = hash.finish();
    plan_.tell(made_.facts);
  }

  StateSocket& socket_;
  PageStore& store_;
  const KeptPages* const base_;
  KeptPages& made_;
  StreamPlan plan_;
  std::vector<uint32_t> lengths_;
  std::vector<uint64_t> places_;
  bool all_ = false;  // none of them is the base's
  std::map<Checksum, std::shared_ptr<const PageStore::Page>> byChecksum_;
  std::shared_ptr<transport::SharedMemory> room_;  // null: there are no contents
  std::vector<Slot> slots_;
};

// ---- for a worker that rebuilds the session

// What comes next is read by several threads, several pages of a part at a time, while a part is sent. It is
// compared, too, unless the worker compares pages.
class PagePlayer {
 public:
  PagePlayer(StateSocket& socket, const KeptPages& kept) : socket_(socket), kept_(kept) {}

  std::string run() {
    std::string why = readAll(kept_.recordPages, plan_.bytes);
    plan_.digest = kept_.record;
    if (why.empty()) why = plan_.read();
    if (!why.empty()) return why;
    if (!socket_.sendBlock(plan_.bytes) || !socket_.send(plan_.digest)) return socket_.error();
    why = socket_.hearAnswer();
    if (why.empty()) why = sendImages();
    if (why.empty()) why = socket_.hearOffer();
    if (why.empty()) why = sendContents();
    if (why.empty()) why = socket_.hearAnswer();
    if (why.find(kDamagedOnItsWay) == std::string::npos) return why;
    const std::string ours = readContents();
    return ours.empty() ? why : ours;
  }

 private:
  static constexpr size_t kStretches = 8;  // which are held at a time
  struct Stretch {
    std::span<const uint32_t> parts;  // their lengths
    std::span<const std::shared_ptr<const PageStore::Page>> pages;
    std::vector<std::byte> own;  // of several parts, which are small
    std::span<std::byte> bytes;
    bool paged = false;               // the worker compares
    std::vector<Checksum> checksums;  // of the parts; paged: of the pages
  };
  std::string sendImages() {
    std::vector<std::byte> asked;
    if (!socket_.receiveBlock(asked, kept_.images.size() * sizeof(schema::ImageName))) return socket_.error();
    size_t at = 0;
    for (const KeptPages::Image& image : kept_.images) {
      schema::ImageName name;
      if (at + sizeof name > asked.size()) break;
      std::memcpy(&name, asked.data() + at, sizeof name);
      if (!sameImage(name, image.name)) continue;
      at += sizeof name;
      for (const auto& page : image.pages) {
        room_.resize(page->bytes());
        if (std::string why = page->read(room_); !why.empty()) return why;
        if (!socket_.send(room_)) return socket_.error();
      }
    }
    return at == asked.size() ? "" : "the worker asks for code that is not the session's";
  }
  std::string sendContents() {
    for (uint64_t left : plan_.contents)
      for (; left != 0; left -= parts_.back())
        parts_.push_back(static_cast<uint32_t>(std::min<uint64_t>(left, StateSocket::kPartBytes)));
    if (std::string why = makeOwnRoom(); !why.empty()) return why;
    std::array<Stretch, kStretches> stretches;
    OrderedWork reading(std::min(stretches.size(), OrderedWork::helpers() + 2), OrderedWork::helpers(),
                        [&](size_t slot, size_t page) {
                          Stretch& stretch = stretches[slot];
                          return stretch.paged ? copy(stretch, page) : read(stretch);
                        });
    bool cutOne = false;  // the next one
    for (size_t part = 0; part < parts_.size() || cutOne || !reading.empty();) {
      Stretch& next = stretches[reading.next()];
      if (!cutOne && part < parts_.size() && !reading.full()) {
        part = cut(part, next);
        cutOne = true;
      }
      if (cutOne && findPlace(next)) {
        reading.give(next.paged ? next.pages.size() : 1);
        cutOne = false;
      } else if (reading.empty()) {
        if (!socket_.awaitRoom()) return refused();
      } else {
        if (std::string why = reading.await(); !why.empty()) return why;
        if (!send(stretches[reading.oldest()])) return refused();
        reading.drop();
      }
    }
    if (socket_.sharedParts() != 0)
      GPUPOOL_INFO("%zu of %zu parts of a checkpoint went through shared memory", socket_.sharedParts(),
                   parts_.size());
    return "";
  }
  // For a worker that offers none.
  std::string makeOwnRoom() {
    std::string why;
    if (socket_.room() != nullptr || parts_.empty()) return why;
    if (auto room = makeRoom(kStretches / 2 * StateSocket::kPartBytes, why)) socket_.ownRoom(std::move(room));
    return why;
  }
  // False: there is no room until some of it is given back.
  bool findPlace(Stretch& stretch) {
    uint64_t bytes = 0;
    for (const uint32_t part : stretch.parts) bytes += part;
    stretch.paged = false;
    if (stretch.parts.size() == 1 && bytes <= socket_.room()->bytes()) {
      std::byte* place = socket_.room()->take(bytes);
      stretch.bytes = {place, bytes};
      stretch.paged = socket_.takesPages() && place != nullptr;
      if (stretch.paged) preparePages(stretch);
      return place != nullptr;
    }
    stretch.own.resize(bytes);
    stretch.bytes = stretch.own;
    return true;
  }
  // From that part on, as few parts and pages as are the same bytes: one part of several pages, or one page
  // with several parts. Which part is next.
  size_t cut(size_t part, Stretch& stretch) {
    const size_t firstPart = part, firstPage = next_;
    uint64_t bytes = 0, ofPages = 0;
    do {
      if (bytes <= ofPages)
        bytes += parts_.at(part++);
      else
        ofPages += kept_.contents.at(next_++)->bytes();
    } while (bytes != ofPages);
    stretch.parts = std::span(parts_).subspan(firstPart, part - firstPart);
    stretch.pages = std::span(kept_.contents).subspan(firstPage, next_ - firstPage);
    return part;
  }
  static void preparePages(Stretch& stretch) {
    stretch.checksums.clear();
    for (const auto& page : stretch.pages) stretch.checksums.push_back(page->checksum());
  }
  // On any thread. One part has pages that are all of one length, but for the last.
  static std::string copy(const Stretch& stretch, size_t index) {
    const auto& page = stretch.pages[index];
    return page->copy(stretch.bytes.subspan(index * kPageBytes, page->bytes()));
  }
  // On any thread. A page's bytes are in the processor's cache still when its part's checksum needs them.
  static std::string read(Stretch& stretch) {
    std::span<std::byte> rest(stretch.bytes);
    ChecksumMaker whole;
    for (const auto& page : stretch.pages) {
      const auto bytes = rest.first(page->bytes());
      if (std::string why = page->read(bytes); !why.empty()) return why;
      if (stretch.pages.size() > 1) whole.update(bytes);
      rest = rest.subspan(page->bytes());
    }
    stretch.checksums.clear();
    if (stretch.parts.size() == 1) {
      const bool onePage = stretch.pages.size() == 1;
      stretch.checksums.push_back(onePage ? stretch.pages[0]->checksum() : whole.finish());
      return "";
    }
    rest = stretch.bytes;
    for (const uint32_t part : stretch.parts) {
      stretch.checksums.push_back(checksumOf(rest.first(part)));
      rest = rest.subspan(part);
    }
    return "";
  }
  bool send(const Stretch& stretch) {
    if (stretch.paged) return socket_.sendPages(stretch.bytes, stretch.checksums);
    std::span<const std::byte> rest(stretch.bytes);
    for (size_t i = 0; i < stretch.parts.size(); ++i) {
      if (!socket_.sendPart(rest.first(stretch.parts[i]), stretch.checksums[i])) return false;
      rest = rest.subspan(stretch.parts[i]);
    }
    return true;
  }
  // Whether all of it is what was taken.
  std::string readContents() {
    for (const auto& page : kept_.contents) {
      room_.resize(page->bytes());
      if (std::string why = page->read(room_); !why.empty()) return why;
    }
    return "";
  }
  // The worker takes no more, and has said why.
  std::string refused() {
    const std::string error = socket_.error();
    socket_.forgetError();
    const std::string said = socket_.hearAnswer();
    return said.empty() ? error : said;
  }

  StateSocket& socket_;
  const KeptPages& kept_;
  StreamPlan plan_;
  std::vector<std::byte> room_;
  std::vector<uint32_t> parts_;  // the lengths of all: others than the pages'
  size_t next_ = 0;              // page
};

}  // namespace

std::string takePages(int socket, const std::function<std::string()>& over, PageStore& store,
                      const KeptPages* base, std::shared_ptr<const KeptPages>& made) {
  StateSocket state(Descriptor(fcntl(socket, F_DUPFD_CLOEXEC, 0)), [] { return false; });
  auto kept = std::make_shared<KeptPages>();
  const auto name = base == nullptr ? std::span<const std::byte>() : std::as_bytes(std::span(&base->id, 1));
  std::string why = state.sendBlock(name) ? awaitWorker(socket, over) : state.error();
  if (!why.empty()) {
    state.answer(why);
    return why;
  }
  why = answerWorker(state, PageTaker(state, store, base, *kept).run());
  if (why.empty()) made = std::move(kept);
  return why;
}

std::string playBack(StateSocket& socket, const KeptPages& kept) { return PagePlayer(socket, kept).run(); }

}  // namespace gpupool::server
