#pragma once
// Carries out what Turns decides: on a server that leases more memory than it has, leases are put aside and
// brought back, so that all of them get on.
//
// Decisions are made when something may have changed, at most one in `closest`, and every `tick` while a
// lease waits. What they go by is looked up then: the leases, what their sessions have said of themselves,
// and whose holder has asked for a session while its lease was aside. Such a lease wants its devices until
// `patience` after it was last asked for, or came back: its holder asks again by itself. Belongs to the event
// loop's thread.

#include <kj/async-io.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/front/leases.h"
#include "server/front/sessions.h"
#include "server/front/suspension.h"
#include "server/front/turns.h"

namespace gpupool::server {

class TurnTaker final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    Turns::Settings turns;  // without the memory
    kj::Duration tick = 100 * kj::MILLISECONDS, closest = 20 * kj::MILLISECONDS;
    kj::Duration patience = 2 * kj::SECONDS;  // holders ask every half second
    bool waits = false;                       // nothing is decided before `begin`
    // A session of the lease is about to begin: it wants its devices.
    std::function<bool(const Id& lease)> opening = [](const Id&) { return false; };
  };

  // Takes over SessionTable::onActivity and LeaseTable::onWaitedFor.
  TurnTaker(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, Suspension& suspension,
            Settings settings);
  ~TurnTaker() noexcept;
  KJ_DISALLOW_COPY(TurnTaker);

  // The lease's holder wants a session of it, or the lease is to come back soon for another reason.
  void asked(const Id& lease);
  void begin();
  // Nothing is moved any more.
  void stop() { stopped_ = true; }
  // Of all leases that are not suspended by order: for the heartbeat (LeaseTurn).
  void report(kj::Function<capnp::List<schema::LeaseTurn>::Builder(unsigned)> room);

 private:
  Turns::Time now() const;
  // A decision at that time, or earlier.
  void plan(kj::TimePoint time);
  void decide();
  void see();
  Turns::Facts facts(const Grant& lease) const;
  bool wants(const Grant& lease) const;
  void carryOut(const Turns::Move& move);
  void done(const Turns::Move& move, kj::TimePoint began, kj::Duration waited);
  void taskFailed(kj::Exception&& exception) override;

  kj::Timer& timer_;
  LeaseTable& leases_;
  SessionTable& sessions_;
  Suspension& suspension_;
  Settings settings_;
  Turns turns_;
  std::map<Id, kj::TimePoint> wantedUntil_;  // by what asked() told
  std::optional<kj::TimePoint> planned_;     // the next decision
  kj::TimePoint decided_;                    // the last one
  bool stopped_ = false;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
