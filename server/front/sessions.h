#pragma once
// The running sessions: one worker each, from the hand-over of the client's socket until the process is gone.
//
// They share their lease's memory: the account is kept here, by lease, for all its workers together. A lease
// that moves to other devices has an account for either of its placements, and a session is in that of its
// own devices. An account outlives its sessions while sessions of other leases have memory of it (offers.h).
//
// If a worker ends without giving its client a reason, the server sends one. It keeps a descriptor of the
// client's socket for that.
//
// A session ends by itself (its worker reports why and exits), by order (`end`: the worker is asked to stop,
// and is killed after `stopBound`), or by a crash. A worker that reported the end but does not exit is killed
// after `exitBound`. The reason of every end is logged and the last kHistory are kept.
//
// What a worker is asked to do with its session beside that, to suspend it and to resume it, is passed on
// here; what that means for a lease is suspension.h's.
//
// A session that moves has two workers: the old one, which serves it, and the next one, to which it goes. The
// next one becomes its worker, with its number and its account, when the old one reports that the client has
// gone over, or ends after the next one was given the client. Else, and always where the old one reports an
// error, the next one is killed and nothing has changed. The old one's exit after that is no end of the
// session. Whatever ends a session ends both.
//
// A session that moves to another server has one worker here. When that reports that the client has gone
// over, the session has left; else it goes on. A worker that ends before it has said either ends the session
// here: where its client had gone over, nothing of that concerns it, and where not, this server's last words
// are for it.
//
// A session that comes from another server has a next worker here and no old one. It is one of this server's
// from when its client comes; until then its worker ends quietly, as it does by itself when the other
// server's is gone. Belongs to the event loop's thread.

#include <kj/async-io.h>

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "schema/id.h"
#include "server/front/leases.h"
#include "server/front/memory_account.h"
#include "server/front/offers.h"
#include "server/front/server_state.h"
#include "server/front/worker_child.h"
#include "server/worker_process.h"

namespace gpupool::server {

struct SessionFacts {
  Id session, lease;
  uint64_t epoch = 0;
  uint32_t clientPid = 0;
  std::string command;
  uint64_t deviceEpoch = 0;            // of the lease's placement where it is
  std::vector<std::string> devices;    // uuids of its devices
  std::vector<uint64_t> memoryLimits;  // of each, the lease's
  std::string transport;
  uint64_t rowsHash = 0;        // its client's: which program its workers are of
  bool readopted = false;       // it began in an earlier life of this server
  bool transportNamed = false;  // SessionHello's

  // It is, or is to be, on these.
  void place(const Placement& placement, const std::vector<Device>& inventory);
};

// What a session has made of an order to suspend or to resume it.
struct Outcome {
  bool gone = false;       // its process is: what follows says nothing
  bool suspended = false;  // what the session is now
  std::string error;       // not empty: the order was not carried out, and why
  Suspended facts;         // of an order to suspend; kept has one number a device of the lease
};

// What a session has made of an order to move.
struct MoveAnswer {
  bool gone = false;  // its processes are: what follows says nothing
  std::string
      error;  // not empty: it is where it was, and why; a next worker here is gone, or was killed a while ago
  uint64_t movedBytes = 0;
  uint32_t drainMs = 0, pauseMs = 0;
};

class SessionTable final : private kj::TaskSet::ErrorHandler {
 public:
  static constexpr size_t kHistory = 256;
  struct Bounds {
    kj::Duration stop = 2 * kj::SECONDS;   // from the order to SIGKILL
    kj::Duration exit = 10 * kj::SECONDS;  // from the worker's own report to SIGKILL
    // A worker that has an order and has read nothing for so long is taken for stopped or hung.
    kj::Duration reads = 30 * kj::SECONDS;
    // Of a session that comes from another server: until its worker has rebuilt it, and from then until its
    // client comes. Its state socket ends where the other server does; these are for one that says nothing
    // any more.
    kj::Duration arrival = 1 * kj::HOURS, arrivingClient = 10 * kj::MINUTES;
  };

