#pragma once
// The client's side of its session: sends frames in order, delivers replies to waiting threads, keeps the
// completion words, and handles the worker's notices.
//
// Threads: any application thread posts and awaits. Enqueuing takes one mutex for the few instructions of
// encoding; a waiting thread reads the reply channel itself (the first of several reads for all). Two threads
// of our own: the service thread (control channel) and, once a host function runs, the callback thread.
// Neither holds a lock while it calls the application. While the session moves to another worker
// (schema/frame.h), a third one, the mover, holds what others need to send: they wait inside their calls.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "client/call_log.h"
#include "client/codec.h"
#include "client/move_course.h"
#include "client/replay.h"
#include "client/transfers.h"
#include "client/words.h"
#include "schema/frame.h"
#include "schema/hello.h"
#include "schema/rows.h"
#include "transports/transport.h"

namespace gpupool::client {

struct OpenedSession;

class Session {
 public:
  // Leases through the holder, connects and greets. Null with `status` and one line for people in `text`.
  // accepts: what the worker's greeting says of its devices is looked at before anything is made of it; an
  // error of that is open's, without a text, and the session has ended then.
  using Accepts = std::function<CUresult(const schema::WorkerHello& hello)>;
  static Session* open(const Accepts& accepts, CUresult& status, std::string& text);
  // The process's session; valid between a successful cuInit and the end of the process.
  static Session& get() { return *current; }

  const schema::WorkerHello& hello() const { return *hello_; }
  const schema::AddressSpace& space() const { return schema::kSpaces[hello_->space]; }
  // Of a thread that is inside transfers(): until it leaves.
  transport::Connection& connection() { return *connection_; }
  Transfers& transfers() { return transfers_; }
  Words& words() { return *words_; }
  // Client and worker are on one host, and share memory. A move to another host ends that, and one to this
  // host may begin it. It does not change while the caller is inside transfers(). A caller that is outside
  // may still read memory that was shared: it stays mapped, with all that the old worker wrote.
  bool mapsMemory() const { return mapsMemory_.load(std::memory_order_acquire); }
  // How often the session has gone on at another worker.
  uint64_t moves() const { return moves_.load(std::memory_order_acquire); }
  // Of host memory's mirrors: their set has another number now. 0: it may not be told unchanged.
  void setMirrors(uint64_t number) { mirrorSet_.store(number, std::memory_order_release); }
  // What the program may know to be over, although its word has not come: a word is written behind the event
  // that it is for, and others may wait for that event. Records of events are numbered in the order in which
  // they are sent. What ends before a record says nothing of that record; any answer, host function or wait
  // may say something of all that were sent until then.
  uint64_t nextMoment() { return ++moment_; }
  void observed(uint64_t moment) {
    for (uint64_t known = observed_; known < moment && !observed_.compare_exchange_weak(known, moment);) {
    }
  }
  void observed() { observed(moment_); }
  bool mayKnow(uint64_t moment) const { return observed_ >= moment; }
  // A reply or a notice has told that the word is there. Who waits for it is not woken (Words::ring).
  void hearWord(uint64_t index, uint64_t value) {
    logWord(index, value);
    showWord(index, value);
  }
  // The two halves of it. Of several words at once all are in the log before one is shown: the program may
  // change then what came ahead of another.
  void logWord(uint64_t index, uint64_t value) {
    if (__builtin_expect(log_ != nullptr, 0) && index < schema::kWordsCount && words_->value(index) < value)
      log_->reached(index, value);
  }
  void showWord(uint64_t index, uint64_t value) {
    if (index < schema::kWordsCount) words_->set(index, value);
  }
  CUresult sticky() const {
    CUresult status = words_->sticky();
    if (__builtin_expect(status == CUDA_ERROR_ASSERT, 0)) awaitErrors();
    if (__builtin_expect(status == CUDA_ERROR_DEVICE_UNAVAILABLE, 0)) awaitReason();
    return status;
  }

