#include "pool-manager/cli/figures.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>

#include <algorithm>

#include "pool-manager/cli/session_opener.h"
#include "pool-manager/rpc.h"
#include "schema/convert.h"
#include "schema/session.capnp.h"

namespace gpupool::cli {
namespace {

constexpr unsigned kMostDevices = 8;
constexpr size_t kMostBytes = size_t{32} * 1024;  // schema::kMostFigureBytes
constexpr capnp::ReaderOptions kReports{.traversalLimitInWords = kMostDevices * kMostBytes / 8 + 1024,
                                        .nestingLimit = 4};

// Who may have older figures asks the server all the same: it may be gone, and it hears that somebody wants
// figures.
constexpr kj::Duration kYoung = 100 * kj::MILLISECONDS;

[[noreturn]] void fail(const std::string& text) {
  kj::throwFatalException(toException({holder::Status::serverLost, text}));
}

}  // namespace

kj::Promise<void> FiguresSource::refresh(const pool::Lease& lease, kj::Duration age) {
  if (!latest_.devices.empty() && ageOfLatest() <= std::min(age, kYoung)) return kj::READY_NOW;
  if (!settled_)
    KJ_IF_MAYBE (already, asking_) {
      if (askedAge_ <= age) return already->addBranch();
      // That one may be answered with what is too old for this one.
      auto later = kj::heap<pool::Lease>(lease);
      const pool::Lease& again = *later;
      return already->addBranch()
          .then([this, &again, age] { return refresh(again, age); })
          .attach(kj::mv(later));
    }
  if (where_ && *where_ != lease.server.life()) stream_ = nullptr;  // it has moved
  where_ = lease.server.life();
  auto copy = kj::heap<pool::Lease>(lease);
  const auto maxAgeMs = static_cast<uint32_t>(age / kj::MILLISECONDS);
  // A connection that has been idle may be closed by now: then another one is made, once.
  auto asked = kj::evalNow([&] { return stream_.get() == nullptr ? connect(*copy) : kj::READY_NOW; })
                   .then([this, maxAgeMs] { return ask(maxAgeMs); })
                   .catch_([this, &lease = *copy, maxAgeMs,
                            again = stream_.get() != nullptr](kj::Exception&& error) -> kj::Promise<void> {
                     stream_ = nullptr;
                     if (!again || error.getType() != kj::Exception::Type::DISCONNECTED) return kj::mv(error);
                     return connect(lease).then([this, maxAgeMs] { return ask(maxAgeMs); });
                   });
  settled_ = false;
  askedAge_ = age;
  // In the fork itself: whoever asked first may be gone before the answer.
  auto fork = io_.getTimer()
                  .timeoutAfter(settings_.askBound, kj::mv(asked))
                  .attach(kj::mv(copy))
                  .then([this] { settled_ = true; },
                        [this](kj::Exception&& error) {
                          settled_ = true;
                          stream_ = nullptr;
                          kj::throwFatalException(kj::mv(error));
                        })
                  .fork();
  auto branch = fork.addBranch();
  asking_ = kj::mv(fork);
  return branch;
}

kj::Promise<void> FiguresSource::connect(const pool::Lease& lease) {
  return openWithout(io_, lease, settings_.transport,
                     [](schema::SessionOpening& opening) { opening.asks = true; })
      .then([this](kj::Own<kj::AsyncIoStream>&& stream) { stream_ = kj::mv(stream); });
}

kj::Promise<void> FiguresSource::ask(uint32_t maxAgeMs) {
  auto query = kj::heap<capnp::MallocMessageBuilder>();
  query->initRoot<schema::FiguresQuery>().setMaxAgeMs(maxAgeMs);
  auto sent = capnp::writeMessage(*stream_, *query);
  return sent.attach(kj::mv(query))
      .then([this] { return capnp::readMessage(*stream_, kReports); })
      .then([this](kj::Own<capnp::MessageReader> message) {
        const auto report = message->getRoot<schema::FiguresReport>();
        if (report.getDevices().size() == 0) fail(schema::text(report.getError()));
        Figures heard;
        for (const auto device : report.getDevices()) {
          if (device.size() > kMostBytes || heard.devices.size() == kMostDevices)
            fail("the server's figures are malformed");
          heard.devices.push_back(schema::bytes(device));
        }
        heard.taken = io_.getTimer().now() - std::min(report.getAgeMs(), holder::kNoAgeMs) * kj::MILLISECONDS;
        latest_ = std::move(heard);
      });
}

std::string FiguresSource::datagram(const holder::FiguresRequest& request, holder::Status status,
                                    const std::string& text) const {
  holder::FiguresReply reply;
  reply.number = request.number;
  const bool there = request.device < latest_.devices.size() && status != holder::Status::mismatch;
  reply.status = there || status != holder::Status::ok ? status : holder::Status::refused;
  text.copy(reply.text, sizeof reply.text - 1);
  if (there) {
    reply.bytes = static_cast<uint32_t>(latest_.devices[request.device].size());
    reply.ageMs = static_cast<uint32_t>(std::min<int64_t>(ageOfLatest() / kj::MILLISECONDS, INT32_MAX));
  }
  std::string datagram(reinterpret_cast<const char*>(&reply), sizeof reply);
  if (there) datagram += latest_.devices[request.device];
  return datagram;
}

}  // namespace gpupool::cli
