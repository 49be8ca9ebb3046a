#include "server/front/suspension.h"

#include <algorithm>

#include "base/log.h"

namespace gpupool::server {
namespace {

constexpr uint32_t kDisturbDrainMs = 5'000;  // some tests' kernels wait for a later call
constexpr uint32_t kSettleDrainMs = 30'000;  // for orders whose own the earlier life knew

kj::Exception orderFailure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(text));
}

[[noreturn]] void failOrder(const std::string& text) { kj::throwFatalException(orderFailure(text)); }

// Not an immediate promise, of which gcc 12 says that it may be destroyed uninitialized.
kj::Promise<Suspended> answer(Suspended done) {
  return kj::evalLater([done = std::move(done)] { return done; });
}

// The sessions of which that is true.
template <class Condition>
std::vector<uint64_t> those(const std::map<uint64_t, Outcome>& outcomes, Condition condition) {
  std::vector<uint64_t> list;
  for (const auto& [number, outcome] : outcomes)
    if (!outcome.gone && condition(outcome)) list.push_back(number);
  return list;
}

std::map<uint64_t, Outcome> byNumber(const std::vector<uint64_t>& numbers, kj::Array<Outcome> list) {
  std::map<uint64_t, Outcome> outcomes;
  for (size_t i = 0; i < numbers.size(); ++i) outcomes[numbers[i]] = std::move(list[i]);
  return outcomes;
}

}  // namespace

Suspension::Suspension(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, Settings settings)
    : timer_(timer),
      leases_(leases),
      sessions_(sessions),
      settings_(std::move(settings)),
      lanes_(*this),
      tasks_(*this) {
  sessions_.onDisturb([this](const Id& lease, uint64_t number) {
    if (!settings_.disturb) return;
    tasks_.add(queue<void>(lease, [this, lease, number] { return disturbNow(lease, number); }));
  });
}

Suspension::~Suspension() noexcept {
  sessions_.onDisturb([](const Id&, uint64_t) {});
}

template <class Result>
kj::Promise<Result> Suspension::queue(const Id& lease, kj::Function<kj::Promise<Result>()> work) {
  std::erase_if(last_, [this](const auto& entry) { return !leases_.contains(entry.first); });
  return lanes_.queue<Result>(lease, kj::mv(work));
}

kj::Promise<Suspended> Suspension::suspend(const Id& lease, uint32_t drainMs) {
  return queue<Suspended>(lease, [this, lease, drainMs] { return suspendNow(lease, drainMs, false); });
}

kj::Promise<Suspended> Suspension::putAside(const Id& lease, uint32_t drainMs) {
  return queue<Suspended>(lease, [this, lease, drainMs] { return suspendNow(lease, drainMs, true); });
}

kj::Promise<void> Suspension::resume(const Id& lease) {
  return queue<void>(lease, [this, lease] { return resumeNow(lease); });
}

kj::Promise<void> Suspension::bringBack(const Id& lease) {
  return queue<void>(lease, [this, lease] { return bringBackNow(lease); });
}

// ---- suspend ----

kj::Promise<Suspended> Suspension::suspendNow(Id lease, uint32_t drainMs, bool aside) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr) failOrder("lease " + lease.text() + " is not known here, or is ending");
  if (grant->suspended) {
    if (!aside) leases_.pause(lease);
    return answer(*grant->suspended);
  }
  if (grant->target) failOrder("the lease is moving to other devices: end that first (gpupool migrate)");
  if (!settings_.refusal.empty()) failOrder(settings_.refusal);
  if (const std::string lent = sessions_.lentText(lease); !lent.empty())
    failOrder("the lease stays: " + lent);
  leases_.pause(lease, aside);
  return awaitBeginnings(lease)
      .then([this, lease, drainMs] { return suspendAll(sessions_.numbers(lease), drainMs); })
      .then([this, lease,
             drainMs](Outcomes outcomes) { return concludeSuspend(lease, drainMs, std::move(outcomes)); },
            [this, lease](kj::Exception&& exception) -> kj::Promise<Suspended> {
              leases_.unpause(lease);
              return kj::mv(exception);
            });
}

