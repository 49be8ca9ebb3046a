#pragma once
// What this life of the server does with the sessions of the one before, whose workers have lived on.
//
// The leases come from the state file (server_state.h), and so does what each session is: a worker is not
// trusted. It is reached by its door (doors.h), gets the end of a new socket pair, and tells on that what
// only it knows: how much of its lease's memory it has, and it hands back its client's socket and the locks
// of its devices. A worker that lies about its memory gains nothing that it would not have by using more. One
// that does not answer within `bound`, or has another session than was noted, ends as workers of an earlier
// life do (device_claims.h). Likewise one that has its memory on its devices although its lease was noted as
// suspended. What becomes of a lease that was on its way is Suspension's (settle).
//
// A lease that was going into files is held in them if they have their place (HeldNotes): then a worker of it
// that was about to send its client there is told to, and any other ends. Else it goes on as it was, with all
// of its sessions: none leaves before the files have their place. Belongs to the event loop's thread.

#include <kj/async-io.h>
#include <kj/async-unix.h>

#include <optional>
#include <set>
#include <vector>

#include "server/front/device_claims.h"
#include "server/front/doors.h"
#include "server/front/leases.h"
#include "server/front/sessions.h"

namespace gpupool::server {

class Readoption final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    WorkerParent* parent = &ownChildren();  // the workers become its
    kj::Duration bound = 5 * kj::SECONDS;   // of all of them together; each needs milliseconds
    // Until the client of a session that goes into files has gone there. It may be stopped.
    kj::Duration leaves = 1 * kj::HOURS;
    std::optional<pid_t> copier = {};  // whose door stays
  };
  Readoption(kj::UnixEventPort& port, kj::Timer& timer, LeaseTable& leases, SessionTable& sessions,
             DeviceClaims& claims, Doors doors, Settings settings);
  KJ_DISALLOW_COPY(Readoption);

  // Before anything is granted here, or begins. Resolves when all of it is decided. sessions: the numbers of
  // all sessions that were noted (StoredSharing), also of those that are gone. held: in files, as these.
  kj::Promise<void> run(const std::vector<StoredGrant>& leases, std::set<Id> held,
                        std::vector<uint64_t> sessions);

 private:
  struct Answer;
  void adoptLeases(const std::vector<StoredGrant>& leases, const std::vector<StoredWorker>& workers);
  kj::Promise<void> adopt(StoredWorker worker);
  // Knocks at its door: this side's end of the socket that it got. Throws, saying why, where it has none.
  kj::AutoCloseFd knock(const StoredWorker& worker, bool held) const;
  void sendAway(const StoredWorker& worker);
  kj::Promise<void> hearEnd(kj::Own<kj::UnixEventPort::FdObserver> observer, kj::AutoCloseFd ours);
  void refused(pid_t worker, const char* why);
  kj::Promise<kj::Own<Answer>> hear(kj::Own<kj::UnixEventPort::FdObserver> observer, kj::AutoCloseFd ours);
  void take(const StoredWorker& worker, Answer& answer);
  void tellEnded(const std::vector<uint64_t>& sessions);
  void taskFailed(kj::Exception&& exception) override;

  kj::UnixEventPort& port_;
  kj::Timer& timer_;
  LeaseTable& leases_;
  SessionTable& sessions_;
  DeviceClaims& claims_;
  Doors doors_;
  Settings settings_;
  std::set<Id> held_;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
