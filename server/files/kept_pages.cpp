#include "server/files/kept_pages.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>

#include "server/files/stream_plan.h"

namespace gpupool::server {

std::shared_ptr<PageStore> PageStore::create(BlockFile::Room room) {
  std::string why;
  auto file = BlockFile::inMemory("gpupool-checkpoints", std::move(room), why);
  if (file == nullptr) throw std::runtime_error(why);
  return std::shared_ptr<PageStore>(new PageStore(std::move(file)));
}

std::string PageStore::put(std::span<const std::byte> bytes, const Checksum& checksum, Pages& pages) {
  std::string why;
  auto block = file_->reserve(bytes.size(), why);
  if (block == nullptr) return why;
  if (why = block->write(bytes); !why.empty()) return "the checkpoint cannot be kept: " + why;
  pages.push_back(std::make_shared<Page>(std::move(block), checksum));
  return "";
}

std::string PageStore::Page::read(std::span<std::byte> room) const {
  if (const std::string why = block_->read(room); !why.empty())
    return "the checkpoint cannot be read: " + why;
  return checksumOf(room) == checksum_ ? "" : "the checkpoint is damaged";
}

namespace {

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

class PageTaker {
 public:
  PageTaker(StateSocket& socket, PageStore& store, const KeptPages* base, KeptPages& made)
      : socket_(socket), store_(store), base_(base), made_(made) {}

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
    if (!socket_.answer("") || !socket_.sendBlock(std::as_bytes(std::span(lacking)))) return socket_.error();
    for (KeptPages::Image& image : made_.images) {
      if (known(image.name) != nullptr) continue;
      if (std::string why = takeImage(image); !why.empty()) return why;
    }
    return "";
  }
  std::string takeImage(KeptPages::Image& image) {
    ContentHash hash;
    for (uint64_t left = image.name.bytes; left != 0; left -= room_.size()) {
      room_.resize(std::min<uint64_t>(left, kImageAtOnce));
      if (!socket_.receive(room_)) return socket_.error();
      hash.update(room_);
      if (std::string why = store_.put(room_, checksumOf(room_), image.pages); !why.empty()) return why;
    }
    const Digest digest = hash.finish();
    return std::memcmp(digest.data(), image.name.words, digest.size()) == 0 ? "" : kDamagedOnItsWay;
  }
  // Which pages it names of the base, and which follow.
  std::string takePlaces() {
    lengths_ = pagesOf(plan_.contents);
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
    for (size_t i = 0; i < places_.size(); ++i) {
      if (places_[i] != kNewPage) {
        made_.contents.push_back(base_->contents[places_[i]]);
        continue;
      }
      Checksum checksum{};
      room_.resize(lengths_[i]);
      if (!socket_.receivePart(room_, checksum)) return socket_.error();
      if (checksumOf(room_) != checksum) return kDamagedOnItsWay;
      if (const auto same = findSame(checksum)) {
        made_.contents.push_back(same);
        continue;
      }
      if (std::string why = store_.put(room_, checksum, made_.contents); !why.empty()) return why;
      byChecksum_.emplace(checksum, made_.contents.back());
    }
    return "";
  }
  // Memory that was mapped and not used yet is all alike.
  std::shared_ptr<const PageStore::Page> findSame(const Checksum& checksum) const {
    const auto at = byChecksum_.find(checksum);
    return at != byChecksum_.end() && at->second->bytes() == room_.size() ? at->second : nullptr;
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
  std::vector<std::byte> room_;
};

// ---- for a worker that rebuilds the session

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
    if (why.empty()) why = socket_.hearAnswer();
    if (why.empty()) why = sendContents();
    return why.empty() ? socket_.hearAnswer() : why;
  }

 private:
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
  // Its parts are other ones than the pages.
  std::string sendContents() {
    for (uint64_t left : plan_.contents)
      for (; left != 0; left -= part_.size()) {
        part_.resize(std::min<uint64_t>(left, StateSocket::kPartBytes));
        if (std::string why = fill(part_); !why.empty()) return why;
        if (!socket_.sendPart(part_, checksumOf(part_))) return refused();
      }
    return "";
  }
  std::string fill(std::span<std::byte> part) {
    while (!part.empty()) {
      if (rest_.empty()) {
        const PageStore::Page& page = *kept_.contents.at(next_++);
        room_.resize(page.bytes());
        if (std::string why = page.read(room_); !why.empty()) return why;
        rest_ = room_;
      }
      const size_t taken = std::min(rest_.size(), part.size());
      std::memcpy(part.data(), rest_.data(), taken);
      rest_ = rest_.subspan(taken);
      part = part.subspan(taken);
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
  std::vector<std::byte> room_, part_;
  std::span<const std::byte> rest_;  // of the page in room_
  size_t next_ = 0;
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
