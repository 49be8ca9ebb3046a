// SessionTable's part in moves: a session's old worker and its next one, of which one survives.
#include <capnp/message.h>

#include <utility>

#include "base/log.h"
#include "server/front/sessions.h"
#include "transports/last_words.h"

namespace gpupool::server {

kj::Own<SessionTable::Session> SessionTable::takeFrom(std::list<kj::Own<Session>>& list,
                                                      const Session& wanted) {
  for (auto at = list.begin(); at != list.end(); ++at) {
    if (at->get() != &wanted) continue;
    kj::Own<Session> taken = kj::mv(*at);
    list.erase(at);
    return taken;
  }
  KJ_FAIL_REQUIRE("a session is not in its list");
}

const SessionFacts* SessionTable::facts(uint64_t number) const {
  const Session* session = find(number);
  return session == nullptr || session->ordered ? nullptr : &session->facts;
}

SessionTable::Session* SessionTable::next(uint64_t number) const {
  for (const auto& session : next_)
    if (session->number == number && !session->dropped) return const_cast<Session*>(session.get());
  return nullptr;
}

kj::Promise<MoveAnswer> SessionTable::move(uint64_t number, kj::Own<WorkerChild> next, SessionFacts facts,
                                           MoveMeans means) {
  Session* old = find(number);
  KJ_REQUIRE(old != nullptr && old->answer.get() == nullptr && old->moved.get() == nullptr,
             "a session has one order at a time");
  announced_.reset();
  const auto& from = accounts_.at(accountOf(old->facts));
  auto& to = accounts_.try_emplace(accountOf(facts), facts.memoryLimits).first->second;
  if (&to != &from && !to.takeAs(from, number)) {
    leaveAccount(accountOf(facts), number);
    changed_();
    return kj::evalLater([] {
      return MoveAnswer{.error = "the lease's memory on the other devices is its other sessions' already"};
    });
  }
  auto session = kj::refcounted<Session>();
  session->role = Role::next;
  session->facts = std::move(facts);
  session->number = number;
  session->began = old->began;
  session->worker = kj::mv(next);
  watch(*session);
  const uint64_t epoch = session->facts.epoch;
  next_.push_back(kj::mv(session));
  changed_();
  const Session& coming = *next_.back();
  GPUPOOL_INFO("session %s: moves to worker %d as epoch %llu", coming.facts.session.text().c_str(),
               coming.worker->pid(), static_cast<unsigned long long>(epoch));
  return orderMove(*old, epoch, means);
}

kj::Promise<MoveAnswer> SessionTable::moveAway(uint64_t number, const std::string& server, uint64_t epoch,
                                               MoveMeans means) {
  Session* old = find(number);
  KJ_REQUIRE(old != nullptr && old->answer.get() == nullptr && old->moved.get() == nullptr,
             "a session has one order at a time");
  old->toServer = "server " + server;
  return orderMove(*old, epoch, means);
}

kj::Promise<MoveAnswer> SessionTable::hold(uint64_t number, uint64_t epoch, MoveMeans means) {
  Session* session = find(number);
  if (session == nullptr) return MoveAnswer{.gone = true};
  KJ_REQUIRE(session->answer.get() == nullptr && session->moved.get() == nullptr,
             "a session has one order at a time");
  session->toServer = "a checkpoint";
  session->holds = true;
  return orderMove(*session, epoch, means);
}

kj::Promise<MoveAnswer> SessionTable::copy(uint64_t number, MoveMeans means) {
  Session* session = find(number);
  if (session == nullptr) return MoveAnswer{.gone = true};
  KJ_REQUIRE(session->answer.get() == nullptr && session->moved.get() == nullptr,
             "a session has one order at a time");
  session->copies = true;
  return orderMove(*session, session->facts.epoch + 1, means);
}

kj::Promise<MoveAnswer> SessionTable::orderMove(Session& old, uint64_t epoch, const MoveMeans& means) {
  auto pair = kj::newPromiseAndFulfiller<MoveAnswer>();
  old.moved = kj::mv(pair.fulfiller);
  capnp::MallocMessageBuilder message;
  auto order = message.initRoot<schema::WorkerOrder>().initMove();
  order.setDrainMs(means.drainMs);
  order.setEpoch(epoch);
  order.setStream(means.copier.get() < 0);
  order.setCopy(old.copies);
  order.setPages(means.pages);
  order.setDirect(means.direct);
  order.setHold(old.holds);
  std::vector<int> descriptors;
  if (means.copier.get() >= 0) descriptors.push_back(means.copier);
  descriptors.push_back(means.state);
  if (!old.worker->send(message, descriptors)) {
    // Of a copy that is not why it ends: a protected session goes on from the one before.
    if (old.text.empty() && !old.copies) old.text = "its worker took no order any more";
    old.worker->kill();
  }
  auto late =
      isStuckBefore(old.number, timer_.now() + means.bound).then([this, number = old.number](bool stuck) {
        return moveLate(number, stuck);
      });
  // Its end is an answer, by `conclude`.
  auto never = late.then([]() -> kj::Promise<MoveAnswer> { return kj::NEVER_DONE; });
  return pair.promise.exclusiveJoin(kj::mv(never));
}

kj::Promise<void> SessionTable::moveLate(uint64_t number, bool stuck) {
  Session* session = find(number);
  if (session == nullptr || session->moved.get() == nullptr) return kj::READY_NOW;
  const Session* other = next(number);
  const bool atNext = other != nullptr && other->client.get() >= 0 && !other->exit;
  const bool isHere = !atNext && session->toServer.empty();
  if (stuck) {
    // Also of one that was to leave: whoever has ordered it learns why this one did not.
    const std::string hangs = killStuck(*session);
    if (!atNext) std::exchange(session->moved, nullptr)->fulfill(MoveAnswer{.error = hangs});
    return kj::READY_NOW;
  }
  const std::string why = "the session's worker did not answer the order to be moved";
  GPUPOOL_ERROR("worker %d did not answer the order to be moved in its time: it is ended",
                session->worker->pid());
  if (isHere) return end(*session, why);
  // Its client may be with the next worker. Told to stop, this one would tell it that the session is over.
  if (session->text.empty()) session->text = why;
  session->worker->kill();
  return kj::READY_NOW;
}

void SessionTable::moved(Session& session, schema::MoveReport::Reader report) {
  Session* other = next(session.number);
  const bool asked = session.role == Role::serving && session.moved.get() != nullptr;
  if (!asked || (other == nullptr && session.toServer.empty() && !session.copies)) {
    GPUPOOL_WARNING("session %s: its worker %d says that it has moved or cannot, and nobody asked: ignored",
                    session.facts.session.text().c_str(), session.worker->pid());
    return;
  }
  const bool away = !session.toServer.empty();
  // Its end is the answer, unless it is another server's now.
  if (session.ordered && (!away || report.getError().size() != 0)) return;
  MoveAnswer answer{.gone = false,
                    .error = report.getError().cStr(),
                    .movedBytes = report.getMovedBytes(),
                    .drainMs = report.getDrainMs(),
                    .pauseMs = report.getPauseMs()};
  if (away && answer.error.empty()) return hasLeft(session, kj::mv(session.moved), std::move(answer));
  if (away || session.copies) {
    session.toServer.clear();
    session.copies = session.holds = false;
    auto fulfiller = kj::mv(session.moved);
    fulfiller->fulfill(kj::mv(answer));
    return;
  }
  if (answer.error.empty() && other->client.get() < 0)
    answer.error = "its worker answered nonsense: the session has moved, and its client has not";
  auto fulfiller = kj::mv(session.moved);
  if (answer.error.empty()) {
    takeOver(session, *other);
    fulfiller->fulfill(kj::mv(answer));
    return;
  }
  // For a while: the old worker needs nothing of it any more.
  tasks_.add(drop(*other, "the session stays where it was: " + answer.error)
                 .exclusiveJoin(timer_.afterDelay(bounds_.exit))
                 .then([fulfiller = kj::mv(fulfiller), answer = std::move(answer)]() mutable {
                   fulfiller->fulfill(kj::mv(answer));
                 }));
}

void SessionTable::hasLeft(Session& session, kj::Own<kj::PromiseFulfiller<MoveAnswer>> fulfiller,
                           MoveAnswer answer) {
  const std::string where = "moved to " + session.toServer;
  GPUPOOL_INFO("session %s: has %s", session.facts.session.text().c_str(), where.c_str());
  session.role = Role::old;
  old_.push_back(takeFrom(living_, session));
  session.client = nullptr;
  remember(session, where);
  leaveShares(session);
  leaveAccount(accountOf(session.facts), session.number);
  if (!session.worker->gone()) killAfter(session, bounds_.exit, "did not exit after its session had left");
  changed_();
  heardActivity_();
  fulfiller->fulfill(kj::mv(answer));
}

void SessionTable::takeOver(Session& old, Session& next) {
  GPUPOOL_INFO("session %s: has moved to worker %d as epoch %llu", next.facts.session.text().c_str(),
               next.worker->pid(), static_cast<unsigned long long>(next.facts.epoch));
  old.role = Role::old;
  next.role = Role::serving;
  leaveShares(old);  // what its next worker offers is something else
  old_.push_back(takeFrom(living_, old));
  living_.push_back(takeFrom(next_, next));
  old.client = nullptr;
  if (accountOf(old.facts) != accountOf(next.facts)) leaveAccount(accountOf(old.facts), old.number);
  for (const Asked& asked : std::exchange(next.asked, {})) serveMemory(next, asked);
  if (sharesKnown_) serveShares(next);
  if (!old.worker->gone()) killAfter(old, bounds_.exit, "did not exit after its session had moved");
  changed_();
  heardActivity_();
  if (next.exit) conclude(next, *next.exit, endText(next, *next.exit));
}

kj::Promise<void> SessionTable::drop(Session& next, const std::string& reason) {
  next.dropped = true;
  next.asked.clear();
  const Session* living = find(next.number);
  if (living == nullptr || accountOf(living->facts) != accountOf(next.facts))
    leaveAccount(accountOf(next.facts), next.number);
  if (next.text.empty()) next.text = reason;
  if (next.exit) {
    finishNext(next, *next.exit);
    return kj::READY_NOW;
  }
  auto pair = kj::newPromiseAndFulfiller<void>();
  next.gone.add(kj::mv(pair.fulfiller));
  // One that was told to stop tells its client why, in its time.
  if (!next.ordered) next.worker->kill();
  return kj::mv(pair.promise);
}

kj::Promise<void> SessionTable::oldGone(const Id& lease, uint64_t deviceEpoch) {
  kj::Vector<kj::Promise<void>> gone;
  for (auto* sessions : {&old_, &next_})
    for (auto& session : *sessions) {
      if (accountOf(session->facts) != AccountName(lease, deviceEpoch) || session->exit) continue;
      if (session->role == Role::next && !session->dropped) continue;
      auto pair = kj::newPromiseAndFulfiller<void>();
      session->gone.add(kj::mv(pair.fulfiller));
      gone.add(kj::mv(pair.promise));
    }
  return kj::joinPromises(gone.releaseAsArray());
}

// ---- ends ----

void SessionTable::finishServing(Session& session, const WorkerChild::Exit& exit) {
  std::string text = endText(session, exit);
  Session* other = next(session.number);
  if (other != nullptr && !session.ordered && other->client.get() >= 0 && !other->exit) {
    GPUPOOL_WARNING(
        "session %s: its worker %d ended while it moved; its client has been sent to the next: %s",
        session.facts.session.text().c_str(), session.worker->pid(), text.c_str());
    other->formerClient = kj::mv(session.client);
    other->formerEnd = std::move(text);
    auto fulfiller = kj::mv(session.moved);
    takeOver(session, *other);
    if (fulfiller.get() != nullptr) fulfiller->fulfill(MoveAnswer{});
    finishOld(session, exit);
    return;
  }
  if (other != nullptr) tasks_.add(drop(*other, text));
  if (!session.toServer.empty() && !session.ordered && !exit.clean)
    text += ", while the session moved to " + session.toServer + ", where its client may be";
  const bool died = session.text.empty() && !session.ordered && !exit.clean && session.toServer.empty();
  if (died && !session.holds && other == nullptr) text = died_(session.facts) + text;
  conclude(session, exit, std::move(text));
}

void SessionTable::finishNext(Session& session, const WorkerChild::Exit& exit) {
  for (auto& fulfiller : session.gone) fulfiller->fulfill();
  session.gone.clear();
  if (arrives(session)) return finishArriving(session, exit);
  if (!session.dropped) {
    // Its old worker sees that too, and says what becomes of the session.
    GPUPOOL_WARNING("session %s: the worker %d to which it moves has ended: %s",
                    session.facts.session.text().c_str(), session.worker->pid(),
                    endText(session, exit).c_str());
    session.exit = exit;
  } else {
    // How, too: it may have died before it was dropped.
    GPUPOOL_INFO("session %s: the worker %d to which it was to move %s: %s",
                 session.facts.session.text().c_str(), session.worker->pid(), exit.text.c_str(),
                 session.text.c_str());
    if (session.client.get() >= 0) transport::sayLastWords(session.client, session.text);
    takeFrom(next_, session);
  }
  changed_();
}

void SessionTable::finishOld(Session& session, const WorkerChild::Exit& exit) {
  if (!exit.clean)
    GPUPOOL_WARNING("session %s: the worker %d that it has left %s", session.facts.session.text().c_str(),
                    session.worker->pid(), exit.text.c_str());
  for (auto& fulfiller : session.gone) fulfiller->fulfill();
  takeFrom(old_, session);
  changed_();
}

}  // namespace gpupool::server
