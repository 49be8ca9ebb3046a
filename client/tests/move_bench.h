#pragma once
// A session that moves, between two workers that the test plays, over the loopback transport or shm: what one
// of them has not taken, the other one gets.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <thread>

#include "client/session.h"
#include "transports/implementations.h"
#include "transports/last_words.h"
#include "transports/waiting.h"

#include "catch.h"
#include "over_network.h"

namespace gpupool::client::test {

using namespace std::chrono_literals;
using schema::Notice;
using schema::NoticeType;
using transport::Channel;
using transport::Clock;
using transport::Connection;
using transport::Peer;

constexpr auto kBound = 20s;  // of what must happen
constexpr uint32_t kDevices = 2;
constexpr uint64_t kStagingBytes = 1 << 20;

template <class Done>
inline bool eventually(Done done, std::chrono::milliseconds bound = kBound) {
  for (const auto end = Clock::now() + bound; Clock::now() < end; std::this_thread::sleep_for(200us))
    if (done()) return true;
  return done();
}

inline schema::WorkerHello helloOf(uint32_t epoch) {
  schema::WorkerHello hello;
  hello.protocol = schema::kProtocolVersion;
  hello.epoch = epoch;
  hello.deviceCount = kDevices;
  hello.stagingBytes = kStagingBytes;
  hello.staging = {7, epoch};
  hello.stagingAddress = uint64_t{epoch} << 32;
  hello.contextAhead = epoch == 1 ? schema::kContextAheadOf + 1 : schema::kNoContextAhead;
  for (uint32_t d = 0; d < kDevices; ++d) {
    auto& device = hello.devices[d];
    std::snprintf(device.name, sizeof device.name, "device");
    std::snprintf(device.pciBusId, sizeof device.pciBusId, "%u", epoch * 16 + d);
    for (int a : {CU_DEVICE_ATTRIBUTE_WARP_SIZE, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID})
      device.attributeKnown[a] = 1;
    device.attributes[CU_DEVICE_ATTRIBUTE_WARP_SIZE] = 32;
    device.attributes[CU_DEVICE_ATTRIBUTE_PCI_BUS_ID] = static_cast<int>(epoch * 16 + d);
  }
  return hello;
}

// What both workers know: what the old one sends the new one.
struct Served {
  std::mutex mutex;
  uint64_t frames = 0, asides = 0;
  std::atomic<bool> differs{false};  // the next worker answers otherwise
  std::atomic<bool> silent{false};   // no frame is answered
  std::vector<std::string> faults;
  void check(bool good, const std::string& what) {
    if (!good) faults.push_back(what);
  }
};

// Serves frames and aside calls, and remembers what it is told. `answer` is called for the rest.
class Worker {
 public:
  Worker(std::unique_ptr<Connection> connection, uint32_t epoch, Served& served)
      : connection_(std::move(connection)), epoch_(epoch), served_(served) {}
  ~Worker() { die(); }

