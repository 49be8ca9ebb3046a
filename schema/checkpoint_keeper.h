#pragma once
// Keeps the checkpoints of a lease's sessions away from its server, where they outlive it
// (TurnTerms.holderKeeps): takes them from there, and brings them to the next server. The lease's holder does
// so beside the program, or another server of the pool as the lease's standby.
//
// Of each session the last whole one is kept, as blocks of a file without a name, in memory or in a folder:
// nothing of it stays when this process ends. Of the next one only the blocks come that the last one has not;
// they have their place beside it. What does not fit is passed over, and the server is told why. What the
// bytes mean is the servers' business: who restores the session checks them. The keeper is the fence between
// a session's lives: once it was brought as an epoch, nothing of an earlier one is kept or brought any more.
// Belongs to one event loop.

#include <kj/async-io.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/block_file.h"
#include "schema/session.capnp.h"
#include "schema/session_opening.h"

namespace gpupool::schema {

class CheckpointKeeper {
 public:
  struct Settings {
    std::string folder;    // empty: in memory
    BlockFile::Room room;  // for all together, those that are being received with them
    kj::Duration openBound = 5 * kj::SECONDS;
    kj::Duration pieceBound = 30 * kj::SECONDS;
    kj::Duration checkBound = 120 * kj::SECONDS;  // until a server has checked what was brought
    kj::Duration roomPause = 3 * kj::SECONDS;     // before it is sent again to a server that had no room
    kj::Duration roomBound = 5 * kj::MINUTES;     // for how long such a server counts as not tried
  };
  CheckpointKeeper(kj::Timer& timer, Settings settings) : timer_(timer), settings_(std::move(settings)) {}
  KJ_DISALLOW_COPY(CheckpointKeeper);

  // A connection to the lease's server, for what `fill` says, which is called at once or not at all. It is
  // rejected with what take() and bring() are rejected with then; a server that says no: see isRefusal().
  using Fill = std::function<void(SessionOpening&)>;
  using Open = std::function<kj::Promise<kj::Own<kj::AsyncIoStream>>(const Fill& fill)>;
  // A session as its client will have it next.
  struct Next {
    Id session;
    uint64_t epoch = 0;
    uint64_t rowsHash = 0;  // 0: as `open` has it
    uint32_t pid = 0;
    std::string command, transport;
  };

  // Takes what the lease's server sends. Rejected when that has ended.
  kj::Promise<void> take(const Open& open);

  // Its program has ended: what is kept goes, and what is still on its way is not kept.
  void forget(const Id& session) {
    kept_.erase(session);
    notKept_.erase(session);
    over_.insert(session);
  }
  // What is kept of it goes, for there is a later one elsewhere.
  void drop(const Id& session) { kept_.erase(session); }
  bool has(const Id& session) const;
  bool empty() const;  // it has nothing of any session
  // How often the session was brought from the checkpoint that there is now, to a server that had room for
  // it.
  unsigned tries(const Id& session) const;
  std::string why(const Id& session) const;  // a server did not take it, the last time
  // Brings it to the lease's server; where nothing is kept of it, it begins anew there. Resolves when the
  // server has begun to restore it.
  kj::Promise<void> bring(const Open& open, const Next& next);

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
    std::optional<kj::TimePoint> fullSince, notBefore;  // the server has no room for it
  };
  struct Coming {
    Id session;
    Kept kept;
    Blocks blocks;
    std::vector<size_t> next;  // those of them that come, in their order
    uint64_t bytes = 0;        // of those
    std::string why;           // it is not kept
  };

  kj::Promise<void> takeNext(kj::AsyncIoStream& stream);
  kj::Promise<void> receive(kj::AsyncIoStream& stream, std::shared_ptr<Coming> coming, size_t at);
  kj::Promise<void> keep(kj::AsyncIoStream& stream, std::shared_ptr<Coming> coming);
  kj::Promise<void> send(kj::AsyncIoStream& stream, std::shared_ptr<const Blocks> blocks, size_t at);
  void noteTry(const Id& session, const Blocks& blocks, const std::string& why);
  void noteAnswer(Kept& kept, const std::string& error, bool later) const;
  // It is of a life of its session before the one as which that was brought.
  bool isPast(const Coming& coming) const;
  // Makes room for what comes, or says why there is none.
  void place(SessionCheckpoint::Reader head, Coming& coming);
  std::shared_ptr<const BlockFile::Block> reserve(uint64_t bytes, std::string& why);

  kj::Timer& timer_;
  const Settings settings_;
  const std::shared_ptr<uint64_t> used_ = std::make_shared<uint64_t>(0);
  std::shared_ptr<BlockFile> file_;    // null: nothing has come yet
  std::map<Id, Kept> kept_;            // by session
  std::map<Id, std::string> notKept_;  // by session: why the last one that came is not kept
  std::set<Id> over_;                  // sessions
  std::map<Id, uint64_t> fence_;       // by session: the epoch as which it was brought last
};

// Said by the server, of what was said to it: another try would not end otherwise.
bool isRefusal(const kj::Exception& error);

}  // namespace gpupool::schema
