// What the manager orders of its servers: on the wire there, what the server does, and its answer.
#include <utility>

#include "tests/manager/simulated_world.h"

namespace gpupool::history {

void World::grant(const Lease& lease) {
  Connection* connection = connectionOf(lease.server.name);
  if (connection == nullptr) return;
  if (lastJoined(lease.server.name) != lease.server.incarnation)
    return fault("a grant for another life of its server");
  checkCordon(lease);
  checkModel(lease);
  const uint64_t number = ++callNumber_;
  calls_.push_back({number, Asks::grant, lease.id, connection, clock_->now() + kCallMs});
  connection->toServer.send(soon(), [this, connection, lease, number, store = stores_] {
    const std::string refusal = admit(servers_[connection->server], lease, store);
    connection->toManager.send(soon(), [this, number, id = lease.id, refusal] {
      if (!take(number)) return;
      if (refusal.empty())
        pool_->granted(id, clock_->now());
      else
        pool_->grantFailed(id, refusal, true, clock_->now());
    });
  });
}

void World::revoke(const ServerLife& server, const Id& id, const std::string&) {
  Connection* connection = connectionOf(server.name);
  if (connection == nullptr || !revoking_.insert({server, id}).second) return;
  checkRevoke(servers_[connection->server], server, id);
  const uint64_t number = ++callNumber_;
  calls_.push_back({number, Asks::revoke, id, connection, clock_->now() + kCallMs, 0, server});
  const auto confirm = [this, connection, server, id, number] {
    connection->toManager.send(soon(), [this, server, id, number] {
      if (!take(number)) return;
      revoking_.erase({server, id});
      pool_->revoked(server, id, clock_->now());
    });
  };
  connection->toServer.send(soon(), [this, connection, id, confirm] {
    SimulatedServer& at = servers_[connection->server];
    const auto lease = at.leases.find(id);
    if (lease == at.leases.end()) return confirm();
    if (!lease->second.closing) lease->second.goneAt = now_ + pick(1500);
    lease->second.closing = true;
    endOrders(lease->second);
    if (bug_ == Bug::believesRevoke) return confirm();
    lease->second.confirm.push_back(confirm);
  });
}

void World::suspend(const std::string& server, const Id& id, uint32_t, const std::string& folder,
                    uint64_t order) {
  result_.preempted += pool_->leases().at(id).idleReason.starts_with("preempted");
  sendOrder(server, id, order, true, folder);
}

void World::resume(const std::string& server, const Id& id, const std::string& folder, bool running,
                   uint64_t order) {
  sendOrder(server, id, order, false, folder, running);
}

void World::sendOrder(const std::string& server, const Id& id, uint64_t order, bool suspends,
                      const std::string& folder, bool running) {
  Connection* connection = connectionOf(server);
  if (connection == nullptr) return fault("an order for a server that is not connected");
  const uint64_t number = ++callNumber_;
  calls_.push_back(
      {number, suspends ? Asks::suspend : Asks::resume, id, connection, clock_->now() + kOrderMs, order});
  const auto answer = [this, connection, id, number, order, suspends](bool done) {
    if (!connection->openAtServer) return;
    SimulatedServer& at = servers_[connection->server];
    const auto lease = at.leases.find(id);
    const auto kept = lease == at.leases.end() ? std::vector<uint64_t>() : lease->second.moving.kept;
    const HeldLease held = lease == at.leases.end() ? HeldLease() : filesOf(at, lease->second);
    connection->toManager.send(now_ + pickMove(80), [this, id, number, order, suspends, done, kept, held] {
      if (!take(number)) return;
      const uint64_t now = clock_->now();
      if (suspends && done) pool_->suspendDone(id, order, {kept, 0, 0, 0, held}, now);
      if (suspends && !done) pool_->suspendFailed(id, order, "it cannot", now);
      if (!suspends && done) pool_->resumeDone(id, order, now);
      if (!suspends && !done) pool_->resumeFailed(id, order, "it cannot", true, now);
    });
  };
  connection->toServer.send(now_ + pickMove(80), [this, connection, id, suspends, folder, running, answer] {
    SimulatedServer& at = servers_[connection->server];
    const auto lease = at.leases.find(id);
    if (lease == at.leases.end() || lease->second.closing || !lease->second.orders.empty())
      return answer(false);
    // It goes back, has gone on since, or stays in the files behind that.
    if (running && lease->second.moving.is == Moving::Is::running && lease->second.held == Id{} &&
        !lease->second.target && at.overcommitPercent <= 100)
      switch (pickHold(3)) {
        case 0:
          return answer(true);
        case 1:
          return answer(false);
        default:
          return beginMove(lease->second, true, true, [answer](bool) { answer(false); });
      }
    if (running) return answer(false);
    if (folder.empty() != (lease->second.held == Id{}) && !(suspends && !folder.empty()))
      return answer(!suspends && lease->second.moving.is == Moving::Is::running);
    if (suspends && !folder.empty() && (lease->second.target || at.overcommitPercent > 100))
      return answer(false);
    beginMove(lease->second, suspends, !folder.empty(), answer);
  });
}

void World::sendMoveOrder(const std::string& server, const Call& order, const Answer& tell,
                          const std::function<void(SimulatedServer&, const Answer&)>& carry) {
  Connection* connection = connectionOf(server);
  if (connection == nullptr) return fault("an order for a server that is not connected");
  const uint64_t number = ++callNumber_;
  Call& call = calls_.emplace_back(order);
  call.number = number, call.connection = connection, call.untilMs = clock_->now() + kOrderMs;
  const Answer answer = [this, connection, number, tell](bool done) {
    if (!connection->openAtServer) return;
    connection->toManager.send(now_ + pickTarget(300), [this, number, tell, done] {
      if (take(number)) tell(done);
    });
  };
  connection->toServer.send(now_ + pickTarget(80), [this, connection, carry, answer] {
    carry(servers_[connection->server], answer);
  });
}

World::Call World::orderOf(Asks asks, const Id& id, uint64_t order) {
  return {0, asks, id, nullptr, 0, order, {}};
}

void World::migrate(const std::string& server, const Id& id, uint32_t, const Lease* target, uint64_t order) {
  const auto tell = [this, id, order](bool done) {
    if (done) return pool_->migrateDone(id, order, {}, clock_->now());
    pool_->migrateFailed(id, order, "it cannot", true, clock_->now());
  };
  const Lease to = target != nullptr ? *target : Lease();
  sendMoveOrder(server, orderOf(Asks::migrate, id, order), tell,
                [this, id, to](SimulatedServer& at, const Answer& answer) {
                  const auto lease = at.leases.find(id);
                  if (lease == at.leases.end() || lease->second.closing ||
                      lease->second.moving.is != Moving::Is::running)
                    return answer(false);
                  lease->second.orders.push_back({to, now_ + pickTarget(600), answer});
                });
}

void World::checkpoint(const std::string& server, const Id& id, uint32_t, const std::string&,
                       uint64_t order) {
  const auto tell = [this, id, order](bool done) {
    if (done) return pool_->checkpointDone(id, order, {}, clock_->now());
    pool_->checkpointFailed(id, order, "it cannot", clock_->now());
  };
  sendMoveOrder(server, orderOf(Asks::checkpoint, id, order), tell,
                [id](SimulatedServer& at, const Answer& answer) {
                  const auto lease = at.leases.find(id);
                  answer(lease != at.leases.end() && !lease->second.closing &&
                         lease->second.moving.is == Moving::Is::running);
                });
}

void World::prepare(const Lease& target, bool here, uint64_t order) {
  checkCordon(target);
  checkModel(target);
  wentOn_.insert({stores_, target.id});
  const auto tell = [this, id = target.id, order](bool done) {
    if (done) return pool_->prepareDone(id, order, clock_->now());
    pool_->prepareFailed(id, order, "no", true, clock_->now());
  };
  sendMoveOrder(target.server.name, orderOf(Asks::prepare, target.id, order), tell,
                [this, target, here, store = stores_](SimulatedServer& at, const Answer& answer) {
                  if (!here) return answer(admit(at, target, store, true).empty());
                  answer(reserve(at, target));
                });
}

void World::giveBack(const Lease& target, bool here, uint64_t order) {
  const auto tell = [this, id = target.id, order](bool unused) {
    pool_->returned(id, order, unused, clock_->now());
  };
  sendMoveOrder(target.server.name, orderOf(Asks::giveBack, target.id, order), tell,
                [this, id = target.id, here](SimulatedServer& server, const Answer& answer) {
                  const auto at = server.leases.find(id);
                  if (at == server.leases.end() || bug_ == Bug::hidesSessions) return answer(true);
                  if (!here) return answer(at->second.sessions == 0);
                  if (at->second.onTarget == 0) at->second.target.reset();
                  answer(at->second.onTarget == 0);
                });
}

void World::settle(const std::string& server, const Id& id, uint64_t order) {
  const auto tell = [this, id, order](bool done) {
    if (done) return pool_->settled(id, order, clock_->now());
    pool_->settleFailed(id, order, clock_->now());
  };
  sendMoveOrder(server, orderOf(Asks::settle, id, order), tell,
                [this, id](SimulatedServer& at, const Answer& answer) {
                  const auto lease = at.leases.find(id);
                  if (lease == at.leases.end() || !lease->second.target || bug_ == Bug::keepsDevices)
                    return answer(true);
                  Running& running = lease->second;
                  if (running.sessions != 0) return answer(false);
                  running.lease = *std::exchange(running.target, std::nullopt);
                  running.sessions = std::exchange(running.onTarget, 0);
                  answer(true);
                });
}

}  // namespace gpupool::history
