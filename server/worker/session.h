#pragma once
// One session in its own process: takes frames from the call channel in order, calls the driver, answers.
//
//   executor (calls run)   every frame, in seq order; waits for the device only inside the driver
//   beside threads         Beside rows (JIT, drain): only their lane waits
//   control thread         answers to callbacks, watches, aside calls, goodbye; never in the driver
//   watchers (Words)       completion words; device faults
//
// The driver may hold a context while it waits for the device, and the device for a host function of the
// client's: any thread that then calls the driver blocks until the function has returned. So nothing that a
// host function needs (its notice, aside calls, words) waits for such a thread, nor for a lock one holds.
//
// A frame that is malformed ends the session with a reason the client prints; the process exits then.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "schema/frame.h"
#include "schema/hello.h"
#include "schema/mirror.h"
#include "schema/wire.h"
#include "server/driver.h"
#include "server/worker/call_counts.h"
#include "server/worker/event_times.h"
#include "server/worker/frame_gate.h"
#include "server/worker/host_views.h"
#include "server/worker/images.h"
#include "server/worker/objects.h"
#include "server/worker/output.h"
#include "server/worker/page_hasher.h"
#include "server/worker/record.h"
#include "server/worker/shared_events.h"
#include "server/worker/space.h"
#include "server/worker/until.h"
#include "server/worker/warm.h"
#include "server/worker/words.h"
#include "server/worker_process.h"
#include "transports/transport.h"

namespace gpupool::server {

struct Handler;
struct LinkTable;

// One frame being served. The bytes are private to this process.
struct Call {
  // A new one, in the room of the old one's buffers.
  void reset() {
    Call fresh;
    fresh.bytes.swap(bytes);
    fresh.out = std::move(out);
    fresh.out.clear();
    *this = std::move(fresh);
  }

  schema::Frame frame;
  const HostView* view = nullptr;  // of its context; null: it names none
  std::vector<std::byte> bytes;    // arguments
  schema::ByteBuffer out;          // outputs, if status says success (or the call always has them)
  CUresult status = CUDA_SUCCESS;
  const char* malformed = nullptr;  // set: the session ends, and why
  bool drained = false;             // a synchronisation: device output goes with the reply
  bool deferred = false;            // its handler answers later, by Session::answer
};

class SparePages;

class Session {
 public:
  // account: of the lease; null: the session is its lease's only one.
  Session(const Driver& driver, const SessionStart& start, std::unique_ptr<transport::Connection> connection,
          HostPages pages = makeHostPages(), std::unique_ptr<Account> account = nullptr);
  ~Session();

  // Exchanges hellos and serves until the client leaves or is lost, or stop is called. Returns why it ended,
  // as a message.
  std::string run();
  // From any thread: ends run() soon; `reason` goes to the client.
  void stop(const std::string& reason);
  // It ended the session in order, or has gone to another worker: it is told nothing more.
  bool clientLeft() const { return clientLeft_; }
  bool stopping() const { return stopping_; }

  // ---- for Suspender
  FrameGate& gate() { return gate_; }
  uint64_t admitted() const { return lastSeq_; }  // number of the last frame
  // No call is under way on a thread beside, nor waits for one. With the gate closed and empty this stays so.
  bool besideIdle();
  size_t hostFunctionsOpen();
  // Its devices may wait for what the program calls next: a stream for a value that it has yet to write, or a
  // host function for another call.
  bool mayWaitForProgram() { return waitsForValues_ || hostFunctionsOpen() != 0; }
  void noteWaitForValue() { waitsForValues_ = true; }
  // The client is told, and the watchers of words sleep or wake. The device is idle.
  void setSuspended(bool suspended);
  // By device of the lease: what a suspended session keeps there, besides contexts and code.
  std::vector<uint64_t> keptBytes() const;
  uint32_t ordinal(unsigned device) const { return start_.devices.at(device).info.ordinal; }
  // Compute capability × 10 of its first device: code is chosen by it.
  unsigned architecture() const;
  // What a checkpoint has in spare memory of the session's devices (spare_pages.h), until it has read it.
  void setSpare(std::shared_ptr<SparePages> spare);
  // It ends, and the checkpoint with it, before a context does. False: there is none.
  bool endSpare();
  // Likewise since the session needs the memory: from then on checkpoints take none.
  bool reclaimSpare();
  bool hasReclaimedSpare() const { return reclaimedSpare_; }
  // Some context of the session, for calls that belong to none.
  void makeAnyCurrent();
  void parkWords(bool parked) { words_.park(parked); }
  // The client has gone to another worker: the session ends here.
  void leave() { end("the session has moved"); }
  // Tests: called on the executor before each frame, outside the gate.
  void beforeFrames(std::function<void()> call) { beforeFrame_ = std::move(call); }

