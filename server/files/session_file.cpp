#include "server/files/session_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "server/files/stream_plan.h"

namespace gpupool::server {
namespace {

std::span<const std::byte> asBytes(const uint64_t& value) { return std::as_bytes(std::span(&value, 1)); }

// Calls `part(bytes)` with the length of each part of the contents; false: it has failed, and so does this.
template <class Part>
bool eachPart(const StreamPlan& plan, Part&& part) {
  for (uint64_t left : plan.contents)
    for (; left != 0; left -= std::min<uint64_t>(left, StateSocket::kPartBytes))
      if (!part(std::min<uint64_t>(left, StateSocket::kPartBytes))) return false;
  return true;
}

// ---- writing

class Taker {
 public:
  Taker(StateSocket& socket, int file, FileFacts& facts) : socket_(socket), file_(file), facts_(facts) {}

  std::string run(const TakeDownSteps& steps) {
    blocks_ = steps.blocks;
    if (!socket_.receiveBlock(plan_.bytes, kMostRecordBytes) || !socket_.receive(plan_.digest))
      return socket_.error();
    std::string why = plan_.read();
    if (why.empty()) plan_.tell(facts_);
    if (why.empty()) why = steps.stands();
    if (!why.empty()) return why;
    hash_.update(plan_.digest);
    bool taken = write(asBytes(plan_.bytes.size())) && write(plan_.bytes) && write(plan_.digest) &&
                 socket_.answer("") && socket_.sendBlock(std::as_bytes(std::span(plan_.images)));
    for (const schema::ImageName& name : plan_.images) taken = taken && takeImage(name);
    taken = taken && socket_.answer("") && eachPart(plan_, [&](uint64_t bytes) { return takePart(bytes); }) &&
            sync();
    if (!taken) return why_.empty() ? socket_.error() : why_;
    facts_.digest = hash_.finish();
    return steps.written();
  }

 private:
  bool fails(std::string why) {
    if (why_.empty()) why_ = std::move(why);
    return false;
  }
  // Contents that are the same in the next file are in blocks that are, wherever they lie in it.
  void noteBlocks(std::span<const std::byte> bytes) {
    while (blocks_ != nullptr && !bytes.empty()) {
      const auto block = bytes.first(std::min<size_t>(bytes.size(), kMostBlockBytes));
      blocks_->push_back({checksumOf(block), static_cast<uint32_t>(block.size())});
      bytes = bytes.subspan(block.size());
    }
  }
  bool write(std::span<const std::byte> bytes) {
    noteBlocks(bytes);
    while (!bytes.empty()) {
      const ssize_t written = ::write(file_, bytes.data(), bytes.size());
      if (written < 0 && errno != EINTR)
        return fails(std::string("the file cannot be written: ") + strerror(errno));
      if (written <= 0) continue;
      facts_.bytes += static_cast<uint64_t>(written);
      bytes = bytes.subspan(static_cast<size_t>(written));
    }
    return true;
  }
  bool sync() {
    return fsync(file_) == 0 || fails(std::string("the file cannot be written: ") + strerror(errno));
  }
  bool takeImage(const schema::ImageName& name) {
    hash_.update(std::as_bytes(std::span(&name, 1)));
    ContentHash image;
    room_.resize(kImageAtOnce);
    for (uint64_t left = name.bytes; left != 0;) {
      const auto piece = std::span(room_).first(std::min<uint64_t>(left, room_.size()));
      if (!socket_.receive(piece) || !write(piece)) return false;
      image.update(piece);
      left -= piece.size();
    }
    const Digest digest = image.finish();
    return std::memcmp(digest.data(), name.words, digest.size()) == 0 || fails(kDamagedOnItsWay);
  }
  bool takePart(uint64_t bytes) {
    room_.resize(bytes);
    ReceivedPart part;
    if (!socket_.receivePart(room_, part)) return false;
    if (checksumOf(room_) != part.checksum) return fails(kDamagedOnItsWay);
    hash_.update(part.checksum);
    return write(asBytes(bytes)) && write(room_) && write(part.checksum);
  }

  StateSocket& socket_;
  const int file_;
  FileFacts& facts_;
  std::vector<FileBlock>* blocks_ = nullptr;
  StreamPlan plan_;
  Sha256 hash_;
  std::vector<std::byte> room_;
  std::string why_;
};

// ---- reading

class Player {
 public:
  // socket: null: the file is only checked.
  Player(int file, StateSocket* socket) : file_(file), socket_(socket) {}

  std::string run(FileFacts& facts) {
    uint64_t length = 0;
    if (!read(std::as_writable_bytes(std::span(&length, 1)))) return why_;
    if (length > kMostRecordBytes || length > left_) return kDamaged;
    plan_.bytes.resize(length);
    if (!read(plan_.bytes) || !read(plan_.digest)) return why_;
    if (std::string why = plan_.read(); !why.empty()) return why;
    plan_.tell(facts);
    hash_.update(plan_.digest);
    const bool passed = begin() && images() && hear() &&
                        eachPart(plan_, [&](uint64_t bytes) { return part(bytes); }) && end();
    if (!passed) return why_.empty() ? socket_->error() : why_;
    facts.bytes = offset_;
    facts.digest = hash_.finish();
    return "";
  }