// A session whose holder has been told that it is open is one of those to be suspended.
kj::Promise<void> Suspension::awaitBeginnings(const Id& lease) {
  return timer_.timeoutAfter(settings_.beginBound, sessions_.begun(lease))
      .catch_([](kj::Exception&& exception) {
        if (exception.getType() != kj::Exception::Type::OVERLOADED)
          kj::throwFatalException(kj::mv(exception));
        failOrder("a session of the lease is beginning, and does not get on");
      });
}

kj::Promise<Suspended> Suspension::concludeSuspend(Id lease, uint32_t drainMs, Outcomes outcomes) {
  if (leases_.admissible(lease) == nullptr) failOrder("the lease ended while it was being suspended");
  Suspended total;
  std::string why = firstError(outcomes);
  if (why.empty()) why = sum(lease, outcomes, total);
  if (why.empty()) why = sessions_.lentText(lease);  // by a session that has ended meanwhile
  if (why.empty()) {
    GPUPOOL_INFO("lease %s: suspended, %llu bytes moved", lease.text().c_str(),
                 static_cast<unsigned long long>(total.movedBytes));
    leases_.setSuspended(lease, total);
    last_[lease] = {std::move(outcomes), drainMs};
    return answer(std::move(total));
  }
  GPUPOOL_WARNING("lease %s cannot be suspended: %s", lease.text().c_str(), why.c_str());
  return takeBack(outcomes).then([this, lease, why]() -> kj::Promise<Suspended> {
    leases_.unpause(lease);
    return orderFailure(why);
  });
}

kj::Promise<Suspension::Outcomes> Suspension::suspendAll(const std::vector<uint64_t>& numbers,
                                                         uint32_t drainMs) {
  auto connections = kj::heapArrayBuilder<kj::Promise<kj::AutoCloseFd>>(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i)
    connections.add(kj::evalNow([&] { return settings_.copier(); }));
  return kj::joinPromises(connections.finish())
      .then([this, numbers, drainMs](kj::Array<kj::AutoCloseFd> connections) {
        const auto bound = settings_.bound + drainMs * kj::MILLISECONDS;
        auto orders = kj::heapArrayBuilder<kj::Promise<Outcome>>(numbers.size());
        for (size_t i = 0; i < numbers.size(); ++i)
          orders.add(sessions_.suspend(numbers[i], drainMs, kj::mv(connections[i]), bound));
        return kj::joinPromises(orders.finish());
      })
      .then([numbers](kj::Array<Outcome> list) { return byNumber(numbers, kj::mv(list)); });
}

kj::Promise<void> Suspension::takeBack(const Outcomes& outcomes) {
  return resumeAll(those(outcomes, [](const Outcome& one) { return one.suspended; }))
      .then([this](const Outcomes& back) {
        const std::string why = firstError(back);
        return end(those(back, [](const Outcome& one) { return one.suspended || !one.error.empty(); }),
                   "the session's memory could not be brought back to its devices: " + why);
      });
}

std::string Suspension::firstError(const Outcomes& outcomes) const {
  for (const auto& [number, outcome] : outcomes)
    if (!outcome.gone && !outcome.error.empty()) return sessions_.describe(number) + ": " + outcome.error;
  return "";
}

std::string Suspension::sum(const Id& lease, const Outcomes& outcomes, Suspended& total) const {
  const Grant* grant = leases_.admissible(lease);
  total.kept.assign(grant->devices.size(), 0);
  for (const auto& [number, outcome] : outcomes) {
    if (outcome.gone) continue;
    for (size_t place = 0; place < total.kept.size(); ++place) {
      const Device& device = leases_.devices()[grant->devices[place].index];
      const uint64_t kept = outcome.facts.kept.at(place);
      if (kept > device.memoryBytes - total.kept[place])
        return sessions_.describe(number) + ": its worker answered nonsense: more memory is kept on device " +
               std::to_string(device.ordinal) + " than it has";
      total.kept[place] += kept;
    }
    total.movedBytes += outcome.facts.movedBytes;
    total.drainMs = std::max(total.drainMs, outcome.facts.drainMs);
    total.moveMs = std::max(total.moveMs, outcome.facts.moveMs);
  }
  return "";
}

