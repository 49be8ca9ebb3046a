#include "pool-manager/cli/checkpoint_keeper.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/options.h"
#include "schema/convert.h"
#include "schema/file_pieces.h"

namespace gpupool::cli {
namespace {

using holder::Status;

constexpr size_t kDigestBytes = 32;
constexpr capnp::ReaderOptions kHeads{.traversalLimitInWords = 1024, .nestingLimit = 4};

[[noreturn]] void leave(Status status, const std::string& text) {
  kj::throwFatalException(toException({status, text}));
}

}  // namespace

// Counts as used while it is there.
struct CheckpointKeeper::File {
  File(uint64_t& used, uint64_t bytes) : used_(used), bytes(bytes) { used_ += bytes; }
  ~File() { used_ -= bytes; }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

 private:
  uint64_t& used_;

 public:
  const uint64_t bytes;
  kj::AutoCloseFd file;
};

std::shared_ptr<CheckpointKeeper::File> CheckpointKeeper::makeFile(uint64_t bytes, std::string& why) {
  if (bytes > settings_.mostBytes || used_ > settings_.mostBytes - bytes) {
    why = "no room for " + options::formatSize(bytes) + " more than " + options::formatSize(used_) +
          " (--protect-size " + options::formatSize(settings_.mostBytes) + ")";
    return nullptr;
  }
  const int descriptor = settings_.folder.empty()
                             ? ::memfd_create("gpupool-checkpoint", MFD_CLOEXEC)
                             : ::open(settings_.folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor < 0) {
    why = (settings_.folder.empty() ? "memory" : settings_.folder) + ": " + std::strerror(errno);
    return nullptr;
  }
  auto made = std::make_shared<File>(used_, bytes);
  made->file = kj::AutoCloseFd(descriptor);
  return made;
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
        auto taken = takeNext(*stream);
        return taken.attach(kj::mv(stream));
      });
}

kj::Promise<void> CheckpointKeeper::takeNext(kj::AsyncIoStream& stream) {
  return capnp::readMessage(stream, kHeads)
      .then([this, &stream](kj::Own<capnp::MessageReader> message) -> kj::Promise<void> {
        const auto head = message->getRoot<schema::SessionCheckpoint>();
        auto coming = std::make_shared<Coming>();
        coming->number = head.getNumber();
        coming->session = schema::read(head.getSession());
        coming->bytes = head.getBytes();
        coming->kept.epoch = head.getEpoch();
        coming->kept.digest = schema::bytes(head.getDigest());
        coming->kept.lastFrame = head.getLastFrame();
        coming->kept.lastAside = head.getLastAside();
        coming->kept.driverVersion = head.getDriverVersion();
        if (coming->bytes == 0 || coming->kept.digest.size() != kDigestBytes)
          leave(Status::internal, "the server sent a malformed checkpoint");
        if (over_.contains(coming->session))
          coming->why = "its program has ended";
        else
          coming->kept.file = makeFile(coming->bytes, coming->why);
        return receive(stream, std::move(coming));
      });
}

// What is not kept is passed over: behind it comes the next one.
kj::Promise<void> CheckpointKeeper::receive(kj::AsyncIoStream& stream, std::shared_ptr<Coming> coming) {
  const int file = coming->kept.file == nullptr ? -1 : coming->kept.file->file.get();
  auto received = schema::receivePieces(io_.getTimer(), stream, file, coming->bytes, settings_.pieceBound);
  return received.then([this, &stream, coming = std::move(coming)](std::string&& failure) mutable {
    if (!failure.empty()) coming->why = "it cannot be written: " + failure;
    return keep(stream, std::move(coming));
  });
}

kj::Promise<void> CheckpointKeeper::keep(kj::AsyncIoStream& stream, std::shared_ptr<Coming> coming) {
  auto message = kj::heap<capnp::MallocMessageBuilder>();
  auto answer = message->initRoot<schema::CheckpointAnswer>();
  answer.setNumber(coming->number);
  if (over_.contains(coming->session)) coming->why = "its program has ended";  // meanwhile
  answer.setError(coming->why);
  if (coming->why.empty())
    kept_[coming->session] = std::move(coming->kept);
  else
    GPUPOOL_INFO("a checkpoint is not kept: %s", coming->why.c_str());
  auto written = capnp::writeMessage(stream, *message);
  return io_.getTimer()
      .timeoutAfter(settings_.pieceBound, kj::mv(written))
      .attach(kj::mv(message))
      .then([this, &stream] { return takeNext(stream); });
}

// ---- to the next one

kj::Promise<void> CheckpointKeeper::bring(const pool::Lease& lease, const SessionWish& wish) {
  const auto at = kept_.find(wish.session);
  if (at == kept_.end()) leave(Status::refused, "there is no checkpoint of it yet");
  const Kept& kept = at->second;
  const auto file = kept.file;
  return open(lease,
              [&](schema::SessionOpening& opening) {
                opening.session = wish.session;
                opening.epoch = wish.epoch;
                opening.pid = wish.pid;
                opening.command = wish.command;
                opening.brings = [kept, wish](schema::SessionCheckpoint::Builder to) {
                  to.setNumber(1);
                  schema::write(wish.session, to.initSession());
                  to.setEpoch(kept.epoch);
                  to.setClientPid(wish.pid);
                  to.setCommand(wish.command);
                  to.setTransport(wish.transport);
                  to.setBytes(kept.file->bytes);
                  to.setDigest(schema::data(kept.digest));
                  to.setLastFrame(kept.lastFrame);
                  to.setLastAside(kept.lastAside);
                  to.setDriverVersion(kept.driverVersion);
                };
              })
      .then([this, file, session = wish.session](kj::Own<kj::AsyncIoStream>&& stream) {
        auto& to = *stream;
        if (const auto at = kept_.find(session); at != kept_.end() && at->second.file == file)
          ++at->second.tries;
        return schema::sendPieces(io_.getTimer(), to, file->file.get(), file->bytes, settings_.pieceBound)
            .then([this, &to] {
              return io_.getTimer().timeoutAfter(settings_.checkBound, capnp::readMessage(to, kHeads));
            })
            .then([this, file, session](kj::Own<capnp::MessageReader> message) {
              const std::string error =
                  schema::text(message->getRoot<schema::CheckpointAnswer>().getError()).substr(0, 300);
              if (const auto at = kept_.find(session); at != kept_.end() && at->second.file == file)
                at->second.why = error;
              if (!error.empty()) leave(Status::refused, error);
            })
            .attach(kj::mv(stream), file);
      });
}

}  // namespace gpupool::cli
