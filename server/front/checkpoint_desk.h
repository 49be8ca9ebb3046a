#pragma once
// Checkpoints on their way between this server and the holders of leases that keep them
// (TurnTerms.holderKeeps, SessionHello.keeps and brings): out of this machine, so that a session outlives it,
// and in again, for one that has lost its server.
//
// A checkpoint travels as the session's file (server/files/session_file.h), which lies in memory meanwhile
// and counts there. To a holder that has taken an earlier one over the same connection only the blocks go
// that this had not (SessionCheckpoint.blocks). A lease's holder takes one at a time. One that does not take
// the next piece, or say that it has it all, within a bound is taken for gone. What a holder brings is taken
// for hostile: it is checked before a worker sees it. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "schema/session.capnp.h"
#include "server/files/kept_pages.h"
#include "server/front/keep_budget.h"
#include "server/front/sessions.h"

namespace gpupool::server {

// What a holder that brings a session says of it.
struct BroughtSession {
  SessionFacts facts;  // epoch: the client's next
  FileFacts file;      // bytes 0: there is none, and it begins anew
};

// Who keeps a lease's checkpoints: its holder or, with a number (Lease.standbyEpoch), its standby.
struct AwayKeeper {
  uint64_t number = 0;
  std::string name = {};  // the standby's
  std::string text() const { return name.empty() ? "its holder" : "its standby " + name; }
};

// What the message says of the file whose bytes follow it.
inline FileFacts fileFactsOf(schema::SessionCheckpoint::Reader head) {
  FileFacts file;
  file.bytes = head.getBytes();
  file.lastFrame = head.getLastFrame();
  file.lastAside = head.getLastAside();
  if (file.bytes != 0 && head.getDigest().size() == file.digest.size())
    std::memcpy(file.digest.data(), head.getDigest().begin(), file.digest.size());
  return file;
}

class CheckpointDesk {
 public:
  struct Settings {
    kj::Duration piece = 30 * kj::SECONDS;   // to take or to send the next one
    kj::Duration answer = 60 * kj::SECONDS;  // until the other side has checked, and kept, all of it
  };
  CheckpointDesk(kj::Timer& timer, std::shared_ptr<KeepBudget> budget, Settings settings)
      : timer_(timer), budget_(std::move(budget)), settings_(settings) {}
  KJ_DISALLOW_COPY(CheckpointDesk);

  // The lease's holder, or its standby, which has proven its key, keeps checkpoints from here on, in place of
  // one before; but one with a lower number is turned away while that is there.
  void keep(kj::Own<kj::AsyncIoStream> stream, const Id& lease, AwayKeeper who = {});
  // It is there, as far as is known.
  bool has(const Id& lease) const { return holders_.contains(lease); }
  // Its connection: another one after each time that it was gone, and what it has kept over an earlier one it
  // may have no more. 0: none.
  uint64_t connection(const Id& lease) const {
    const auto at = holders_.find(lease);
    return at == holders_.end() ? 0 : at->second->connection;
  }
  AwayKeeper who(const Id& lease) const {
    const auto at = holders_.find(lease);
    return at == holders_.end() ? AwayKeeper{} : at->second->who;
  }
  // It takes one now.
  bool ready(const Id& lease) const {
    const auto at = holders_.find(lease);
    return at != holders_.end() && !at->second->busy;
  }
  // Drops those of leases that are not here any more: the holder looks for where its lease is; and those that
  // have ended.
  void keepOnly(const LeaseTable& leases);

  // Sends it to the lease's holder. Fulfilled when the holder keeps all of it, with the bytes that had to
  // travel; else rejected, for people.
  kj::Promise<uint64_t> offer(const SessionFacts& facts, std::shared_ptr<const KeptPages> pages);

  // A session's file, in memory, and what it takes there.
  struct File {
    Descriptor file;
    std::shared_ptr<void> room;
    FileFacts facts;
    std::vector<FileBlock> blocks;  // of one that goes to a holder
  };
  // Receives one, and checks it. Rejected with a text for people where it is none. `stream` stays alive.
  kj::Promise<std::shared_ptr<File>> take(kj::AsyncIoStream& stream, const BroughtSession& brought);
  // later: there is no room for it now, and may be.
  kj::Promise<void> answer(kj::AsyncIoStream& stream, const std::string& error, bool later = false);

 private:
  struct Taken {
    uint64_t number = 0;
    std::vector<FileBlock> blocks;
  };
  struct Holder : kj::Refcounted {
    kj::Own<kj::AsyncIoStream> stream;
    AwayKeeper who;
    uint64_t connection = 0;
    uint64_t number = 0;  // of the last one
    bool busy = false;
    std::map<Id, Taken> taken;  // by session, the last one
    kj::Canceler offers;        // ended when another one is there instead
  };
  struct Span {  // of the file
    uint64_t offset = 0, bytes = 0;
  };
  struct Sent {
    uint64_t bytes = 0;
    std::string refusal;  // the holder's; empty: it keeps all of it
  };
  kj::Promise<Sent> send(kj::Own<Holder> holder, const SessionFacts& facts, std::shared_ptr<File> file);
  kj::Promise<void> sendSpans(Holder& holder, const File& file,
                              std::shared_ptr<const std::vector<Span>> spans, size_t at);
  // Writes which blocks the holder has, and returns where the others lie.
  static std::vector<Span> tellBlocks(const Taken* base, const std::vector<FileBlock>& blocks,
                                      schema::SessionCheckpoint::Builder head);
  kj::Promise<std::string> hear(Holder& holder);
  static bool hasEnded(const Holder& holder);

  kj::Timer& timer_;
  const std::shared_ptr<KeepBudget> budget_;
  const Settings settings_;
  std::map<Id, kj::Own<Holder>> holders_;  // by lease
  uint64_t connections_ = 0;
};

}  // namespace gpupool::server
