#include "server/worker/disturbance.h"

#include <algorithm>
#include <memory>
#include <random>

#include "base/log.h"

namespace gpupool::server {
namespace {

constexpr unsigned kMost = 6;  // of one session: a run stays short
constexpr std::chrono::seconds kBound{30};

struct Plan {
  std::mt19937_64 random;
  uint64_t frame = 0, next = 0;
  unsigned done = 0;
};

// Most programs of the tests send some tens to some thousands of frames.
uint64_t draw(Plan& plan) {
  const uint64_t most = uint64_t{30} << plan.done;
  return 1 + plan.random() % most;
}

}  // namespace

void disturb(Session& session, Suspender& suspender, uint64_t seed, bool moves, std::function<void()> ask) {
  auto plan = std::make_shared<Plan>();
  // A session that has moved goes on where its plan was.
  const auto moved = static_cast<unsigned>(std::max<uint64_t>(session.start().epoch, 1) - 1);
  plan->random.seed(seed + moved);
  plan->done = std::min(moved, kMost);
  plan->next = draw(*plan);
  session.beforeFrames([plan, &suspender, moves, ask = std::move(ask)] {
    if (++plan->frame < plan->next || plan->done == kMost) return;
    // With a capture open the next frames must come first.
    if (suspender.captureOpen()) return;
    ++plan->done;
    const uint64_t seen = suspender.carriedOut();
    ask();
    if (moves) {
      plan->next = plan->frame + draw(*plan);
      return;
    }
    const bool ran = suspender.awaitCycle(seen, kBound);
    GPUPOOL_INFO("disturbed before frame %llu: %s", static_cast<unsigned long long>(plan->frame),
                 ran ? "suspended and resumed" : "no answer");
    plan->next = plan->frame + draw(*plan);
  });
}

}  // namespace gpupool::server
