// gpupool-spawner: starts workers under user ids of their own, for gpupool-server (spawner.h).
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <string_view>

#include "server/spawner/spawner.h"

namespace {

constexpr const char* kUsage =
    "usage: gpupool-spawner --users FIRST-LAST\n"
    "Started by gpupool-server --worker-users: starts its workers under user ids of that range.\n";

bool isServersSocket() {
  int type = 0;
  socklen_t size = sizeof type;
  return getsockopt(gpupool::server::kSpawnerSocket, SOL_SOCKET, SO_TYPE, &type, &size) == 0 &&
         type == SOCK_SEQPACKET;
}

}  // namespace

int main(int count, char** words) {
  using namespace gpupool::server;
  const auto users =
      count == 3 && std::string_view(words[1]) == "--users" ? parseUserRange(words[2]) : std::nullopt;
  if (!users || !isServersSocket()) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  // It ends when the server has ended its workers, or is gone: its socket closes then.
  signal(SIGTERM, SIG_IGN);
  signal(SIGINT, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  try {
    Spawner spawner(*users);
    spawner.serve(kSpawnerSocket);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpupool-spawner: %s\n", error.what());
    return 1;
  }
}
