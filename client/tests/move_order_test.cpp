// Moves beside whatever else a session does: host functions, watches, transfers, forks, notices out of order.
#include "client/tests/move_bench.h"

using namespace gpupool;
using namespace gpupool::client::test;
using client::Session;
using client::Transfers;

TEST_CASE("a host function runs, and uses the session, while it is being drained") {
  Pool pool(1);
  static std::atomic<bool> began, go;
  began = go = false;
  Session::HostFunction function;
  function.function = [](void* session) {
    began = true;
    eventually([] { return go.load(); });
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
      [](Connection&, std::span<const schema::MovedRegion> regions, bool, std::string& why) {
        ++prepared;
        seen.assign(regions.begin(), regions.end());
        if (refuses) why = "something is missing";
        return !refuses;
      },
      [](std::shared_ptr<transport::SharedMemory>) { ++finished; }};
  Pool pool;
  pool.session().hookMoves(hooks);
  SECTION("all") {
    pool.setRegions({{0x1000, {3, 1}}, {0x2000, {4, 1}}});
    pool.move();
    CHECK(finished == 1);
    REQUIRE(seen.size() == 2);
    CHECK(seen[1].address == 0x2000);
    CHECK(seen[1].region.id == 4);
  }
  SECTION("not all") {
    pool.setRegions({{0x1000, {3, 1}}});
    pool.lead(Stage::quiet);
    pool.old->quiet = false;
    pool.old->sayMoved(2);
    CHECK(pool.old->hears(NoticeType::stays));
    CHECK(prepared == 0);
  }
  SECTION("they refuse") {
    refuses = true;
    pool.setRegions({{0x1000, {3, 1}}, {0x2000, {4, 1}}});
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
