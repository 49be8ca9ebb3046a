#include "pool-manager/cli/goes_on.h"

#include <signal.h>
#include <unistd.h>

namespace gpupool::cli {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

std::string line;  // whole before a handler is there, which may do no more than write it

void end(int number) {
  if (::write(STDERR_FILENO, line.data(), line.size()) < 0) ::_exit(128 + number);
  ::signal(number, SIG_DFL);
  ::raise(number);  // the shell sees which it was
}

}  // namespace

GoesOn::GoesOn(const std::string& what) {
  line = "gpupool: interrupted, but " + what + "; `gpupool leases` shows what becomes of it\n";
  for (const int number : kSignals)
    if (::signal(number, end) == SIG_IGN) ::signal(number, SIG_IGN);  // nohup
}

GoesOn::~GoesOn() {
  for (const int number : kSignals) {
    const auto was = ::signal(number, SIG_DFL);
    if (was != end) ::signal(number, was);
  }
}

}  // namespace gpupool::cli
