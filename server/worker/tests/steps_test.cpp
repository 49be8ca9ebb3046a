#include "server/worker/steps.h"

#include <algorithm>
#include <vector>

#include "catch.h"

using namespace std::chrono_literals;
using gpupool::server::Steps;

TEST_CASE("calls are held back and let through in turn, and held back for ever longer") {
  const Steps::Clock::time_point began{};
  Steps steps(began, 30s);
  const auto due = [&](std::chrono::milliseconds after) { return steps.due(began + after); };
  CHECK_FALSE(due(0ms));
  CHECK_FALSE(due(249ms));
  CHECK(due(250ms));
  CHECK(due(499ms));
  CHECK_FALSE(due(500ms));
  CHECK_FALSE(due(1499ms));
  CHECK(due(1500ms));
  CHECK(due(1999ms));
  CHECK_FALSE(due(2s));
  CHECK_FALSE(due(5999ms));
  CHECK(due(6s));
  CHECK_FALSE(due(7s));
  CHECK(due(23s));
  CHECK_FALSE(due(25s));
}

TEST_CASE("where there is little time, calls go sooner") {
  const Steps::Clock::time_point began{};
  Steps steps(began, 200ms);
  CHECK_FALSE(steps.due(began + 24ms));
  CHECK(steps.due(began + 25ms));
  CHECK_FALSE(steps.due(began + 50ms));
  Steps none(began, -1s);
  CHECK_FALSE(none.due(began));
  CHECK(none.due(began + 10ms));
}

TEST_CASE("the device is looked at briefly between calls, and now and then for longer, in no rhythm") {
  const Steps::Clock::time_point began{};
  Steps steps(began, 30s);
  CHECK(steps.next(began, true) == began + 250ms);
  CHECK(steps.next(began, false) == began + 250ms);
  const auto now = began + 300ms;
  CHECK(steps.next(now, false) == now + 100ms);  // whether one may go is asked again
  std::vector<Steps::Clock::duration> looks;
  for (int i = 0; i < 4096; ++i, steps.gone()) looks.push_back(steps.next(now, true) - now);
  CHECK(steps.count() == 4096);
  const auto count = [&](Steps::Clock::duration look) {
    return std::count(looks.begin(), looks.end(), look);
  };
  CHECK(count(2ms) > 1900);
  CHECK(count(64ms) > 100);
  CHECK(count(64ms) < 160);
  // At whatever place of a program's round the device is idle, it is looked at for long soon.
  for (size_t round = 2; round < 40; ++round)
    for (size_t place = 0; place < round; ++place) {
      size_t longer = 0;
      for (size_t i = place; i < std::min(looks.size(), place + 100 * round); i += round)
        longer += looks[i] >= 16ms ? 1 : 0;
      CHECK(longer > 0);
    }
}
