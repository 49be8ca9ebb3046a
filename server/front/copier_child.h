#pragma once
// The copier as the server sees it: the process that keeps the memory of suspended sessions in this host's
// memory (server/copier/). It is started when it is first needed, and serves every session until the server
// stops.
//
// If it dies, what it kept is lost: the workers see their connections closed and end those sessions. The next
// suspension starts another one.
//
// When this process dies it lives on for as long as it keeps something, `away` at most, as workers do: it has
// a door (doors.h), by which the next life of this server takes it over. Belongs to the event loop's thread,
// as WorkerChild does.

#include <kj/async-io.h>
#include <kj/async-unix.h>
#include <kj/io.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "server/front/doors.h"
#include "server/front/server_state.h"
#include "server/front/worker_child.h"

namespace gpupool::server {

class CopierChild final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    WorkerProgram program;
    std::string driver;
    uint64_t budgetBytes = 0;                     // of host memory
    std::string folder;                           // for what exceeds it; empty: nothing may
    uint64_t aheadBytes = 0;                      // touched and registered when it starts
    bool verify = false;                          // it checks what it brings back
    kj::Duration startBound = 300 * kj::SECONDS;  // from fork to ready
    std::chrono::milliseconds away{0};            // 0: it ends with this process
    std::string doors;                            // the folder; with `away`
    kj::Duration adoptBound = 5 * kj::SECONDS;    // for one of an earlier life to answer
  };

  CopierChild(kj::UnixEventPort& port, kj::Timer& timer, Settings settings);
  ~CopierChild() noexcept {}
  KJ_DISALLOW_COPY(CopierChild);

  // A new connection for one session: the worker's end, close-on-exec. Starts the copier where there is none,
  // and rejects with its reason if it does not get ready.
  kj::Promise<kj::AutoCloseFd> connect();
  // That of an earlier life of this server is this one's, if it still runs and outlives its server; else it
  // is ended. Before anything else. Resolves when that is decided; the log says why not.
  kj::Promise<void> readopt(const StoredCopier& known);
  // What the next life needs for that; nothing: there is none.
  std::optional<StoredCopier> stored() const;
  // Called when that has changed.
  void onChange(std::function<void()> changed) { changed_ = std::move(changed); }
  // Starts it ahead of time. A failure is logged, and tried again with the next connect.
  void startAhead();
  // Ends it, resolves when it is gone, and starts none any more.
  kj::Promise<void> stop();

 private:
  struct Life : kj::Refcounted {
    kj::Own<WorkerChild> child;
    StoredCopier stored;
  };

  void start();
  void tellToOutlive(WorkerChild& child);
  kj::Own<Life> adopt(const StoredCopier& known);
  kj::Promise<void> awaitReady(kj::Own<Life> life, kj::Duration bound);
  kj::Promise<void> watch(kj::Own<Life> life);
  // No more of that one.
  void drop(Life& life);
  kj::AutoCloseFd connectTo(Life& life);
  std::vector<std::string> arguments() const;
  void taskFailed(kj::Exception&& exception) override;

  kj::UnixEventPort& port_;
  kj::Timer& timer_;
  Settings settings_;
  Doors doors_;
  std::function<void()> changed_ = [] {};
  kj::Own<Life> life_;                       // null: to be started
  kj::ForkedPromise<void> ready_ = nullptr;  // that one's
  bool stopped_ = false;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