  // ---- for a move (session_move.cpp, session_state.h, rebuild.h)
  // Each waits until the client has done it, or the deadline: it sends no frame any more, and all it has sent
  // are served; it sends nothing at all any more. "" or why not.
  // apart: the session goes on where its client shares no memory with the worker.
  std::string stopClient(const Until& deadline, bool apart = false);
  // Behind it, any number of times: it sends one more frame, or none for some milliseconds, and stops again.
  std::string stepClient(const Until& deadline);
  // goes: to another worker, and not into a file.
  std::string quietClient(const Until& deadline, bool goes);
  uint64_t clientStops() const { return clientStops_; }  // tests: how often it has stopped
  // Any thread: the client hears that the server keeps a whole checkpoint of that moment.
  void tellKept(uint64_t frame, uint64_t aside);
  uint64_t checkpointsKept() const { return checkpointsKept_; }  // tests
  // Before run: called on the control thread with what the client says of its log of calls.
  void onClientLog(std::function<void(const ClientLog&)> heard) { heardLog_ = std::move(heard); }
  // What kernels have printed goes to the client: all of it has been written.
  void tellOutput();
  // The client may go on here.
  void letClientStay();
  // It stops, or its client is gone.
  bool isEnding() const;
  // Of a move that has failed, for people: `why`, unless the session is ending or its client is gone. What
  // others do upon that may be seen before it.
  std::string whyNotMoved(const std::string& why) const;
  // The client is told to go on at the other worker, as `epoch`, or, held, that none waits for it. True: it
  // has gone; false: it stays, or the session ends.
  bool sendClientAway(uint64_t epoch, bool held = false);
  // Something that lives may stand on the registration of pinned memory with the driver.
  bool standsOnHost() const;
  // The client is gone: whether it left for the other worker is read to its end first.
  void awaitParting();
  // Where the numbers of frames, aside calls and effects stand.
  struct Numbers {
    uint64_t lastFrame = 0, lastAside = 0, completed = 0, effects = 0;
  };
  Numbers numbers();
  void setNumbers(const Numbers& numbers);
  std::map<uint64_t, schema::MirrorBase> mirrors() {
    auto lock = holdMirrors();
    return mirrors_;
  }
  const SessionStart& start() const { return start_; }
  // Of a session that was made without one, before run.
  void connect(std::unique_ptr<transport::Connection> connection) {
    std::lock_guard lock(noticeMutex_);
    connection_ = std::move(connection);
    connected_.store(true, std::memory_order_release);
  }
  // How much it has in common with other sessions. While that is anything, it stays where it is:
  // they would all have to go together. With the gate closed and nothing beside it does not grow.
  static constexpr char kShares[] =
      "it shares memory or events with other processes, and so is not suspended either";
  static constexpr char kSharesFiles[] =
      "it has registered memory of a shared file (cudaHostRegister), and so is not suspended either";
  size_t shared() const { return space_.shared() + sharedEvents_.shared() + space_.files(); }
  const char* whyShared() const { return space_.files() != 0 ? kSharesFiles : kShares; }
  // Pinned memory that was adopted is to be registered by the next context.
  void registerHost() { hostLost_ = true; }