  // Sends a row and does not wait. CUDA_SUCCESS, or the session's sticky status.
  template <schema::Name N, class... A>
  CUresult post(CUcontext context, A... arguments) {
    using R = schema::RowOf<N>;
    typename R::Arguments tuple{arguments...};
    if (__builtin_expect(forced_.load(std::memory_order_relaxed) != 0, 0) && !R::aside)
      return exchange<R>(context, tuple, true);
    return send<R>(context, tuple, 0, nullptr);
  }
  // Sends a row and waits for its outputs.
  template <schema::Name N, class... A>
  CUresult await(CUcontext context, A... arguments) {
    using R = schema::RowOf<N>;
    typename R::Arguments tuple{arguments...};
    return exchange<R>(context, tuple, false);
  }

  // The same in two steps, for a caller that must let go of a lock before it waits.
  struct Waiter {
    uint64_t seq = 0;
    bool done = false;
    CUresult status = CUDA_ERROR_UNKNOWN;
    std::vector<std::byte> bytes;
  };
  template <schema::Name N, class... A>
  CUresult ask(Waiter& waiter, CUcontext context, A... arguments) {
    using R = schema::RowOf<N>;
    return send<R>(context, typename R::Arguments{arguments...}, schema::Frame::kAwait, &waiter);
  }
  template <schema::Name N, class... A>
  CUresult collect(Waiter& waiter, A... arguments) {
    using R = schema::RowOf<N>;
    return outputs<R>(waiter, typename R::Arguments{arguments...});
  }

  // While a capture is active, and under GPUPOOL_SYNC=1, every Post is sent as an Await: aside calls, which
  // the driver never sees, are not.
  void forceAwait(bool on) { forced_.fetch_add(on ? 1 : -1); }
  bool capturing() const { return captures_.load(std::memory_order_relaxed) != 0; }
  void capture(bool begins) {
    captures_.fetch_add(begins ? 1 : -1);
    forceAwait(begins);
  }
  bool printing() const { return printing_.load(std::memory_order_relaxed); }
  void setPrinting() { printing_ = true; }
  // Brings what kernels printed and the driver has written, without waiting for more.
  void fetchOutput();
  // Until the aside calls sent before have been served, as they are anyway before any frame sent after them.
  CUresult awaitAsides();

  CUresult waitWord(uint64_t word, uint64_t value, bool sleeps = false);
  // Asks the worker, and after a move the next one, to report when the word is reached.
  void watch(uint64_t word, uint64_t value);
  // The same for a word that the worker tells by itself, if it is not one too many.
  bool expect(uint64_t word, uint64_t value);
  // A host function: runs on the callback thread when the worker says so. once: forget it afterwards.
  struct HostFunction {
    CUhostFn function = nullptr;
    CUstreamCallback streamCallback = nullptr;
    CUstream stream = nullptr;
    void* data = nullptr;
    bool once = true;
    uint64_t word = CallLog::kNoWord;  // that `prepare` waits for
    std::function<void()> prepare;     // brings the bytes it may read; runs before it, holding nothing
    std::function<void()>
        publish;  // sends the bytes it may have written; runs after it, before the stream goes on; aside
  };
  uint64_t addHostFunction(const HostFunction& function);
  bool findHostFunction(uint64_t id, HostFunction& out);
  // True on the callback thread while a host function runs.
  static bool inHostFunction() { return runningHostFunction; }

