#pragma once
// A checkpoint in pages (page_layout.h), for who keeps the one before: of the session's contents only the
// pages travel that it lacks.
//
//   keeper -> worker   one block: the Id of the checkpoint that it holds; empty: none
//   worker -> keeper   SessionRecord, as one block; its digest
//   keeper -> worker   its answer, with which it offers memory for pages (StateSocket::offerRoom); one block:
//                      the names of the code images that it lacks
//   worker -> keeper   these images, in that order; one block: PagesHeader and where each page is;
//                      each new page, as a part (StateSocket::sendPart)
//   keeper -> worker   its answer: empty: the checkpoint is whole
//
// The worker remembers the hashes of the last checkpoint that a keeper has named, and of the one that it has
// sent since. What the keeper names is all that it believes of what arrived: an answer may be lost. Of a
// checkpoint that it does not remember, or of none, all pages are new. A page is compared by its hash alone,
// wherever it lay in the other checkpoint: what memory was freed and allocated anew makes no difference.

#include <capnp/message.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/worker/content_hashes.h"
#include "server/worker/contents.h"
#include "server/worker/device_pieces.h"
#include "server/worker/page_layout.h"
#include "server/worker/session.h"
#include "server/worker/spare_pages.h"
#include "server/worker/state_socket.h"

namespace gpupool::server {

// What a worker knows of a checkpoint that it has sent: where in it a page of that hash is.
class SentCheckpoint {
 public:
  SentCheckpoint(Id id, std::vector<Checksum> hashes) : id_(id), hashes_(std::move(hashes)) {}
  const Id& id() const { return id_; }
  // kNewPage: there is none. Most pages are where they were: `near` is looked at first, and costs little.
  // Pages that moved are found through an index; the first call that needs it makes it, if nobody has.
  uint64_t find(const Checksum& hash, uint64_t near);
  void makeIndex();

 private:
  struct Hash {
    size_t operator()(const Checksum& checksum) const;
  };
  Id id_;
  std::vector<Checksum> hashes_;  // by the page's place
  std::unordered_map<Checksum, uint64_t, Hash> index_;
};

class SentPages {
 public:
  // The keeper holds `id`: the others are forgotten. Null: that one is not known.
  SentCheckpoint* held(const Id& id);
  void sent(SentCheckpoint checkpoint) { known_.push_back(std::move(checkpoint)); }
  // While nobody waits: the next checkpoint, which stands still meanwhile, does not make it.
  void makeIndexes();

 private:
  std::vector<SentCheckpoint> known_;
};

// One checkpoint, in this order. Belongs to one thread, which has the same context current before and behind
// it. Each: "" or why not, for people.
class PageCopy {
 public:
  PageCopy(Session& session, SentPages& sent) : session_(session), sent_(sent) { pieces_.emplace(session); }
  ~PageCopy();
  PageCopy(const PageCopy&) = delete;
  PageCopy& operator=(const PageCopy&) = delete;

  // Behind takeStock, while everything stands still. Finds out what has changed since `base`.
  std::string look(const Id& base);
  // Copies that aside. True: the session may go on. False: there is no room; it stands still until this ends.
  bool setAside();
  std::string ship(StateSocket& socket);

  size_t pages() const { return places_.size(); }
  size_t changed() const { return changed_.size(); }
  uint64_t bytes() const { return bytes_; }            // of those
  uint32_t describeMs() const { return describeMs_; }  // a part of what look() takes

 private:
  static constexpr size_t kAtOnce = StateSocket::kPartBytes / kPageBytes;
  static constexpr size_t kBatches = 3;
  struct Page {
    size_t content = 0;  // where it begins
    uint64_t offset = 0;
    uint32_t bytes = 0;
  };
  struct Batch {
    std::span<const size_t> pages;
    std::array<std::byte*, kAtOnce> room{};
    std::array<Checksum, kAtOnce> checksums;
  };
  std::string describe();
  void cut(std::span<const uint64_t> lengths);
  void takeHashes(const ContentHashes& hashes);
  void compare(SentCheckpoint* base);
  bool onDevice(const Page& page) const { return page.content == deviceContent_; }
  // Its bytes, from the host's memory.
  std::span<const std::byte> read(const Page& page, std::vector<std::byte>& room) const;
  std::string prepareRoom(StateSocket& socket);
  bool findRoom(StateSocket& socket, std::span<const size_t>& pages, Batch& batch) const;
  std::string fill(const Batch& batch);
  std::string fillFromDevice(std::span<const size_t> pages, std::byte* room);
  std::string hash(Batch& batch) const;
  bool send(StateSocket& socket, const Batch& batch) const;
  void readHost(const Page& page, std::byte* room);
  SparePages::Place placeOf(const Page& page) const;
  std::string sendPages(StateSocket& socket);
  bool sendPlaces(StateSocket& socket);

  Session& session_;
  SentPages& sent_;
  std::optional<DevicePieces> pieces_;  // none: what has changed is aside
  capnp::MallocMessageBuilder message_;
  PagesHeader header_;
  std::vector<std::byte> copied_;                    // of variables and arrays
  std::vector<std::span<const std::byte>> sources_;  // by content: of the host, the device's (empty), copied
  size_t deviceContent_ = 0;
  std::vector<uint64_t> begins_;  // of the pieces, in the device's content
  std::vector<Page> all_;
  std::vector<Checksum> hashes_;  // of all_
  std::vector<uint64_t> places_;
  std::vector<size_t> changed_;
  uint64_t bytes_ = 0;
  uint32_t describeMs_ = 0;
  std::shared_ptr<transport::SharedMemory> room_;  // registered with the driver; null: none is
  std::shared_ptr<SparePages> spare_;
  std::vector<std::byte> aside_;  // host memory that has changed
  size_t asideRead_ = 0;
};

}  // namespace gpupool::server