  // ---- for handlers
  const Driver& driver() const { return driver_; }
  Objects& objects() { return objects_; }
  Account& account() { return *account_; }
  ObjectMemory& objectMemory() { return objectMemory_; }
  Space& space() { return space_; }
  PageHashers& hashers() { return hashers_; }
  Words& words() { return words_; }
  HostViews& views() { return views_; }
  Images& images() { return images_; }
  Record& record() { return record_; }
  CallCounts& counts() { return counts_; }  // executor; others read
  EventTimes& eventTimes() { return eventTimes_; }
  SharedEvents& sharedEvents() { return sharedEvents_; }
  std::shared_ptr<LinkTable>& links() { return links_; }
  // Body graphs of conditional nodes, which the driver names only once; executor only.
  std::map<CUgraphNode, std::vector<CUgraph>>& bodies() { return bodies_; }
  transport::Connection& connection() { return *connection_; }
  // Makes the context with handle `id` current on this thread.
  CUresult makeCurrent(uint64_t id, const HostView** view = nullptr);
  // The same on a thread that has had other contexts current by itself.
  CUresult makeCurrentAgain(uint64_t id);
  // The driver's primary context of each device, once it is known. Executor only.
  std::map<CUdevice, CUcontext>& primaries() { return primaries_; }
  // The device of each green context, by its id. Executor only.
  std::map<uint64_t, CUdevice>& greens() { return greens_; }
  // 1 + the device, by index, whose context was there before the first call; 0: none was.
  unsigned contextAhead() const { return contextAhead_; }
  // The session has this context, made now or known before; nothing has been loaded in a new one.
  void contextMade(CUcontext context, unsigned device) {
    space_.contextMade(context, device);
    hashers_.contextMade(context);
    views_.contextMade(context);
    words_.contextMade(context);
  }
  // The context is gone, and with it what it had registered and its arrays.
  void contextEnded(CUcontext context) {
    hashers_.contextEnded(context);
    views_.contextEnded(context);
    sharedEvents_.contextEnded(context);
    if (space_.contextEnded(context)) hostLost_ = true;
    contextsEnded_.fetch_add(1, std::memory_order_acq_rel);
    objectMemory_.removeWhere([this](uint64_t context, unsigned) {
      CUcontext real = nullptr;
      return !objects_.find(context, real);
    });
  }
  // Runs host function `callback` of the client and waits for its answer; on a driver thread.
  void runCallback(uint64_t callback, CUresult status);
  // Any thread. False: it was rebuilt here, and its client has not come yet; nobody may ask about the
  // connection.
  bool connected() const { return connected_.load(std::memory_order_acquire); }
  bool mapsMemory() const { return connection_->mapsMemory(); }
  // Regions of pinned memory by address, to be withdrawn with it.
  void keepRegion(uint64_t address, transport::Region region) {
    std::lock_guard lock(regionsMutex_);
    regions_[address] = region;
  }
  void dropRegion(uint64_t address);
  // Calls that may have the driver load code are served one after the other, each with its entry in the
  // record: their order decides where the variables of modules lie.
  std::unique_lock<std::mutex> holdPlacing() { return std::unique_lock(placingMutex_); }
  // The capture that the stream belongs to, as the driver numbers it; 0: none.
  uint64_t captureOf(CUstream stream) const;
  // While it is held no module whose memory is mirrored is unloaded.
  std::unique_lock<std::mutex> holdMirrors() { return std::unique_lock(mirrorsMutex_); }
  schema::MirrorBase& mirror(uint64_t address) { return mirrors_[address]; }  // under holdMirrors
  // Under holdMirrors. set: as sessionMirrorCollect has it.
  void mirrorAsked(uint64_t set, uint64_t address, size_t bytes);
  // The module or library `owner` is about to be unloaded: nothing of this process reads its globals again.
  std::vector<Space::Global> takeGlobals(uint64_t owner) {
    auto lock = holdMirrors();
    return space_.takeGlobals(owner);
  }
  void forgetMirror(uint64_t address) {
    auto lock = holdMirrors();
    mirrors_.erase(address);
  }
  // Any thread: the reply of a deferred call.
  void answer(const Call& call) { reply(call); }
  // On the watcher's thread: sends bytes of `memory` to a region of the client's, ahead of any later message.
  void deliver(std::shared_ptr<transport::SharedMemory> memory, uint64_t address, size_t bytes,
               transport::Region region, uint64_t offset);
  // Pinned memory that lay there before is nobody's any more: new memory may take its place. False: a
  // transfer of it does not end.
  bool awaitReleased(uint64_t address, size_t bytes);
  // Pages of a file that the client has shared, at `address` of the arena. Needs a current context.
  CUresult shareHost(uint64_t address, transport::Region region);
  transport::Region share(std::shared_ptr<transport::SharedMemory> memory) {
    return connection_->share(std::move(memory));
  }