  // What the layers above have of a worker, at a move. Both run on the mover's thread, while nobody is inside
  // transfers() or sends anything.
  struct MoveHooks {
    // How many regions of pinned memory the new worker must name.
    size_t (*regions)();
    // Finds out all that is needed to go over, and changes nothing yet. lends: the new worker is to have the
    // pinned memory of this process. False: something is missing, and what.
    bool (*prepare)(transport::Connection& next, std::span<const schema::MovedRegion> regions, bool lends,
                    std::string& why);
    // Goes over to what was prepared; hello() names the new worker's staging memory. staging: that, where it
    // is shared from here on.
    void (*finish)(std::shared_ptr<transport::SharedMemory> staging);
    // Behind it, where client and worker were on one host and are not any more, before any frame is sent:
    // brings the new worker what the program has changed meanwhile.
    void (*bring)();
    // Where the old worker has died, instead of `prepare`: pinned memory is lent to the new one. Then where
    // the new worker is to put bytes for an address of it; and the names that the new worker has for all of
    // it. The last two also where memory is lent behind `prepare`.
    bool (*lend)(transport::Connection& next, std::string& why) = nullptr;
    bool (*lent)(uint64_t address, transport::Region& region, uint64_t& offset) = nullptr;
    bool (*arrive)(const std::map<uint64_t, transport::Region>& pinned, std::string& why) = nullptr;
    // The device stands still, and the next worker may share memory with this process: what only the old one
    // has of the program's memory is brought here.
    void (*settle)() = nullptr;
  };
  // Once, at the session's start.
  void hookMoves(const MoveHooks& hooks) { moveHooks_ = &hooks; }

  // A nap of somebody who looks again and again for what the device or the worker does. While the session is
  // suspended, which may last for hours, or moves, it ends only with that or with the session.
  void nap(std::chrono::nanoseconds time);
  // Of a call that asks nobody: while the session is suspended or moves, it waits for the end of that.
  void rest() {
    if (__builtin_expect(still_.load(std::memory_order_relaxed) != 0, 0)) nap({});
  }

  // The error of a put or get that was refused or did not arrive.
  CUresult transferFailed();

  // ---- protected sessions (client/call_log.h)
  bool isProtected() const { return log_ != nullptr; }
  // CallLog::keepCode, of a protected session.
  std::shared_ptr<const CallLog::Code> keepCode(const schema::ImageName& name,
                                                std::span<const std::byte> bytes, bool stays) {
    return log_->keepCode(name, bytes, stays);
  }
  // Inside transfers(), before the put.
  void notePut(CallLog::Place place, uint64_t at, const void* from, size_t bytes) {
    if (__builtin_expect(log_ != nullptr, 0)) logPut(place, at, from, bytes);
  }
  // Bytes of memory that the worker has; where it dies meanwhile, of the next one's. `where`, inside
  // transfers(): which region, and where in it; false: there is none. `at`: as the log names it.
  CUresult fetch(CallLog::Place place, uint64_t at, std::span<std::byte> to,
                 const std::function<bool(transport::Region& region, uint64_t& offset)>& where);
  // A put that was noted has failed, or memory was not shared: the worker has died, and all that will be done
  // again at another one.
  bool isDoneAgain() const { return log_ != nullptr && provesGone(*link()) && goesOver(); }
  // Of a thread that has no answer, and holds nothing that others need to give it one: true: the session has
  // gone on at another worker. `gone`: the connection that failed.
  bool awaitFailover(const std::shared_ptr<transport::Connection>& gone);
  // For threads that are neither inside transfers() nor hold a channel's lock.
  std::shared_ptr<transport::Connection> link() const;
  // The error of memory that could not be mapped here or shared with the worker, though there is room for it.
  CUresult shareFailed();

  // The program ends: no move begins any more. False: one is under way.
  bool moveNoMore();
  // At process exit: says goodbye. Later calls fail with DEINITIALIZED.
  void goodbye();
  // In a forked child.
  void abandon();
  // What GPUPOOL_STATS=1 counts: printed at the end, and on demand; restarted, it forgets.
  void printStats();
  void restartStats();

