// SessionTable's accounts: what its sessions take of the memory of their lease.
#include <capnp/message.h>

#include <utility>

#include "base/log.h"
#include "server/front/sessions.h"

namespace gpupool::server {
namespace {

constexpr size_t kMostAsked = 4096;  // of one worker; one that rebuilds has some threads that ask

}  // namespace

void SessionTable::serveMemory(Session& session, schema::MemoryRequest::Reader request) {
  Asked asked{request.getTicket(), request.getTake(), request.getGive(), request.getPlace()};
  const bool host = asked.place == schema::HOST_MEMORY;             // no session's, but the machine's
  const bool own = session.role == Role::next && arrives(session);  // nobody here had it before
  // What heirs have of a lease is not known yet: nothing more of it is given out.
  const bool waits = session.role == Role::serving && !sharesKnown_ && !host && asked.ticket != 0;
  if (waits && asked.give != 0) giveMemory(session, asked.place, std::exchange(asked.give, 0));
  if (!waits && (session.role == Role::serving || own || (host && session.role == Role::next)))
    return serveMemory(session, asked);
  // What an old one had is the session's.
  if (session.role == Role::old || session.dropped) return;
  session.asked.push_back(asked);
  if (session.asked.size() > kMostAsked) session.worker->kill();
}

void SessionTable::serveMemory(Session& session, const Asked& asked) {
  const auto account = accounts_.find(accountOf(session.facts));
  if (account == accounts_.end() || session.dropped) return;
  const bool host = asked.place == schema::HOST_MEMORY;
  if (!host && asked.give != 0) giveMemory(session, asked.place, asked.give);
  if (asked.ticket == 0) return;
  capnp::MallocMessageBuilder message;
  auto answer = message.initRoot<schema::WorkerOrder>().initMemory();
  answer.setTicket(asked.ticket);
  if (host) {
    answer.setGranted(hostRoom_(asked.take));
    if (!answer.getGranted()) answer.setError("this server's own memory is nearly used up");
  } else {
    answer.setGranted(takeMemory(session, asked.place, asked.take));
    answer.setOthersBytes(account->second.others(session.number, asked.place));
  }
  session.worker->send(message);
}

// Of a session that moves to other devices the other account has to have room, too: it has all that it takes.
bool SessionTable::takeMemory(const Session& session, uint32_t place, uint64_t bytes) {
  MemoryAccount& account = accounts_.at(accountOf(session.facts));
  if (!account.take(session.number, place, bytes)) return false;
  const Session* other = next(session.number);
  if (other == nullptr || accountOf(other->facts) == accountOf(session.facts) ||
      accounts_.at(accountOf(other->facts)).take(session.number, place, bytes))
    return true;
  account.give(session.number, place, bytes);
  return false;
}

void SessionTable::giveMemory(const Session& session, uint32_t place, uint64_t bytes) {
  accounts_.at(accountOf(session.facts)).give(session.number, place, bytes);
  const Session* other = next(session.number);
  if (other != nullptr && other != &session && accountOf(other->facts) != accountOf(session.facts))
    accounts_.at(accountOf(other->facts)).give(session.number, place, bytes);
}

uint64_t SessionTable::used(const Id& lease, uint64_t deviceEpoch, uint32_t place) const {
  const auto account = accounts_.find({lease, deviceEpoch});
  return account == accounts_.end() ? 0 : account->second.used(place);
}

std::vector<SessionTable::Client> SessionTable::clients(const Id& lease) const {
  std::vector<Client> clients;
  for (const auto& session : living_) {
    if (session->facts.lease != lease) continue;
    Client& client = clients.emplace_back(Client{session->facts.clientPid, {}});
    const auto account = accounts_.find(accountOf(session->facts));
    for (uint32_t place = 0; place < session->facts.devices.size(); ++place)
      client.bytes.push_back(account == accounts_.end() ? 0 : account->second.used(session->number, place));
  }
  return clients;
}

void SessionTable::leaveAccount(const AccountName& name, uint64_t number) {
  const auto account = accounts_.find(name);
  if (account == accounts_.end()) return;
  account->second.forget(number);
  dropUnusedAccount(name);
}

void SessionTable::dropUnusedAccount(const AccountName& name) {
  const auto account = accounts_.find(name);
  if (account == accounts_.end() || !account->second.empty()) return;
  for (const auto* sessions : {&living_, &next_})
    for (const auto& session : *sessions)
      if (!session->dropped && accountOf(session->facts) == name) return;
  accounts_.erase(account);
}

}  // namespace gpupool::server
