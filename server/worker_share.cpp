// WorkerProcess's part in what sessions share: a worker's offers and openings, and the server's answers.
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/descriptor_passing.h"
#include "base/log.h"
#include "schema/convert.h"
#include "schema/worker.capnp.h"
#include "server/worker_process.h"

namespace gpupool::server {
namespace {

void write(const ShareReport& from, uint64_t ticket, schema::ShareReport::Builder to) {
  to.setTicket(ticket);
  const auto writeKey = [&](schema::ShareKey::Builder key) {
    schema::write(from.key.server, key.initServer());
    schema::write(from.key.key, key.initKey());
  };
  switch (from.what) {
    case ShareReport::What::offer: {
      auto offer = to.initOffer();
      offer.setPiece(from.offer.piece);
      offer.setPlace(from.offer.place);
      offer.setBytes(from.offer.bytes);
      offer.setOffset(from.offer.offset);
      offer.setLength(from.offer.length);
      break;
    }
    case ShareReport::What::endOffer:
      return writeKey(to.initEndOffer());
    case ShareReport::What::open:
      return writeKey(to.initOpen());
    case ShareReport::What::endPiece:
      return to.setEndPiece(from.number);
    case ShareReport::What::close:
      return to.setClose(from.number);
  }
}

}  // namespace

bool WorkerProcess::sendShare(const Control& control, const ShareReport& said, uint64_t ticket,
                              int descriptor, int flags) const {
  capnp::MallocMessageBuilder message;
  auto report = message.initRoot<schema::WorkerReport>();
  report.setRowsHash(rowsHash_);
  write(said, ticket, report.initShare());
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  return sendWithDescriptors(control.socket, std::as_bytes(std::span(bytes.begin(), bytes.size())),
                             std::span(&descriptor, descriptor >= 0 ? 1 : 0), flags) >= 0;
}

// Under memoryMutex_. In their order.
void WorkerProcess::tellShares() {
  const auto server = control();
  while (!untold_.empty() && sendShare(*server, untold_.front(), 0, -1, MSG_DONTWAIT)) untold_.pop_front();
  hasUntold_ = !untold_.empty();
}

// Never waits: what a server that is stopped does not take now the watcher tells it again (awaitEnd).
void WorkerProcess::tellShare(const ShareReport& said) {
  std::lock_guard lock(memoryMutex_);
  untold_.push_back(said);
  tellShares();
  const uint64_t one = 1;
  if (hasUntold_ && news_ >= 0 && ::write(news_, &one, sizeof one) < 0)
    GPUPOOL_WARNING("the server is told only later what is no longer shared: %s", strerror(errno));
}

ShareAnswer WorkerProcess::share(const ShareReport& said, int descriptor) {
  std::unique_lock lock(memoryMutex_);
  for (;;) {
    tellShares();
    const uint64_t ticket = nextTicket_++, generation = generation_;
    const auto asked = shareAsked_.emplace(ticket, ShareAsked{}).first;
    const auto server = control();
    lock.unlock();
    sendShare(*server, said, ticket, descriptor, 0);
    lock.lock();
    const auto heard = [&] { return asked->second.answer.has_value(); };
    awaitServer(lock, generation, heard);
    if (!heard() && generation_ != generation) {  // the server that was asked is no more
      shareAsked_.erase(asked);
      continue;
    }
    // The refusal is the session's end: its client first hears why.
    if (!heard())
      answered_.wait_until(lock, std::chrono::steady_clock::now() + kMemoryBound,
                           [&] { return heard() || told_; });
    if (!heard()) {
      asked->second.abandoned = true;
      return {};
    }
    const ShareAnswer answer = *asked->second.answer;
    shareAsked_.erase(asked);
    return answer;
  }
}

// Takes the descriptor. What is opened late, for nobody who waits, is closed.
void WorkerProcess::hearShare(uint64_t ticket, const ShareAnswer& answer) {
  std::unique_lock lock(memoryMutex_);
  const auto asked = shareAsked_.find(ticket);
  if (asked != shareAsked_.end() && !asked->second.abandoned) {
    asked->second.answer = answer;
    lock.unlock();
    answered_.notify_all();
    return;
  }
  if (asked != shareAsked_.end()) shareAsked_.erase(asked);
  if (answer.descriptor >= 0) ::close(answer.descriptor);
  if (answer.opening == 0) return;
  untold_.push_back({ShareReport::What::close, {}, {}, answer.opening});
  tellShares();
}

}  // namespace gpupool::server