 private:
  friend struct SessionSeam;  // tests/fuzz: what a worker sends, without a worker
  Session() = default;
  // Takes the bootstrap socket. Null: why.
  std::unique_ptr<transport::Connection> connect(const std::string& transport, int bootstrap,
                                                 const std::string& networkDevice, CUresult& status,
                                                 std::string& text) const;
  // Makes it the session's connection; another thread than the mover only at the session's start.
  void use(std::shared_ptr<transport::Connection> connection);
  bool greet(const Accepts& accepts, CUresult& status, std::string& text);
  // The session's first worker, through the bootstrap socket, which is taken; or one on another server.
  bool reachFirst(OpenedSession opened, const Accepts& accepts, CUresult& status, std::string& text);
  bool passRegions(std::string& text);
  // One greeting each way; what came, unchecked, is empty with the reason in `text`.
  std::span<const std::byte> exchangeHellos(transport::Connection& connection, uint32_t epoch,
                                            uint32_t spaces, bool lends,
                                            const std::function<bool()>& cancelled, std::string& text) const;
  // The worker's answer, into `hello`. False: refused, and why.
  static bool acceptHello(std::span<const std::byte> answer, schema::WorkerHello& hello, CUresult& status,
                          std::string& text);
  static uint32_t freeSpaces();

  template <class R>
  CUresult send(CUcontext context, const typename R::Arguments& arguments, uint32_t flags, Waiter* waiter) {
    static_assert(R::travels, "the row says that no message carries this name");
    if (CUresult status = sticky(); __builtin_expect(status != CUDA_SUCCESS, 0)) {
      if (R::client == schema::Client::Post || waiter == nullptr) return status;
    }
    constexpr bool aside = R::aside;
    // The worker may stand still until the host function returns, which must not wait for it in turn.
    if (!aside && __builtin_expect(inHostFunction(), 0)) return CUDA_ERROR_NOT_PERMITTED;
    constexpr auto channel = aside ? transport::Channel::control : transport::Channel::call;
    constexpr size_t header = sizeof(schema::Frame) + (aside ? sizeof(schema::Notice) : 0);
    const size_t bytes = header + RowCodec<R>::measure(arguments);
    std::unique_lock lock(aside ? controlMutex_ : enqueueMutex_);
    if constexpr (!aside)
      if (__builtin_expect(steps_, 0)) holdBack(lock);
    std::byte* room = reserve(bytes, channel);
    bool unsent = false;
    if (__builtin_expect(room == nullptr, 0)) {
      if (!goesOver()) {
        lock.unlock();
        return lost();
      }
      unsent = true;  // it goes into the log alone, and is sent from there
      room = unsentRoom(channel, bytes);
    }
    schema::Frame frame;
    frame.call = R::id;
    frame.flags = flags;
    frame.seq = aside ? schema::kAside | (asides_.load(std::memory_order_relaxed) + 1) : ++seq_;
    frame.epoch = epoch_;
    frame.lane = lane();
    frame.context = toId(context);
    frame.received = received_.load(std::memory_order_relaxed);
    if constexpr (aside) {
      const schema::Notice notice{schema::NoticeType::aside, epoch_, 0};
      std::memcpy(room, &notice, sizeof notice);
    } else {
      frame.aside = asides_.load(std::memory_order_acquire);
    }
    std::memcpy(room + header - sizeof frame, &frame, sizeof frame);
    Writer out(room + header, bytes - header);
    RowCodec<R>::encode(out, arguments);
    if (waiter != nullptr) {
      waiter->seq = frame.seq;
      addWaiter(waiter);
    }
    if (__builtin_expect(log_ != nullptr, 0)) {
      if constexpr (R::unlogged)
        log_->refuse(kSharing);
      else
        logCall(aside, {room, bytes}, traits<R>);
    }
    if (!unsent) connection_->commit(channel, bytes);
    if constexpr (aside) asides_.fetch_add(1, std::memory_order_release);
    if (__builtin_expect(statsOn_, 0)) count(R::name.view(), waiter != nullptr, bytes);
    if constexpr (!aside)
      if (__builtin_expect(steps_, 0)) stepped_.notify_all();
    return CUDA_SUCCESS;
  }

  template <class R>
  CUresult exchange(CUcontext context, const typename R::Arguments& arguments, bool forced) {
    Waiter waiter;
    uint32_t flags = schema::Frame::kAwait | (forced ? schema::Frame::kForced : 0u);
    if (CUresult status = send<R>(context, arguments, flags, &waiter); status != CUDA_SUCCESS) return status;
    return outputs<R>(waiter, arguments);
  }

