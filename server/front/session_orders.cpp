// SessionTable's part in suspending: orders to single sessions, what they answer, whether they have something
// to do, and whether they could be moved.
#include <capnp/message.h>

#include <algorithm>

#include "base/log.h"
#include "server/front/apart.h"
#include "server/front/sessions.h"

namespace gpupool::server {
namespace {

// What an answer says of itself; its amounts are for who knows the devices.
Outcome readOutcome(schema::SuspendReport::Reader report, std::optional<bool> toSuspend, size_t devices) {
  Outcome outcome;
  outcome.suspended = report.getSuspended();
  outcome.error = report.getError().cStr();
  outcome.facts.movedBytes = report.getMovedBytes();
  outcome.facts.drainMs = report.getDrainMs();
  outcome.facts.moveMs = report.getMoveMs();
  for (const uint64_t kept : report.getKept()) {
    if (outcome.facts.kept.size() == devices) break;
    outcome.facts.kept.push_back(kept);
  }
  if (!outcome.error.empty()) return outcome;
  if (toSuspend && outcome.suspended != *toSuspend) {
    outcome.error = std::string("its worker answered nonsense: it is ") +
                    (outcome.suspended ? "suspended" : "not suspended") + " and says nothing of why";
  } else if (outcome.suspended && report.getKept().size() != devices) {
    outcome.error = "its worker answered nonsense: it keeps memory on " +
                    std::to_string(report.getKept().size()) + " devices of " + std::to_string(devices);
  }
  return outcome;
}

}  // namespace

kj::Own<void> SessionTable::beginning(const Id& lease) {
  ++beginnings_[lease].count;
  return kj::heap(kj::defer([this, lease] {
    const auto found = beginnings_.find(lease);
    if (--found->second.count != 0) return;
    for (auto& fulfiller : found->second.over) fulfiller->fulfill();
    beginnings_.erase(found);
  }));
}

kj::Promise<void> SessionTable::begun(const Id& lease) {
  const auto found = beginnings_.find(lease);
  if (found == beginnings_.end()) return kj::READY_NOW;
  auto pair = kj::newPromiseAndFulfiller<void>();
  found->second.over.add(kj::mv(pair.fulfiller));
  return kj::mv(pair.promise);
}

std::vector<uint64_t> SessionTable::numbers(const Id& lease) const {
  std::vector<uint64_t> list;
  for (const auto& session : living_)
    if (session->facts.lease == lease) list.push_back(session->number);
  return list;
}

SessionTable::Session* SessionTable::find(uint64_t number) const {
  for (const auto& session : living_)
    if (session->number == number) return const_cast<Session*>(session.get());
  return nullptr;
}

std::string SessionTable::describe(uint64_t number) const {
  const Session* session = find(number);
  if (session == nullptr) return "a session";
  return session->facts.command + " (process " + std::to_string(session->facts.clientPid) + ")";
}

kj::Promise<Outcome> SessionTable::suspend(uint64_t number, uint32_t drainMs, kj::AutoCloseFd copier,
                                           kj::Duration bound) {
  Session* session = find(number);
  if (session == nullptr) return Outcome{.gone = true};
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().initSuspend().setDrainMs(drainMs);
  const int descriptor = copier;
  return order(*session, message, std::span(&descriptor, 1), true, bound);
}

kj::Promise<Outcome> SessionTable::resume(uint64_t number, kj::Duration bound) {
  Session* session = find(number);
  if (session == nullptr) return Outcome{.gone = true};
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().setResume();
  return order(*session, message, {}, false, bound);
}

kj::Promise<Outcome> SessionTable::order(Session& session, capnp::MessageBuilder& message,
                                         std::span<const int> descriptors, bool toSuspend,
                                         kj::Duration bound) {
  KJ_REQUIRE(session.answer.get() == nullptr && session.moved.get() == nullptr,
             "a session has one order at a time");
  auto pair = kj::newPromiseAndFulfiller<Outcome>();
  session.answer = kj::mv(pair.fulfiller);
  session.toSuspend = toSuspend;
  // A worker that takes no order is dead or stuck. Either way its exit is the answer.
  if (!session.worker->send(message, descriptors)) {
    if (session.text.empty()) session.text = "its worker took no order any more";
    session.worker->kill();
  }
  return answerWithin(kj::mv(pair.promise), session.number, toSuspend ? "to be suspended" : "to be resumed",
                      bound);
}

kj::Promise<Outcome> SessionTable::answerWithin(kj::Promise<Outcome> answer, uint64_t number,
                                                const char* what, kj::Duration bound) {
  auto late = isStuckBefore(number, timer_.now() + bound).then([this, what, number](bool stuck) {
    Session* slow = find(number);
    if (slow == nullptr) return kj::Promise<void>(kj::READY_NOW);
    if (stuck && slow->answer.get() != nullptr) {
      const std::string why = killStuck(*slow);
      slow->answer->fulfill(Outcome{.error = why});
      slow->answer = nullptr;
      return kj::Promise<void>(kj::READY_NOW);
    }
    GPUPOOL_ERROR("worker %d did not answer the order %s in its time: its session is ended",
                  slow->worker->pid(), what);
    return end(*slow, std::string("the session's worker did not answer the order ") + what);
  });
  // Its end is an outcome, by `finish`.
  auto never = late.then([]() -> kj::Promise<Outcome> { return kj::NEVER_DONE; });
  return answer.exclusiveJoin(kj::mv(never));
}

// Looks are counted, not the time between them: a server that was stopped itself has not looked.
kj::Promise<bool> SessionTable::isStuckBefore(uint64_t number, kj::TimePoint until, unsigned unread) {
  constexpr unsigned kLooks = 6;
  Session* session = find(number);
  if (session == nullptr) return false;
  if (session->worker->hasRead()) {
    unread = 0;
    session->worker->probe();
  } else if (++unread > kLooks) {
    return true;
  }
  const kj::TimePoint now = timer_.now();
  if (now >= until) return false;
  return timer_.afterDelay(std::min(bounds_.reads / kLooks, until - now)).then([this, number, until, unread] {
    return isStuckBefore(number, until, unread);
  });
}

// It would neither end nor go on. What it has of the devices is free with it.
std::string SessionTable::killStuck(Session& session) const {
  const std::string why = "its worker (process " + std::to_string(session.worker->pid()) +
                          ") is stopped or hangs: it has read nothing for " +
                          std::to_string(bounds_.reads / kj::SECONDS) + " s, and is ended";
  GPUPOOL_ERROR("session %s: %s", session.facts.session.text().c_str(), why.c_str());
  if (session.text.empty()) session.text = "the session's worker was stopped or hung";
  session.worker->kill();
  return why;
}

kj::Promise<Outcome> SessionTable::settled(uint64_t number, kj::Duration bound) {
  Session* session = find(number);
  if (session == nullptr) return Outcome{.gone = true};
  auto settles = kj::mv(session->settles);
  session->settles = nullptr;
  KJ_IF_MAYBE (promise, settles)
    return answerWithin(kj::mv(*promise), number, "of this server's earlier life", bound);
  return kj::evalLater([] { return Outcome(); });  // it has begun since
}

void SessionTable::answered(Session& session, schema::SuspendReport::Reader report) {
  if (session.answer.get() == nullptr) {
    GPUPOOL_WARNING("session %s: its worker %d says that it is %s, and nobody asked: ignored",
                    session.facts.session.text().c_str(), session.worker->pid(),
                    report.getSuspended() ? "suspended" : "not suspended");
    return;
  }
  if (session.ordered) return;  // its end is the outcome
  Outcome outcome = readOutcome(report, session.toSuspend, session.facts.devices.size());
  session.answer->fulfill(kj::mv(outcome));
  session.answer = nullptr;
}

bool SessionTable::active(const Id& lease, bool suspended) const {
  for (const auto& session : living_) {
    if (session->facts.lease != lease || session->ordered) continue;
    // What was said before it was suspended does not count: only a call that has come since.
    if (!session->activity || (suspended ? *session->activity == schema::Activity::WAITING
                                         : *session->activity != schema::Activity::QUIET))
      return true;
  }
  return false;
}

SessionTable::Use SessionTable::use(const Id& lease) const {
  Use use;
  for (const auto& session : living_) {
    if (session->facts.lease != lease) continue;
    ++use.sessions;
    use.changes += session->activityChanges;
  }
  return use;
}

std::map<Id, std::vector<std::string>> SessionTable::hindrances(
    const std::function<bool(const Id& lease)>& isProtected) const {
  std::map<Id, std::vector<std::string>> all;
  const auto add = [&](const Id& lease, const std::string& reason) {
    auto& reasons = all[lease];
    if (std::find(reasons.begin(), reasons.end(), reason) == reasons.end()) reasons.push_back(reason);
  };
  for (const auto& session : living_) {
    for (const std::string& reason : session->hindrances)
      add(session->facts.lease, "cannot be moved: " + reason);
    const bool guarded = isProtected && isProtected(session->facts.lease);
    if (const std::string why = whyNotApart(session->facts, guarded); !why.empty())
      add(session->facts.lease, "cannot be moved to another server: " + why);
  }
  for (const Id& lease : offers_.lenders())
    add(lease, "cannot be suspended, or moved to other GPUs: " + lentText(lease));
  return all;
}

SessionTable::Sending SessionTable::sending(uint64_t number) const {
  const Session* session = find(number);
  if (session == nullptr) return {};
  return {session->activity == schema::Activity::QUIET, session->activityChanges};
}

ClientLog SessionTable::clientLog(uint64_t number) const {
  const Session* session = find(number);
  return session == nullptr ? ClientLog{} : session->log;
}

void SessionTable::tellKept(uint64_t number, uint64_t frame, uint64_t aside) {
  Session* session = find(number);
  if (session == nullptr || session->ordered) return;
  capnp::MallocMessageBuilder message;
  auto kept = message.initRoot<schema::WorkerOrder>().initKept();
  kept.setFrame(frame);
  kept.setAside(aside);
  session->worker->send(message);  // one that takes no order any more has other troubles
}

kj::Promise<void> SessionTable::endOne(uint64_t number, const std::string& reason) {
  Session* session = find(number);
  if (session == nullptr) return kj::READY_NOW;
  return end(*session, reason);
}

}  // namespace gpupool::server
