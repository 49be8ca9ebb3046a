#pragma once
// What the manager may ask of this server: grant, revoke, suspend, resume, move, write to files, list
// sessions. Called on the connection the server made.

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "server/front/checkpoints.h"
#include "server/front/leases.h"
#include "server/front/migration.h"
#include "server/front/sessions.h"
#include "server/front/suspension.h"

namespace gpupool::server {

class Control final : public schema::ServerControl::Server, private kj::TaskSet::ErrorHandler {
 public:
  struct Hooks {
    // Called after each grant and each target, before the manager hears of it.
    std::function<void(const Id&)> granted = [](const Id&) {};
    // Called when an order to resume a lease has been carried out: where leases take turns it may be aside
    // still.
    std::function<void(const Id&)> resumed = [](const Id&) {};
    // Migration::migrate and settle. Not set: refused.
    std::function<kj::Promise<Migrated>(const Id&, uint32_t drainMs, std::optional<MoveTarget>)> migrate =
        nullptr;
    std::function<kj::Promise<void>(const Id&, bool moved)> settle = nullptr;
    // Checkpoints::checkpoint. Not set: refused.
    std::function<kj::Promise<Checkpointed>(const Id&, uint32_t drainMs, const std::string& name)>
        checkpoint = nullptr;
    // Checkpoints::hold and restore. Not set: refused.
    std::function<kj::Promise<Suspended>(const Id&, uint32_t drainMs, const std::string& name)> hold =
        nullptr;
    std::function<kj::Promise<void>(const Id&, const std::string& name, bool running)> restore = nullptr;
    // Standby::keep and drop. Not set: refused.
    std::function<std::optional<std::string>(schema::Lease::Reader)> keep = nullptr;
    std::function<void(const Id&)> dropKept = nullptr;
    // Called when the manager has had an end made of it here, and nothing of it is left.
    std::function<void(const Id&)> gone = [](const Id&) {};
    // Resolves when no worker of an earlier life of this server is left that served the lease.
    std::function<kj::Promise<void>(const Id&)> earlierGone = [](const Id&) { return kj::READY_NOW; };
  };
  Control(LeaseTable& leases, SessionTable& sessions, Suspension& suspension, Hooks hooks)
      : leases_(leases),
        sessions_(sessions),
        suspension_(suspension),
        hooks_(std::move(hooks)),
        tasks_(*this) {}

  // Leases that an earlier life of this server was ending are at their end as soon as nobody has memory of
  // them: whether or not a manager asks again.
  void goOnEnding();

 protected:
  kj::Promise<void> grant(GrantContext context) override;
  kj::Promise<void> revoke(RevokeContext context) override;
  kj::Promise<void> sessions(SessionsContext context) override;
  kj::Promise<void> suspend(SuspendContext context) override;
  kj::Promise<void> resume(ResumeContext context) override;
  kj::Promise<void> migrate(MigrateContext context) override;
  kj::Promise<void> addTarget(AddTargetContext context) override;
  kj::Promise<void> settle(SettleContext context) override;
  kj::Promise<void> checkpoint(CheckpointContext context) override;
  kj::Promise<void> keep(KeepContext context) override;
  kj::Promise<void> dropKept(DropKeptContext context) override;

 private:
  kj::Promise<void> endLease(const Id& id, const std::string& reason);
  kj::Promise<void> beginEnd(const Id& id, const std::string& reason);
  void taskFailed(kj::Exception&& exception) override;

  LeaseTable& leases_;
  SessionTable& sessions_;
  Suspension& suspension_;
  Hooks hooks_;
  std::map<Id, kj::ForkedPromise<void>> ending_;  // leases of which an end is under way
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
