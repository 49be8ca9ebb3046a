#pragma once
// The account of a lease's memory as a worker of a server sees it.

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

 private:
  WorkerProcess& process_;
};

}  // namespace gpupool::server