// ---- resume ----

kj::Promise<void> Suspension::resumeNow(Id lease) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr) failOrder("lease " + lease.text() + " is not known here, or is ending");
  if (!grant->suspended) return kj::READY_NOW;
  if (grant->held) failOrder("the lease is held in files: gpupool restore brings it back");
  if (!grant->aside)
    if (const auto why = leases_.crowded(lease)) failOrder("the lease cannot be resumed: " + *why);
  if (const auto missing = leases_.reserveAgain(lease)) {
    if (!leases_.overcommitted()) failOrder("the lease cannot be resumed: " + *missing);
    leases_.pause(lease, true);
    return kj::READY_NOW;
  }
  return resumeReserved(lease);
}

kj::Promise<void> Suspension::bringBackNow(Id lease) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr || !grant->aside || !grant->suspended) return kj::READY_NOW;
  if (const auto missing = leases_.reserveAgain(lease)) failOrder(*missing);
  return resumeReserved(lease);
}

kj::Promise<void> Suspension::resumeReserved(Id lease) {
  return resumeAll(sessions_.numbers(lease)).then([this, lease](const Outcomes& outcomes) {
    return concludeResume(lease, outcomes);
  });
}

kj::Promise<void> Suspension::concludeResume(Id lease, const Outcomes& outcomes) {
  if (leases_.admissible(lease) == nullptr) failOrder("the lease ended while it was being resumed");
  const std::string why = firstError(outcomes);
  if (!why.empty()) return suspendAgain(lease, outcomes, why);
  GPUPOOL_INFO("lease %s: resumed", lease.text().c_str());
  leases_.unpause(lease);
  last_.erase(lease);
  return kj::READY_NOW;
}

kj::Promise<Suspension::Outcomes> Suspension::resumeAll(const std::vector<uint64_t>& numbers) {
  auto orders = kj::heapArrayBuilder<kj::Promise<Outcome>>(numbers.size());
  for (const uint64_t number : numbers) orders.add(sessions_.resume(number, settings_.bound));
  return kj::joinPromises(orders.finish()).then([numbers](kj::Array<Outcome> list) {
    return byNumber(numbers, kj::mv(list));
  });
}

kj::Promise<void> Suspension::suspendAgain(Id lease, const Outcomes& outcomes, const std::string& why) {
  GPUPOOL_WARNING("lease %s cannot be resumed: %s", lease.text().c_str(), why.c_str());
  const auto back = those(outcomes, [](const Outcome& one) { return !one.suspended && one.error.empty(); });
  const auto away = those(outcomes, [](const Outcome& one) { return one.suspended; });
  // Neither here nor there, by its own word.
  auto lost = end(those(outcomes, [](const Outcome& one) { return !one.suspended && !one.error.empty(); }),
                  "the session's memory could not be brought back to its devices: " + why);
  const uint32_t drainMs = last_[lease].drainMs;
  auto again = lost.then([this, back, drainMs] { return suspendAll(back, drainMs); })
                   .catch_([back](kj::Exception&& exception) {
                     Outcomes none;
                     for (const uint64_t number : back)
                       none[number].error = exception.getDescription().cStr();
                     return none;
                   });
  return again.then([this, lease, away, why](const Outcomes& again) -> kj::Promise<void> {
    if (leases_.admissible(lease) == nullptr) failOrder("the lease ended while it was being resumed");
    Outcomes all = again;
    for (const uint64_t number : away) all[number] = last_[lease].outcomes[number];
    Suspended total;
    std::string error = firstError(again);
    if (error.empty()) error = sum(lease, all, total);
    if (error.empty()) {
      leases_.setSuspended(lease, total);
      last_[lease].outcomes = std::move(all);
      return orderFailure("the lease cannot be resumed: " + why);
    }
    // It runs, without those that do not come back: better than to lose all.
    GPUPOOL_ERROR(
        "lease %s can neither be resumed (%s) nor suspended again (%s): it runs on without %zu of "
        "its sessions",
        lease.text().c_str(), why.c_str(), error.c_str(), away.size());
    auto ended = end(away, "the session's memory could not be brought back to its devices: " + why);
    return ended.then([this, again] { return takeBack(again); }).then([this, lease] {
      leases_.unpause(lease);
      last_.erase(lease);
    });
  });
}

