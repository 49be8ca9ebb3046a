#pragma once
// What every implementation shares: messages through rings, the peer's state, and the tables of regions. A
// subclass defines how the other end of its rings is woken and where regions come from.

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "transports/descriptor.h"
#include "transports/regions.h"
#include "transports/ring.h"
#include "transports/transport.h"

namespace gpupool::transport {

inline constexpr size_t kParallelCopyBytes = size_t{8} << 20;

// memcpy, by several threads when it is large and there are cores for it.
void copyBytes(void* to, const void* from, size_t bytes);

class RingConnection : public Connection {
 public:
  std::byte* reserve(Channel channel, size_t bytes, Deadline deadline) override;
  void commit(Channel channel, size_t bytes) override;
  std::span<const std::byte> receive(Channel channel, Deadline deadline) override;
  bool pending(Channel channel) override;
  size_t maxMessage(Channel channel) const override;
  size_t sizeOf(Region remote, Deadline deadline) override;

  Peer peer() const override { return peer_.load(std::memory_order_acquire); }
  std::string reason() const override;
  int wakeupDescriptor() const override { return goneEvent_.get(); }

  // For tests (faulty): cuts the wire, so that both sides find the other lost.
  virtual void sever() = 0;

 protected:
  RingConnection();

  // `out`, `in`: the first of this side's outgoing and incoming rings in `memory`.
  void attach(std::shared_ptr<RingMemory> memory, int out, int in, bool expedited);

  // The consumer of an outgoing ring, or the producer of an incoming one, armed its word.
  virtual void wakeReader(Channel channel) { futexWake(out_[index(channel)]->words()->consumerArmed); }
  virtual void wakeWriter(Channel channel) { futexWake(in_[index(channel)]->words()->producerArmed); }
  // After a message was taken from an incoming ring.
  virtual void consumed(Channel) {}
  // After the peer was marked gone: wakes waiters of the subclass.
  virtual void gone() {}

  // The first call decides; any thread.
  void markGone(Peer state, const std::string& why);
  bool open() const { return open_.load(std::memory_order_acquire); }
  // This side's close(): true for the first caller.
  bool closeHere();
  bool closedHere() const { return closedHere_.load(std::memory_order_acquire); }
  // abandon() of the common part.
  void forget();

  static constexpr int index(Channel channel) { return static_cast<int>(channel); }

  std::shared_ptr<RingMemory> memory_;
  std::array<std::unique_ptr<RingProducer>, kChannels> out_;
  std::array<std::unique_ptr<RingConsumer>, kChannels> in_;
  std::atomic<bool> idle_[kChannels] = {};  // a wait ended without a message, and none came since
  LocalRegions local_;
  std::unique_ptr<RemoteRegions> remote_;  // a forked child leaks it: its waiters do not exist there

 private:
  std::byte* reserveSlow(Channel channel, size_t bytes, Deadline deadline);
  void wakeAll();

  std::atomic<bool> open_{true};  // the peer is alive and close() was not called
  std::atomic<bool> closedHere_{false};
  std::atomic<Peer> peer_{Peer::alive};
  mutable std::mutex reasonMutex_;
  std::string reason_;
  Descriptor goneEvent_;
};

}  // namespace gpupool::transport
