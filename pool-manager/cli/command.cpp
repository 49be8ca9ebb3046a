#include "pool-manager/cli/command.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>

namespace gpupool::cli {

const std::vector<Command>& commands() {
  static const std::vector<Command> kCommands = {
      {"up", "start a pool on this machine: a manager and a server", runUp},
      {"down", "stop the pool of this machine", runDown},
      {"run", "run a program with GPUs of the pool", runRun},
      {"lease", "take a lease for the programs of a shell", runLease},
      {"hold", "hold a lease for one program (the client library starts this)", runHold},
      {"devices", "list the GPUs of the pool, with free memory and holders", runDevices},
      {"servers", "list the servers of the pool", runServers},
      {"leases", "list the leases: who holds which GPUs", runLeases},
      {"top", "show GPUs and leases, again every second", runTop},
      {"smi", "show the GPUs of the lease here, in nvidia-smi's words", runSmi},
      {"explain", "say whether a request would be served now, and why not", runExplain},
      {"audit", "list what has happened to leases and servers", runAudit},
      {"events", "print what happens to leases and servers, as it happens", runEvents},
      {"claim", "reserve GPUs for a job before its programs start, for job schedulers", runClaim},
      {"release", "end a lease in its holder's place, or drop a lost one", runRelease},
      {"suspend", "take a lease's memory off its GPUs; its programs stand still", runSuspend},
      {"resume", "bring a suspended lease back to its GPUs", runResume},
      {"migrate", "move a lease to other GPUs, another server or other workers, as it runs", runMigrate},
      {"checkpoint", "write a lease's sessions into files of its server", runCheckpoint},
      {"restore", "bring a lease back that is held in files", runRestore},
      {"cordon", "place nothing new on a server, before it is taken down", runCordon},
      {"uncordon", "let a cordoned server be leased again", runUncordon},
      {"drain", "cordon a server, move its leases away, and await those that stay", runDrain},
      {"tokens", "make, list and revoke the tokens of users and servers", runTokens},
      {"quota", "say how much of the pool a tenant may have, and list it", runQuota},
      {"tenants", "list the tenants: their tokens, quotas, and what they have", runTenants},
  };
  return kCommands;
}

namespace {

void printHelp(const Help& help, const options::Set& set, bool client) {
  std::cout << "usage: " << help.usage << "\n\n"
            << options::wrap(help.purpose, 0) << "\noptions:\n"
            << set.help();
  std::cout << "  --help\n      Print this.\n";
  std::string environment =
      client ? "These set options, as does the configuration file: " + set.environmentHelp() +
                   " (etc/client.yaml describes each). "
             : "";
  environment += std::string(help.environment);
  if (!environment.empty()) std::cout << "\nenvironment:\n" << options::wrap(environment, 2);
  std::cout << "\nexit status:\n" << options::wrap(help.status, 2) << "\nexamples:\n" << help.examples;
}

}  // namespace

Parsed parseCommand(const Words& words, const Help& help, ClientOptions* client,
                    const std::vector<std::string>& names, std::vector<options::Option> own) {
  std::vector<options::Option> shown = std::move(own);
  if (client != nullptr) {
    // The whole table is read from file and environment, so that a wrong key is never silently ignored.
    options::Set all(client->table(), kClientPrefix);
    auto table = client->table();
    std::erase_if(table, [&](const options::Option& option) {
      return std::find(names.begin(), names.end(), option.name) == names.end();
    });
    shown.insert(shown.begin(), table.begin(), table.end());
    const options::Set defaults(shown, kClientPrefix);
    Parsed early;
    if (std::find(words.begin(), words.end(), "--help") != words.end() ||
        std::find(words.begin(), words.end(), "-h") != words.end()) {
      options::Set probe(shown, kClientPrefix);
      probe.readArguments(words, &early.helped);
      if (early.helped) {
        printHelp(help, defaults, true);
        return early;
      }
    }
    const std::string file = clientConfigFile();
    if (!file.empty() && !all.readYamlFile(file)) throw options::OptionError(file + ": cannot be read");
    all.readEnvironment([](const char* name) { return std::getenv(name); });
  }
  options::Set set(shown, kClientPrefix);
  Parsed parsed;
  parsed.rest = set.readArguments(words, &parsed.helped);
  if (parsed.helped) printHelp(help, set, client != nullptr);
  return parsed;
}

}  // namespace gpupool::cli
