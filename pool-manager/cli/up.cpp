// gpupool up. The process that stays is the supervisor: in the foreground it is this one; with --detach a
// child in a session of its own, which tells this one through a pipe how the start went.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>

#include "base/log.h"
#include "base/transport_names.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/cli/holder_process.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/supervisor.h"

namespace gpupool::cli {
namespace {

const Help kUpHelp = {
    "gpupool up [options]",
    "Starts a pool on this machine: gpupool-manager and gpupool-server, in a private folder. It offers the "
    "GPUs of NVIDIA's driver, or a software GPU if there is none. With --detach the command returns when "
    "programs can run; otherwise it stays in the foreground until Ctrl-C. If a pool is up already, it does "
    "nothing.",
    "GPUPOOL_STATE: the folder of this machine's pool, instead of $XDG_RUNTIME_DIR/gpupool or "
    "/tmp/gpupool-<uid>. GPUPOOL_LOG: error, warning, info or debug.",
    "0: the pool is up (--detach), was up already, or was stopped by a signal. 1: the pool could not start, "
    "or has failed. 2: the command line is wrong.",
    "  gpupool up --detach\n"
    "  gpupool up --software 2 --transport ucx\n"
    "  gpupool up --port 4780 --listen 0.0.0.0    # other machines may lease too\n"};

struct UpOptions {
  bool detach = false;
  std::string transport{kTransports[0].name};
  uint32_t software = 0;
  uint32_t port = 0;
  std::string listen = "127.0.0.1";
  std::string networkDevice, tokens, httpListen;
  std::string tls = "auto", tlsCertificate, tlsKey;
  std::string networkWire;
  std::string state, name, driver;
  uint32_t warm = 2;
  std::chrono::milliseconds wait{60'000};

  std::vector<options::Option> table() {
    return {
        {"detach", detach, "", "Return when the pool is ready. It keeps running in the background.", true},
        {"transport", transport, transportChoices("|"),
         "How programs on this machine reach the server: shm (shared memory), or ucx (the network stack).",
         true},
        {"software", software, "N",
         "Offer N software GPUs, even if there is an NVIDIA driver. 0: one, only if there is none.", true},
        {"port", port, "PORT",
         "The manager's TCP port, so that other machines can lease. 0: this machine only.", true},
        {"tokens", tokens, "FILE",
         "With --port: a file of tokens (lines 'tenant: token', file mode 0600). Other machines must prove "
         "that they know one of them.",
         true},
        {"tls", tls, "auto|off",
         "As the manager's: with --tokens and an open --listen there is TLS, or it is off.", true},
        {"tls-certificate", tlsCertificate, "FILE",
         "The manager's certificate (PEM); `gpupool-manager certificate` makes one. Empty: none.", true},
        {"tls-key", tlsKey, "FILE", "Its key (PEM).", true},
        {"http-listen", httpListen, "HOST:PORT",
         "The manager's address for REST and /metrics, for example 127.0.0.1:4781. Without --tokens whoever "
         "reaches it may do everything, other users of this machine too. Empty: none.",
         true},
        {"listen", listen, "HOST", "The address for --port and for ucx sessions. 0.0.0.0: every interface.",
         true},
        {"network-device", networkDevice, "NAME",
         "The network device that ucx uses on the server, for example eth0, lo or mlx5_0:1.", true},
        {"network-wire", networkWire, "auto|tcp|rdma",
         "What ucx uses: rdma, tcp, or auto (RDMA where both ends have an RDMA device on the route, else "
         "TCP).",
         true},
        {"warm", warm, "N", "The number of workers that are started ahead of time and wait for sessions.",
         true},
        {"name", name, "NAME", "The server's name in the pool. Empty: the host name.", true},
        {"driver", driver, "PATH",
         "The CUDA driver library. Empty: NVIDIA's driver where it finds a GPU, else the software GPU.",
         true},
        {"state", state, "DIR",
         "The folder for the pool's sockets, store and process list. Empty: as GPUPOOL_STATE says.", true},
        {"wait", wait, "TIME", "How long to wait for the pool to become ready.", true},
    };
  }
};

std::string executable(const char* name) {
  const std::string path = executableDirectory() + "/" + name;
  if (::access(path.c_str(), X_OK) != 0)
    throw CommandError(kExitFailure,
                       path +
                           " is missing: this installation has the client's part alone, which brings up no "
                           "pool; name another machine's by --manager or GPUPOOL_MANAGER");
  return path;
}

std::string hostPort(const std::string& host, uint32_t port) {
  return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);
}

std::string absolutePath(const std::string& path) {
  char here[PATH_MAX];
  return path.starts_with('/') || ::getcwd(here, sizeof here) == nullptr ? path : here + ("/" + path);
}

PoolPlan makePlan(const UpOptions& options, const PoolDirectory& directory) {
  PoolPlan plan;
  plan.wait = options.wait;
  plan.managerAddress = "unix:" + directory.file(kManagerSocket);
  // The configuration files of this machine's own services are not for this pool.
  plan.manager = {executable("gpupool-manager"),  "--config", "/dev/null",           "--socket",
                  directory.file(kManagerSocket), "--store",  directory.file(kStore)};
  if (options.port != 0)
    plan.manager.insert(plan.manager.end(), {"--listen", hostPort(options.listen, options.port)});
  if (!options.httpListen.empty())
    plan.manager.insert(plan.manager.end(), {"--http-listen", options.httpListen});
  if (!options.tokens.empty())
    plan.manager.insert(plan.manager.end(), {"--tokens", absolutePath(options.tokens)});
  plan.manager.insert(plan.manager.end(), {"--tls", options.tls});
  if (!options.tlsCertificate.empty())
    plan.manager.insert(plan.manager.end(), {"--tls-certificate", absolutePath(options.tlsCertificate),
                                             "--tls-key", absolutePath(options.tlsKey)});
  const bool local = findTransport(options.transport)->reach == TransportFacts::Reach::sameHost;
  plan.server = {executable("gpupool-server"),
                 "--config",
                 "/dev/null",
                 "--manager",
                 plan.managerAddress,
                 "--state",
                 directory.file(kServerFolder),
                 "--local",
                 local ? directory.file(kServerSocket) : "none",
                 "--warm",
                 std::to_string(options.warm)};
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) plan.server.insert(plan.server.end(), {name, value});
  };
  add("--name", options.name);
  add("--listen", hostPort(options.listen, 0));  // sessions may ask for ucx on this machine too
  add("--network-device", options.networkDevice);
  add("--network-wire", options.networkWire);
  add("--driver", options.software != 0 ? softwareDriver() : options.driver);
  if (options.software != 0)
    plan.serverEnvironment.push_back("GPUPOOL_SOFT_DEVICES=" + std::to_string(options.software));
  return plan;
}

