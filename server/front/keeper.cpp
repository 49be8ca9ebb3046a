#include "server/front/keeper.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "base/log.h"
#include "base/options.h"
#include "base/transport_names.h"
#include "server/front/beside.h"
#include "server/front/play_back.h"
#include "transports/last_words.h"

namespace gpupool::server {
namespace {

// Between two checkpoints that a full log asks for, or a pause of the program.
constexpr kj::Duration kEarliest = 2 * kj::SECONDS;
constexpr unsigned kMostRestores = 2;  // from one checkpoint: what follows it may be what kills the worker

}  // namespace

// What thread and event loop have in common is under the mutex; the rest is the thread's while it runs.
struct Keeper::Writing {
  std::shared_ptr<PageStore> store;
  std::shared_ptr<const KeptPages> base, made;
  std::string error;
  kj::TimePoint began = kj::origin<kj::TimePoint>();
  uint64_t seen = 0;  // SessionTable::Sending.changes then

  void giveUp(const std::string& why) {
    std::lock_guard lock(mutex_);
    if (why_.empty()) why_ = why;
  }
  std::string why() const {
    std::lock_guard lock(mutex_);
    return why_;
  }
  void take(int socket) {
    error = takePages(socket, [this] { return why(); }, *store, base.get(), made);
    base = nullptr;  // its memory takes long to free
  }

