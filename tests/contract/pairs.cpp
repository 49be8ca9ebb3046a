#include "pairs.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "transports/faulty.h"
#include "transports/ucx_wire.h"

namespace gpupool::transport::testing {

namespace {

// Of this machine, on an interface with an RDMA device; 0: none.
in_addr_t rdmaAddress() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return 0;
  in_addr_t found = 0;
  for (ifaddrs* entry = all; entry && found == 0; entry = entry->ifa_next) {
    if (!entry->ifa_addr || entry->ifa_addr->sa_family != AF_INET || rdmaDeviceOf(entry->ifa_name).empty())
      continue;
    found = reinterpret_cast<sockaddr_in*>(entry->ifa_addr)->sin_addr.s_addr;
  }
  freeifaddrs(all);
  return found;
}

bool startsWith(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

std::string inner(const std::string& transport) {
  return startsWith(transport, "faulty-") ? transport.substr(7) : transport;
}

bool haveUcx() {
  const char* name = std::getenv("GPUPOOL_TEST_NO_UCX");
  if (name && *name == '1') return false;
  void* library = dlopen("libucp.so.0", RTLD_LAZY | RTLD_NOLOAD);
  return library != nullptr || access("/usr/lib/x86_64-linux-gnu/libucp.so.0", R_OK) == 0 ||
         access("/usr/lib/aarch64-linux-gnu/libucp.so.0", R_OK) == 0;
}

std::pair<int, int> tcpSockets(in_addr_t host) {
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = host;
  socklen_t length = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw std::runtime_error("test: cannot listen");
  }
  int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::connect(client, reinterpret_cast<sockaddr*>(&address), length) != 0) {
    throw std::runtime_error("test: cannot connect");
  }
  int worker = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  ::close(listener);
  return {client, worker};
}

std::unique_ptr<Connection> wrap(const std::string& transport, std::unique_ptr<Connection> connection,
                                 uint64_t seed) {
  if (!startsWith(transport, "faulty-")) return connection;
  return faulty(std::move(connection), Faults{.seed = seed, .delay = 20us});
}

// GPUPOOL_TEST_TRANSPORTS: only these, separated by commas.
std::vector<std::string> wanted(const std::vector<std::string>& names) {
  const char* only = std::getenv("GPUPOOL_TEST_TRANSPORTS");
  std::vector<std::string> chosen;
  std::istringstream list(only ? only : "");
  for (std::string name; std::getline(list, name, ',');)
    if (std::find(names.begin(), names.end(), name) != names.end()) chosen.push_back(name);
  return only ? chosen : names;
}

std::string implementation(const std::string& name) { return name == "ucx-rdma" ? "ucx" : name; }

Options suited(const std::string& name, Options options) {
  if (name == "ucx-rdma") options.wire = NetworkWire::rdma;
  return options;
}

}  // namespace

std::unique_ptr<Connection> acceptAs(const std::string& transport, int bootstrap, const Options& options) {
  return accept(implementation(transport), bootstrap, suited(transport, options));
}

std::unique_ptr<Connection> connectAs(const std::string& transport, int bootstrap, const Options& options) {
  return connect(implementation(transport), bootstrap, suited(transport, options));
}

bool haveRdma() {
  static const bool have = haveUcx() && rdmaAddress() != 0;
  return have;
}

std::vector<std::string> allTransports() {
  std::vector<std::string> names = {"shm", "loopback"};
  if (haveUcx()) names.push_back("ucx");
  for (size_t i = 0, plain = names.size(); i < plain; ++i) names.push_back("faulty-" + names[i]);
  if (haveRdma()) names.push_back("ucx-rdma");
  return wanted(names);
}

std::vector<std::string> processTransports() {
  std::vector<std::string> names = {"shm"};
  if (haveUcx()) names.push_back("ucx");
  if (haveRdma()) names.push_back("ucx-rdma");
  return wanted(names);
}

