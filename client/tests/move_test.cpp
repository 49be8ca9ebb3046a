// Sessions that move, stay, are held or lose their worker.
#include "client/tests/move_bench.h"

using namespace gpupool;
using namespace gpupool::client::test;

TEST_CASE("a session goes from worker to worker, and its threads notice nothing") {
  Pool pool(3, GENERATE(false, true));
  REQUIRE(pool.goesOn());
  for (uint64_t i = 1; i <= 20; ++i) {
    pool.move();
    CHECK(pool.seam->moves() == i);
    CHECK(pool.old->theirs.epoch == i + 1);
    CHECK(pool.old->theirs.spaces == 1);
    CHECK(pool.old->theirs.contextAhead == schema::kContextAheadOf + 1);  // as the first worker said
    REQUIRE(pool.goesOn());
  }
  // The program keeps its devices; the staging memory is the new worker's.
  CHECK(std::string(pool.session().hello().devices[1].pciBusId) == "17");
  CHECK(pool.session().hello().stagingAddress == uint64_t{21} << 32);
  pool.finish();
}

TEST_CASE("a session leaves the host of its program, and goes on over a network") {
  Pool pool(3, true);
  static std::atomic<int> brought, finished;
  brought = finished = 0;
  // Nothing is sent between the two, and the names are the new worker's.
  static client::Session* moving = nullptr;
  moving = &pool.session();
  static constexpr client::Session::MoveHooks hooks{
      [] { return size_t{0}; },
      [](transport::Connection&, std::span<const schema::MovedRegion>, bool, std::string&) { return true; },
      [](std::shared_ptr<transport::SharedMemory>) { finished += moving->mapsMemory() ? 100 : 1; },
      [] { brought += finished == 1 ? 1 : 100; }};
  pool.session().hookMoves(hooks);
  REQUIRE(pool.goesOn());
  CHECK(pool.session().mapsMemory());
  auto& words = pool.session().words();
  const uint64_t word = words.take();
  words.set(word, 41);
  std::thread waiter([&] { CHECK(pool.session().waitWord(word, 42) == CUDA_SUCCESS); });
  REQUIRE(eventually([&] { return pool.seam->watches() == 1; }));
  pool.apart = pool.sayApart = true;
  pool.move();
  CHECK(pool.seam->moves() == 1);
  CHECK_FALSE(pool.session().mapsMemory());
  CHECK(eventually([] { return brought == 1; }));
  REQUIRE(pool.goesOn());
  CHECK(words.value(word) == 41);
  CHECK(pool.old->hears(NoticeType::watch));  // the new worker is asked for what is waited for
  pool.old->say(NoticeType::words, schema::WordUpdate{word, 42});
  waiter.join();
  pool.sayApart = false;
  pool.move();
  CHECK(pool.seam->moves() == 2);
  CHECK(brought == 1);
  REQUIRE(pool.goesOn());
  pool.finish();
}

TEST_CASE("a session whose next worker is on another host, though nobody said so, stays") {
  Pool pool(3, true);
  REQUIRE(pool.goesOn());
  pool.apart = true;
  pool.lead(Stage::quiet);
  pool.old->quiet = false;  // it goes on as soon as it has said so
  pool.old->sayMoved(++pool.epoch);
  REQUIRE(pool.old->hears(NoticeType::stays));
  REQUIRE(pool.goesOn());
  pool.settleDial();
  CHECK(pool.session().mapsMemory());
  CHECK(pool.seam->moves() == 0);
  pool.finish();
}

namespace {

// What the layers above have: two pieces of pinned memory, of which the second one's name is its address.
struct Above {
  static inline std::atomic<int> settled, finished, sharing;
  static inline std::map<uint64_t, transport::Region> arrived;
  static constexpr client::Session::MoveHooks hooks{
      [] { return size_t{2}; },
      [](transport::Connection&, std::span<const schema::MovedRegion>, bool lends, std::string&) {
        sharing += lends ? 1 : 0;
        return true;
      },
      [](std::shared_ptr<transport::SharedMemory> staging) { finished += staging != nullptr ? 100 : 1; },
      [] {},
      nullptr,
      [](uint64_t address, transport::Region& region, uint64_t&) {
        region = {static_cast<uint32_t>(address), 1};
        return true;
      },
      [](const std::map<uint64_t, transport::Region>& pinned, std::string&) {
        arrived = pinned;
        return true;
      },
      [] { ++settled; }};
  static void over(Pool& pool) {
    settled = finished = sharing = 0;
    arrived.clear();
    pool.session().hookMoves(hooks);
    pool.setRegions({{0x1000, {3, 1}}, {0x2000, {4, 1}}});
  }
};

}  // namespace

TEST_CASE("a session comes back to the host of its program, and lends its new worker what it has") {
  Pool pool(3, true);
  Above::over(pool);
  pool.apart = pool.sayApart = true;
  pool.move();
  REQUIRE_FALSE(pool.session().mapsMemory());
  CHECK(Above::finished == 1);
  CHECK(Above::settled == 0);
  auto& words = pool.session().words();
  const uint64_t word = words.take(), slow = words.take();
  words.set(word, 41);
  std::thread waiter([&] { CHECK(pool.session().waitWord(slow, 7) == CUDA_SUCCESS); });
  REQUIRE(eventually([&] { return pool.seam->watches() == 1; }));
  pool.apart = pool.sayApart = false;
  pool.move();
  CHECK(pool.session().mapsMemory());
  CHECK(Above::finished == 101);
  CHECK(Above::settled == 1);
  CHECK(Above::sharing == 1);
  REQUIRE(pool.old->lent.size() == 2);
  CHECK(pool.old->lent[1].address == 0x2000);
  CHECK(pool.old->lent[1].region.id == 0x2000);
  CHECK(Above::arrived.at(0x2000) == transport::Region{4, 1});
  REQUIRE(pool.goesOn());
  CHECK(words.value(word) == 41);
  pool.old->write(word, 42);  // and tells nobody
  CHECK(words.reached(word, 42));
  pool.old->write(slow, 7);
  waiter.join();
  // Again, both ways.
  pool.apart = pool.sayApart = true;
  pool.move();
  CHECK_FALSE(pool.session().mapsMemory());
  pool.apart = pool.sayApart = false;
  pool.move();
  CHECK(pool.session().mapsMemory());
  pool.move();  // to a worker that has adopted its memory
  CHECK(pool.session().mapsMemory());
  CHECK(pool.old->lent.empty());
  CHECK(words.value(word) == 42);
  REQUIRE(pool.goesOn());
  pool.finish();
}