 private:
  mutable std::mutex mutex_;
  std::string why_;
};

Keeper::Keeper(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, Suspension& suspension,
               WorkerPools& pool, const WorkerStarts& starts, Settings settings)
    : timer_(timer),
      leases_(leases),
      sessions_(sessions),
      suspension_(suspension),
      settings_(settings),
      budget_(std::make_shared<KeepBudget>(settings_.mostBytes)),
      desk_(timer, budget_, settings_.desk),
      restorer_(timer, leases, sessions, suspension, pool, starts,
                {settings_.workerBound, settings_.clients, [this](const Name& name) { return again(name); }}),
      tasks_(*this) {
  sessions_.onDeath([this](const SessionFacts& facts) { return died(facts); });
  if (settings_.disturb)
    sessions_.onDisturb([this](const Id& lease, uint64_t number) {
      const SessionFacts* facts = sessions_.facts(number);
      if (facts == nullptr) return;
      if (const auto kept = kept_.find({lease, facts->session}); kept != kept_.end())
        kept->second.asked = true;
      look();
    });
  tasks_.add(lookAgain());
}

Keeper::~Keeper() noexcept {
  sessions_.onDeath([](const SessionFacts&) { return std::string(); });
  if (settings_.disturb) sessions_.onDisturb([](const Id&, uint64_t) {});
}

kj::Promise<void> Keeper::lookAgain() {
  return timer_.afterDelay(settings_.look).then([this] {
    look();
    return lookAgain();
  });
}

void Keeper::look() {
  std::set<Name> there;
  for (const auto& [id, grant] : leases_.all()) {
    if (grant.protectMs == 0 || grant.closing) continue;
    for (const uint64_t number : sessions_.numbers(id)) {
      const SessionFacts* facts = sessions_.facts(number);
      if (facts == nullptr) continue;
      const Name name{id, facts->session};
      there.insert(name);
      if (restorer_.arrived(name, facts->epoch))
        if (const auto kept = kept_.find(name); kept != kept_.end()) ++kept->second.times;
      lookAt(grant, number);
    }
  }
  desk_.keepOnly(leases_);
  restorer_.dropEnded();
  std::erase_if(kept_, [&](const auto& entry) {
    return !there.contains(entry.first) && !entry.second.writing && !restorer_.has(entry.first);
  });
}

void Keeper::lookAt(const Grant& grant, uint64_t number) {
  const SessionFacts& facts = *sessions_.facts(number);
  const Name name{grant.id, facts.session};
  Kept& kept = keptOf(name, facts);
  if (std::exchange(kept.epoch, facts.epoch) != facts.epoch) kept.seen = UINT64_MAX;  // another worker counts
  kept.who = sessions_.describe(number);
  kept.log = sessions_.clientLog(number);
  const kj::Duration interval = grant.protectMs * kj::MILLISECONDS;
  if (grant.holderKeeps) lookToOffer(name, number);
  if (kept.writing) return;
  if (const std::string why = refuses(facts); !why.empty()) {
    kept.why = why;
    return;
  }
  if (stopped_ || grant.paused || grant.suspended) return;
  kept.idle = isDueIdle(kept, number, interval);
  if (kept.idle || isDue(kept, number, interval)) write(name, number);
}

Keeper::Kept& Keeper::keptOf(const Name& name, const SessionFacts& facts) {
  const auto [at, isNew] = kept_.try_emplace(name);
  Kept& kept = at->second;
  if (!isNew) return kept;
  kept.at = kept.next = timer_.now();
  kept.why = refuses(facts);
  // What the earlier life has told the client of its checkpoints is not known.
  kept.beginning = facts.epoch == 1 && !facts.readopted && kept.why.empty();
  return kept;
}

bool Keeper::isDue(const Kept& kept, uint64_t number, kj::Duration interval) const {
  if (kept.offering) return false;  // the client keeps its calls until the holder has that one
  const kj::TimePoint now = timer_.now();
  const SessionTable::Sending sending = sessions_.sending(number);
  // Its client's log is nearly full. Where the last attempt has failed, the next one waits its time.
  const bool failed = kept.retry != 0 * kj::SECONDS;
  if (!failed && kept.log.wanted && (kept.pages == nullptr || now - kept.at >= kEarliest)) return true;
  if (kept.asked) return true;
  if (now < kept.next) return false;
  if (kept.pages != nullptr && sending.quiet && sending.changes == kept.seen) return false;
  const bool awaitsPause = kept.pages == nullptr && kept.brought != nullptr;
  return !awaitsPause || sending.quiet || now - kept.at >= interval;
}

// A program that waits for a long kernel sends nothing, too. Then the GPU is not idle in time, and there is
// no other attempt before the interval is over.
bool Keeper::isDueIdle(const Kept& kept, uint64_t number, kj::Duration interval) const {
  const kj::TimePoint now = timer_.now();
  if (now >= kept.next || kept.pages == nullptr || kept.offering || kept.idleOver) return false;
  const SessionTable::Sending sending = sessions_.sending(number);
  if (!sending.quiet || sending.changes == kept.seen) return false;
  const kj::Duration least = kj::max(kEarliest, interval / settings_.idlePart);
  return now - kept.at >= kj::max(least, (kept.took + kept.wayTook) * settings_.idleTimes);
}

std::string Keeper::refuses(const SessionFacts& facts) const {
  if (leases_.overcommitted()) return "leases take turns on this server (overcommit)";
  const TransportFacts* transport = findTransport(facts.transport);
  if (transport == nullptr || transport->reach == TransportFacts::Reach::sameHost)
    return "it shares memory with its worker (transport " + facts.transport + "): use --transport " +
           std::string(transportWith(TransportFacts::Reach::anyHost).name);
  return "";
}

// ---- checkpoints

std::shared_ptr<PageStore> Keeper::makeStore() const {
  return PageStore::create({[budget = budget_](uint64_t more) { return budget->take(more); },
                            [budget = budget_](uint64_t less) { budget->give(less); }});
}

void Keeper::makeRoom(const Name& name, uint64_t bytes) {
  if (!budget_->has(bytes)) settings_.tight(name.first, name.second);
}

// ---- to the lease's holder

// The last one, if the holder does not have it.
void Keeper::lookToOffer(const Name& name, uint64_t number) {
  Kept& kept = kept_[name];
  const SessionFacts* facts = sessions_.facts(number);
  // Over another connection than the last one: the holder may be another process, which has nothing.
  const uint64_t connection = desk_.connection(name.first);
  if (connection != 0 && connection != kept.shippedOver) kept.shipped = {};
  if (stopped_ || kept.offering || kept.writing || kept.pages == nullptr || facts == nullptr) return;
  if (kept.shipped == kept.pages->id || timer_.now() < kept.offerNext) return;
  if (!desk_.ready(name.first)) {
    if (!desk_.has(name.first))
      kept.notShipped = keeperOf(name.first) + " does not keep it (it is not connected)";
    return;
  }
  makeRoom(name, kept.pages->facts.bytes);
  kept.offering = true;
  kept.offered = timer_.now();
  const auto pages = kept.pages;
  const kj::TimePoint made = kept.at;
  tasks_.add(kj::evalNow([&] { return desk_.offer(*facts, pages); })
                 .then([this, name, pages, made,
                        connection](uint64_t bytes) { offered(name, *pages, made, "", bytes, connection); },
                       [this, name, pages, made](kj::Exception&& error) {
                         offered(name, *pages, made, error.getDescription().cStr());
                       }));
}

void Keeper::offered(const Name& name, const KeptPages& pages, kj::TimePoint made, const std::string& why,
                     uint64_t bytes, uint64_t connection) {
  const auto at = kept_.find(name);
  if (at == kept_.end()) return;
  Kept& kept = at->second;
  kept.offering = false;
  const bool saidBefore = std::exchange(kept.notShipped, why) == why;
  if (!why.empty()) {
    if (!saidBefore)
      GPUPOOL_INFO("%s: %s does not have its checkpoint: %s", kept.who.c_str(), keeperOf(name.first).c_str(),
                   why.c_str());
    kept.offerNext = timer_.now() + settings_.offerAgain;
    return;
  }
  kept.shipped = pages.id;
  kept.shippedOver = connection;
  kept.shippedAt = made;
  kept.wayTook = timer_.now() - kept.offered;
  kept.beginning = false;
  settings_.shipped(name.first, name.second);
  GPUPOOL_INFO("session %s: %s has its checkpoint of frame %llu: %llu bytes, of which %llu had to travel",
               name.second.text().c_str(), keeperOf(name.first).c_str(),
               static_cast<unsigned long long>(pages.facts.lastFrame),
               static_cast<unsigned long long>(pages.facts.bytes), static_cast<unsigned long long>(bytes));
  // From here on its client does not keep the calls before it. It may have another worker by now.
  for (const uint64_t number : sessions_.numbers(name.first))
    if (const SessionFacts* facts = sessions_.facts(number);
        facts != nullptr && facts->session == name.second)
      sessions_.tellKept(number, pages.facts.lastFrame, pages.facts.lastAside);
}

// ---- from there

void Keeper::bring(kj::Own<kj::AsyncIoStream> stream, const BroughtSession& brought) {
  tasks_.add(receive(kj::mv(stream), brought).catch_([who = brought.facts.session](kj::Exception&& error) {
    GPUPOOL_WARNING("session %s: its holder has not brought it: %s", who.text().c_str(),
                    error.getDescription().cStr());
  }));
}

std::string Keeper::refusesBrought(const SessionFacts& facts) const {
  const Grant* grant = leases_.admissible(facts.lease);
  if (stopped_ || grant == nullptr || grant->closing) return "the lease has ended";
  if (grant->paused || grant->suspended) return "the lease is suspended";
  if (grant->sessionEpochs.contains(facts.session) && grant->sessionEpochs.at(facts.session) >= facts.epoch)
    return "the session has gone on since";
  return refuses(facts);
}

kj::Promise<void> Keeper::receive(kj::Own<kj::AsyncIoStream> stream, BroughtSession brought) {
  auto& from = *stream;
  const Name name{brought.facts.lease, brought.facts.session};
  kj::Promise<std::shared_ptr<CheckpointDesk::File>> taken = std::shared_ptr<CheckpointDesk::File>();
  if (brought.file.bytes != 0) taken = desk_.take(from, brought);
  return taken
      .then([this, name, facts = brought.facts](std::shared_ptr<CheckpointDesk::File>&& file)
                -> kj::Promise<std::shared_ptr<CheckpointDesk::File>> {
        if (const std::string why = refusesBrought(facts); !why.empty())  // and ends nothing here
          return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(why));
        kj::Vector<kj::Promise<void>> gone;
        for (const uint64_t number : sessions_.numbers(name.first))
          if (const SessionFacts* facts = sessions_.facts(number);
              facts != nullptr && facts->session == name.second)
            gone.add(sessions_.endOne(number, "it goes on from the checkpoint that its holder has"));
        return kj::joinPromises(gone.releaseAsArray()).then([file = std::move(file)]() mutable {
          return std::move(file);
        });
      })
      .then([this, facts = brought.facts](std::shared_ptr<CheckpointDesk::File>&& file) mutable {
        return sessions_.displaceArrival(facts).then(
            [file = std::move(file)]() mutable { return std::move(file); });
      })
      .then([this, name, facts = brought.facts](std::shared_ptr<CheckpointDesk::File>&& file) {
        std::string why = refusesBrought(facts);
        if (restorer_.tries(name)) why = "the session is being restored";
        if (const auto at = kept_.find(name);
            at != kept_.end() && (at->second.writing || at->second.offering))
          why = "a checkpoint of the session is being made";
        if (!why.empty()) return why;
        leases_.admissible(name.first)->sessionEpochs[name.second] = facts.epoch - 1;
        Kept& kept = kept_[name] = {};
        kept.epoch = facts.epoch;
        kept.who = facts.command + " (process " + std::to_string(facts.clientPid) + ")";
        kept.brought = file;
        kept.beginning = file == nullptr;
        kept.serverLost = true;
        kept.at = kept.next = timer_.now();
        GPUPOOL_WARNING("session %s: it has lost its server, and is restored here as epoch %llu",
                        name.second.text().c_str(), static_cast<unsigned long long>(facts.epoch));
        restore(name, facts, kept);
        return std::string();
      })
      .then([this, &from](const std::string& why) { return desk_.answer(from, why); },
            [this, &from](kj::Exception&& error) {
              return desk_.answer(from, error.getDescription().cStr(),
                                  error.getType() == kj::Exception::Type::OVERLOADED);
            })
      .attach(kj::mv(stream));
}

