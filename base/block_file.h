#pragma once
// Blocks of bytes that come and go, in one file without a name: for checkpoints, whose blocks are shared with
// the next one where they have not changed. The place of a block that has gone is given back to the system
// where the file system can do that (tmpfs, ext4, XFS), and is used again for one of the same size. Any
// thread.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace gpupool {

class BlockFile : public std::enable_shared_from_this<BlockFile> {
 public:
  struct Room {
    // So many bytes more, and less. "" or why not. Any thread.
    std::function<std::string(uint64_t)> take;
    std::function<void(uint64_t)> give;
  };
  // In memory. Null and why, if there is none to be had.
  static std::shared_ptr<BlockFile> inMemory(const char* name, Room room, std::string& why);
  // In a folder, to which the process may write.
  static std::shared_ptr<BlockFile> inFolder(const std::string& folder, Room room, std::string& why);
  ~BlockFile();
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;

  class Block {
   public:
    ~Block();  // its place is free again
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    uint64_t bytes() const { return bytes_; }
    int file() const { return home_->file_; }
    uint64_t offset() const { return offset_; }
    // "" or why not. write: from there on, no more than there is. read: bytes() long.
    std::string write(std::span<const std::byte> bytes, uint64_t at = 0) const;
    std::string read(std::span<std::byte> bytes) const;

   private:
    friend class BlockFile;
    Block(std::shared_ptr<BlockFile> home, uint64_t offset, uint64_t bytes)
        : home_(std::move(home)), offset_(offset), bytes_(bytes) {}
    const std::shared_ptr<BlockFile> home_;
    const uint64_t offset_, bytes_;
  };
  // A place for so many bytes, which counts from here on, in whole pages (4096). Null and why there is no
  // room.
  std::shared_ptr<const Block> reserve(uint64_t bytes, std::string& why);

 private:
  BlockFile(int file, Room room) : file_(file), room_(std::move(room)) {}
  void free(uint64_t offset, uint64_t bytes);

  const int file_;
  const Room room_;
  std::mutex mutex_;
  uint64_t end_ = 0;
  std::map<uint64_t, std::vector<uint64_t>> free_;  // offsets by size
};

}  // namespace gpupool
