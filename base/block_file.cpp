#include "base/block_file.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace gpupool {
namespace {

constexpr uint64_t kPage = 4096;  // what the kernel gives memory back by

uint64_t rounded(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Calls `once(at)` for the bytes from there on, which says how many it has done, until all are.
template <class Once>
std::string repeat(uint64_t bytes, const char* atEnd, Once&& once) {
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t done = once(at);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return std::strerror(errno);
    if (done == 0) return atEnd;
    at += static_cast<uint64_t>(done);
  }
  return "";
}

}  // namespace

std::shared_ptr<BlockFile> BlockFile::inMemory(const char* name, Room room, std::string& why) {
  const int file = memfd_create(name, MFD_CLOEXEC);
  if (file < 0) why = std::string("no file in memory: ") + std::strerror(errno);
  return file < 0 ? nullptr : std::shared_ptr<BlockFile>(new BlockFile(file, std::move(room)));
}

std::shared_ptr<BlockFile> BlockFile::inFolder(const std::string& folder, Room room, std::string& why) {
  const int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) why = folder + ": " + std::strerror(errno);
  return file < 0 ? nullptr : std::shared_ptr<BlockFile>(new BlockFile(file, std::move(room)));
}

BlockFile::~BlockFile() { close(file_); }

std::shared_ptr<const BlockFile::Block> BlockFile::reserve(uint64_t bytes, std::string& why) {
  const uint64_t taken = rounded(bytes);
  if (why = taken < bytes ? "no room for so many bytes" : room_.take(taken); !why.empty()) return nullptr;
  std::lock_guard lock(mutex_);
  uint64_t offset = end_;
  if (const auto same = free_.find(taken); same != free_.end()) {
    offset = same->second.back();
    same->second.pop_back();
    if (same->second.empty()) free_.erase(same);
  } else {
    end_ += taken;
  }
  // From here on its end gives the room back.
  return std::shared_ptr<const Block>(new Block(shared_from_this(), offset, bytes));
}

void BlockFile::free(uint64_t offset, uint64_t bytes) {
  const uint64_t taken = rounded(bytes);
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(taken));
  {
    std::lock_guard lock(mutex_);
    free_[taken].push_back(offset);
  }
  room_.give(taken);
}

BlockFile::Block::~Block() { home_->free(offset_, bytes_); }

std::string BlockFile::Block::write(std::span<const std::byte> bytes, uint64_t at) const {
  if (at > bytes_ || bytes.size() > bytes_ - at) return std::strerror(ENOSPC);
  return repeat(bytes.size(), std::strerror(ENOSPC), [&](uint64_t done) {
    return pwrite(home_->file_, bytes.data() + done, bytes.size() - done,
                  static_cast<off_t>(offset_ + at + done));
  });
}

std::string BlockFile::Block::read(std::span<std::byte> bytes) const {
  return repeat(bytes.size(), "it is shorter than it was", [&](uint64_t at) {
    return pread(home_->file_, bytes.data() + at, bytes.size() - at, static_cast<off_t>(offset_ + at));
  });
}

}  // namespace gpupool