 private:
  // By device of the lease: what the session may have of its memory.
  static std::vector<uint64_t> limits(const SessionStart& start);
  // session_greeting.cpp
  bool greet(std::string& reason);
  void fillGreeting(schema::WorkerHello& hello);
  std::string judgeGreeting(std::span<const std::byte> message, schema::ClientHello& client) const;
  std::string makeContextAhead(uint32_t told);
  // The session has the context that its views were made with, if any.
  void adoptContextAhead();
  void awaitLeaving(CUresult status, std::string_view call);
  // Behind the hello of a session that has moved here.
  bool nameHostRegions();
  // The client's pages for its pinned memory, which it lends (schema::ClientHello). "", or why not.
  std::string takeLent();
  void hearMove(const schema::Notice& said, uint64_t last);
  std::string endReason();
  friend struct SessionSeam;  // tests/fuzz: a session without its threads
  // The header: into `call`, with private arguments. Null: refused, and why.
  const Handler* check(std::span<const std::byte> message, Call& call, std::string& reason);
  const Handler* decode(std::span<const std::byte> message, uint64_t expected, Call& call,
                        std::string& reason);
  bool admit(std::span<const std::byte> message, Call& call, std::string& reason);
  void awaitAsides(uint64_t through);
  bool serveAside(std::span<const std::byte> message, std::string& reason);
  void execute(Call& call);
  void runBeside(Call call);
  void besideLoop();
  void reply(const Call& call);
  std::string sendOutput(const Call& call);  // under replyMutex_
  void sendErrors(CUresult status);
  void postFailed(const Call& call);
  // Its number; 0: the session is over.
  uint64_t notice(schema::NoticeType type, const void* body, size_t bytes, std::string_view text);
  void tellWords(const std::vector<schema::WordUpdate>& reached);
  uint64_t unchangedMirrors();
  // One without a body, within a bound: a client that is stopped may leave its channel full. committing: with
  // its number, before the client can answer it. False: it was not sent.
  bool noticeUntil(schema::NoticeType type, const Until& deadline,
                   const std::function<void(uint64_t)>& committing = nullptr);
  bool sayStay(const Until& deadline);
  std::string awaitStopped(const Until& deadline);
  std::string whyNotTold() const;  // after noticeUntil said no
  void controlLoop();
  // False: the session is over.
  bool control(std::span<const std::byte> message);
  bool passGate();
  void dropDelivered();  // under deliveriesMutex_
  void end(const std::string& reason);
  void endMalformed(const std::string& reason);  // any thread: notifies the client

