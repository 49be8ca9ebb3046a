#include "server/worker/disturbance.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "base/log.h"

namespace gpupool::server {
namespace {

constexpr unsigned kMostSuspensions = 6, kMostMoves = 3;  // of one session: a run stays short
// Frames before each of a program's moves, at least, and fewer than twice as many: short ones have a dozen.
constexpr uint64_t kBetweenMoves[kMostMoves] = {4, 8, 64};
constexpr unsigned kAnywhere = 8;  // the first one comes at up to 2^7 times as many
// Deaths: frames before the checkpoint is asked for, and from there to the end, are fewer than these.
constexpr unsigned kMostDeaths = 2, kBeforeAsking = 48, kBeforeDeath = 24, kMostOfBeginning = 64;
constexpr std::chrono::seconds kKeptBound{2};
constexpr unsigned kMostTries = 4;
constexpr std::chrono::seconds kBound{30};
constexpr std::chrono::seconds kStopBound{2};
constexpr std::chrono::milliseconds kLookForStop{1};

struct Plan {
  std::mt19937_64 random;
  uint64_t frame = 0, next = 0;
  unsigned done = 0;
};

// Most programs of the tests send some tens to some thousands of frames, and can be suspended at any of them.
uint64_t draw(Plan& plan, bool moves) {
  if (!moves) return 1 + plan.random() % (uint64_t{30} << plan.done);
  const uint64_t least = kBetweenMoves[std::min<size_t>(plan.done, kMostMoves - 1)];
  return least + plan.random() % least;
}

// Until the program has stopped for a move, or it is known that there is none: a short program would have
// ended before. It stops although this frame is not served.
void awaitStop(Session& session, const Suspender& suspender, uint64_t seen, uint64_t stops) {
  const auto until = std::chrono::steady_clock::now() + kStopBound;
  while (session.clientStops() == stops && suspender.carriedOut() == seen && !session.stopping() &&
         std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(kLookForStop);
}

}  // namespace

void disturb(Session& session, Suspender& suspender, uint64_t seed, bool moves, bool anywhere,
             std::function<void()> ask) {
  auto plan = std::make_shared<Plan>();
  // A session that has moved goes on where its plan was.
  const auto moved = static_cast<unsigned>(std::max<uint64_t>(session.start().epoch, 1) - 1);
  plan->random.seed(seed + moved);
  const unsigned most = moves ? kMostMoves : kMostSuspensions;
  plan->done = std::min(moved, most);
  plan->next = draw(*plan, moves);
  if (anywhere && plan->done == 0) plan->next <<= plan->random() % kAnywhere;
  session.beforeFrames([plan, &session, &suspender, moves, most, ask = std::move(ask)] {
    if (++plan->frame < plan->next || plan->done == most) return;
    // With a capture open the next frames must come first.
    if (suspender.captureOpen()) return;
    ++plan->done;
    const uint64_t seen = suspender.carriedOut(), stops = session.clientStops();
    ask();
    plan->next = plan->frame + draw(*plan, moves);
    if (moves) return awaitStop(session, suspender, seen, stops);
    const auto until = std::chrono::steady_clock::now() + kBound;
    bool ran = false;
    // A device that waits for this frame, or one behind it, is not idle before.
    while (!ran && !session.stopping() && !session.gate().lets() && std::chrono::steady_clock::now() < until)
      ran = suspender.awaitCycle(seen, kLookForStop);
    GPUPOOL_INFO("disturbed before frame %llu: %s", static_cast<unsigned long long>(plan->frame),
                 ran ? "suspended and resumed" : "not yet suspended and resumed");
  });
}

namespace {

struct Death {
  uint64_t frame = 0, ask = 0, end = 0;  // before these it asks, and ends; 0: not known yet
  uint64_t carriedOut = 0, stops = 0, kept = 0;
  bool waited = false;
  unsigned tries = 0;  // checkpoints that were not made
};

}  // namespace

void disturbByDeath(Session& session, Suspender& suspender, uint64_t seed, std::function<void()> ask) {
  const uint64_t epoch = std::max<uint64_t>(session.start().epoch, 1);
  if (epoch > kMostDeaths) return;
  auto plan = std::make_shared<Death>();
  auto random = std::make_shared<std::mt19937_64>(seed + epoch - 1);
  // A worker that took a dead one's place is first sent again what that had served.
  plan->ask = 2 + (*random)() % kBeforeAsking + (epoch - 1) * 2 * kBeforeDeath;
  // Or it dies of that: the checkpoint is the one that it began with.
  if (epoch > 1 && (*random)() % 2 == 0) plan->end = 1 + (*random)() % kBeforeDeath;
  session.beforeFrames([plan, random, &session, &suspender, ask = std::move(ask)] {
    ++plan->frame;
    // The program goes on while its checkpoint is sent: a short one would have ended before.
    for (const auto until = std::chrono::steady_clock::now() + kBound;
         suspender.sendsPages() && !session.stopping() && std::chrono::steady_clock::now() < until;)
      std::this_thread::sleep_for(kLookForStop);
    if (plan->end != 0 && plan->frame >= plan->end) ::kill(::getpid(), SIGKILL);
    if (plan->frame < plan->ask || plan->end != 0) return;
    if (plan->frame == plan->ask || plan->stops == UINT64_MAX) {
      plan->stops = UINT64_MAX;
      if (suspender.captureOpen()) return;  // the frames behind end it
      plan->carriedOut = suspender.carriedOut();
      plan->stops = session.clientStops();
      plan->kept = session.checkpointsKept();
      ask();
      return awaitStop(session, suspender, plan->carriedOut, plan->stops);
    }
    const auto isKept = [&] { return session.checkpointsKept() != plan->kept; };
    // The checkpoint is written, and is kept in a moment.
    if (suspender.carriedOut() != plan->carriedOut && !std::exchange(plan->waited, true)) {
      const auto until = std::chrono::steady_clock::now() + kKeptBound;
      while (!isKept() && !session.stopping() && std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(kLookForStop);
    }
    if (isKept())
      plan->end = plan->frame + 1 + (*random)() % kBeforeDeath;
    else if (plan->waited && ++plan->tries < kMostTries)
      *plan = {.frame = plan->frame, .ask = plan->frame + 1, .tries = plan->tries};
  });
}

void disturbBeginning(Session& session, uint64_t seed) {
  const uint64_t epoch = std::max<uint64_t>(session.start().epoch, 1);
  if (epoch > kMostDeaths) return;
  std::mt19937_64 random(seed + epoch - 1);
  const uint64_t end = 1 + random() % kMostOfBeginning;
  session.beforeFrames([end, frame = uint64_t{0}]() mutable {
    if (++frame == end) ::kill(::getpid(), SIGKILL);
  });
}

}  // namespace gpupool::server
