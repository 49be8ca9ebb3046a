#pragma once
// A worker's part in a move, for tests: the old worker's, and the next one's.
//
// The old one sends over the state socket how the next one is to behave, and waits for its answer. Its
// client, the test, hears "moved <epoch>", and says `L` (left) or `S` (stays) in its own time.
//
// A session that is copied is sent in full (session_state.h): words, staging memory, and device memory.

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "server/worker_process.h"

namespace gpupool::server::test {

class FakeMove {
 public:
  // client: the session's socket.
  FakeMove(WorkerProcess& process, int client) : process_(process), client_(client) {}
  ~FakeMove();

  void serves(int client) { client_ = client; }
  // The letters are fake_worker.cpp's.
  void misbehave(char how) { behaviour_ = how; }
  // The order, on the thread of the shell.
  void order(std::chrono::milliseconds drain, uint64_t epoch, int copier, int state);
  // The order to copy: a session of three parts, on a thread.
  void copy(std::chrono::milliseconds drain, int state);
  // What the client says: it has left, or stays.
  void left();
  void stays();

 private:
  void carryOut(uint64_t epoch);
  void carryOutCopy();
  void joinLast();
  void refuse(const std::string& why);

  WorkerProcess& process_;
  std::atomic<int> client_;
  int copier_ = -1, state_ = -1;  // while it moves
  std::atomic<char> behaviour_{0};
  uint32_t drainMs_ = 0;
  std::mutex mutex_;  // of copier_, state_ and thread_
  std::thread thread_;
};

// The next worker's: what it needs of the old one, which says so over the state socket. The client's socket;
// none: the session does not come here.
std::optional<int> rebuildSession(WorkerProcess& process, int state);

}  // namespace gpupool::server::test