 private:
  bool fails(std::string why) {
    if (why_.empty()) why_ = std::move(why);
    return false;
  }
  bool read(std::span<std::byte> bytes) {
    if (!sized_) {
      struct stat status{};
      if (fstat(file_, &status) != 0)
        return fails(std::string("the file cannot be read: ") + strerror(errno));
      left_ = static_cast<uint64_t>(status.st_size);
      sized_ = true;
    }
    if (bytes.size() > left_) return fails(kDamaged);
    left_ -= bytes.size();
    while (!bytes.empty()) {
      const ssize_t got = pread(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset_));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return fails(std::string("the file cannot be read: ") + strerror(errno));
      if (got == 0) return fails(kDamaged);
      offset_ += static_cast<uint64_t>(got);
      bytes = bytes.subspan(static_cast<size_t>(got));
    }
    return true;
  }
  bool hear() {
    if (socket_ == nullptr) return true;
    const std::string said = socket_->hearAnswer();
    return said.empty() || fails(said);
  }
  bool begin() {
    if (socket_ == nullptr) return true;
    return socket_->sendBlock(plan_.bytes) && socket_->send(plan_.digest) && hear();
  }
  // The worker names those that it lacks, in that order.
  bool images() {
    std::vector<std::byte> asked;
    if (socket_ != nullptr && !socket_->receiveBlock(asked, plan_.images.size() * sizeof(schema::ImageName)))
      return false;
    size_t at = 0;
    for (const schema::ImageName& name : plan_.images) {
      const bool wanted =
          at + sizeof name <= asked.size() && std::memcmp(asked.data() + at, &name, sizeof name) == 0;
      if (wanted) at += sizeof name;
      if (!image(name, wanted)) return false;
    }
    return at == asked.size() || fails("the worker asks for code that is not the session's");
  }
  bool image(const schema::ImageName& name, bool wanted) {
    hash_.update(std::as_bytes(std::span(&name, 1)));
    if (name.bytes > left_) return fails(kDamaged);
    ContentHash hash;
    room_.resize(kImageAtOnce);
    for (uint64_t left = name.bytes; left != 0;) {
      const auto piece = std::span(room_).first(std::min<uint64_t>(left, room_.size()));
      if (!read(piece) || (wanted && !socket_->send(piece))) return false;
      hash.update(piece);
      left -= piece.size();
    }
    const Digest digest = hash.finish();
    return std::memcmp(digest.data(), name.words, digest.size()) == 0 || fails(kDamaged);
  }
  bool part(uint64_t bytes) {
    uint64_t length = 0;
    Checksum checksum{};
    if (!read(std::as_writable_bytes(std::span(&length, 1)))) return false;
    if (length != bytes || length > left_) return fails(kDamaged);
    room_.resize(bytes);
    if (!read(room_) || !read(checksum)) return false;
    if (checksumOf(room_) != checksum) return fails(kDamaged);
    hash_.update(checksum);
    return socket_ == nullptr || socket_->sendPart(room_, checksum) || refused();
  }
  // The worker takes no more, and has said why.
  bool refused() {
    const std::string error = socket_->error();
    socket_->forgetError();
    const std::string said = socket_->hearAnswer();
    return fails(said.empty() ? error : said);
  }
  bool end() { return left_ == 0 ? hear() : fails(kDamaged); }

  const int file_;
  StateSocket* const socket_;
  StreamPlan plan_;
  Sha256 hash_;
  std::vector<std::byte> room_;
  uint64_t offset_ = 0, left_ = 0;
  bool sized_ = false;
  std::string why_;
};

}  // namespace

std::string takeDown(StateSocket& socket, int file, FileFacts& facts, const TakeDownSteps& steps) {
  return answerWorker(socket, Taker(socket, file, facts).run(steps));
}

std::string takeDown(int socket, const std::function<std::string()>& over, int file, FileFacts& facts,
                     const TakeDownSteps& steps) {
  std::string why = awaitWorker(socket, over);
  StateSocket state(Descriptor(fcntl(socket, F_DUPFD_CLOEXEC, 0)), [] { return false; });
  if (why.empty()) return takeDown(state, file, facts, steps);
  state.answer(why);
  return why;
}

std::string checkFile(int file, const FileFacts& expected, FileFacts* found) {
  FileFacts facts;
  if (std::string why = Player(file, nullptr).run(facts); !why.empty()) return why;
  if (found != nullptr) *found = facts;
  const bool same = facts.bytes == expected.bytes && facts.digest == expected.digest &&
                    facts.lastFrame == expected.lastFrame;
  return same ? "" : "the file is another one than its manifest tells of";
}

std::string playBack(StateSocket& socket, int file) {
  FileFacts facts;
  return Player(file, &socket).run(facts);
}

}  // namespace gpupool::server
