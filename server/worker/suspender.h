#pragma once
// Takes a session's device memory off the device and brings it back. Context, code, streams, graphs, arrays
// stay where they are; the client sees that calls take longer.
//
// To suspend: close the gate before a frame, wait until the calls under way are done and all contexts are
// idle, move what the extents hold to the copier, release the memory. Nothing has changed for the session
// until the copier has the first piece; whatever fails before (the device is not idle in time, a stream
// capture is open, the copier has no room) opens the gate again. So does what fails later, once the pieces
// that the copier has are back; only if they cannot be, the session ends. A capture cannot be waited for with
// the gate closed, and streams of one cannot be asked anything: the gate closes only when none is open.
// Nor can a device be waited for that waits for one of the next frames: those go one by one (steps.h).
//
// To move: what needs no memory goes ahead (session_state.h). Then the client stops sending, then all this,
// and the other worker takes the copier's pieces over (session_state.h); a worker of other devices has it
// copy straight from these, and the memory stays where it is until the client has gone. When the client has
// gone over to it, the session has ended here. Until then it can go on here at any time. To a worker on
// another machine the bytes go as a stream, and there is no copier: the memory stays where it is until the
// client has gone. To copy is the same without an end: the stream goes into a file, and the session goes on
// here.
//
// A thread of its own carries orders out, one after the other. While the session is suspended it looks once a
// second whether the copier still has the bytes; if not, the session ends.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "server/copier/link.h"
#include "server/worker/contents.h"
#include "server/worker/parallel_sockets.h"
#include "server/worker/session.h"
#include "server/worker/session_pages.h"
#include "server/worker/steps.h"
#include "server/worker_process.h"

namespace gpupool::server {

// New memory for all that the copier has of the session, and its bytes. "" or why not, and then it is the
// copier's still.
std::string bringPiecesIn(Session& session, CopierLink& link);

class Suspender {
 public:
  // Called on the thread of its own, once for each order: of moves the one, of the others the other.
  using Report = std::function<void(const SuspendOutcome&)>;
  using ReportMove = std::function<void(const MoveOutcome&)>;
  Suspender(Session& session, Report report, ReportMove reportMove = nullptr);
  // Before the session ends: what is with the copier is forgotten.
  ~Suspender();
  Suspender(const Suspender&) = delete;
  Suspender& operator=(const Suspender&) = delete;

  // Any thread. copier: a connection to it, which this takes.
  void suspend(std::chrono::milliseconds drain, int copier);
  void resume();
  // state: the state socket. Both are taken. copier: -1: the other worker is on another machine. direct:
  // MoveOrder.direct.
  void move(std::chrono::milliseconds drain, uint64_t epoch, int copier, int state, bool direct = false);
  // The session goes into a file, and its client leaves: a move as a stream, behind which no worker waits.
  void hold(std::chrono::milliseconds drain, uint64_t epoch, int state);
  // The session's state goes into a file (server/files/session_file.h), whose writer is at the other end of
  // the state socket, which is taken; the session goes on here, whatever comes of it. Reported as a move is.
  void copy(std::chrono::milliseconds drain, int state);
  // Likewise in pages (session_pages.h): the session goes on as soon as what has changed is aside.
  void copyPages(std::chrono::milliseconds drain, int state);

  // Waits until no order is under way and what came of it is reported, for `time` at most: of a session that
  // ends because it has moved.
  void settle(std::chrono::milliseconds time);

  // "" if the session can outlive the server; else why not, for people. What is with the copier outlives it
  // too, and an order to suspend or to resume is carried out all the same. A move that is under way is given
  // up, unless the client is just going over; waits a while for that. But a session that goes into files, of
  // which all may be there, waits for `decided`.
  std::string apart();
  // The server's next life is here, and the session's lease is held in files, or not. False: it is, and the
  // session is not on its way there.
  bool decided(bool held);

  // Some stream of the session captures.
  bool captureOpen();

  // Tests: the worker that a session goes to compares all its contents with what is here. Before any order.
  void compareContents() { compares_ = true; }
  // Tests (disturbance.h). Orders that have been carried out so far; waits until there are more than `seen`
  // and the session runs, for `time` at most.
  uint64_t carriedOut() const;
  bool awaitCycle(uint64_t seen, std::chrono::milliseconds time);
  // A checkpoint is on its way, and the session has gone on.
  bool sendsPages() const { return sendsPages_; }

