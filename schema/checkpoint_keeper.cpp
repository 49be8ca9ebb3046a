#include "schema/checkpoint_keeper.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "schema/convert.h"
#include "schema/fault.h"
#include "schema/file_pieces.h"
#include "schema/holder.h"

namespace gpupool::schema {
namespace {

using holder::Status;

constexpr char kPast[] = "the session has gone on at another server since";
constexpr size_t kDigestBytes = 32;
constexpr uint32_t kMostBlock = uint32_t{4} << 20;
constexpr capnp::ReaderOptions kHeads{.traversalLimitInWords = uint64_t{1} << 22, .nestingLimit = 4};
constexpr capnp::ReaderOptions kAnswers{.traversalLimitInWords = 1024, .nestingLimit = 4};

[[noreturn]] void leave(Status status, const std::string& text) {
  kj::throwFatalException(faultException(FaultKind::open, text, static_cast<uint32_t>(status)));
}
[[noreturn]] void leaveMalformed() { leave(Status::internal, "the server sent a malformed checkpoint"); }

}  // namespace

bool isRefusal(const kj::Exception& error) {
  const Fault fault = faultOf(error);
  return fault.kind == FaultKind::open && !fault.remote && static_cast<Status>(fault.code) == Status::refused;
}

std::shared_ptr<const BlockFile::Block> CheckpointKeeper::reserve(uint64_t bytes, std::string& why) {
  if (file_ == nullptr) {
    BlockFile::Room room{[used = used_, take = settings_.room.take](uint64_t more) {
                           std::string why = take(more);
                           if (why.empty()) *used += more;
                           return why;
                         },
                         [used = used_, give = settings_.room.give](uint64_t less) {
                           *used -= less;
                           give(less);
                         }};
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

bool CheckpointKeeper::has(const Id& session) const {
  const auto at = kept_.find(session);
  return at != kept_.end() && at->second.bytes != 0;
}

bool CheckpointKeeper::empty() const {
  return std::none_of(kept_.begin(), kept_.end(), [](const auto& one) { return one.second.bytes != 0; });
}

// ---- from the server

kj::Promise<void> CheckpointKeeper::take(const Open& open) {
  return timer_.timeoutAfter(settings_.openBound, open([](SessionOpening& opening) { opening.keeps = true; }))
      .then([this](kj::Own<kj::AsyncIoStream>&& stream) {
        for (auto& [session, kept] : kept_) kept.number = 0;
        auto taken = takeNext(*stream);
        return taken.attach(kj::mv(stream));
      });
}

kj::Promise<void> CheckpointKeeper::takeNext(kj::AsyncIoStream& stream) {
  return capnp::readMessage(stream, kHeads)
      .then([this, &stream](kj::Own<capnp::MessageReader> message) -> kj::Promise<void> {
        const auto head = message->getRoot<SessionCheckpoint>();
        auto coming = std::make_shared<Coming>();
        coming->session = read(head.getSession());
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

bool CheckpointKeeper::isPast(const Coming& coming) const {
  const auto fence = fence_.find(coming.session);
  return fence != fence_.end() && coming.kept.epoch < fence->second;
}

void CheckpointKeeper::place(SessionCheckpoint::Reader head, Coming& coming) {
  const auto at = kept_.find(coming.session);
  const bool ended = over_.contains(coming.session);  // and what was kept of it has gone
  if (ended) coming.why = "its program has ended";
  if (isPast(coming)) coming.why = kPast;
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
  auto received = receivePieces(timer_, stream, passed ? -1 : block->file(), passed ? 0 : block->offset(),
                                bytes, settings_.pieceBound);
  return received.then([this, &stream, coming = std::move(coming), bytes, at](std::string&& failure) mutable {
    coming->bytes -= bytes;
    if (!failure.empty()) coming->why = "it cannot be written: " + failure;
    return receive(stream, std::move(coming), at + 1);
  });
}

kj::Promise<void> CheckpointKeeper::keep(kj::AsyncIoStream& stream, std::shared_ptr<Coming> coming) {
  auto message = kj::heap<capnp::MallocMessageBuilder>();
  auto answer = message->initRoot<CheckpointAnswer>();
  answer.setNumber(coming->kept.number);
  if (over_.contains(coming->session)) coming->why = "its program has ended";  // meanwhile
  if (isPast(*coming)) coming->why = kPast;                                    // likewise
  answer.setError(coming->why);
  if (coming->why.empty()) {
    coming->kept.blocks = std::make_shared<const Blocks>(std::move(coming->blocks));
    kept_[coming->session] = std::move(coming->kept);
    notKept_.erase(coming->session);
  } else if (std::exchange(notKept_[coming->session], coming->why) !=
             coming->why) {  // it comes again and again
    GPUPOOL_INFO("session %s: a checkpoint is not kept: %s", coming->session.text().c_str(),
                 coming->why.c_str());
  }
  auto written = capnp::writeMessage(stream, *message);
  return timer_.timeoutAfter(settings_.pieceBound, kj::mv(written))
      .attach(kj::mv(message))
      .then([this, &stream] { return takeNext(stream); });
}

// ---- to the next one

kj::Promise<void> CheckpointKeeper::bring(const Open& open, const Next& wish) {
  if (over_.contains(wish.session)) leave(Status::refused, "its program has ended");
  uint64_t& fence = fence_[wish.session];
  if (wish.epoch < fence) leave(Status::refused, "the session has gone on as a later epoch since");
  fence = wish.epoch;
  Kept& kept = kept_[wish.session];
  if (kept.notBefore && timer_.now() < *kept.notBefore) leave(Status::waiting, kept.why);
  if (kept.blocks == nullptr) kept.blocks = std::make_shared<const Blocks>();
  const auto blocks = kept.blocks;
  auto opened = open([&](SessionOpening& opening) {
    opening.session = wish.session;
    opening.epoch = wish.epoch;
    opening.pid = wish.pid;
    opening.command = wish.command;
    opening.transport = wish.transport;  // the session's, whatever this connection goes over
    if (wish.rowsHash != 0) opening.rowsHash = wish.rowsHash;
    opening.brings = [kept, wish](SessionCheckpoint::Builder to) {
      to.setNumber(1);
      write(wish.session, to.initSession());
      to.setEpoch(kept.epoch);
      to.setClientPid(wish.pid);
      to.setCommand(wish.command);
      to.setTransport(wish.transport);
      to.setBytes(kept.bytes);
      to.setDigest(data(kept.digest));
      to.setLastFrame(kept.lastFrame);
      to.setLastAside(kept.lastAside);
      to.setDriverVersion(kept.driverVersion);
    };
  });
  return timer_.timeoutAfter(settings_.openBound, kj::mv(opened))
      .catch_([this, blocks, session = wish.session](kj::Exception&& error) -> kj::Own<kj::AsyncIoStream> {
        if (isRefusal(error)) noteTry(session, *blocks, faultOf(error).text);
        kj::throwFatalException(kj::mv(error));
      })
      .then([this, blocks, session = wish.session](kj::Own<kj::AsyncIoStream>&& stream) {
        auto& to = *stream;
        noteTry(session, *blocks, "");
        return send(to, blocks, 0)
            .then([this, &to] {
              return timer_.timeoutAfter(settings_.checkBound, capnp::readMessage(to, kAnswers));
            })
            .then([this, blocks, session](kj::Own<capnp::MessageReader> message) {
              const auto answer = message->getRoot<CheckpointAnswer>();
              const std::string error = text(answer.getError()).substr(0, 300);
              if (const auto at = kept_.find(session); at != kept_.end() && at->second.blocks == blocks)
                noteAnswer(at->second, error, answer.getLater());
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

// What follows the checkpoint may be what ends its workers, and so tries are counted. Where there was no room
// none has begun; but a server that goes on saying so comes to an end, too.
void CheckpointKeeper::noteAnswer(Kept& kept, const std::string& error, bool later) const {
  kept.why = error;
  kept.notBefore.reset();
  if (!later) return kept.fullSince.reset();
  const kj::TimePoint now = timer_.now();
  if (!kept.fullSince) kept.fullSince = now;
  kept.notBefore = now + settings_.roomPause;
  if (now - *kept.fullSince < settings_.roomBound && kept.tries != 0) --kept.tries;
}

// Neighbours in the file go together.
kj::Promise<void> CheckpointKeeper::send(kj::AsyncIoStream& stream, std::shared_ptr<const Blocks> blocks,
                                         size_t at) {
  if (at == blocks->size()) return kj::READY_NOW;
  const BlockFile::Block& first = *(*blocks)[at];
  uint64_t bytes = first.bytes();
  for (++at; at != blocks->size() && (*blocks)[at]->offset() == first.offset() + bytes; ++at)
    bytes += (*blocks)[at]->bytes();
  return sendPieces(timer_, stream, first.file(), first.offset(), bytes, settings_.pieceBound)
      .then([this, &stream, blocks = std::move(blocks), at]() mutable {
        return send(stream, std::move(blocks), at);
      });
}

}  // namespace gpupool::schema
