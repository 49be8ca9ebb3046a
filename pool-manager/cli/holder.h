#pragma once
// The lease holder: leases from the manager, keeps the lease alive, opens sessions for applications and gives
// the lease back. One event loop, one thread. It outlives a manager that dies: it reconnects and goes on
// renewing.

#include <kj/async-io.h>
#include <kj/async-unix.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "pool-manager/cli/figures.h"
#include "pool-manager/cli/session_opener.h"
#include "pool-manager/rpc.h"
#include "schema/checkpoint_keeper.h"

namespace gpupool::cli {

struct HolderSettings {
  std::vector<std::string> addresses;                           // of managers
  CredentialSource credentials = [] { return Credentials{}; };  // shown to them
  pool::LeaseRequest request;  // without its id; with one: a holder before this one has asked, and is gone
  std::string transport, networkDevice;
  uint32_t stallMs = 30'000;  // after this a client gives a worker up that shows no sign of life; 0: never
  // Of a lease that is protected; schema/holder.h: OpenReply.
  uint32_t silenceMs = 0;
  uint64_t logFrameBytes = 0, logPayloadBytes = 0;
  bool goOnDifferent = false;
  // Of a lease whose holder keeps the checkpoints (request.turns.holderKeeps): where, how much of it, and how
  // long another server is waited for.
  std::string keepFolder;
  uint64_t keepBytes = 0;
  uint32_t failOverWaitMs = 0;
  std::string again = "start the program again";  // what to do when the lease has ended
  kj::Duration awaitedPause = 1 * kj::SECONDS;    // a request that is not answered by then waits for GPUs
  kj::Duration keepPause = 2 * kj::SECONDS;       // before it is connected to its server again
  kj::Duration lookLimit = 2 * kj::SECONDS;       // a server that is thought to be gone answers within this
  // While it does not, the manager is asked this often whether the lease may leave it at once. Its host takes
  // a connection within this, too.
  kj::Duration lookAlone = 250 * kj::MILLISECONDS;
  // A server that keeps a session's checkpoint and does not answer is asked for so long. Then that is lost.
  kj::Duration standbyLimit = 6 * kj::SECONDS;
  kj::Duration connectLimit = 3 * kj::SECONDS;
  kj::Duration sessionLimit = 30 * kj::SECONDS;  // a session is open within this
  kj::Duration placesLimit = 5 * kj::SECONDS;    // the manager has said within this where the lease is
  kj::Duration placesPause = 200 * kj::MILLISECONDS;
  // A server that is started again takes new sessions within this: it has to find its GPUs first.
  kj::Duration restartLimit = 10 * kj::SECONDS;
  kj::Duration releaseLimit = 7 * kj::SECONDS;  // one attempt to give the lease back
  kj::Duration releasePause = 200 * kj::MILLISECONDS;
  // The server of a lease whose memory is off its devices is asked again after this, and then ever more
  // rarely. A lease that takes turns waits only while it is asked.
  kj::Duration suspendedPause = 250 * kj::MILLISECONDS;
  kj::Duration mostSuspendedPause = 1 * kj::SECONDS;
  kj::Duration lostPause = 20 * kj::MILLISECONDS;  // likewise, of a session that was brought to a server
  kj::Duration waitingInterval = holder::kWaitingIntervalMs * kj::MILLISECONDS;
};

class Holder final : private kj::TaskSet::ErrorHandler {
 public:
  // onLost: called at most once, when the lease has ended, with the reason. told: a session was opened with
  // it, so a program learns of the end, from its server or with its next session, and prints it.
  // onNews: called with a line for people: what is waited for, that a lease which was to be protected is not,
  // ahead of the end of the lease's time limit, at the manager's notice of another end, and when it refuses
  // the holder's token.
  Holder(
      kj::AsyncIoProvider& io, kj::UnixEventPort& port, HolderSettings settings,
      std::function<void(const std::string& reason, bool told)> onLost,
      std::function<void(const std::string& text)> onNews = [](const std::string&) {});
  ~Holder() noexcept {}

  // Resolves when the lease is there. Called again, it returns the same lease, or tries again after a
  // failure. Fails with toException(OpenFailure).
  kj::Promise<void> acquire();
  const pool::Lease* lease() const { return lease_ ? &*lease_ : nullptr; }

  // Answers OpenRequests and FiguresRequests on a SOCK_SEQPACKET socket until the peer closes it.
  kj::Promise<void> serve(kj::AutoCloseFd socket);
  // Accepts such connections from this user's processes (and root's) for ever.
  kj::Promise<void> listen(int listeningSocket);

