#include "server/front/migration.h"

#include <algorithm>

#include "base/log.h"
#include "base/transport_names.h"
#include "server/front/apart.h"
#include "server/front/play_back.h"

namespace gpupool::server {
namespace {

constexpr uint32_t kDisturbMoveDrainMs = 5'000;  // some tests' kernels wait for a later call
constexpr kj::Duration kLookForTurn = 50 * kj::MILLISECONDS;

kj::Exception moveFailure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(text));
}

[[noreturn]] void failMove(const std::string& text) { kj::throwFatalException(moveFailure(text)); }

// No device of the one is one of the other.
bool hasOthers(const std::vector<std::string>& devices, const std::vector<std::string>& before) {
  return std::ranges::none_of(
      devices, [&](const std::string& device) { return std::ranges::find(before, device) != before.end(); });
}

}  // namespace

Migration::Migration(kj::Network& network, kj::Timer& timer, LeaseTable& leases, SessionTable& sessions,
                     Suspension& suspension, WorkerPools& pool, const WorkerStarts& starts, Settings settings)
    : network_(network),
      timer_(timer),
      leases_(leases),
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

kj::Promise<Migrated> Migration::migrate(const Id& lease, uint32_t drainMs,
                                         std::optional<MoveTarget> target) {
  auto moved = migrateInTurn({lease, drainMs, std::move(target)}, timer_.now() + settings_.turnBound).fork();
  // Also where nobody waits for the answer any more.
  tasks_.add(moved.addBranch().then([](Migrated) {}, [](kj::Exception&&) {}));
  return moved.addBranch();
}

bool Migration::waitsForTurn(const Id& lease, kj::TimePoint until) const {
  const Grant* grant = leases_.admissible(lease);
  return settings_.wake && !stopped_ && grant != nullptr && grant->suspended && grant->aside &&
         timer_.now() < until;
}

// A wait for its turn is not in the lease's lane: what brings it back waits there. It may be aside again when
// the orders before this one are done. Whoever is late is refused, with the reason.
kj::Promise<Migrated> Migration::migrateInTurn(Order order, kj::TimePoint until) {
  using Done = std::optional<Migrated>;
  if (waitsForTurn(order.lease, until)) {
    settings_.wake(order.lease);
    return timer_.afterDelay(kLookForTurn).then([this, order, until] { return migrateInTurn(order, until); });
  }
  return suspension_.lanes()
      .queue<Done>(order.lease,
                   [this, order, until]() -> kj::Promise<Done> {
                     if (waitsForTurn(order.lease, until)) return Done();
                     return migrateNow(order).then([](Migrated done) { return Done(done); });
                   })
      .then([this, order, until](Done&& done) -> kj::Promise<Migrated> {
        if (!done) return migrateInTurn(order, until);
        return kj::evalLater([moved = *done] { return moved; });
      });
}

bool Migration::isElsewhere(const Order& order) const {
  return order.target && !order.target->server.name.empty() && order.target->server.name != settings_.server;
}

std::string Migration::refuses(const Order& order, const Grant& grant) const {
  if (grant.suspended)
    return grant.aside ? "the lease waits for its turn, and its memory is not on its devices"
                       : "the lease is suspended: resume it first";
  if (isElsewhere(order)) {
    const Destination& server = order.target->server;
    if (server.host.empty() || server.port == 0)
      return "server " + server.name +
             " takes no network sessions: start it with --listen (gpupool up --transport " +
             std::string(transportWith(TransportFacts::Reach::anyHost).name) + ")";
    return "";
  }
  if (!settings_.refusal.empty()) return settings_.refusal;
  if (!order.target) return "";
  if (const std::string lent = sessions_.lentText(grant.id, grant.epoch); !lent.empty()) return lent;
  const Placement* placement = grant.placement(order.target->deviceEpoch);
  if (placement == nullptr) return "the lease has no such devices here: they were not reserved for it";
  for (const GrantedDevice& device : placement->devices)
    if (const std::string problem = leases_.problem(device.index); !problem.empty())
      return "device " + std::to_string(leases_.devices()[device.index].ordinal) + ": " + problem;
  return "";
}

std::string Migration::refusesThere(const Order& order) const {
  if (!isElsewhere(order) || order.target->server.rows.empty()) return "";
  const Destination& server = order.target->server;
  for (const uint64_t number : sessions_.numbers(order.lease)) {
    const SessionFacts* session = sessions_.facts(number);
    if (session == nullptr ||
        std::find(server.rows.begin(), server.rows.end(), session->rowsHash) != server.rows.end())
      continue;
    return sessions_.describe(number) + ": server " + server.name + " has no worker program for it (" +
           pool_.describe(session->rowsHash) + "): put that program into its folder --workers";
  }
  return "";
}

