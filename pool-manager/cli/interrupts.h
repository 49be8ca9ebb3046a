#pragma once
// For commands that go on until somebody ends them: Ctrl-C, a closed terminal or SIGTERM ends a pause, and
// nothing else.

#include <signal.h>

#include <chrono>

namespace gpupool::cli {

class Interrupts {
 public:
  // Blocks these signals, for good: each stays pending until pause() takes it.
  Interrupts() {
    ::sigemptyset(&signals_);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGWINCH}) ::sigaddset(&signals_, signal);
    ::sigprocmask(SIG_BLOCK, &signals_, nullptr);
  }

  // At most so long; a terminal of another size ends it, too. True: the command is to end.
  bool pause(std::chrono::milliseconds time) const {
    const timespec limit{time.count() / 1000, time.count() % 1000 * 1'000'000};
    const int signal = ::sigtimedwait(&signals_, nullptr, &limit);
    return signal == SIGINT || signal == SIGTERM || signal == SIGHUP;
  }

 private:
  sigset_t signals_;
};

}  // namespace gpupool::cli