void Keeper::write(const Name& name, uint64_t number) {
  kept_[name].writing = true;
  tasks_.add(suspension_.lanes()
                 .queue<void>(name.first, [this, name, number] { return writeNow(name, number); })
                 .catch_([this, name](kj::Exception&& error) {
                   Kept& kept = kept_[name];
                   kept.writing = false;
                   failed(kept, error.getDescription().cStr());
                 }));
}

kj::Promise<void> Keeper::writeNow(Name name, uint64_t number) {
  const Grant* grant = leases_.admissible(name.first);
  const SessionFacts* facts = sessions_.facts(number);
  if (stopped_ || grant == nullptr || grant->paused || grant->suspended || facts == nullptr) {
    kept_[name].writing = false;
    return kj::READY_NOW;
  }
  auto writing = std::make_shared<Writing>();
  Kept& kept = kept_[name];
  if (kept.brought != nullptr) makeRoom(name, kept.brought->facts.bytes);  // about as much comes now
  if (kept.store == nullptr) kept.store = makeStore();
  writing->store = kept.store;
  writing->base = kept.pages;
  writing->began = timer_.now();
  writing->seen = sessions_.sending(number).changes;
  auto [workers, end] = stateSocket();
  auto ours = std::make_shared<Descriptor>(end.release());
  auto taken = beside<bool>([writing, ours] {
                 writing->take(*ours);
                 return true;
               })
                   .ignoreResult()
                   .eagerlyEvaluate(nullptr);
  SessionTable::MoveMeans means{settings_.drainMs, nullptr, kj::mv(workers), settings_.bound, true};
  auto answered =
      kj::evalNow([&] { return sessions_.copy(number, kj::mv(means)); })
          .then([writing](MoveAnswer answer) {
            if (answer.gone) answer.error = "it ended";
            if (!answer.error.empty()) writing->giveUp(answer.error);
          })
          .catch_([writing](kj::Exception&& error) { writing->giveUp(error.getDescription().cStr()); })
          .eagerlyEvaluate(nullptr);
  auto both = kj::heapArrayBuilder<kj::Promise<void>>(2);
  both.add(kj::mv(taken));
  both.add(kj::mv(answered));
  return kj::joinPromises(both.finish()).then([this, name, number, writing] {
    written(name, number, *writing);
  });
}

