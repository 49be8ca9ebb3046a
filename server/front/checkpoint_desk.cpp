#include "server/front/checkpoint_desk.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>
#include <sys/mman.h>

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

kj::Exception deskFailure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(text));
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
  const std::string notTaken = takeDown(taker.get(), [] { return std::string(); }, made->file, made->facts);
  taker = nullptr;  // a player that waits for an answer gets none
  plays.join();
  if (why.empty()) why = notTaken;
  if (!why.empty()) throw std::runtime_error(why);
  return made;
}

}  // namespace

void CheckpointDesk::keep(kj::Own<kj::AsyncIoStream> stream, const Id& lease) {
  auto holder = kj::refcounted<Holder>();
  holder->stream = kj::mv(stream);
  holders_.erase(lease);
  holders_.emplace(lease, kj::mv(holder));
}

kj::Promise<void> CheckpointDesk::offer(const SessionFacts& facts, std::shared_ptr<const KeptPages> pages) {
  const auto at = holders_.find(facts.lease);
  if (at == holders_.end()) return deskFailure("its holder does not keep checkpoints (it is not connected)");
  if (at->second->busy) return deskFailure("its holder takes another one");
  if (const std::string why = budget_->take(pages->facts.bytes); !why.empty()) return deskFailure(why);
  auto holder = kj::addRef(*at->second);
  holder->busy = true;
  auto room = budget_->share(pages->facts.bytes);
  auto sent = beside<std::shared_ptr<File>>([pages = std::move(pages), room = std::move(room)]() mutable {
                return writeFile(*pages, std::move(room));
              }).then([this, facts, holder = kj::addRef(*holder)](std::shared_ptr<File>&& file) mutable {
    return send(kj::mv(holder), facts, std::move(file));
  });
  return sent.then([holder = kj::addRef(*holder)]() mutable { holder->busy = false; },
                   [this, holder = kj::addRef(*holder), lease = facts.lease](kj::Exception&& error) mutable {
                     // In the middle of a message there is no way on: it may connect anew.
                     if (const auto at = holders_.find(lease);
                         at != holders_.end() && at->second.get() == holder.get())
                       holders_.erase(at);
                     kj::throwFatalException(kj::mv(error));
                   });
}

kj::Promise<void> CheckpointDesk::send(kj::Own<Holder> holder, const SessionFacts& facts,
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
  auto written = capnp::writeMessage(*holder->stream, *message);
  Holder& to = *holder;
  return timer_.timeoutAfter(settings_.piece, kj::mv(written))
      .attach(kj::mv(message))
      .then([this, &to, file = std::move(file)]() mutable {
        auto sent = schema::sendPieces(timer_, *to.stream, file->file, file->facts.bytes, settings_.piece);
        return sent.attach(std::move(file));
      })
      .then([this, &to] { return hear(to); })
      .attach(kj::mv(holder));
}

kj::Promise<void> CheckpointDesk::hear(Holder& holder) {
  return timer_.timeoutAfter(settings_.answer, capnp::readMessage(*holder.stream, kAnswers))
      .then([&holder](kj::Own<capnp::MessageReader> message) -> kj::Promise<void> {
        const auto answer = message->getRoot<schema::CheckpointAnswer>();
        if (answer.getNumber() != holder.number) return deskFailure("its holder answers something else");
        const std::string error = schema::text(answer.getError()).substr(0, 200);
        return error.empty() ? kj::Promise<void>(kj::READY_NOW) : deskFailure("its holder: " + error);
      });
}

kj::Promise<std::shared_ptr<CheckpointDesk::File>> CheckpointDesk::take(kj::AsyncIoStream& stream,
                                                                        const BroughtSession& brought) {
  if (const std::string why = budget_->take(brought.file.bytes); !why.empty()) return deskFailure(why);
  auto file = std::make_shared<File>();
  file->room = budget_->share(brought.file.bytes);
  file->facts = brought.file;
  file->file = fileInMemory();
  auto received = schema::receivePieces(timer_, stream, file->file, brought.file.bytes, settings_.piece);
  return received.then([file](const std::string& failure) -> kj::Promise<std::shared_ptr<File>> {
    if (!failure.empty()) return deskFailure("no memory for a checkpoint: " + failure);
    return beside<std::shared_ptr<File>>([file] {
      if (const std::string why = checkFile(file->file, file->facts); !why.empty())
        throw std::runtime_error(why);
      return file;
    });
  });
}

kj::Promise<void> CheckpointDesk::answer(kj::AsyncIoStream& stream, const std::string& error) {
  auto message = kj::heap<capnp::MallocMessageBuilder>();
  auto answer = message->initRoot<schema::CheckpointAnswer>();
  answer.setNumber(1);
  answer.setError(error);
  auto written = capnp::writeMessage(stream, *message);
  return timer_.timeoutAfter(settings_.piece, kj::mv(written)).attach(kj::mv(message));
}

}  // namespace gpupool::server
