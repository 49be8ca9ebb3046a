// What ends a worker, and a wait in it, when its server, its client or its driver is there no more.
#include <fcntl.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "server/tests/worker_process_bench.h"
#include "server/worker/loss.h"
#include "server/worker/server_account.h"

#include "pace.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

TEST_CASE("a client that came later is watched too") {
  using namespace std::chrono_literals;
  int client[2];
  REQUIRE(pipe2(client, O_CLOEXEC) == 0);
  Worker stuck([&](WorkerProcess& process) {
    close(client[1]);
    process.watchServer([](const std::string&) {}, 100ms);
    process.watchClient(client[0]);
    process.reportRebuilt("");
    for (;;) sleep(1);
    return 0;
  });
  CHECK(stuck.report() == "rebuilt: ");
  close(client[1]);
  CHECK(stuck.report() == "ended: client gone; the driver did not come back from a call");
  CHECK(stuck.wait() == WorkerProcess::kExitStopped);
  close(client[0]);
}

TEST_CASE("while a session runs, the server's death, its order and SIGTERM stop it once, with the reason") {
  const auto body = [](WorkerProcess& process) {
    std::atomic<int> stops{0};
    std::string reason;
    process.watchServer([&](const std::string& why) {
      reason = why;
      process.reportEnded(why);
      ++stops;
    });
    while (stops == 0) usleep(1000);
    usleep(20000);
    if (!process.stopping()) return 50;
    if (reason == "the GPU server died: its process was killed or crashed") return 10 + stops;
    if (reason == "drained") return 20 + stops;
    if (reason == "the GPU server is shutting down") return 30 + stops;
    return 51;
  };
  Worker lost(body), told(body), terminated(body), orphaned(body);
  lost.hangUp();
  CHECK(lost.wait() == 11);
  told.order("drained");
  CHECK(told.report() == "ended: drained");
  CHECK(told.wait() == 21);
  usleep(50000);  // until it watches
  kill(terminated.pid, SIGTERM);
  CHECK(terminated.wait() == 31);
  kill(orphaned.pid, kServerDiedSignal);  // comes before the end-of-file where the server has other threads
  CHECK(orphaned.wait() == 11);
}

TEST_CASE("who waits for memory is refused at once when the server goes, and no device is called broken") {
  Worker worker([](WorkerProcess& process) {
    process.watchServer([](const std::string&) {});
    const CUresult refused = ServerAccount(process).take(0, 100);
    if (refused == CUDA_SUCCESS || refused == CUDA_ERROR_OUT_OF_MEMORY) return 1;
    if (isLoss(refused, "cuMemAlloc_v2")) return 2;
    return process.takeMemory(0, 100).error != "the server is gone" ? 3 : 0;
  });
  worker.memory();
  worker.hangUp();
  CHECK(worker.wait() == 0);
}

TEST_CASE("who waits for memory is refused after the session knows that the server is gone") {
  Worker worker([](WorkerProcess& process) {
    static std::atomic<bool> told = false;
    process.watchServer([](const std::string&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      told = true;
    });
    if (ServerAccount(process).take(0, 100) == CUDA_SUCCESS || !told) return 1;
    return ServerAccount(process).take(0, 100) == CUDA_SUCCESS ? 2 : 0;
  });
  worker.memory();
  worker.hangUp();
  CHECK(worker.wait() == 0);
}

TEST_CASE("a session that does not stop, or cannot be told, is ended after the grace") {
  using namespace std::chrono_literals;
  const auto began = std::chrono::steady_clock::now();
  Worker idle([](WorkerProcess& process) {
    process.watchServer([](const std::string&) {}, 100ms);
    for (;;) sleep(1);
    return 0;
  });
  Worker stuck([](WorkerProcess& process) {
    process.watchServer(
        [](const std::string&) {
          for (;;) sleep(1);
        },
        100ms);
    for (;;) sleep(1);
    return 0;
  });
  idle.hangUp();
  stuck.hangUp();
  CHECK(idle.wait() == WorkerProcess::kExitStopped);
  CHECK(stuck.wait() == WorkerProcess::kExitStopped);
  CHECK(std::chrono::steady_clock::now() - began < 2s * gpupool::test::busy());
}

TEST_CASE("a driver that does not come back once the client is gone does not keep the worker") {
  using namespace std::chrono_literals;
  int client[2];
  REQUIRE(pipe2(client, O_CLOEXEC) == 0);
  Worker stuck([&](WorkerProcess& process) {
    close(client[1]);
    process.watchServer([](const std::string&) {}, 100ms, client[0]);
    for (;;) sleep(1);
    return 0;
  });
  Worker good([&](WorkerProcess& process) {
    close(client[1]);
    process.watchServer([](const std::string&) {}, 10s, client[0]);
    char byte;
    while (read(client[0], &byte, 1) > 0) continue;
    return 61;
  });
  usleep(50000);
  close(client[1]);
  CHECK(stuck.wait() == WorkerProcess::kExitStopped);
  CHECK(good.wait() == 61);
  close(client[0]);
}

TEST_CASE("a watched session that ends by itself leaves nothing behind") {
  Worker worker([](WorkerProcess& process) {
    process.watchServer([](const std::string&) { _exit(60); });
    return 0;
  });
  CHECK(worker.wait() == 0);
}