  // Gives the lease back; resolves when the devices are free. While the manager is away it is tried again,
  // until the lease has run out by itself. Nothing to do without a lease.
  kj::Promise<void> release();

 private:
  struct Peer;
  kj::Promise<void> connect(size_t at, const std::string& tried);
  // Behind connect(): a call that fails beside may have given the connection up since. Throws: DISCONNECTED.
  schema::Manager::Client manager();
  kj::Promise<void> connectPatiently(int attempts);
  kj::Promise<void> requestLease(int attempts);
  // Says what the request waits for, if it does. Of more than one attempt the first that waits says it.
  kj::Promise<void> tellAwaited();
  void tellUnprotected();
  kj::Promise<void> announceEnd();
  kj::Promise<void> renewLoop(unsigned partsOfTtl);
  kj::Promise<void> renewOnce();
  // True: the manager has said that the lease has ended, and so has this one, to whom it may concern.
  bool noteEnd(const kj::Exception& error);
  static bool saysEnded(const kj::Exception& error);
  kj::Exception endedNow() const;  // once it has
  void noteStandby(schema::Manager::RenewResults::Reader renewed);
  kj::Promise<void> releaseOnce(Id id);
  kj::Promise<void> releaseLoop(Id id, kj::TimePoint until);
  // As the grant says: its tenant may have decided.
  bool isProtected() const { return lease_ && lease_->terms.protectMs != 0; }
  // Of a session for which nobody has chosen one; "": the first that reaches the server. A protected one
  // takes the network on its server's own machine, too.
  std::string transportOf(const SessionWish& wish) const;
  bool adopts() const { return !settings_.request.adopts.empty(); }  // a claim, instead of leasing
  kj::Promise<void> serveNext(Peer& peer);
  kj::Promise<void> open(Peer& peer, const holder::OpenRequest& request);
  // Answers a FiguresRequest.
  kj::Promise<void> tellFigures(Peer& peer, holder::FiguresRequest request);
  // Of a lease that has moved its new server is asked the next time.
  kj::Promise<void> refreshFigures(kj::Duration age);
  void sendFigures(Peer& peer, const holder::FiguresRequest& request, holder::Status status,
                   const std::string& text);
  // Asks again while the lease is suspended, for as long as it and the application live; once only for a
  // session that moves.
  kj::Promise<OpenSession> openPatiently(Peer& peer, const SessionWish& wish);
  // Where the lease is now, or is going: a session that moves looks there first where it goes to. A new one
  // begins where the lease was last known to be, and asks only if it cannot. The first one of a protected
  // lease whose server is gone begins on another server.
  kj::Promise<OpenSession> openMoved(const SessionWish& wish);
  kj::Promise<OpenSession> openNew(const SessionWish& wish);
  kj::Promise<OpenSession> openNewElsewhere(const SessionWish& wish, const pool::ServerLife& tried,
                                            kj::TimePoint until, kj::Exception why);
  kj::Promise<OpenSession> awaitRestart(const SessionWish& wish, const pool::ServerLife& tried,
                                        kj::TimePoint until, kj::Exception why);
  // At the first of these servers that does not refuse it.
  kj::Promise<OpenSession> openAt(std::vector<pool::Server> servers, const SessionWish& wish);
  // Manager.places, within placesLimit, also of a manager that is just being started again. Empty: the lease
  // is held in files.
  kj::Promise<std::vector<pool::Server>> places();
  kj::Promise<std::vector<pool::Server>> askPlaces();
  // Of a session that has lost its server, or its worker, where that server does not restore it: takes the
  // lease to another server if need be, and the session from its checkpoint there.
  kj::Promise<OpenSession> recover(const SessionWish& wish);
  kj::Promise<OpenSession> bringBack(const SessionWish& wish, const std::string& why);
  kj::Promise<OpenSession> bringOwn(const SessionWish& wish, const std::string& why);
  // Of a lease with a standby: the servers that may have its checkpoints. Each is asked in turn to hand the
  // session's on to where the lease is. True: one does, or may do so yet; false: none has any.
  std::vector<pool::Server> keepersElsewhere() const;
  kj::Promise<bool> haveHandedOn(std::vector<pool::Server> keepers, const SessionWish& wish);
  struct HandAnswer {
    schema::HandVerdict verdict = schema::HandVerdict::NOTHING;
    std::string error;
  };
  kj::Promise<HandAnswer> askKeeper(const pool::Server& keeper, const SessionWish& wish, bool over);
  schema::CheckpointKeeper::Open openLease() const;
  // What a server has said of a session. Neither: the lease has left it, or may have.
  struct Look {
    std::string transport;
    bool ranThere = false;  // the session, which has lost that server
    kj::Maybe<OpenSession> session;
    kj::Maybe<kj::Exception> failure;
    bool over() const { return session != nullptr || failure != nullptr; }
  };
  kj::Promise<std::shared_ptr<Look>> lookAt(const pool::ServerLife& tried, const SessionWish& wish,
                                            kj::Promise<OpenSession> opened);
  kj::Promise<void> awaitLook(const pool::ServerLife& tried, std::shared_ptr<Look> look,
                              kj::ForkedPromise<void> over);
  kj::Promise<bool> leaveIfCutOff(const pool::ServerLife& tried, std::shared_ptr<Look> look);
  kj::Promise<bool> leaveAtOnce(const pool::ServerLife& lost, bool cutOff);
  using FailedOver = capnp::Response<schema::Manager::FailOverResults>;
  kj::Promise<FailedOver> requestFailOver(const pool::ServerLife& lost, uint32_t waitMs, bool cutOff);
  kj::Promise<void> noteFailOver(const FailedOver& answer);
  kj::Promise<void> failOver(const pool::ServerLife& lost);
  kj::Promise<void> askFailOver(pool::ServerLife lost, kj::TimePoint until);
  // Takes checkpoints from where the lease is, until it ends.
  kj::Promise<void> keepLoop();
  kj::Promise<OpenSession> waitForResume(Peer& peer, const SessionWish& wish);
  // Of a session whose application is gone: if it is held in files, or is just leaving for them, takes it
  // when it is restored, and ends it. Until then, or until the lease ends.
  kj::Promise<void> endHeld(const SessionWish& wish);
  void endSessions(const Peer& peer);
  kj::Promise<void> sayWaiting(Peer& peer);
  void taskFailed(kj::Exception&& error) override;