  template <class R>
  CUresult outputs(Waiter& waiter, const typename R::Arguments& arguments) {
    await(waiter);
    Reader in(waiter.bytes);
    if (!waiter.bytes.empty()) RowCodec<R>::decode(in, arguments);
    if (__builtin_expect(isFault(waiter.status), 0)) {
      words_->setSticky(waiter.status);
      sticky();
    }
    // A worker that is asked to end answers waiting calls, maybe before the client has read its notice.
    if (__builtin_expect(waiter.status == CUDA_ERROR_DEVICE_UNAVAILABLE, 0)) awaitReason();
    return waiter.status;
  }

  static constexpr auto kTick = std::chrono::milliseconds(500);
  static constexpr auto kStepBound = std::chrono::milliseconds(5);
  // Of all rows that are Unlogged.
  static constexpr char kSharing[] = "it shares memory or events with other processes";
  template <class R>
  static constexpr uint8_t traits =
      static_cast<uint8_t>((R::varies || R::polls ? CallLog::kVaries : 0) | (R::polls ? CallLog::kPolls : 0) |
                           (R::name.view() == "sessionRead" ? CallLog::kContents : 0));

  // Errors after which a context answers nothing else.
  static bool isFault(CUresult status);
  // The device broke. Its line is on its way, ahead of the error: waits until that is written, so that a
  // program that ends at the error does not end without it.
  static bool isLoss(CUresult status);
  static void awaitLoss();
  std::byte* reserve(size_t bytes, transport::Channel channel = transport::Channel::call);
  CUresult lost();
  static bool provesGone(const transport::Connection& connection);
  void addWaiter(Waiter* waiter);
  void await(Waiter& waiter);
  void readReply(std::unique_lock<std::mutex>& lock);  // of replyMutex_: nobody else reads
  void deliver(std::span<const std::byte> message);    // under replyMutex_
  void failWaiters(CUresult status);                   // under replyMutex_
  static uint32_t lane();
  void count(std::string_view name, bool awaited, size_t bytes);

  void serviceLoop();
  void handleNotice(std::span<const std::byte> message);
  enum Stillness : unsigned { kSuspended = 1, kMoving = 2 };
  void setStill(Stillness why, bool still);
  void callbackLoop();
  void noteCalled(uint64_t id, uint32_t status);
  void runHostFunction(uint64_t id, CUresult status);
  static void writeOutput(int descriptor, std::string_view text);
  void hearOutput(std::string_view text);
  // Waits until the text of a failed assertion is on stderr. Natively it is there before any call reports the
  // failure.
  void awaitErrors() const;
  // Waits until the reason for the session's end is printed. It must be printed before a call reports the
  // end, because the program may exit right after that.
  void awaitReason() const;
  void tellReason(std::string_view text);
  void tellGone();  // everything that the worker sent has been read

  // ---- moves (session_move.cpp) ----

