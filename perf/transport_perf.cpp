// What the transports cost, between two processes on this machine: round trip, messages per second with the
// price of reserve + commit to the producer, and bandwidth of put and get.
//
//   transport-perf [shm|ucx ...]
//   transport-perf --worker TRANSPORT DESCRIPTOR      the other end alone, on an inherited socket
//
// GPUPOOL_PERF_WORKER: a program (found in PATH) to run as the other end, with these last arguments, so that
// two builds or two versions of UCX can be measured against each other. GPUPOOL_SPIN_US sets how long waiters
// poll before they sleep. Numbers of a shared machine are ratios, no more.

#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <vector>

#include "base/transport_names.h"
#include "transports/transport.h"

using namespace gpupool::transport;

namespace {

constexpr uint64_t kPings = 20'000;
constexpr uint64_t kBurst = 2'000'000;
constexpr size_t kLargest = size_t{256} << 20;

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

std::pair<int, int> sockets(const std::string& transport) {
  int ends[2];
  const gpupool::TransportFacts* facts = gpupool::findTransport(transport);
  if (facts != nullptr && facts->reach == gpupool::TransportFacts::Reach::sameHost) {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("socketpair");
    return {ends[0], ends[1]};
  }
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof address;
  auto* name = reinterpret_cast<sockaddr*>(&address);
  ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, name, length) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, name, &length) != 0 || ::connect(ends[0], name, length) != 0 ||
      (ends[1] = ::accept(listener, nullptr, nullptr)) < 0) {
    throw std::runtime_error("no TCP connection over 127.0.0.1");
  }
  ::close(listener);
  return {ends[0], ends[1]};
}

void send(Connection& connection, Channel channel, const void* bytes, size_t size) {
  std::byte* room = connection.reserve(channel, size, kForever);
  if (!room) throw std::runtime_error("the peer went away: " + connection.reason());
  std::memcpy(room, bytes, size);
  connection.commit(channel, size);
}

std::span<const std::byte> receive(Connection& connection, Channel channel) {
  auto message = connection.receive(channel, kForever);
  if (!message.data()) throw std::runtime_error("the peer went away: " + connection.reason());
  return message;
}

// The worker: echoes pings, swallows the burst and answers it once, then shares memory until the client
// leaves.
void serve(Connection& connection) {
  for (uint64_t i = 0; i < kPings; ++i) {
    auto message = receive(connection, Channel::call);
    send(connection, Channel::call, message.data(), message.size());
  }
  for (uint64_t i = 0; i < kBurst; ++i) receive(connection, Channel::call);
  send(connection, Channel::call, "done", 4);
  auto memory = SharedMemory::create(kLargest);
  std::memset(memory->data(), 1, memory->size());
  Region region = connection.share(memory);
  send(connection, Channel::control, &region, sizeof region);
  while (connection.receive(Channel::call, kForever).data()) {
  }
}

int runWorker(const std::string& transport, int bootstrap) {
  try {
    auto connection = accept(transport, bootstrap, {});
    serve(*connection);
    return 0;
  } catch (const std::exception& error) {
    fprintf(stderr, "worker: %s\n", error.what());
    return 1;
  }
}

void measureMessages(Connection& connection) {
  std::byte bytes[64] = {};
  std::vector<double> trips;
  for (uint64_t i = 0; i < kPings; ++i) {
    auto start = Clock::now();
    send(connection, Channel::call, bytes, sizeof bytes);
    receive(connection, Channel::call);
    trips.push_back(seconds(Clock::now() - start) * 1e6);
  }
  std::sort(trips.begin(), trips.end());
  printf("  round trip, 64 B      %8.2f us median, %.2f us p99\n", trips[kPings / 2],
         trips[kPings * 99 / 100]);

  // The producer's own price: bursts that fit the ring, so that it never waits for room.
  auto start = Clock::now();
  Clock::duration smooth{0};
  uint64_t smoothMessages = 0;
  for (uint64_t i = 0; i < kBurst;) {
    auto before = Clock::now();
    uint64_t first = i;
    bool stalled = false;
    for (uint64_t end = std::min(i + 100, kBurst); i < end; ++i) {
      std::byte* room = connection.reserve(Channel::call, sizeof bytes, Deadline::min());
      if (!room) {
        stalled = true;
        room = connection.reserve(Channel::call, sizeof bytes, kForever);
      }
      if (!room) throw std::runtime_error("the peer went away: " + connection.reason());
      std::memcpy(room, bytes, sizeof bytes);
      connection.commit(Channel::call, sizeof bytes);
    }
    if (!stalled) {
      smooth += Clock::now() - before;
      smoothMessages += i - first;
    }
  }
  double all = seconds(Clock::now() - start);
  receive(connection, Channel::call);
  double arrived = seconds(Clock::now() - start);
  printf(
      "  64 B messages         %8.2f M/s arrived; producer %.1f ns a message, waits for the consumer "
      "included\n",
      kBurst / arrived / 1e6, all / kBurst * 1e9);
  printf("  reserve + commit      %8.1f ns a message where the ring had room (%.0f%% of them)\n",
         seconds(smooth) / static_cast<double>(std::max<uint64_t>(smoothMessages, 1)) * 1e9,
         100.0 * static_cast<double>(smoothMessages) / kBurst);
}

