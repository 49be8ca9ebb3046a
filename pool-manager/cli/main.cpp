// gpupool: the pool's command-line tool. `up` and `down` run a pool on this machine; `run` and `hold` lease
// from one and stay as the lease's holder; the others ask the manager. Every command is its own short-lived
// process.

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <iostream>

#include "base/log.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/rpc.h"

namespace {

using namespace gpupool;

std::string overview() {
  std::string text =
      "gpupool - lends the GPUs of a few servers to machines that have none\n\n"
      "usage: gpupool <command> [options]\n\ncommands:\n";
  for (const cli::Command& command : cli::commands()) {
    std::string name = command.name;
    name.resize(12, ' ');
    text += "  " + name + command.summary + "\n";
  }
  return text +
         "\n`gpupool <command> --help` describes a command in full, `gpupool --version` prints the version, "
         "and\n"
         "`gpupool --print-config` prints a configuration file with every option (etc/client.yaml).\n\n"
         "first steps on one machine:\n"
         "  gpupool up --detach          # a pool on this machine; with a software GPU if there is no other\n"
         "  gpupool run -- ./vectorAdd   # an unmodified CUDA program\n"
         "  gpupool down\n";
}

int dispatch(const cli::Words& words) {
  if (words.empty()) {
    std::cerr << overview();
    return cli::kExitUsage;
  }
  if (words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    if (words[0] == "help" && words.size() > 1) return dispatch({words[1], "--help"});
    std::cout << overview();
    return 0;
  }
  if (words[0] == "--version") {
    std::cout << "gpupool " GPUPOOL_VERSION "\n";
    return 0;
  }
  if (words[0] == "--print-config") {
    cli::ClientOptions options;
    std::cout << options::Set(options.table(), cli::kClientPrefix).yaml(cli::kClientIntroduction);
    return 0;
  }
  for (const cli::Command& command : cli::commands())
    if (words[0] == command.name) return command.run({words.begin() + 1, words.end()});
  std::string names;
  for (const cli::Command& command : cli::commands())
    names += std::string(names.empty() ? "" : ", ") + command.name;
  throw cli::CommandError(cli::kExitUsage, "there is no command '" + words[0] + "'. Commands: " + names);
}

// Text for the terminal, not the log: it may have several lines.
int fail(int status, const std::string& text) {
  const std::string line = "gpupool: " + text + "\n";
  return ::write(STDERR_FILENO, line.data(), line.size()) < 0 ? status : status;
}

// A caller may have closed the standard streams; our sockets must not take their numbers. Closed again by
// exec.
void keepStandardNumbers() {
  for (int descriptor = 0; descriptor < 3; ++descriptor)
    while (::fcntl(descriptor, F_GETFD) < 0 && errno == EBADF)
      if (::open("/dev/null", O_RDWR | O_CLOEXEC) < 0) ::_exit(cli::kExitFailure);
}

}  // namespace

int main(int count, char** words) {
  keepStandardNumbers();
  try {
    return dispatch({words + 1, words + count});
  } catch (const cli::CommandError& error) {
    return fail(error.status, error.what());
  } catch (const options::OptionError& error) {
    return fail(cli::kExitUsage, error.what());
  } catch (const kj::Exception& error) {
    return fail(cli::kExitFailure, pool::errorText(error));
  } catch (const std::exception& error) {
    return fail(cli::kExitFailure, error.what());
  }
}
