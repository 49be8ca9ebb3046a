#include "pool-manager/roles.h"

#include "pool-manager/model.h"

namespace gpupool::pool {
namespace {

constexpr unsigned bit(Role role) { return 1U << static_cast<unsigned>(role); }
constexpr unsigned kOperator = bit(Role::admin), kLeases = kOperator | bit(Role::user) | bit(Role::scheduler),
                   kAll = kLeases | bit(Role::viewer) | bit(Role::server);

struct Rule {
  Operation operation;
  unsigned roles;
  const char* refusal;  // behind "the token of tenant 'x' "
};

constexpr Rule kRules[kOperations] = {
    {Operation::look, kAll, ""},
    {Operation::seeQuotas, kLeases | bit(Role::viewer), "sees no quotas: use a user's token"},
    {Operation::seeTenants, kLeases | bit(Role::viewer), "sees no tenants: use a user's token"},
    {Operation::lease, kLeases, "cannot lease: use a user's token"},
    {Operation::changeLease, kLeases, "cannot change leases: use a user's token"},
    {Operation::serve, kOperator | bit(Role::server),
     "cannot be used by servers: they use a token of tenant 'servers'"},
    {Operation::dropLost, kOperator, "cannot drop a lost lease: it is dropped by the pool's operator only"},
    {Operation::cordon, kOperator,
     "cannot cordon servers: they are cordoned and uncordoned by the pool's operator only"},
    {Operation::setQuota, kOperator, "cannot set quotas: that is for the pool's operator only"},
    {Operation::tokens, kOperator, "cannot manage tokens: that is for the pool's operator only"},
};

const Rule& ruleOf(Operation operation) {
  const Rule& rule = kRules[static_cast<unsigned>(operation)];
  return rule;
}

constexpr bool inOrder() {
  for (unsigned i = 0; i < kOperations; ++i)
    if (static_cast<unsigned>(kRules[i].operation) != i) return false;
  return true;
}
static_assert(inOrder());

constexpr const char* kNames[kRoles] = {"user", "server", "operator", "viewer", "scheduler"};

}  // namespace

bool may(const Principal& who, Operation operation) { return (ruleOf(operation).roles & bit(who.role)) != 0; }

std::string refusalOf(const Principal& who, Operation operation) {
  if (may(who, operation)) return "";
  return "the token of tenant '" + who.tenant + "' (" + name(who.role) + ") " + ruleOf(operation).refusal;
}

const char* name(Role role) { return kNames[static_cast<unsigned>(role)]; }

std::optional<Role> roleOf(const std::string& text) {
  for (unsigned i = 0; i < kRoles; ++i)
    if (text == kNames[i]) return static_cast<Role>(i);
  return std::nullopt;
}

bool Principal::mayServe() const { return may(*this, Operation::serve); }
bool Principal::mayLease() const { return may(*this, Operation::lease); }

std::string Principal::text() const {
  switch (role) {
    case Role::admin:
      return "the operator" + (token.empty() ? "" : " (token " + token + ")");
    case Role::server:
      return "a server";
    case Role::scheduler:
      return "scheduler " + tenant;
    case Role::user:
    case Role::viewer:
      break;
  }
  return tenant.empty() ? "" : "tenant " + tenant;  // the pool itself, where there are no tenants
}

std::string Principal::saying(const std::string& said) const {
  return said.empty() ? text() : text() + " (says: " + printable(said, kMostSaid) + ")";
}

}  // namespace gpupool::pool
