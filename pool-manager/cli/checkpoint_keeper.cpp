#include "pool-manager/cli/checkpoint_keeper.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/options.h"
#include "schema/convert.h"
#include "schema/file_pieces.h"

namespace gpupool::cli {
namespace {

using holder::Status;

constexpr size_t kDigestBytes = 32;
constexpr uint32_t kMostBlock = uint32_t{4} << 20;
constexpr capnp::ReaderOptions kHeads{.traversalLimitInWords = uint64_t{1} << 22, .nestingLimit = 4};
constexpr capnp::ReaderOptions kAnswers{.traversalLimitInWords = 1024, .nestingLimit = 4};

[[noreturn]] void leave(Status status, const std::string& text) {
  kj::throwFatalException(toException({status, text}));
}
[[noreturn]] void leaveMalformed() { leave(Status::internal, "the server sent a malformed checkpoint"); }

}  // namespace

std::shared_ptr<const BlockFile::Block> CheckpointKeeper::reserve(uint64_t bytes, std::string& why) {
  if (file_ == nullptr) {
    BlockFile::Room room{[used = used_, most = settings_.mostBytes](uint64_t more) -> std::string {
                           if (more > most || *used > most - more)
                             return "no room for it: " + options::formatSize(*used) + " of --protect-size " +
                                    options::formatSize(most) + " are used";
                           *used += more;
                           return "";
                         },
                         [used = used_](uint64_t less) { *used -= less; }};
    file_ = settings_.folder.empty() ? BlockFile::inMemory("gpupool-checkpoint", std::move(room), why)
                                     : BlockFile::inFolder(settings_.folder, std::move(room), why);
  }
  return file_ == nullptr ? nullptr : file_->reserve(bytes, why);
}

unsigned CheckpointKeeper::tries(const Id& session) const {
  const auto at = kept_.find(session);
  return at == kept_.end() ? 0 : at->second.tries;
}

std::string CheckpointKeeper::why(const Id& session) const {
  const auto at = kept_.find(session);
  return at == kept_.end() ? "" : at->second.why;
}

kj::Promise<kj::Own<kj::AsyncIoStream>> CheckpointKeeper::open(
    const pool::Lease& lease, const std::function<void(schema::SessionOpening&)>& fill) {
  return io_.getTimer().timeoutAfter(settings_.openBound, openWithout(io_, lease, settings_.transport, fill));
}

// ---- from the server

kj::Promise<void> CheckpointKeeper::take(const pool::Lease& lease) {
  return open(lease, [](schema::SessionOpening& opening) { opening.keeps = true; })
      .then([this](kj::Own<kj::AsyncIoStream>&& stream) {
        for (auto& [session, kept] : kept_) kept.number = 0;
        auto taken = takeNext(*stream);
        return taken.attach(kj::mv(stream));
      });
}

kj::Promise<void> CheckpointKeeper::takeNext(kj::AsyncIoStream& stream) {
  return capnp::readMessage(stream, kHeads)
      .then([this, &stream](kj::Own<capnp::MessageReader> message) -> kj::Promise<void> {
        const auto head = message->getRoot<schema::SessionCheckpoint>();
        auto coming = std::make_shared<Coming>();
        coming->session = schema::read(head.getSession());
        coming->kept.bytes = head.getBytes();
        coming->kept.number = head.getNumber();
        coming->kept.epoch = head.getEpoch();
        coming->kept.digest = schema::bytes(head.getDigest());
        coming->kept.lastFrame = head.getLastFrame();
        coming->kept.lastAside = head.getLastAside();
        coming->kept.driverVersion = head.getDriverVersion();
        if (coming->kept.bytes == 0 || coming->kept.digest.size() != kDigestBytes) leaveMalformed();
        place(head, *coming);
        return receive(stream, std::move(coming), 0);
      });
}

void CheckpointKeeper::place(schema::SessionCheckpoint::Reader head, Coming& coming) {
  const auto at = kept_.find(coming.session);
  const bool ended = over_.contains(coming.session);  // and what was kept of it has gone
  if (ended) coming.why = "its program has ended";
  const Blocks* base = nullptr;
  if (head.getBase() != 0 && !ended) {
    if (at == kept_.end() || at->second.number != head.getBase()) leaveMalformed();
    base = at->second.blocks.get();
  }
  const auto await = [&](uint64_t bytes) {
    coming.bytes += bytes;
    if (!coming.why.empty()) return;
    coming.next.push_back(coming.blocks.size());
    coming.blocks.push_back(reserve(bytes, coming.why));
  };
  if (head.getBlocks().size() == 0) await(coming.kept.bytes);
  uint64_t left = coming.kept.bytes - coming.bytes;
  for (const auto block : head.getBlocks()) {
    const uint32_t bytes = block.getBytes(), same = block.getBase();
    if (bytes == 0 || bytes > kMostBlock || bytes > left) leaveMalformed();
    left -= bytes;
    if (same == 0) {
      await(bytes);
      continue;
    }
    if (ended) continue;
    if (base == nullptr || same > base->size() || (*base)[same - 1]->bytes() != bytes) leaveMalformed();
    coming.blocks.push_back((*base)[same - 1]);
  }
  if (left != 0) leaveMalformed();
  if (!coming.why.empty()) coming.blocks.clear();
}

// What is not kept is passed over: behind it comes the next one.
kj::Promise<void> CheckpointKeeper::receive(kj::AsyncIoStream& stream, std::shared_ptr<Coming> coming,
                                            size_t at) {
  const bool passed = !coming->why.empty();
  if (passed ? coming->bytes == 0 : at == coming->next.size()) return keep(stream, std::move(coming));
  const BlockFile::Block* block = passed ? nullptr : coming->blocks[coming->next[at]].get();
  const uint64_t bytes = passed ? coming->bytes : block->bytes();
  auto received = schema::receivePieces(io_.getTimer(), stream, passed ? -1 : block->file(),
                                        passed ? 0 : block->offset(), bytes, settings_.pieceBound);
  return received.then([this, &stream, coming = std::move(coming), bytes, at](std::string&& failure) mutable {
    coming->bytes -= bytes;
    if (!failure.empty()) coming->why = "it cannot be written: " + failure;
    return receive(stream, std::move(coming), at + 1);
  });
}

kj::Promise<void> CheckpointKeeper::keep(kj::AsyncIoStream& stream, std::shared_ptr<Coming> coming) {
  auto message = kj::heap<capnp::MallocMessageBuilder>();
  auto answer = message->initRoot<schema::CheckpointAnswer>();
  answer.setNumber(coming->kept.number);
  if (over_.contains(coming->session)) coming->why = "its program has ended";  // meanwhile
  answer.setError(coming->why);
  if (coming->why.empty()) {
    coming->kept.blocks = std::make_shared<const Blocks>(std::move(coming->blocks));
    kept_[coming->session] = std::move(coming->kept);
  } else {
    GPUPOOL_INFO("a checkpoint is not kept: %s", coming->why.c_str());
  }
  auto written = capnp::writeMessage(stream, *message);
  return io_.getTimer()
      .timeoutAfter(settings_.pieceBound, kj::mv(written))
      .attach(kj::mv(message))
      .then([this, &stream] { return takeNext(stream); });
}

// ---- to the next one

kj::Promise<void> CheckpointKeeper::bring(const pool::Lease& lease, const SessionWish& wish) {
  if (over_.contains(wish.session)) leave(Status::refused, "its program has ended");
  Kept& kept = kept_[wish.session];
  if (kept.blocks == nullptr) kept.blocks = std::make_shared<const Blocks>();
  const auto blocks = kept.blocks;
  return open(lease,
              [&](schema::SessionOpening& opening) {
                opening.session = wish.session;
                opening.epoch = wish.epoch;
                opening.pid = wish.pid;
                opening.command = wish.command;
                if (wish.rowsHash != 0) opening.rowsHash = wish.rowsHash;
                opening.brings = [kept, wish](schema::SessionCheckpoint::Builder to) {
                  to.setNumber(1);
                  schema::write(wish.session, to.initSession());
                  to.setEpoch(kept.epoch);
                  to.setClientPid(wish.pid);
                  to.setCommand(wish.command);
                  to.setTransport(wish.transport);
                  to.setBytes(kept.bytes);
                  to.setDigest(schema::data(kept.digest));
                  to.setLastFrame(kept.lastFrame);
                  to.setLastAside(kept.lastAside);
                  to.setDriverVersion(kept.driverVersion);
                };
              })
      .catch_([this, blocks, session = wish.session](kj::Exception&& error) -> kj::Own<kj::AsyncIoStream> {
        if (const OpenFailure failure = toFailure(error); failure.status == Status::refused)
          noteTry(session, *blocks, failure.text);
        kj::throwFatalException(kj::mv(error));
      })
      .then([this, blocks, session = wish.session](kj::Own<kj::AsyncIoStream>&& stream) {
        auto& to = *stream;
        noteTry(session, *blocks, "");
        return send(to, blocks, 0)
            .then([this, &to] {
              return io_.getTimer().timeoutAfter(settings_.checkBound, capnp::readMessage(to, kAnswers));
            })
            .then([this, blocks, session](kj::Own<capnp::MessageReader> message) {
              const std::string error =
                  schema::text(message->getRoot<schema::CheckpointAnswer>().getError()).substr(0, 300);
              if (const auto at = kept_.find(session); at != kept_.end() && at->second.blocks == blocks)
                at->second.why = error;
              if (!error.empty()) leave(Status::refused, error);
            })
            .attach(kj::mv(stream));
      });
}

// Of the checkpoint that was brought: there may be a later one by now.
void CheckpointKeeper::noteTry(const Id& session, const Blocks& blocks, const std::string& why) {
  const auto at = kept_.find(session);
  if (at == kept_.end() || at->second.blocks.get() != &blocks) return;
  ++at->second.tries;
  at->second.why = why;
}

// Neighbours in the file go together.
kj::Promise<void> CheckpointKeeper::send(kj::AsyncIoStream& stream, std::shared_ptr<const Blocks> blocks,
                                         size_t at) {
  if (at == blocks->size()) return kj::READY_NOW;
  const BlockFile::Block& first = *(*blocks)[at];
  uint64_t bytes = first.bytes();
  for (++at; at != blocks->size() && (*blocks)[at]->offset() == first.offset() + bytes; ++at)
    bytes += (*blocks)[at]->bytes();
  return schema::sendPieces(io_.getTimer(), stream, first.file(), first.offset(), bytes, settings_.pieceBound)
      .then([this, &stream, blocks = std::move(blocks), at]() mutable {
        return send(stream, std::move(blocks), at);
      });
}

}  // namespace gpupool::cli