  // lost: called when a worker reports that a device broke.
  SessionTable(kj::Timer& timer, Bounds bounds, WorkerChild::Lost lost);
  // Called when a worker began a session or has ended.
  void onChange(std::function<void()> changed) { changed_ = std::move(changed); }
  // Has this machine room for so many bytes of pinned memory?
  void onHostMemory(std::function<bool(uint64_t bytes)> room) { hostRoom_ = std::move(room); }
  KJ_DISALLOW_COPY(SessionTable);

  // Before the worker is sent the start of a session: from here on the server's next life knows it
  // (onChange), whenever this one is killed. Until add or, where it could not be sent, withdraw.
  void announce(const SessionFacts& facts, pid_t worker);
  void withdraw();
  // From here the worker is the session's; the client's socket was handed over. `client`: the same socket.
  void add(SessionFacts facts, kj::Own<WorkerChild> worker, kj::AutoCloseFd client);
  // Of a session of an earlier life of this server, whose worker has lived on.
  struct Earlier {
    uint64_t number = 0;          // that life's; 0: it had none, and gets a new one
    std::vector<uint64_t> taken;  // what it has of the lease's memory, by device, and no more than that
    SessionCounts counts;         // what its program has done up to now
    uint32_t shares = 0;          // so often it will say what it shares (SharedAgain)
    // What it is, as if it were asked for; nothing: it carries an order of that life out, and will say.
    std::optional<Outcome> state;
    bool waits = false;  // nobody but its worker has it, and its client has not come
  };
  void readopt(SessionFacts facts, kj::Own<WorkerChild> worker, kj::AutoCloseFd client, Earlier earlier);
  // Once, behind all readopt, and before anything begins: from here on sessions share again. Resolves when
  // each has said what it shares, or has ended, since it has not within `bound`. What they ask meanwhile,
  // also of memory, is answered then.
  kj::Promise<void> restoreShares(kj::Duration bound);
  // That session of an earlier life has ended: who may share events with it hears so.
  void endedEarlier(uint64_t number);
  // Sessions of that number are in living_.
  bool hasNumber(uint64_t number) const { return find(number) != nullptr; }
  // Ends all sessions of the lease; resolves when their processes are gone.
  kj::Promise<void> end(const Id& lease, const std::string& reason);
  // leaves: of a session whose client goes on at another server (transport::kLeavingWords).
  kj::Promise<void> endAll(const std::string& reason,
                           const std::function<bool(const SessionFacts&)>& leaves = {});
  // Ends all sessions of the lease: their clients go on at another server, or find that they cannot.
  void leave(const Id& lease, const std::string& reason);
  size_t living() const { return living_.size(); }
  size_t living(const Id& lease) const;
  // Those that come from another server, and have no client here yet.
  size_t arriving(const Id& lease) const;
  // Does a session of the lease use its placement of that epoch? One that moves there does.
  bool uses(const Id& lease, uint64_t deviceEpoch) const;
  // Before there are sessions: what holds for what they share. Else that is this object's own.
  void share(const StoredSharing& sharing);
  // What a lease has of each device, in its placement of that epoch; empty: there is none here.
  void onLimits(std::function<std::vector<uint64_t>(const Id& lease, uint64_t epoch)> limits) {
    limits_ = std::move(limits);
  }
  // Says of two leases whether they may share (Offers::MayShare). Without it none may.
  void onSharing(Offers::MayShare mayShare) { mayShare_ = std::move(mayShare); }
  // Who has device memory of that lease still, of other leases; for people, and empty: nobody. deviceEpoch:
  // as in Offers::borrowers.
  std::string borrowers(const Id& lease, uint64_t deviceEpoch = 0) const;
  std::set<Id> lenders() const { return offers_.lenders(); }
  // The same as a reason not to take the lease off its devices.
  std::string lentText(const Id& lease, uint64_t deviceEpoch = 0) const;
  // Resolves when nobody has.
  kj::Promise<void> givenBack(const Id& lease);
  // The same of a lease that has left its devices: who still has some after that time is ended.
  kj::Promise<void> takenBack(const Id& lease, kj::Duration bound, const std::string& reason);
  // Resolves when no worker is left there of a session that has gone on elsewhere.
  kj::Promise<void> oldGone(const Id& lease, uint64_t deviceEpoch);
  std::vector<StoredWorker> workers() const;
  std::vector<uint64_t> allNumbers() const;  // of those whose workers are not gone
  // A session of the lease is about to be added: until the result is destroyed.
  kj::Own<void> beginning(const Id& lease);
  // Resolves when none is.
  kj::Promise<void> begun(const Id& lease);

