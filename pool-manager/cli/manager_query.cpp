#include "pool-manager/cli/manager_query.h"

#include <iostream>

#include "base/log.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/convert.h"
#include "schema/fault.h"
#include "schema/manager_login.h"

namespace gpupool::cli {

ManagerQuery::ManagerQuery(const ClientOptions& client, unsigned limitMs)
    : ManagerQuery(managerAddresses(client.manager), limitMs, credentialsOf(client)) {}

ManagerQuery::ManagerQuery(const std::vector<std::string>& addresses, unsigned limitMs,
                           const CredentialSource& credentials)
    : io_(kj::setupAsyncIo()), limitMs_(limitMs) {
  std::string tried;
  for (const std::string& address : addresses) {
    try {
      connection_ = pool::connectManager(*io_.provider, address, limitMs * kj::MILLISECONDS, credentials)
                        .wait(io_.waitScope);
      return;
    } catch (const kj::Exception& error) {
      if (const std::string refusal = schema::loginRefusal(error); !refusal.empty())
        throw LoginRefused(refusal);
      tried += (tried.empty() ? "" : "; ") + pool::errorText(error);
    }
  }
  throw CommandError(kExitFailure, noManagerText(addresses, tried));
}

template <class T>
T ManagerQuery::await(kj::Promise<T>&& promise, uint64_t limitMs) {
  try {
    return io_.provider->getTimer()
        .timeoutAfter((limitMs == 0 ? limitMs_ : limitMs) * kj::MILLISECONDS, kj::mv(promise))
        .wait(io_.waitScope);
  } catch (const kj::Exception& error) {
    // An order is the server's, which carries it out whoever hears the answer.
    if (limitMs == 0 || error.getType() != kj::Exception::Type::DISCONNECTED || schema::faultOf(error).remote)
      throw;
    throw CommandError(kExitFailure, "the manager is gone (" + pool::errorText(error) +
                                         "); what was asked for may be carried out all the same: "
                                         "`gpupool leases` says what has become of the lease");
  }
}

std::vector<ListedDevice> ManagerQuery::devices() {
  return await(connection_->manager().devicesRequest().send().then(
      [](auto&& response) { return pool::read(response.getDevices()); }));
}

std::vector<ListedServer> ManagerQuery::servers() {
  return await(connection_->manager().serversRequest().send().then(
      [](auto&& response) { return pool::read(response.getServers()); }));
}

std::vector<pool::Lease> ManagerQuery::leases() {
  return await(connection_->manager().leasesRequest().send().then(
      [](auto&& response) { return pool::read(response.getLeases()); }));
}

pool::Explanation ManagerQuery::explain(const pool::LeaseRequest& wish) {
  auto request = connection_->manager().explainRequest();
  pool::write(wish, request.initRequest());
  return await(request.send().then([](auto&& response) { return pool::read(response.getExplanation()); }));
}

AuditNews ManagerQuery::auditAfter(uint64_t number, const std::string& lease, uint64_t sinceMs) {
  AuditNews news;
  for (bool more = true; more;) {
    auto request = connection_->manager().auditRequest();
    request.setAfter(number);
    request.setSinceMs(sinceMs);
    request.setLease(lease);
    more = await(request.send().then([&](auto&& response) {
      for (auto entry : response.getEntries()) news.entries.push_back(pool::read(entry));
      if (response.getEntries().size() != 0) number = news.entries.back().number;
      // A manager of before tells only what it has shown.
      news.latest = response.getLatest() != 0 ? response.getLatest()
                    : news.entries.empty()    ? 0
                                              : news.entries.back().number;
      return response.getMore() && response.getEntries().size() != 0;
    }));
  }
  return news;
}

void ManagerQuery::drop(const Id& id) {
  auto request = connection_->manager().releaseRequest();
  pool::write(id, request.initId());
  request.setDrop(true);
  await(request.send().ignoreResult());
}

void ManagerQuery::dropAll(const std::vector<Id>& ids, uint64_t limitMs) {
  kj::Vector<kj::Promise<void>> all;
  for (const Id& id : ids) {
    auto request = connection_->manager().releaseRequest();
    pool::write(id, request.initId());
    request.setDrop(true);
    all.add(request.send().ignoreResult().catch_([id](kj::Exception&& error) {
      GPUPOOL_WARNING("lease %s is not ended: %s", id.text().c_str(), pool::errorText(error).c_str());
    }));
  }
  await(kj::joinPromises(all.releaseAsArray()), limitMs);
}

pool::Lease ManagerQuery::claim(const pool::LeaseRequest& wish,
                                const std::function<void(const std::string&)>& tell) {
  const auto telling = tellAwaited(wish, tell);
  auto request = connection_->manager().leaseRequest();
  pool::write(wish, request.initRequest());
  return await(request.send().then([](auto&& response) { return pool::read(response.getLease()); }),
               uint64_t{wish.waitMs} + limitMs_);
}

// As Holder::tellAwaited, for a request that nobody has answered yet.
kj::Promise<void> ManagerQuery::tellAwaited(const pool::LeaseRequest& wish,
                                            const std::function<void(const std::string&)>& tell) {
  if (wish.waitMs == 0) return kj::READY_NOW;
  return io_.provider->getTimer()
      .afterDelay(1 * kj::SECONDS)
      .then([this, wish] {
        auto request = connection_->manager().explainRequest();
        pool::write(wish, request.initRequest());
        return request.send();
      })
      .then([wait = options::formatTime(std::chrono::milliseconds(wish.waitMs)),
             tell](capnp::Response<schema::Manager::ExplainResults>&& response) {
        const pool::Explanation answer = pool::read(response.getExplanation());
        if (answer.outlook == pool::Outlook::now || answer.outlook == pool::Outlook::never) return;
        tell("waiting (--wait " + wait + "): " + answer.text);
      })
      .eagerlyEvaluate([](kj::Exception&& error) {
        GPUPOOL_INFO("what is waited for is not known: %s", pool::errorText(error).c_str());
      });
}

void ManagerQuery::renewClaim(const Id& id) {
  auto request = connection_->manager().renewRequest();
  pool::write(id, request.initId());
  await(request.send().ignoreResult());
}

void ManagerQuery::releaseClaim(const std::string& claim, const std::string& tenant) {
  auto request = connection_->manager().releaseRequest();
  request.setClaim(claim);
  request.setTenant(tenant);
  await(request.send().ignoreResult());
}

void ManagerQuery::cordon(const std::string& server, bool cordoned, const std::string& reason,
                          const std::string& by) {
  auto request = connection_->manager().cordonRequest();
  request.setServer(server);
  request.setCordoned(cordoned);
  request.setReason(reason);
  request.setBy(by);
  await(request.send().ignoreResult());
}

pool::DrainState ManagerQuery::drain(const std::string& server, const std::string& reason,
                                     const std::string& by, uint64_t tryMs, bool stay) {
  auto request = connection_->manager().drainRequest();
  request.setServer(server);
  request.setReason(reason);
  request.setBy(by);
  request.setTryMs(tryMs);
  request.setStay(stay);
  try {
    return await(request.send().then([](auto&& response) { return pool::read(response.getState()); }));
  } catch (const kj::Exception& error) {
    if (error.getType() != kj::Exception::Type::UNIMPLEMENTED) throw;
    throw CommandError(kExitFailure,
                       "the pool's manager is of an older gpupool, and drains no server: upgrade it first");
  }
}

pool::DrainState ManagerQuery::drainState(const std::string& server, uint64_t after) {
  auto request = connection_->manager().drainStateRequest();
  request.setServer(server);
  request.setAfter(after);
  return await(request.send().then([](auto&& response) { return pool::read(response.getState()); }));
}

void ManagerQuery::stopDrain(const std::string& server) {
  auto request = connection_->manager().stopDrainRequest();
  request.setServer(server);
  await(request.send().ignoreResult());
}

pool::SuspendResult ManagerQuery::suspend(const Id& id, unsigned drainMs, uint64_t limitMs,
                                          const std::string& folder) {
  auto request = connection_->manager().suspendRequest();
  pool::write(id, request.initId());
  request.setFolder(folder);
  request.setDrainMs(drainMs);
  return await(request.send().then([](auto&& response) { return pool::read(response.getResult()); }),
               limitMs);
}

// While its memory is brought back, which takes long, too, it is in another state.
kj::Promise<void> ManagerQuery::tellResumeAwaited(const Id& id, unsigned waitMs,
                                                  const std::function<void(const std::string&)>& tell) {
  if (waitMs == 0) return kj::READY_NOW;
  return io_.provider->getTimer()
      .afterDelay(1 * kj::SECONDS)
      .then([this] { return connection_->manager().leasesRequest().send(); })
      .then([id, wait = options::formatTime(std::chrono::milliseconds(waitMs)),
             tell](capnp::Response<schema::Manager::LeasesResults>&& response) {
        for (auto one : response.getLeases()) {
          const pool::Lease lease = pool::read(one);
          if (lease.id != id || (lease.state != "suspended" && lease.state != "held")) continue;
          tell("waiting (--wait " + wait + "): lease " + shortId(id) + " wants room" +
               (lease.state == "held" ? "" : " on " + lease.server.name) +
               "; `gpupool devices` shows who has it");
        }
      })
      .eagerlyEvaluate([](kj::Exception&& error) {
        GPUPOOL_INFO("what is waited for is not known: %s", pool::errorText(error).c_str());
      });
}

void ManagerQuery::resume(const Id& id, unsigned waitMs, uint64_t limitMs, const std::string& folder,
                          const pool::MoveTarget& to, const std::function<void(const std::string&)>& tell) {
  const auto telling = tellResumeAwaited(id, waitMs, tell);
  auto request = connection_->manager().resumeRequest();
  pool::write(id, request.initId());
  request.setFolder(folder);
  pool::write(to, request.initTo());
  request.setWaitMs(waitMs);
  await(request.send().ignoreResult(), limitMs);
}

pool::MigrateResult ManagerQuery::migrate(const Id& id, unsigned drainMs, const pool::MoveTarget& to,
                                          uint64_t limitMs) {
  auto request = connection_->manager().migrateRequest();
  pool::write(id, request.initId());
  pool::write(to, request.initTo());
  request.setDrainMs(drainMs);
  return await(request.send().then([](auto&& response) { return pool::read(response.getResult()); }),
               limitMs);
}

pool::CheckpointResult ManagerQuery::checkpoint(const Id& id, unsigned drainMs, const std::string& folder,
                                                uint64_t limitMs) {
  auto request = connection_->manager().checkpointRequest();
  pool::write(id, request.initId());
  request.setFolder(folder);
  request.setDrainMs(drainMs);
  return await(request.send().then([](auto&& response) { return pool::read(response.getResult()); }),
               limitMs);
}

CreatedToken ManagerQuery::createToken(const pool::TokenWish& wish) {
  auto request = administration().createTokenRequest();
  request.setTenant(wish.tenant);
  request.setName(wish.name);
  request.setRole(pool::wireRole(wish.role));
  request.setExpiresInS(wish.expiresInS);
  request.setBy(wish.by);
  return await(request.send().then([](auto&& response) {
    CreatedToken made{pool::read(response.getToken()), pool::text(response.getSecret()), {}};
    for (auto one : response.getCertificates()) made.certificates.push_back(pool::text(one));
    return made;
  }));
}

std::vector<pool::StoredToken> ManagerQuery::tokens() {
  return await(administration().tokensRequest().send().then([](auto&& response) {
    std::vector<pool::StoredToken> tokens;
    for (auto one : response.getTokens()) tokens.push_back(pool::read(one));
    return tokens;
  }));
}

void ManagerQuery::revokeToken(const std::string& id, const std::string& by) {
  auto request = administration().revokeTokenRequest();
  request.setId(id);
  request.setBy(by);
  await(request.send().ignoreResult());
}

void ManagerQuery::setQuota(const pool::Quota& quota, const std::string& by) {
  auto request = administration().setQuotaRequest();
  pool::write(quota, request.initQuota());
  request.setBy(by);
  await(request.send().ignoreResult());
}

std::vector<pool::QuotaUse> ManagerQuery::quotas() {
  return await(administration().quotasRequest().send().then([](auto&& response) {
    std::vector<pool::QuotaUse> uses;
    for (auto one : response.getQuotas()) uses.push_back(pool::read(one));
    return uses;
  }));
}

std::vector<pool::TenantUse> ManagerQuery::tenants() {
  return await(administration().tenantsRequest().send().then([](auto&& response) {
    std::vector<pool::TenantUse> uses;
    for (auto one : response.getTenants()) uses.push_back(pool::read(one));
    return uses;
  }));
}

void tellPeople(const std::string& text) { std::cerr << "gpupool: " + text + "\n"; }

void demandDigits(const std::string& digits, const std::string& what) {
  if (digits.size() < kLeastDigits)
    throw CommandError(kExitUsage, "'" + digits + "' is too short for the id of a " + what + ": " +
                                       std::to_string(kLeastDigits) + " of its digits at least are needed");
}

Id findLease(const std::vector<pool::Lease>& leases, const std::string& digits, const std::string& what) {
  demandDigits(digits, what);
  std::vector<Id> found;
  for (const pool::Lease& lease : leases)
    if (lease.id.text().starts_with(digits)) found.push_back(lease.id);
  if (found.empty()) throw CommandError(kExitFailure, "there is no " + what + " " + digits);
  if (found.size() > 1)
    throw CommandError(kExitFailure, "several " + what + "s begin with " + digits +
                                         "; `gpupool leases --json` prints them in full");
  return found[0];
}

}  // namespace gpupool::cli
