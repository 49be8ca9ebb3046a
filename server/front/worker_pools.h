#pragma once
// The workers of a server's programs: of the current one, which are started ahead of time, and of other
// builds', which are started when a session wants one. A session has workers of one program all its life:
// that of its client's rows. The other programs may change meanwhile. Belongs to the event loop's thread.

#include <map>
#include <string>
#include <vector>

#include "server/front/other_workers.h"
#include "server/front/worker_pool.h"

namespace gpupool::server {

struct WorkerVersion {  // schema::WorkerVersion
  uint64_t rows = 0;
  std::string release;
  bool operator==(const WorkerVersion&) const = default;
};

class WorkerPools final : private kj::TaskSet::ErrorHandler {
 public:
  // release: of the current program. The others get the same settings, but for program and rows, and with
  // nothing ahead of time.
  WorkerPools(kj::UnixEventPort& port, kj::Timer& timer, WorkerPool::Settings current,
              const std::string& release = "", const std::vector<OtherWorker>& others = {});
  KJ_DISALLOW_COPY(WorkerPools);

  // From now on these are the other programs. Sessions that run keep their workers; one whose program is not
  // among them any more gets no other worker. versions() is a new list then. False: nothing has changed.
  bool replaceOthers(const std::vector<OtherWorker>& others);

  // As WorkerPool's. Rejects at once where no program serves such clients, saying so.
  kj::Promise<kj::Own<WorkerChild>> take(uint64_t rows, WorkerPool::Wanted wanted, kj::Duration bound);
  // As WorkerPool's, of the current program.
  void expect(std::vector<int> ordinals) { pools_.at(currentRows())->expect(std::move(ordinals)); }
  // Why it has no workers for clients of these rows; empty: it has. release: theirs, where that is known.
  std::string refuses(uint64_t rows, const std::string& release = "") const;
  // "call rows 3b1f... of gpupool 0.1.0", for people.
  std::string describe(uint64_t rows) const;
  std::string releaseOf(uint64_t rows) const;  // of gpupool; empty: it is not known
  uint64_t currentRows() const { return versions_.front().rows; }
  const std::vector<WorkerVersion>& versions() const { return versions_; }  // the current one first

  // Of the current program: what the server is judged by.
  uint32_t warm() const { return current().warm(); }
  bool healthy() const { return current().healthy(); }
  const std::string& lastFailure() const { return current().lastFailure(); }
  // As WorkerPool's, all of them.
  kj::Promise<void> stop();

 private:
  const WorkerPool& current() const { return *pools_.at(currentRows()); }
  void taskFailed(kj::Exception&& exception) override;

  kj::UnixEventPort& port_;
  kj::Timer& timer_;
  WorkerPool::Settings otherSettings_;  // but for program and rows
  std::vector<WorkerVersion> versions_;
  std::map<uint64_t, kj::Own<WorkerPool>> pools_;  // by rows
  kj::TaskSet leaving_;                            // pools whose program is gone, until their workers are
};

}  // namespace gpupool::server
