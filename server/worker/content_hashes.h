#pragma once
// Hashes of the large contents of a checkpoint in pages (page_layout.h): the device's memory, hashed by the
// device where it can, and contents of the host of a page or more, hashed by a few threads. Both go on while
// the caller does something else, which is how a checkpoint keeps the program waiting less.
//
// Everything stands still until it has finished. Belongs to one thread, whose context may be another one
// behind each call.

#include <future>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "server/worker/checksum.h"
#include "server/worker/device_pieces.h"

namespace gpupool::server {

class ContentHashes {
 public:
  // The pieces are prepared already.
  ContentHashes(Session& session, DevicePieces& pieces) : session_(session), pieces_(pieces) {}
  // Waits for what has begun.
  ~ContentHashes();
  ContentHashes(const ContentHashes&) = delete;
  ContentHashes& operator=(const ContentHashes&) = delete;

  // Once. host: contents of the host, whose memory stays. Both: "" or why not, for people.
  std::string begin(std::span<const std::span<const std::byte>> host);
  std::string finish();

  // Behind finish(). By page, from the first piece on.
  std::span<const Checksum> device() const { return device_; }
  // By page; empty: it is shorter than a page, and not hashed.
  std::span<const Checksum> host(size_t content) const { return host_.at(content); }

 private:
  void beginHost(std::span<const std::span<const std::byte>> contents);
  std::string beginDevice();
  std::string beginPiece(size_t piece, std::span<Checksum> hashes);
  std::string hashThroughHost(CUdeviceptr address, std::span<Checksum> hashes);
  std::string finishDevice();

  Session& session_;
  DevicePieces& pieces_;
  std::vector<Checksum> device_;
  std::vector<std::vector<Checksum>> host_;
  std::vector<std::future<std::string>> threads_;
  std::map<CUcontext, PageHasher*> hashing_;  // those that have not finished
};

}  // namespace gpupool::server
