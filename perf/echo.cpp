// The round trip of a bare TCP socket, and what bare sockets move: what a network costs before anything of
// ours. Both ends of a round trip spin where the machine has cores for that.
//
//   perf-echo serve PORT                       answers one peer, and ends with it; says "ready" when it
//   listens perf-echo ask ADDRESS PORT [COUNT]         prints the median of COUNT (2000) round trips, in
//   microseconds perf-echo take PORT SOCKETS                receives from as many sockets, and ends with them
//   perf-echo give ADDRESS PORT SOCKETS MIB    prints the median of 20 times MIB over all sockets together,
//   in GB/s: from
//                                              the first byte that is sent to the taker's word that it has
//                                              all
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kPatienceMs = 10'000;  // for a peer, and for each answer
constexpr unsigned kSpinningCores = 4;
constexpr size_t kMostSockets = 64, kMostMib = 4096;

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "perf-echo: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

sockaddr_in addressOf(const char* host, const char* port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(port)));
  if (inet_pton(AF_INET, host, &address.sin_addr) != 1) die(host);
  return address;
}

int makeSocket() {
  const int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (made < 0 || setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) die("socket");
  return made;
}

// False: the peer has ended.
bool receive(int socket, uint64_t& word) {
  static const bool spins = std::thread::hardware_concurrency() >= kSpinningCores;
  const auto until = Clock::now() + std::chrono::milliseconds(kPatienceMs);
  auto* to = reinterpret_cast<char*>(&word);
  for (size_t got = 0; got < sizeof word;) {
    pollfd waiting{socket, POLLIN, 0};
    if (!spins) poll(&waiting, 1, 100);
    const ssize_t n = recv(socket, to + got, sizeof word - got, MSG_DONTWAIT);
    if (n == 0) return false;
    if (n < 0 && errno != EAGAIN && errno != EINTR) die("recv");
    if (n > 0) got += static_cast<size_t>(n);
    if (Clock::now() > until) {
      errno = ETIMEDOUT;
      die("recv");
    }
  }
  return true;
}

void send(int socket, uint64_t word) {
  if (::send(socket, &word, sizeof word, MSG_NOSIGNAL) != sizeof word) die("send");
}

int listenAt(const char* port) {
  const int listener = makeSocket();
  const int on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const sockaddr_in address = addressOf("0.0.0.0", port);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) die("bind");
  if (listen(listener, static_cast<int>(kMostSockets)) != 0) die("listen");
  std::printf("ready\n");
  std::fflush(stdout);
  return listener;
}

int acceptAt(int listener) {
  const int on = 1;
  pollfd waiting{listener, POLLIN, 0};
  errno = ETIMEDOUT;
  if (poll(&waiting, 1, kPatienceMs) <= 0) die("nobody asks");
  const int peer = accept(listener, nullptr, nullptr);
  if (peer < 0 || setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) die("accept");
  return peer;
}

int connectTo(const char* host, const char* port) {
  const int peer = makeSocket();
  const sockaddr_in address = addressOf(host, port);
  if (connect(peer, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) die("connect");
  return peer;
}

int serve(const char* port) {
  const int peer = acceptAt(listenAt(port));
  for (uint64_t word = 0; receive(peer, word);) send(peer, word);
  return 0;
}

double medianOf(std::vector<double> some) {
  const auto middle = some.begin() + static_cast<std::ptrdiff_t>(some.size() / 2);
  std::nth_element(some.begin(), middle, some.end());
  return *middle;
}

// Each round of a socket: how many bytes follow, these, and the taker's answer.
void takeRounds(int peer) {
  std::vector<char> memory;
  for (uint64_t bytes = 0; receive(peer, bytes);) {
    if (memory.size() < bytes) memory.resize(bytes);
    for (uint64_t got = 0; got < bytes;) {
      const ssize_t n = recv(peer, memory.data() + got, bytes - got, 0);
      if (n <= 0) die("recv");
      got += static_cast<uint64_t>(n);
    }
    send(peer, bytes);
  }
}

int take(const char* port, size_t sockets) {
  const int listener = listenAt(port);
  std::vector<std::thread> takers;
  for (size_t i = 0; i < sockets; ++i) takers.emplace_back(takeRounds, acceptAt(listener));
  for (auto& taker : takers) taker.join();
  return 0;
}

void giveRound(int peer, const std::vector<char>& memory) {
  uint64_t word = memory.size();
  send(peer, word);
  for (size_t sent = 0; sent < memory.size();) {
    const ssize_t n = ::send(peer, memory.data() + sent, memory.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) die("send");
    sent += static_cast<size_t>(n);
  }
  if (!receive(peer, word) || word != memory.size()) die("no answer");
}

int give(const char* host, const char* port, size_t sockets, size_t mib) {
  constexpr int kRounds = 20;
  std::vector<int> peers;
  for (size_t i = 0; i < sockets; ++i) peers.push_back(connectTo(host, port));
  const std::vector<char> memory((mib << 20) / sockets, 1);
  std::vector<double> rates;
  for (int round = 0; round <= kRounds; ++round) {  // the first is not counted: it touches the memory
    const auto began = Clock::now();
    std::vector<std::thread> givers;
    for (size_t i = 1; i < sockets; ++i) givers.emplace_back(giveRound, peers[i], std::cref(memory));
    giveRound(peers[0], memory);
    for (auto& giver : givers) giver.join();
    const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
    if (round > 0) rates.push_back(static_cast<double>(memory.size() * sockets) / seconds / 1e9);
  }
  std::printf("%.2f\n", medianOf(rates));
  for (const int peer : peers) close(peer);
  return 0;
}

int ask(const char* host, const char* port, size_t count) {
  const int peer = connectTo(host, port);
  std::vector<double> microseconds;
  for (uint64_t i = 0; i < count; ++i) {
    const auto began = Clock::now();
    uint64_t word = i;
    send(peer, word);
    if (!receive(peer, word) || word != i) die("no answer");
    microseconds.push_back(std::chrono::duration<double, std::micro>(Clock::now() - began).count());
  }
  std::printf("%.1f\n", medianOf(microseconds));
  close(peer);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  const std::string verb = count > 1 ? words[1] : "";
  if (verb == "serve" && count == 3) return serve(words[2]);
  if (verb == "ask" && (count == 4 || count == 5))
    return ask(words[2], words[3], static_cast<size_t>(std::max(count == 5 ? std::atoi(words[4]) : 2000, 1)));
  const auto number = [&](int at, size_t most) {
    return std::clamp(static_cast<size_t>(std::max(std::atoi(words[at]), 1)), size_t{1}, most);
  };
  if (verb == "take" && count == 4) return take(words[2], number(3, kMostSockets));
  if (verb == "give" && count == 6)
    return give(words[2], words[3], number(4, kMostSockets), number(5, kMostMib));
  std::fprintf(stderr,
               "usage: perf-echo serve PORT | ask ADDRESS PORT [COUNT] | take PORT SOCKETS | "
               "give ADDRESS PORT SOCKETS MIB\n");
  return 2;
}
