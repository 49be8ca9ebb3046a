// gpupool-server: one process on every node that lends GPUs.
//
// It never loads CUDA itself. Its children do, all of them the executable gpupool-worker: one that takes the
// inventory at the start, and one per session, started ahead of time with cuInit done. The server keeps the
// sockets on which sessions arrive, checks the holder's proof, and hands the socket to a worker; then it only
// watches the process. It joins the pool manager over Cap'n Proto RPC and does what that grants and revokes.
// One thread, one event loop.

#include <kj/async-io.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>

#include "base/log.h"
#include "server/front/front.h"

namespace {

constexpr const char* kUsage =
    "usage: gpupool-server [--config PATH] [OPTION...]\n"
    "Lends this machine's GPUs to the pool. SIGTERM and SIGINT end its sessions and leave the pool.\n\n";

// --config comes first, whatever its place: the command line wins over the file.
std::string configPath(std::vector<std::string>& words) {
  for (size_t i = 0; i < words.size(); ++i) {
    std::string path;
    size_t count = 1;
    if (words[i].starts_with("--config=")) {
      path = words[i].substr(9);
    } else if (words[i] == "--config" && i + 1 < words.size()) {
      path = words[i + 1];
      count = 2;
    } else {
      continue;
    }
    words.erase(words.begin() + i, words.begin() + i + count);
    return path;
  }
  return "";
}

// False: help was asked for and given.
bool readOptions(int count, char** words, gpupool::server::ServerOptions& options) {
  gpupool::options::Set set(options.table(), "GPUPOOL_SERVER_");
  std::vector<std::string> rest(words + 1, words + count);
  const std::string file = configPath(rest);
  if (!file.empty() && !set.readYamlFile(file))
    throw gpupool::options::OptionError("--config: there is no " + file);
  set.readEnvironment([](const char* name) { return static_cast<const char*>(std::getenv(name)); });
  bool help = false;
  rest = set.readArguments(rest, &help);
  if (help) {
    std::printf("%s%s", kUsage, set.help().c_str());
    return false;
  }
  if (!rest.empty()) throw gpupool::options::OptionError("unexpected argument '" + rest[0] + "'");
  options.complete();
  return true;
}

int serve(gpupool::server::ServerOptions options) {
  kj::UnixEventPort::captureSignal(SIGTERM);
  kj::UnixEventPort::captureSignal(SIGINT);
  auto io = kj::setupAsyncIo();
  gpupool::server::Front front(io, std::move(options));
  auto signalled = io.unixEventPort.onSignal(SIGTERM).exclusiveJoin(io.unixEventPort.onSignal(SIGINT));
  // Failing to start ends the process; having started, only a signal does.
  auto started = front.start().then([]() -> kj::Promise<void> { return kj::NEVER_DONE; });
  signalled.ignoreResult().exclusiveJoin(kj::mv(started)).wait(io.waitScope);
  front.stop().wait(io.waitScope);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  gpupool::log::setProcessName("server");
  try {
    gpupool::server::ServerOptions options;
    if (!readOptions(count, words, options)) return 0;
    return serve(std::move(options));
  } catch (const gpupool::options::OptionError& error) {
    std::fprintf(stderr, "gpupool-server: %s\n", error.what());
    return 2;
  } catch (const kj::Exception& error) {
    std::fprintf(stderr, "gpupool-server: %s\n", error.getDescription().cStr());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpupool-server: %s\n", error.what());
  }
  return 1;
}
