#pragma once
// What goes between the simulated servers, holders and the manager, and when it arrives.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>

namespace gpupool::history {

// One direction of a connection: first in, first out.
struct Pipe {
  struct Message {
    uint64_t at;
    std::function<void()> deliver;
  };
  std::deque<Message> messages;
  void send(uint64_t at, std::function<void()> deliver) {
    if (!messages.empty()) at = std::max(at, messages.back().at);
    messages.push_back({at, std::move(deliver)});
  }
};

struct Connection {
  size_t server;
  bool openAtManager = true, openAtServer = true;
  uint64_t cutUntil = 0, breakManagerAt = 0, breakServerAt = 0;  // a partition
  Pipe toManager, toServer;
};

}  // namespace gpupool::history
