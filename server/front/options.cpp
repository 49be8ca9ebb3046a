#include "server/front/options.h"

#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <filesystem>

namespace gpupool::server {

std::vector<options::Option> ServerOptions::table() {
  return {
      {"manager", manager, "ADDRESS", "the pool manager to join: host:port, or unix:PATH"},
      {"name", name, "NAME", "this server's name, unique in the pool; empty: the host name"},
      {"state", state, "PATH",
       "folder for what lasts as long as the server runs; empty: $XDG_RUNTIME_DIR/gpupool, else "
       "/run/gpupool"},
      {"local", local, "PATH",
       "Unix socket for sessions of programs on this host; empty: <state>/server-<name>.sock; none: no such "
       "socket"},
      {"listen", listen, "HOST:PORT",
       "where sessions from the network connect; port 0: any free one; empty: no network sessions. Bind it "
       "to the "
       "fabric's interface: the data plane is not encrypted"},
      {"advertise", advertise, "HOST",
       "the address the pool tells programs for --listen; empty: the one listened on"},
      {"driver", driver, "PATH",
       "the CUDA driver library; empty: the NVIDIA driver where it finds a GPU, else the software GPU"},
      {"worker", worker, "PATH", "the worker's executable; empty: gpupool-worker beside this one"},
      {"warm", warm, "COUNT", "workers kept ready for sessions to come"},
      {"network-device", networkDevice, "NAME",
       "the interface that sessions from the network use: lo, eth0, mlx5_0:1; empty: all"},
      {"module-cache", moduleCache, "PATH",
       "folder for device code, one below it per tenant; empty: no cache"},
      {"handshake-time", handshakeTime, "TIME", "a peer that opens a session answers within this"},
      {"stop-time", stopTime, "TIME", "a worker told to stop is killed after this"},
  };
}

void ServerOptions::complete() {
  if (manager.empty()) throw options::OptionError("--manager: name the pool manager, host:port or unix:PATH");
  if (name.empty()) {
    char host[HOST_NAME_MAX + 1] = "";
    if (gethostname(host, sizeof host - 1) != 0 || host[0] == '\0')
      throw options::OptionError("--name: this machine has no host name; give the server one");
    name = host;
  }
  if (name.find('/') != std::string::npos)
    throw options::OptionError("--name: '" + name + "' contains a '/'");
  if (worker.empty()) {
    std::error_code error;
    worker = std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / "gpupool-worker";
  }
  if (state.empty()) {
    const char* runtime = std::getenv("XDG_RUNTIME_DIR");
    state = runtime != nullptr && *runtime != '\0' ? std::string(runtime) + "/gpupool" : "/run/gpupool";
  }
  if (local.empty()) local = state + "/server-" + name + ".sock";
  if (local == "none") local.clear();
  if (local.size() > 107)
    throw options::OptionError("--local: '" + local + "' is longer than a Unix socket's 107");
}

}  // namespace gpupool::server
