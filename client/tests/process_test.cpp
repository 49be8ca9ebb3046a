#include "client/process.h"

#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "client/thread_state.h"

using namespace gpupool::client;

namespace {

// Runs `body` in a forked child and returns its exit status.
template <typename Body>
int inFork(Body&& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

// One case, because the state is the process's and goes one way.
TEST_CASE("process: fresh, initialised, forked, lost") {
  CHECK(process::ready() == CUDA_ERROR_NOT_INITIALIZED);
  CUresult result = CUDA_SUCCESS;
  REQUIRE(process::begin(&result));
  process::finish(CUDA_ERROR_NO_DEVICE);
  CHECK(process::ready() == CUDA_ERROR_NOT_INITIALIZED);

  // A child forked before initialisation succeeded starts afresh.
  CHECK(inFork([] {
          CUresult ignored;
          if (!process::begin(&ignored)) return 1;
          process::finish(CUDA_SUCCESS);
          return process::ready() == CUDA_SUCCESS ? 0 : 2;
        }) == 0);

  static int handled = 0;
  process::setChildHandler([] { ++handled; });
  std::vector<std::thread> threads;
  threads.reserve(4);
  std::atomic<int> initialisers{0}, ready{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      CUresult answer = CUDA_ERROR_UNKNOWN;
      if (process::begin(&answer)) {
        ++initialisers;
        usleep(2000);
        process::finish(CUDA_SUCCESS);
        answer = CUDA_SUCCESS;
      }
      ready += answer == CUDA_SUCCESS;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(initialisers == 1);
  CHECK(ready == 4);
  CHECK(process::ready() == CUDA_SUCCESS);

  CHECK(inFork([] {
          CUresult answer = CUDA_SUCCESS;
          if (!process::inChild() || handled != 1) return 1;
          if (process::ready() != CUDA_ERROR_NOT_INITIALIZED) return 2;
          if (process::begin(&answer) || answer != CUDA_ERROR_NOT_INITIALIZED) return 3;
          return 0;
        }) == 0);
  CHECK_FALSE(process::inChild());
  CHECK(handled == 0);

  bool skip = true;
  CHECK(process::readyForCleanup(&skip) == CUDA_SUCCESS);
  CHECK_FALSE(skip);
  process::lose();
  CHECK(process::ready() == CUDA_ERROR_DEINITIALIZED);
  CHECK(process::readyForCleanup(&skip) == CUDA_SUCCESS);
  CHECK(skip);
}

TEST_CASE("process: the command's name") {
  char name[32] = "";
  process::commandName(name, sizeof name);
  CHECK(std::string(name).substr(0, 8) == "client_p");
}

TEST_CASE("process: a thread's state goes with the thread") {
  static std::atomic<int> exits{0};
  setThreadExit([](void* session) { exits += *static_cast<int*>(session); });
  static int five = 5;
  ThreadState* mine = &threadState();
  std::thread([&] {
    CHECK(&threadState() != mine);
    threadState().session = &five;
  }).join();
  CHECK(exits == 5);
  CHECK(&threadState() == mine);
}