  struct NextWorker {
    std::shared_ptr<transport::Connection> connection;
    uint32_t epoch = 0;
    schema::WorkerHello hello;
    std::vector<schema::MovedRegion> regions;
    bool replaces = false;  // a dead one: its pinned memory is that of the checkpoint
    bool given = false;     // the holder knows one, whether it can be reached or not
    // It shares memory with this process, and has to be lent what this one has: the worker before did not
    // share it, or is on another machine.
    bool lends = false;
    std::shared_ptr<transport::SharedMemory> words, staging;  // with lends: its own
  };
  using Stage = MoveCourse::Stage;
  void hearMove(const schema::Notice& notice, const schema::MovedBody& moved);
  void startMover();
  void moveLoop();
  bool carryOutMove();
  bool wantsStep() const;
  void awaitOne();
  void goOnSending();
  // Before a frame, while a move lets one go: if another one has gone already, until the move has stopped the
  // session again, and not for long.
  void holdBack(std::unique_lock<std::mutex>& frames);
  void goOver();
  bool moveIsOver() const;
  bool mayNotSpeak() const;
  bool awaitStage(Stage stage);
  // Under controlMutex_. Says it to the worker if the move goes on. False: it is over.
  bool sayStage(Stage stage, schema::NoticeType type, uint64_t last);
  // effect: of the worker's notice that it answers.
  bool sayControl(schema::NoticeType type, const void* body, size_t bytes, transport::Deadline deadline,
                  uint64_t effect = 0);
  bool readReplies();
  bool reachNext(NextWorker& next, std::string& why);
  bool findNext(NextWorker& next, std::string& why);
  // To no worker yet: the session is in files.
  void goAway();
  bool isHeld() const;
  bool isLeaving() const;
  // The next worker shares no memory with this process, though this one does.
  bool isApart() const;
  // False: it could not be reached, which the worker has been told.
  bool mayGoApart();
  // A connection to the session's next worker, through the holder. Null: why. given: there is one.
  std::unique_ptr<transport::Connection> dial(uint32_t epoch, bool& given, std::string& why);
  bool greetNext(NextWorker& next, std::string& why) const;
  bool readRegions(NextWorker& next, size_t expected, std::string& why) const;
  // The next worker may share memory with this process that the one before does not have.
  bool mayShare() const;
  bool mapNext(NextWorker& next, std::string& why) const;
  bool lendPinned(NextWorker& next, std::string& why) const;
  // ---- the worker has died (failover.cpp) ----

  static bool isFailover(const std::string& reason);
  // The worker is gone, and its server, which would have said why, is, too: the session's holder, which keeps
  // its checkpoints, finds another one for it.
  bool isServerLost(const transport::Connection& gone) const;
  bool mayGoOver(const transport::Connection& gone) const;
  // The worker has died, and its server restores the session in another one.
  bool goesOver() const { return log_ != nullptr && goesOver(*link()); }
  bool goesOver(const transport::Connection& gone) const;
  // False: the session does not go on; where that is to be said, it was.
  bool failOver(const transport::Connection& gone);
  bool goOn();
  bool nextHasDied(const NextWorker& next, const std::string& why);
  std::string lossOf(const NextWorker& next, const std::string& why) const;
  // All that was sent since the checkpoint is with the new worker, and this session goes over to it. "" or
  // why not.
  std::string makeAgain(NextWorker& next);
  void hearUnseen(const Replay& replay);
  bool keepReadersAway();

  // ---- the log of calls
  void logCall(bool aside, std::span<const std::byte> message, uint8_t traits);
  void logPut(CallLog::Place place, uint64_t at, const void* from, size_t bytes);
  // Tells the worker how full it is, if that has changed much, and if it can be told at once.
  void tellLog(bool soon);
  std::chrono::milliseconds silenceBorne() const;
  std::chrono::milliseconds setupBorne() const;  // of one that has not greeted
  std::byte* unsentRoom(transport::Channel channel, size_t bytes);

  static bool fits(const schema::WorkerHello& now, const schema::WorkerHello& next, std::string& why);
  void leaveShared(const transport::Connection& next);
  void enterShared(const NextWorker& next);
  void bring(const MoveHooks& hooks);
  void switchTo(NextWorker& next);
  void noteWatch(schema::WordUpdate watch);  // this and the next two under controlMutex_
  void sweepWatches();                       // forgets those that were reached
  void repeatWatches();
  // True: the worker is gone, and the session goes on at another one.
  bool wentOver(const transport::Connection* gone);
  // At exit: ends a move. False: the worker is told nothing more.
  bool leaveMove();

  static Session* current;
  static thread_local bool runningHostFunction __attribute__((tls_model("initial-exec")));

