// The round trip of a bare TCP socket: what a network costs before anything of ours. Both ends spin where the
// machine has cores for that.
//
//   perf-echo serve PORT                 answers one peer, and ends with it; says "ready" when it listens
//   perf-echo ask ADDRESS PORT [COUNT]   prints the median of COUNT (2000) round trips, in microseconds
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

int serve(const char* port) {
  const int listener = makeSocket();
  const int on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const sockaddr_in address = addressOf("0.0.0.0", port);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) die("bind");
  if (listen(listener, 1) != 0) die("listen");
  std::printf("ready\n");
  std::fflush(stdout);
  pollfd waiting{listener, POLLIN, 0};
  errno = ETIMEDOUT;
  if (poll(&waiting, 1, kPatienceMs) <= 0) die("nobody asks");
  const int peer = accept(listener, nullptr, nullptr);
  if (peer < 0 || setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) die("accept");
  for (uint64_t word = 0; receive(peer, word);) send(peer, word);
  return 0;
}

int ask(const char* host, const char* port, size_t count) {
  const int peer = makeSocket();
  const sockaddr_in address = addressOf(host, port);
  if (connect(peer, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) die("connect");
  std::vector<double> microseconds;
  for (uint64_t i = 0; i < count; ++i) {
    const auto began = Clock::now();
    uint64_t word = i;
    send(peer, word);
    if (!receive(peer, word) || word != i) die("no answer");
    microseconds.push_back(std::chrono::duration<double, std::micro>(Clock::now() - began).count());
  }
  std::ranges::nth_element(microseconds, microseconds.begin() + static_cast<std::ptrdiff_t>(count / 2));
  std::printf("%.1f\n", microseconds[count / 2]);
  close(peer);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  const std::string verb = count > 1 ? words[1] : "";
  if (verb == "serve" && count == 3) return serve(words[2]);
  if (verb == "ask" && (count == 4 || count == 5))
    return ask(words[2], words[3], static_cast<size_t>(std::max(count == 5 ? std::atoi(words[4]) : 2000, 1)));
  std::fprintf(stderr, "usage: perf-echo serve PORT | perf-echo ask ADDRESS PORT [COUNT]\n");
  return 2;
}
