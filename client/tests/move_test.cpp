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

using namespace gpupool;
using namespace std::chrono_literals;
using client::Session;
using client::Transfers;
using client::Words;
using schema::Notice;
using schema::NoticeType;
using transport::Channel;
using transport::Clock;
using transport::Connection;
using transport::Peer;

namespace {

constexpr auto kBound = 20s;  // of what must happen
constexpr uint32_t kDevices = 2;
constexpr uint64_t kStagingBytes = 1 << 20;

template <class Done>
bool eventually(Done done, std::chrono::milliseconds bound = kBound) {
  for (const auto end = Clock::now() + bound; Clock::now() < end; std::this_thread::sleep_for(200us))
    if (done()) return true;
  return done();
}

schema::WorkerHello helloOf(uint32_t epoch) {
  schema::WorkerHello hello;
  hello.protocol = schema::kProtocolVersion;
  hello.epoch = epoch;
  hello.deviceCount = kDevices;
  hello.stagingBytes = kStagingBytes;
  hello.staging = {7, epoch};
  hello.stagingAddress = uint64_t{epoch} << 32;
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
  bool greet(const schema::WorkerHello& hello, const std::vector<schema::MovedRegion>& regions) {
    const auto message = connection_->receive(Channel::call, Clock::now() + kBound);
    if (message.size() != sizeof theirs) return false;
    std::memcpy(&theirs, message.data(), sizeof theirs);
    send(Channel::call, &hello, sizeof hello);
    const schema::MovedRegion none;
    const auto* list = regions.empty() ? &none : regions.data();
    send(Channel::call, list, std::max<size_t>(regions.size(), 1) * sizeof *list);
    return true;
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
  std::atomic<bool> obeyed{false};  // `quiet` is not taken back before it comes
  std::atomic<bool> quiet{false};   // nothing may come

 private:
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

}  // namespace

namespace gpupool::client {

int sessionDevice(CUdevice device) { return device; }

struct SessionSeam {
  using Dial = std::function<std::unique_ptr<transport::Connection>(uint32_t, std::string&)>;
  SessionSeam(std::unique_ptr<transport::Connection> connection, Dial dial, bool isProtected) {
    if (isProtected) session->log_ = std::make_unique<CallLog>(CallLog::Limits{1 << 20, 1 << 20});
    session->mapsMemory_ = connection->mapsMemory();
    session->use(std::move(connection));
    session->epoch_ = 1;
    session->hello_ = std::make_unique<schema::WorkerHello>(helloOf(1));
    session->words_ = std::make_unique<Words>(nullptr);
    session->dial_ = std::move(dial);
    service = std::thread([this] { session->serviceLoop(); });
  }
  ~SessionSeam() {
    session->goodbye();
    service.join();
    eventually([this] { return !moving(); });
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
  size_t watches() const { return session->watches_.size(); }
  uint64_t frames() const {
    std::lock_guard lock(session->enqueueMutex_);
    return session->seq_;
  }
  uint64_t asides() const { return session->asides_; }

  Session* session = new Session;
  std::thread service;
};

}  // namespace gpupool::client

using client::SessionSeam;
using Stage = client::MoveCourse::Stage;

namespace {

// A session with its worker, the next one as it is dialled, and threads that use it all the time.
struct Pool {
  explicit Pool(int threads = 3, bool overShm = false, bool isProtected = false) : shm(overShm) {
    auto [near, far] = connected();
    old = std::make_unique<Worker>(std::move(far), 1, served);
    old->serve();
    seam = std::make_unique<SessionSeam>(
        std::move(near), [this](uint32_t number, std::string& why) { return dial(number, why); },
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
  std::unique_ptr<Connection> dial(uint32_t number, std::string& why) {
    ++dialled;
    if (onDial) onDial();
    if (!reachable) {
      why = "nobody is there";
      return nullptr;
    }
    auto [near, far] = connected();
    std::lock_guard lock(dialling);
    next = std::make_unique<Worker>(std::move(far), number, served);
    schema::WorkerHello hello = helloOf(number);
    if (alter) alter(hello);
    settleDial();  // of an attempt before
    greeting = std::thread([this, hello] {
      if (next->greet(hello, regions)) next->serve();
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
    old->say(NoticeType::prepare);
    if (last == Stage::prepared) return;
    REQUIRE(old->hears(NoticeType::stopped, &frames));
    REQUIRE(eventually([&] {
      std::lock_guard lock(served.mutex);
      return served.frames == frames;
    }));
    if (last == Stage::stopped) return;
    old->obeyed = last != Stage::drained;
    old->say(NoticeType::drained);
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
  std::atomic<uint64_t> calls{0}, failures{0};
  std::atomic<int> dialled{0};
  std::function<void()> onDial;
  std::function<void(schema::WorkerHello&)> alter;
  std::vector<schema::MovedRegion> regions;
  uint32_t epoch = 1;
};

constexpr Stage kSteps[] = {Stage::prepared, Stage::stopped, Stage::drained, Stage::quiet};

}  // namespace

TEST_CASE("a session goes from worker to worker, and its threads notice nothing") {
  Pool pool(3, GENERATE(false, true));
  REQUIRE(pool.goesOn());
  for (uint64_t i = 1; i <= 20; ++i) {
    pool.move();
    CHECK(pool.seam->moves() == i);
    CHECK(pool.old->theirs.epoch == i + 1);
    CHECK(pool.old->theirs.spaces == 1);
    REQUIRE(pool.goesOn());
  }
  // The program keeps its devices; the staging memory is the new worker's.
  CHECK(std::string(pool.session().hello().devices[1].pciBusId) == "17");
  CHECK(pool.session().hello().stagingAddress == uint64_t{21} << 32);
  pool.finish();
}

TEST_CASE("a session that stays goes on, whenever it is told") {
  Pool pool;
  for (int round = 0; round < 3; ++round)
    for (const Stage step : kSteps) {
      pool.lead(step);
      pool.stay();
      REQUIRE(pool.goesOn());
      // What was said before the session was told to stay.
      while (pool.old->hears(NoticeType::stopped, nullptr, 20ms)) {
      }
      while (pool.old->hears(NoticeType::quiet, nullptr, 1ms)) {
      }
      pool.old->quiet = false;
    }
  pool.finish();
  CHECK(pool.seam->moves() == 0);
  CHECK(pool.dialled == 0);
}

TEST_CASE("a session is told to stay while it asks for its new worker, or that one does not greet") {
  Pool pool;
  std::atomic<bool> go{false};
  pool.onDial = [&] { eventually([&] { return go.load(); }); };
  pool.lead(Stage::moved);
  REQUIRE(eventually([&] { return pool.dialled == 1; }));
  pool.stay();
  REQUIRE(eventually([&] { return pool.seam->stage() == Stage::ending; }));
  go = true;
  REQUIRE(pool.goesOn());
  pool.settleDial();
  CHECK(pool.old->heard(NoticeType::left) == 0);
  CHECK(pool.old->heard(NoticeType::stays) == 0);
  pool.epoch = 1;
  pool.onDial = nullptr;
  pool.move();
  CHECK(pool.goesOn());
  pool.finish();
}

TEST_CASE("a session that is held has left before its next worker is there, and goes on when it is") {
  Pool pool;
  REQUIRE(pool.goesOn());
  std::atomic<bool> restored{false};
  pool.onDial = [&] { eventually([&] { return restored.load(); }); };
  pool.lead(Stage::quiet);
  pool.old->say(NoticeType::moved, schema::MovedBody{++pool.epoch, 1});
  REQUIRE(pool.old->hears(NoticeType::left));
  REQUIRE(eventually([&] { return pool.dialled == 1; }));
  pool.old->die();
  const uint64_t before = pool.calls;
  std::this_thread::sleep_for(100ms);
  CHECK(pool.calls <= before + pool.traffic.size());  // an answer may have come that a thread has not seen
  CHECK(pool.failures == 0);
  restored = true;
  REQUIRE(eventually([&] { return pool.seam->moves() == 1; }));
  {
    std::lock_guard lock(pool.dialling);
    pool.settleDial();
    pool.old = std::move(pool.next);
  }
  REQUIRE(pool.goesOn());
  pool.onDial = nullptr;
  pool.move();
  REQUIRE(pool.goesOn());
  pool.finish();
}

TEST_CASE("a session that was held and is nowhere ends") {
  Pool pool;
  REQUIRE(pool.goesOn());
  pool.reachable = false;
  pool.lead(Stage::quiet);
  pool.old->say(NoticeType::moved, schema::MovedBody{++pool.epoch, 1});
  REQUIRE(pool.old->hears(NoticeType::left));
  pool.old->die();
  CHECK(eventually([&] { return pool.failures > 0; }));
  pool.finish();
}

TEST_CASE(
    "a session whose worker has died goes on from its checkpoint, and what it has sent since is made again") {
  const bool isProtected = GENERATE(true, false);
  Pool pool(0, true, isProtected);
  const auto ask = [&](uint64_t token) {
    return pool.session().await<"cuCtxGetCacheConfig">(client::fromId<CUcontext>(token),
                                                       static_cast<CUfunc_cache*>(nullptr));
  };
  const auto call = [&](uint64_t token = 740) { return ask(token) == static_cast<CUresult>(token); };
  REQUIRE(call());
  pool.lead(Stage::quiet);  // a checkpoint
  pool.stay();
  REQUIRE(eventually([&] { return !pool.seam->moving(); }));
  const uint64_t frames = pool.seam->frames(), asides = pool.seam->asides();
  uint64_t lacks = 0;
  bool goesOn = isProtected;
  std::string words = std::string(transport::kFailoverWords) + "the worker was killed";
  std::thread waiting;
  std::atomic<CUresult> answer{CUDA_ERROR_NOT_READY};
  SECTION("nothing was sent since") {}
  SECTION("calls were sent since") {
    for (uint64_t token = 741; token < 750; ++token) REQUIRE(call(token));
  }
  SECTION("an aside call was sent since") {
    REQUIRE(pool.session().await<"sessionOutput">(CUcontext{nullptr}) == CUDA_SUCCESS);
    REQUIRE(call());
  }
  SECTION("they answer otherwise than before") {
    REQUIRE(call());
    pool.served.differs = true;
    goesOn = false;
  }
  SECTION("one of them cannot be made again") {
    REQUIRE(pool.session().post<"sessionHostFunction">(CUcontext{nullptr}, CUstream{nullptr}, uint64_t{1},
                                                       0u) == CUDA_SUCCESS);
    goesOn = false;
  }
  SECTION("the program waits for an answer") {
    pool.served.silent = true;
    waiting = std::thread([&] { answer = ask(755); });
    REQUIRE(eventually([&] { return pool.seam->frames() == frames + 1; }));
  }
  SECTION("the checkpoint is of another moment") {
    lacks = 1;
    goesOn = false;
  }
  SECTION("nobody is there") {
    pool.reachable = false;
    goesOn = false;
  }
  SECTION("it is not restored") {
    words = "the worker was killed";
    goesOn = false;
  }
  pool.alter = [&](schema::WorkerHello& hello) {
    hello.lastFrame = frames - lacks;
    hello.lastAside = asides;
    std::lock_guard lock(pool.served.mutex);
    pool.served.frames = hello.lastFrame;
    pool.served.asides = hello.lastAside;
    pool.served.silent = false;
  };
  const uint64_t sent = pool.seam->frames(), sentAside = pool.seam->asides();
  pool.kill(words);
  REQUIRE(eventually(
      [&] { return goesOn ? pool.seam->moves() == 1 : pool.session().words().sticky() != CUDA_SUCCESS; }));
  if (waiting.joinable()) waiting.join();
  if (goesOn) {
    CHECK((answer == CUDA_ERROR_NOT_READY || answer == static_cast<CUresult>(755)));
    CHECK(eventually([&] {
      std::lock_guard lock(pool.served.mutex);
      return pool.served.frames == sent && pool.served.asides == sentAside;
    }));
  } else {
    CHECK(answer != static_cast<CUresult>(755));
  }
  CHECK(call() == goesOn);
  CHECK((pool.dialled == 0) == (words == "the worker was killed" || !isProtected));
  CHECK(pool.seam->moves() == (goesOn ? 1 : 0));
  pool.settleDial();
}

TEST_CASE("a session whose new worker cannot be reached, or does not fit, stays and says so") {
  Pool pool;
  const auto staysPut = [&] {
    pool.epoch = 1;
    pool.lead(Stage::quiet);
    pool.old->quiet = false;  // it goes on right behind its answer
    pool.old->sayMoved(2);
    REQUIRE(pool.old->hears(NoticeType::stays));
    pool.settleDial();
    REQUIRE(pool.goesOn());
    CHECK(pool.seam->moves() == 0);
  };
  SECTION("unreachable") { pool.reachable = false; }
  SECTION("another epoch") {
    pool.alter = [](auto& hello) { hello.epoch = 7; };
  }
  SECTION("another number of devices") {
    pool.alter = [](auto& hello) { hello.deviceCount = 1; };
  }
  SECTION("another device") {
    pool.alter = [](auto& hello) { hello.devices[1].name[0] = 'D'; };
  }
  SECTION("another attribute") {
    pool.alter = [](auto& hello) { hello.devices[0].attributes[CU_DEVICE_ATTRIBUTE_WARP_SIZE] = 64; };
  }
  SECTION("other staging memory") {
    pool.alter = [](auto& hello) { hello.stagingBytes *= 2; };
  }
  SECTION("pinned memory that the session does not have") { pool.regions = {{0x1000, {3, 1}}}; }
  SECTION("refused") {
    pool.alter = [](auto& hello) { hello.status = CUDA_ERROR_OUT_OF_MEMORY; };
  }
  staysPut();
  staysPut();
  pool.reachable = true;
  pool.alter = nullptr;
  pool.regions.clear();
  pool.epoch = 1;
  pool.old->quiet = false;
  pool.move();
  CHECK(pool.goesOn());
  pool.finish();
}

TEST_CASE("a session does not go where the old worker named another epoch than the next") {
  Pool pool;
  pool.epoch = 6;
  pool.lead(Stage::quiet);
  pool.old->quiet = false;
  pool.old->sayMoved(7);
  REQUIRE(pool.old->hears(NoticeType::stays));
  CHECK(pool.goesOn());
  CHECK(pool.dialled == 0);
  pool.finish();
}

TEST_CASE("a worker that dies before another one has the session ends it, at once and for every thread") {
  for (const Stage step : {Stage::none, Stage::prepared, Stage::stopped, Stage::drained, Stage::quiet}) {
    Pool pool;
    pool.lead(step);
    pool.old->die();
    REQUIRE(eventually([&] { return pool.failures == 4; }, 10s));
    CHECK(pool.session().sticky() == CUDA_ERROR_DEVICE_UNAVAILABLE);
    CHECK(eventually([&] { return !pool.seam->moving(); }));
    CHECK(pool.seam->moves() == 0);
    pool.finish();
  }
}

TEST_CASE("a worker that dies when the next one has the session is not missed") {
  Pool pool;
  pool.onDial = [&] { pool.old->die(); };
  SECTION("the next one is there") {
    pool.lead(Stage::moved);
    CHECK(pool.goesOn());
    CHECK(pool.seam->moves() == 1);
  }
  SECTION("the next one cannot be reached") {
    pool.reachable = false;
    pool.lead(Stage::moved);
    REQUIRE(eventually([&] { return pool.failures == 4; }, 10s));
    CHECK(pool.session().sticky() == CUDA_ERROR_DEVICE_UNAVAILABLE);
  }
  pool.settleDial();
  pool.finish();
}

TEST_CASE("a host function runs, and uses the session, while it is being drained") {
  Pool pool(1);
  std::atomic<bool> began{false}, go{false};
  static std::atomic<bool>* flags[2];
  flags[0] = &began, flags[1] = &go;
  Session::HostFunction function;
  function.function = [](void* session) {
    *flags[0] = true;
    eventually([] { return flags[1]->load(); });
    const Transfers::Inside named(static_cast<Session*>(session)->transfers(), Transfers::named);
  };
  function.data = &pool.session();
  std::atomic<bool> published{false};
  function.publish = [&] { published = pool.session().awaitAsides() == CUDA_SUCCESS; };
  const uint64_t id = pool.session().addHostFunction(function);
  pool.old->say(NoticeType::callback, schema::CallbackBody{id, 0, 0});
  REQUIRE(eventually([&] { return began.load(); }));
  pool.lead(Stage::stopped);
  const uint64_t word = pool.session().words().take();
  std::thread watcher([&] { pool.session().waitWord(word, 1); });
  CHECK(pool.old->hears(NoticeType::watch));  // the control channel goes on
  go = true;
  CHECK(pool.old->hears(NoticeType::callbackDone));
  CHECK(published);
  pool.old->say(NoticeType::drained);
  REQUIRE(pool.old->hears(NoticeType::quiet));
  pool.old->sayMoved(++pool.epoch);
  REQUIRE(pool.old->hears(NoticeType::left));
  pool.settleDial();
  // Who waits for a word is watched for by the new worker.
  uint64_t watched = 0;
  REQUIRE(pool.next->hears(NoticeType::watch, &watched));
  CHECK(watched == word);
  pool.next->say(NoticeType::words, schema::WordUpdate{word, 1});
  watcher.join();
  CHECK(pool.goesOn());
  pool.finish();
}

TEST_CASE("watches that were reached are forgotten") {
  Pool pool(0);
  const uint64_t word = pool.session().words().take();
  for (uint64_t i = 1; i <= 1000; ++i) {
    pool.session().watch(word, i);
    pool.session().words().set(word, i);
  }
  CHECK(pool.seam->watches() < 100);
}

TEST_CASE("threads that look again and again sleep while the session moves") {
  Pool pool(0);
  pool.lead(Stage::quiet);
  std::atomic<bool> woke{false};
  std::thread napper([&] {
    pool.session().nap(1us);
    woke = true;
  });
  std::this_thread::sleep_for(700ms);
  CHECK_FALSE(woke);
  pool.stay();
  CHECK(eventually([&] { return woke.load(); }));
  napper.join();
}

TEST_CASE("a program may end in the middle of a move") {
  for (const Stage step : {Stage::prepared, Stage::stopped, Stage::drained, Stage::quiet, Stage::moved}) {
    Pool pool;
    std::atomic<bool> go{false};
    pool.onDial = [&] { eventually([&] { return go.load(); }); };
    pool.session().setPrinting();  // there may be output to fetch
    pool.lead(step);
    if (step == Stage::moved) REQUIRE(eventually([&] { return pool.dialled == 1; }));
    const auto start = Clock::now();
    pool.session().goodbye();
    CHECK(Clock::now() - start < 4s);
    go = true;
    CHECK(eventually([&] { return pool.failures == 4; }, 10s));
    CHECK(eventually([&] { return !pool.seam->moving(); }));
    CHECK(eventually([&] { return pool.old->peer() != Peer::alive; }));
    if (step > Stage::drained) CHECK(pool.old->heard(NoticeType::goodbye) == 0);
    pool.settleDial();
    pool.finish();
  }
}

TEST_CASE("notices of a move out of their order are passed over") {
  Pool pool;
  pool.old->say(NoticeType::drained);
  pool.old->sayMoved(2);
  pool.old->say(NoticeType::stay);
  REQUIRE(pool.goesOn());
  CHECK(pool.old->heard(NoticeType::stopped) == 0);
  pool.old->say(NoticeType::prepare);
  pool.old->say(NoticeType::prepare);
  pool.old->sayMoved(2);
  REQUIRE(pool.old->hears(NoticeType::stopped));
  pool.old->sayMoved(2);
  pool.stay();
  REQUIRE(pool.goesOn());
  CHECK(pool.old->heard(NoticeType::stopped) == 0);
  CHECK(pool.dialled == 0);
  pool.old->say(NoticeType::moved);  // shorter than it must be
  pool.move();
  CHECK(pool.goesOn());
  pool.finish();
}

TEST_CASE("a move begins right behind one that has failed") {
  Pool pool;
  for (int i = 0; i < 30; ++i) {
    pool.old->say(NoticeType::prepare);
    pool.stay();
  }
  pool.old->say(NoticeType::prepare);
  uint64_t last = 0;
  // Answers to those that were taken back may come first: the session is still from the last one on.
  REQUIRE(eventually([&] { return pool.seam->stage() == Stage::stopped; }));
  while (pool.old->hears(NoticeType::stopped, &last, 50ms)) {
  }
  pool.old->say(NoticeType::drained);
  REQUIRE(pool.old->hears(NoticeType::quiet));
  pool.old->sayMoved(++pool.epoch);
  REQUIRE(pool.old->hears(NoticeType::left));
  pool.settleDial();
  CHECK(pool.goesOn());
  pool.finish();
}

TEST_CASE("the new worker names all pinned memory, and the layers above go over together") {
  static std::vector<schema::MovedRegion> seen;
  static std::atomic<int> prepared, finished;
  static std::atomic<bool> refuses;
  seen.clear();
  prepared = finished = 0;
  refuses = false;
  static constexpr Session::MoveHooks hooks{
      [] { return size_t{2}; },
      [](Connection&, std::span<const schema::MovedRegion> regions, std::string& why) {
        ++prepared;
        seen.assign(regions.begin(), regions.end());
        if (refuses) why = "something is missing";
        return !refuses;
      },
      [] { ++finished; }};
  Pool pool;
  pool.session().hookMoves(hooks);
  SECTION("all") {
    pool.regions = {{0x1000, {3, 1}}, {0x2000, {4, 1}}};
    pool.move();
    CHECK(finished == 1);
    REQUIRE(seen.size() == 2);
    CHECK(seen[1].address == 0x2000);
    CHECK(seen[1].region.id == 4);
  }
  SECTION("not all") {
    pool.regions = {{0x1000, {3, 1}}};
    pool.lead(Stage::quiet);
    pool.old->quiet = false;
    pool.old->sayMoved(2);
    CHECK(pool.old->hears(NoticeType::stays));
    CHECK(prepared == 0);
  }
  SECTION("they refuse") {
    refuses = true;
    pool.regions = {{0x1000, {3, 1}}, {0x2000, {4, 1}}};
    pool.lead(Stage::quiet);
    pool.old->quiet = false;
    pool.old->sayMoved(2);
    CHECK(pool.old->hears(NoticeType::stays));
    CHECK(finished == 0);
  }
  CHECK(pool.goesOn());
  pool.settleDial();
  pool.finish();
}

TEST_CASE("a transfer and its frame stay on one side of a move") {
  Pool pool;
  Transfers& transfers = pool.session().transfers();
  std::atomic<bool> leave{false}, inside{false};
  std::thread copier([&] {
    const Transfers::Inside named(transfers, Transfers::named);
    inside = true;
    eventually([&] { return leave.load(); });
    const Transfers::Inside again(transfers, Transfers::named);  // though the way in is closed
    const Transfers::Inside alone(transfers, Transfers::alone);
    pool.session().post<"cuStreamDestroy_v2">(CUcontext{nullptr}, CUstream{nullptr});
  });
  REQUIRE(eventually([&] { return inside.load(); }));
  pool.old->say(NoticeType::prepare);
  CHECK_FALSE(pool.old->hears(NoticeType::stopped, nullptr, 300ms));
  CHECK(pool.goesOn());
  std::atomic<bool> late{false}, lone{false};
  std::thread second([&] {
    const Transfers::Inside named(transfers, Transfers::named);
    late = true;
  });
  leave = true;
  copier.join();
  REQUIRE(pool.old->hears(NoticeType::stopped));
  std::thread carrier([&] {
    const Transfers::Inside alone(transfers, Transfers::alone);
    lone = true;
  });
  CHECK(eventually([&] { return lone.load(); }));
  CHECK_FALSE(late);
  pool.stay();
  CHECK(eventually([&] { return late.load(); }));
  second.join();
  carrier.join();
  CHECK(pool.goesOn());
  pool.finish();
}

TEST_CASE("a transfer that does not end keeps the session where it is, and nobody for ever") {
  Pool pool;
  Transfers& transfers = pool.session().transfers();
  auto held = std::make_unique<Transfers::Inside>(transfers, Transfers::named);
  pool.old->say(NoticeType::prepare);
  CHECK_FALSE(pool.old->hears(NoticeType::stopped, nullptr, 300ms));
  std::atomic<bool> entered{false};
  std::thread other([&] {
    const Transfers::Inside named(transfers, Transfers::named);
    entered = true;
  });
  pool.stay();
  CHECK(eventually([&] { return entered.load(); }));
  other.join();
  held.reset();
  CHECK(pool.goesOn());
  pool.finish();
}

TEST_CASE("a child that is forked in the middle of a move lets go of both workers") {
  Pool pool(0);
  std::atomic<bool> go{false};
  pool.onDial = [&] { eventually([&] { return go.load(); }); };
  pool.lead(Stage::moved);
  REQUIRE(eventually([&] { return pool.dialled == 1; }));
  const pid_t child = fork();
  if (child == 0) {
    pool.session().abandon();
    _exit(0);
  }
  int status = -1;
  REQUIRE(eventually([&] { return waitpid(child, &status, WNOHANG) == child; }));
  CHECK(status == 0);
  go = true;
  REQUIRE(pool.old->hears(NoticeType::left));
  pool.settleDial();
}