TEST_CASE(
    "a session that was to leave its host goes on over shared memory, if its next worker is there, too") {
  Pool pool(3, true);
  Above::over(pool);
  pool.sayApart = true;
  pool.move();
  CHECK(pool.session().mapsMemory());
  CHECK(pool.old->lent.size() == 2);
  CHECK(Above::settled == 0);  // nothing is mirrored
  REQUIRE(pool.goesOn());
  pool.finish();
}

TEST_CASE("a session stays apart from its new worker's memory where the old one says so") {
  Pool pool(3, true);
  Above::over(pool);
  pool.mayShare = false;
  pool.apart = pool.sayApart = true;
  pool.move();
  pool.sayApart = false;
  pool.move();
  CHECK(pool.old->theirs.lends == 0);
  CHECK_FALSE(pool.session().mapsMemory());
  pool.apart = false;  // reached in a way that it was not asked for
  pool.lead(Stage::quiet);
  pool.old->quiet = false;
  pool.old->sayMoved(++pool.epoch);
  REQUIRE(pool.old->hears(NoticeType::stays));
  REQUIRE(pool.goesOn());
  pool.settleDial();
  CHECK_FALSE(pool.session().mapsMemory());
  pool.finish();
}

TEST_CASE("a session whose new worker cannot use its memory stays, and goes over a network the next time") {
  Pool pool(3, true);
  Above::over(pool);
  pool.apart = pool.sayApart = true;
  pool.move();
  pool.apart = pool.sayApart = false;
  pool.takesNoPages = true;
  pool.lead(Stage::quiet);
  pool.old->quiet = false;
  pool.old->sayMoved(++pool.epoch);
  REQUIRE(pool.old->hears(NoticeType::stays));
  REQUIRE(pool.goesOn());
  pool.settleDial();
  CHECK_FALSE(pool.session().mapsMemory());
  pool.takesNoPages = false;
  pool.apart = true;
  --pool.epoch;
  pool.move();
  CHECK(pool.old->theirs.lends == 0);
  CHECK_FALSE(pool.session().mapsMemory());
  REQUIRE(pool.goesOn());
  pool.finish();
}

TEST_CASE("a session that is to stop lets frames go one by one when it is asked to") {
  Pool pool(3);
  pool.lead(Stage::stopped);
  const auto served = [&] {
    std::lock_guard lock(pool.served.mutex);
    return pool.served.frames;
  };
  uint64_t before = served(), frames = 0, gone = 0;
  for (int i = 0; i < 50; ++i) {
    pool.old->say(NoticeType::step);
    REQUIRE(pool.old->hears(NoticeType::stopped, &frames));
    REQUIRE(eventually([&] { return served() == frames; }));
    gone += frames - before;
    before = frames;
  }
  CHECK(gone > 0);
  CHECK(gone < 50 * 50);  // at most one of each thread, unless that is kept from running for a while
  pool.old->say(NoticeType::drained);
  uint64_t asides = 0;
  REQUIRE(pool.old->hears(NoticeType::quiet, &asides));
  CHECK(served() == frames);
  pool.old->sayMoved(++pool.epoch);
  REQUIRE(pool.old->hears(NoticeType::left));
  pool.settleDial();
  CHECK(pool.goesOn());
  pool.finish();
}

TEST_CASE("a session that is asked for a frame, and sends none, says that it has stopped all the same") {
  Pool pool(0);
  pool.lead(Stage::stopped);
  for (int i = 0; i < 3; ++i) {
    uint64_t frames = 1;
    pool.old->say(NoticeType::step);
    REQUIRE(pool.old->hears(NoticeType::stopped, &frames));
    CHECK(frames == 0);
  }
  pool.old->say(NoticeType::step);
  pool.stay();  // before it has stopped again, or behind that
  REQUIRE(eventually([&] { return !pool.seam->moving(); }));
  while (pool.old->hears(NoticeType::stopped, nullptr, 100ms)) {
  }
  pool.move();
  CHECK(pool.seam->moves() == 1);
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
    waiting = std::thread(
        [&] { (void)pool.session().await<"sessionSharedQuery">(CUcontext{nullptr}, CUevent{nullptr}); });
    REQUIRE(eventually([&] { return pool.seam->frames() == frames + 1; }));
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
  SECTION("the next one has died before it is reached") { pool.unreached = 1; }
  SECTION("so have all that follow") {
    pool.unreached = 100;
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
  SECTION("pinned memory that the session does not have") { pool.setRegions({{0x1000, {3, 1}}}); }
  SECTION("refused") {
    pool.alter = [](auto& hello) { hello.status = CUDA_ERROR_OUT_OF_MEMORY; };
  }
  staysPut();
  staysPut();
  pool.reachable = true;
  pool.alter = nullptr;
  pool.setRegions({});
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
