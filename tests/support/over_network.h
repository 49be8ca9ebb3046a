#pragma once
// A connection of one process as if it went over a network.

#include <memory>
#include <utility>

#include "transports/transport.h"

namespace gpupool::transport::test {

// Both sides share no memory.
class OverNetwork : public Connection {
 public:
  explicit OverNetwork(std::unique_ptr<Connection> inner) : inner_(std::move(inner)) {}
  std::byte* reserve(Channel channel, size_t bytes, Deadline deadline) override {
    return inner_->reserve(channel, bytes, deadline);
  }
  void commit(Channel channel, size_t bytes) override { inner_->commit(channel, bytes); }
  std::span<const std::byte> receive(Channel channel, Deadline deadline) override {
    return inner_->receive(channel, deadline);
  }
  bool pending(Channel channel) override { return inner_->pending(channel); }
  size_t maxMessage(Channel channel) const override { return inner_->maxMessage(channel); }
  Region share(std::shared_ptr<SharedMemory> memory) override { return inner_->share(std::move(memory)); }
  void unshare(Region region) override { inner_->unshare(region); }
  std::shared_ptr<SharedMemory> map(Region, void*, Deadline) override { return nullptr; }
  bool mapsMemory() const override { return false; }
  Transfer put(const void* local, Region remote, uint64_t offset, size_t bytes) override {
    return inner_->put(local, remote, offset, bytes);
  }
  Transfer get(void* local, Region remote, uint64_t offset, size_t bytes) override {
    return inner_->get(local, remote, offset, bytes);
  }
  bool wait(Transfer transfer, Deadline deadline) override { return inner_->wait(transfer, deadline); }
  Peer peer() const override { return inner_->peer(); }
  std::string reason() const override { return inner_->reason(); }
  int wakeupDescriptor() const override { return inner_->wakeupDescriptor(); }
  void close() override { inner_->close(); }
  void abandon() override { inner_->abandon(); }
  const char* name() const override { return inner_->name(); }

 private:
  std::unique_ptr<Connection> inner_;
};
}  // namespace gpupool::transport::test