  kj::AsyncIoProvider& io_;
  kj::UnixEventPort& port_;
  HolderSettings settings_;
  std::function<void(const std::string&, bool)> onLost_;
  std::function<void(const std::string&)> onNews_;
  bool noticed_ = false;  // the manager's notice that the lease ends has been passed on
  bool refused_ = false;  // it has been said that the manager refuses this holder
  bool toldAwaited_ = false;
  kj::Own<pool::ManagerConnection> connection_;  // null: to be made
  std::optional<pool::Lease> lease_;
  std::string lost_;                          // why the lease ended, if it did
  bool asked_ = false;                        // the manager may know our request
  bool opened_ = false;                       // a session
  std::vector<pool::WorkerVersion> clients_;  // of those who have
  FiguresSource figures_;
  bool locating_ = false;  // the manager is being asked where the lease is
  bool held_ = false;      // as the manager last said: the lease is in files
  kj::Maybe<kj::ForkedPromise<void>> acquiring_;
  std::optional<schema::CheckpointKeeper> keeper_;
  // The lease's standby before this one, or before there was none. It may be without its manager alone, or
  // the manager may only not have heard it again yet.
  std::optional<pool::Server> formerStandby_;
  // A server that may have a session's checkpoint, and says nothing of it: since when, and when it was asked
  // last.
  struct Silence {
    kj::TimePoint since, asked;
  };
  std::map<std::pair<Id, std::string>, Silence> unanswered_;
  kj::Maybe<kj::ForkedPromise<void>> failingOver_;  // the last one
  bool failOverSettled_ = true;                     // it has been answered, or has failed
  kj::Own<kj::PromiseFulfiller<void>> keepAnew_;    // ends keepLoop's pause, or what it waits for
  kj::TaskSet tasks_;
};

// For a process that cannot hold a lease: answers the application's first request, within a few seconds, with
// this refusal.
void refuseApplication(int socket, const std::string& text);

// A client's datagram of `size` bytes (perhaps more than were kept): the reason why it is refused, or the
// request in it.
std::optional<OpenFailure> check(const holder::OpenRequest& request, ssize_t size);
SessionWish wishOf(const holder::OpenRequest& request);

// "user@host pid N name", as `gpupool leases` shows it.
std::string holderName(int pid, const std::string& command);
std::string userAndHost();  // "eve@head"

}  // namespace gpupool::cli