  // Sessions have a number, which none has had before, in no life of this server.
  std::vector<uint64_t> numbers(const Id& lease) const;
  // What a lease's sessions have together of a device of its placement of that epoch.
  uint64_t used(const Id& lease, uint64_t deviceEpoch, uint32_t place) const;
  // The programs of its sessions, and what each has on each of its devices.
  struct Client {
    uint32_t pid = 0;  // as its machine counts
    std::vector<uint64_t> bytes;
  };
  std::vector<Client> clients(const Id& lease) const;
  // Whose it is, for people.
  std::string describe(uint64_t number) const;
  // What a session answers to these; one order at a time for each. `copier`: its connection to the copier. A
  // worker that does not answer within `bound` is ended. What its answer says is checked against its lease
  // but for the amounts.
  kj::Promise<Outcome> suspend(uint64_t number, uint32_t drainMs, kj::AutoCloseFd copier, kj::Duration bound);
  kj::Promise<Outcome> resume(uint64_t number, kj::Duration bound);
  // Likewise to such an order of an earlier life, or what it was when it was readopted. Once, and before any
  // other order.
  kj::Promise<Outcome> settled(uint64_t number, kj::Duration bound);
  // Null: it is gone, or is to end. The epoch is its worker's.
  const SessionFacts* facts(uint64_t number) const;
  // What the old worker gets with an order to move. If there is no answer within `bound`, that worker is
  // ended.
  struct MoveMeans {
    uint32_t drainMs = 0;
    kj::AutoCloseFd copier;  // a connection to it; none: MoveOrder.stream
    kj::AutoCloseFd state;   // its end of the state socket
    kj::Duration bound;
    bool pages = false;   // of `copy`: MoveOrder.pages
    bool direct = false;  // of `move`: MoveOrder.direct
  };
  // Begins a move to `next`, which has been sent its start with `facts`, the session's but for epoch and
  // placement, and was announced; that is the session's from here on. One order at a time, as above. Without
  // an order, and with `next` killed, where the account of its placement has no room for what the session
  // has.
  kj::Promise<MoveAnswer> move(uint64_t number, kj::Own<WorkerChild> next, SessionFacts facts,
                               MoveMeans means);
  // Begins a move to another server, as `epoch`. server: its name, for people.
  kj::Promise<MoveAnswer> moveAway(uint64_t number, const std::string& server, uint64_t epoch,
                                   MoveMeans means);
  // Has its state written into a file, by who is at the other end of `means.state` (MoveOrder.copy): the
  // session goes on here, whatever comes of it. One order at a time, as above.
  kj::Promise<MoveAnswer> copy(uint64_t number, MoveMeans means);
  // The same, and the session goes there, as `epoch`: when that is answered, it has left.
  kj::Promise<MoveAnswer> hold(uint64_t number, uint64_t epoch, MoveMeans means);
  // Why a session cannot come here from another server; empty: it can.
  std::string refusesArrival(const SessionFacts& facts) const;
  // An earlier worker that waits for the same session, and has no client, ends. Resolves when it is gone.
  kj::Promise<void> displaceArrival(const SessionFacts& facts);
  // `worker` waits for the session; it has been sent its start and was announced. Where refusesArrival has a
  // reason by now, it is killed.
  void arrive(SessionFacts facts, kj::Own<WorkerChild> worker);
  // Why a client that says that it comes from there is none for a next worker; empty: one waits for it.
  std::string refusesClient(const SessionFacts& client) const;
  // Gives that worker the client's socket. `kept`: the same one. Does nothing where refusesClient has a
  // reason by now.
  void giveClient(const SessionFacts& client, int socket, kj::AutoCloseFd kept);
  // Resolves when its process is gone.
  kj::Promise<void> endOne(uint64_t number, const std::string& reason);
  // Called when a worker asks for it to be suspended and resumed, or moved (WorkerReport.disturb).
  void onDisturb(std::function<void(const Id& lease, uint64_t number)> disturb) {
    disturb_ = std::move(disturb);
  }