  void serve() {
    threads_.emplace_back([this] { serveFrames(); });
    threads_.emplace_back([this] { serveControl(); });
  }
  // The other side of the client's greeting; false: it did not come.
  bool greet(schema::WorkerHello hello, const std::vector<schema::MovedRegion>& regions) {
    const auto message = connection_->receive(Channel::call, Clock::now() + kBound);
    if (message.size() != sizeof theirs) return false;
    std::memcpy(&theirs, message.data(), sizeof theirs);
    if (theirs.lends != 0) {
      hello.words = share(words = transport::SharedMemory::create(schema::kWordsBytes));
      hello.staging = share(transport::SharedMemory::create(kStagingBytes));
    }
    send(Channel::call, &hello, sizeof hello);
    const schema::MovedRegion none;
    const auto* list = regions.empty() ? &none : regions.data();
    const size_t bytes = std::max<size_t>(regions.size(), 1) * sizeof *list;
    send(Channel::call, list, bytes);
    if (theirs.lends == 0) return true;
    const auto pages = connection_->receive(Channel::call, Clock::now() + kBound);
    if (pages.size() != bytes) return false;
    lent.resize(pages.size() / sizeof(schema::MovedRegion));
    std::memcpy(lent.data(), pages.data(), pages.size());
    if (takesNoPages) {
      connection_->close();
      return false;
    }
    send(Channel::call, list, bytes);
    return true;
  }
  // As a device that has done something.
  void write(uint64_t word, uint64_t value) {
    reinterpret_cast<std::atomic<uint64_t>*>(words->data() + schema::kWordsOffset)[word] = value;
  }
  // As a process that ends.
  void die() {
    stop_ = true;
    connection_->close();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

  template <class... T>
  void say(NoticeType type, const T&... parts) {
    std::byte bytes[256];
    size_t size = 0;
    const auto add = [&](const auto& part) {
      std::memcpy(bytes + size, &part, sizeof part);
      size += sizeof part;
    };
    add(Notice{type, epoch_, 4711});
    (add(parts), ...);
    send(Channel::control, bytes, size);
  }
  void sayMoved(uint32_t epoch) { say(NoticeType::moved, schema::MovedBody{epoch, 0}); }

  // Waits for a notice of that type, of those that were not taken before.
  bool hears(NoticeType type, uint64_t* last = nullptr, std::chrono::milliseconds bound = kBound) {
    std::unique_lock lock(mutex_);
    const bool heard = changed_.wait_for(lock, bound, [&] { return !heard_[type].empty(); });
    if (!heard) return false;
    if (last != nullptr) *last = heard_[type].front();
    heard_[type].pop_front();
    return true;
  }
  size_t heard(NoticeType type) {
    std::lock_guard lock(mutex_);
    return heard_[type].size();
  }
  Peer peer() const { return connection_->peer(); }

  schema::ClientHello theirs;
  std::vector<schema::MovedRegion> lent;
  std::shared_ptr<transport::SharedMemory> words;  // with lent memory
  std::atomic<bool> takesNoPages{false};
  std::atomic<bool> obeyed{false};  // `quiet` is not taken back before it comes
  std::atomic<bool> quiet{false};   // nothing may come

 private:
  schema::RegionName share(std::shared_ptr<transport::SharedMemory> memory) {
    const transport::Region region = connection_->share(std::move(memory));
    return {region.id, region.generation};
  }
  void send(Channel channel, const void* data, size_t bytes) {
    std::lock_guard lock(sending_);
    std::byte* room = connection_->reserve(channel, bytes, Clock::now() + kBound);
    if (room == nullptr) return;
    std::memcpy(room, data, bytes);
    connection_->commit(channel, bytes);
  }
  void serve(std::span<const std::byte> message, bool aside) {
    schema::Frame frame;
    std::memcpy(&frame, message.data(), sizeof frame);
    {
      std::lock_guard lock(served_.mutex);
      uint64_t& count = aside ? served_.asides : served_.frames;
      served_.check(!quiet, "something came behind `quiet`");
      served_.check(frame.epoch == epoch_, "a frame of another epoch");
      served_.check(frame.seq == ((aside ? schema::kAside : 0) | (count + 1)), "a frame out of order");
      ++count;
    }
    if ((frame.flags & schema::Frame::kAwait) == 0 || served_.silent) return;
    schema::Reply reply;
    reply.seq = frame.seq;
    reply.epoch = epoch_;
    reply.status = static_cast<uint32_t>(aside ? 0 : frame.context);
    if (served_.differs && epoch_ > 1) ++reply.status;
    send(Channel::call, &reply, sizeof reply);
  }
  void serveFrames() {
    while (!stop_) {
      bool over = false;
      const auto message = connection_->next(Channel::call, Clock::now() + 100ms, over);
      if (!message.empty()) serve(message, false);
      if (over) return;
    }
  }
  void serveControl() {
    while (!stop_) {
      bool over = false;
      const auto message = connection_->next(Channel::control, Clock::now() + 100ms, over);
      if (over) return;
      if (message.empty()) continue;
      Notice notice;
      std::memcpy(&notice, message.data(), sizeof notice);
      if (notice.type == NoticeType::aside) {
        serve(message.subspan(sizeof notice), true);
        continue;
      }
      uint64_t value = 0;
      if (message.size() >= sizeof notice + sizeof value)
        std::memcpy(&value, message.data() + sizeof notice, sizeof value);
      if (notice.type == NoticeType::quiet && obeyed) quiet = true;
      std::lock_guard lock(mutex_);
      heard_[notice.type].push_back(value);
      changed_.notify_all();
    }
  }

  std::unique_ptr<Connection> connection_;
  const uint32_t epoch_;
  Served& served_;
  std::atomic<bool> stop_{false};
  std::mutex sending_, mutex_;
  std::condition_variable changed_;
  std::map<NoticeType, std::deque<uint64_t>> heard_;
  std::vector<std::thread> threads_;
};

}  // namespace gpupool::client::test

namespace gpupool::client {

int sessionDevice(CUdevice device) { return device; }

struct SessionSeam {
  using Dial = std::function<std::unique_ptr<transport::Connection>(uint32_t, bool&, std::string&)>;
  SessionSeam(std::unique_ptr<transport::Connection> connection, Dial dial, bool isProtected) {
    if (isProtected) session->log_ = std::make_unique<CallLog>(CallLog::Limits{1 << 20, 1 << 20});
    session->mapsMemory_ = connection->mapsMemory();
    session->use(std::move(connection));
    session->epoch_ = 1;
    session->hello_ = std::make_unique<schema::WorkerHello>(test::helloOf(1));
    session->words_ = std::make_unique<Words>(
        session->mapsMemory_ ? transport::SharedMemory::create(schema::kWordsBytes) : nullptr);
    session->dial_ = std::move(dial);
    service = std::thread([this] { session->serviceLoop(); });
  }
  ~SessionSeam() {
    session->goodbye();
    service.join();
    test::eventually([this] { return !moving(); });
    if (!session->hostThread_) delete session;  // that thread never ends
  }
  bool moving() {
    std::lock_guard lock(session->moveMutex_);
    return session->moverRuns_;
  }
  MoveCourse::Stage stage() {
    std::lock_guard lock(session->moveMutex_);
    return session->course_.stage();
  }
  uint64_t moves() const { return session->moves_; }
  size_t watches() const {
    std::lock_guard lock(session->controlMutex_);
    return session->watches_.size();
  }
  uint64_t frames() const {
    std::lock_guard lock(session->enqueueMutex_);
    return session->seq_;
  }
  uint64_t asides() const { return session->asides_; }