void Keeper::written(const Name& name, uint64_t number, const Writing& writing) {
  Kept& kept = kept_[name];
  kept.writing = kept.asked = false;
  std::string why = writing.why();
  if (why.empty()) why = writing.error;
  if (!why.empty()) return failed(kept, why);
  const bool first = kept.pages == nullptr;
  // What only the last one had goes on a thread: it may be all of a session's memory.
  tasks_.add(beside<bool>([old = std::exchange(kept.pages, nullptr)]() mutable {
               old = nullptr;
               return true;
             }).ignoreResult());
  const bool begins = first && kept.brought == nullptr;
  kept.pages = writing.made;
  kept.brought = nullptr;
  kept.serverLost = false;
  kept.at = timer_.now();
  kept.took = kept.at - writing.began;
  if (first) kept.since = kept.at;
  kept.seen = writing.seen;
  kept.retry = 0 * kj::SECONDS;
  kept.idle = kept.idleOver = false;
  kept.restored = 0;
  kept.why.clear();
  const Grant* grant = leases_.admissible(name.first);
  // From here on its client does not keep the calls before it.
  if (grant != nullptr && !grant->holderKeeps) {
    kept.beginning = false;
    sessions_.tellKept(number, kept.pages->facts.lastFrame, kept.pages->facts.lastAside);
  }
  const kj::Duration interval = (grant == nullptr ? 0 : grant->protectMs) * kj::MILLISECONDS;
  kept.next = kept.at + (begins ? kj::min(interval, settings_.secondAfter) : interval);
  GPUPOOL_INFO(
      "session %s: checkpoint of frame %llu is kept, %llu bytes; %zu pages came through shared memory",
      name.second.text().c_str(), static_cast<unsigned long long>(kept.pages->facts.lastFrame),
      static_cast<unsigned long long>(kept.pages->facts.bytes), kept.pages->shared);
  if (grant != nullptr && grant->holderKeeps) lookToOffer(name, number);
}

