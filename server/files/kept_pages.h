#pragma once
// Checkpoints of sessions in memory, in pages (server/worker/session_pages.h). A page that two checkpoints of
// a session have in common is there once, for as long as one of them is: a new checkpoint costs what has
// changed. Each is whole and never changes; one that is being received has its pages beside those of the one
// before, which stays what it is. A worker is taken for hostile.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/files/session_file.h"
#include "server/worker/page_layout.h"
#include "server/worker/stream_layout.h"

namespace gpupool::server {

// Where pages are: one file in memory. Any thread.
class PageStore : public std::enable_shared_from_this<PageStore> {
 public:
  struct Room {
    // So many bytes more, and less. "" or why not. Any thread.
    std::function<std::string(uint64_t)> take;
    std::function<void(uint64_t)> give;
  };
  // Throws std::runtime_error if there is no file to be had.
  static std::shared_ptr<PageStore> create(Room room);
  ~PageStore();
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;

  class Page {
   public:
    ~Page();  // its memory is free again
    Page(const Page&) = delete;
    Page& operator=(const Page&) = delete;
    uint64_t bytes() const { return bytes_; }
    const Checksum& checksum() const { return checksum_; }
    // "" or why they are not those that were put in. room: bytes() long.
    std::string read(std::span<std::byte> room) const;

   private:
    friend class PageStore;
    Page(std::shared_ptr<PageStore> store, uint64_t offset, uint64_t bytes, const Checksum& checksum)
        : store_(std::move(store)), offset_(offset), bytes_(bytes), checksum_(checksum) {}
    const std::shared_ptr<PageStore> store_;
    const uint64_t offset_, bytes_;
    const Checksum checksum_;
  };
  using Pages = std::vector<std::shared_ptr<const Page>>;
  // Adds one with these bytes, whose checksum that is. "" or why there is no room.
  std::string put(std::span<const std::byte> bytes, const Checksum& checksum, Pages& pages);

 private:
  PageStore(Descriptor file, Room room) : file_(std::move(file)), room_(std::move(room)) {}

  const Descriptor file_;
  const Room room_;
  std::atomic<uint64_t> end_{0};  // the file has holes; no place is used twice
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
};

// Receives a checkpoint from a worker at the other end of the socket, which stays the caller's. base: the one
// that is held; null: none. "" and `made`, or why there is none, for people. `over` is as takeDown's.
std::string takePages(int socket, const std::function<std::string()>& over, PageStore& store,
                      const KeptPages* base, std::shared_ptr<const KeptPages>& made);
// Sends it to a worker that rebuilds the session from it, as playBack does. "" or why it has not.
std::string playBack(StateSocket& socket, const KeptPages& kept);

}  // namespace gpupool::server