  Session* session = new Session;
  std::thread service;
};

}  // namespace gpupool::client

namespace gpupool::client::test {

using Stage = MoveCourse::Stage;

// A session with its worker, the next one as it is dialled, and threads that use it all the time.
struct Pool {
  explicit Pool(int threads = 3, bool overShm = false, bool isProtected = false) : shm(overShm) {
    auto [near, far] = connected();
    old = std::make_unique<Worker>(std::move(far), 1, served);
    old->serve();
    seam = std::make_unique<SessionSeam>(
        std::move(near),
        [this](uint32_t number, bool& given, std::string& why) { return dial(number, given, why); },
        isProtected);
    for (int i = 0; i < threads; ++i) traffic.emplace_back([this, i] { use(static_cast<uint64_t>(i)); });
    if (threads != 0) traffic.emplace_back([this] { useAside(); });
  }
  ~Pool() {
    finish();
    seam.reset();
    for (const int bootstrap : bootstraps) close(bootstrap);
  }
  // The threads end, and everything has been as it must.
  void finish() {
    stop = true;
    for (auto& thread : traffic) thread.join();
    traffic.clear();
    std::lock_guard lock(served.mutex);
    for (const auto& fault : served.faults) FAIL_CHECK(fault);
    served.faults.clear();
  }

  const bool shm;
  Session& session() const { return *seam->session; }

  // Both ends: the client's, the worker's.
  std::pair<std::unique_ptr<Connection>, std::unique_ptr<Connection>> connected() const {
    if (!shm) return transport::loopbackPair({});
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) abort();
    {
      std::lock_guard guard(bootstrapping);
      bootstraps.push_back(fcntl(pair[1], F_DUPFD_CLOEXEC, 0));
    }
    std::unique_ptr<Connection> far;
    std::thread worker([&] { far = transport::acceptShm(pair[1], {}); });
    auto near = transport::connectShm(pair[0], {});
    worker.join();
    return {std::move(near), std::move(far)};
  }
  std::unique_ptr<Connection> dial(uint32_t number, bool& given, std::string& why) {
    ++dialled;
    if (onDial) onDial();
    given = reachable;
    if (!reachable || unreached != 0) {
      if (reachable) --unreached;
      why = reachable ? "no greeting" : "nobody is there";
      return nullptr;
    }
    auto [near, far] = connected();
    if (apart) near = std::make_unique<transport::test::OverNetwork>(std::move(near));
    std::lock_guard lock(dialling);
    next = std::make_unique<Worker>(std::move(far), number, served);
    next->takesNoPages = takesNoPages.load();
    schema::WorkerHello hello = helloOf(number);
    if (alter) alter(hello);
    settleDial();  // of an attempt before
    greeting = std::thread([this, hello, named = regions_] {
      if (next->greet(hello, named)) next->serve();
    });
    return std::move(near);
  }
  void settleDial() {
    if (greeting.joinable()) greeting.join();
  }

