#pragma once
// Threads of ours in processes that are not: none of the process's signals is to be delivered on them.

#include <pthread.h>
#include <signal.h>

namespace gpupool {

// While it lives, this thread receives no signals. Threads that it starts meanwhile never receive any.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace gpupool
