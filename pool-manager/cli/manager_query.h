#pragma once
// Asks a manager and waits for the answer: for commands that do nothing else.

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "pool-manager/audit.h"
#include "pool-manager/cli/command.h"
#include "pool-manager/drain_state.h"
#include "pool-manager/listing.h"
#include "pool-manager/quotas.h"
#include "pool-manager/rpc.h"
#include "pool-manager/tenants.h"
#include "pool-manager/tokens.h"
#include "schema/administration.capnp.h"

namespace gpupool::cli {

using pool::ListedDevice;
using pool::ListedServer;

struct ClientOptions;

// What a manager takes as the longest drain, and as the longest wait.
inline constexpr std::chrono::hours kMostDrain{1}, kMostWait{24 * 20};

struct CreatedToken {
  pool::StoredToken token;
  std::string text;
  std::vector<std::string> certificates;  // of the manager: fingerprints
};

// Of the audit log: entries, and the number of the last one that there is (Manager.audit).
struct AuditNews {
  std::vector<pool::AuditEntry> entries;
  uint64_t latest = 0;
};

// A manager answers, and takes no order from this caller: to ask again is of no use.
class LoginRefused : public CommandError {
 public:
  explicit LoginRefused(const std::string& text) : CommandError(kExitFailure, text) {}
};

class ManagerQuery {
 public:
  // Connects to the first address that answers; each within `limitMs`. Throws LoginRefused, or a CommandError
  // naming all that were tried.
  explicit ManagerQuery(
      const std::vector<std::string>& addresses, unsigned limitMs = 3000,
      const CredentialSource& credentials = [] { return Credentials{}; });
  // As --manager, --token-file and --tenant say.
  ManagerQuery(const ClientOptions& client, unsigned limitMs);

  std::vector<ListedDevice> devices();
  std::vector<ListedServer> servers();
  std::vector<pool::Lease> leases();
  pool::Explanation explain(const pool::LeaseRequest& wish);
  // All of it, the oldest first. lease: the first digits of an id, or empty. sinceMs: ago; 0: ever.
  std::vector<pool::AuditEntry> audit(const std::string& lease, uint64_t sinceMs) {
    return auditAfter(0, lease, sinceMs).entries;
  }
  // Likewise, those after that number.
  AuditNews auditAfter(uint64_t number, const std::string& lease, uint64_t sinceMs);
  // Ends a lease in its holder's place, or forgets one that is lost; returns when it is over.
  void drop(const Id& id);
  // Several at once. One that fails does not keep the others from it.
  void dropAll(const std::vector<Id>& ids, uint64_t limitMs);
  // Makes the claim that the wish names (claims.h), or finds it; returns when it has its GPUs. tell: what it
  // waits for, after a second, as a line for people.
  pool::Lease claim(const pool::LeaseRequest& wish, const std::function<void(const std::string&)>& tell);
  // Keeps a claim for another --unused, though no program uses it.
  void renewClaim(const Id& id);
  // Ends a claim, named by its id or its job; returns when it is over.
  void releaseClaim(const std::string& claim, const std::string& tenant);
  // by: "user@host".
  void cordon(const std::string& server, bool cordoned, const std::string& reason, const std::string& by);
  // Begins it (Manager.drain), asks how it is, and has no further move begun. by: as of cordon.
  pool::DrainState drain(const std::string& server, const std::string& reason, const std::string& by,
                         uint64_t tryMs, bool stay);
  pool::DrainState drainState(const std::string& server, uint64_t after);
  void stopDrain(const std::string& server);
  // These return when it is done, and fail after limitMs.
  pool::SuspendResult suspend(const Id& id, unsigned drainMs, uint64_t limitMs,
                              const std::string& folder = "");
  // tell: where it waits for room after a second, a line for people.
  void resume(
      const Id& id, unsigned waitMs, uint64_t limitMs, const std::string& folder = "",
      const pool::MoveTarget& to = {},
      const std::function<void(const std::string&)>& tell = [](const std::string&) {});
  pool::CheckpointResult checkpoint(const Id& id, unsigned drainMs, const std::string& folder,
                                    uint64_t limitMs);
  pool::MigrateResult migrate(const Id& id, unsigned drainMs, const pool::MoveTarget& to, uint64_t limitMs);
  // by of the wish, and by: "user@host".
  CreatedToken createToken(const pool::TokenWish& wish);
  std::vector<pool::StoredToken> tokens();
  void revokeToken(const std::string& id, const std::string& by);
  void setQuota(const pool::Quota& quota, const std::string& by);
  std::vector<pool::QuotaUse> quotas();
  std::vector<pool::TenantUse> tenants();

 private:
  kj::Promise<void> tellResumeAwaited(const Id& id, unsigned waitMs,
                                      const std::function<void(const std::string&)>& tell);
  kj::Promise<void> tellAwaited(const pool::LeaseRequest& wish,
                                const std::function<void(const std::string&)>& tell);
  schema::Administration::Client administration() {
    return connection_->manager().administrationRequest().send().getAdministration();
  }
  template <class T>
  T await(kj::Promise<T>&& promise, uint64_t limitMs = 0);  // 0: limitMs_

  kj::AsyncIoContext io_;
  unsigned limitMs_;
  kj::Own<pool::ManagerConnection> connection_;
};

// A line on stderr.
void tellPeople(const std::string& text);

// Fewer digits of an id name nothing: who slips ends nobody's lease.
inline constexpr size_t kLeastDigits = 4;
void demandDigits(const std::string& digits, const std::string& what);  // throws CommandError

// The lease, or claim, whose id begins with these digits. Throws CommandError if there is none, if there are
// several, and if they are too few. what: for the message.
Id findLease(const std::vector<pool::Lease>& leases, const std::string& digits,
             const std::string& what = "lease");

}  // namespace gpupool::cli
