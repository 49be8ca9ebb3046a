#include "server/front/standby.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>

#include <utility>

#include "base/log.h"
#include "base/transport_names.h"
#include "schema/convert.h"
#include "schema/fault.h"
#include "schema/handshake.h"
#include "schema/holder.h"
#include "schema/server_name.h"
#include "server/front/listeners.h"

namespace gpupool::server {
namespace {

constexpr unsigned kMostTries = 3;  // from one checkpoint: what follows it may be what ends its workers
constexpr size_t kMostHost = 255;

kj::Exception openFailure(const schema::OpeningAnswer& answer) {
  const bool unknown = answer.verdict == schema::OpeningVerdict::unknownLease;
  const auto status = unknown ? holder::Status::leaseEnded : holder::Status::refused;
  return schema::faultException(schema::FaultKind::open, answer.text, static_cast<uint32_t>(status));
}

struct OpeningConnection {
  schema::SessionOpening opening;
  kj::Own<kj::AsyncIoStream> stream;
};

}  // namespace

Standby::Standby(kj::AsyncIoProvider& io, LeaseTable& leases, std::shared_ptr<KeepBudget> budget,
                 Settings settings)
    : io_(io),
      timer_(io.getTimer()),
      leases_(leases),
      budget_(std::move(budget)),
      settings_(std::move(settings)),
      tasks_(*this) {
  tasks_.add(lookAgain());
}

Standby::~Standby() noexcept {}

// ---- what the manager orders

std::optional<std::string> Standby::keep(schema::Lease::Reader lease) {
  const Id id = schema::read(lease.getId());
  const auto server = lease.getServer();
  const std::string key = schema::bytes(lease.getSessionKey());
  const Where where{schema::text(server.getName()), schema::text(server.getHost()), server.getPort(),
                    schema::read(server.getIncarnation())};
  if (leases_.contains(id)) return "the lease is on this server itself";
  if (key.size() != schema::kSessionKeyBytes) return "malformed lease: its key";
  if (!schema::isServerName(where.name)) return "malformed lease: its server's name";
  if (where.host.empty() || where.host.size() > kMostHost || where.port == 0)
    return "server " + where.name + " takes no network sessions";
  const auto at = entries_.find(id);
  if (at == entries_.end() && entries_.size() >= kMostLeases) return "it is the standby of too many leases";
  if (at != entries_.end() && at->second->wanted && at->second->standbyEpoch == lease.getStandbyEpoch() &&
      at->second->deviceEpoch == lease.getDeviceEpoch() && at->second->where.incarnation == where.incarnation)
    return std::nullopt;
  if (at == entries_.end()) {
    schema::CheckpointKeeper::Settings settings;
    settings.room = {[budget = budget_](uint64_t more) { return budget->take(more); },
                     [budget = budget_](uint64_t less) { budget->give(less); }};
    entries_.emplace(id, kj::refcounted<Entry>(timer_, std::move(settings)));
  }
  Entry& entry = *entries_.at(id);
  entry.lease = id;
  entry.key = key;
  entry.where = where;
  entry.standbyEpoch = lease.getStandbyEpoch();
  entry.deviceEpoch = lease.getDeviceEpoch();
  entry.wanted = true;
  entry.heard = timer_.now();
  entry.loop = take(entry).eagerlyEvaluate([this](kj::Exception&& error) { taskFailed(kj::mv(error)); });
  GPUPOOL_INFO("lease %s, on server %s: this server keeps its checkpoints", id.text().c_str(),
               where.name.c_str());
  return std::nullopt;
}

void Standby::drop(const Id& lease) {
  const auto at = entries_.find(lease);
  if (at == entries_.end()) return;
  Entry& entry = *at->second;
  entry.wanted = false;
  entry.loop = nullptr;
  // On its way to another server it is what the session is made of there: look() drops it when it is over.
  if (!entry.handing.empty() || (leases_.contains(lease) && !entry.keeper.empty())) return;
  GPUPOOL_INFO("lease %s: nothing of it is kept here any more", lease.text().c_str());
  entries_.erase(at);
}

void Standby::superseded(const Id& lease, const Id& session) {
  const auto at = entries_.find(lease);
  if (at == entries_.end()) return;
  at->second->keeper.drop(session);
  if (!at->second->wanted) drop(lease);
}

std::vector<std::byte> Standby::key(const Id& lease) const {
  const auto at = entries_.find(lease);
  if (at == entries_.end()) return {};
  const auto bytes = std::as_bytes(std::span(at->second->key));
  return {bytes.begin(), bytes.end()};
}

void Standby::report(schema::Manager::BeatParams::Builder beat) const {
  unsigned count = 0;
  for (const auto& [lease, entry] : entries_) count += entry->wanted ? 1 : 0;
  auto list = beat.initKept(count);
  unsigned at = 0;
  for (const auto& [lease, entry] : entries_) {
    if (!entry->wanted) continue;
    auto out = list[at++];
    schema::write(lease, out.initId());
    out.setStandbyEpoch(entry->standbyEpoch);
    out.setDeviceEpoch(entry->deviceEpoch);
  }
}

// ---- from the lease's server

kj::Promise<void> Standby::take(Entry& entry) {
  auto taken = kj::evalNow([&] {
    return entry.keeper.take([this, &entry](const Fill& fill) { return openToTake(entry, fill); });
  });
  return taken
      .catch_([&entry](kj::Exception&& error) {
        GPUPOOL_INFO("lease %s: no checkpoints come from server %s for now: %s", entry.lease.text().c_str(),
                     entry.where.name.c_str(), schema::plainText(error).c_str());
      })
      .then([this, &entry] {
        entry.taking = false;
        return timer_.afterDelay(settings_.pause);
      })
      .then([this, &entry] { return take(entry); });
}

Standby::Opened Standby::openToTake(Entry& entry, const Fill& fill) {
  schema::SessionOpening opening;
  fill(opening);
  opening.lease = entry.lease;
  opening.key = entry.key;
  opening.session = Id::random();
  opening.epoch = entry.standbyEpoch;
  opening.command = settings_.server;
  opening.transport = std::string(transportWith(TransportFacts::Reach::anyHost).name);
  return open(entry.where, std::move(opening)).then([&entry](kj::Own<kj::AsyncIoStream>&& stream) {
    entry.taking = true;
    return kj::mv(stream);
  });
}

Standby::Opened Standby::open(const Where& where, schema::SessionOpening opening) {
  const bool v6 = where.host.find(':') != std::string::npos;
  const std::string address = (v6 ? "[" + where.host + "]" : where.host) + ":" + std::to_string(where.port);
  opening.server = where.name;
  return kj::evalNow([&] { return io_.getNetwork().parseAddress(address.c_str()); })
      .then([](kj::Own<kj::NetworkAddress> parsed) {
        auto connected = parsed->connect();
        return connected.attach(kj::mv(parsed));
      })
      .then([opening = std::move(opening)](kj::Own<kj::AsyncIoStream> stream) mutable {
        tuneNetworkSocket(*stream);
        auto connection = kj::heap<OpeningConnection>();
        connection->opening = std::move(opening);
        connection->stream = kj::mv(stream);
        auto answered = schema::openSession(*connection->stream, connection->opening);
        return answered.then([connection = kj::mv(connection)](const schema::OpeningAnswer& answer) mutable {
          if (answer.verdict != schema::OpeningVerdict::open) kj::throwFatalException(openFailure(answer));
          return kj::mv(connection->stream);
        });
      });
}

// ---- to where the lease is now

void Standby::ask(kj::Own<kj::AsyncIoStream> stream, const HandWish& wish) {
  const Answer answer = decide(wish);
  auto message = kj::heap<capnp::MallocMessageBuilder>();
  auto out = message->initRoot<schema::HandAnswer>();
  out.setVerdict(answer.verdict);
  out.setError(answer.error);
  auto written = capnp::writeMessage(*stream, *message);
  tasks_.add(timer_.timeoutAfter(settings_.answer, kj::mv(written))
                 .attach(kj::mv(message), kj::mv(stream))
                 .catch_([](kj::Exception&&) {}));  // who does not take it has gone, and asks again
}

Standby::Answer Standby::decide(const HandWish& wish) {
  using schema::HandVerdict;
  const SessionFacts& facts = wish.facts;
  const auto at = entries_.find(facts.lease);
  if (at == entries_.end()) return {};
  Entry& entry = *at->second;
  if (wish.over) {
    entry.keeper.forget(facts.session);
    return {};
  }
  if (!entry.keeper.has(facts.session)) return {};
  if (entry.handing.contains(facts.session)) return {HandVerdict::LATER, "it is on its way"};
  if (entry.keeper.tries(facts.session) >= kMostTries)
    return {HandVerdict::OVER, entry.keeper.why(facts.session)};
  const bool here = leases_.admissible(facts.lease) != nullptr;
  if (wish.to != (here ? settings_.incarnation : entry.where.incarnation))
    return {HandVerdict::LATER, "the pool manager has not said yet that the lease is there"};
  hand(entry, wish);
  return {HandVerdict::LATER, std::exchange(entry.notHanded, "")};
}

void Standby::hand(Entry& entry, const HandWish& wish) {
  const SessionFacts facts = wish.facts;
  const schema::CheckpointKeeper::Next next{facts.session,   facts.epoch,   facts.rowsHash,
                                            facts.clientPid, facts.command, facts.transport};
  auto handed = kj::evalNow([&] {
    return entry.keeper.bring([&](const Fill& fill) { return openToHand(entry, facts, fill); }, next);
  });
  entry.handing.insert(facts.session);
  GPUPOOL_INFO("session %s: its checkpoint goes to where its lease is now", facts.session.text().c_str());
  tasks_.add(handed
                 .then([] { return std::string(); },
                       [](kj::Exception&& error) { return schema::faultOf(error).text; })
                 .then([kept = kj::addRef(entry), session = facts.session](const std::string& why) mutable {
                   kept->handing.erase(session);
                   kept->notHanded = why;
                   if (!why.empty())
                     GPUPOOL_INFO("session %s: its checkpoint was not handed on: %s", session.text().c_str(),
                                  why.c_str());
                 }));
}

Standby::Opened Standby::openToHand(const Entry& entry, const SessionFacts& facts, const Fill& fill) {
  if (leases_.admissible(entry.lease) != nullptr) return openHere(facts, fill);
  schema::SessionOpening opening;
  fill(opening);
  opening.lease = entry.lease;
  opening.key = entry.key;
  opening.transport = facts.transport;
  return open(entry.where, std::move(opening));
}

// What another server would hear over the network.
Standby::Opened Standby::openHere(const SessionFacts& facts, const Fill& fill) {
  schema::SessionOpening opening;
  fill(opening);
  capnp::MallocMessageBuilder message;
  auto brings = message.initRoot<schema::SessionCheckpoint>();
  opening.brings(brings);
  BroughtSession brought{facts, fileFactsOf(brings.asReader())};
  brought.facts.place(*leases_.admissible(facts.lease), leases_.devices());
  auto pipe = io_.newTwoWayPipe();
  settings_.bring(kj::mv(pipe.ends[0]), brought);
  return kj::mv(pipe.ends[1]);
}

// ---- what is forgotten

kj::Promise<void> Standby::lookAgain() {
  return timer_.afterDelay(settings_.look).then([this] {
    look();
    return lookAgain();
  });
}

void Standby::look() {
  const kj::TimePoint now = timer_.now();
  const bool inPool = settings_.inPool();
  std::vector<Id> gone;
  for (auto& [lease, entry] : entries_) {
    if (inPool || entry->taking) entry->heard = now;
    const bool left = !entry->wanted && entry->handing.empty() && !leases_.contains(lease);
    if (left || now - entry->heard > settings_.term) gone.push_back(lease);
  }
  for (const Id& lease : gone) {
    GPUPOOL_INFO("lease %s: nothing of it is kept here any more", lease.text().c_str());
    entries_.at(lease)->loop = nullptr;
    entries_.erase(lease);
  }
}

void Standby::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("standby: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
