#pragma once
// Keeps the checkpoints of a lease's sessions beside the program, where they outlive the server
// (TurnTerms.holderKeeps): takes them from the lease's server, and brings them to the next one.
//
// Of each session the last whole one is kept, as blocks of a file without a name, in memory or in a folder:
// nothing of it stays when this process ends. Of the next one only the blocks come that the last one has not;
// they have their place beside it. What does not fit is passed over, and the server is told why. What the
// bytes mean is the servers' business: who restores the session checks them. Belongs to the holder's event
// loop.

#include <kj/async-io.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/block_file.h"
#include "pool-manager/cli/session_opener.h"
#include "schema/session.capnp.h"
#include "schema/session_opening.h"

namespace gpupool::cli {

class CheckpointKeeper {
 public:
  struct Settings {
    std::string folder;      // empty: in memory
    uint64_t mostBytes = 0;  // of all together, those that are being received with them
    std::string transport;   // as SessionWish's: which of the server's addresses is used
    kj::Duration openBound = 5 * kj::SECONDS;
    kj::Duration pieceBound = 30 * kj::SECONDS;
    kj::Duration checkBound = 120 * kj::SECONDS;  // until a server has checked what was brought
  };
  CheckpointKeeper(kj::AsyncIoProvider& io, Settings settings) : io_(io), settings_(std::move(settings)) {}
  KJ_DISALLOW_COPY(CheckpointKeeper);

  // Takes what the lease's server sends; `lease` is copied. Rejected when that has ended: as
  // toException(OpenFailure), or with the stream's exception.
  kj::Promise<void> take(const pool::Lease& lease);

  // Its program has ended: what is kept goes, and what is still on its way is not kept.
  void forget(const Id& session) {
    kept_.erase(session);
    over_.insert(session);
  }
  // How often the session was brought from the checkpoint that there is now.
  unsigned tries(const Id& session) const;
  std::string why(const Id& session) const;  // a server did not take it, the last time
  // Brings it to the lease's server, as the epoch of the wish; where nothing is kept of it, it begins anew
  // there. Resolves when the server has begun to restore it. Rejected as take() is.
  kj::Promise<void> bring(const pool::Lease& lease, const SessionWish& wish);

  // Of all blocks, in whole pages.
  uint64_t bytes() const { return *used_; }

 private:
  using Blocks = std::vector<std::shared_ptr<const BlockFile::Block>>;
  struct Kept {
    std::shared_ptr<const Blocks> blocks;
    uint64_t bytes = 0;   // 0: nothing is kept
    uint64_t number = 0;  // of what the connection has brought; 0: it came over an earlier one
    uint64_t epoch = 0;   // in which it was made
    std::string digest;
    uint64_t lastFrame = 0, lastAside = 0;
    uint32_t driverVersion = 0;
    unsigned tries = 0;
    std::string why;
  };
  struct Coming {
    Id session;
    Kept kept;
    Blocks blocks;
    std::vector<size_t> next;  // those of them that come, in their order
    uint64_t bytes = 0;        // of those
    std::string why;           // it is not kept
  };

  kj::Promise<kj::Own<kj::AsyncIoStream>> open(const pool::Lease& lease,
                                               const std::function<void(schema::SessionOpening&)>& fill);
  kj::Promise<void> takeNext(kj::AsyncIoStream& stream);
  kj::Promise<void> receive(kj::AsyncIoStream& stream, std::shared_ptr<Coming> coming, size_t at);
  kj::Promise<void> keep(kj::AsyncIoStream& stream, std::shared_ptr<Coming> coming);
  kj::Promise<void> send(kj::AsyncIoStream& stream, std::shared_ptr<const Blocks> blocks, size_t at);
  void noteTry(const Id& session, const Blocks& blocks, const std::string& why);
  // Makes room for what comes, or says why there is none.
  void place(schema::SessionCheckpoint::Reader head, Coming& coming);
  std::shared_ptr<const BlockFile::Block> reserve(uint64_t bytes, std::string& why);

  kj::AsyncIoProvider& io_;
  const Settings settings_;
  const std::shared_ptr<uint64_t> used_ = std::make_shared<uint64_t>(0);
  std::shared_ptr<BlockFile> file_;  // null: nothing has come yet
  std::map<Id, Kept> kept_;          // by session
  std::set<Id> over_;                // sessions
};

}  // namespace gpupool::cli