  // Does one of the lease's sessions want its devices? While they are suspended: has one of them something to
  // do? Of a worker that never says anything (WorkerReport.activity) it counts as if it had.
  bool active(const Id& lease, bool suspended) const;
  // Of a lease: its sessions, and how often they have begun or ceased to call (WorkerStart.reportActivity).
  struct Use {
    uint32_t sessions = 0;
    uint64_t changes = 0;
    auto operator<=>(const Use&) const = default;
  };
  Use use(const Id& lease) const;
  // Of a session whose worker reports it (WorkerStart.reportActivity).
  struct Sending {
    bool quiet = false;    // no frame has come for a moment
    uint64_t changes = 0;  // grows when frames come after such a moment, and when none come any more
  };
  Sending sending(uint64_t number) const;
  // Of a protected session: what its client's log of calls holds, as last said.
  ClientLog clientLog(uint64_t number) const;
  // Its worker and its client hear that a whole checkpoint of that moment is kept.
  void tellKept(uint64_t number, uint64_t frame, uint64_t aside);
  // Called when the process of a worker is gone, and neither it nor an order has ended its session. Returns
  // with what the reason that its client hears begins: "", or where it goes on (transports/last_words.h).
  void onDeath(std::function<std::string(const SessionFacts&)> died) { died_ = std::move(died); }
  // Called when a worker says something of it.
  void onActivity(std::function<void()> heard) { heardActivity_ = std::move(heard); }

  // Called with what a session's program has done since its worker last said so.
  void onCounts(std::function<void(const Id& lease, const SessionCounts& more)> counted) {
    counted_ = std::move(counted);
  }

  // By lease, of those that have some: why its sessions could not be moved, as far as they have said so; for
  // people, each once. Of those that share memory with this server: that they do.
  // isProtected: of a lease; null: none is.
  std::map<Id, std::vector<std::string>> hindrances(
      const std::function<bool(const Id& lease)>& isProtected = nullptr) const;

  // The running ones, then the ended ones, the latest first.
  void write(kj::Function<capnp::List<schema::SessionState>::Builder(unsigned)> room) const;

 private:
  enum class Role {
    serving,  // in living_: its worker is the session's
    next,     // in next_: the session moves here
    old,      // in old_: the session has gone on elsewhere
  };
  struct Asked {  // schema::MemoryRequest, of a device
    uint64_t ticket = 0, take = 0, give = 0;
    uint32_t place = 0;
  };
  struct Shared {  // schema::ShareReport
    uint64_t ticket = 0;
    schema::ShareReport::Which what = schema::ShareReport::OPEN;
    Offers::Part part;
    Offers::Token token;
    uint64_t number = 0;  // of the piece or the opening that ends
    kj::AutoCloseFd descriptor;
  };
  // A session and one of its workers. Of a session that moves there are two, with one number.
  struct Session : kj::Refcounted {
    Role role = Role::serving;
    SessionFacts facts;
    kj::Own<WorkerChild> worker;
    kj::AutoCloseFd client;
    kj::TimePoint began = kj::origin<kj::TimePoint>();
    std::string text;  // why it ends, once known
    uint64_t startTicks = 0;
    uint64_t number = 0;  // its name in the account
    bool ordered = false;
    std::optional<schema::Activity> activity;  // as last said
    uint64_t activityChanges = 0;
    std::vector<std::string> hindrances;              // likewise
    ClientLog log;                                    // likewise
    SessionCounts counts;                             // likewise
    kj::Own<kj::PromiseFulfiller<Outcome>> answer;    // to an order; null: none is under way
    std::optional<bool> toSuspend;                    // that order; nothing: of an earlier life, either
    kj::Maybe<kj::Promise<Outcome>> settles;          // of one that was readopted
    kj::Own<kj::PromiseFulfiller<MoveAnswer>> moved;  // to an order to move; null: none is under way
    std::string toServer;                    // that order's, where the session leaves this server: where to
    bool holds = false;                      // that is a file
    bool copies = false;                     // that order is to copy it into a file
    std::optional<Offers::Earlier> earlier;  // of one that was readopted, until all is said
    uint32_t owedShares = 0;                 // so often it still says something of that
    // Of a next one.
    kj::Own<void> beginning;                // of one that comes from another server, until its client is here
    bool dropped = false;                   // the session does not come here
    std::optional<WorkerChild::Exit> exit;  // it is gone, and the session may come here still
    // Answered when the session is here, and not before all is known that sessions share.
    std::vector<Asked> asked;
    std::vector<Shared> shared;
    // Its client, and why the old worker ended, where that had not said that the client has come here.
    kj::AutoCloseFd formerClient;
    std::string formerEnd;
    kj::Vector<kj::Own<kj::PromiseFulfiller<void>>> gone;
  };
  struct Ended {
    SessionFacts facts;
    pid_t pid = 0;
    kj::TimePoint began = kj::origin<kj::TimePoint>();
    std::string text;
  };