kj::Promise<Migrated> Migration::migrateNow(Order order) {
  const Id lease = order.lease;
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr) failMove("lease " + lease.text() + " is not known here, or is ending");
  if (const std::string why = refuses(order, *grant); !why.empty()) failMove(why);
  leases_.pauseToMove(lease);
  return suspension_.awaitBeginnings(lease)
      .then([this, order] {
        if (const std::string why = refusesThere(order); !why.empty()) failMove(why);
        return moveRest(order, those(order), 0, {});
      })
      .then(
          [this, order, lease](Migrated total) -> kj::Promise<Migrated> {
            if (leases_.admissible(lease) == nullptr)
              return moveFailure("the lease ended while its sessions moved");
            if (isElsewhere(order))
              unpauseLater(lease);
            else
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

// Its revoke comes in a moment, and would end what begins here until then. Whoever begins is told to ask
// again, and finds the other server. The bound is for a move that the manager gives up.
void Migration::unpauseLater(const Id& lease) {
  tasks_.add(timer_.afterDelay(settings_.leftBound).then([this, lease] {
    return suspension_.lanes().queue<void>(lease, [this, lease]() -> kj::Promise<void> {
      const Grant* grant = leases_.admissible(lease);
      if (grant != nullptr && grant->moving && !grant->suspended && !grant->holding) leases_.unpause(lease);
      return kj::READY_NOW;
    });
  }));
}

// But for those that are there.
std::vector<uint64_t> Migration::those(const Order& order) const {
  std::vector<uint64_t> numbers = sessions_.numbers(order.lease);
  if (!order.target || isElsewhere(order)) return numbers;
  std::erase_if(numbers, [&](uint64_t number) {
    const SessionFacts* session = sessions_.facts(number);
    return session != nullptr && session->deviceEpoch == order.target->deviceEpoch;
  });
  return numbers;
}

kj::Promise<Migrated> Migration::moveRest(Order order, std::vector<uint64_t> numbers, size_t at,
                                          Migrated total) {
  if (at == numbers.size() || leases_.admissible(order.lease) == nullptr)
    return kj::evalLater([total] { return total; });
  const uint64_t number = numbers[at];
  const std::string who = sessions_.describe(number);
  return kj::evalNow([&] { return moveOne(order, number); })
      .then([](MoveAnswer answer) { return answer; },
            [](kj::Exception&& exception) { return MoveAnswer{.error = exception.getDescription().cStr()}; })
      .then([this, order, numbers = std::move(numbers), at, total, who](const MoveAnswer& answer) mutable {
        if (!answer.gone) {
          if (!answer.error.empty()) failMove(who + ": " + answer.error);
          ++total.sessions;
          total.movedBytes += answer.movedBytes;
          total.longestPauseMs = std::max(total.longestPauseMs, answer.pauseMs);
        }
        return moveRest(order, std::move(numbers), at + 1, total);
      });
}

kj::Promise<MoveAnswer> Migration::moveOne(Order order, uint64_t number) {
  const Grant* grant = leases_.admissible(order.lease);
  const SessionFacts* session = sessions_.facts(number);
  if (stopped_) return moveFailure("the server is shutting down");
  if (grant == nullptr || session == nullptr) return kj::evalLater([] { return MoveAnswer{.gone = true}; });
  if (isElsewhere(order)) return moveAway(order, number);
  const Placement* placement =
      grant->placement(order.target ? order.target->deviceEpoch : session->deviceEpoch);
  if (placement == nullptr) return moveFailure("the lease has no such devices here any more");
  return moveHere(order, number, *placement);
}

kj::Promise<MoveAnswer> Migration::moveHere(Order order, uint64_t number, const Placement& placement) {
  SessionFacts facts = *sessions_.facts(number);
  if (order.stream) {
    if (const std::string why = whyNotApart(facts, false); !why.empty()) return moveFailure(why);
    facts.transport = transportApart(facts.transport);
  }
  ++facts.epoch;
  facts.place(placement, leases_.devices());
  return pool_.take(facts.rowsHash, {leases_.ordinals(placement), false}, settings_.workerBound)
      .then([this, order, number, facts](kj::Own<WorkerChild> next) {
        if (order.stream) return moveTo(order, number, facts, kj::mv(next), nullptr);
        return settings_.copier().then(
            [this, order, number, facts, next = kj::mv(next)](kj::AutoCloseFd copier) mutable {
              return moveTo(order, number, facts, kj::mv(next), kj::mv(copier));
            });
      });
}

kj::Promise<MoveAnswer> Migration::moveTo(Order order, uint64_t number, SessionFacts facts,
                                          kj::Own<WorkerChild> next, kj::AutoCloseFd copier) {
  // Anything may have happened while worker and copier were awaited.
  const Grant* grant = leases_.admissible(order.lease);
  if (stopped_) return moveFailure("the server is shutting down");
  if (grant == nullptr || sessions_.facts(number) == nullptr ||
      grant->placement(facts.deviceEpoch) == nullptr)
    return kj::evalLater([] { return MoveAnswer{.gone = true}; });
  auto [oldEnd, nextEnd] = stateSocket();
  sessions_.announce(facts, next->pid());
  const auto from = order.stream ? WorkerStarts::From::stream : WorkerStarts::From::worker;
  if (!starts_.send(*next, facts, *grant, nextEnd, from)) {
    sessions_.withdraw();
    return moveFailure("the worker to which it was to move died before");
  }
  nextEnd = nullptr;
  SessionTable::MoveMeans means{order.drainMs, kj::mv(copier), kj::mv(oldEnd),
                                settings_.bound + order.drainMs * kj::MILLISECONDS};
  means.direct = !order.stream && hasOthers(facts.devices, sessions_.facts(number)->devices);
  return sessions_.move(number, kj::mv(next), facts, kj::mv(means))
      .then([this, lease = order.lease, facts](MoveAnswer answer) {
        Grant* grant = leases_.admissible(lease);
        if (!answer.gone && !answer.error.empty() && grant != nullptr)
          grant->sessionEpochs[facts.session] = facts.epoch - 1;
        return answer;
      });
}

// ---- to another server ----

kj::Promise<MoveAnswer> Migration::moveAway(Order order, uint64_t number) {
  const Grant& grant = *leases_.admissible(order.lease);
  const SessionFacts& session = *sessions_.facts(number);
  if (const std::string why = whyNotApart(session, grant.protectMs != 0); !why.empty())
    return moveFailure(why);
  schema::SessionOpening opening;
  opening.lease = order.lease;
  opening.key.assign(reinterpret_cast<const char*>(grant.key.data()), grant.key.size());
  opening.server = order.target->server.name;
  opening.session = session.session;
  opening.epoch = session.epoch + 1;
  opening.rowsHash = session.rowsHash;
  opening.release = pool_.releaseOf(session.rowsHash);
  opening.transport = transportApart(session.transport);
  opening.pid = session.clientPid;
  opening.command = session.command;
  opening.arrives = true;
  const uint64_t epoch = opening.epoch;
  return announceSession(network_, timer_, order.target->server, std::move(opening), settings_.arrivalBound)
      .then([this, order, number, epoch](kj::AutoCloseFd state) -> kj::Promise<MoveAnswer> {
        // Anything may have happened meanwhile. Whoever waits there for the session sees that none comes.
        if (stopped_) return moveFailure("the server is shutting down");
        if (leases_.admissible(order.lease) == nullptr || sessions_.facts(number) == nullptr)
          return kj::evalLater([] { return MoveAnswer{.gone = true}; });
        SessionTable::MoveMeans means{order.drainMs, nullptr, kj::mv(state),
                                      settings_.bound + order.drainMs * kj::MILLISECONDS};
        return sessions_.moveAway(number, order.target->server.name, epoch, kj::mv(means));
      });
}

// ---- the end of a move to other devices ----

kj::Promise<void> Migration::settle(const Id& lease, bool moved) {
  return suspension_.lanes().queue<void>(lease, [this, lease, moved] { return settleNow(lease, moved); });
}

std::string Migration::refusesSettling(const Grant& grant, bool moved) const {
  const Placement& goes = moved ? grant : *grant.target;
  if (const std::string lent = sessions_.lentText(grant.id, goes.epoch); !lent.empty()) return lent;
  if (!sessions_.uses(grant.id, goes.epoch)) return "";
  return std::string("a session of the lease is still on the devices that it ") +
         (moved ? "had" : "was to have");
}

kj::Promise<void> Migration::settleNow(Id lease, bool moved) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr || !grant->target) return kj::READY_NOW;
  const std::string why = refusesSettling(*grant, moved);
  if (!why.empty()) failMove(why);
  const uint64_t goes = moved ? grant->epoch : grant->target->epoch;
  leases_.pauseToMove(lease);  // one that begins now would begin there
  return suspension_.awaitBeginnings(lease)
      .then([this, lease, goes] { return sessions_.oldGone(lease, goes); })
      .then(
          [this, lease, moved] {
            const Grant* grant = leases_.admissible(lease);
            if (grant == nullptr) return;
            const std::string why = refusesSettling(*grant, moved);
            if (why.empty()) leases_.settle(lease, moved);
            leases_.unpause(lease);
            if (!why.empty()) failMove(why);
            GPUPOOL_INFO("lease %s: %s", lease.text().c_str(),
                         moved ? "has other devices now" : "keeps the devices that it had");
          },
          [this, lease](kj::Exception&& exception) {
            leases_.unpause(lease);
            kj::throwFatalException(kj::mv(exception));
          });
}

// ---- for tests ----

kj::Promise<void> Migration::disturbNow(Id lease, uint64_t number) {
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr || grant->paused) return kj::READY_NOW;
  auto moved = kj::evalNow([&] {
    if (!settings_.refusal.empty()) failMove(settings_.refusal);
    return moveOne({lease, kDisturbMoveDrainMs, std::nullopt, settings_.disturbStream}, number);
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