void Keeper::failed(Kept& kept, const std::string& why) {
  if (kept.why != why) GPUPOOL_INFO("%s: no checkpoint: %s", kept.who.c_str(), why.c_str());
  if (std::exchange(kept.idle, false)) {  // the one for the interval comes in its time
    kept.idleOver = true;
    return;
  }
  kept.why = why;
  const bool none = kept.pages == nullptr && kept.brought == nullptr;
  const kj::Duration first = none ? settings_.soonRetry : settings_.firstRetry;
  kept.retry = kept.retry == 0 * kj::SECONDS ? first : kj::min(kept.retry * 2, 30 * kj::SECONDS);
  kept.next = timer_.now() + kept.retry;
}

// ---- failover

std::string Keeper::died(const SessionFacts& facts) {
  if (settings_.diesToo) ::kill(::getpid(), SIGKILL);  // before its client hears of it
  if (restoresAfterDeath(facts)) return transport::kFailoverWords;
  const Grant* grant = leases_.admissible(facts.lease);
  if (grant == nullptr || grant->protectMs == 0) return "";
  if (grant->suspended && leaves(facts)) return transport::kLeavingWords;
  const Kept& kept = keptOf({facts.lease, facts.session}, facts);
  if (kept.pages != nullptr || kept.brought != nullptr || kept.beginning) return "";
  return "it has no checkpoint yet" + (kept.why.empty() ? "" : " (" + kept.why + ")") + ", and ";
}

bool Keeper::restoresAfterDeath(const SessionFacts& facts) {
  const Name name{facts.lease, facts.session};
  const Grant* grant = leases_.admissible(facts.lease);
  if (stopped_ || grant == nullptr || grant->protectMs == 0 || grant->suspended) return false;
  Kept& kept = keptOf(name, facts);
  const bool none = kept.pages == nullptr && kept.brought == nullptr;
  if ((none && !kept.beginning) || kept.restored++ == kMostRestores) return false;
  GPUPOOL_WARNING("session %s: its worker has died; it is restored as epoch %llu from its %s",
                  name.second.text().c_str(), static_cast<unsigned long long>(facts.epoch + 1),
                  none ? "beginning" : "last checkpoint");
  SessionFacts next = facts;
  next.epoch = facts.epoch + 1;
  restore(name, next, kept);
  return true;
}

void Keeper::restore(const Name& name, const SessionFacts& next, const Kept& kept) {
  if (kept.pages != nullptr)
    restorer_.begin(name, next,
                    [pages = kept.pages](StateSocket& socket) { return playBack(socket, *pages); });
  else if (kept.brought != nullptr)
    restorer_.begin(name, next, playOf(kept.brought->file));
  else
    restorer_.begin(name, next, playOfBeginning());
}

bool Keeper::again(const Name& name) {
  const auto kept = kept_.find(name);
  if (!stopped_ && kept != kept_.end() && kept->second.restored++ < kMostRestores) return true;
  kept_.erase(name);
  return false;
}

bool Keeper::leaves(const SessionFacts& facts) const {
  const Grant* grant = leases_.admissible(facts.lease);
  const auto at = kept_.find({facts.lease, facts.session});
  if (grant == nullptr || !grant->holderKeeps || at == kept_.end()) return false;
  return at->second.shipped != Id{} || at->second.brought != nullptr || at->second.beginning;
}

bool Keeper::anyLeaves() const {
  return std::any_of(kept_.begin(), kept_.end(),
                     [this](const auto& entry) { return anyLeaves(entry.first.first); });
}

bool Keeper::anyLeaves(const Id& lease) const {
  const auto numbers = sessions_.numbers(lease);
  return std::any_of(numbers.begin(), numbers.end(), [this](uint64_t number) {
    const SessionFacts* facts = sessions_.facts(number);
    return facts != nullptr && leaves(*facts);
  });
}

void Keeper::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("keeper: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
