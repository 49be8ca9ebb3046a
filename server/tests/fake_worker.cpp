// A worker for tests: the real shell around a session that does what its client's socket says, one byte an
// order:
//   e  answer "e<device ordinals>"   q  end well   c  crash   h  report the end, then hang
//   l  report its first device lost, then crash
//   m  take 600 MiB of the first device's memory from the lease    g  give 600 MiB back
//   y  answer "y<rows>"
//   p  answer with the pid           o  answer with the environment's number of entries that hold "TOKEN"
//   s  answer with what it is ("running", "suspended") and how often it was suspended
//   r  refuse the next order to suspend          R  to resume
//   a  refuse every order to suspend from now on
//   d  die of the next order to suspend or to resume           n  never answer it
//   w  answer it with nonsense                   b  answer it with what is no message
//   u  report that it is suspended, unasked      t  ask to be disturbed
//   B, Q, W  report that it is busy, quiet, waiting; answer "told", or "unwanted" if the start did not ask
//   for
//      that
//   H, U  report that it cannot be moved, at some length, and that it can again
//   V and a digit: of the next order to move or to copy: 1 refuse it, 2 do not answer, 3 die; of one to copy:
//      4 die behind half of it; or the next worker, while it rebuilds the session: 4 dies, 5 cannot
//   O, I, X, F  share (fake_share.h)
//   L  say that the client has left for the next worker, and end    S  that it stays
// What it needs of the server for that is in fake_suspension.h and fake_move.h, also what it does as a
// copier. GPUPOOL_FAKE_WORKER says how it starts: "crash", "fail", "mute" (never ready), or a path: fails
// until that file exists.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "server/driver.h"
#include "server/tests/fake_move.h"
#include "server/tests/fake_share.h"
#include "server/tests/fake_suspension.h"
#include "server/worker_interface.h"
#include "server/worker_process.h"

using namespace gpupool::server;

