#pragma once
// Pages that a checkpoint sends, copied aside in spare memory of their devices, at the devices' speed: the
// session goes on, and they are read meanwhile. The memory is the lease's, and is given back when all is
// read, or when the session needs it (Session::reclaimSpare). Where other sessions have a part in the lease
// there is none: nobody would know that they need it.
//
// Threads: one takes, while everything stands still, and reads. Any ends it.

#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "server/worker/device_pieces.h"
#include "server/worker/page_layout.h"

namespace gpupool::server {

class SparePages {
 public:
  struct Place {
    size_t piece = 0;
    uint64_t offset = 0;  // in it
  };
  // How many of them, from the first on, follow one another in a piece.
  static size_t inARow(std::span<const Place> places);

  explicit SparePages(Session& session) : session_(session) {}
  ~SparePages() { end(); }
  SparePages(const SparePages&) = delete;
  SparePages& operator=(const SparePages&) = delete;

  // Those pages. False: there is no room for them, or they cannot be copied; nothing is held then.
  bool take(DevicePieces& pieces, const std::vector<Place>& places);
  // The next bytes of them, a multiple of a page: "" or why not, for people. No context is current behind it.
  std::string read(std::span<std::byte> room);
  // The memory is the device's again, and nothing of it is in a context of the session.
  void end();

 private:
  struct Part {  // pages of one device, of those that follow one another
    unsigned device = 0;
    CUcontext context = nullptr;
    CUstream stream = nullptr;
    bool ownStream = false;  // else the hasher's, which has pinned memory, too
    std::span<std::byte> pinned;
    Space::Spare memory;
    uint64_t bytes = 0;
  };
  CUresult make(DevicePieces& pieces, const std::vector<Place>& places);
  CUresult findStream(Part& part);
  CUresult copy(DevicePieces& pieces, const Part& part, std::span<const Place> places);
  CUresult readSome(const Part& part, std::span<std::byte> room);
  void release();  // under mutex_

  Session& session_;
  std::mutex mutex_;
  std::vector<Part> parts_;
  size_t part_ = 0;  // where the next bytes are
  uint64_t offset_ = 0;
};

}  // namespace gpupool::server
