#pragma once
// Adapters that are and do what the test says, from any thread. An event is a byte in a pipe.

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <mutex>

#include "server/fabric/verbs.h"

namespace gpupool::fabric::test {

// What the test and the thread that watches share; outlives both.
class Adapters {
 public:
  Adapters() {
    if (pipe2(ends_, O_CLOEXEC | O_NONBLOCK) != 0) abort();
  }
  ~Adapters() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  void change(const std::function<void(Fabric&)>& how) {
    std::lock_guard guard(lock_);
    how(fabric_);
  }
  void tell() { [[maybe_unused]] const auto written = ::write(ends_[1], "e", 1); }
  int queries() {
    std::lock_guard guard(lock_);
    return queries_;
  }
  // The next query does not return before it is set free.
  std::mutex stuck;

 private:
  friend class FakeVerbs;
  int ends_[2];
  std::mutex lock_;
  Fabric fabric_;
  int queries_ = 0;
};

class FakeVerbs final : public Verbs {
 public:
  explicit FakeVerbs(std::shared_ptr<Adapters> adapters) : adapters_(std::move(adapters)) {}

  Fabric query() override {
    std::lock_guard free(adapters_->stuck);
    std::lock_guard guard(adapters_->lock_);
    ++adapters_->queries_;
    return adapters_->fabric_;
  }
  std::vector<int> descriptors() override { return {adapters_->ends_[0]}; }
  std::vector<std::string> events() override {
    std::vector<std::string> texts;
    for (char byte; ::read(adapters_->ends_[0], &byte, 1) == 1;) texts.push_back("an event");
    return texts;
  }

 private:
  std::shared_ptr<Adapters> adapters_;
};

// A RoCE adapter with one active port and no GIDs.
inline Device adapter(const std::string& name) {
  Device device;
  device.name = name;
  device.nodeGuid = 0x1122334455667788;
  Port port;
  port.number = 1;
  port.state = PortState::ACTIVE;
  port.linkLayer = LinkLayer::ETHERNET;
  port.rateMbps = 1000;
  device.ports = {port};
  return device;
}

}  // namespace gpupool::fabric::test
