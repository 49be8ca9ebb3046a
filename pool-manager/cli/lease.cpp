// gpupool lease: takes a lease as `gpupool run` does, and leaves it to a shell. The holder is a process of
// its own, as behind `gpupool run`; it goes on when this one has printed where programs find it.

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "pool-manager/cli/client_beside.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/cli/holder_child.h"
#include "pool-manager/cli/lease_wish.h"
#include "pool-manager/cli/output.h"

namespace gpupool::cli {
namespace {

const Help kLeaseHelp = {
    "gpupool lease [options]",
    "Leases GPUs of the pool as `gpupool run` does, and prints what a shell needs so that the programs that "
    "it starts use them, one after the other or at once. A process in the background holds the lease until "
    "`gpupool release`, the end of --time or --idle-release, or its own end: a shell that ends does not give "
    "the lease back, so name one of the two where nobody is sure to release it. Programs are started without "
    "`gpupool run`, which takes a lease of its own. For GPUs that programs on several machines use, or a job "
    "scheduler reserves: `gpupool claim`. (`gpupool hold` is what holds a program's lease when nobody has "
    "leased for it.)",
    "The shell gets GPUPOOL_LEASE, the lease's id; GPUPOOL_HOLDER, where programs find it; and the other "
    "variables that `gpupool run --help` names. GPUPOOL_LIBRARY_DIR: the folder of libcuda.so.1, instead of "
    "the one beside this tool. GPUPOOL_STATE: the folder of this machine's pool. GPUPOOL_LOG: error, "
    "warning, "
    "info or debug.",
    "0: the lease is there. 1: it is not (no manager, no free GPU, ...); nothing is printed on stdout then. "
    "2: the command line is wrong.",
    "  eval \"$(gpupool lease --gpus 2 --time 8h)\"\n"
    "  python train.py; ./a.out\n"
    "  gpupool release \"$GPUPOOL_LEASE\"\n"
    "  gpupool lease --memory 20GiB --wait 10m --idle-release 30m -o json\n"};

// A claim is adopted by each program, and needs no lease.
std::vector<std::string> optionNames() {
  auto names = leaseOptionNames();
  std::erase(names, "claim");
  return names;
}

using Variable = std::pair<std::string, std::string>;

// For a POSIX shell: whatever the value is, it is one word.
std::string quoted(const std::string& value) {
  std::string text = "'";
  for (const char c : value) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

void print(const std::vector<Variable>& variables, bool asJson) {
  if (asJson) {
    nlohmann::json environment = nlohmann::json::object();
    for (const auto& [name, value] : variables) environment[name] = value;
    printJson({{"lease", variables.front().second}, {"environment", environment}});
  } else {
    for (const auto& [name, value] : variables)
      std::cout << "export " << name << "=" << quoted(value) << ";\n";
  }
  if (!std::cout.flush())
    throw CommandError(kExitFailure, "nobody reads where the lease is: it is given back");
}

void lease(HolderSettings settings, bool asJson) {
  settings.request.adopts.clear();
  settings.request.holder.clear();
  settings.again = "take another one (`gpupool lease`) or unset GPUPOOL_HOLDER; start the program again";
  const std::string library = clientLibrary(kExitFailure);
  const bool sharesMemory = settings.transport == "shm";
  HolderChild holder(std::move(settings), kExitFailure);
  const HolderChild::Leased leased = holder.awaitLease();
  std::vector<Variable> variables = {{"GPUPOOL_LEASE", leased.id}};
  for (const std::string& one : programEnvironment(holder, library, leased.devices, sharesMemory)) {
    const size_t equals = one.find('=');
    variables.emplace_back(one.substr(0, equals), one.substr(equals + 1));
  }
  print(variables, asJson);
  holder.keep();
  const std::string name = leased.id.substr(0, 8);
  std::cerr << "gpupool: lease " << name << ", " << leased.devices << (leased.devices == 1 ? " GPU" : " GPUs")
            << "; `gpupool release " << name << "` gives it back\n";
}

}  // namespace

int runLease(const Words& words) {
  ClientOptions options;
  std::string form = "shell";
  const Parsed parsed = parseCommand(
      withOutput(words), kLeaseHelp, &options, optionNames(),
      {{"output", form, "shell|json", "Also -o. shell: commands that set the variables.", true}});
  if (parsed.helped) return 0;
  if (!parsed.rest.empty())
    throw options::OptionError("'" + parsed.rest[0] + "': no program is run; `gpupool run` runs one");
  if (form != "shell" && form != "json")
    throw options::OptionError("--output: '" + form + "' is not shell or json");
  HolderSettings settings = leaseWish(options);
  settings.request.client = clientBeside();
  lease(std::move(settings), form == "json");
  return 0;
}

}  // namespace gpupool::cli
