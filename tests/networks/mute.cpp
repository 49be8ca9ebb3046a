// A client of the manager that asks and asks and never reads an answer, or reads and never says that it has
// finished with one, so that the manager keeps them:
//   network_mute unix:PATH SECONDS [reads]
// Says how much it could send before the manager took no more, and ends.

#include <capnp/message.h>
#include <capnp/rpc.capnp.h>
#include <capnp/serialize.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "schema/pool.capnp.h"

namespace {

using Clock = std::chrono::steady_clock;

kj::Array<capnp::word> bootstrapRequest() {
  capnp::MallocMessageBuilder message;
  message.initRoot<capnp::rpc::Message>().initBootstrap().setQuestionId(0);
  return capnp::messageToFlatArray(message);
}

// leases() of the capability that question 0 promised.
kj::Array<capnp::word> listRequest(uint32_t question) {
  constexpr uint64_t kManager = capnp::typeId<gpupool::schema::Manager>();
  constexpr uint16_t kServers = 7;
  capnp::MallocMessageBuilder message;
  auto call = message.initRoot<capnp::rpc::Message>().initCall();
  call.setQuestionId(question);
  call.initTarget().initPromisedAnswer().setQuestionId(0);
  call.setInterfaceId(kManager);
  call.setMethodId(kServers);
  call.initParams();
  return capnp::messageToFlatArray(message);
}

void discardAnswers(int socket) {
  static char bytes[1 << 16];
  while (::recv(socket, bytes, sizeof bytes, MSG_DONTWAIT) > 0) continue;
}

// False: nothing could be sent for `patienceMs`, or the manager has closed the connection.
bool sendAll(int socket, kj::ArrayPtr<const kj::byte> bytes, int patienceMs, bool reads) {
  while (bytes.size() != 0) {
    ssize_t sent = ::send(socket, bytes.begin(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes = bytes.slice(static_cast<size_t>(sent), bytes.size());
      continue;
    }
    pollfd room{socket, static_cast<short>(reads ? POLLOUT | POLLIN : POLLOUT), 0};
    if (errno != EAGAIN || ::poll(&room, 1, patienceMs) <= 0) return false;
    if (reads) discardAnswers(socket);
  }
  return true;
}

}  // namespace

int main(int count, char** words) {
  const bool reads = count == 4 && std::strcmp(words[3], "reads") == 0;
  if ((count != 3 && !reads) || std::strncmp(words[1], "unix:", 5) != 0)
    return std::fprintf(stderr, "usage: network_mute unix:PATH SECONDS [reads]\n"), 2;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, words[1] + 5, sizeof address.sun_path - 1);
  int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    return std::perror("connect"), 1;
  const auto end = Clock::now() + std::chrono::duration<double>(std::strtod(words[2], nullptr));
  uint64_t requests = 0, bytes = 0;
  bool taken = sendAll(socket, bootstrapRequest().asBytes(), 1000, reads);
  while (taken && Clock::now() < end) {
    auto request = listRequest(static_cast<uint32_t>(requests + 1));
    taken = sendAll(socket, request.asBytes(), 1000, reads);
    if (taken) ++requests, bytes += request.asBytes().size();
  }
  std::printf("%llu requests, %llu bytes, %s\n", static_cast<unsigned long long>(requests),
              static_cast<unsigned long long>(bytes), taken ? "all taken" : "then no more was taken");
  return 0;
}
