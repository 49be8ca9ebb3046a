#pragma once
// The tokens that a manager knows: those of its store, which operators make and revoke, each with a tenant, a
// role and perhaps an end; and those of its token file. Neither is kept but as a verifier (token_proof.h).
// One thread.
//
// What has ended (revoked, expired) is told to who still shows it, and listed, for kForgetTokenS.

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/tokens.h"
#include "pool-manager/audit.h"
#include "pool-manager/journal.h"
#include "pool-manager/roles.h"
#include "schema/token_proof.h"

namespace gpupool::pool {

inline const std::string kTokenPrefix = "token/";
inline constexpr size_t kMostTokens = 10'000, kMostTokenName = 64;
inline constexpr uint64_t kForgetTokenS = uint64_t{30} * 86'400, kMostExpiryS = uint64_t{3660} * 86'400;
inline const std::string kOperatorsTenant = "operator";  // of the first token

struct StoredToken {
  std::string id, tenant, name;
  Role role = Role::user;
  uint64_t createdS = 0, expiresS = 0, usedS = 0, revokedS = 0;  // since 1970; 0: never
  std::string createdBy;
  schema::TokenVerifier verifier;

  bool expired(uint64_t nowS) const { return expiresS != 0 && nowS >= expiresS; }
  bool valid(uint64_t nowS) const { return revokedS == 0 && !expired(nowS); }
  Principal principal() const { return {role, tenant, id}; }
};

// What is wanted of a new token. Throws std::invalid_argument from TokenBook::create if it cannot be.
struct TokenWish {
  std::string tenant, name;  // without a name: its id is its name
  Role role = Role::user;
  uint64_t expiresInS = 0;  // 0: never
  std::string by;           // on whose word; for people
};

// A token for the wish, and its text, which is told once and then not known any more.
struct MadeToken {
  StoredToken token;
  std::string text;
};
// Throws std::invalid_argument if there can be no such token.
MadeToken makeToken(const TokenWish& wish, uint64_t nowS);
Write writeOf(const StoredToken& token);

class TokenBook {
 public:
  // What it has written, with the entries of the audit log; done is called later, as by Journal::write.
  using Writer = std::function<void(std::vector<Write>, std::vector<AuditEntry>, Journal::Done)>;
  using File = std::function<const Tokens&()>;
  // now: seconds since 1970.
  TokenBook(Writer writer, std::function<uint64_t()> now)
      : writer_(std::move(writer)), now_(std::move(now)) {}

  // Throws std::runtime_error if that is no token.
  void load(const std::vector<Entry>& stored);
  // These are good too; none: no longer. Asked at every login.
  void useFile(File file) { file_ = std::move(file); }

  // Whether connections from elsewhere have to show a token: there is a file, or there has ever been one in
  // the store.
  bool demanded() const { return file_ || !tokens_.empty(); }

  // Of whoever says that he knows a token: `token` is its id or, for one of the file, empty, and then
  // `tenant` says which. None: there is no such token.
  struct Candidate {
    schema::TokenVerifier verifier;
    Principal who;
  };
  std::optional<Candidate> find(const std::string& token, const std::string& tenant) const;
  // Of whom this is the token; for one of several tenants in the file, all of them. Takes a time that does
  // not depend on the token's secret.
  std::vector<Principal> bearersOf(const std::string& text) const;
  // Why the proven token of this principal is good no more, in one line; "": it is good.
  std::string endOf(const Principal& who) const;
  void used(const Principal& who);

  // done: with the reason if the store has not taken it.
  using Created = std::function<void(const MadeToken& token, const std::string& why)>;
  void create(const TokenWish& wish, const std::string& by, Created done);
  // At once; it is stored later, and if the store does not take it, it is tried again. Throws
  // std::invalid_argument if there is no such token.
  void revoke(const std::string& id, const std::string& by, Journal::Done done);

  std::vector<StoredToken> list() const;
  // How many of each tenant's are good now, those of the file too.
  std::map<std::string, uint32_t> validByTenant() const;
  const StoredToken* find(const std::string& id) const;
  // Writes what is not written yet, forgets what ended long ago; the ids of those that have expired since the
  // last call.
  std::vector<std::string> tick();

 private:
  uint64_t now() const { return now_(); }
  AuditEntry entryOf(AuditEvent event, const StoredToken& token, const std::string& by) const;

  Writer writer_;
  std::function<uint64_t()> now_;
  File file_;
  std::map<std::string, StoredToken> tokens_;  // by id
  std::set<std::string> making_;               // "tenant/name" on the way to the store
  std::set<std::string> unsaved_;              // ids: last used, or revoked
  std::set<std::string> ended_;                // ids that tick() has told of
  uint64_t savedS_ = 0, lookedS_ = 0;
};

}  // namespace gpupool::pool
