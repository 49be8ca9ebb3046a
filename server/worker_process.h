#pragma once
// The shell of a worker process: what it exchanges with the server that started it.
//
//   Server and worker share a SOCK_SEQPACKET pair, the worker's end is descriptor 3. Worker -> server:
//   WorkerReport; server -> worker: WorkerOrder, first the start with the client's socket (SCM_RIGHTS), later
//   answers about memory and perhaps the order to stop. One datagram is one flat Cap'n Proto message of at
//   most kMaxDatagram bytes. A worker serves one session and exits.
//
//   A worker to which a session moves gets its start with one end of the state socket instead of the client's
//   socket (SessionStart.rebuild), reports `rebuilt`, and gets the client's socket later (waitForClient).
//
//   When the server dies, a session that has a door (SessionStart.door) goes on without one for a while. The
//   server's next life sends a new socket to the door, which takes the place of descriptor 3
//   (worker_return.cpp; docs/design.md).
//
// A worker's main, in order: parseWorkerArguments; with --inventory runInventory and exit; WorkerProcess;
// Driver::load and warmUp, where they throw reportFailed and exit; reportReady; waitForSession; findDevices;
// watchServer; the session; reportEnded; exit.

#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "schema/device.h"
#include "schema/id.h"
#include "server/spawner/become_worker.h"
#include "server/walls/walls.h"

struct CUctx_st;  // *CUcontext: the server includes this without CUDA