  // One thread's calls: the worker answers with the context's number, which the enumeration can hold and
  // which is no fault of a device.
  void use(uint64_t thread) {
    for (uint64_t i = 0; !stop; ++i) {
      const uint64_t token = 740 + thread * 90 + i % 90;
      const auto context = client::fromId<CUcontext>(token);
      for (uint64_t posts = i % 5; posts != 0; --posts)
        if (session().post<"cuStreamDestroy_v2">(context, CUstream{nullptr}) != CUDA_SUCCESS) return failed();
      if (session().await<"cuStreamQuery">(context, CUstream{nullptr}) != static_cast<CUresult>(token))
        return failed();
      ++calls;
    }
  }
  void useAside() {
    for (; !stop; std::this_thread::sleep_for(50us)) {
      Session::Waiter first, second;  // two at a time: the second may have to wait for a move
      CUresult status = session().ask<"sessionOutput">(first, nullptr);
      if (status == CUDA_SUCCESS) {
        status = session().ask<"sessionOutput">(second, nullptr);
        const CUresult one = session().collect<"sessionOutput">(first);
        if (status == CUDA_SUCCESS) status = session().collect<"sessionOutput">(second);
        if (one != CUDA_SUCCESS) status = one;
      }
      if (status != CUDA_SUCCESS) return failed();
      ++calls;
    }
  }
  void failed() { ++failures; }
  bool goesOn() {
    const uint64_t before = calls;
    return eventually([&] { return calls >= before + 50; }) && failures == 0;
  }

  // The old worker's part, up to `last`.
  void lead(Stage last) {
    uint64_t frames = 0, asides = 0;
    if (last == Stage::none) return;
    old->say(sayApart ? NoticeType::prepareApart : NoticeType::prepare);
    if (last == Stage::prepared) return;
    REQUIRE(old->hears(NoticeType::stopped, &frames));
    REQUIRE(eventually([&] {
      std::lock_guard lock(served.mutex);
      return served.frames == frames;
    }));
    if (last == Stage::stopped) return;
    old->obeyed = last != Stage::drained;
    old->say(mayShare ? NoticeType::drainedToShare : NoticeType::drained);
    if (last == Stage::drained) return;
    REQUIRE(old->hears(NoticeType::quiet, &asides));
    {
      std::lock_guard lock(served.mutex);
      CHECK(served.asides == asides);
      CHECK(served.frames == frames);
    }
    if (last == Stage::quiet) return;
    old->sayMoved(++epoch);
  }
  void stay() {
    old->quiet = false;
    old->say(NoticeType::stay);
  }
  // The whole course; the next worker is the old one then.
  void move() {
    lead(Stage::moved);
    REQUIRE(old->hears(NoticeType::left));
    REQUIRE(eventually([&] { return old->peer() != Peer::alive; }));
    std::lock_guard lock(dialling);
    settleDial();
    old = std::move(next);
  }

  // The old worker's process dies, and its server says so.
  void kill(const std::string& words) {
    int first;
    {
      std::lock_guard guard(bootstrapping);
      first = bootstraps.front();
    }
    transport::sayLastWords(first, words);
    old->die();
  }

  mutable std::mutex bootstrapping;     // guards the next
  mutable std::vector<int> bootstraps;  // over shm: the server's, of each worker's client
  Served served;
  std::unique_ptr<Worker> old, next;
  std::unique_ptr<SessionSeam> seam;
  std::vector<std::thread> traffic;
  std::thread greeting;
  std::mutex dialling;  // old and next change hands
  std::atomic<bool> stop{false}, reachable{true};
  std::atomic<bool> apart{false}, sayApart{false};  // the next worker is on another host; the old one says so
  std::atomic<bool> takesNoPages{false};            // the next worker cannot use what it is lent
  bool mayShare = true;                             // as the old one says
  std::atomic<uint64_t> calls{0}, failures{0};
  std::atomic<int> dialled{0}, unreached{0};  // so many more dials reach nobody
  std::function<void()> onDial;
  std::function<void(schema::WorkerHello&)> alter;
  // What the next worker names.
  void setRegions(std::vector<schema::MovedRegion> regions) {
    std::lock_guard lock(dialling);
    regions_ = std::move(regions);
  }
  uint32_t epoch = 1;

 private:
  std::vector<schema::MovedRegion> regions_;  // under dialling
};

constexpr Stage kSteps[] = {Stage::prepared, Stage::stopped, Stage::drained, Stage::quiet};

}  // namespace gpupool::client::test
