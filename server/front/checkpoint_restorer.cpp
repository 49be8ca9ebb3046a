#include "server/front/checkpoint_restorer.h"

#include <utility>

#include "base/log.h"
#include "server/front/beside.h"
#include "server/front/checkpoint_files.h"
#include "server/front/play_back.h"

namespace gpupool::server {
namespace {

kj::Exception failure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(text));
}

}  // namespace

// A session that is being restored.
struct CheckpointRestorer::Restored {
  SessionFacts facts;
  Descriptor file;
  Descriptor state;  // this side's end
  std::string error;
};

struct CheckpointRestorer::Restoring {
  Id lease;
  Manifest manifest;
  std::vector<Restored> sessions;
};

CheckpointRestorer::CheckpointRestorer(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions,
                                       WorkerPools& pool, const WorkerStarts& starts, HeldNotes& notes,
                                       Settings settings)
    : timer_(timer),
      leases_(leases),
      sessions_(sessions),
      pool_(pool),
      starts_(starts),
      notes_(notes),
      settings_(std::move(settings)),
      tasks_(*this) {}

kj::Promise<void> CheckpointRestorer::restore(const Id& lease, std::shared_ptr<const CheckpointFolder> folder,
                                              const std::string& name, Manifest here) {
  auto job = std::make_shared<Restoring>();
  job->lease = lease;
  return beside<bool>([job, folder = std::move(folder), name, here = std::move(here)] {
           OpenCheckpoint open = openCheckpoint(*folder, name, here, Written::held);
           job->manifest = std::move(open.manifest);
           for (Descriptor& file : open.files) job->sessions.emplace_back().file = std::move(file);
           return true;
         })
      .then([this, job](bool) -> kj::Promise<void> {
        if (leases_.admissible(job->lease) == nullptr) return failure("the lease ended meanwhile");
        if (!settings_.network && !job->manifest.sessions.empty())
          return failure("server " + settings_.server +
                         " takes no network sessions, over which the lease's programs go on: start it with "
                         "--listen, or restore the lease elsewhere (--to)");
        for (const Manifest::Session& session : job->manifest.sessions)
          if (const uint64_t rows = session.facts.rowsHash; !pool_.refuses(rows).empty())
            return failure("the checkpoint was written by another build of gpupool: server " +
                           settings_.server + " has no worker program for " + pool_.describe(rows) +
                           " (--workers)");
        if (const auto missing = leases_.reserveAgain(job->lease))
          return failure("the lease cannot be restored: " + *missing);
        return restoreAll(job);
      });
}

kj::Promise<void> CheckpointRestorer::restoreAll(std::shared_ptr<Restoring> job) {
  kj::Vector<kj::Promise<void>> all;
  for (size_t i = 0; i < job->sessions.size(); ++i)
    all.add(kj::evalNow([&] { return restoreOne(job, i); })
                .catch_([job, i](kj::Exception&& failed) {
                  job->sessions[i].error = failed.getDescription().cStr();
                })
                .eagerlyEvaluate(nullptr));
  return kj::joinPromises(all.releaseAsArray()).then([this, job]() -> kj::Promise<void> {
    std::string why;
    for (const Restored& one : job->sessions)
      if (why.empty() && !one.error.empty())
        why = one.facts.command + " (process " + std::to_string(one.facts.clientPid) + "): " + one.error;
    Grant* grant = leases_.admissible(job->lease);
    if (why.empty() && grant == nullptr) why = "the lease ended meanwhile";
    if (!why.empty()) return giveUp(job, why);
    leases_.unpause(job->lease);
    notes_.erase(job->lease);
    GPUPOOL_INFO("lease %s: restored, %zu sessions wait for their clients", job->lease.text().c_str(),
                 job->sessions.size());
    for (Restored& one : job->sessions) one.file = Descriptor();
    // A worker waits for its client for as long as this end is there.
    auto come = sessions_.begun(job->lease);
    tasks_.add(timer_.afterDelay(settings_.clients).exclusiveJoin(kj::mv(come)).attach(kj::cp(job)));
    return kj::READY_NOW;
  });
}

// It is held as before.
kj::Promise<void> CheckpointRestorer::giveUp(std::shared_ptr<Restoring> job, const std::string& why) {
  GPUPOOL_WARNING("lease %s: not restored: %s", job->lease.text().c_str(), why.c_str());
  kj::Vector<kj::Promise<void>> gone;
  for (Restored& one : job->sessions) {
    one.state = Descriptor();
    gone.add(sessions_.displaceArrival(one.facts));
  }
  return kj::joinPromises(gone.releaseAsArray()).then([this, job, why]() -> kj::Promise<void> {
    if (const Grant* grant = leases_.admissible(job->lease); grant != nullptr && grant->suspended)
      leases_.setHeld(job->lease, HeldFiles(grant->held.value()), *grant->suspended);
    return failure(why);
  });
}

kj::Promise<void> CheckpointRestorer::restoreOne(std::shared_ptr<Restoring> job, size_t index) {
  const Manifest::Session& session = job->manifest.sessions[index];
  Grant* grant = leases_.admissible(job->lease);
  SessionFacts& facts = job->sessions[index].facts;
  facts.session = session.session;
  facts.lease = job->lease;
  facts.epoch = session.epoch + 1;
  facts.clientPid = session.clientPid;
  facts.command = session.command;
  facts.transport = session.transport;
  facts.rowsHash = session.facts.rowsHash;
  facts.place(*grant, leases_.devices());
  return pool_.take(facts.rowsHash, {leases_.ordinals(*grant), false}, settings_.workerBound)
      .then([this, job, index](kj::Own<WorkerChild> worker) -> kj::Promise<void> {
        Grant* grant = leases_.admissible(job->lease);
        Restored& one = job->sessions[index];
        if (grant == nullptr || stopped_) return failure("the lease ended meanwhile");
        grant->sessionEpochs[one.facts.session] = one.facts.epoch - 1;
        return playBackTo(kj::mv(worker), one.facts, *grant, playOf(one.file), sessions_, starts_, one.state)
            .catch_([job, index](kj::Exception&& why) {
              job->sessions[index].error = why.getDescription().cStr();
            });
      });
}

void CheckpointRestorer::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("checkpoints: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
