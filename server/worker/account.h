#pragma once
// The memory of a session's lease. It belongs to all sessions of the lease together, so the server keeps the
// account and a session takes from it before it allocates. So it is with what they share: one offers a part
// of a piece of its memory, and others open it.
//
// Threads: any.

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "schema/cuda.h"
#include "schema/session_calls.h"

namespace gpupool::server {

class Account {
 public:
  static constexpr unsigned kHost = ~0u;  // pinned memory of the server, as a place
  virtual ~Account() = default;
  // `place`: a device of the lease, by its index, or kHost. CUDA_ERROR_OUT_OF_MEMORY: there is no room, and
  // the log says why where it is not the lease's limit. CUDA_ERROR_UNKNOWN: the server that keeps the account
  // is gone, so the session is ending, and knows it; not an error that could be taken for a broken device's
  // (loss.h).
  // Takes a round trip to the server.
  virtual CUresult take(unsigned place, uint64_t bytes) = 0;
  virtual void give(unsigned place, uint64_t bytes) = 0;
  // What the lease's other sessions have there.
  virtual uint64_t others(unsigned place) = 0;

  // A part of a piece of memory that sessions share. In kHost: of shared events (shared_events.h).
  struct Part {
    unsigned place = 0;
    uint64_t bytes = 0;               // of the piece
    uint64_t offset = 0, length = 0;  // of what is offered
  };
  struct Opened {
    uint64_t opening = 0;
    Part part;
    int descriptor = -1;  // the caller's to close
  };
  // piece: this session's own number of it, from 1. descriptor: stays the caller's. Both take a round trip to
  // the server. Errors: CUDA_ERROR_NOT_SUPPORTED: there is nobody to share with. CUDA_ERROR_OUT_OF_MEMORY:
  // too many. CUDA_ERROR_UNKNOWN, as above. Of `open` also those of sessionMemoryOpen.
  virtual CUresult offer(uint64_t, const Part&, int, schema::ShareToken&) { return CUDA_ERROR_NOT_SUPPORTED; }
  virtual CUresult open(const schema::ShareToken&, Opened&) { return CUDA_ERROR_NOT_SUPPORTED; }
  // awaited: when it returns, nobody opens it any more.
  virtual void endOffer(const schema::ShareToken&, [[maybe_unused]] bool awaited) {}
  // The session has it, or has it no more, and it is on the account as another worker's of the session.
  virtual void inherit(unsigned, uint64_t) {}
  virtual void disinherit(unsigned, uint64_t) {}
  // A piece of which a part was offered has ended here: in place of `give`.
  virtual void endPiece(uint64_t piece, unsigned place, uint64_t bytes) { give(place, bytes), void(piece); }
  virtual void close(uint64_t) {}
  // This session's number among those that share; 0 before it has offered or opened anything.
  virtual uint64_t number() const { return 0; }
};

// Kept here: of a session that is its lease's only one.
class OwnAccount : public Account {
 public:
  explicit OwnAccount(std::vector<uint64_t> limits) : limits_(std::move(limits)), used_(limits_.size()) {}
  CUresult take(unsigned place, uint64_t bytes) override;
  void give(unsigned place, uint64_t bytes) override;
  uint64_t others(unsigned) override { return 0; }

 private:
  std::mutex mutex_;
  std::vector<uint64_t> limits_, used_;
};

// Taken until it is kept or goes out of scope.
class Taken {
 public:
  Taken(Account& account, unsigned place, uint64_t bytes)
      : account_(account), place_(place), bytes_(bytes), status_(account.take(place, bytes)) {}
  ~Taken() {
    if (status_ == CUDA_SUCCESS && !kept_) account_.give(place_, bytes_);
  }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
  CUresult status() const { return status_; }
  void keep() { kept_ = true; }

 private:
  Account& account_;
  unsigned place_;
  uint64_t bytes_;
  CUresult status_;
  bool kept_ = false;
};

// What objects of the driver's own making (arrays) take of a device, until they are destroyed or their
// context is.
class ObjectMemory {
 public:
  explicit ObjectMemory(Account& account) : account_(account) {}
  void add(uint64_t object, uint64_t context, unsigned device, uint64_t bytes);
  void remove(uint64_t object);
  // Of all objects for which `gone(context, device)` holds.
  template <class F>
  void removeWhere(F&& gone) {
    std::lock_guard lock(mutex_);
    for (auto it = objects_.begin(); it != objects_.end();) {
      const Entry entry = it->second;
      if (!gone(entry.context, entry.device)) {
        ++it;
        continue;
      }
      account_.give(entry.device, entry.bytes);
      it = objects_.erase(it);
    }
  }
  uint64_t bytes(unsigned device) const;

 private:
  struct Entry {
    uint64_t context = 0;
    unsigned device = 0;
    uint64_t bytes = 0;
  };
  Account& account_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Entry> objects_;
};

}  // namespace gpupool::server
