// SessionTable's part in moves: a session's old worker and its next one, of which one survives.
#include <capnp/message.h>

#include <utility>

#include "base/log.h"
#include "server/front/sessions.h"
#include "transports/last_words.h"

namespace gpupool::server {
namespace {

template <class Session>
kj::Own<Session> takeFrom(std::list<kj::Own<Session>>& list, const Session& wanted) {
  for (auto at = list.begin(); at != list.end(); ++at) {
    if (at->get() != &wanted) continue;
    kj::Own<Session> taken = kj::mv(*at);
    list.erase(at);
    return taken;
  }
  KJ_FAIL_REQUIRE("a session is not in its list");
}

}  // namespace

const SessionFacts* SessionTable::facts(uint64_t number) const {
  const Session* session = find(number);
  return session == nullptr || session->ordered ? nullptr : &session->facts;
}

SessionTable::Session* SessionTable::next(uint64_t number) const {
  for (const auto& session : next_)
    if (session->number == number && !session->dropped) return const_cast<Session*>(session.get());
  return nullptr;
}

kj::Promise<MoveAnswer> SessionTable::move(uint64_t number, kj::Own<WorkerChild> next, uint64_t epoch,
                                           uint32_t drainMs, kj::AutoCloseFd copier, kj::AutoCloseFd state,
                                           kj::Duration bound) {
  Session* old = find(number);
  KJ_REQUIRE(old != nullptr && old->answer.get() == nullptr && old->moved.get() == nullptr,
             "a session has one order at a time");
  auto session = kj::refcounted<Session>();
  session->role = Role::next;
  session->facts = old->facts;
  session->facts.epoch = epoch;
  session->number = number;
  session->began = old->began;
  session->worker = kj::mv(next);
  watch(*session);
  next_.push_back(kj::mv(session));
  announced_.reset();
  changed_();

  auto pair = kj::newPromiseAndFulfiller<MoveAnswer>();
  old->moved = kj::mv(pair.fulfiller);
  capnp::MallocMessageBuilder message;
  auto order = message.initRoot<schema::WorkerOrder>().initMove();
  order.setDrainMs(drainMs);
  order.setEpoch(epoch);
  const int descriptors[] = {copier, state};
  if (!old->worker->send(message, descriptors)) {
    if (old->text.empty()) old->text = "its worker took no order any more";
    old->worker->kill();
  }
  auto late = timer_.afterDelay(bound).then([this, number] { return moveLate(number); });
  // Its end is an answer, by `conclude`.
  auto never = late.then([]() -> kj::Promise<MoveAnswer> { return kj::NEVER_DONE; });
  return pair.promise.exclusiveJoin(kj::mv(never));
}

kj::Promise<void> SessionTable::moveLate(uint64_t number) {
  Session* session = find(number);
  if (session == nullptr || session->moved.get() == nullptr) return kj::READY_NOW;
  const std::string why = "the session's worker did not answer the order to be moved";
  GPUPOOL_ERROR("worker %d did not answer the order to be moved in its time: it is ended",
                session->worker->pid());
  const Session* other = next(number);
  if (other == nullptr || other->client.get() < 0 || other->exit) return end(*session, why);
  // Its client may be with the next worker. Told to stop, this one would tell it that the session is over.
  if (session->text.empty()) session->text = why;
  session->worker->kill();
  return kj::READY_NOW;
}

void SessionTable::moved(Session& session, schema::MoveReport::Reader report) {
  Session* other = next(session.number);
  if (session.role != Role::serving || session.moved.get() == nullptr || other == nullptr) {
    GPUPOOL_WARNING("session %s: its worker %d says that it has moved or cannot, and nobody asked: ignored",
                    session.facts.session.text().c_str(), session.worker->pid());
    return;
  }
  if (session.ordered) return;  // its end is the answer
  MoveAnswer answer{.gone = false,
                    .error = report.getError().cStr(),
                    .movedBytes = report.getMovedBytes(),
                    .drainMs = report.getDrainMs(),
                    .pauseMs = report.getPauseMs()};
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

void SessionTable::takeOver(Session& old, Session& next) {
  GPUPOOL_INFO("session %s: has moved to worker %d as epoch %llu", next.facts.session.text().c_str(),
               next.worker->pid(), static_cast<unsigned long long>(next.facts.epoch));
  old.role = Role::old;
  next.role = Role::serving;
  old_.push_back(takeFrom(living_, old));
  living_.push_back(takeFrom(next_, next));
  old.client = nullptr;
  for (const Asked& asked : std::exchange(next.asked, {})) serveMemory(next, asked);
  if (!old.worker->gone()) killAfter(old, bounds_.exit, "did not exit after its session had moved");
  changed_();
  heardActivity_();
  if (next.exit) conclude(next, *next.exit, endText(next, *next.exit));
}

kj::Promise<void> SessionTable::drop(Session& next, const std::string& reason) {
  next.dropped = true;
  next.asked.clear();
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

// ---- the client ----

std::string SessionTable::refusesClient(const SessionFacts& client) const {
  const Session* session = nullptr;
  for (const auto& one : living_)
    if (one->facts.lease == client.lease && one->facts.session == client.session) session = one.get();
  if (session == nullptr) return "the session is not known here, or has ended";
  const Session* waiting = next(session->number);
  if (waiting == nullptr) return "the session does not move: no worker waits for its client";
  if (waiting->facts.epoch != client.epoch)
    return "the session moves as epoch " + std::to_string(waiting->facts.epoch) + ", not as epoch " +
           std::to_string(client.epoch);
  if (waiting->client.get() >= 0) return "the session's client has come to its next worker already";
  if (waiting->ordered || session->ordered) return "the session is ending";
  if (waiting->worker->gone()) return "the worker to which the session moves has ended";
  if (waiting->facts.transport != client.transport)
    return "the session's transport is " + waiting->facts.transport + ", not " + client.transport;
  return "";
}

void SessionTable::giveClient(const SessionFacts& client, int socket, kj::AutoCloseFd kept) {
  if (const std::string why = refusesClient(client); !why.empty()) {
    GPUPOOL_WARNING("session %s: its client comes in vain: %s", client.session.text().c_str(), why.c_str());
    return;
  }
  for (auto& session : next_) {
    if (session->dropped || session->facts.lease != client.lease || session->facts.session != client.session)
      continue;
    capnp::MallocMessageBuilder message;
    message.initRoot<schema::WorkerOrder>().setClient();
    if (session->worker->send(message, std::span(&socket, 1))) {
      session->client = kj::mv(kept);
    } else {
      session->worker->kill();
    }
    return;
  }
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
  conclude(session, exit, std::move(text));
}

void SessionTable::finishNext(Session& session, const WorkerChild::Exit& exit) {
  for (auto& fulfiller : session.gone) fulfiller->fulfill();
  session.gone.clear();
  if (!session.dropped) {
    // Its old worker sees that too, and says what becomes of the session.
    GPUPOOL_WARNING("session %s: the worker %d to which it moves has ended: %s",
                    session.facts.session.text().c_str(), session.worker->pid(),
                    endText(session, exit).c_str());
    session.exit = exit;
  } else {
    GPUPOOL_INFO("session %s: the worker %d to which it was to move has ended: %s",
                 session.facts.session.text().c_str(), session.worker->pid(), session.text.c_str());
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
