// WorkerProcess's part in what sessions share: a worker's offers and openings, and the server's answers.
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
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
    case ShareReport::What::again: {
      auto again = to.initAgain();
      again.setReceipt({reinterpret_cast<const kj::byte*>(from.receipt.data()), from.receipt.size()});
      again.setOpening(from.number);
      writeKey(again.initKey());
      again.setPiece(from.offer.piece);
      again.setOffset(from.offer.offset);
      again.setLength(from.offer.length);
      break;
    }
  }
}

KeptDescriptor keep(int descriptor) {
  const int kept = descriptor < 0 ? -1 : fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (descriptor >= 0 && kept < 0)
    GPUPOOL_WARNING("what is offered now others cannot open once the server is started again: %s",
                    strerror(errno));
  return kept < 0 ? KeptDescriptor()
                  : KeptDescriptor(
                        new int(kept),
                        [](const int* one) {
                          ::close(*one);
                          delete one;
                        });
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
  const auto told = [&](const ShareReport& said) {
    return sendShare(*server, said, 0, said.descriptor ? *said.descriptor : -1, MSG_DONTWAIT);
  };
  while (!untold_.empty() && told(untold_.front())) untold_.pop_front();
  hasUntold_ = !untold_.empty();
}

// Never waits: what a server that is stopped does not take now the watcher tells it again (awaitEnd).
void WorkerProcess::tellShare(const ShareReport& said) {
  std::lock_guard lock(memoryMutex_);
  noteEnd(said);
  untold_.push_back(said);
  tellShares();
  const uint64_t one = 1;
  if (hasUntold_ && news_ >= 0 && ::write(news_, &one, sizeof one) < 0)
    GPUPOOL_WARNING("the server is told only later what is no longer shared: %s", strerror(errno));
}

ShareAnswer WorkerProcess::share(const ShareReport& said, int descriptor) {
  const KeptDescriptor kept = keep(door_ < 0 ? -1 : descriptor);
  std::unique_lock lock(memoryMutex_);
  noteEnd(said);
  for (;;) {
    tellShares();
    const uint64_t ticket = nextTicket_++, generation = generation_;
    const auto asked = shareAsked_.emplace(ticket, ShareAsked{said, kept, false, std::nullopt}).first;
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
    noteShared(asked->second.said, answer, asked->second.descriptor);
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

// Noted by the thread that hears of the server's death: whatever its last answers were is known by then.
void WorkerProcess::noteShared(const ShareReport& said, const ShareAnswer& answer,
                               const KeptDescriptor& descriptor) {
  const bool offers = said.what == ShareReport::What::offer;
  if (answer.error != ShareAnswer::Error::none || (!offers && said.what != ShareReport::What::open)) return;
  if (answer.receipt.empty()) withoutReceipt_ = true;
  ShareReport again;
  again.what = ShareReport::What::again;
  if (offers) {
    again.offer = said.offer;
    again.key = answer.key;
    sharedOffers_[answer.key.key] = again;
    again = {};
    again.what = ShareReport::What::again;
    again.descriptor = descriptor;
  }
  again.receipt = answer.receipt;
  again.number = answer.opening;
  if (offers)
    sharedPieces_.try_emplace(said.offer.piece, std::move(again));
  else
    sharedOpenings_[answer.opening] = std::move(again);
}

void WorkerProcess::noteEnd(const ShareReport& said) {
  if (said.what == ShareReport::What::endOffer) sharedOffers_.erase(said.key.key);
  if (said.what == ShareReport::What::close) sharedOpenings_.erase(said.number);
  if (said.what != ShareReport::What::endPiece) return;
  if (const auto taken = taken_.find(said.offer.place); taken != taken_.end())
    taken->second -= std::min(taken->second, said.offer.bytes);
  sharedPieces_.erase(said.number);
  std::erase_if(sharedOffers_, [&](const auto& one) { return one.second.offer.piece == said.number; });
}

bool WorkerProcess::shares() {
  std::lock_guard lock(memoryMutex_);
  return !sharedPieces_.empty() || !sharedOpenings_.empty();
}

std::deque<ShareReport> WorkerProcess::sharesAgain() const {
  std::deque<ShareReport> all;
  for (const auto& [number, piece] : sharedPieces_) all.push_back(piece);
  for (const auto& [key, offer] : sharedOffers_) all.push_back(offer);
  for (const auto& [number, opening] : sharedOpenings_) all.push_back(opening);
  return all;
}

}  // namespace gpupool::server
