#pragma once
// A worker's and a copier's part in suspending, for tests.
//
// The worker's shell (worker_process.h) knows nothing of this: orders to suspend and to resume are taken out
// of what the server sends before the shell sees it.

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace gpupool::server::test {

class FakeSuspension {
 public:
  // Moves the server's socket away from `descriptor` and puts one there that everything goes through.
  explicit FakeSuspension(int descriptor);
  // After the shell has closed its end: what it had sent has then been passed on.
  ~FakeSuspension();

  // The letters are fake_worker.cpp's.
  void misbehave(char how) { behaviour_ = how; }
  std::string state() const;
  void reportUnasked() { report(true, "", devices_); }
  void askForDisturbance();
  // False: nobody wants to know.
  bool reportActivity(char letter);
  // Returns when all reports of the shell are the server's.
  void flush();

 private:
  void pass();
  bool passOrder();
  bool passReport();
  void obey(bool suspend, int copier);
  void report(bool suspended, const std::string& error, size_t devices);
  // Asks the copier's connection and waits for its answer; false: it is gone.
  bool askCopier(const char* what);
  [[noreturn]] void copierGone();

  int server_ = -1;                 // the server's socket
  int shell_ = -1;                  // our end of the shell's
  int copier_ = -1;                 // while suspended
  std::atomic<size_t> devices_{0};  // of the session
  std::atomic<bool> activityWanted_{false};
  std::atomic<char> behaviour_{0};
  std::atomic<bool> suspended_{false};
  std::atomic<int> times_{0};
  std::mutex passing_;
  std::thread thread_;
};

// `--copier`: serves connections with "taken" for "take" and "brought" for "bring". GPUPOOL_FAKE_COPIER says
// how else: "fail", "mute", "crash" (all at the start), "crash on take".
int runFakeCopier();

}  // namespace gpupool::server::test