  const Driver& driver_;
  SessionStart start_;
  Objects objects_;
  std::unique_ptr<Account> account_;
  ObjectMemory objectMemory_;
  Space space_;
  PageHashers hashers_;
  std::atomic<bool> connected_{false};
  std::unique_ptr<transport::Connection> connection_;  // ends first: it holds memory that lies in the space
  HostViews views_;
  std::map<CUdevice, CUcontext> primaries_;
  std::map<uint64_t, CUdevice> greens_;
  unsigned contextAhead_ = 0;
  std::atomic<bool> hostLost_{false};       // pinned memory is to be registered again
  std::atomic<uint64_t> contextsEnded_{0};  // a thread that saw fewer makes its context current again
  Words words_;
  Images images_;
  Output output_;
  Record record_;
  EventTimes eventTimes_;
  SharedEvents sharedEvents_;
  std::shared_ptr<LinkTable> links_;  // calls/module.cpp
  std::map<CUgraphNode, std::vector<CUgraph>> bodies_;

  // Deliveries under way and the memory they read.
  std::mutex deliveriesMutex_;
  std::deque<std::pair<transport::Transfer, std::shared_ptr<transport::SharedMemory>>> deliveries_;
  std::mutex regionsMutex_;
  std::map<uint64_t, transport::Region> regions_;
  std::mutex placingMutex_;
  std::mutex mirrorsMutex_;
  std::map<uint64_t, schema::MirrorBase> mirrors_;  // by the worker's address
  // Under mirrorsMutex_: the client's newest set of mirrors. The client has asked for these of them.
  struct AskedMirrors {
    uint64_t set = 0;
    bool complete = false;
    std::vector<std::pair<uint64_t, size_t>> mirrors;  // address, bytes
  };
  AskedMirrors askedMirrors_;
  Call asideCall_;  // control thread only; its buffers keep their room
  std::mutex asideMutex_;
  std::condition_variable asideServed_;
  std::atomic<uint64_t> asides_{0};   // served; written by the control thread
  std::atomic<uint64_t> lastSeq_{0};  // written by the executor
  std::atomic<uint64_t> completed_{0};
  CallCounts counts_;
  std::mutex replyMutex_;
  std::atomic<bool> assertionTold_{false};
  std::mutex noticeMutex_;
  uint64_t effects_ = 0;  // under noticeMutex_

  std::mutex besideMutex_;
  std::condition_variable besideReady_;
  std::deque<Call> beside_;
  std::vector<std::thread> besideThreads_;
  unsigned besideIdle_ = 0;
  unsigned besideBusy_ = 0;  // calls taken from beside_ and not done

  std::mutex callbackMutex_;
  std::condition_variable callbackDone_;
  std::map<uint64_t, unsigned> callbacksOpen_;  // id -> runs not yet answered

  // What the client has said of a move.
  std::mutex moveMutex_;
  std::condition_variable moveHeard_;
  std::optional<uint64_t> stoppedAt_, quietAt_;  // numbers of the last frame and aside call
  std::optional<bool> left_;
  bool controlRead_ = false;  // to its end: the client is gone
  std::atomic<uint64_t> clientStops_{0};
  uint64_t asked_ = 0;  // number of the notice `prepare` that began the move; 0: none is under way
  // A `prepare` was sent, and no `stay` since; and that one is to be, as soon as there is room for it.
  std::atomic<bool> prepared_{false}, stayOwed_{false};
  std::mutex stayMutex_;  // while it is said: no other notice of a move overtakes it

  std::mutex spareMutex_;
  std::shared_ptr<SparePages> spare_;
  std::atomic<bool> reclaimedSpare_{false};

  FrameGate gate_;
  std::atomic<bool> waitsForValues_{false};  // a stream has once, or a graph does
  std::function<void()> beforeFrame_;
  std::function<void(const ClientLog&)> heardLog_;
  std::atomic<uint64_t> checkpointsKept_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> clientLeft_{false};
  std::mutex endMutex_;
  std::string endReason_;
  std::thread control_;
};

}  // namespace gpupool::server
