#include "server/front/options.h"

#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/memory_info.h"
#include "schema/server_name.h"

namespace gpupool::server {
namespace {

constexpr std::chrono::milliseconds kShortestTurn{100};
constexpr std::chrono::hours kLongestRestart{1};
constexpr uint32_t kMostWarm = 256;

// CACHE_DIRECTORY: systemd's, for a service that has one.
std::string cacheFolder() {
  for (auto [variable, below] : {std::pair{"CACHE_DIRECTORY", "/modules"},
                                 {"XDG_CACHE_HOME", "/gpupool/modules"},
                                 {"HOME", "/.cache/gpupool/modules"}})
    if (const char* folder = std::getenv(variable); folder != nullptr && folder[0] == '/')
      return std::string(folder) + below;
  return "/var/cache/gpupool/modules";
}

// The same for every user of this machine, whoever asks.
std::string lockFolder() {
  struct stat status{};
  const bool open =
      stat("/run/lock", &status) == 0 && S_ISDIR(status.st_mode) && (status.st_mode & 0777) == 0777;
  return open ? "/run/lock" : "/tmp";
}

uint64_t suspendBudget(const std::string& text) {
  if (text.empty()) {
    std::ifstream file("/proc/meminfo");
    return readMemoryInfo(file).total / 4;
  }
  try {
    return options::parseBytes(text).value;
  } catch (const options::OptionError& error) {
    throw options::OptionError(std::string("--suspend-memory: ") + error.what());
  }
}

uint32_t readOvercommit(const std::string& text) {
  constexpr double kMost = 8;
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  if (error != std::errc() || rest != end || !(value >= 1 && value <= kMost))
    throw options::OptionError("--overcommit: '" + text + "' is not a number from 1.0 to 8.0");
  return static_cast<uint32_t>(std::lround(value * 100));
}

}  // namespace

const char ServerOptions::kPrefix[] = "GPUPOOL_SERVER_";
const char ServerOptions::kIntroduction[] =
    "Configuration of gpupool-server. Every option is shown at its default. The environment variable "
    "GPUPOOL_SERVER_<OPTION> overrides this file, and the command line (--option) overrides both. The file "
    "that is read is the one that --config names, or else /etc/gpupool/server.yaml. Times are written as "
    "500ms, 2s, 5m or 1h, sizes as 512MiB or 20GiB.";

std::vector<options::Option> ServerOptions::table() {
  return {
      {"manager", manager, "ADDRESS",
       "The address of the pool manager: HOST:PORT, or unix:PATH. Several "
       "addresses, separated by commas, are tried in turn."},
      {"token-file", tokenFile, "FILE",
       "A file with this server's token, for a manager that requires tokens: the line 'servers: token', "
       "file mode 0600. Lines 'certificate sha256:...' name the manager's certificate: then no other is "
       "trusted, and TLS is used."},
      {"tls-ca", tlsCa, "FILE",
       "The authorities (PEM) that issue the manager's certificate, for its host's name, where a site has "
       "some: TLS is used. Empty: only the certificates that the token file names."},
      {"name", name, "NAME",
       "The name of this server, unique in the pool: letters, digits and . _ - , at most 63. Empty: the host "
       "name."},
      {"state", state, "PATH",
       "The folder for sockets and other files that exist while the server runs. Empty: "
       "$XDG_RUNTIME_DIR/gpupool, else /run/gpupool."},
      {"local", local, "PATH",
       "The Unix socket for programs on this host. Empty: <state>/server-<name>.sock. 'none': no such "
       "socket."},
      {"listen", listen, "HOST:PORT",
       "The TCP address for programs on other machines. Port 0: any free port. Empty: no sessions from the "
       "network. Session data is not encrypted: use the interface of a network that you trust."},
      {"advertise", advertise, "HOST",
       "The host name or address that programs on other machines connect to. Empty: the host of --listen, "
       "or this machine's host name if that means every interface."},
      {"driver", driver, "PATH",
       "The CUDA driver library. Empty: NVIDIA's driver where it finds a GPU, else the software GPU."},
      {"devices", devices, "UUID,...",
       "The GPUs that this server offers, as nvidia-smi -L and gpupool devices write them: GPU-... Empty: "
       "every GPU. "
       "A GPU that another server of this machine holds is left out in any case."},
      {"device-locks", deviceLocks, "PATH",
       "Folder with a lock file per GPU, and one for --worker-users, by which the servers of this machine "
       "keep apart: the same for all of them. "
       "Empty: /run/lock where every user may write there, else /tmp."},
      {"worker", worker, "PATH",
       "The worker's executable. Empty: gpupool-worker in the folder of gpupool-server."},
      {"workers", workers, "PATH",
       "The folder with worker executables of other versions of gpupool: a program whose client is of such "
       "a version gets that worker, so that clients need not be upgraded together with this server "
       "(docs/admin.md). It is read when the server starts and after SIGHUP (systemctl reload "
       "gpupool-server), and every program in it is run: only who administers the server may write there. "
       "Empty: ../lib/gpupool/workers from the folder "
       "of gpupool-server. 'none': this server's own worker alone."},
      {"walls", walls, "auto|required|off|log",
       "What is put around workers, which run tenants' code, so that they reach nothing but their own "
       "(docs/security.md). auto: what this kernel has. required: all, or this server does not start, and "
       "says "
       "what is missing. off: nothing. log: nothing is refused, and what would be is logged; to find out "
       "what a "
       "driver needs. `gpupool servers -v` lists what stands."},
      {"worker-users", workerUsers, "FIRST-LAST",
       "A range of user ids that nobody else uses on this machine, for example 2000000000-2000001023; a "
       "server whose range meets another server's does not start (--device-locks). Each worker gets "
       "one of its own, and the group FIRST. The server has to be started with the capabilities CAP_SETUID, "
       "CAP_SETGID "
       "and CAP_KILL (docs/security.md); gpupool-spawner keeps them, the server gives them up. Empty: "
       "workers have "
       "the user of the server."},
      {"warm", warm, "COUNT",
       "The number of workers that are started ahead of time and wait for sessions, at most 256. On a "
       "machine with several GPUs they wait with those of the latest leases (docs/security.md)."},
      {"warm-contexts", warmContexts, "",
       "For each device, one more worker waits that has made its CUDA context already. A session then "
       "starts about 120 ms sooner, and the context takes about half a GiB of the device's memory."},
      {"network-device", networkDevice, "NAME",
       "The network device for sessions from the network, for example eth0, lo or mlx5_0:1. Empty: all."},
      {"fabric", fabric, "LIBRARY",
       "The library that reports the RDMA devices of this machine and the state of their ports, for "
       "`gpupool servers -v`. 'none': do not look for RDMA devices."},
      {"nvml", nvml, "LIBRARY",
       "The library that reports the load, memory, temperature, power and errors of the GPUs, for `gpupool "
       "devices -v`. A GPU with an error that no program causes is leased no more. Empty: "
       "libnvidia-ml.so.1 beside the CUDA driver, and none for software GPUs. 'none': do not ask."},
      {"network-wire", networkWire, "auto|tcp|rdma",
       "What sessions from the network use: rdma, tcp, or auto (RDMA where this server and the client both "
       "have an RDMA device on the route, else TCP). UCX_TLS in the environment of either side overrides "
       "this."},
      {"module-cache", moduleCache, "PATH",
       "The folder in which device code of programs is cached, so that it crosses the network only once. It "
       "has a subfolder for each tenant. Empty: $CACHE_DIRECTORY/modules, $XDG_CACHE_HOME/gpupool/modules, "
       "~/.cache/gpupool/modules or /var/cache/gpupool/modules, the first that is known. 'none': no cache."},
      {"module-cache-size", moduleCacheSize, "SIZE",
       "The size limit of --module-cache, for all tenants together. Code that was unused for longest is "
       "removed first."},
      {"suspend-memory", suspendMemory, "SIZE",
       "So much of this machine's memory may be used to keep what suspended leases have moved off their "
       "GPUs, pinned and taken when it is needed. Empty: a quarter of the machine's memory. 0: no lease can "
       "be suspended on this server."},
      {"protect-memory", protectMemory, "SIZE",
       "So much of this machine's memory may be used to keep the checkpoints of protected sessions (gpupool "
       "run "
       "--protect): of each the last one, and what has changed while the next one is made. A session whose "
       "checkpoint does not fit is not protected."},
      {"suspend-folder", suspendFolder, "PATH",
       "The folder of a fast local disk for what exceeds --suspend-memory. The files in it have no names, "
       "and "
       "are gone with the leases. Empty: none; a lease that does not fit is not suspended."},
      {"suspend-memory-ahead", suspendMemoryAhead, "SIZE",
       "So much of --suspend-memory is taken when the server starts, which makes the first suspension faster "
       "by about a second for each 4 GiB. It costs a CUDA context on each GPU, about half a GiB. 0: "
       "nothing."},
      {"checkpoint-folder", checkpointFolder, "PATH",
       "The folder in which `gpupool checkpoint` has sessions of this server written, each checkpoint a "
       "folder "
       "in it. It may be one that several servers share. Whoever may lease can fill its disk. Empty: none is "
       "written."},
      {"overcommit", overcommit, "NUMBER",
       "So many times the memory of each GPU may be leased, from 1.0 to 8.0. Above 1.0, leases take turns: "
       "those that have to wait for theirs, or do nothing, are in --suspend-memory and --suspend-folder, "
       "which together must hold at least what exceeds the GPUs. 1.0: each lease has its memory for itself."},
      {"turn-time", turnTime, "TIME",
       "With --overcommit: a lease that others wait for has its GPUs at least for so long. Its turn is "
       "longer "
       "where moving its memory takes more than a tenth of that, and by the shares of the leases."},
      {"handshake-time", handshakeTime, "TIME",
       "The longest time that a client may take for each step of opening a session."},
      {"stop-time", stopTime, "TIME", "A worker that was asked to stop is killed after this time."},
      {"restart-time", restartTime, "TIME",
       "When this server's process dies, or is restarted (SIGUSR2), sessions go on without it for so long, "
       "and the server that is started next goes on with them (docs/sessions.md). 0: they end with it."},
      {"client-stall-time", clientStallTime, "TIME",
       "End the session of a program that has shown no sign of life for this long (stopped, in a debugger). "
       "0: never, as long as the program's machine answers."},
      {"driver-wait", driverWait, "TIME",
       "Give up, and say why, when no usable driver and no device was found for this long. 0: keep trying, "
       "since a broken driver may be repaired."},
  };
}

std::vector<std::string> ServerOptions::deviceList() const { return options::commaSeparated(devices); }

std::optional<UserRange> ServerOptions::userRange() const { return parseUserRange(workerUsers); }

server::walls::Mode ServerOptions::wallsMode() const { return *server::walls::modeNamed(walls); }

void ServerOptions::complete() {
  if (manager.empty()) throw options::OptionError("--manager: name the pool manager, host:port or unix:PATH");
  if (name.empty()) {
    char host[HOST_NAME_MAX + 1] = "";
    if (gethostname(host, sizeof host - 1) != 0 || host[0] == '\0')
      throw options::OptionError("--name: this machine has no host name; give the server one");
    name = host;
  }
  if (networkWire != "auto" && networkWire != "tcp" && networkWire != "rdma")
    throw options::OptionError("--network-wire: '" + networkWire + "' is not auto, tcp or rdma");
  if (!server::walls::modeNamed(walls))
    throw options::OptionError("--walls: '" + walls + "' is not auto, required, off or log");
  if (warm > kMostWarm)
    throw options::OptionError("--warm: " + std::to_string(warm) + " is more than " +
                               std::to_string(kMostWarm) +
                               ": each is a process with a CUDA driver of its own");
  if (!workerUsers.empty() && !userRange())
    throw options::OptionError("--worker-users: '" + workerUsers +
                               "' is no range FIRST-LAST of user ids from " +
                               std::to_string(kFirstWorkerUser) + " to " + std::to_string(kLastWorkerUser) +
                               ", of at most " + std::to_string(kMostWorkerUsers));
  if (!schema::isServerName(name))
    throw options::OptionError("--name: '" + name + "' is no name for a server: " + schema::kServerNameRule);
  std::error_code error;
  const auto beside = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  if (worker.empty()) worker = beside / "gpupool-worker";
  if (workers.empty()) workers = beside.parent_path() / "lib/gpupool/workers";
  if (workers == "none") workers.clear();
  if (state.empty()) {
    const char* runtime = std::getenv("XDG_RUNTIME_DIR");
    state = runtime != nullptr && *runtime != '\0' ? std::string(runtime) + "/gpupool" : "/run/gpupool";
  }
  state = std::filesystem::absolute(state).lexically_normal().string();
  if (deviceLocks.empty()) deviceLocks = lockFolder();
  for (const std::string& uuid : deviceList())
    if (uuid.size() != 40 || strncasecmp(uuid.c_str(), "GPU-", 4) != 0)
      throw options::OptionError("--devices: '" + uuid +
                                 "' is no GPU's UUID; `gpupool devices` and nvidia-smi -L "
                                 "list them");
  if (fabric.empty()) throw options::OptionError("--fabric: name a library, or 'none'");
  if (local.empty()) local = state + "/server-" + name + ".sock";
  if (local == "none") local.clear();
  if (moduleCache.empty()) moduleCache = cacheFolder();
  if (moduleCache == "none") moduleCache.clear();
  suspendBytes = suspendBudget(suspendMemory);
  if (restartTime > kLongestRestart)
    throw options::OptionError("--restart-time: " + options::formatTime(restartTime) + " is more than " +
                               options::formatTime(kLongestRestart));
  if (suspendMemoryAhead.value > suspendBytes)
    throw options::OptionError("--suspend-memory-ahead: " + options::formatBytes(suspendMemoryAhead) +
                               " is more than --suspend-memory, " + options::formatBytes({suspendBytes}));
  overcommitPercent = readOvercommit(overcommit);
  if (turnTime < kShortestTurn)
    throw options::OptionError("--turn-time: " + options::formatTime(turnTime) + " is less than " +
                               options::formatTime(kShortestTurn));
  if (overcommitPercent > 100 && suspendBytes == 0)
    throw options::OptionError("--overcommit: leases cannot take turns where --suspend-memory is 0");
  if (!suspendFolder.empty())
    suspendFolder = std::filesystem::absolute(suspendFolder).lexically_normal().string();
  if (!checkpointFolder.empty()) {
    checkpointFolder = std::filesystem::absolute(checkpointFolder).lexically_normal().string();
    if (checkpointFolder.size() > 1 && checkpointFolder.back() == '/') checkpointFolder.pop_back();
  }
  if (local.size() > 107)
    throw options::OptionError("--local: '" + local + "' is longer than a Unix socket's 107");
}

}  // namespace gpupool::server
