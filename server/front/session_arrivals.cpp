// SessionTable's part in how sessions come to their next worker: from another server, and the clients of all
// that move.
#include <capnp/message.h>

#include "base/log.h"
#include "base/transport_names.h"
#include "server/front/sessions.h"
#include "transports/last_words.h"

namespace gpupool::server {

// ---- from another server ----

size_t SessionTable::arriving(const Id& lease) const {
  size_t count = 0;
  for (const auto& session : next_) count += session->facts.lease == lease && arrives(*session) ? 1 : 0;
  return count;
}

std::string SessionTable::refusesArrival(const SessionFacts& facts) const {
  for (const auto& session : living_)
    if (session->facts.lease == facts.lease && session->facts.session == facts.session)
      return "the session is here already, as epoch " + std::to_string(session->facts.epoch);
  if (waiting(facts) != nullptr) return "the session comes here already";
  return "";
}

kj::Promise<void> SessionTable::displaceArrival(const SessionFacts& facts) {
  kj::Vector<kj::Promise<void>> gone;
  if (Session* earlier = waiting(facts); earlier != nullptr && arrives(*earlier))
    gone.add(drop(*earlier, "the session was sent here once more"));
  return kj::joinPromises(gone.releaseAsArray());
}

void SessionTable::arrive(SessionFacts facts, kj::Own<WorkerChild> worker) {
  announced_.reset();
  if (const std::string why = refusesArrival(facts); !why.empty()) {
    GPUPOOL_WARNING("session %s: does not come here: %s", facts.session.text().c_str(), why.c_str());
    changed_();
    return;
  }
  auto session = kj::refcounted<Session>();
  session->role = Role::next;
  session->facts = std::move(facts);
  session->number = nextNumber_++;
  session->began = timer_.now();
  session->worker = kj::mv(worker);
  session->beginning = beginning(session->facts.lease);
  accounts_.try_emplace(accountOf(session->facts), session->facts.memoryLimits);
  GPUPOOL_INFO("session %s: comes from another server as epoch %llu, worker %d, client %u (%s)",
               session->facts.session.text().c_str(), static_cast<unsigned long long>(session->facts.epoch),
               session->worker->pid(), session->facts.clientPid, session->facts.command.c_str());
  watch(*session);
  endLateArrival(*session, bounds_.arrival, "it was not rebuilt in time");
  next_.push_back(kj::mv(session));
  changed_();
}

void SessionTable::endLateArrival(Session& next, kj::Duration bound, const char* why) {
  // Over with its exit: until then, and no longer, its process and its descriptors are kept.
  auto exit = next.worker->exited();
  auto over = timer_.afterDelay(bound).exclusiveJoin(exit.ignoreResult());
  tasks_.add(over.then([this, why, kept = kj::addRef(next)]() mutable -> kj::Promise<void> {
    if (kept->worker->gone() || kept->role != Role::next) return kj::READY_NOW;
    return end(*kept, why);
  }));
}

void SessionTable::settleHere(Session& arrived) {
  GPUPOOL_INFO("session %s: has come from another server to worker %d as epoch %llu",
               arrived.facts.session.text().c_str(), arrived.worker->pid(),
               static_cast<unsigned long long>(arrived.facts.epoch));
  arrived.role = Role::serving;
  living_.push_back(takeFrom(next_, arrived));
  arrived.beginning = nullptr;
  changed_();
  heardActivity_();
}

// Nobody has it here: no session ends.
void SessionTable::finishArriving(Session& session, const WorkerChild::Exit& exit) {
  const std::string text = endText(session, exit);
  GPUPOOL_INFO("session %s: has not come here, and its worker %d has ended: %s",
               session.facts.session.text().c_str(), session.worker->pid(), text.c_str());
  auto gone = takeFrom(next_, session);
  if (!gone->dropped) leaveAccount(accountOf(gone->facts), gone->number);
  gone->beginning = nullptr;
  for (auto& fulfiller : gone->gone) fulfiller->fulfill();
  changed_();
}

// ---- the client ----

SessionTable::Session* SessionTable::waiting(const SessionFacts& client) const {
  for (const auto& one : next_)
    if (!one->dropped && one->facts.lease == client.lease && one->facts.session == client.session)
      return const_cast<Session*>(one.get());
  return nullptr;
}

std::string SessionTable::refusesClient(const SessionFacts& client) const {
  const Session* session = nullptr;
  for (const auto& one : living_)
    if (one->facts.lease == client.lease && one->facts.session == client.session) session = one.get();
  const Session* waiting = this->waiting(client);
  if (session == nullptr && (waiting == nullptr || !arrives(*waiting)))
    return "the session is not known here, or has ended";
  if (waiting == nullptr) return "the session does not move: no worker waits for its client";
  if (waiting->facts.epoch != client.epoch)
    return "the session moves as epoch " + std::to_string(waiting->facts.epoch) + ", not as epoch " +
           std::to_string(client.epoch);
  if (waiting->client.get() >= 0) return "the session's client has come to its next worker already";
  if (waiting->ordered || (session != nullptr && session->ordered)) return "the session is ending";
  if (waiting->worker->gone()) return "the worker to which the session moves has ended";
  if (waiting->facts.transport != client.transport &&
      (waiting->facts.transportNamed || transportApart(client.transport) != waiting->facts.transport))
    return "the session's transport is " + waiting->facts.transport + ", not " + client.transport;
  if (waiting->facts.rowsHash != client.rowsHash) return "the session's client is of another gpupool";
  return "";
}

void SessionTable::giveClient(const SessionFacts& client, int socket, kj::AutoCloseFd kept) {
  if (const std::string why = refusesClient(client); !why.empty()) {
    GPUPOOL_WARNING("session %s: its client comes in vain: %s", client.session.text().c_str(), why.c_str());
    return;
  }
  Session& next = *waiting(client);
  capnp::MallocMessageBuilder message;
  auto order = message.initRoot<schema::WorkerOrder>();
  order.setClient();
  if (next.facts.transport != client.transport) order.setClientTransport(client.transport);
  if (!next.worker->send(message, std::span(&socket, 1))) {
    next.worker->kill();
    return;
  }
  GPUPOOL_INFO("session %s: its client comes over %s", client.session.text().c_str(),
               client.transport.c_str());
  next.client = kj::mv(kept);
  next.facts.transport = client.transport;
  if (arrives(next)) settleHere(next);
}

}  // namespace gpupool::server
