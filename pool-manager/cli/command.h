#pragma once
// The commands of the `gpupool` tool. Each takes the words after its name and returns the exit status; errors
// are exceptions, which main() prints.

#include <stdexcept>
#include <string>
#include <vector>

#include "pool-manager/cli/client_options.h"

namespace gpupool::cli {

using Words = std::vector<std::string>;

inline constexpr int kExitFailure = 1, kExitUsage = 2;
// `gpupool run`, like env and nohup: its own failures, a program that cannot be executed, one that is not
// there.
inline constexpr int kExitRun = 125, kExitNotExecutable = 126, kExitNotFound = 127;

// Ends the command with this status and text.
class CommandError : public std::runtime_error {
 public:
  CommandError(int status, const std::string& text) : std::runtime_error(text), status(status) {}
  int status;
};

struct Command {
  const char* name;
  const char* summary;
  int (*run)(const Words& words);
};
const std::vector<Command>& commands();

int runUp(const Words& words);
int runDown(const Words& words);
int runRun(const Words& words);
int runLease(const Words& words);
int runHold(const Words& words);
int runDevices(const Words& words);
int runServers(const Words& words);
int runLeases(const Words& words);
int runTop(const Words& words);
int runSmi(const Words& words);
int runExplain(const Words& words);
int runAudit(const Words& words);
int runEvents(const Words& words);
int runClaim(const Words& words);
int runRelease(const Words& words);
int runSuspend(const Words& words);
int runResume(const Words& words);
int runCordon(const Words& words);
int runUncordon(const Words& words);
int runDrain(const Words& words);
int runTokens(const Words& words);
int runQuota(const Words& words);
int runTenants(const Words& words);
int runMigrate(const Words& words);
int runCheckpoint(const Words& words);
int runRestore(const Words& words);

// The texts of a command's --help around its options.
struct Help {
  const char* usage;  // "gpupool run [options] [--] program [argument...]"
  const char* purpose;
  const char* environment;  // beyond the options'; "" if none
  const char* status;
  const char* examples;
};

// Reads the configuration file, the environment and `words` into `options` and `own`, the command's own
// options. Returns what follows the options; none: --help was asked for and has been printed.
struct Parsed {
  bool helped = false;
  Words rest;
};
// Those of ClientOptions that every command takes that asks a manager.
inline const std::vector<std::string> kAskingOptions = {"manager", "tenant", "token-file", "tls-ca"};
// names: those of ClientOptions that the command takes on its command line.
Parsed parseCommand(const Words& words, const Help& help, ClientOptions* client,
                    const std::vector<std::string>& names, std::vector<options::Option> own);

}  // namespace gpupool::cli
