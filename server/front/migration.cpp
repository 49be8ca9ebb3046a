#include "server/front/migration.h"

#include <sys/socket.h>

#include <algorithm>

#include "base/log.h"

namespace gpupool::server {
namespace {

constexpr uint32_t kDisturbMoveDrainMs = 5'000;  // some tests' kernels wait for a later call

kj::Exception moveFailure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(text));
}

[[noreturn]] void failMove(const std::string& text) { kj::throwFatalException(moveFailure(text)); }

// The old worker's end and the next one's.
std::pair<kj::AutoCloseFd, kj::AutoCloseFd> stateSocket() {
  int ends[2];
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
  return {kj::AutoCloseFd(ends[0]), kj::AutoCloseFd(ends[1])};
}

}  // namespace

Migration::Migration(LeaseTable& leases, SessionTable& sessions, Suspension& suspension, WorkerPool& pool,
                     const WorkerStarts& starts, Settings settings)
    : leases_(leases),
      sessions_(sessions),
      suspension_(suspension),
      pool_(pool),
      starts_(starts),
      settings_(std::move(settings)),
      tasks_(*this) {
  if (!settings_.disturb) return;
  sessions_.onDisturb([this](const Id& lease, uint64_t number) {
    tasks_.add(
        suspension_.lanes().queue<void>(lease, [this, lease, number] { return disturbNow(lease, number); }));
  });
}

Migration::~Migration() noexcept {
  if (settings_.disturb) sessions_.onDisturb([](const Id&, uint64_t) {});
}

kj::Promise<Migrated> Migration::migrate(const Id& lease, uint32_t drainMs) {
  return suspension_.lanes().queue<Migrated>(lease,
                                             [this, lease, drainMs] { return migrateNow(lease, drainMs); });
}

kj::Promise<Migrated> Migration::migrateNow(Id lease, uint32_t drainMs) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr) failMove("lease " + lease.text() + " is not known here, or is ending");
  if (grant->suspended)
    failMove(grant->aside ? "the lease waits for its turn, and its memory is not on its devices"
                          : "the lease is suspended: resume it first");
  if (!settings_.refusal.empty()) failMove(settings_.refusal);
  leases_.pauseToMove(lease);
  return suspension_.awaitBeginnings(lease)
      .then([this, lease, drainMs] { return moveRest(lease, sessions_.numbers(lease), 0, drainMs, {}); })
      .then(
          [this, lease](Migrated total) -> kj::Promise<Migrated> {
            if (leases_.admissible(lease) == nullptr)
              return moveFailure("the lease ended while its sessions moved");
            leases_.unpause(lease);
            GPUPOOL_INFO("lease %s: %u sessions moved, %llu bytes", lease.text().c_str(), total.sessions,
                         static_cast<unsigned long long>(total.movedBytes));
            return kj::evalLater([total] { return total; });
          },
          [this, lease](kj::Exception&& exception) -> kj::Promise<Migrated> {
            if (leases_.admissible(lease) == nullptr)
              return moveFailure("the lease ended while its sessions moved");
            leases_.unpause(lease);
            GPUPOOL_WARNING("lease %s: not all of its sessions have moved: %s", lease.text().c_str(),
                            exception.getDescription().cStr());
            return kj::mv(exception);
          });
}

kj::Promise<Migrated> Migration::moveRest(Id lease, std::vector<uint64_t> numbers, size_t at,
                                          uint32_t drainMs, Migrated total) {
  if (at == numbers.size() || leases_.admissible(lease) == nullptr)
    return kj::evalLater([total] { return total; });
  const uint64_t number = numbers[at];
  const std::string who = sessions_.describe(number);
  return moveOne(lease, number, drainMs)
      .then([](MoveAnswer answer) { return answer; },
            [](kj::Exception&& exception) { return MoveAnswer{.error = exception.getDescription().cStr()}; })
      .then([this, lease, numbers = std::move(numbers), at, drainMs, total,
             who](const MoveAnswer& answer) mutable {
        if (!answer.gone) {
          if (!answer.error.empty()) failMove(who + ": " + answer.error);
          ++total.sessions;
          total.movedBytes += answer.movedBytes;
          total.longestPauseMs = std::max(total.longestPauseMs, answer.pauseMs);
        }
        return moveRest(lease, std::move(numbers), at + 1, drainMs, total);
      });
}

