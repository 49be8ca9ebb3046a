#include "server/front/options.h"

#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <filesystem>

namespace gpupool::server {
namespace {

// CACHE_DIRECTORY: systemd's, for a service that has one.
std::string cacheFolder() {
  for (auto [variable, below] : {std::pair{"CACHE_DIRECTORY", "/modules"},
                                 {"XDG_CACHE_HOME", "/gpupool/modules"},
                                 {"HOME", "/.cache/gpupool/modules"}})
    if (const char* folder = std::getenv(variable); folder != nullptr && folder[0] == '/')
      return std::string(folder) + below;
  return "/var/cache/gpupool/modules";
}

}  // namespace

const char ServerOptions::kPrefix[] = "GPUPOOL_SERVER_";
const char ServerOptions::kIntroduction[] =
    "gpupool-server: every option at its default. The environment (GPUPOOL_SERVER_<OPTION>) and the command "
    "line "
    "(--option) win over this file. Read from --config, or else /etc/gpupool/server.yaml.";

std::vector<options::Option> ServerOptions::table() {
  return {
      {"manager", manager, "ADDRESS", "The pool manager to join: HOST:PORT, or unix:PATH."},
      {"token-file", tokenFile, "FILE",
       "For a manager that wants tokens: a file of mode 0600 with the line 'servers: token'."},
      {"name", name, "NAME", "This server's name, unique in the pool. Empty: the host name."},
      {"state", state, "PATH",
       "Folder for what lasts as long as the server runs. Empty: $XDG_RUNTIME_DIR/gpupool, else "
       "/run/gpupool."},
      {"local", local, "PATH",
       "Unix socket for sessions of programs on this host. Empty: <state>/server-<name>.sock; 'none': no "
       "such "
       "socket."},
      {"listen", listen, "HOST:PORT",
       "Where sessions from the network connect; port 0 takes any free one. Empty: no network sessions. Bind "
       "it to "
       "the fabric's interface: the data plane is not encrypted."},
      {"advertise", advertise, "HOST",
       "The address that programs are told to connect to. Empty: the one of --listen, or the host name where "
       "that "
       "means every interface."},
      {"driver", driver, "PATH",
       "The CUDA driver library. Empty: the NVIDIA driver where it finds a GPU, else the software GPU."},
      {"worker", worker, "PATH", "The worker's executable. Empty: gpupool-worker beside gpupool-server."},
      {"warm", warm, "COUNT", "Workers kept ready for the sessions to come."},
      {"warm-contexts", warmContexts, "",
       "Keep one more worker per device that holds the device's context already: a session starts some 120 "
       "ms "
       "sooner, and about half a GiB of the device is taken."},
      {"network-device", networkDevice, "NAME",
       "The interface that sessions from the network use: lo, eth0, mlx5_0:1. Empty: all."},
      {"fabric", fabric, "LIBRARY",
       "The library that tells which RDMA devices there are and how their ports are (gpupool servers -v). "
       "'none': do "
       "not look."},
      {"network-wire", networkWire, "auto|tcp|rdma",
       "What sessions from the network go over: rdma where this server and the client have an RDMA device on "
       "the way, else tcp (auto), or one of them only. UCX_TLS in the environment of either wins."},
      {"module-cache", moduleCache, "PATH",
       "Folder for the device code that programs bring, one below it per tenant: code crosses the network "
       "once "
       "per server. Empty: $CACHE_DIRECTORY/modules, $XDG_CACHE_HOME/gpupool/modules, "
       "~/.cache/gpupool/modules or "
       "/var/cache/gpupool/modules, the first that is known; 'none': no cache."},
      {"module-cache-size", moduleCacheSize, "SIZE",
       "What is kept in --module-cache, of all tenants; code unused for longest goes first."},
      {"handshake-time", handshakeTime, "TIME", "Who opens a session answers each step within this time."},
      {"stop-time", stopTime, "TIME", "A worker that was told to stop is killed after this time."},
      {"client-stall-time", clientStallTime, "TIME",
       "The session of a program that does nothing for so long, not even say that it lives (stopped, in a "
       "debugger), ends. 0: never, as long as its machine answers."},
      {"driver-wait", driverWait, "TIME",
       "Give up, with the reason, when the driver cannot be used and no device was found for so long. 0: "
       "never, a "
       "driver that is broken may be repaired."},
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
  if (networkWire != "auto" && networkWire != "tcp" && networkWire != "rdma")
    throw options::OptionError("--network-wire: '" + networkWire + "' is neither auto, tcp nor rdma");
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
  if (fabric.empty()) throw options::OptionError("--fabric: name a library, or 'none'");
  if (local.empty()) local = state + "/server-" + name + ".sock";
  if (local == "none") local.clear();
  if (moduleCache.empty()) moduleCache = cacheFolder();
  if (moduleCache == "none") moduleCache.clear();
  if (local.size() > 107)
    throw options::OptionError("--local: '" + local + "' is longer than a Unix socket's 107");
}

}  // namespace gpupool::server
