#pragma once
// The account of a lease's memory as a worker of a server sees it.

#include <atomic>

#include "server/worker/account.h"
#include "server/worker_process.h"

namespace gpupool::server {

// Kept by the server that started this worker.
class ServerAccount final : public Account {
 public:
  explicit ServerAccount(WorkerProcess& process) : process_(process) {}
  CUresult take(unsigned place, uint64_t bytes) override;
  void give(unsigned place, uint64_t bytes) override;
  uint64_t others(unsigned place) override;
  CUresult offer(uint64_t piece, const Part& part, int descriptor, schema::ShareToken& token) override;
  CUresult open(const schema::ShareToken& token, Opened& opened) override;
  void endOffer(const schema::ShareToken& token, bool awaited) override;
  void inherit(unsigned place, uint64_t bytes) override;
  void disinherit(unsigned place, uint64_t bytes) override;
  void endPiece(uint64_t piece, unsigned place, uint64_t bytes) override;
  void close(uint64_t opening) override;
  uint64_t number() const override { return number_; }

 private:
  CUresult resultOf(const ShareAnswer& answer);

  WorkerProcess& process_;
  std::atomic<uint64_t> number_{0};
};

}  // namespace gpupool::server