void measureTransfers(Connection& connection, Region region) {
  std::vector<std::byte> local(kLargest, std::byte{2});
  for (size_t size = 4096; size <= kLargest; size *= 4) {
    double rate[2];
    for (int way = 0; way < 2; ++way) {
      uint64_t rounds = std::clamp<uint64_t>((size_t{512} << 20) / size, 2, 4000);
      auto start = Clock::now();
      for (uint64_t i = 0; i < rounds; ++i) {
        Transfer transfer = way == 0 ? connection.put(local.data(), region, 0, size)
                                     : connection.get(local.data(), region, 0, size);
        if (!connection.wait(transfer, kForever)) throw std::runtime_error("a transfer failed");
      }
      rate[way] = static_cast<double>(size * rounds) / seconds(Clock::now() - start) / 1e9;
    }
    printf("  %9zu KiB         put %6.2f GB/s   get %6.2f GB/s\n", size >> 10, rate[0], rate[1]);
  }
}

// What copies do: chunks of one large buffer, several under way, a message behind each.
void measureStreams(Connection& connection, Region region) {
  std::vector<std::byte> local(kLargest, std::byte{2});
  for (size_t chunk : {size_t{512} << 10, size_t{2} << 20, size_t{4} << 20}) {
    double rate[2];
    for (int way = 0; way < 2; ++way) {
      std::deque<Transfer> open;
      constexpr uint64_t kTotal = uint64_t{2} << 30;
      auto start = Clock::now();
      for (uint64_t at = 0; at < kTotal; at += chunk) {
        open.push_back(way == 0 ? connection.put(local.data() + at % kLargest, region, at % kLargest, chunk)
                                : connection.get(local.data() + at % kLargest, region, at % kLargest, chunk));
        if (way == 0) send(connection, Channel::call, &at, sizeof at);
        if (open.size() < 8 && at + chunk < kTotal) continue;
        for (; !open.empty() && (open.size() >= 8 || at + chunk >= kTotal); open.pop_front())
          if (!connection.wait(open.front(), kForever)) throw std::runtime_error("a transfer failed");
      }
      rate[way] = kTotal / seconds(Clock::now() - start) / 1e9;
    }
    printf("  %9zu KiB, 8 open  put %6.2f GB/s   get %6.2f GB/s\n", chunk >> 10, rate[0], rate[1]);
  }
}

void measure(const std::string& transport) {
  printf("%s\n", transport.c_str());
  fflush(stdout);
  auto [client, worker] = sockets(transport);
  pid_t server = fork();
  if (server < 0) throw std::runtime_error("fork");
  if (server == 0) {
    ::close(client);
    if (const char* program = std::getenv("GPUPOOL_PERF_WORKER")) {
      int inherited = dup(worker);  // without close-on-exec
      execlp(program, program, "--worker", transport.c_str(), std::to_string(inherited).c_str(), nullptr);
      perror(program);
      _exit(1);
    }
    _exit(runWorker(transport, worker));
  }
  ::close(worker);
  auto start = Clock::now();
  auto connection = connect(transport, client, {});
  printf("  connected in          %8.2f ms\n", seconds(Clock::now() - start) * 1e3);
  measureMessages(*connection);
  Region region;
  std::memcpy(&region, receive(*connection, Channel::control).data(), sizeof region);
  measureStreams(*connection, region);
  measureTransfers(*connection, region);
  connection->close();
  connection.reset();
  waitpid(server, nullptr, 0);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> transports(argv + 1, argv + argc);
  if (transports.size() == 3 && transports[0] == "--worker") {
    return runWorker(transports[1], std::atoi(transports[2].c_str()));
  }
  if (transports.empty())
    for (const auto& one : gpupool::kTransports) transports.emplace_back(one.name);
  try {
    for (auto& transport : transports) measure(transport);
  } catch (const std::exception& error) {
    fprintf(stderr, "transport-perf: %s\n", error.what());
    return 1;
  }
  return 0;
}
