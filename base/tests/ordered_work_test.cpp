// Work beside the caller's thread: its results come in order, no more is under way than was said, and what
// fails or ends early leaves nothing behind. What has to happen in one order is held back by a gate.
#include "base/ordered_work.h"

#include <atomic>
#include <future>
#include <memory>
#include <set>
#include <stdexcept>

#include "catch.h"

using namespace gpupool;

namespace {

struct Gate {
  void open() { opened.set_value(); }
  void pass() const { open_.wait(); }

 private:
  std::promise<void> opened;
  std::shared_future<void> open_ = opened.get_future().share();
};

}  // namespace

TEST_CASE("ordered work: results come in the order in which the work was given") {
  const size_t threads = GENERATE(0, 1, 3, 8);
  const size_t slots = GENERATE(1, 2, 5);
  constexpr int kAll = 500;
  std::vector<int> numbers(slots), squares(slots);
  OrderedWork work(slots, threads, [&](size_t slot) {
    if (numbers[slot] % 7 == 0) std::this_thread::yield();
    squares[slot] = numbers[slot] * numbers[slot];
    return std::string();
  });
  int given = 0, got = 0;
  CHECK(work.empty());
  while (got < kAll) {
    if (given < kAll && !work.full()) {
      numbers[work.next()] = given++;
      work.give();
      continue;
    }
    REQUIRE(given - got <= static_cast<int>(slots));
    REQUIRE(work.await() == "");
    REQUIRE(squares[work.oldest()] == got * got);
    ++got;
    work.drop();
  }
  CHECK(work.empty());
}

TEST_CASE(
    "ordered work: one that ends early waits for its turn, and its slot stays the caller's until then") {
  Gate gate;
  std::promise<void> second;
  OrderedWork work(3, 2, [&](size_t slot) {
    if (slot == 0) gate.pass();
    if (slot == 1) second.set_value();
    return std::to_string(slot);
  });
  work.give();
  work.give();
  second.get_future().wait();
  gate.open();
  CHECK(work.await() == "0");
  CHECK(work.await() == "0");
  CHECK(work.oldest() == 0);
  CHECK_FALSE(work.full());
  work.give();
  CHECK(work.full());  // the first one's slot is not free yet
  work.drop();
  CHECK_FALSE(work.full());
  CHECK(work.next() == 0);
  CHECK(work.await() == "1");
  work.drop();
  CHECK(work.await() == "2");
  work.drop();
  CHECK(work.empty());
}

TEST_CASE("ordered work: so many threads work at a time, and they begin when they are needed") {
  constexpr size_t kThreads = 3;
  Gate gate;
  std::atomic<size_t> working{0};
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::promise<void> all;
  OrderedWork work(8, kThreads, [&](size_t) {
    {
      std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
    }
    if (++working == kThreads) all.set_value();
    gate.pass();
    return std::string();
  });
  while (!work.full()) work.give();
  all.get_future().wait();
  CHECK(working == kThreads);
  gate.open();
  for (; !work.empty(); work.drop()) CHECK(work.await() == "");
  CHECK(working == 8);
  threads.erase(std::this_thread::get_id());
  CHECK(threads.size() == kThreads);
}

TEST_CASE("ordered work: several threads take the pieces of one slot, which is done when all of them are") {
  constexpr size_t kThreads = 3, kPieces = 8;
  Gate gate;
  std::atomic<size_t> working{0}, ended{0};
  std::promise<void> all;
  OrderedWork work(2, kThreads, [&](size_t slot, size_t piece) -> std::string {
    if (slot == 1) return piece == 0 ? "" : std::to_string(piece);
    if (++working == kThreads) all.set_value();
    gate.pass();
    ++ended;
    return "";
  });
  work.give(kPieces);
  work.give(kPieces);
  CHECK(work.full());
  all.get_future().wait();  // of one slot
  gate.open();
  CHECK(work.await() == "");
  CHECK(ended == kPieces);
  work.drop();
  CHECK(work.await() == "1");  // the first of those that have failed
  work.drop();
  CHECK(work.empty());
}

TEST_CASE("ordered work: pieces come in order, whatever their number") {
  const size_t threads = GENERATE(0, 1, 4);
  std::vector<std::vector<size_t>> done(3);
  OrderedWork work(done.size(), threads, [&](size_t slot, size_t piece) {
    done[slot][piece] += piece + 1;
    return std::string();
  });
  size_t given = 0, got = 0;
  while (got < 200) {
    if (given < 200 && !work.full()) {
      done[work.next()].assign(given++ % 5 + 1, 0);
      work.give(done[work.next()].size());
      continue;
    }
    REQUIRE(work.await() == "");
    const auto& pieces = done[work.oldest()];
    REQUIRE(pieces.size() == got++ % 5 + 1);
    for (size_t i = 0; i < pieces.size(); ++i) REQUIRE(pieces[i] == i + 1);
    work.drop();
  }
}

TEST_CASE(
    "ordered work: the caller's thread works where there is one beside it, and not where there are more") {
  const size_t threads = GENERATE(1, 2);
  Gate gate;
  std::vector<std::promise<void>> began(threads + 1);
  std::thread::id last;
  OrderedWork work(threads + 1, threads, [&](size_t slot) {
    if (slot == threads) last = std::this_thread::get_id();
    began[slot].set_value();
    if (slot != threads) gate.pass();
    return std::string();
  });
  for (size_t i = 0; i < threads; ++i) {
    work.give();
    began[i].get_future().wait();
  }
  work.give();
  // All threads are held until the caller's has done the last one, or has not for a while.
  std::thread opener([&, lastBegan = began[threads].get_future()] {
    lastBegan.wait_for(threads == 1 ? std::chrono::seconds(60) : std::chrono::milliseconds(100));
    gate.open();
  });
  for (; !work.empty(); work.drop()) CHECK(work.await() == "");
  opener.join();
  CHECK((last == std::this_thread::get_id()) == (threads == 1));
}

TEST_CASE("ordered work: what fails is told in its turn, with an exception's text, and the others are done") {
  const size_t threads = GENERATE(0, 2);
  OrderedWork work(5, threads, [](size_t slot) -> std::string {
    if (slot == 3) throw std::runtime_error("thrown");
    return slot == 1 ? "wrong" : "";
  });
  while (!work.full()) work.give();
  for (const char* why : {"", "wrong", "", "thrown", ""}) {
    CHECK(work.await() == why);
    work.drop();
  }
}

TEST_CASE("ordered work: its end waits for what has begun, and nothing begins any more") {
  Gate gate;
  std::promise<void> began;
  std::atomic<int> begun{0}, ended{0};
  auto work = std::make_unique<OrderedWork>(4, 1, [&](size_t) {
    if (begun++ == 0) began.set_value();
    gate.pass();
    ++ended;
    return std::string();
  });
  while (!work->full()) work->give();
  began.get_future().wait();
  std::thread ending([&] { work.reset(); });
  // Whether it has come to wait cannot be seen from here; in both cases what has begun has to end.
  std::this_thread::yield();
  gate.open();
  ending.join();
  CHECK(begun == ended);
  CHECK(ended >= 1);
}

TEST_CASE("ordered work: an end with nothing given, or with all taken, is an end") {
  {
    OrderedWork none(2, 2, [](size_t) { return std::string("never"); });
  }
  OrderedWork work(2, 2, [](size_t) { return std::string(); });
  for (int i = 0; i < 3; ++i) {
    work.give();
    CHECK(work.await() == "");
    work.drop();
  }
}