  using AccountName = std::pair<Id, uint64_t>;  // lease, and the epoch of its placement
  static AccountName accountOf(const SessionFacts& facts) { return {facts.lease, facts.deviceEpoch}; }

  static StoredWorker stored(const SessionFacts& facts, pid_t worker, uint64_t startTicks, uint64_t number);
  Session* find(uint64_t number) const;
  Session* next(uint64_t number) const;
  // The next worker that waits for this session, whoever has it now.
  Session* waiting(const SessionFacts& client) const;
  // It comes from another server.
  bool arrives(const Session& next) const { return next.beginning.get() != nullptr; }
  // Its worker is heard, and its exit seen, from here on.
  void watch(Session& session);
  void noteEarlier(Session& session, Earlier earlier);  // before it is in living_
  kj::Promise<void> listen(kj::Own<Session> session);
  // False: it was the last report.
  bool hear(Session& session, schema::WorkerReport::Reader report);
  void count(Session& session, schema::SessionCounts::Reader said);
  void giveUp(Session& session, const kj::Exception& malformed);
  kj::Promise<Outcome> order(Session& session, capnp::MessageBuilder& message,
                             std::span<const int> descriptors, bool toSuspend, kj::Duration bound);
  kj::Promise<Outcome> answerWithin(kj::Promise<Outcome> answer, uint64_t number, const char* what,
                                    kj::Duration bound);
  // Resolves at that time, or, with true, when the session's worker has read nothing for Bounds::reads. Also
  // when the session is no more. unread: so many looks in a row have seen that.
  kj::Promise<bool> isStuckBefore(uint64_t number, kj::TimePoint until, unsigned unread = 0);
  std::string killStuck(Session& session) const;  // why, for people
  void answered(Session& session, schema::SuspendReport::Reader report);
  kj::Promise<void> end(Session& session, const std::string& reason);
  void leaveAtOnce(Session& session, const std::string& reason);
  void killAfter(Session& session, kj::Duration bound, const char* why);
  void finish(Session& session, const WorkerChild::Exit& exit);
  void finishServing(Session& session, const WorkerChild::Exit& exit);
  void finishNext(Session& session, const WorkerChild::Exit& exit);
  void finishArriving(Session& session, const WorkerChild::Exit& exit);
  void finishOld(Session& session, const WorkerChild::Exit& exit);
  static std::string endText(const Session& session, const WorkerChild::Exit& exit);
  void conclude(Session& session, const WorkerChild::Exit& exit, std::string text);
  void remember(const Session& session, std::string text);  // among those that ended
  static kj::Own<Session> takeFrom(std::list<kj::Own<Session>>& list, const Session& wanted);
  kj::Promise<MoveAnswer> orderMove(Session& old, uint64_t epoch, const MoveMeans& means);
  void moved(Session& session, schema::MoveReport::Reader report);
  void hasLeft(Session& session, kj::Own<kj::PromiseFulfiller<MoveAnswer>> fulfiller, MoveAnswer answer);
  // It has come from another server, and its client is here.
  void settleHere(Session& arrived);
  void endLateArrival(Session& next, kj::Duration bound, const char* why);
  // The next one becomes the session's worker.
  void takeOver(Session& old, Session& next);
  // The session does not come to its next worker. Resolves when that is gone.
  kj::Promise<void> drop(Session& next, const std::string& reason);
  kj::Promise<void> moveLate(uint64_t number, bool stuck);
  void serveMemory(Session& session, schema::MemoryRequest::Reader request);
  void serveMemory(Session& session, const Asked& asked);
  bool takeMemory(const Session& session, uint32_t place, uint64_t bytes);
  void giveMemory(const Session& session, uint32_t place, uint64_t bytes);
  void hearShare(Session& session, schema::ShareReport::Reader report, kj::AutoCloseFd descriptor);
  void hearAgain(Session& session, schema::SharedAgain::Reader again, kj::AutoCloseFd descriptor);
  void giveUpLargest();
  bool owesShares() const;
  void lookAtOwedShares();
  kj::Promise<void> sharesTold(kj::Duration bound);
  void settleShares();
  void serveShares(Session& session);
  void serveShare(Session& session, Shared shared);
  void answerShare(Session& session, Shared shared);
  Offers::Asker asker(const Session& session) const;
  void apply(const Offers::Charge& charge);
  void giveAtNext(const Session& session, uint32_t place, uint64_t bytes);
  // After something was closed.
  void lookAtBorrowers();
  // Its offers and openings are nobody's any more, or its heirs'; who shares events with it is told.
  void leaveShares(const Session& session);
  void tellGone(const std::set<uint64_t>& whom, uint64_t number);
  std::set<uint64_t> readopted() const;
  // What the session of that number has there is nobody's any more. Of one that is in living_ or next_ no
  // more, or is dropped.
  void leaveAccount(const AccountName& name, uint64_t number);
  void dropUnusedAccount(const AccountName& name);
  void taskFailed(kj::Exception&& exception) override;

