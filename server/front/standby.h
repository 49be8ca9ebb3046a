#pragma once
// This server as the standby of leases that are on other servers (ServerControl.keep): from there it takes
// the checkpoints of their sessions, as a lease's holder does (schema/checkpoint_keeper.h), and keeps the
// last one of each in its memory, within the memory for checkpoints (KeepBudget).
//
// When a lease's server dies, its holder asks this one to hand the session's checkpoint on to where the
// manager says that the lease is now (SessionHello.handsTo): to another server, over a connection like a
// holder's, or to this very one (`bring`). That goes on by itself; whoever asks meanwhile is told so. What is
// on its way here from the dead server, which may be only slow, is not kept from then on.
//
// What is kept goes when the manager says so, that is, when the lease has ended or has another standby. A
// lease that has come to this server keeps it until there is a later checkpoint elsewhere (`superseded`).
// Where neither a manager nor the lease's server is heard of for `term`, it goes, too. Belongs to the event
// loop's thread.

#include <kj/async-io.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "schema/checkpoint_keeper.h"
#include "schema/pool.capnp.h"
#include "server/front/checkpoint_desk.h"
#include "server/front/keep_budget.h"
#include "server/front/leases.h"

namespace gpupool::server {

// SessionHello.handsTo and over. facts: of the session, as its client will have it next.
struct HandWish {
  SessionFacts facts;
  Id to;
  bool over = false;
};

class Standby final : private kj::TaskSet::ErrorHandler {
 public:
  static constexpr size_t kMostLeases = 4096;  // as many as a beat names
  struct Settings {
    std::string server;  // this and the next: ServerInfo's
    Id incarnation;
    kj::Duration pause = 2 * kj::SECONDS;  // before a lease's server is connected to again
    kj::Duration term = 30 * kj::MINUTES;
    kj::Duration look = 5 * kj::SECONDS;
    kj::Duration answer = 5 * kj::SECONDS;               // a holder takes its answer within this
    std::function<bool()> inPool = [] { return true; };  // a manager is heard of
    // Keeper::bring.
    std::function<void(kj::Own<kj::AsyncIoStream>, const BroughtSession&)> bring =
        [](kj::Own<kj::AsyncIoStream>, const BroughtSession&) {};
  };
  Standby(kj::AsyncIoProvider& io, LeaseTable& leases, std::shared_ptr<KeepBudget> budget, Settings settings);
  ~Standby() noexcept;
  KJ_DISALLOW_COPY(Standby);

  // ServerControl.keep and dropKept. The error: why not.
  std::optional<std::string> keep(schema::Lease::Reader lease);
  void drop(const Id& lease);
  // The lease's key, if anything of it is kept; else empty.
  std::vector<std::byte> key(const Id& lease) const;
  // A holder that has proven it asks, and is answered.
  void ask(kj::Own<kj::AsyncIoStream> stream, const HandWish& wish);
  // There is a later checkpoint of the session elsewhere, which has gone on here.
  void superseded(const Id& lease, const Id& session);
  // BeatParams.kept.
  void report(schema::Manager::BeatParams::Builder beat) const;
  size_t leases() const { return entries_.size(); }

 private:
  struct Where {
    std::string name, host;  // ServerInfo's
    uint16_t port = 0;
    Id incarnation;
  };
  struct Entry : kj::Refcounted {
    Entry(kj::Timer& timer, schema::CheckpointKeeper::Settings settings)
        : keeper(timer, std::move(settings)) {}
    Id lease;
    std::string key;
    Where where;
    uint64_t standbyEpoch = 0, deviceEpoch = 0;
    bool wanted = true;   // false: the lease is here, and what is kept goes when it is superseded
    bool taking = false;  // connected to the lease's server
    kj::TimePoint heard = kj::origin<kj::TimePoint>();
    std::set<Id> handing;   // sessions
    std::string notHanded;  // why not, the last time
    schema::CheckpointKeeper keeper;
    kj::Promise<void> loop = nullptr;  // ended first
  };
  struct Answer {
    schema::HandVerdict verdict = schema::HandVerdict::NOTHING;
    std::string error = {};
  };
  using Opened = kj::Promise<kj::Own<kj::AsyncIoStream>>;
  using Fill = schema::CheckpointKeeper::Fill;

  kj::Promise<void> take(Entry& entry);
  Opened openToTake(Entry& entry, const Fill& fill);
  Opened open(const Where& where, schema::SessionOpening opening);
  Answer decide(const HandWish& wish);
  void hand(Entry& entry, const HandWish& wish);
  Opened openToHand(const Entry& entry, const SessionFacts& facts, const Fill& fill);
  Opened openHere(const SessionFacts& facts, const Fill& fill);
  kj::Promise<void> lookAgain();
  void look();
  void taskFailed(kj::Exception&& exception) override;

  kj::AsyncIoProvider& io_;
  kj::Timer& timer_;
  LeaseTable& leases_;
  const std::shared_ptr<KeepBudget> budget_;
  const Settings settings_;
  std::map<Id, kj::Own<Entry>> entries_;  // by lease
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