void check(const UpOptions& options) {
  checkTransport(options.transport);
  if (options.tls != "auto" && options.tls != "off") throw options::OptionError("--tls: auto or off");
  if (options.tlsCertificate.empty() != options.tlsKey.empty())
    throw options::OptionError("--tls-certificate and --tls-key: give both or neither");
  if (options.port > 65535) throw options::OptionError("--port: 1 to 65535");
  if (options.software > 64) throw options::OptionError("--software: at most 64");
  if (options.software != 0 && !options.driver.empty())
    throw options::OptionError("--software and --driver contradict each other");
  if (!options.tokens.empty()) readTokens(options.tokens);  // that it cannot be read is told here
  if (options.software != 0 && ::access(softwareDriver().c_str(), R_OK) != 0)
    throw CommandError(kExitFailure, softwareDriver() + " is missing: this installation has no software GPU");
}

// Another process has the lock: its pool may be up, or on its way.
bool otherIsReady(const PoolDirectory& directory, const PoolPlan& plan) {
  const auto until = std::chrono::steady_clock::now() + plan.wait;
  do {
    try {
      for (const ListedServer& server : ManagerQuery(std::vector{plan.managerAddress}, 1000).servers())
        if (server.alive && !server.info.devices.empty()) return true;
    } catch (const std::exception&) {  // kj's too: not yet, then
    }
    ::usleep(100'000);
  } while (directory.owner() != 0 && std::chrono::steady_clock::now() < until);
  return false;
}

using Report = std::function<bool(bool good, const std::string& text)>;

// In the process that stays. `report` is called once, false if nobody listens.
int supervise(PoolDirectory& directory, PoolPlan plan, const Report& report) {
  try {
    pid_t owner = 0;
    if (!directory.take(&owner)) {
      const std::string whose =
          directory.path() + " (process " + std::to_string(owner) + "); `gpupool down` stops it";
      const bool ready = otherIsReady(directory, plan);
      report(ready, ready ? "a pool is up already in " + whose
                          : "a pool was started already, but is not ready: " + whose);
      return ready ? 0 : kExitFailure;
    }
    directory.endLeftovers();
    directory.clear();
    Supervisor supervisor(directory, std::move(plan));
    const std::string state = supervisor.start();
    if (!report(true, "the pool is up: " + state + " (" + directory.path() + ")")) return kExitFailure;
    std::string why;
    if (supervisor.watch(&why)) return 0;
    GPUPOOL_ERROR("%s", why.c_str());
  } catch (const std::exception& error) {
    report(false, error.what());
  }
  return kExitFailure;
}

void detachStreams() {
  ::setsid();
  ::umask(077);
  const int null = ::open("/dev/null", O_RDWR);
  for (int descriptor : {0, 1, 2}) ::dup2(null, descriptor);
  if (null > 2) ::close(null);
  if (::chdir("/") != 0) ::_exit(kExitFailure);
}

int superviseDetached(PoolDirectory& directory, PoolPlan plan) {
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0)
    throw CommandError(kExitFailure, std::string("pipe: ") + std::strerror(errno));
  const pid_t pid = ::fork();
  if (pid < 0) throw CommandError(kExitFailure, std::string("fork: ") + std::strerror(errno));
  if (pid == 0) {
    ::signal(SIGPIPE, SIG_IGN);
    detachStreams();
    closeAllBut({pipe[1]});
    const int status = supervise(directory, std::move(plan), [&](bool good, const std::string& text) {
      const std::string line = (good ? "+" : "-") + text;
      const bool heard = ::write(pipe[1], line.data(), line.size()) == static_cast<ssize_t>(line.size());
      ::close(pipe[1]);
      const int log = ::open(directory.file(kPoolLog).c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      if (good && log >= 0) ::dup2(log, 2);
      if (log > 2) ::close(log);
      return heard;
    });
    ::_exit(status);
  }
  ::close(pipe[1]);
  std::string answer;
  char part[4096];
  for (ssize_t size; (size = ::read(pipe[0], part, sizeof part)) != 0;) {
    if (size < 0 && errno != EINTR) break;
    if (size > 0) answer.append(part, static_cast<size_t>(size));
  }
  ::close(pipe[0]);
  if (answer.empty()) throw CommandError(kExitFailure, "the pool's supervisor ended without saying why");
  if (answer[0] == '-') {
    ::waitpid(pid, nullptr, 0);  // it is still clearing away
    throw CommandError(kExitFailure, answer.substr(1));
  }
  std::cout << "gpupool: " << answer.substr(1) << '\n' << std::flush;
  return 0;
}

}  // namespace

int runUp(const Words& words) {
  UpOptions options;
  const Parsed parsed = parseCommand(words, kUpHelp, nullptr, {}, options.table());
  if (parsed.helped) return 0;
  if (!parsed.rest.empty()) throw options::OptionError("'" + parsed.rest[0] + "': up takes options only");
  check(options);
  const auto places = runtimeDirectories(options.state);
  const std::string path = absolutePath(places.front());
  for (const std::string& other : places) {
    const pid_t owner = other == places.front() ? 0 : PoolDirectory(other).owner();
    if (owner == 0) continue;
    std::cout << "gpupool: a pool is up already in " << other << " (process " << owner
              << "); `gpupool down` stops it\n";
    return 0;
  }
  PoolDirectory directory(path);
  PoolPlan plan = makePlan(options, directory);
  if (options.detach) return superviseDetached(directory, std::move(plan));
  return supervise(directory, std::move(plan), [](bool good, const std::string& text) {
    if (good) std::cout << "gpupool: " << text << "; Ctrl-C stops it" << '\n' << std::flush;
    if (!good) std::cerr << "gpupool: " << text << '\n' << std::flush;
    return true;
  });
}

}  // namespace gpupool::cli
