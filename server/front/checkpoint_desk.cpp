#include "server/front/checkpoint_desk.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/log.h"
#include "schema/convert.h"
#include "schema/file_pieces.h"
#include "server/front/beside.h"
#include "server/front/play_back.h"

namespace gpupool::server {
namespace {

constexpr capnp::ReaderOptions kAnswers{.traversalLimitInWords = 512, .nestingLimit = 4};

constexpr size_t kMostTaken = 256;

kj::Exception deskFailure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(text));
}

// For people: the name of a system call says nothing to them.
kj::Exception lost(const AwayKeeper& who, kj::Exception&& error) {
  if (error.getType() == kj::Exception::Type::DISCONNECTED) return deskFailure(who.text() + " is gone");
  if (error.getType() == kj::Exception::Type::OVERLOADED)
    return deskFailure(who.text() + " does not take it in time");
  return kj::mv(error);
}

Descriptor fileInMemory() {
  Descriptor file(memfd_create("gpupool-checkpoint", MFD_CLOEXEC));
  if (file < 0) throw std::runtime_error(std::string("no memory for a checkpoint: ") + std::strerror(errno));
  return file;
}

// On a thread: one end plays it as to a worker, the other one takes it down.
std::shared_ptr<CheckpointDesk::File> writeFile(const KeptPages& pages, std::shared_ptr<void> room) {
  auto made = std::make_shared<CheckpointDesk::File>();
  made->file = fileInMemory();
  made->room = std::move(room);
  auto [player, taker] = stateSocket();
  std::string why;
  std::thread plays([&pages, &why, end = std::make_shared<Descriptor>(player.release())] {
    StateSocket socket(std::move(*end), [] { return false; });
    why = playBack(socket, pages);
  });
  const std::string notTaken =
      takeDown(taker.get(), [] { return std::string(); }, made->file, made->facts, {.blocks = &made->blocks});
  taker = nullptr;  // a player that waits for an answer gets none
  plays.join();
  if (why.empty()) why = notTaken;
  if (!why.empty()) throw std::runtime_error(why);
  return made;
}

}  // namespace

void CheckpointDesk::keep(kj::Own<kj::AsyncIoStream> stream, const Id& lease, AwayKeeper who) {
  if (const auto at = holders_.find(lease); at != holders_.end()) {
    const bool older = who.number < at->second->who.number;
    if (older && !hasEnded(*at->second)) return;
    at->second->offers.cancel("another one keeps its checkpoints now");
  }
  auto holder = kj::refcounted<Holder>();
  holder->stream = kj::mv(stream);
  holder->who = std::move(who);
  holder->connection = ++connections_;
  holders_.erase(lease);
  holders_.emplace(lease, kj::mv(holder));
}

void CheckpointDesk::keepOnly(const LeaseTable& leases) {
  std::erase_if(holders_,
                [&](const auto& one) { return !leases.contains(one.first) || hasEnded(*one.second); });
}

