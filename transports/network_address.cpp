#include "transports/network_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "transports/descriptor.h"

namespace gpupool::transport {

namespace {

// An IPv4 address that came in over an IPv6 socket is IPv4 for everybody else.
std::string numericAddress(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address->sa_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof text);
  } else if (address->sa_family == AF_INET6) {
    const in6_addr& ip = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&ip)) {
      inet_ntop(AF_INET, ip.s6_addr + 12, text, sizeof text);
    } else {
      inet_ntop(AF_INET6, &ip, text, sizeof text);
    }
  }
  return text;
}

sockaddr_storage socketName(int socket, bool peer) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  auto* out = reinterpret_cast<sockaddr*>(&address);
  if ((peer ? getpeername(socket, out, &length) : getsockname(socket, out, &length)) != 0) {
    throw std::runtime_error(errorText("ucx: bootstrap socket"));
  }
  return address;
}

const sockaddr* generic(const sockaddr_storage& address) {
  return reinterpret_cast<const sockaddr*>(&address);
}

}  // namespace

std::string localAddress(int socket) {
  sockaddr_storage name = socketName(socket, false);
  return name.ss_family == AF_UNIX ? "127.0.0.1" : numericAddress(generic(name));
}

sockaddr_storage parseAddress(const std::string& numeric) {
  sockaddr_storage address{};
  auto* ipv4 = reinterpret_cast<sockaddr_in*>(&address);
  auto* ipv6 = reinterpret_cast<sockaddr_in6*>(&address);
  if (inet_pton(AF_INET, numeric.c_str(), &ipv4->sin_addr) == 1) {
    address.ss_family = AF_INET;
  } else if (inet_pton(AF_INET6, numeric.c_str(), &ipv6->sin6_addr) == 1) {
    address.ss_family = AF_INET6;
  } else {
    throw std::runtime_error("ucx: '" + numeric + "' is not a numeric IP address to listen on");
  }
  return address;
}

uint32_t socketAddressBytes(const sockaddr_storage& address) {
  return address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

std::string interfaceOf(const std::string& numeric) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  std::string name;
  for (ifaddrs* entry = all; entry && name.empty(); entry = entry->ifa_next) {
    if (entry->ifa_addr && numericAddress(entry->ifa_addr) == numeric) name = entry->ifa_name;
  }
  freeifaddrs(all);
  return name;
}

std::string interfaceTowards(int bootstrap, const sockaddr_storage& target) {
  sockaddr_storage name = socketName(bootstrap, false);
  if (name.ss_family != AF_UNIX) return interfaceOf(numericAddress(generic(name)));
  // Connecting a datagram socket sends nothing; the kernel only chooses the route.
  Descriptor probe(socket(target.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!probe || ::connect(probe.get(), generic(target), socketAddressBytes(target)) != 0) return "";
  sockaddr_storage local = socketName(probe.get(), false);
  return interfaceOf(numericAddress(generic(local)));
}

void completeAddress(sockaddr_storage& address, int bootstrap) {
  auto* ipv4 = reinterpret_cast<sockaddr_in*>(&address);
  auto* ipv6 = reinterpret_cast<sockaddr_in6*>(&address);
  bool unspecified;
  if (address.ss_family == AF_INET) {
    unspecified = ipv4->sin_addr.s_addr == htonl(INADDR_ANY);
  } else if (address.ss_family == AF_INET6) {
    unspecified = IN6_IS_ADDR_UNSPECIFIED(&ipv6->sin6_addr);
  } else {
    throw std::runtime_error("ucx: the worker listens on an address of an unknown family");
  }
  if (!unspecified) return;
  in_port_t port = address.ss_family == AF_INET ? ipv4->sin_port : ipv6->sin6_port;
  sockaddr_storage peer = socketName(bootstrap, true);
  address = parseAddress(peer.ss_family == AF_UNIX ? "127.0.0.1" : numericAddress(generic(peer)));
  (address.ss_family == AF_INET ? ipv4->sin_port : ipv6->sin6_port) = port;
}

void limitSilence(int socket, std::chrono::milliseconds limit) {
  auto milliseconds = static_cast<unsigned>(limit.count());
  // Refused for a Unix socket: there, end-of-file is enough.
  setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
  // Once the network is known to lose things, a repetition every 200 ms instead of ever fewer.
  int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
}

bool pollFor(int descriptor, short events, TimeLeft& time) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(time.step());
    pollfd waiting{descriptor, events, 0};
    if (::poll(&waiting, 1, static_cast<int>(left.count())) > 0) return true;
    if (left.count() == 0) return false;
  }
}

bool sendAll(int socket, const void* bytes, size_t size, TimeLeft& time) {
  const auto* from = static_cast<const std::byte*>(bytes);
  while (size > 0) {
    ssize_t count = ::send(socket, from, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      from += count;
      size -= static_cast<size_t>(count);
    } else if (errno == EAGAIN) {
      if (!pollFor(socket, POLLOUT, time)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool receiveAll(int socket, void* bytes, size_t size, TimeLeft& time) {
  auto* to = static_cast<std::byte*>(bytes);
  while (size > 0) {
    ssize_t count = ::recv(socket, to, size, MSG_DONTWAIT);
    if (count > 0) {
      to += count;
      size -= static_cast<size_t>(count);
    } else if (count == 0) {
      return false;
    } else if (errno == EAGAIN) {
      if (!pollFor(socket, POLLIN, time)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace gpupool::transport
