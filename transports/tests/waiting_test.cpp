#include "transports/waiting.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "catch.h"
#include "pace.h"

using namespace gpupool::transport;
using namespace std::chrono_literals;

TEST_CASE("a futex sleep ends at its deadline, by a wake-up, or at once if nobody is armed") {
  ArmWord word{0};
  auto before = Clock::now();
  futexSleep(word, kForever);  // not armed
  CHECK(Clock::now() - before < 300ms * gpupool::test::busy());
  word = 1;
  before = Clock::now();
  futexSleep(word, before + 40ms);
  CHECK(Clock::now() - before >= 40ms);
  word = 1;
  before = Clock::now();
  futexSleep(word, kForever);  // bounded, whatever the other side does
  CHECK(Clock::now() - before < 2 * kLongestSleep);
  std::atomic<bool> done{false};
  std::thread waiter([&] { waitFor(word, false, kForever, [&] { return done.load(); }); });
  std::this_thread::sleep_for(20ms);
  done = true;
  before = Clock::now();
  futexWake(word);
  waiter.join();
  CHECK(Clock::now() - before < 300ms * gpupool::test::busy());
}

TEST_CASE("waitFor says at the deadline whether it got what it waited for") {
  ArmWord word{0};
  auto before = Clock::now();
  CHECK_FALSE(waitFor(word, false, before + 30ms, [] { return false; }));
  CHECK(Clock::now() - before >= 30ms);
  CHECK(word == 0);
  int asked = 0;
  CHECK(waitFor(word, false, Clock::now(), [&] { return ++asked == 1; }));
  CHECK(asked == 1);
}

TEST_CASE("a bound counts the time in which its process ran, not that in which it was stopped") {
  TimeLeft brief(60ms);
  CHECK(brief.any());
  std::this_thread::sleep_for(70ms);
  CHECK_FALSE(brief.any());
  CHECK_FALSE(brief.any());

  const pid_t child = fork();
  if (child == 0) {
    TimeLeft time(1500ms);
    for (int i = 0; i < 3; ++i) {
      raise(SIGSTOP);
      time.left();
    }
    const auto rest = time.left();
    const auto before = Clock::now();
    while (time.any()) std::this_thread::sleep_for(time.step());
    _exit(rest >= 1500ms - 4 * 2 * TimeLeft::kLongestStep && Clock::now() - before >= rest - 1ms ? 0 : 1);
  }
  int status = 0;
  for (int i = 0; i < 3; ++i) {
    REQUIRE(waitpid(child, &status, WUNTRACED) == child);
    REQUIRE(WIFSTOPPED(status));
    std::this_thread::sleep_for(i == 0 ? 1100ms : 300ms);
    kill(child, SIGCONT);
  }
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}