  kj::Timer& timer_;
  Bounds bounds_;
  WorkerChild::Lost lost_;
  std::function<void()> changed_ = [] {};
  std::function<void(const Id& lease, uint64_t number)> disturb_ = [](const Id&, uint64_t) {};
  std::function<void()> heardActivity_ = [] {};
  std::function<void(const Id&, const SessionCounts&)> counted_ = [](const Id&, const SessionCounts&) {};
  std::function<std::string(const SessionFacts&)> died_ = [](const SessionFacts&) { return std::string(); };
  std::function<bool(uint64_t bytes)> hostRoom_ = [](uint64_t) { return true; };
  std::map<AccountName, MemoryAccount> accounts_;  // of placements with sessions, or with heirs of some
  Offers offers_;
  ShareReceipts receipts_;
  bool sharesKnown_ = true;                         // of an earlier life's sessions
  size_t piecesAgain_ = 0;                          // of all of them
  kj::Own<kj::PromiseFulfiller<void>> sharesTold_;  // while they are awaited
  std::function<std::vector<uint64_t>(const Id&, uint64_t)> limits_ = [](const Id&, uint64_t) {
    return std::vector<uint64_t>();
  };
  Offers::MayShare mayShare_ = [](const Id&, const Id&) { return false; };
  std::multimap<Id, kj::Own<kj::PromiseFulfiller<void>>> givenBack_;  // by lease
  uint64_t nextNumber_ = 1;
  struct Beginnings {
    size_t count = 0;
    kj::Vector<kj::Own<kj::PromiseFulfiller<void>>> over;
  };
  std::map<Id, Beginnings> beginnings_;  // of leases with some; sessions hold on to it
  std::list<kj::Own<Session>> living_, next_, old_;
  std::optional<StoredWorker> announced_;
  std::deque<Ended> ended_;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
