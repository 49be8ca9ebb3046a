#pragma once
// A connection over UCX. Producers and consumers use rings in private memory, exactly as in shm; a progress
// thread is their other end and moves whole records between the rings of the two processes:
//
//   producer -> [out ring] -> progress thread ~~ active message ~~> progress thread -> [in ring] -> consumer
//
//  * Everything committed while a message is in flight leaves with the next one: coalescing without timers.
//  * Credits: a sender never has more bytes under way than the receiver's ring holds; the receiver reports
//    consumption every quarter of a ring.
//  * put: a numbered active message (rendezvous when large), received straight into the region after region
//    id, generation and bounds were checked, and answered when it has landed. Messages name the put they
//    follow and are held back until it has landed; a put notes how far the rings were filled when it was
//    asked for, so that messages before it need not wait for it. A few MiB of puts are under way at a time,
//    so that they land one after the other and not all at the end. get: a request, answered by the data.
//  * Over RDMA, large puts and gets of either side are moved by the worker's network card alone
//    (ucx_onesided.cpp).
//  * A dead process is noticed by end-of-file on the bootstrap socket or by an error of UCX. Both sides
//    send a byte there every 125 ms: a dead host does not acknowledge it (TCP_USER_TIMEOUT), a stopped
//    process does not send it.
//
// Threads: link_, drain_, fill_ and everything below "progress thread" belong to it alone once it runs.

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "transports/last_words.h"
#include "transports/ring_connection.h"
#include "transports/ucx_link.h"

namespace gpupool::transport {

// No client of ours has more transfers than this under way; a peer that has is refused.
inline constexpr uint64_t kMaxServing = 1 << 16;

// Transfers under way, by number; any thread.
class TransferTable {
 public:
  Transfer begin();
  void end(Transfer transfer, bool ok);
  // True: it has ended well. False: it failed, or the deadline, or stop().
  bool wait(Transfer transfer, Deadline deadline);
  // No new ones.
  void refuse();
  // None is under way any more: the memory of every transfer may be reused or freed.
  void stop();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Transfer next_ = 1;
  std::set<Transfer> running_;
  std::set<Transfer> failed_;  // the latest few
  bool refusing_ = false;
  bool stopped_ = false;
};

class Ucx final : public RingConnection, private UcxLink::Sink {
 public:
  Ucx(int bootstrap, const Options& options, bool worker);
  ~Ucx() override;

  Region share(std::shared_ptr<SharedMemory> memory) override;
  void unshare(Region region) override;
  std::shared_ptr<SharedMemory> map(Region, void*, Deadline) override { return nullptr; }
  bool mapsMemory() const override { return false; }
  Transfer put(const void* local, Region remote, uint64_t offset, size_t bytes) override;
  Transfer get(void* local, Region remote, uint64_t offset, size_t bytes) override;
  bool wait(Transfer transfer, Deadline deadline) override;
  void close() override;
  bool saidReason() const override { return saidReason_; }
  void setStallTimeout(std::chrono::milliseconds time) override { stallTimeout_ = time; }
  void abandon() override;
  void sever() override;
  const char* name() const override { return "ucx"; }
  Traffic traffic() const override { return {copied_.load(), moved_.load()}; }

 private:
  friend struct UcxSeam;  // tests/fuzz: a peer's messages without a wire
  // Over a link that is there, without the progress thread.
  Ucx(std::unique_ptr<UcxLink> link, const Options& options, bool worker);
  // Rings and lanes of options_' sizes.
  void makeLanes();
  // What other threads ask the progress thread to send.
  struct Request {
    WireHeader header;
    const void* source = nullptr;  // put
    void* target = nullptr;        // get
    Transfer transfer = 0;
    std::shared_ptr<Registration>
        registered;  // client, RDMA: of the source or target, until the peer is done with it
  };
  // Worker, RDMA: what the client announced with a key.
  struct PeerRegion {
    uint64_t address = 0;
    std::shared_ptr<ucp_rkey> key;  // null: none came, or UCX does not want it
    size_t busy = 0;                // transfers under way
    bool withdrawn = false;
  };
  // RDMA: what this side shares, by region; on a client, until the worker has released it.
  struct Shared {
    std::shared_ptr<SharedMemory> memory;
    std::shared_ptr<Registration> registered;
    bool withdrawn = false;
  };
  using Name = std::pair<uint32_t, uint32_t>;  // of a region: id and generation
  // Messages from `position` of a channel's out ring on follow put `number`.
  struct PutMark {
    uint64_t number;
    std::array<uint64_t, kChannels> position;
  };
  // A put is complete when the peer has answered and UCX has released the source.
  struct PutState {
    Transfer transfer = 0;
    uint64_t bytes = 0;
    bool sent = false;
    bool answered = false;
    bool ok = true;
    std::shared_ptr<Registration> registered;
  };
  struct Held {
    uint64_t landed;
    std::vector<std::byte> records;
  };
  // The progress thread's end of one channel.
  struct Lane {
    std::unique_ptr<RingConsumer> drain;  // of the out ring
    std::unique_ptr<RingProducer> fill;   // of the in ring
    size_t size = 0;
    uint64_t sent = 0;          // position handed to UCX
    uint64_t peerConsumed = 0;  // credit
    bool inFlight = false;
    std::deque<PutMark> marks;      // of puts that messages not sent yet follow
    uint64_t follows = 0;           // the put that the next message follows
    uint64_t filled = 0;            // position published to the in ring
    uint64_t creditSaid = 0;        // consumption reported to the peer
    std::map<uint64_t, Held> held;  // records that must wait, by position
  };

