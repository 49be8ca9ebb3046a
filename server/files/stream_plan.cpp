#include "server/files/stream_plan.h"

#include <poll.h>

#include <chrono>

namespace gpupool::server {
namespace {

constexpr char kDamagedRecord[] = "the session's record is damaged";
constexpr char kTooLarge[] = "the session's record tells of more than a session can be";
constexpr std::chrono::seconds kHearOut{10};
constexpr int kLookAgainMs = 100;

}  // namespace

std::string StreamPlan::read() {
  if (contentDigest(bytes) != digest || bytes.size() % sizeof(capnp::word) != 0) return kDamagedRecord;
  capnp::ReaderOptions options;
  options.traversalLimitInWords = kMostRecordBytes / sizeof(capnp::word) * 4;
  try {
    message_ = std::make_unique<capnp::FlatArrayMessageReader>(
        kj::arrayPtr(reinterpret_cast<const capnp::word*>(bytes.data()), bytes.size() / sizeof(capnp::word)),
        options);
    const auto record = message_->getRoot<schema::SessionRecord>();
    images = imagesOf(record);
    auto lengths = contentsOf(record);
    if (!lengths) return kTooLarge;
    contents = std::move(*lengths);
  } catch (const kj::Exception& e) {
    return std::string(kDamagedRecord) + ": " + e.getDescription().cStr();
  }
  return "";
}

void StreamPlan::tell(FileFacts& facts) {
  const auto record = message_->getRoot<schema::SessionRecord>();
  facts.lastFrame = record.getLastFrame();
  facts.lastAside = record.getLastAside();
  facts.rowsHash = record.getRowsHash();
  facts.driverVersion = record.getDriverVersion();
}

std::string awaitWorker(int socket, const std::function<std::string()>& over) {
  std::string why;
  for (pollfd first{socket, POLLIN, 0}; why.empty() && poll(&first, 1, kLookAgainMs) <= 0;) why = over();
  return why;
}

std::string answerWorker(StateSocket& socket, const std::string& why) {
  socket.forgetError();  // of a worker that has ended there is nothing to be heard any more
  const bool told = socket.answer(why);
  if (why.empty()) return told ? "" : socket.error();
  socket.endSending();
  socket.hearOut(kHearOut);
  return why;
}

}  // namespace gpupool::server
