#pragma once
// Completion words (schema/frame.h) and the threads behind them. The device writes a word when the stream
// reaches it; on one host the client polls the same page. Both threads work only while somebody waits. The
// watcher rings the client's bell (one host) or sends the word (network) when a watched word is reached. The
// other one asks the driver for device faults, after which no word is ever written again, and puts the sticky
// status where every waiter looks: it is a separate thread because the driver may block it until a host
// function returns, and that function may wait for words.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "schema/frame.h"
#include "server/driver.h"
#include "server/worker/host_views.h"
#include "server/worker/objects.h"
#include "transports/transport.h"

namespace gpupool::server {

class Words {
 public:
  using Publish = std::function<void(const std::vector<schema::WordUpdate>&)>;
  // publish: called on the watcher's thread for words that were reached (networks only; empty on one host).
  // fault: called once with the sticky status.
  Words(const Driver& driver, Objects& objects, std::shared_ptr<transport::SharedMemory> memory,
        Publish publish, std::function<void(CUresult)> fault);
  ~Words();

  const std::shared_ptr<transport::SharedMemory>& memory() const { return memory_; }
  // The device's address of word `index` in the view of the stream's context; 0 if there is no such word.
  static CUdeviceptr deviceAddress(const HostView* view, uint64_t index);
  // Has the stream write it. The session's fault when even that is refused.
  CUresult write(const HostView* view, CUstream stream, uint64_t index, uint64_t value);
  // Has the stream wait until the word is at least `value`.
  CUresult awaitIn(const HostView* view, CUstream stream, uint64_t index, uint64_t value);
  // Raises the word to `value` for the client: no stream writes it. False: no such word.
  bool raise(uint64_t index, uint64_t value);
  // False: more words are watched already than any correct client can wait for.
  bool watch(uint64_t index, uint64_t value);
  // Calls `then` on the watcher's thread when the word is there (CUDA_SUCCESS) or never will be (the sticky
  // status): before any word is published that was written after it. tell: the word itself is published
  // afterwards, too. Call it before the stream is asked to write the word.
  using Then = std::function<void(CUresult)>;
  void whenReached(uint64_t index, uint64_t value, Then then, bool tell);
  // No `then` of a word that is there is still to be called, or under way.
  bool settled() const;
  // While parked nothing moves the words but the client: the threads only look when a watch is added, and
  // sleep.
  void park(bool parked);
  // From any thread: the session is over; every waiter learns `status`.
  void setSticky(CUresult status);
  CUresult sticky() const;
  // The session has this context, and nothing has been loaded in a new one. It gets the stream by which it is
  // queried for faults now: for a stream driver 580 takes 2 MiB of an address pool that it places variables
  // of code in (H100), so one that is made at some later moment moves what is loaded behind it. By the thread
  // that makes and ends contexts.
  void contextMade(CUcontext context);
  // While the lock is held, no context is queried for faults; the remaining contexts are queried again
  // afterwards. Hold it while a context ends: drivers crash if a stream is queried while its context is
  // destroyed. ending: null: a green context.
  std::unique_lock<std::mutex> contextEnds(CUcontext ending);
  void stop();

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    schema::WordUpdate word;
    Then then;
    bool tell = true;
  };
  void run();
  static constexpr size_t kMostWatched = size_t{1} << 20;
  bool add(Watched watched);
  void idle(Clock::time_point since) const;
  bool sleepParked();
  void checkFaults();
  bool serve(std::vector<schema::WordUpdate>& reached, std::vector<Then>& ready);
  void abandonWatched();
  void checkFault();
  schema::WordsHeader& header() const { return *reinterpret_cast<schema::WordsHeader*>(memory_->data()); }
  std::atomic<uint64_t>& word(uint64_t index) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(memory_->data() + schema::kWordsOffset)[index];
  }
  void ring();

  const Driver& driver_;
  Objects& objects_;
  Publish publish_;
  std::function<void(CUresult)> fault_;
  std::shared_ptr<transport::SharedMemory> memory_;
  mutable std::mutex mutex_;
  std::condition_variable changed_, faultsWanted_;
  bool faultsIdle_ = false;  // nobody waited when the fault thread last looked: wake it when somebody does
  std::vector<Watched> watched_;
  size_t calling_ = 0;                    // so many `then`s were taken out of it, and have not returned
  std::atomic<bool> any_{false};          // watched_ is not empty
  std::map<CUcontext, CUstream> probes_;  // under mutex_: idle streams
  std::mutex probing_;                    // taken before mutex_; held while drivers block
  std::vector<std::pair<uint64_t, CUstream>> otherProbes_;  // under probing_: of green contexts, by id
  bool stopping_ = false;
  bool parked_ = false;
  bool added_ = false;  // a watch, since the watcher looked last
  std::thread thread_, faults_;
};

}  // namespace gpupool::server