  // Any thread.
  Transfer submit(Request request);
  void wakeReader(Channel channel) override;
  void wakeWriter(Channel) override {}  // credits guarantee room: the progress thread never sleeps for it
  void consumed(Channel channel) override;
  void gone() override;
  void wakeProgress();

  // Progress thread: the loop (ucx.cpp).
  void run();
  bool step();
  void sleep();
  void awaitEvent();
  bool pump(int channel);
  size_t upToNextPut(Lane& lane, int channel, size_t bytes);
  void takeRequests();
  bool startPuts();
  void sendRequest(Request& request);
  void sendPut(Request& request);
  void sendWithPlace(const Request& request, UcxLink::Done done);
  void returnCredits();
  void readBootstrap();
  bool silentForLong() const;
  std::chrono::milliseconds beatInterval() const;
  Clock::time_point nextBeat() const;
  void beat(Clock::time_point now);
  bool drained() const;
  bool finished(Clock::time_point now);

  // Progress thread: what the peer sent (ucx_receive.cpp).
  bool received(const WireHeader& header, void* data, size_t length, bool rendezvous) override;
  void failed(const std::string& why) override;
  void lose(const std::string& why) { markGone(Peer::lost, why); }
  void loseWith(const std::string& said, const std::string& why) {
    if (!said.empty()) saidReason_ = true;
    lose(said.empty() ? why : said);
  }
  void onMessages(const WireHeader& header, const void* data, size_t length, bool rendezvous);
  bool deliver(Lane& lane, const void* records, size_t bytes);
  void deliverHeld();
  bool onPut(const WireHeader& header, void* data, size_t length, bool rendezvous);
  void landed(uint64_t put, bool ok);
  void onGet(const WireHeader& header);
  bool onGetData(const WireHeader& header, void* data, size_t length, bool rendezvous);
  void onPutDone(const WireHeader& header);
  void settle(uint64_t put);
  void markLanded(uint64_t put);
  void onCredit(const WireHeader& header);
  void checkGoodbye();

  // RDMA (ucx_onesided.cpp). Any thread.
  bool oneSided(size_t bytes) const;
  void registerShared(Region region, const std::shared_ptr<SharedMemory>& memory, Request& announcement);
  void forgetShared(Region region);
  bool pointTo(Request& request, WireKind kind, const void* local);
  // Progress thread.
  uint32_t bulkFlags(size_t bytes) const;
  bool receivedOneSided(const WireHeader& header, const void* data, size_t length);
  void onPeerRegion(const WireHeader& header, const void* data, size_t length);
  void onFetch(const WireHeader& header, const void* data, size_t length);
  void onFill(const WireHeader& header, const void* data, size_t length);
  void onFilled(const WireHeader& header);
  void onPlaced(const WireHeader& header);
  void onWithdrawn(Region region);
  void withdrawPeerRegion(Region region);
  PeerRegion* peerRegion(Region region);
  void finishedIn(Region region);
  void letGo(Region region);
  bool placeDirectly(const Request& request);
  bool getDirectly(const Request& request);

  const bool isWorker_;
  Descriptor bootstrap_;
  Options options_;
  std::atomic<std::chrono::milliseconds> stallTimeout_{options_.stallTimeout};
  Descriptor event_;  // wakes the progress thread
  std::unique_ptr<std::thread> progress_;
  std::unique_ptr<TransferTable> transfers_;
  bool abandoned_ = false;

  ArmWord progressArmed_{0};
  std::atomic<bool> work_{false};  // requests, credits or an end to look at
  std::atomic<bool> closing_{false};
  std::atomic<bool> severed_{false};
  std::atomic<uint64_t> creditSaid_[kChannels] = {};  // Lane::creditSaid, for the consumer
  std::atomic<uint64_t> putsAsked_{0};  // the number of the latest put; written under requestsMutex_
  std::mutex sharingMutex_;             // one share or unshare at a time: names are announced in order
  std::mutex requestsMutex_;
  std::vector<Request> requests_;
  std::vector<PutMark> marks_;             // of puts asked for since the progress thread looked
  std::shared_ptr<UcxMemory> registered_;  // RDMA, else null
  std::mutex sharedMutex_;
  std::map<Name, Shared> shared_;
  bool sharingEnded_ = false;  // the peer reaches nothing any more
  std::atomic<uint64_t> copied_{0}, moved_{0};
  std::mutex endMutex_;
  std::condition_variable ended_;
  bool runEnded_ = false;

  // Progress thread.
  std::unique_ptr<UcxLink> link_;
  std::array<Lane, kChannels> lanes_;
  std::deque<Request> queue_;                    // puts that wait for earlier ones
  std::unordered_map<uint64_t, PutState> puts_;  // under way, by number
  uint64_t putBytes_ = 0;                        // of these
  uint64_t putsMarked_ = 0;                      // the latest put whose mark was taken
  std::unordered_map<uint64_t, Request> gets_;   // by transfer
  uint64_t putsLanded_ = 0;                      // all up to this one
  std::set<uint64_t> landedEarly_;
  using PeerRegions = std::map<Name, PeerRegion>;
  std::unique_ptr<PeerRegions> peerRegions_ = std::make_unique<PeerRegions>();
  uint64_t serving_ = 0;    // gets of the peer being answered
  uint64_t answering_ = 0;  // puts whose answer has not left
  Clock::time_point lastSaid_, lastHeard_, lastBusy_, closeDeadline_, endOfFileAt_, goneAt_;
  bool endOfFile_ = false;
  LastWords lastWords_;
  std::atomic<bool> saidReason_{false};  // before peer() changes
  bool hostSilent_ = false;
  bool goodbyeSent_ = false;
  bool goodbyeSeen_ = false;
  std::optional<std::array<uint64_t, kChannels>> peerGoodbye_;
};

}  // namespace gpupool::transport