// While one is sent, that meets the end itself.
bool CheckpointDesk::hasEnded(const Holder& holder) {
  if (holder.busy) return false;
  KJ_IF_MAYBE (descriptor, holder.stream->getFd()) {
    char byte;  // it says nothing unasked
    const ssize_t got = ::recv(*descriptor, &byte, sizeof byte, MSG_PEEK | MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  }
  return false;
}

kj::Promise<uint64_t> CheckpointDesk::offer(const SessionFacts& facts,
                                            std::shared_ptr<const KeptPages> pages) {
  const auto at = holders_.find(facts.lease);
  if (at == holders_.end()) return deskFailure("nobody keeps its checkpoints (not connected)");
  if (at->second->busy) return deskFailure(at->second->who.text() + " takes another one");
  if (const std::string why = budget_->take(pages->facts.bytes); !why.empty()) return deskFailure(why);
  auto holder = kj::addRef(*at->second);
  holder->busy = true;
  auto room = budget_->share(pages->facts.bytes);
  auto sent = beside<std::shared_ptr<File>>([pages = std::move(pages), room = std::move(room)]() mutable {
                return writeFile(*pages, std::move(room));
              }).then([this, facts, holder = kj::addRef(*holder)](std::shared_ptr<File>&& file) mutable {
    return send(kj::mv(holder), facts, std::move(file));
  });
  return holder->offers.wrap(kj::mv(sent))
      .then(
          [holder = kj::addRef(*holder)](Sent&& sent) mutable {
            holder->busy = false;
            if (!sent.refusal.empty())
              kj::throwFatalException(deskFailure(holder->who.text() + ": " + sent.refusal));
            return sent.bytes;
          },
          [this, holder = kj::addRef(*holder),
           lease = facts.lease](kj::Exception&& error) mutable -> uint64_t {
            // In the middle of a message there is no way on: it may connect anew.
            if (const auto at = holders_.find(lease);
                at != holders_.end() && at->second.get() == holder.get()) {
              holders_.erase(at);
              kj::throwFatalException(lost(holder->who, kj::mv(error)));
            }
            kj::throwFatalException(kj::mv(error));
          });
}

kj::Promise<CheckpointDesk::Sent> CheckpointDesk::send(kj::Own<Holder> holder, const SessionFacts& facts,
                                                       std::shared_ptr<File> file) {
  auto message = kj::heap<capnp::MallocMessageBuilder>();
  auto head = message->initRoot<schema::SessionCheckpoint>();
  head.setNumber(++holder->number);
  schema::write(facts.session, head.initSession());
  head.setEpoch(facts.epoch);
  head.setClientPid(facts.clientPid);
  head.setCommand(facts.command);
  head.setTransport(facts.transport);
  head.setBytes(file->facts.bytes);
  head.setDigest({reinterpret_cast<const kj::byte*>(file->facts.digest.data()), file->facts.digest.size()});
  head.setLastFrame(file->facts.lastFrame);
  head.setLastAside(file->facts.lastAside);
  head.setDriverVersion(static_cast<uint32_t>(file->facts.driverVersion));
  const auto last = holder->taken.find(facts.session);
  auto spans = std::make_shared<const std::vector<Span>>(
      tellBlocks(last == holder->taken.end() ? nullptr : &last->second, file->blocks, head));
  uint64_t bytes = 0;
  for (const Span& span : *spans) bytes += span.bytes;
  auto written = capnp::writeMessage(*holder->stream, *message);
  Holder& to = *holder;
  return timer_.timeoutAfter(settings_.piece, kj::mv(written))
      .attach(kj::mv(message))
      .then([this, &to, file, spans] {
        auto sent = sendSpans(to, *file, spans, 0);
        return sent.attach(file);
      })
      .then([this, &to] { return hear(to); })
      .then([&to, file, bytes, session = facts.session](std::string&& refusal) {
        if (!refusal.empty()) return Sent{0, std::move(refusal)};  // and still has the one before
        if (to.taken.size() >= kMostTaken) to.taken.clear();       // most of them have ended
        to.taken[session] = {to.number, std::move(file->blocks)};
        return Sent{bytes, ""};
      })
      .attach(kj::mv(holder));
}

std::vector<CheckpointDesk::Span> CheckpointDesk::tellBlocks(const Taken* base,
                                                             const std::vector<FileBlock>& blocks,
                                                             schema::SessionCheckpoint::Builder head) {
  std::map<std::pair<Checksum, uint32_t>, uint32_t> known;
  for (uint32_t i = 0; base != nullptr && i < base->blocks.size(); ++i)
    known.emplace(std::pair(base->blocks[i].checksum, base->blocks[i].bytes), i + 1);
  if (base != nullptr) head.setBase(base->number);
  auto list = head.initBlocks(static_cast<unsigned>(blocks.size()));
  std::vector<Span> spans;
  uint64_t offset = 0;
  for (unsigned i = 0; i < list.size(); ++i) {
    const FileBlock& block = blocks[i];
    list[i].setBytes(block.bytes);
    if (const auto same = known.find({block.checksum, block.bytes}); same != known.end())
      list[i].setBase(same->second);
    else if (!spans.empty() && spans.back().offset + spans.back().bytes == offset)
      spans.back().bytes += block.bytes;
    else
      spans.push_back({offset, block.bytes});
    offset += block.bytes;
  }
  return spans;
}

kj::Promise<void> CheckpointDesk::sendSpans(Holder& holder, const File& file,
                                            std::shared_ptr<const std::vector<Span>> spans, size_t at) {
  if (at == spans->size()) return kj::READY_NOW;
  const auto [offset, bytes] = (*spans)[at];
  return schema::sendPieces(timer_, *holder.stream, file.file, offset, bytes, settings_.piece)
      .then([this, &holder, &file, spans = std::move(spans), at]() mutable {
        return sendSpans(holder, file, std::move(spans), at + 1);
      });
}

kj::Promise<std::string> CheckpointDesk::hear(Holder& holder) {
  return timer_.timeoutAfter(settings_.answer, capnp::readMessage(*holder.stream, kAnswers))
      .then([&holder](kj::Own<capnp::MessageReader> message) -> kj::Promise<std::string> {
        const auto answer = message->getRoot<schema::CheckpointAnswer>();
        if (answer.getNumber() != holder.number)
          return deskFailure(holder.who.text() + " answers something else");
        return schema::text(answer.getError()).substr(0, 200);
      });
}

kj::Promise<std::shared_ptr<CheckpointDesk::File>> CheckpointDesk::take(kj::AsyncIoStream& stream,
                                                                        const BroughtSession& brought) {
  if (const std::string why = budget_->take(brought.file.bytes); !why.empty()) {
    if (brought.file.bytes > budget_->most()) return deskFailure(why);
    // Passed over, so that whoever sends it hears why it is not taken.
    return schema::receivePieces(timer_, stream, -1, 0, brought.file.bytes, settings_.piece)
        .then([why](const std::string&) -> kj::Promise<std::shared_ptr<File>> {
          return kj::Exception(kj::Exception::Type::OVERLOADED, __FILE__, __LINE__, kj::str(why));
        });
  }
  auto file = std::make_shared<File>();
  file->room = budget_->share(brought.file.bytes);
  file->facts = brought.file;
  file->file = fileInMemory();
  auto received = schema::receivePieces(timer_, stream, file->file, 0, brought.file.bytes, settings_.piece);
  return received.then([file](const std::string& failure) -> kj::Promise<std::shared_ptr<File>> {
    if (!failure.empty()) return deskFailure("no memory for a checkpoint: " + failure);
    return beside<std::shared_ptr<File>>([file] {
      if (const std::string why = checkFile(file->file, file->facts); !why.empty())
        throw std::runtime_error(why);
      return file;
    });
  });
}

kj::Promise<void> CheckpointDesk::answer(kj::AsyncIoStream& stream, const std::string& error, bool later) {
  auto message = kj::heap<capnp::MallocMessageBuilder>();
  auto answer = message->initRoot<schema::CheckpointAnswer>();
  answer.setNumber(1);
  answer.setError(error);
  answer.setLater(later);
  auto written = capnp::writeMessage(stream, *message);
  return timer_.timeoutAfter(settings_.piece, kj::mv(written)).attach(kj::mv(message));
}

}  // namespace gpupool::server