namespace {

// Of another program: GPUPOOL_FAKE_ROWS.
uint64_t rows() {
  const char* other = std::getenv("GPUPOOL_FAKE_ROWS");
  return other == nullptr ? 0x1234 : std::strtoull(other, nullptr, 16);
}

[[noreturn]] void hang() {
  for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
}

int fakedStart(WorkerProcess& process) {
  const char* text = std::getenv("GPUPOOL_FAKE_WORKER");
  if (text == nullptr) return 0;
  if (std::strcmp(text, "crash") == 0) std::abort();
  if (std::strcmp(text, "mute") == 0) hang();
  if (std::strcmp(text, "slow") == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1'500));
  if (std::strcmp(text, "fail") == 0 || (text[0] == '/' && access(text, F_OK) != 0)) {
    process.reportFailed("told to fail");
    return 1;
  }
  return 0;
}

void answer(int socket, const std::string& text) {
  if (write(socket, text.data(), text.size()) < 0) _exit(9);
}

std::string tokens() {
  int count = 0;
  for (char** entry = environ; *entry != nullptr; ++entry)
    count += std::strstr(*entry, "TOKEN") != nullptr ? 1 : 0;
  return std::to_string(count);
}

// Why the session ended.
std::string serve(WorkerProcess& process, const SessionStart& start, test::FakeSuspension& suspension,
                  test::FakeMove& move) {
  SessionCounts counts;
  test::FakeShare share(process);
  for (char order; read(start.socket, &order, 1) == 1;) {
    std::string ordinals = "e";
    for (const auto& device : start.devices) ordinals += std::to_string(device.info.ordinal);
    if (order == 'e') answer(start.socket, ordinals);
    if (order == 'y') {
      char text[32];
      std::snprintf(text, sizeof text, "y%llx", static_cast<unsigned long long>(rows()));
      answer(start.socket, text);
    }
    if (order == 'p') answer(start.socket, std::to_string(getpid()));
    if (order == 'o') answer(start.socket, tokens());
    if (order == 'm') {
      const MemoryAnswer memory = process.takeMemory(0, uint64_t{600} << 20);
      answer(start.socket, (memory.granted ? "taken, others have " : "refused, others have ") +
                               std::to_string(memory.othersBytes >> 20) + " MiB");
    }
    if (order == 'g') {
      process.giveMemory(0, uint64_t{600} << 20);
      process.takeMemory(0, 0);  // answered behind it: the server has counted it then
      answer(start.socket, "given");
    }
    if (order == 's') answer(start.socket, suspension.state());
    if (std::strchr("rRadnwb", order) != nullptr) {
      suspension.misbehave(order);
      answer(start.socket, "will do");
    }
    if (order == 'u' || order == 't') {
      order == 'u' ? suspension.reportUnasked() : suspension.askForDisturbance();
      answer(start.socket, "done");
    }
    if (std::strchr("BQW", order) != nullptr)
      answer(start.socket, suspension.reportActivity(order) ? "told" : "unwanted");
    if (order == 'H' || order == 'U') {
      std::vector<std::string> reasons;
      if (order == 'H') reasons = {"its code is strange", std::string(1000, 'x')};
      process.reportHindrances(reasons);
      answer(start.socket, "told");
    }
    if (order == 'N') {
      counts = {counts.calls + 10, counts.awaited + 4, counts.toDeviceBytes + 1000,
                counts.fromDeviceBytes + 500};
      answer(start.socket, process.reportCounts(counts) ? "told" : "not taken");
    }
    if (const std::string said = share.order(order, start.socket); !said.empty()) answer(start.socket, said);
    if (order == 'V') {
      if (read(start.socket, &order, 1) == 1) move.misbehave(order);
      answer(start.socket, "will do");
    }
    if (order == 'L') {
      move.left();
      return "the session has moved";
    }
    if (order == 'S') move.stays();
    if (order == 'q') return "client closed";
    if (order == 'l') {
      process.reportLost(start.devices[0].info.ordinal, "CUDA_ERROR_FAKE (999)");
      suspension.flush();
    }
    if (order == 'c' || order == 'l') std::abort();
    if (order == 'h') {
      process.reportEnded("hanging from here");
      hang();
    }
  }
  return process.stopping() ? "stopped" : "client lost";
}

int runWorker(const WorkerArguments& arguments, test::FakeSuspension& suspension) {
  WorkerProcess process(kControlDescriptor, rows());
  if (const int status = fakedStart(process)) return status;
  std::unique_ptr<const Driver> driver;
  try {
    driver = Driver::load(arguments.driver);
    warmUp(*driver, arguments.warmDevice);
  } catch (const std::exception& error) {
    process.reportFailed(error.what());
    return 1;
  }
  process.reportReady(driver->path());
  auto start = process.waitForSession();
  if (!start) return 0;
  test::FakeMove move(process, start->socket);
  process.onOrders({.suspend = {},
                    .resume = {},
                    .move = [&](auto drain, uint64_t epoch, int copier, int state,
                                bool) { move.order(drain, epoch, copier, state); },
                    .copy = [&](auto drain, int state) { move.copy(drain, state); }});
  std::atomic<int> client = start->socket;
  process.watchServer(
      [&](const std::string& reason) {
        if (client < 0) return;
        answer(client, "stop: " + reason);
        shutdown(client, SHUT_RDWR);
      },
      std::chrono::milliseconds(500));
  if (start->rebuild) {
    const auto came = test::rebuildSession(process, start->state);
    if (!came) return 0;
    client = start->socket = *came;
    move.serves(*came);
  }
  process.reportEnded(serve(process, *start, suspension, move));
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count > 1 && std::strcmp(words[1], "--copier") == 0) return test::runFakeCopier();
  for (int i = 1; i + 1 < count; ++i)  // GPUPOOL_DISTURB's: here the test says when
    if (std::strncmp(words[i], "--disturb", 9) == 0) {
      std::rotate(words + i, words + i + 2, words + count);
      count -= 2;
    }
  const WorkerArguments arguments = parseWorkerArguments(count, words);
  if (arguments.identify) {
    std::puts(textOf({.rows = rows(), .frames = 4, .release = "0.0.8"}).c_str());
    return 0;
  }
  if (arguments.inventory) {
    if (std::getenv("GPUPOOL_FAKE_INVENTORY") != nullptr) std::abort();
    return runInventory(arguments.driver, rows());
  }
  test::FakeSuspension suspension(kControlDescriptor);
  return runWorker(arguments, suspension);
}
