// gpupool-server: one process on every node that lends GPUs.
//
// It never loads CUDA itself. Its children do, all of them the executable gpupool-worker: one that takes the
// inventory at the start, one per session, started ahead of time with cuInit done, and, once a lease has been
// suspended, one that keeps the memory of suspended sessions (--copier). With --worker-users gpupool-spawner
// starts those of sessions. The server keeps the sockets on which sessions arrive, checks the holder's proof,
// and hands the socket to a worker; then it only watches the process. It joins the pool manager over Cap'n
// Proto RPC and does what that grants and revokes. One thread, one event loop.

#include <kj/async-io.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/descriptors.h"
#include "base/log.h"
#include "base/tokens.h"
#include "schema/fault.h"
#include "schema/protocol.h"
#include "server/front/front.h"
#include "server/front/spawner_parent.h"

namespace {

using gpupool::options::OptionError;
using gpupool::options::Set;
using gpupool::server::ServerOptions;

constexpr const char* kUsage =
    "usage: gpupool-server [options]\n\n"
    "Offers this machine's GPUs to a pool, and starts a worker process for each session.\n"
    "After SIGTERM or SIGINT it leaves the pool. Its sessions end; those of protected programs (gpupool run\n"
    "--protect) go on at another server. After SIGUSR2, as after its death, sessions go on for a while, and "
    "the\n"
    "next gpupool-server with the same state folder goes on with them (--restart-time). After SIGHUP it "
    "looks\n"
    "at the folder --workers again.\n\n"
    "options:\n";
constexpr const char* kUsageTail =
    "\nexit status: 0 after SIGTERM, SIGINT or SIGUSR2; 1 if it could not start, or could not go on; 2 if "
    "the\n"
    "command line or configuration is wrong.\n\n"
    "example: gpupool-server --manager head:4780 --listen '*:4783' --token-file /etc/gpupool/node7.token\n";
constexpr const char* kConfig = "/etc/gpupool/server.yaml";

// Of files that are named; a GPU is not asked for, and no manager.
void checkFiles(const ServerOptions& options) {
  if (!options.tokenFile.empty()) gpupool::readTokens(options.tokenFile);
  const auto demand = [](const char* option, const std::string& path, int mode) {
    if (!path.empty() && access(path.c_str(), mode) != 0)
      throw OptionError(std::string("--") + option + ": " + path + ": " + std::strerror(errno));
  };
  demand("worker", options.worker, X_OK);
  demand("driver", options.driver, R_OK);
  if (!options.workers.empty() && access(options.workers.c_str(), F_OK) == 0)
    demand("workers", options.workers, R_OK | X_OK);
  demand("suspend-folder", options.suspendFolder, W_OK | X_OK);
  demand("checkpoint-folder", options.checkpointFolder, W_OK | X_OK);
  std::puts("gpupool-server: the configuration can be used");
}

// False: help, the version or the configuration was asked for and given, or the configuration was checked.
bool readOptions(int count, char** words, ServerOptions& options) {
  std::string config;
  bool help = false, version = false, printConfig = false, checkConfig = false;
  auto table = options.table();
  table.push_back(
      {"config", config, "FILE", std::string("Read this file instead of ") + kConfig + ".", true});
  table.push_back(
      {"print-config", printConfig, "", "Print the configuration file with every default.", true});
  table.push_back({"check-config", checkConfig, "",
                   "Check the configuration and the files that it names, and exit.", true});
  table.push_back({"version", version, "", "Print the version.", true});
  const std::vector<std::string> arguments(words + 1, words + count);
  Set early(table, ServerOptions::kPrefix);  // learns --config, which the other words win over
  const auto rest = early.readArguments(arguments, &help);
  if (!rest.empty()) throw OptionError("unexpected argument '" + rest[0] + "'");
  if (version) {
    std::printf("gpupool-server %s\n", gpupool::schema::release());
    return false;
  }
  const std::string file = config;
  const bool print = printConfig;
  options = {};
  Set set(table, ServerOptions::kPrefix);
  if (help || print) {
    const std::string text =
        print
            ? set.yaml(ServerOptions::kIntroduction)
            : kUsage + set.help() +
                  gpupool::options::wrap("\nenvironment: " + early.environmentHelp() + ", GPUPOOL_LOG.", 0) +
                  kUsageTail;
    std::fputs(text.c_str(), stdout);
    return false;
  }
  if (!set.readYamlFile(file.empty() ? kConfig : file) && !file.empty())
    throw OptionError("--config: there is no " + file);
  set.readEnvironment([](const char* name) { return static_cast<const char*>(std::getenv(name)); });
  set.readArguments(arguments);
  options.complete();
  if (checkConfig) checkFiles(options);
  return !checkConfig;
}

kj::Promise<void> onEachHangup(kj::UnixEventPort& port, gpupool::server::Front& front) {
  return port.onSignal(SIGHUP).then([&port, &front](siginfo_t&&) {
    front.lookAgain();
    return onEachHangup(port, front);
  });
}

int serve(ServerOptions options) {
  if (!options.suspendFolder.empty() && access(options.suspendFolder.c_str(), W_OK | X_OK) != 0)
    GPUPOOL_ERROR("--suspend-folder: %s: %s; no lease is moved there until that is mended",
                  options.suspendFolder.c_str(), std::strerror(errno));
  // First: what follows changes what this process may do.
  auto walls = gpupool::server::Front::wallsFor(options);
  std::unique_ptr<gpupool::server::SpawnerParent> spawner;
  if (const auto users = options.userRange())
    spawner = gpupool::server::SpawnerParent::begin(*users, options.deviceLocks);
  kj::UnixEventPort::captureSignal(SIGTERM);
  kj::UnixEventPort::captureSignal(SIGINT);
  kj::UnixEventPort::captureSignal(SIGHUP);
  kj::UnixEventPort::captureSignal(SIGUSR2);
  gpupool::raiseDescriptorLimit();
  // For the workers: software GPUs of two servers are two devices.
  setenv("GPUPOOL_SOFT_IDENTITY", options.identity().c_str(), 0);
  auto io = kj::setupAsyncIo();
  gpupool::server::WorkerParent& parent = spawner ? *spawner : gpupool::server::ownChildren();
  gpupool::server::Front front(io, std::move(options), parent, std::move(walls));
  auto left = io.unixEventPort.onSignal(SIGUSR2).then([&front](siginfo_t&&) {
    GPUPOOL_INFO("this process ends, and leaves its sessions to the next one");
    front.leaveRunning();
    _exit(0);  // without its destructors, which end them
  });
  auto signalled = io.unixEventPort.onSignal(SIGTERM).exclusiveJoin(io.unixEventPort.onSignal(SIGINT));
  // Failing to start ends the process, and the end of the spawner; having started, only a signal does.
  auto started = front.start().then([]() -> kj::Promise<void> { return kj::NEVER_DONE; });
  if (spawner) started = started.exclusiveJoin(spawner->ended(io.unixEventPort));
  try {
    signalled.ignoreResult()
        .exclusiveJoin(kj::mv(started))
        .exclusiveJoin(kj::mv(left))
        .exclusiveJoin(onEachHangup(io.unixEventPort, front))
        .wait(io.waitScope);
  } catch (const kj::Exception& error) {
    if (!front.started()) throw;
    std::fprintf(stderr, "gpupool-server: %s\n", gpupool::schema::plainText(error).c_str());
    front.leaveRunning();
    _exit(1);
  }
  front.stop().wait(io.waitScope);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  gpupool::log::setProcessName("server");
  try {
    ServerOptions options;
    if (!readOptions(count, words, options)) return 0;
    return serve(std::move(options));
  } catch (const OptionError& error) {
    std::fprintf(stderr, "gpupool-server: %s\n", error.what());
    return 2;
  } catch (const kj::Exception& error) {
    std::fprintf(stderr, "gpupool-server: %s\n", gpupool::schema::plainText(error).c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpupool-server: %s\n", error.what());
  }
  return 1;
}