namespace gpupool::server {

class Driver;

bool isControlSocket(int descriptor);  // a SOCK_SEQPACKET socket
// What a worker is told of its server's death: by that signal, or by the end of its socket.
inline constexpr char kServerDiedText[] = "the GPU server died: its process was killed or crashed";
inline constexpr size_t kMaxDatagram = size_t{64} << 10;

struct WorkerArguments {
  bool inventory = false;  // --inventory: report the devices and exit
  bool identify = false;   // --identify: print what this program is (worker_interface.h) and exit
  bool help = false;       // --help
  std::string driver;      // --driver PATH; empty: searched for
  int warmDevice = -1;  // --warm-context ORDINAL: retain the primary context of that one of its devices ahead
                        // of time; -1: none
  std::chrono::milliseconds clientStallTime{
      0};                           // --client-stall-time MS: server/front/options.h; 0: for ever
  std::optional<uint64_t> disturb;  // --disturb SEED, tests: the session asks to be suspended now and then
  std::optional<UserRange> users;   // --users FIRST-LAST: it is to have one of these user ids
  bool disturbMoves = false;        // --disturb-moves SEED instead: the server moves it to another worker
  bool disturbStreams = false;      // --disturb-streams SEED instead: likewise, as if to another machine
  walls::Mode walls = walls::Mode::off;   // --walls MODE: server/walls/walls.h
  std::optional<walls::Devices> devices;  // --devices LIST: those of /dev that it keeps; none: all
  std::string moduleCache;         // --module-cache PATH: the folder of all tenants' caches, for the walls
  bool disturbKills = false;       // --disturb-kills SEED instead: it kills itself
  bool disturbBeginnings = false;  // --disturb-beginnings SEED instead: likewise, without a checkpoint
};
// Throws std::runtime_error naming the argument it does not know.
WorkerArguments parseWorkerArguments(int count, char** words);
extern const char kWorkerUsage[];

// All devices of the driver, after cuInit. Throws std::runtime_error.
std::vector<Device> listDevices(const Driver& driver);
// `--inventory`: reports to the server if the control descriptor is a socket, else prints to stdout. The exit
// status.
int runInventory(const std::string& driverPath, uint64_t rowsHash);

// Reserves the arena of module globals, then cuInit, and the primary context of `device` unless that is -1
// (one worker a device can afford one: 527 MiB), which it returns then. Throws.
CUctx_st* warmUp(const Driver& driver, int device = -1);

// That context alone; after warmUp. Throws.
CUctx_st* contextAhead(const Driver& driver, int device);

struct SessionStart {
  // The driver's ordinal of the lease's device `index` in this process, which may see fewer than the server.
  int ordinal(size_t index) const {
    return ordinals.empty() ? static_cast<int>(devices.at(index).info.ordinal) : ordinals.at(index);
  }
  Id session;
  uint64_t epoch = 0;
  std::string transport;              // of base/transport_names.h
  std::vector<LeasedDevice> devices;  // info.ordinal: the server's, by which server and copier name them
  std::vector<int> ordinals;          // of the same in this process, where these differ (findDevices)
  std::string networkDevice;
  std::string networkWire;
  uint64_t moduleCacheBytes = 0;
  uint32_t clientPid = 0;
  bool reportActivity = false;        // reportActivity is wanted: the lease takes turns
  bool rebuild = false;               // the session moves here from another worker, as `epoch`
  bool stream = false;                // with rebuild: from one of another server
  bool files = false;                 // with stream: from what its server has of it, and nobody else
  bool isProtected = false;           // checkpoints of it will be made, in pages
  bool holderKeeps = false;           // it goes on elsewhere when the server dies
  std::chrono::milliseconds away{0};  // with a door: so long it goes on without a server
  // The receiver's to close; all close-on-exec.
  int socket = -1;       // the client's bootstrap socket, blocking; -1 with rebuild
  int state = -1;        // with rebuild, and only there: the state socket, blocking
  int moduleCache = -1;  // the cache's folder; -1: none
  // Nobody closes them: the process's end does, and says with it that the devices are free.
  std::vector<int> deviceLocks;
  int door = -1;  // likewise; -1: the session ends with its server
};

// Fills start.ordinals by the devices' UUIDs: of a worker that has not all GPUs of the server. After warmUp.
// Throws std::runtime_error if one of them is not there.
void findDevices(const Driver& driver, SessionStart& start);

// An answer about the lease's memory.
struct MemoryAnswer {
  bool granted = false;
  bool heard = true;         // false: the server gave no answer, so nothing is known about room
  uint64_t othersBytes = 0;  // what the lease's other sessions have there
  std::string error;
};

// What a session shares with others of its lease, or of its tenant's other leases: schema::ShareReport and
// its answer.
struct ShareKey {
  Id server, key;
};
struct ShareOffer {
  uint64_t piece = 0;
  uint32_t place = 0;
  uint64_t bytes = 0, offset = 0, length = 0;
};
// A descriptor that several reports may need, closed behind the last of them; empty: there is none.
using KeptDescriptor = std::shared_ptr<const int>;
struct ShareReport {
  enum class What { offer, endOffer, endPiece, open, close, again } what = What::offer;
  // Of offer; endPiece: what the session had taken for it; again, of an offer: what SharedAgain has of that.
  ShareOffer offer;
  ShareKey key;                         // of endOffer and open; again, of an offer
  uint64_t number = 0;                  // of endPiece and close; again, of an opening
  std::vector<std::byte> receipt = {};  // of again
  KeptDescriptor descriptor = {};       // of again, of a piece
};
struct ShareAnswer {
  // But for the last two, as schema::ShareError.
  enum class Error {
    none,
    unknown,
    elsewhere,
    own,
    tooMany,
    otherDevice,  // ShareAnswer.otherDevice
    unheard
  } error = Error::unheard;
  ShareKey key;
  uint64_t opening = 0;
  ShareOffer offer;
  uint64_t session = 0;
  int descriptor = -1;  // of what was opened; the receiver's to close
  std::vector<std::byte> receipt = {};
};

// What became of an order to suspend or resume: schema::SuspendReport.
struct SuspendOutcome {
  bool suspended = false;
  std::string error;
  std::vector<uint64_t> kept;
  uint64_t movedBytes = 0;
  uint32_t drainMs = 0, moveMs = 0;
};

// To a schema::SuspendReport.
template <class Builder>
void writeOutcome(const SuspendOutcome& from, Builder to) {
  to.setSuspended(from.suspended);
  to.setError(from.error);
  auto kept = to.initKept(static_cast<unsigned>(from.kept.size()));
  for (unsigned i = 0; i < kept.size(); ++i) kept.set(i, from.kept[i]);
  to.setMovedBytes(from.movedBytes);
  to.setDrainMs(from.drainMs);
  to.setMoveMs(from.moveMs);
}

// schema::LogReport.
struct ClientLog {
  uint64_t frameBytes = 0, payloadBytes = 0;
  bool wanted = false;
  std::string obstacle;
};

// schema::SessionCounts.
struct SessionCounts {
  uint64_t calls = 0, awaited = 0, toDeviceBytes = 0, fromDeviceBytes = 0;
  bool operator==(const SessionCounts&) const = default;
};

// schema::Activity.
enum class Activity : uint16_t { busy, quiet, waiting };

// What became of an order to move the session: schema::MoveReport.
struct MoveOutcome {
  std::string error;
  uint64_t movedBytes = 0;
  uint32_t drainMs = 0, pauseMs = 0;
};

// What the server may order besides the end; called on the watching thread, which must not be held up. The
// descriptors are the callee's to close, all close-on-exec. What is not set is refused.
struct WorkerOrders {
  std::function<void(std::chrono::milliseconds drain, int copier)> suspend;
  std::function<void()> resume;
  // The session goes to another worker, as `epoch`. copier: -1: to one of another server. state: this
  // worker's end of the state socket, blocking. direct: MoveOrder.direct. Answered once by reportMoved.
  std::function<void(std::chrono::milliseconds drain, uint64_t epoch, int copier, int state, bool direct)>
      move = nullptr;
  // The session goes into a file, whose writer is at the other end of `state`, and its client leaves.
  std::function<void(std::chrono::milliseconds drain, uint64_t epoch, int state)> hold = nullptr;
  // The session's state is copied into a file, whose writer is at the other end of `state`, and goes on here.
  // Answered as `move` is.
  std::function<void(std::chrono::milliseconds drain, int state)> copy = nullptr;
  // Likewise in pages (MoveOrder.pages).
  std::function<void(std::chrono::milliseconds drain, int state)> copyPages = nullptr;
  // The server keeps a whole checkpoint that has so many frames and aside calls.
  std::function<void(uint64_t frame, uint64_t aside)> kept = nullptr;
  // The session of that number, which shared events with this one, has ended.
  std::function<void(uint64_t session)> gone = nullptr;
  // The server is gone: "" if the session can go on without one for a while, or why not, for people. May take
  // seconds. Not set: it can. What it shares is looked at by WorkerProcess itself.
  std::function<std::string()> stays = nullptr;
  // The server's next life is here. held: ReadoptOrder.held. False: the session does not leave for that.
  std::function<bool(bool held)> decided = nullptr;
};

// Reports are sent by any thread; everything else belongs to the thread that constructed it.
class WorkerProcess {
 public:
  // Takes over the descriptor and keeps it from children. Throws std::runtime_error if it is no such socket.
  explicit WorkerProcess(int descriptor = kControlDescriptor, uint64_t rowsHash = 0);
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  // Each returns false if the server is gone.
  bool reportReady(const std::string& driverPath = {}, std::span<const std::string> walls = {});
  bool reportDevices(const std::string& driverPath, std::span<const Device> devices);
  bool reportFailed(const std::string& text);
  // The session is over, and why: "client closed", "client lost: ..." From here the server waits a bounded
  // time for the process to exit, then kills it.
  bool reportEnded(const std::string& text);

