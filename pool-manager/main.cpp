// gpupool-manager: one process, one thread, one KJ event loop. Servers (gpupool-server, one a GPU node)
// connect to it, join and beat; holders (the `gpupool` tool, next to an application) connect to it for
// leases. It calls servers back over the connections they made. It is never on the data path: when it dies,
// sessions run on, and after its restart (state is in the store) servers and holders come back by themselves.

#include <kj/async-unix.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string_view>

#include "base/descriptors.h"
#include "base/log.h"
#include "base/stale_socket.h"
#include "base/tls.h"
#include "pool-manager/init.h"
#include "pool-manager/manager_options.h"
#include "pool-manager/rest/api.h"
#include "pool-manager/rpc.h"
#include "pool-manager/service.h"
#include "schema/protocol.h"

namespace gpupool::pool {
namespace {

const char kHelp[] =
    R"(gpupool-manager - manages a pool of GPUs: which servers offer them, and who leases them

usage: gpupool-manager [init|certificate] [options]

Each gpupool-server joins the manager and offers its GPUs. `gpupool run` and gpupool's libcuda.so.1 ask the manager
for leases. `gpupool up` starts a manager for one machine; for several servers, run it as a service (etc/systemd).

`gpupool-manager init` makes a new store, a certificate, and the first token, the operator's, prints that once, and
exits. Without it (and without --tokens) whoever reaches the manager may do everything. `gpupool-manager certificate`
makes a certificate if there is none, prints the line of token files that names it, and exits.

options:
)";

const char kHelpTail[] = R"(
exit status: 0 after SIGTERM or SIGINT; 1 if it could not start; 2 if the command line or configuration is wrong.

example: gpupool-manager --listen '*:4780' --store /var/lib/gpupool/manager.db
)";

uint32_t ms(std::chrono::milliseconds time) { return static_cast<uint32_t>(time.count()); }

// Says which of its addresses cannot be had.
template <class Listen>
kj::Own<kj::ConnectionReceiver> listenAs(const char* option, const std::string& address, Listen listen) try {
  return listen();
} catch (const kj::Exception& error) {
  throw std::runtime_error(std::string(option) + " " + address + ": " + errorText(error));
}

// The store's lock is not enough: a manager with another store may have this socket.
kj::Own<kj::ConnectionReceiver> listenLocal(kj::AsyncIoContext& io, const std::string& path, bool anyUser) {
  removeStaleSocket(path, "another gpupool-manager");
  const mode_t before = ::umask(anyUser ? 0 : 0177);
  auto address = io.provider->getNetwork().parseAddress(("unix:" + path).c_str()).wait(io.waitScope);
  auto listener = address->listen();
  ::umask(before);
  return listener;
}

kj::Own<kj::ConnectionReceiver> listenNetwork(kj::AsyncIoContext& io, const std::string& address,
                                              uint16_t port) {
  return io.provider->getNetwork().parseAddress(address.c_str(), port).wait(io.waitScope)->listen();
}

std::map<std::string, double> weights(const ManagerOptions& options) {
  try {
    return parseWeights(options.weights);
  } catch (const std::invalid_argument& error) {
    throw options::OptionError(std::string("--weights: ") + error.what());
  }
}