std::pair<int, int> bootstrapSockets(const std::string& transport) {
  if (transport == "ucx") return tcpSockets(htonl(INADDR_LOOPBACK));
  if (transport == "ucx-rdma") return tcpSockets(rdmaAddress());
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw std::runtime_error("test: socketpair");
  return {ends[0], ends[1]};
}

Pair connectPair(const std::string& transport, const Options& options) {
  Pair pair;
  std::string name = inner(transport);
  if (name == "loopback") {
    std::tie(pair.client, pair.worker) = loopbackPair(options);
  } else {
    auto [client, worker] = bootstrapSockets(name);
    std::exception_ptr failure;
    std::thread accepting([&, worker = worker] {
      try {
        pair.worker = acceptAs(name, worker, options);
      } catch (...) {
        failure = std::current_exception();
      }
    });
    try {
      pair.client = connectAs(name, client, options);
    } catch (...) {
      accepting.join();
      throw;
    }
    accepting.join();
    if (failure) std::rethrow_exception(failure);
  }
  return {wrap(transport, std::move(pair.client), 11), wrap(transport, std::move(pair.worker), 22)};
}

ForkedPeer::ForkedPeer(const std::string& transport, const Options& options,
                       const std::function<void(Connection&)>& peer) {
  auto [client, worker] = bootstrapSockets(transport);
  process = fork();
  if (process == 0) {
    ::close(worker);
    int status = 3;
    try {
      auto connection = connectAs(transport, client, options);
      peer(*connection);
      connection->close();
      status = 0;
    } catch (const std::exception& error) {
      fprintf(stderr, "forked peer: %s\n", error.what());
    }
    _exit(status);
  }
  ::close(client);
  connection = acceptAs(transport, worker, options);
}

void ForkedPeer::kill() { ::kill(process, SIGKILL); }

ForkedPeer::~ForkedPeer() {
  connection.reset();
  if (process > 0) {
    ::kill(process, SIGKILL);
    waitpid(process, nullptr, 0);
  }
}

bool readable(int descriptor, std::chrono::milliseconds time) {
  pollfd waiting{descriptor, POLLIN, 0};
  return poll(&waiting, 1, static_cast<int>(time.count())) == 1;
}

bool sendBytes(Connection& connection, Channel channel, const void* bytes, size_t size, Deadline deadline) {
  std::byte* room = connection.reserve(channel, size, deadline);
  if (!room) return false;
  if (size) std::memcpy(room, bytes, size);
  connection.commit(channel, size);
  return true;
}

namespace {
constexpr uint64_t mix(uint64_t x) {
  x ^= x >> 31;
  x *= 0x9E3779B97F4A7C15u;
  return x ^ (x >> 29);
}

// The pattern, a piece at a time (a call for every word takes a sanitizer minutes), until `use` returns
// false.
template <typename Use>
bool forPattern(size_t size, uint64_t seed, Use use) {
  uint64_t words[512];
  const uint64_t base = mix(seed * 2 + 1);
  for (size_t at = 0; at < size; at += sizeof words) {
    const size_t length = std::min(sizeof words, size - at);
    for (size_t i = 0; i < length; i += 8) words[i / 8] = mix(base + at + i);
    if (!use(at, words, length)) return false;
  }
  return true;
}
}  // namespace

void fillPattern(void* bytes, size_t size, uint64_t seed) {
  forPattern(size, seed, [&](size_t at, const uint64_t* words, size_t length) {
    std::memcpy(static_cast<std::byte*>(bytes) + at, words, length);
    return true;
  });
}

bool hasPattern(const void* bytes, size_t size, uint64_t seed) {
  return forPattern(size, seed, [&](size_t at, const uint64_t* words, size_t length) {
    return std::memcmp(static_cast<const std::byte*>(bytes) + at, words, length) == 0;
  });
}

uint64_t checksum(const void* bytes, size_t size) {
  const auto* in = static_cast<const unsigned char*>(bytes);
  uint64_t sum = 14695981039346656037u;
  for (size_t i = 0; i < size; ++i) sum = (sum ^ in[i]) * 1099511628211u;
  return sum;
}

}  // namespace gpupool::transport::testing
