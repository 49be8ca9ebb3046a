#pragma once
// State sockets' both ends.

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "catch.h"

namespace gpupool::server::test {

// Two ends of a TCP connection.
inline std::pair<int, int> connection() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof address;
  REQUIRE(bind(listener, reinterpret_cast<sockaddr*>(&address), bytes) == 0);
  REQUIRE(listen(listener, 1) == 0);
  REQUIRE(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &bytes) == 0);
  const int mine = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  REQUIRE(connect(mine, reinterpret_cast<sockaddr*>(&address), bytes) == 0);
  const int theirs = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  REQUIRE(theirs >= 0);
  close(listener);
  return {mine, theirs};
}

// And of one between processes of this machine: what has no bytes of its own can pass.
inline std::pair<int, int> connectionHere() {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  return {ends[0], ends[1]};
}

}  // namespace gpupool::server::test
