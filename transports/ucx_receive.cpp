// What the peer's active messages do here. Every number in a header is checked before it is used: a peer that
// sends nonsense loses its session and touches nothing but its regions.

#include <cstring>

#include "transports/ucx.h"

namespace gpupool::transport {

bool Ucx::received(const WireHeader& header, void* data, size_t length, bool rendezvous) {
  lastHeard_ = Clock::now();
  if (peer() == Peer::lost) return false;
  if (rendezvous && registered_) {  // it would hand out a key to this side's memory
    lose("the peer began a rendezvous over RDMA");
    return false;
  }
  switch (header.kind) {
    case WireKind::messages:
      onMessages(header, data, length, rendezvous);
      return false;
    case WireKind::credit:
      onCredit(header);
      return false;
    case WireKind::put:
      return onPut(header, data, length, rendezvous);
    case WireKind::putDone:
      onPutDone(header);
      return false;
    case WireKind::get:
      onGet(header);
      return false;
    case WireKind::getData:
      return onGetData(header, data, length, rendezvous);
    case WireKind::region:
      onPeerRegion(header, data, length);
      return false;
    case WireKind::withdraw:
      if (!remote_->withdraw(header.region)) {
        lose("the peer withdrew a region it did not have");
      } else {
        withdrawPeerRegion(header.region);
      }
      return false;
    case WireKind::goodbye:
      peerGoodbye_ = {header.number, header.offset};
      checkGoodbye();
      return false;
    case WireKind::goodbyeSeen:
      goodbyeSeen_ = true;
      return false;
    case WireKind::fetch:
    case WireKind::fill:
    case WireKind::filled:
    case WireKind::placed:
    case WireKind::withdrawn:
      if (receivedOneSided(header, data, length)) return false;
      break;
    case WireKind::hello:
    case WireKind::welcome:
      break;
  }
  lose("the peer sent a message of unknown kind " + std::to_string(static_cast<uint32_t>(header.kind)));
  return false;
}

// --- messages ---

void Ucx::onMessages(const WireHeader& header, const void* data, size_t length, bool rendezvous) {
  if (header.channel >= kChannels || rendezvous || length % 8 != 0)
    return lose("the peer sent a broken batch");
  Lane& lane = lanes_[header.channel];
  uint64_t consumed = in_[header.channel]->position();
  uint64_t ahead = header.number - consumed;  // where the batch begins, counted from the consumer
  if (header.number < lane.filled || ahead > lane.size || length > lane.size - ahead) {
    return lose("the peer sent more than its credit allows");
  }
  if (header.number == lane.filled && header.landed <= putsLanded_) {
    if (deliver(lane, data, length) && !lane.held.empty()) deliverHeld();
  } else {
    const auto* bytes = static_cast<const std::byte*>(data);
    lane.held[header.number] = {header.landed, {bytes, bytes + length}};
  }
  checkGoodbye();
}

bool Ucx::deliver(Lane& lane, const void* records, size_t bytes) {
  std::byte* room = lane.fill->tryReserveBytes(bytes);
  if (!room) {
    lose("the peer sent more than its credit allows");
    return false;
  }
  if (bytes != 0) std::memcpy(room, records, bytes);  // of no bytes `records` may be null
  lane.filled += bytes;
  if (lane.fill->publishBytes(bytes)) futexWake(lane.fill->words()->consumerArmed);
  return true;
}

void Ucx::deliverHeld() {
  for (Lane& lane : lanes_) {
    while (!lane.held.empty()) {
      auto next = lane.held.begin();
      if (next->first != lane.filled || next->second.landed > putsLanded_) break;
      Held held = std::move(next->second);
      lane.held.erase(next);
      if (!deliver(lane, held.records.data(), held.records.size())) return;
    }
  }
  checkGoodbye();
}

void Ucx::onCredit(const WireHeader& header) {
  if (header.channel >= kChannels) return lose("the peer returned credit for no channel");
  Lane& lane = lanes_[header.channel];
  if (header.number > lane.sent || header.number < lane.peerConsumed) {
    return lose("the peer returned credit it never had");
  }
  lane.peerConsumed = header.number;
}

void Ucx::checkGoodbye() {
  if (!peerGoodbye_ || peer() != Peer::alive) return;
  for (int channel = 0; channel < kChannels; ++channel) {
    if (lanes_[channel].filled < (*peerGoodbye_)[channel]) return;
  }
  link_->send({.kind = WireKind::goodbyeSeen}, nullptr, 0, UCP_AM_SEND_FLAG_EAGER, {});
  markGone(Peer::closed, "the peer closed the connection");
}

// --- transfers ---

bool Ucx::onPut(const WireHeader& header, void* data, size_t length, bool rendezvous) {
  if (header.number <= putsLanded_ || header.number - putsLanded_ > kMaxServing) {
    lose("the peer numbered its puts wrongly");
    return false;
  }
  auto memory = local_.find(header.region);
  if (!memory || length != header.length || !within(memory->size(), header.offset, length)) {
    landed(header.number, false);
    return false;
  }
  std::byte* target = memory->data() + header.offset;
  copied_ += length;
  if (!rendezvous) {
    std::memcpy(target, data, length);
    landed(header.number, true);
    return false;
  }
  // The memory stays until UCX is done with it, whatever becomes of its name.
  link_->receive(data, target, length,
                 [this, memory, number = header.number](bool ok) { landed(number, ok); });
  return true;
}

void Ucx::landed(uint64_t put, bool ok) {
  if (peer() != Peer::alive) return;
  // A peer that sends and takes no answers would have them pile up here.
  if (++answering_ > kMaxServing) return lose("the peer takes no answers to its puts");
  link_->send({.kind = WireKind::putDone, .channel = ok ? 0u : 1u, .number = put}, nullptr, 0,
              UCP_AM_SEND_FLAG_EAGER, [this](bool) { --answering_; });
  markLanded(put);
}

// Messages that waited for it may go on.
void Ucx::markLanded(uint64_t put) {
  landedEarly_.insert(put);
  while (!landedEarly_.empty() && *landedEarly_.begin() == putsLanded_ + 1) {
    landedEarly_.erase(landedEarly_.begin());
    ++putsLanded_;
  }
  deliverHeld();
}

void Ucx::onPutDone(const WireHeader& header) {
  auto found = puts_.find(header.number);
  if (found == puts_.end() || found->second.answered)
    return lose("the peer answered a put that was never sent");
  found->second.answered = true;
  found->second.ok &= header.channel == 0;
  if (found->second.registered && found->second.ok) moved_ += found->second.bytes;
  settle(header.number);
}

void Ucx::settle(uint64_t put) {
  const PutState& state = puts_[put];
  if (!state.answered || !state.sent) return;
  PutState over = std::move(puts_[put]);
  puts_.erase(put);
  putBytes_ -= over.bytes;
  over.registered.reset();  // whoever waits may free the memory
  transfers_->end(over.transfer, over.ok);
}

void Ucx::onGet(const WireHeader& header) {
  auto memory = local_.find(header.region);
  WireHeader answer{.kind = WireKind::getData, .number = header.number};
  if (!memory || !within(memory->size(), header.offset, header.length)) {
    answer.channel = 1;
    link_->send(answer, nullptr, 0, UCP_AM_SEND_FLAG_EAGER, {});
    return;
  }
  if (++serving_ > kMaxServing) return lose("the peer asked for too much at once");
  copied_ += header.length;
  link_->send(answer, memory->data() + header.offset, header.length, bulkFlags(header.length),
              [this, memory](bool) { --serving_; });
}

bool Ucx::onGetData(const WireHeader& header, void* data, size_t length, bool rendezvous) {
  auto found = gets_.find(header.number);
  if (found == gets_.end()) {
    lose("the peer answered a get that was never sent");
    return false;
  }
  Request request = found->second;
  gets_.erase(found);
  bool ok = header.channel == 0 && length == request.header.length && request.header.kind == WireKind::get;
  if (ok) copied_ += length;
  if (!ok || !rendezvous) {
    if (ok) std::memcpy(request.target, data, length);
    transfers_->end(request.transfer, ok);
    return false;
  }
  link_->receive(data, request.target, length,
                 [this, transfer = request.transfer](bool done) { transfers_->end(transfer, done); });
  return true;
}

}  // namespace gpupool::transport
