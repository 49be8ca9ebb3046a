#include "server/front/control.h"

#include "base/log.h"
#include "schema/convert.h"

namespace gpupool::server {
namespace {

MoveTarget readTarget(schema::Lease::Reader target) {
  const auto server = target.getServer();
  MoveTarget read{target.getDeviceEpoch(),
                  {schema::text(server.getName()), schema::text(server.getHost()), server.getPort()}};
  for (auto worker : server.getWorkers()) read.server.rows.push_back(worker.getRowsHash());
  return read;
}

}  // namespace

kj::Promise<void> Control::grant(GrantContext context) {
  const auto lease = context.getParams().getLease();
  const std::string id = schema::read(lease.getId()).text();
  if (const auto refusal = leases_.grant(lease)) {
    GPUPOOL_WARNING("grant of lease %s refused: %s", id.c_str(), refusal->c_str());
    return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__,
                         kj::str("the server refuses the lease: ", *refusal));
  }
  hooks_.granted(schema::read(lease.getId()));
  GPUPOOL_INFO("lease %s granted to %s", id.c_str(), lease.getHolder().cStr());
  return kj::READY_NOW;
}

kj::Promise<void> Control::revoke(RevokeContext context) {
  const Id id = schema::read(context.getParams().getId());
  const std::string reason = context.getParams().getReason();
  context.releaseParams();
  if (!leases_.close(id)) return hooks_.earlierGone(id).then([this, id] { hooks_.gone(id); });  // idempotent
  if (const auto ending = ending_.find(id); ending != ending_.end()) return ending->second.addBranch();
  GPUPOOL_INFO("lease %s revoked: %s", id.text().c_str(), reason.c_str());
  return beginEnd(id, reason);
}

// Kept by this server, not by the call: a manager that goes away meanwhile must not leave the lease half
// closed.
kj::Promise<void> Control::beginEnd(const Id& id, const std::string& reason) {
  auto& done = ending_.emplace(id, endLease(id, reason).fork()).first->second;
  tasks_.add(done.addBranch().then([this, id] { ending_.erase(id); },
                                   [this, id](kj::Exception&& exception) {
                                     ending_.erase(id);
                                     taskFailed(kj::mv(exception));
                                   }));
  return done.addBranch();
}

void Control::goOnEnding() {
  for (const auto& [id, lease] : leases_.all())
    if (lease.closing && !ending_.contains(id)) tasks_.add(beginEnd(id, ""));
}

// The lease's devices are free when nobody has memory there: not its sessions, not workers of an earlier life
// that were not readopted, and not sessions of other leases, which end by other words than this one.
kj::Promise<void> Control::endLease(const Id& id, const std::string& reason) {
  return sessions_.end(id, "the lease has ended" + (reason.empty() ? "" : ": " + reason))
      .then([this, id] { return hooks_.earlierGone(id); })
      .then([this, id] {
        if (const std::string others = sessions_.borrowers(id); !others.empty())
          GPUPOOL_INFO("lease %s: its sessions have ended; %s has memory of it", id.text().c_str(),
                       others.c_str());
        return sessions_.givenBack(id);
      })
      .then([this, id] {
        leases_.remove(id);
        hooks_.gone(id);
      });
}

kj::Promise<void> Control::sessions(SessionsContext context) {
  auto results = context.getResults();
  sessions_.write([&](unsigned count) { return results.initSessions(count); });
  return kj::READY_NOW;
}

kj::Promise<void> Control::suspend(SuspendContext context) {
  const Id id = schema::read(context.getParams().getId());
  const uint32_t drainMs = context.getParams().getDrainMs();
  const std::string folder = schema::text(context.getParams().getFolder());
  context.releaseParams();
  if (!folder.empty() && !hooks_.hold) return KJ_EXCEPTION(FAILED, "this server writes no checkpoints");
  auto suspended = folder.empty() ? suspension_.suspend(id, drainMs) : hooks_.hold(id, drainMs, folder);
  return suspended.then([this, context, id](const Suspended& suspended) mutable {
    auto result = context.getResults().initResult();
    schema::writeKept(suspended.kept, result);
    result.setMovedBytes(suspended.movedBytes);
    result.setDrainMs(suspended.drainMs);
    result.setMoveMs(suspended.moveMs);
    if (const HeldFiles* held = leases_.held(id)) write(*held, result.initHeld());
  });
}

