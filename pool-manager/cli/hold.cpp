// gpupool hold: the holder without the wrapper, started by the client library inside somebody else's process.

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pool-manager/cli/command.h"
#include "pool-manager/cli/holder_process.h"
#include "pool-manager/cli/lease_wish.h"

namespace gpupool::cli {
namespace {

const Help kHelp = {
    "gpupool hold --descriptor N [options]",
    "Holds a lease for one application. gpupool's libcuda.so.1 starts it where a program runs without "
    "`gpupool run`; "
    "nobody needs to start it by hand. Descriptor N is a connected SOCK_SEQPACKET Unix socket that speaks "
    "schema/holder.h. The "
    "lease is made at the first request, and given back when the other end is closed.",
    "GPUPOOL_STATE: the local pool's runtime directory. GPUPOOL_LOG: error, warning, info or debug.",
    "0: the application closed its end. 1: the holder failed. 2: the command line is wrong.",
    "  LD_LIBRARY_PATH=<prefix>/lib/gpupool GPUPOOL_MANAGER=head:4780 GPUPOOL_GPUS=2 ./vectorAdd\n"};

}  // namespace

int runHold(const Words& words) {
  ClientOptions options;
  uint32_t descriptor = 0;
  const Parsed parsed = parseCommand(words, kHelp, &options, leaseOptionNames(),
                                     {{"descriptor", descriptor, "N", "The connected socket.", true}});
  if (parsed.helped) return 0;
  const int socket = static_cast<int>(descriptor);
  int type = 0;
  socklen_t size = sizeof type;
  if (socket < 3 || ::getsockopt(socket, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_SEQPACKET)
    throw CommandError(kExitUsage,
                       "hold is started by gpupool's libcuda.so.1, with --descriptor naming its socket");
  HolderProcess process;
  process.settings = leaseWish(options);
  process.application = socket;
  detachFromCaller({socket});
  return runHolderProcess(std::move(process));
}

}  // namespace gpupool::cli
