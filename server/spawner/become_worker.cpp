#include "server/spawner/become_worker.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace gpupool::server {

void becomeWorker(const WorkerImage& image) {
  setsid();
  prctl(PR_SET_PDEATHSIG, kServerDiedSignal);
  if (getppid() != image.parent) _exit(126);  // it died before the line above
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGTERM, SIG_DFL);
  signal(kServerDiedSignal, SIG_DFL);
  signal(SIGINT, SIG_DFL);
  signal(SIGPIPE, SIG_IGN);
  dup2(image.nothing, STDIN_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  if (image.control == kControlDescriptor) {
    fcntl(image.control, F_SETFD, 0);
  } else {
    dup2(image.control, kControlDescriptor);
  }
#ifdef SYS_close_range
  constexpr unsigned kCloseOnExec = 4;  // CLOSE_RANGE_CLOEXEC; everything of ours is marked already
  syscall(SYS_close_range, kControlDescriptor + 1, ~0u, kCloseOnExec);
#endif
  syscall(SYS_execveat, image.program, "", image.arguments, image.environment, AT_EMPTY_PATH);
  if (errno == ENOENT)  // a script: its interpreter opens it
    execve(image.arguments[0], image.arguments, image.environment);
  _exit(kNotExecuted);
}

}  // namespace gpupool::server