kj::Promise<void> Control::resume(ResumeContext context) {
  const Id id = schema::read(context.getParams().getId());
  const std::string folder = schema::text(context.getParams().getFolder());
  const bool running = context.getParams().getRunning();
  context.releaseParams();
  if (!folder.empty() && !hooks_.restore) return KJ_EXCEPTION(FAILED, "this server restores no checkpoints");
  if (!folder.empty()) return hooks_.restore(id, folder, running);
  return suspension_.resume(id).then([this, id] { hooks_.resumed(id); });
}

kj::Promise<void> Control::migrate(MigrateContext context) {
  const Id id = schema::read(context.getParams().getId());
  const uint32_t drainMs = context.getParams().getDrainMs();
  std::optional<MoveTarget> target;
  if (context.getParams().hasTarget()) target = readTarget(context.getParams().getTarget());
  context.releaseParams();
  if (!hooks_.migrate) return KJ_EXCEPTION(FAILED, "this server moves no session");
  return hooks_.migrate(id, drainMs, std::move(target)).then([context](const Migrated& migrated) mutable {
    auto result = context.getResults().initResult();
    result.setSessions(migrated.sessions);
    result.setMovedBytes(migrated.movedBytes);
    result.setLongestPauseMs(migrated.longestPauseMs);
  });
}

kj::Promise<void> Control::addTarget(AddTargetContext context) {
  const auto target = context.getParams().getTarget();
  const std::string id = schema::read(target.getId()).text();
  if (const auto refusal = leases_.addTarget(target)) {
    GPUPOOL_WARNING("other devices for lease %s refused: %s", id.c_str(), refusal->c_str());
    return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__,
                         kj::str("the server refuses the lease other devices: ", *refusal));
  }
  hooks_.granted(schema::read(target.getId()));
  GPUPOOL_INFO("lease %s may move to other devices", id.c_str());
  return kj::READY_NOW;
}

kj::Promise<void> Control::settle(SettleContext context) {
  const Id id = schema::read(context.getParams().getId());
  const bool moved = context.getParams().getMoved();
  context.releaseParams();
  if (!hooks_.settle) return KJ_EXCEPTION(FAILED, "this server moves no session");
  return hooks_.settle(id, moved);
}

kj::Promise<void> Control::checkpoint(CheckpointContext context) {
  const Id id = schema::read(context.getParams().getId());
  const uint32_t drainMs = context.getParams().getDrainMs();
  const std::string folder = schema::text(context.getParams().getFolder());
  context.releaseParams();
  if (!hooks_.checkpoint) return KJ_EXCEPTION(FAILED, "this server writes no checkpoints");
  return hooks_.checkpoint(id, drainMs, folder).then([context](const Checkpointed& done) mutable {
    auto result = context.getResults().initResult();
    result.setSessions(done.sessions);
    result.setBytes(done.bytes);
    result.setLongestPauseMs(done.longestPauseMs);
    result.setFolder(done.folder);
  });
}

kj::Promise<void> Control::keep(KeepContext context) {
  if (!hooks_.keep) return KJ_EXCEPTION(FAILED, "this server is no standby");
  const auto refusal = hooks_.keep(context.getParams().getLease());
  if (!refusal) return kj::READY_NOW;
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(*refusal));
}

kj::Promise<void> Control::dropKept(DropKeptContext context) {
  if (hooks_.dropKept) hooks_.dropKept(schema::read(context.getParams().getId()));
  return kj::READY_NOW;
}

void Control::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("control: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
