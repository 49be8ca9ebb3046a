#pragma once
// Checkpoints of sessions in memory, in pages (server/worker/session_pages.h). A page that two checkpoints of
// a session have in common, or that one has several times, is there once, for as long as one of them is: a
// new checkpoint costs what has changed. Each is whole and never changes; one that is being received has its
// pages beside those of the one before, which stays what it is. A worker is taken for hostile: it can change
// the memory through which pages come (StateSocket::offerRoom) at any time, so a page is copied from there,
// and what is compared with its checksum is what is kept.

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/block_file.h"
#include "server/files/session_file.h"
#include "server/worker/page_layout.h"
#include "server/worker/stream_layout.h"

namespace gpupool::server {

// Where pages are, in memory. Any thread. In several files in turns, since only one thread at a time writes
// to one: more than OrderedWork has threads.
class PageStore {
 public:
  // Throws std::runtime_error if there is no file to be had.
  static std::shared_ptr<PageStore> create(BlockFile::Room room);

  class Page {
   public:
    Page(std::shared_ptr<const BlockFile::Block> block, const Checksum& checksum)
        : block_(std::move(block)), checksum_(checksum) {}
    uint64_t bytes() const { return block_->bytes(); }
    const Checksum& checksum() const { return checksum_; }
    // By who has reserved it, before anybody reads it: all of them, with that checksum, in pieces from its
    // beginning on. "" or why not.
    std::string write(std::span<const std::byte> bytes, uint64_t at = 0) const;
    // "" or why they are not those that were written. room: bytes() long.
    std::string read(std::span<std::byte> room) const;
    // The same, but does not compare them: for who does that elsewhere.
    std::string copy(std::span<std::byte> room) const;

   private:
    const std::shared_ptr<const BlockFile::Block> block_;
    const Checksum checksum_;
  };
  using Pages = std::vector<std::shared_ptr<const Page>>;
  // Room for one with so many bytes and that checksum. Null and why there is none.
  std::shared_ptr<const Page> reserve(uint64_t bytes, const Checksum& checksum, std::string& why);
  // Adds one with these bytes, whose checksum that is. "" or why there is no room.
  std::string put(std::span<const std::byte> bytes, const Checksum& checksum, Pages& pages);

 private:
  static constexpr size_t kFiles = 16;
  using Files = std::array<std::shared_ptr<BlockFile>, kFiles>;
  explicit PageStore(Files files) : files_(std::move(files)) {}

  const Files files_;
  std::atomic<size_t> next_{0};
};

// One that is whole.
struct KeptPages {
  struct Image {
    schema::ImageName name;
    PageStore::Pages pages;
  };
  Id id;
  FileFacts facts;  // bytes: of all pages; digest: of the record's, and of all checksums
  Digest record{};  // of the record
  PageStore::Pages recordPages;
  std::vector<Image> images;
  PageStore::Pages contents;
  size_t shared = 0;  // pages that came through memory that both map
};

// Receives a checkpoint from a worker at the other end of the socket, which stays the caller's. base: the one
// that is held; null: none. "" and `made`, or why there is none, for people. `over` is as takeDown's.
std::string takePages(int socket, const std::function<std::string()>& over, PageStore& store,
                      const KeptPages* base, std::shared_ptr<const KeptPages>& made);
// Sends it to a worker that rebuilds the session from it, as playBack does. "" or why it has not. Whether
// what is kept is what was taken, the worker compares where it can: with the pages' checksums, of what it
// uses. Only one that refuses it makes the server read all of it, to tell whether the damage is its own.
std::string playBack(StateSocket& socket, const KeptPages& kept);

}  // namespace gpupool::server