// Whether others than this machine's processes can connect.
bool isOpen(kj::ConnectionReceiver& listener) {
  sockaddr_storage address{};
  kj::uint size = sizeof address;
  listener.getsockname(reinterpret_cast<sockaddr*>(&address), &size);
  if (address.ss_family == AF_UNIX) return false;
  if (address.ss_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 != 127;
  return !IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
}

// Null: there is none, or it is not to be used.
std::unique_ptr<tls::Certificate> readCertificate(const ManagerOptions& options) {
  const std::string file = options.certificateFile();
  if (options.tls == "off" || (options.tlsCertificate.empty() && !std::filesystem::exists(file)))
    return nullptr;
  auto certificate = std::make_unique<tls::Certificate>(file, options.keyFile());
  GPUPOOL_INFO("TLS with the certificate %s", fingerprintText(certificate->fingerprint()).c_str());
  return certificate;
}

// Opens nothing that a manager which runs has open.
int checkConfig(const ManagerOptions& options) {
  weights(options);
  if (!options.tokens.empty()) readTokens(options.tokens);
  readCertificate(options);
  const std::filesystem::path folder = std::filesystem::absolute(options.store).parent_path();
  if (options.store != "memory" && ::access(folder.c_str(), W_OK | X_OK) != 0)
    throw options::OptionError("--store: " + folder.string() + ": " + strerror(errno));
  std::cout << "gpupool-manager: the configuration can be used\n";
  return 0;
}

kj::Promise<void> reloadAtHangup(kj::UnixEventPort& port, tls::Certificate& certificate) {
  return port.onSignal(SIGHUP).then([&](siginfo_t) {
    certificate.reload();
    return reloadAtHangup(port, certificate);
  });
}

// Tokens are for networks that not everybody can be trusted on.
void guardTokens(const ManagerOptions& options, bool plain, Service& service) {
  if (!plain) return;
  if (options.tls == "off") {
    if (service.tokens().demanded())
      GPUPOOL_WARNING("--tls off: who can read the network reads the tokens of REST, and session keys");
    return;
  }
  const std::string todo =
      "an address that other machines reach has no TLS: make its certificate (gpupool-manager certificate), "
      "or say "
      "--tls off";
  if (service.tokens().demanded()) throw options::OptionError("there are tokens, and " + todo);
  service.guardTokensBy(
      [todo] { throw std::invalid_argument("before there are tokens: " + todo + ", and restart"); });
}

int serve(const ManagerOptions& options) {
  kj::UnixEventPort::captureSignal(SIGHUP);
  kj::UnixEventPort::captureSignal(SIGTERM);
  kj::UnixEventPort::captureSignal(SIGINT);
  auto io = kj::setupAsyncIo();
  const auto store = options.store == "memory" ? makeMemoryStore() : openSqliteStore(options.store);
  PoolTimes times;
  times.beatMs = ms(options.beat), times.silentMs = ms(options.silent);
  times.minTtlMs = ms(options.minTtl), times.maxTtlMs = ms(options.maxTtl);
  times.driftMs = ms(options.drift), times.killMs = ms(options.kill);
  times.takeOverMs = ms(options.takeOver);
  times.halfLifeMs = static_cast<uint64_t>(options.halfLife.count());
  times.auditEntries = options.auditEntries;
  times.idleMs = ms(options.idleRelease), times.mostIdleMs = ms(options.mostIdle);
  times.preempt = {options.preempt == "off"       ? Preemption::off
                   : options.preempt == "suspend" ? Preemption::suspend
                                                  : Preemption::revoke,
                   ms(options.preemptGrace), ms(options.preemptNotice), ms(options.preemptMinRun)};
  times.weights = weights(options);
  ServiceLimits limits;
  limits.call = options.call.count() * kj::MILLISECONDS;
  limits.anyUser = options.anyUser;
  limits.connections = raiseDescriptorLimit() / 2;  // one host cannot take them all
  auto& timer = io.provider->getTimer();
  const auto certificate = readCertificate(options);  // outlives the service
  Service service(timer, *store, times, limits, bootTimeMs);
  std::optional<TokenFile> tokens;
  if (!options.tokens.empty()) {
    tokens.emplace(options.tokens);
    service.demandTokens([&]() -> const Tokens& { return tokens->current(); });
  }
  kj::Promise<void> reloads = kj::NEVER_DONE;
  if (certificate != nullptr) {
    service.demandTls(*certificate);
    reloads = reloadAtHangup(io.unixEventPort, *certificate);
  }
  bool plain = false;
  const auto listenOn = [&](const char* option, const std::string& address, uint16_t port) {
    auto listener = listenAs(option, address, [&] { return listenNetwork(io, address, port); });
    plain = plain || (certificate == nullptr && isOpen(*listener));
    return listener;
  };
  const auto listenOnSocket = [&](const char* option, const std::string& path) {
    return listenAs(option, path, [&] { return listenLocal(io, path, options.anyUser); });
  };
  if (!options.socket.empty()) service.serve(listenOnSocket("--socket", options.socket), true);
  if (!options.listen.empty()) {
    auto listener = listenOn("--listen", options.listen, kDefaultManagerPort);
    GPUPOOL_INFO("listening on %s, port %u", options.listen.c_str(), listener->getPort());
    service.serve(kj::mv(listener), false);
  }
  rest::Api api(timer, service);
  rest::HttpFront http(timer, service, api);
  const std::string httpSocket = options.httpListen.starts_with("unix:") ? options.httpListen.substr(5) : "";
  if (!httpSocket.empty()) {
    http.serve(listenOnSocket("--http-listen", httpSocket), true);
  } else if (!options.httpListen.empty()) {
    auto listener = listenOn("--http-listen", options.httpListen, rest::kDefaultHttpPort);
    GPUPOOL_INFO("REST on %s, port %u", options.httpListen.c_str(), listener->getPort());
    http.serve(kj::mv(listener), false);
  }
  guardTokens(options, plain, service);
  service.run()
      .exclusiveJoin(kj::mv(reloads))
      .exclusiveJoin(io.unixEventPort.onSignal(SIGTERM).ignoreResult())
      .exclusiveJoin(io.unixEventPort.onSignal(SIGINT).ignoreResult())
      .wait(io.waitScope);
  for (const std::string& path : {options.socket, httpSocket})
    if (!path.empty()) ::unlink(path.c_str());
  return 0;
}

struct Invocation {
  ManagerOptions options;
  std::string config;
  bool help = false, version = false, printConfig = false, checkConfig = false;
  int (*work)(const ManagerOptions&) = nullptr;
};

Invocation parse(int count, char** words) {
  Invocation invocation;
  auto table = invocation.options.table();
  table.push_back(
      {"config", invocation.config, "FILE", "Read this file instead of /etc/gpupool/manager.yaml.", true});
  table.push_back(
      {"print-config", invocation.printConfig, "", "Print the configuration file with every default.", true});
  table.push_back({"check-config", invocation.checkConfig, "",
                   "Check the configuration and the files that it names, and exit.", true});
  table.push_back({"version", invocation.version, "", "Print the version.", true});
  const std::string_view word = count > 1 ? words[1] : "";
  invocation.work = word == "init" ? initStore : word == "certificate" ? printCertificate : serve;
  const std::vector<std::string> arguments(words + (invocation.work == serve ? 1 : 2), words + count);
  options::Set early(table, kManagerPrefix);  // learns --config, which later words may not contradict
  if (const auto rest = early.readArguments(arguments, &invocation.help); !rest.empty())
    throw options::OptionError(
        "unexpected argument '" + rest[0] +
        "': gpupool-manager takes init or certificate, as the first word, and options");
  if (invocation.version) {
    std::cout << "gpupool-manager " << schema::release() << "\n";
    return invocation;
  }
  if (invocation.help) {
    invocation.options = {};
    std::cout << kHelp << options::Set(table, kManagerPrefix).help()
              << options::wrap("\nenvironment: " + early.environmentHelp() + ", GPUPOOL_LOG.", 0)
              << kHelpTail;
    return invocation;
  }
  const std::string config = invocation.config;
  invocation.options = {};
  options::Set set(table, kManagerPrefix);
  if (invocation.printConfig) {
    std::cout << set.yaml(kManagerIntroduction);
    return invocation;
  }
  if (!set.readYamlFile(config.empty() ? "/etc/gpupool/manager.yaml" : config) && !config.empty())
    throw options::OptionError(config + ": there is no such file");
  set.readEnvironment([](const char* name) { return std::getenv(name); });
  set.readArguments(arguments);
  check(invocation.options);
  if (invocation.work == serve && invocation.options.listen.empty() && invocation.options.socket.empty())
    throw options::OptionError("no address to listen on: give --listen HOST:PORT or --socket PATH");
  return invocation;
}

}  // namespace
}  // namespace gpupool::pool

int main(int count, char** words) {
  using namespace gpupool;
  log::setProcessName("manager");
  try {
    const pool::Invocation invocation = pool::parse(count, words);
    if (invocation.help || invocation.version || invocation.printConfig) return 0;
    if (invocation.checkConfig) return pool::checkConfig(invocation.options);
    return invocation.work(invocation.options);
  } catch (const options::OptionError& error) {
    GPUPOOL_ERROR("%s", error.what());
    return 2;
  } catch (const kj::Exception& error) {
    GPUPOOL_ERROR("%s", pool::errorText(error).c_str());
  } catch (const std::exception& error) {
    GPUPOOL_ERROR("%s", error.what());
  }
  return 1;
}
