#include "transports/ring_connection.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace gpupool::transport {

void copyBytes(void* to, const void* from, size_t bytes) {
  static const size_t threads = [] {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof cores, &cores) != 0) return size_t{1};
    return std::clamp<size_t>(static_cast<size_t>(CPU_COUNT(&cores)) / 2, 1, 4);
  }();
  if (bytes < kParallelCopyBytes || threads == 1) {
    std::memcpy(to, from, bytes);
    return;
  }
  size_t part = (bytes / threads + 4095) & ~size_t{4095};
  std::vector<std::unique_ptr<std::thread>> helpers;
  size_t done = part;
  for (; done < bytes; done += part) {
    size_t length = std::min(part, bytes - done);
    auto* target = static_cast<std::byte*>(to) + done;
    auto* source = static_cast<const std::byte*>(from) + done;
    try {
      helpers.push_back(startQuietThread([=] { std::memcpy(target, source, length); }));
    } catch (const std::exception&) {  // no thread to be had: do it here
      std::memcpy(target, source, length);
    }
  }
  std::memcpy(to, from, part);
  for (auto& helper : helpers) helper->join();
}

RingConnection::RingConnection() : remote_(std::make_unique<RemoteRegions>()), goneEvent_(newEvent()) {}

void RingConnection::attach(std::shared_ptr<RingMemory> memory, int out, int in, bool expedited) {
  memory_ = std::move(memory);
  for (int channel = 0; channel < kChannels; ++channel) {
    int to = out + channel, from = in + channel;
    out_[channel] =
        std::make_unique<RingProducer>(memory_->words(to), memory_->data(to), memory_->size(to), expedited);
    in_[channel] = std::make_unique<RingConsumer>(memory_->words(from), memory_->data(from),
                                                  memory_->size(from), expedited);
  }
  // Present ahead: the first pass through the ring would otherwise fault at every page, in every launch that
  // meets one.
  for (int ring : {out + index(Channel::call), in + index(Channel::call)}) memory_->populate(ring);
}

size_t RingConnection::sizeOf(Region remote, Deadline deadline) {
  const auto entry = remote_->wait(remote, deadline);
  return entry ? entry->size : 0;
}

size_t RingConnection::maxMessage(Channel channel) const {
  return maxRingMessage(memory_->size(index(channel)));
}

std::byte* RingConnection::reserve(Channel channel, size_t bytes, Deadline deadline) {
  if (!open_.load(std::memory_order_relaxed) || bytes > maxMessage(channel)) return nullptr;
  if (std::byte* room = out_[index(channel)]->tryReserve(bytes)) return room;
  return reserveSlow(channel, bytes, deadline);
}

std::byte* RingConnection::reserveSlow(Channel channel, size_t bytes, Deadline deadline) {
  RingProducer& out = *out_[index(channel)];
  std::byte* room = nullptr;
  waitFor(out.words()->producerArmed, out.expedited(), deadline, [&] {
    if (!open() || out.corrupt()) return true;
    return (room = out.tryReserve(bytes)) != nullptr;
  });
  if (out.corrupt()) markGone(Peer::lost, "the peer damaged a message ring");
  return open() ? room : nullptr;
}

void RingConnection::commit(Channel channel, size_t bytes) {
  if (closedHere_.load(std::memory_order_relaxed)) return;
  if (out_[index(channel)]->publish(bytes)) wakeReader(channel);
}

std::span<const std::byte> RingConnection::receive(Channel channel, Deadline deadline) {
  if (closedHere()) return {};
  RingConsumer& in = *in_[index(channel)];
  if (!in.ready()) {
    std::atomic<bool>& idle = idle_[index(channel)];
    const bool busy = channel == Channel::call && !idle.load(std::memory_order_relaxed);
    waitFor(
        in.words()->consumerArmed, in.expedited(), deadline, [&] { return in.ready() || !open(); },
        busy ? longSpinTime() : spinTime());
    if (!in.ready() && deadline != Deadline::min()) idle.store(true, std::memory_order_relaxed);
    // Gone: what it sent before it went is in the ring by now.
    if (closedHere() || !in.ready()) return {};
  }
  std::span<const std::byte> message;
  bool wake = false;
  if (!in.take(message, wake)) {
    markGone(Peer::lost, "the peer damaged a message ring");
    return {};
  }
  if (wake) wakeWriter(channel);
  idle_[index(channel)].store(false, std::memory_order_relaxed);
  consumed(channel);
  return message;
}

bool RingConnection::pending(Channel channel) {
  if (closedHere()) return true;
  return in_[index(channel)]->pending() || !open();
}

std::string RingConnection::reason() const {
  std::lock_guard lock(reasonMutex_);
  return reason_;
}

void RingConnection::markGone(Peer state, const std::string& why) {
  {
    std::lock_guard lock(reasonMutex_);
    if (peer_.load(std::memory_order_relaxed) != Peer::alive) return;
    reason_ = why;
    peer_.store(state, std::memory_order_release);
    open_.store(false, std::memory_order_seq_cst);
  }
  signalEvent(goneEvent_);
  wakeAll();
  gone();
}

bool RingConnection::closeHere() {
  if (closedHere_.exchange(true, std::memory_order_seq_cst)) return false;
  open_.store(false, std::memory_order_seq_cst);
  wakeAll();
  return true;
}

void RingConnection::wakeAll() {
  for (auto& out : out_) {
    if (out) futexWake(out->words()->producerArmed);
  }
  for (auto& in : in_) {
    if (in) futexWake(in->words()->consumerArmed);
  }
  remote_->stop();
}

void RingConnection::forget() {
  closedHere_.store(true);
  open_.store(false);
  peer_.store(Peer::lost);
  if (memory_) memory_->abandon();
  [[maybe_unused]] RemoteRegions* leaked = remote_.release();
  goneEvent_.reset();
}

}  // namespace gpupool::transport
