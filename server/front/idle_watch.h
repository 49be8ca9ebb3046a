#pragma once
// Tells the manager for how long leases have not been used, of those that are to be given back then
// (TurnTerms.idleMs): the manager decides. Looked at with each heartbeat; what was between two of them is
// seen, too. Belongs to the event loop's thread.

#include <kj/timer.h>

#include <compare>
#include <map>
#include <set>

#include "server/front/leases.h"
#include "server/front/sessions.h"

namespace gpupool::server {

class IdleWatch {
 public:
  IdleWatch(kj::Timer& timer, const LeaseTable& leases, const SessionTable& sessions)
      : timer_(timer), leases_(leases), sessions_(sessions) {}

  // The holder of a lease, whose sessions are suspended, has asked for a session.
  void asked(const Id& lease) { asked_.insert(lease); }
  // For the heartbeat (LeaseUse).
  void report(kj::Function<capnp::List<schema::LeaseUse>::Builder(unsigned)> room);

 private:
  // Differs when the lease was used meanwhile.
  struct Mark {
    size_t begun = 0;  // sessions, of all its life
    SessionTable::Use use;
    auto operator<=>(const Mark&) const = default;
  };
  struct Seen {
    kj::TimePoint usedAt;
    Mark mark;
  };

  kj::Timer& timer_;
  const LeaseTable& leases_;
  const SessionTable& sessions_;
  std::map<Id, Seen> seen_;
  std::set<Id> asked_;  // since the last report
};

}  // namespace gpupool::server
