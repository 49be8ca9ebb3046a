// Stands for an application with gpupool's library inside: opens a session as schema/holder.h says and prints
// what came.
//
//   application open [ROWS]        open through GPUPOOL_HOLDER, print the reply, exchange one byte with the
//   worker application hold TOOL [ROWS]   the same, with a holder of its own: TOOL hold --descriptor 3
//   application sleep SECONDS      print "ready" and its pid, and wait
// ROWS: the hash to claim, hexadecimal. Exit status: 0, or 10 + the reply's status, or 1.

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/descriptor_passing.h"
#include "schema/holder.h"

namespace {

using namespace gpupool::holder;

int connectHolder() {
  const char* path = std::getenv("GPUPOOL_HOLDER");
  sockaddr_un address{};
  const socklen_t size = path == nullptr ? 0 : socketAddress(path, address);
  if (size == 0) return -1;
  const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  return ::connect(socket, reinterpret_cast<sockaddr*>(&address), size) == 0 ? socket : -1;
}

int startHolder(const char* tool, pid_t* pid) {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) return -1;
  *pid = ::fork();
  if (*pid == 0) {
    ::dup2(pair[1], 3);
    ::execl(tool, tool, "hold", "--descriptor", "3", static_cast<char*>(nullptr));
    ::_exit(127);
  }
  ::close(pair[1]);
  return pair[0];
}

int receiveReply(int holder, OpenReply* reply) {
  const auto received = gpupool::receiveWithDescriptors(holder, std::as_writable_bytes(std::span(reply, 1)));
  if (received.bytes != sizeof *reply) return -2;
  return received.descriptors.empty() ? -1 : received.descriptors[0];
}

int open(int holder, const char* rows) {
  if (holder < 0) return std::fprintf(stderr, "application: no holder\n"), 1;
  OpenRequest request;
  request.rowsHash = rows != nullptr ? std::strtoull(rows, nullptr, 16) : 0x1234;
  request.pid = ::getpid();
  std::strcpy(request.command, "application");
  if (::send(holder, &request, sizeof request, 0) != sizeof request) return 1;
  OpenReply reply;
  const int session = receiveReply(holder, &reply);
  if (session == -2) return std::fprintf(stderr, "application: the holder is gone\n"), 1;
  if (reply.status != Status::ok) {
    std::printf("refused %u: %s\n", static_cast<unsigned>(reply.status), reply.text);
    return 10 + static_cast<int>(reply.status);
  }
  char answer[64] = {};
  const bool written = ::write(session, "e", 1) == 1;
  if (!written || ::read(session, answer, sizeof answer - 1) <= 0)
    return std::fprintf(stderr, "application: the worker is gone\n"), 1;
  std::printf("session on %s by %s, %u devices, worker says %s\n", reply.server, reply.transport,
              reply.deviceCount, answer);
  ::close(session);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  const std::string what = count > 1 ? words[1] : "";
  ::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (what == "open") return open(connectHolder(), count > 2 ? words[2] : nullptr);
  if (what == "hold" && count > 2) {
    pid_t pid = -1;
    const int holder = startHolder(words[2], &pid);
    const int status = open(holder, count > 3 ? words[3] : nullptr);
    ::close(holder);
    int ended = 0;
    ::waitpid(pid, &ended, 0);
    return status != 0 ? status : WIFEXITED(ended) ? WEXITSTATUS(ended) : 1;
  }
  if (what == "sleep" && count > 2) {
    std::printf("ready %d\n", ::getpid());
    for (unsigned left = static_cast<unsigned>(std::atoi(words[2])); left > 0;) left = ::sleep(left);
    return 0;
  }
  return 1;
}
