#include "server/front/session_restorer.h"

#include "base/log.h"

namespace gpupool::server {
namespace {

kj::Exception failure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(text));
}

}  // namespace

SessionRestorer::SessionRestorer(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions,
                                 Suspension& suspension, WorkerPools& pool, const WorkerStarts& starts,
                                 Settings settings)
    : timer_(timer),
      leases_(leases),
      sessions_(sessions),
      suspension_(suspension),
      pool_(pool),
      starts_(starts),
      settings_(std::move(settings)),
      tasks_(*this) {}

std::optional<std::string> SessionRestorer::failingOver(const SessionFacts& client) const {
  const auto at = restoring_.find({client.lease, client.session});
  if (at == restoring_.end() || at->second->epoch != client.epoch || at->second->ready) return std::nullopt;
  return at->second->why;
}

bool SessionRestorer::tries(const Name& name) const {
  const auto at = restoring_.find(name);
  return at != restoring_.end() && at->second->why.empty();
}

bool SessionRestorer::arrived(const Name& name, uint64_t epoch) {
  const auto at = restoring_.find(name);
  if (at == restoring_.end() || at->second->epoch > epoch) return false;
  restoring_.erase(at);
  return true;
}

void SessionRestorer::dropEnded() {
  std::erase_if(restoring_, [&](const auto& entry) { return !leases_.contains(entry.first.first); });
}

void SessionRestorer::begin(const Name& name, SessionFacts next, Play play) {
  auto restoring = std::make_shared<Restoring>();
  restoring->epoch = next.epoch;
  restoring->play = std::move(play);
  restoring_[name] = restoring;
  tasks_.add(attempt(name, std::move(next), restoring)
                 // Its worker waits for a client for as long as this end is there.
                 .then([this] { return timer_.afterDelay(settings_.clients); })
                 .then([this, name, restoring] {
                   if (const auto at = restoring_.find(name);
                       at != restoring_.end() && at->second == restoring)
                     restoring_.erase(at);
                 }));
}

kj::Promise<void> SessionRestorer::attempt(Name name, SessionFacts facts,
                                           std::shared_ptr<Restoring> restoring) {
  return suspension_.lanes()
      .queue<void>(name.first, [this, name, facts] { return restore(name, facts); })
      .catch_([this, name, facts, restoring](kj::Exception&& error) {
        const std::string why = error.getDescription().cStr();
        GPUPOOL_WARNING("session %s: not restored: %s", facts.session.text().c_str(), why.c_str());
        restoring->state = Descriptor();
        return sessions_.displaceArrival(facts).then(
            [this, name, facts, restoring, why]() -> kj::Promise<void> {
              if (settings_.again(name)) return attempt(name, facts, restoring);
              restoring->why = why;
              restoring->play = nullptr;
              return kj::READY_NOW;
            });
      });
}

kj::Promise<void> SessionRestorer::restore(Name name, SessionFacts facts) {
  const Grant* grant = leases_.admissible(name.first);
  if (stopped_ || grant == nullptr || grant->suspended || grant->closing)
    return failure("the lease ended or was suspended meanwhile");
  facts.place(*grant, leases_.devices());
  return pool_.take(facts.rowsHash, {leases_.ordinals(*grant), false}, settings_.workerBound)
      .then([this, name, facts = std::move(facts)](kj::Own<WorkerChild> worker) mutable {
        return rebuild(name, std::move(facts), kj::mv(worker));
      });
}

kj::Promise<void> SessionRestorer::rebuild(Name name, SessionFacts facts, kj::Own<WorkerChild> worker) {
  const Grant* grant = leases_.admissible(name.first);
  const auto at = restoring_.find(name);
  if (stopped_ || grant == nullptr || at == restoring_.end() ||
      grant->placement(facts.deviceEpoch) == nullptr)
    return failure("the lease ended meanwhile");
  const std::shared_ptr<Restoring> restoring = at->second;
  return playBackTo(kj::mv(worker), facts, *grant, restoring->play, sessions_, starts_, restoring->state)
      .then([restoring] {
        restoring->ready = true;
        restoring->play = nullptr;  // else its memory counts until nobody waits for the client any more
      });
}

void SessionRestorer::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("keeper: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
