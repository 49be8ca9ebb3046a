#pragma once
// Suspends and resumes leases: all living sessions of a lease together, or none.
//
// suspend: from the order on no session of the lease begins (LeaseTable::pause). Each session's worker gets a
// connection to the copier of its own and moves the session's memory there. If one cannot, those that could
// are resumed, and the order fails with the first reason. resume: the lease's reservation comes first, then
// every session; if one cannot come back, those that could are suspended again. A session that ends meanwhile
// counts as gone. One that is neither here nor there, because taking a step back failed too, is ended.
//
// Where leases take turns (turn_taker.h), the server itself puts them aside and brings them back in the same
// way. An order to suspend a lease that is aside moves nothing: it is suspended by order from then on. An
// order to resume one where there is no room now makes it one that is aside.
//
// Orders for one lease are carried out one after the other (lease_lanes.h), also when nobody waits for the
// answer any more. A lease that is revoked meanwhile ends its sessions as always; the order then fails.
// Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/front/lease_lanes.h"
#include "server/front/leases.h"
#include "server/front/sessions.h"

namespace gpupool::server {

class Suspension final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    // Each call is a new connection to the copier, for one session. Rejects, saying why there is none.
    std::function<kj::Promise<kj::AutoCloseFd>()> copier;
    std::string refusal;   // not empty: nothing is suspended here, and why
    bool disturb = false;  // workers may ask for it (GPUPOOL_DISTURB)
    // A worker has so long for an order, besides what its programs have to finish.
    kj::Duration bound = 300 * kj::SECONDS;
    // A session whose hand-over had begun before the order is there within this: Admission's bounds.
    kj::Duration beginBound = 90 * kj::SECONDS;
  };

  // Takes over SessionTable::onDisturb.
  Suspension(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, Settings settings);
  ~Suspension() noexcept;
  KJ_DISALLOW_COPY(Suspension);

  // ServerControl.suspend and resume; both reject with a text for people.
  kj::Promise<Suspended> suspend(const Id& lease, uint32_t drainMs);
  kj::Promise<void> resume(const Id& lease);
  // The same for turns. Of a lease that is suspended by order, or is no more, they change nothing.
  kj::Promise<Suspended> putAside(const Id& lease, uint32_t drainMs);
  kj::Promise<void> bringBack(const Id& lease);

  // Of a lease that an earlier life of this server had, before any order: what its sessions have made of the
  // orders of that. Suspended it stays; one that was on its way is suspended where all sessions are, and else
  // it runs. Resolves when that is decided.
  kj::Promise<void> settle(const Id& lease);

  // For orders of another kind (migration.h): they take their turn with these.
  LeaseLanes& lanes() { return lanes_; }
  // Of a lease that is paused: resolves when every session whose holder has been told that it is open is
  // there. Rejects, saying why, after beginBound.
  kj::Promise<void> awaitBeginnings(const Id& lease);

 private:
  using Outcomes = std::map<uint64_t, Outcome>;  // by session's number

  template <class Result>
  kj::Promise<Result> queue(const Id& lease, kj::Function<kj::Promise<Result>()> work);
  kj::Promise<Suspended> suspendNow(Id lease, uint32_t drainMs, bool aside);
  kj::Promise<Suspended> concludeSuspend(Id lease, uint32_t drainMs, Outcomes outcomes);
  kj::Promise<void> resumeNow(Id lease);
  kj::Promise<void> bringBackNow(Id lease);
  kj::Promise<void> resumeReserved(Id lease);
  kj::Promise<void> concludeResume(Id lease, const Outcomes& outcomes);
  kj::Promise<void> disturbNow(Id lease, uint64_t number);
  kj::Promise<void> settleNow(Id lease);
  kj::Promise<void> concludeSettle(Id lease, Outcomes outcomes);

  // Rejects before any order is given if there are not connections for all.
  kj::Promise<Outcomes> suspendAll(const std::vector<uint64_t>& numbers, uint32_t drainMs);
  kj::Promise<Outcomes> resumeAll(const std::vector<uint64_t>& numbers);
  // Resumes those that are suspended, and ends who does not come back.
  kj::Promise<void> takeBack(const Outcomes& outcomes);
  // Some are back, for others `why` holds. Rejects with that when all are suspended again.
  kj::Promise<void> suspendAgain(Id lease, const Outcomes& outcomes, const std::string& why);
  kj::Promise<void> end(const std::vector<uint64_t>& numbers, const std::string& reason);
  // The first reason why one of them is not what it was ordered to be; empty: each is, or is gone.
  std::string firstError(const Outcomes& outcomes) const;
  // What they have kept together, and so on; the error: that cannot be.
  std::string sum(const Id& lease, const Outcomes& outcomes, Suspended& total) const;
  void taskFailed(kj::Exception&& exception) override;

  kj::Timer& timer_;
  LeaseTable& leases_;
  SessionTable& sessions_;
  Settings settings_;
  struct Last {
    Outcomes outcomes;
    uint32_t drainMs = 0;
  };
  std::map<Id, Last> last_;  // of suspended leases, and some that are no more
  LeaseLanes lanes_;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
