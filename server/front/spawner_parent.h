#pragma once
// gpupool-spawner as the parent of workers: each gets a user id of its own, and this process keeps no
// capability.

#include <kj/async-unix.h>

#include <memory>
#include <optional>

#include "server/front/user_lock.h"
#include "server/front/worker_parent.h"
#include "server/spawner/protocol.h"
#include "server/spawner/user_range.h"

namespace gpupool::server {

class SpawnerParent final : public WorkerParent {
 public:
  // Starts gpupool-spawner, which lies beside this executable, and gives up this process's capabilities:
  // before it has a second thread. locks: the folder that all servers of the machine share. Throws
  // options::OptionError where this process may not change user ids, or another server has some of these.
  static std::unique_ptr<SpawnerParent> begin(const UserRange& users, const std::string& locks);
  // program: of the spawner. Throws kj::Exception.
  SpawnerParent(const std::string& program, const UserRange& users);
  ~SpawnerParent() noexcept(false) override;  // ends the spawner, and what it has started
  KJ_DISALLOW_COPY(SpawnerParent);

  Process start(int program, const std::vector<std::string>& words, const std::vector<std::string>& variables,
                int control) override;
  void kill(pid_t pid) override;
  int reap(pid_t pid) override;
  bool killEarlier(int process) override;
  void outlive(pid_t pid) override;
  void spare(int process) override;
  // Rejects when the spawner ends: no worker can be started, or killed, from then on. Once.
  kj::Promise<void> ended(kj::UnixEventPort& port);

 private:
  struct Answered {
    SpawnerAnswer words;
    kj::AutoCloseFd descriptor;
  };
  Answered ask(const SpawnerRequest& request, const std::vector<int>& descriptors = {});
  Answered hear();
  void tell(const SpawnerRequest& request, const std::vector<int>& descriptors = {});

  std::optional<UserLock> lock_;
  pid_t pid_ = 0;
  kj::AutoCloseFd process_;  // pidfd_open(2)
  kj::AutoCloseFd socket_;
};

}  // namespace gpupool::server