  // A device of the session, named by the driver's ordinal, broke: the server places nothing on it any more.
  bool reportLost(uint32_t ordinal, const std::string& error);

  bool reportSuspended(const SuspendOutcome& outcome);
  // The answer to the order to move. Without an error the session is the other worker's from here on: nothing
  // else of this one counts, and the server waits for its exit as after reportEnded.
  bool reportMoved(const MoveOutcome& outcome);
  // Of a worker that rebuilds, once: whether it has done so. error: empty, or why not.
  bool reportRebuilt(const std::string& error);
  // Tests: asks to be suspended and resumed, or to be moved.
  bool reportDisturb();
  bool reportActivity(Activity activity);
  // What keeps the session from being moved, for people; empty: nothing any more.
  bool reportHindrances(std::span<const std::string> reasons);
  // What the client says of its log of calls (schema::LogBody).
  bool reportLog(const ClientLog& log);
  // What the session's program has done here. False: the server takes nothing now; nobody waits for it.
  bool reportCounts(const SessionCounts& counts);

  // Asks the server for `bytes` of the lease's memory in `place` (schema::MemoryRequest) and waits for the
  // answer, for kMemoryBound at most; without an answer it is refused, once the session knows if the server
  // is gone. After watchServer; any thread. Of a worker that rebuilds, a take on a device is answered, and a
  // give counts, from when the session is its own (the old worker has reported that it has moved, or is
  // gone): what the old one had of the account is this one's then. With SessionStart.stream: at once.
  // While the server is away it waits for the next one.
  MemoryAnswer takeMemory(uint32_t place, uint64_t bytes);
  void giveMemory(uint32_t place, uint64_t bytes);
  // What is the session's and was not taken or given by this process: of a session that moves here, what it
  // had.
  void inheritMemory(uint32_t place, uint64_t bytes);
  void disinheritMemory(uint32_t place, uint64_t bytes);
  // Likewise, what the session offers and opens: an offer's descriptor stays the caller's. A duplicate of it
  // is kept for as long as the piece, and the server's receipts, for that one's next life.
  ShareAnswer share(const ShareReport& said, int descriptor = -1);
  // What ends needs no answer, and is not waited for.
  void tellShare(const ShareReport& said);
  static constexpr std::chrono::seconds kMemoryBound{60};  // a server that is stopped for a while costs time

