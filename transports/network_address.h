#pragma once
// Socket addresses, and whole buffers over a stream socket: what ucx needs of the bootstrap socket.

#include <sys/socket.h>

#include <string>

#include "transports/transport.h"
#include "transports/waiting.h"

namespace gpupool::transport {

// The numeric address of this end of a connected TCP socket; "127.0.0.1" for a Unix socket.
std::string localAddress(int socket);
// A numeric IPv4 or IPv6 address, port 0. Throws std::runtime_error.
sockaddr_storage parseAddress(const std::string& numeric);
uint32_t socketAddressBytes(const sockaddr_storage& address);
// The network interface that owns a numeric address; "" if none does.
std::string interfaceOf(const std::string& numeric);
// The interface from which `target` is reached: that of the bootstrap socket, or for a Unix socket, of a
// probe.
std::string interfaceTowards(int bootstrap, const sockaddr_storage& target);
// Replaces an unspecified address (0.0.0.0, ::) by that of the bootstrap socket's other end. Throws
// std::runtime_error for an address that is neither IPv4 nor IPv6.
void completeAddress(sockaddr_storage& address, int bootstrap);

// A TCP socket fails with ETIMEDOUT when what was sent stays unacknowledged this long (tcp(7),
// TCP_USER_TIMEOUT).
void limitSilence(int socket, std::chrono::milliseconds limit);

// False when the time is over or when the socket ends.
bool sendAll(int socket, const void* bytes, size_t size, TimeLeft& time);
bool receiveAll(int socket, void* bytes, size_t size, TimeLeft& time);
// Waits for `events` (poll.h); false when the time is over.
bool pollFor(int descriptor, short events, TimeLeft& time);

}  // namespace gpupool::transport
