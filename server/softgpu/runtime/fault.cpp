// How a grid ends early: faults found by generated code, and those the processor finds.
#include <csignal>
#include <cstdio>
#include <mutex>

#include <ucontext.h>

#include "server/softgpu/runtime/calls.h"
#include "server/softgpu/runtime/memory.h"
#include "server/softgpu/runtime/worker.h"

namespace gpupool::softgpu::runtime {
namespace {

struct sigaction previousSegv;
struct sigaction previousBus;

void handle(int signal, siginfo_t* info, void* context) {
  Worker* worker = Worker::current();
  if (worker != nullptr && worker->onFiber())
    return worker->redirect(Outcome::illegalAddress, static_cast<ucontext_t*>(context));
  const struct sigaction& previous = signal == SIGSEGV ? previousSegv : previousBus;
  if ((previous.sa_flags & SA_SIGINFO) != 0) return previous.sa_sigaction(signal, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(signal);
  sigaction(signal, &previous, nullptr);  // returning runs the instruction again, now with the default action
}

std::mutex installMutex;

// Others set handlers too, and put back what they found before ours: looked at before every launch.
void install(int signal, struct sigaction& previous) {
  struct sigaction now{};
  sigaction(signal, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == handle) return;
  std::lock_guard lock(installMutex);
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(signal, &action, &now);
  if ((now.sa_flags & SA_SIGINFO) == 0 || now.sa_sigaction != handle) previous = now;
}

}  // namespace

void installFaultHandler() {
  install(SIGSEGV, previousSegv);
  install(SIGBUS, previousBus);
}

void faultAddress(uint64_t address, uint64_t bytes) {
  bool misaligned = bytes != 0 && (address & (bytes - 1)) != 0;
  Worker::current()->abandon(misaligned ? Outcome::misalignedAddress : Outcome::illegalAddress);
}

void faultTrap() { Worker::current()->abandon(Outcome::launchFailed); }
void faultInstruction() { Worker::current()->abandon(Outcome::illegalInstruction); }
void faultStack() { Worker::current()->abandon(Outcome::illegalAddress); }

}  // namespace gpupool::softgpu::runtime