  // Waits, without bound, for the one session. Empty: the server is gone or told the worker to stop; exit
  // then. Throws std::runtime_error for a malformed start.
  std::optional<SessionStart> waitForSession();

  // Before watchServer; without it such orders are refused.
  void onOrders(WorkerOrders orders) { orders_ = std::move(orders); }

  // Of a worker that rebuilds, after watchServer; any thread. The client's bootstrap socket, blocking, the
  // caller's to close: it may have come before. Empty: it did not come within `bound`, or the session is to
  // end.
  std::optional<int> waitForClient(std::chrono::milliseconds bound);
  // Of the client that waitForClient has given: the transport that it comes over; empty: SessionStart's.
  const std::string& clientTransport() const { return clientTransport_; }

  static constexpr std::chrono::milliseconds kGrace{1500};

  // From now on a thread watches the server, SIGTERM and kServerDiedSignal. When the server dies or orders a
  // stop, it calls `stop(reason)` once, on that thread; the session should then end (tell the client, close
  // its connection). If the process still lives `grace` later it is ended with _exit(kExitStopped); likewise
  // if it does `grace` after `clientGone` (-1: none) became readable: a driver that does not come back must
  // not keep the device. Call once, after waitForSession.
  void watchServer(std::function<void(const std::string& reason)> stop,
                   std::chrono::milliseconds grace = kGrace, int clientGone = -1);
  // From now on that one is watched instead of watchServer's clientGone: of a worker that had no client yet.
  // Once, after watchServer.
  void watchClient(int clientGone);
  // The server has died, and the session has gone on without it.
  bool outlivesServer() const { return outlives_.load(std::memory_order_acquire); }
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }

  static constexpr int kExitStopped = 75;

