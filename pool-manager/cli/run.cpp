// gpupool run. Three processes: this one starts the program, passes signals on and repeats its end; its
// child, the holder, keeps the lease in a session of its own, because a lease must be renewed while the
// terminal has stopped the program; and the program, which finds the holder at GPUPOOL_HOLDER.

#include <unistd.h>

#include "base/log.h"
#include "pool-manager/cli/child_program.h"
#include "pool-manager/cli/client_beside.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/cli/holder_child.h"
#include "pool-manager/cli/holder_process.h"
#include "pool-manager/cli/lease_wish.h"

namespace gpupool::cli {
namespace {

const Help kRunHelp = {
    "gpupool run [options] [--] program [argument...]",
    "Leases GPUs of the pool, runs the program with them, and gives them back when it ends. The program "
    "needs no change: LD_LIBRARY_PATH makes it load gpupool's libcuda.so.1 and libnvidia-ml.so.1. Child "
    "processes of the program "
    "may use the same lease as long as the program itself runs. Signals that gpupool receives are passed on "
    "to the program. The lease is kept while the program is stopped from the terminal.",
    "For the program, gpupool's library folder is put in front of LD_LIBRARY_PATH, and GPUPOOL_HOLDER is set "
    "to the socket of the process that holds the lease. CUDA_VISIBLE_DEVICES, if it is not set, names the "
    "lease's devices. NCCL_WORK_FIFO_BYTES, if it is not set, becomes 65536 unless --transport is shm: "
    "the client compares that queue of NCCL's with the server's copy at each launch. GPUPOOL_LIBRARY_DIR: "
    "the folder of libcuda.so.1, instead of the one beside this tool. GPUPOOL_STATE: the folder of this "
    "machine's pool. GPUPOOL_LOG: error, warning, info or debug.",
    "The program's own; if the program is killed by a signal, gpupool ends by the same signal. 125: gpupool "
    "failed (no manager, no free GPU, ...). 126: the program cannot be executed. 127: the program was not "
    "found.",
    "  gpupool run -- ./vectorAdd\n"
    "  gpupool run --gpus 2 --memory 20GiB --wait 10m -- python train.py\n"
    "  gpupool run --gpu h200 --time 2h --reason 'nightly tests' -- ./tests\n"
    "  gpupool run --memory 60GiB --share 25% --priority low -- python train.py\n"
    "  gpupool run --claim alps:4711:0 -- python train.py\n"
    "  GPUPOOL_MANAGER=head:4780 gpupool run ./a.out\n"};

// Before a lease is asked for, which may take --wait. before: the word before the program's name.
void demandProgram(const std::string& name, const std::string& before) {
  try {
    demandExecutable(name);
  } catch (const CommandError& error) {
    std::string meant;
    try {
      if (before == "--protect" && options::parseTime(name).count() != 0) meant = before + "=" + name;
    } catch (const options::OptionError&) {
    }
    if (meant.empty()) throw;
    throw CommandError(error.status, std::string(error.what()) + "; did you mean " + meant + "?");
  }
}

// Its programs go on meanwhile: they ask the holder for nothing but what is new.
bool takeOver(HolderChild& holder) {
  const bool taken = holder.replace();
  GPUPOOL_WARNING(taken ? "the process that holds the lease was killed: another one takes the lease over"
                        : "the process that holds the lease was killed; the lease ends");
  return taken;
}

int runLeased(HolderSettings settings, const Words& program) {
  settings.request.holder = holderName(::getpid(), program[0].substr(program[0].rfind('/') + 1));
  const bool sharesMemory = settings.transport == "shm";
  HolderChild holder(std::move(settings), kExitRun);
  const std::string library = clientLibrary(kExitRun);
  const auto environment = programEnvironment(holder, library, holder.awaitLease().devices, sharesMemory);
  int status = 0;
  {
    ChildProgram child;
    try {
      // Told by the program's own process: this one may be killed at any moment after it exists.
      child.start(program, environment, [&] { holder.say(kProgram + std::to_string(::getpid())); });
    } catch (const CommandError&) {
      holder.release();
      throw;
    }
    status = child.wait(holder.control(), [&] {
      const std::string text = holder.hear();
      if (text.starts_with(kLost))
        GPUPOOL_WARNING("the lease has ended: %s", text.c_str() + sizeof kLost - 1);
      if (text.starts_with(kNews)) GPUPOOL_WARNING("%s", text.c_str() + sizeof kNews - 1);
      // The one that has taken the lease over.
      if (text.starts_with(kLeased)) holder.say(kProgram + std::to_string(child.pid()));
      if (text.starts_with(kFailed))
        GPUPOOL_WARNING("the lease has ended: %s", text.c_str() + sizeof kFailed - 1);
      return !text.empty() || takeOver(holder);
    });
    holder.release();
  }
  return status;
}

}  // namespace

int runRun(const Words& words) {
  ClientOptions options;
  Parsed parsed;
  HolderSettings settings;
  try {
    parsed = parseCommand(words, kRunHelp, &options, leaseOptionNames(), {});
    if (parsed.helped) return 0;
    settings = leaseWish(options);
    settings.request.client = clientBeside();
    if (parsed.rest.empty())
      throw options::OptionError("which program? usage: " + std::string(kRunHelp.usage));
  } catch (const std::exception& error) {
    throw CommandError(kExitRun, error.what());
  }
  const size_t at = words.size() - parsed.rest.size();
  demandProgram(parsed.rest[0], at == 0 ? "" : words[at - 1]);
  try {
    return endLike(runLeased(std::move(settings), parsed.rest));
  } catch (const CommandError&) {
    throw;
  } catch (const std::exception& error) {
    throw CommandError(kExitRun, error.what());
  }
}

}  // namespace gpupool::cli