kj::Promise<MoveAnswer> Migration::moveOne(Id lease, uint64_t number, uint32_t drainMs) {
  const Grant* grant = leases_.admissible(lease);
  if (stopped_) return moveFailure("the server is shutting down");
  if (grant == nullptr || sessions_.facts(number) == nullptr)
    return kj::evalLater([] { return MoveAnswer{.gone = true}; });
  std::vector<int> ordinals;
  ordinals.reserve(grant->devices.size());
  for (const auto& device : grant->devices)
    ordinals.push_back(static_cast<int>(leases_.devices()[device.index].ordinal));
  return pool_.take(std::move(ordinals), settings_.workerBound)
      .then([this, lease, number, drainMs](kj::Own<WorkerChild> next) {
        return settings_.copier().then(
            [this, lease, number, drainMs, next = kj::mv(next)](kj::AutoCloseFd copier) mutable {
              return moveTo(lease, number, drainMs, kj::mv(next), kj::mv(copier));
            });
      });
}

kj::Promise<MoveAnswer> Migration::moveTo(Id lease, uint64_t number, uint32_t drainMs,
                                          kj::Own<WorkerChild> next, kj::AutoCloseFd copier) {
  // Anything may have happened while worker and copier were awaited.
  const Grant* grant = leases_.admissible(lease);
  const SessionFacts* session = sessions_.facts(number);
  if (stopped_) return moveFailure("the server is shutting down");
  if (grant == nullptr || session == nullptr) return kj::evalLater([] { return MoveAnswer{.gone = true}; });
  SessionFacts facts = *session;
  ++facts.epoch;
  auto [oldEnd, nextEnd] = stateSocket();
  sessions_.announce(facts, next->pid());
  if (!starts_.send(*next, facts, *grant, nextEnd, true)) {
    sessions_.withdraw();
    return moveFailure("the worker to which it was to move died before");
  }
  nextEnd = nullptr;
  const auto bound = settings_.bound + drainMs * kj::MILLISECONDS;
  return sessions_.move(number, kj::mv(next), facts.epoch, drainMs, kj::mv(copier), kj::mv(oldEnd), bound)
      .then([this, lease, facts](MoveAnswer answer) {
        Grant* grant = leases_.admissible(lease);
        if (!answer.gone && !answer.error.empty() && grant != nullptr)
          grant->sessionEpochs[facts.session] = facts.epoch - 1;
        return answer;
      });
}

// ---- for tests ----

kj::Promise<void> Migration::disturbNow(Id lease, uint64_t number) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr || grant->paused) return kj::READY_NOW;
  auto moved = kj::evalNow([&] {
    if (!settings_.refusal.empty()) failMove(settings_.refusal);
    return moveOne(lease, number, kDisturbMoveDrainMs);
  });
  return moved
      .then([](const MoveAnswer& answer) { return answer.gone ? "it has ended" : answer.error; },
            [](kj::Exception&& exception) { return std::string(exception.getDescription().cStr()); })
      .then([this](const std::string& why) {
        ++(why.empty() ? disturbed_ : undisturbed_);
        GPUPOOL_INFO("disturbing a session: %s (%llu moved, %llu not moved)",
                     why.empty() ? "moved" : ("not moved: " + why).c_str(),
                     static_cast<unsigned long long>(disturbed_),
                     static_cast<unsigned long long>(undisturbed_));
      });
}

void Migration::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("migration: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
