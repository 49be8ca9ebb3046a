// gpupool hold: the holder without the wrapper, started by the client library inside somebody else's process.

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "base/log.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/cli/holder_process.h"
#include "pool-manager/cli/lease_wish.h"

namespace gpupool::cli {
namespace {

const Help kHoldHelp = {
    "gpupool hold --descriptor N [options]",
    "Holds a lease for one program. gpupool's libcuda.so.1 starts this command if a program runs without "
    "`gpupool run`; nobody needs to start it by hand. Descriptor N is a connected SOCK_SEQPACKET Unix "
    "socket, on which the library speaks the protocol of schema/holder.h. The lease is made at the first "
    "request, and is given back when the library closes the socket.",
    "GPUPOOL_STATE: the folder of this machine's pool. GPUPOOL_LOG: error, warning, info or debug.",
    "0: the program closed the socket. 1: the lease could not be held. 2: the command line is wrong.",
    "  LD_LIBRARY_PATH=<prefix>/lib/gpupool GPUPOOL_MANAGER=head:4780 GPUPOOL_GPUS=2 ./vectorAdd\n"};

bool isApplication(int socket) {
  int type = 0;
  socklen_t size = sizeof type;
  return socket >= 3 && ::getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &size) == 0 &&
         type == SOCK_SEQPACKET;
}

// As the client library writes it, when the options as a whole cannot be read.
int descriptorOf(const Words& words) {
  for (size_t i = 0; i + 1 < words.size(); ++i)
    if (words[i] == "--descriptor") return std::atoi(words[i + 1].c_str());
  return -1;
}

// For what else in the application's process asks for the lease. -1: it goes without.
int listenBeside(int application) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(application, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return -1;
  try {
    return listenForApplications(holder::holderOfProcess(peer.pid));
  } catch (const std::exception& error) {
    GPUPOOL_INFO("no NVML for process %d: %s", peer.pid, error.what());
    return -1;
  }
}

}  // namespace

int runHold(const Words& words) {
  ClientOptions options;
  uint32_t descriptor = 0;
  HolderProcess process;
  try {
    const Parsed parsed = parseCommand(words, kHoldHelp, &options, leaseOptionNames(),
                                       {{"descriptor", descriptor, "N", "The connected socket.", true}});
    if (parsed.helped) return 0;
    if (!isApplication(static_cast<int>(descriptor)))
      throw CommandError(kExitUsage,
                         "hold is started by gpupool's libcuda.so.1, with --descriptor naming its socket");
    process.settings = leaseWish(options);
  } catch (const CommandError&) {
    throw;
  } catch (const std::exception& error) {
    // The environment's or a file's fault, most likely: the application tells it, with CUDA's error.
    const int socket = descriptorOf(words);
    if (!isApplication(socket)) throw;
    refuseApplication(socket, error.what());
    return kExitUsage;
  }
  const int socket = static_cast<int>(descriptor);
  process.application = socket;
  process.listening = listenBeside(socket);
  detachFromCaller({socket, process.listening});
  return runHolderProcess(std::move(process));
}

}  // namespace gpupool::cli
