#pragma once
// Hashes of 128 bits of device memory, in pages (page_layout.h), made on the device: two chains of 64 bits
// (the rounds of XXH64) in each of a block's threads, whose sums are the hash. Pages that differ have the
// same one with a probability of about 2^-128, unless somebody wants them to: then a checkpoint of his own
// session is wrong.
//
// A context gets the code before anything else is loaded in it, here and where the session is rebuilt: the
// driver places code and variables behind what is there. Making a stream takes 2 MiB of the same room (H100,
// driver 580), so all that a checkpoint needs in a context is made, and used once, at that moment, too. Pages
// are hashed by the launch of a graph on a stream of its own, as the scrubber works, and for its reason
// (scrubber.h).
//
// Threads: one at a time. Ends before its context, or is abandoned.

#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "server/driver.h"
#include "server/worker/checksum.h"
#include "server/worker/page_layout.h"

namespace gpupool::server {

class PageHasher {
 public:
  explicit PageHasher(const Driver& driver) : driver_(driver) {}
  PageHasher(const PageHasher&) = delete;
  PageHasher& operator=(const PageHasher&) = delete;

  // All three: its context is current.
  CUresult prepare();
  // Of hashes.size() whole pages behind `address`. The hashes are there behind finish(), and the pages have
  // to stay until then.
  CUresult begin(CUdeviceptr address, std::span<Checksum> hashes);
  CUresult finish();
  // For copies of pages, too. The hasher's.
  CUstream stream() const { return stream_; }
  // Memory of the host that the device reaches without the processor, for such copies. The hasher's.
  std::span<std::byte> pinned() const { return {pinned_, kPinnedBytes}; }

 private:
  static constexpr size_t kPinnedBytes = size_t{8} << 20;
  CUresult useFirst();
  CUresult beginSome(CUdeviceptr address, std::span<Checksum> hashes);

  const Driver& driver_;
  CUfunction kernel_ = nullptr;
  CUstream stream_ = nullptr;
  CUgraph graph_ = nullptr;
  CUgraphNode node_ = nullptr;
  CUgraphExec exec_ = nullptr;
  CUdeviceptr own_ = 0;  // the hashes, on their way, and behind them the page of the first use
  std::vector<std::span<Checksum>> begun_;
  size_t begunPages_ = 0;
  std::byte* pinned_ = nullptr;
};

// Those of a session that is protected; of another one there is none. Nor on a software GPU: the processor
// hashes its memory faster without. Any thread.
class PageHashers {
 public:
  PageHashers(const Driver& driver, bool isProtected)
      : driver_(driver), wanted_(isProtected && !driver.software()) {}
  // Tests: on a software GPU, too. Before there are contexts.
  void want() { wanted_ = true; }
  // The session has this context, and nothing has been loaded in a new one.
  void contextMade(CUcontext context);
  // It is gone, and what it had.
  void contextEnded(CUcontext context);
  // Null: none, and then its pages are hashed elsewhere.
  PageHasher* find(CUcontext context);

 private:
  const Driver& driver_;
  bool wanted_;
  std::mutex mutex_;
  std::map<CUcontext, PageHasher> hashers_;
};

}  // namespace gpupool::server
