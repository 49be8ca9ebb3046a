#pragma once
// The process around a Holder. `gpupool run` forks one, so that the lease is renewed while the program (and
// the wrapper with it) is stopped from the terminal; a client library starts one as `gpupool hold`.

#include "pool-manager/cli/holder.h"

namespace gpupool::cli {

struct HolderProcess {
  HolderSettings settings;
  int listening = -1;    // SOCK_SEQPACKET, listening: applications connect to it
  int application = -1;  // SOCK_SEQPACKET, connected: its end ends the process
  int control = -1;  // SOCK_SEQPACKET, to `gpupool run` or `lease`; its end too, but not before the program's
};

// Between `gpupool run` or `gpupool lease` and its holder: one datagram each, a word and the rest.
//   holder -> parent: "leased <number of GPUs> <lease>", "failed <text>", "lost <reason>", "news <text>",
//   "released", or "later": it goes on trying alone
//   parent -> holder: "program <pid>", "release", "keep": hold the lease until it ends, whoever goes
inline constexpr char kLeased[] = "leased ", kFailed[] = "failed ", kLost[] = "lost ", kNews[] = "news ",
                      kReleased[] = "released", kLater[] = "later", kProgram[] = "program ",
                      kRelease[] = "release", kKeep[] = "keep";

// Leaves the caller's session, signals and descriptors behind: nothing of the process that forked it stays
// open but `kept` (and stderr, if GPUPOOL_LOG asks for more than errors). Call first in a fresh process.
void detachFromCaller(const std::vector<int>& kept);

// Closes every descriptor from 3 on but `kept`.
void closeAllBut(std::vector<int> kept);

// Runs until the end and returns the exit status.
int runHolderProcess(HolderProcess process);

// The socket at which applications find the holder: a name as in GPUPOOL_HOLDER (schema/holder.h).
int listenForApplications(const std::string& name);

}  // namespace gpupool::cli
