#pragma once
// What the sources of a session share: waits for a client that may be stopped for as long as it likes.

#include <atomic>
#include <chrono>

#include "transports/transport.h"

namespace gpupool::server {

inline constexpr auto kTick = std::chrono::milliseconds(500);

inline transport::Deadline soon(std::chrono::milliseconds wait) { return transport::Clock::now() + wait; }

// A client that says or takes nothing may be stopped, or in a debugger: the transport says when it is lost.
inline bool waitsFor(const transport::Connection& client, const std::atomic<bool>& stopping) {
  return !stopping && client.peer() == transport::Peer::alive;
}

// Room for a message; null: it is longer than a message can be, or the session is over.
std::byte* reserveFor(transport::Connection& client, const std::atomic<bool>& stopping,
                      transport::Channel channel, size_t bytes);

}  // namespace gpupool::server