  // Changed by the mover, which holds then whatever a user of it holds (use()).
  std::shared_ptr<transport::Connection> connection_;
  mutable std::mutex linkMutex_;
  // What a forked child lets go of: the session's connection, and the one that it comes from or goes to.
  std::atomic<transport::Connection*> inUse_{nullptr}, beside_{nullptr};
  std::unique_ptr<schema::WorkerHello> hello_;
  std::unique_ptr<Words> words_;
  std::atomic<bool> mapsMemory_{false};
  bool transportNamed_ = false;  // by the user
  bool sharesNoMore_ = false;    // it was tried, and failed; the mover's
  bool sharesInTurns_ = false;   // tests: every other move
  int holder_ = -1;
  std::string transport_, networkDevice_;
  std::string server_;  // where it began: names its devices' PCI addresses
  uint64_t sessionHigh_ = 0, sessionLow_ = 0;
  uint32_t epoch_ = 0;
  std::atomic<int> forced_{0};
  std::atomic<int> captures_{0};
  std::atomic<bool> printing_{false};
  mutable std::atomic<bool> errorsWritten_{false};
  std::atomic<bool> reasonTold_{false};
  mutable std::atomic<bool> reasonAwaited_{false};
  std::mutex reasonMutex_;

  std::mutex enqueueMutex_;  // the call channel
  std::mutex controlMutex_;  // the control channel: never waits behind a full call channel
  uint64_t seq_ = 0;
  bool steps_ = false;      // under enqueueMutex_, as the next two: a move lets one frame go
  uint64_t stepsFrom_ = 0;  // behind this one
  std::condition_variable stepped_;
  std::atomic<uint64_t> asides_{0};        // number sent; written under controlMutex_
  std::atomic<uint64_t> asidesServed_{0};  // number served, from replies; written under replyMutex_
  std::atomic<uint64_t> received_{0};
  std::atomic<uint64_t> moment_{0}, observed_{0}, mirrorSet_{0};

  std::mutex replyMutex_;
  std::condition_variable replied_;
  bool receiving_ = false;
  bool away_ = false;  // nobody reads: the session goes over to another worker
  std::unordered_map<uint64_t, Waiter*> waiters_;
  bool lost_ = false;

  std::thread service_;
  std::atomic<bool> closing_{false};
  std::mutex hostMutex_;
  std::condition_variable hostReady_;
  std::deque<std::pair<uint64_t, CUresult>> hostQueue_;
  std::unordered_map<uint64_t, HostFunction> hostFunctions_;
  uint64_t nextHostFunction_ = 1;
  bool hostThread_ = false;

  std::mutex suspendedMutex_;
  std::condition_variable resumed_;
  std::atomic<unsigned> still_{0};  // written under suspendedMutex_

  Transfers transfers_;
  mutable std::mutex
      moveMutex_;  // course_, moverRuns_; of other locks only linkMutex_ is taken while it is held
  std::condition_variable moveChanged_;
  MoveCourse course_;
  bool moverRuns_ = false;
  std::atomic<const MoveHooks*> moveHooks_{nullptr};
  std::function<std::unique_ptr<transport::Connection>(uint32_t epoch, bool& given, std::string& why)>
      dial_;                      // tests
  int owedReplies_ = 0;           // of the holder, to requests that were given up; the mover's
  std::unique_ptr<CallLog> log_;  // null: the session is not protected
  bool goesOnDifferent_ = false;
  bool holderKeeps_ = false;             // the checkpoints
  std::atomic<bool> serverLost_{false};  // the session is looking for another one, or has found it
  std::vector<std::byte> unsent_[transport::kChannels];  // each under its channel's lock
  CallLog::State logTold_;                               // this and the next under controlMutex_
  transport::Clock::time_point logToldAt_;
  std::vector<schema::WordUpdate> watches_;  // under controlMutex_
  static constexpr size_t kMostExpected = 256;
  size_t sweepWatches_ = 64;  // from so many on, those that were reached are looked for

  bool statsOn_ = false;
  std::atomic<uint64_t> posts_{0}, awaits_{0}, sentBytes_{0}, moves_{0};
  transport::Traffic earlierTraffic_;  // of connections that were left; under linkMutex_
  std::mutex statsMutex_;
  std::unordered_map<std::string_view, uint64_t> awaitedByName_;
};

}  // namespace gpupool::client