kj::Promise<void> Suspension::end(const std::vector<uint64_t>& numbers, const std::string& reason) {
  auto gone = kj::heapArrayBuilder<kj::Promise<void>>(numbers.size());
  for (const uint64_t number : numbers) gone.add(sessions_.endOne(number, reason));
  return kj::joinPromises(gone.finish());
}

// ---- of an earlier life ----

kj::Promise<void> Suspension::settle(const Id& lease) {
  return queue<void>(lease, [this, lease] { return settleNow(lease); });
}

kj::Promise<void> Suspension::settleNow(Id lease) {
  const std::vector<uint64_t> numbers = sessions_.numbers(lease);
  auto answers = kj::heapArrayBuilder<kj::Promise<Outcome>>(numbers.size());
  for (const uint64_t number : numbers)
    answers.add(sessions_.settled(number, settings_.bound + kSettleDrainMs * kj::MILLISECONDS));
  return kj::joinPromises(answers.finish()).then([this, lease, numbers](kj::Array<Outcome> list) {
    return concludeSettle(lease, byNumber(numbers, kj::mv(list)));
  });
}

kj::Promise<void> Suspension::concludeSettle(Id lease, Outcomes outcomes) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr) return kj::READY_NOW;
  const auto living = those(outcomes, [](const Outcome&) { return true; });
  const auto suspended = those(outcomes, [](const Outcome& one) { return one.suspended; });
  Suspended total;
  const bool all = grant->paused && !grant->suspended && !living.empty() &&
                   suspended.size() == living.size() && sum(lease, outcomes, total).empty();
  if (all) {
    leases_.setSuspended(lease, std::move(total));
    GPUPOOL_INFO("lease %s: suspended by an order of this server's earlier life", lease.text().c_str());
  }
  if (grant->suspended) {
    last_[lease] = {std::move(outcomes), kSettleDrainMs};
    return kj::READY_NOW;
  }
  return takeBack(outcomes).then([this, lease] {
    Grant* grant = leases_.admissible(lease);
    if (grant == nullptr || !grant->paused) return;
    GPUPOOL_INFO("lease %s: runs, behind an order of this server's earlier life", lease.text().c_str());
    leases_.unpause(lease);
  });
}

// ---- for tests ----

kj::Promise<void> Suspension::disturbNow(Id lease, uint64_t number) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr || grant->paused) return kj::READY_NOW;
  auto cycle = kj::evalNow([&] {
    if (!settings_.refusal.empty()) failOrder(settings_.refusal);
    return suspendAll({number}, kDisturbDrainMs);
  });
  return cycle.then(
      [this](const Outcomes& outcomes) {
        if (const std::string why = firstError(outcomes); !why.empty())
          GPUPOOL_WARNING("disturbing a session: %s", why.c_str());
        return takeBack(outcomes);
      },
      [this, number](kj::Exception&& exception) {
        GPUPOOL_WARNING("disturbing a session: %s", exception.getDescription().cStr());
        // It was not suspended, and waits for an order.
        return resumeAll({number}).ignoreResult();
      });
}

void Suspension::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("suspension: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