 private:
  struct Order {
    bool suspend = false;
    std::chrono::milliseconds drain{};
    std::unique_ptr<CopierLink> link;
    uint64_t epoch = 0;  // of a move; else 0. Without a link it goes as a stream
    int state = -1;      // of a move, and of a copy
    bool copy = false, hold = false, pages = false, direct = false;
    ParallelSockets* parallel = nullptr;  // beside `state`, while it is carried out

    bool streams() const { return state >= 0; }
  };
  struct Idle;
  enum class Decision { none, awaited, leaves, stays };
  using Clock = std::chrono::steady_clock;

  void run();
  // Its memory is gone. hasCheckpoint: it may go on from one.
  void lose(const std::string& why, bool hasCheckpoint);
  SuspendOutcome carryOut(Order& order);
  std::string awaitNext(int state);
  MoveOutcome carryOutMove(Order& order);
  std::string goAhead(int state, ParallelSockets* parallel);
  void handOverStill(Order& order, MoveOutcome& outcome);
  // apart: the session goes on where its client shares no memory with the worker.
  // apart: at the other end is no worker of this server. goes: the session is to go to a worker.
  std::string standStill(const Until& deadline, bool apart = false, bool goes = false);
  std::string handOver(Order& order, MoveOutcome& outcome);
  std::string sendByCopier(Order& order, MoveOutcome& outcome);
  std::string sendByStream(Order& order, MoveOutcome& outcome);
  MoveOutcome carryOutPages(const Order& order, Descriptor& state);
  std::string copyPages(StateSocket& socket, const Id& base, MoveOutcome& outcome);
  void goOn();
  std::string awaitDecision(const std::string& why);
  std::string sendClientAway(const Order& order);
  std::string comeHome();
  SuspendOutcome goAside(Order& order);
  SuspendOutcome comeBack();
  // "" when no frame or call beside is under way, no capture is open and the device is idle; the gate is
  // closed then. Else why not; it is open. Where the device waits for what the program calls next, calls go
  // through one by one. clientStopped: the client sends only what it is asked for, and a capture is not
  // waited for.
  std::string quiesce(const Until& deadline, bool clientStopped = false);
  enum class Still { yes, call, capture, shared, busy, fault, copies };
  Still lookStill(const Until& look, const Until& deadline);
  Still awaitDevice(const Until& look);
  void beginIdle();
  Still awaitCopies(const Until& deadline);
  std::string whyNotStill(Still still, const Steps& steps);
  void letCallsGo();
  std::string letOneGo(const Until& deadline, bool clientStopped, Steps& steps, Still still);
  std::string whatRuns();
  template <class Ask>
  void askStreams(Ask&& ask);
  std::string takeAside(SuspendOutcome& outcome);
  std::string lookAtContents(HostDigests hostBy, Digests& seen);
  bool stopping() const;
  // Of what belongs to a move.
  bool givesUp() const { return stopping() || alone_; }

  Session& session_;
  Report report_;
  ReportMove reportMove_;
  std::unique_ptr<CopierLink> link_;  // while suspended
  std::shared_ptr<Idle> idle_;        // a wait for the device that was given up, and goes on
  CUresult fault_ = CUDA_SUCCESS;     // what the last one that was not given up came to
  uint64_t movedBytes_ = 0;           // thread_'s own
  SentPages sent_;                    // likewise
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Order> orders_;
  bool suspended_ = false;
  uint64_t carriedOut_ = 0;
  bool ending_ = false, busy_ = false;
  bool moves_ = false;   // what it is busy with streams the session somewhere
  bool leaves_ = false;  // its client has been told, or is about to be, that it goes into files
  bool serverGone_ = false;
  Decision decision_ = Decision::none;
  bool compares_ = false;
  std::atomic<bool> alone_{false};  // the server is gone, and who has ordered the moves with it
  std::atomic<bool> sendsPages_{false};
  std::thread thread_;
};

}  // namespace gpupool::server