 private:
  void watch(const std::function<void(const std::string&)>& stop, std::chrono::milliseconds grace,
             int clientGone);
  std::string awaitEnd(std::chrono::milliseconds grace, int clientGone);
  std::string heardSignal() const;
  // worker_return.cpp. The server is gone: "" if the session goes on without it; else why it ends.
  std::string beginAway();
  int awayLeft() const;  // of its time, as poll(2) has it; -1: the server is there
  std::string endAway() const;
  // What has come to the door: perhaps the server's next life.
  void hearDoor();
  bool comeBack(int socket, bool takesOneThatWaits);
  bool leaveForFiles(int socket);
  void follow(int socket);  // that server's; under memoryMutex_
  bool sendReadopted(int socket, bool& changing) const;
  // changing: as that said.
  void repeatReports(bool changing);
  void beginChange();
  bool sendSuspended(const SuspendOutcome& outcome) const;
  bool endsWithin(std::chrono::milliseconds time) const;
  // The socket to the server, which the next life of that replaces.
  struct Control {
    explicit Control(int socket);
    ~Control();
    Control(const Control&) = delete;
    Control& operator=(const Control&) = delete;
    const int socket;
  };
  std::shared_ptr<const Control> control() const;
  template <class Fill>
  bool report(Fill&& fill, int flags = 0) const;
  template <class Fill>
  bool report(const Control& server, Fill&& fill, int flags = 0) const;
  // Until there is what is waited for (heard), another server, or none any more; under memoryMutex_.
  void awaitServer(std::unique_lock<std::mutex>& lock, uint64_t generation,
                   const std::function<bool()>& heard);
  // The server's next order; why the session ends, or empty: it goes on.
  std::string obey();
  struct Order;
  std::string carryOut(const Order& given);
  void suspend(uint32_t drainMs, std::vector<int>& descriptors);
  void move(const Order& given);
  void takeClient(std::string transport, std::vector<int>& descriptors);
  void answer(uint64_t ticket, MemoryAnswer memory);
  bool sendShare(const Control& control, const ShareReport& said, uint64_t ticket, int descriptor,
                 int flags) const;
  void tellShares();
  void hearShare(uint64_t ticket, const ShareAnswer& answer);
  // Under memoryMutex_, as what they note.
  void noteShared(const ShareReport& said, const ShareAnswer& answer, const KeptDescriptor& descriptor);
  void noteEnd(const ShareReport& said);
  std::deque<ShareReport> sharesAgain() const;
  bool shares();

  mutable std::mutex controlMutex_;
  std::shared_ptr<const Control> control_;  // under controlMutex_
  int done_ = -1;                           // eventfd: ends the watcher
  int news_ = -1;                           // eventfd: clientGone_ has been set
  std::atomic<int> clientGone_{-1};
  uint64_t rowsHash_;
  std::atomic<bool> stopping_{false}, outlives_{false};
  std::thread watcher_;
  WorkerOrders orders_;
  std::mutex memoryMutex_;
  std::condition_variable answered_;
  bool told_ = false;  // the session knows that it is to end
  int client_ = -1;    // came with the order `client`, and waitForClient has not taken it
  bool clientCame_ = false;
  std::string clientTransport_;  // written before client_
  uint64_t nextTicket_ = 1;
  struct Asked {
    uint32_t place = 0;
    uint64_t bytes = 0;
    bool abandoned = false;  // nobody waits any more: what is granted late is given back
    std::optional<MemoryAnswer> answer;
  };
  std::map<uint64_t, Asked> asked_;     // by ticket
  std::map<uint32_t, uint64_t> owed_;   // by place: to be given back with the next request
  std::map<uint32_t, uint64_t> taken_;  // by place: what the session has, without what it owes
  uint64_t generation_ = 0;             // of servers
  bool away_ = false;                   // there is none now
  struct ShareAsked {
    ShareReport said;
    KeptDescriptor descriptor;  // of an offer
    bool abandoned = false;
    std::optional<ShareAnswer> answer;
  };
  std::map<uint64_t, ShareAsked> shareAsked_;  // by ticket
  std::deque<ShareReport> untold_;             // what the server has not taken yet
  // What the session shares: reports `again`, of pieces and openings by their number, of offers by their key.
  std::map<uint64_t, ShareReport> sharedPieces_, sharedOpenings_;
  std::map<Id, ShareReport> sharedOffers_;
  bool withoutReceipt_ = false;  // a server gave none: of an earlier version
  std::atomic<bool> hasUntold_{false};

  // Of the session, for a server that comes later; set before watchServer.
  Id session_;
  uint64_t epoch_ = 0;
  int door_ = -1, clientKept_ = -1;
  size_t devices_ = 0;
  std::vector<int> deviceLocks_;
  std::chrono::milliseconds awayBound_{0};
  std::chrono::steady_clock::time_point awayUntil_;  // the watching thread's

  mutable std::mutex saidMutex_;
  std::optional<Activity> saidActivity_;  // under saidMutex_, as what follows: as last said
  std::vector<std::string> saidHindrances_;
  std::optional<ClientLog> saidLog_;
  SessionCounts saidCounts_;
  std::map<uint32_t, std::string> saidLost_;
  SuspendOutcome saidSuspended_;
  unsigned changes_ = 0;  // orders to suspend or to resume, of which nothing was said yet
};

}  // namespace gpupool::server
