#pragma once
// Who may do what: the one table that every operation asks, over RPC and over REST. What is about one lease
// is besides only for those that own it (Principal::owns). docs/tenants.md shows the same to people.

#include <optional>
#include <string>

#include "pool-manager/principal.h"

namespace gpupool::pool {

enum class Operation {
  look,         // devices, servers, leases, audit, explain, events, metrics; others' leases are in use
  seeQuotas,    // its tenant's; of all tenants: operators and schedulers
  seeTenants,   // the same: who there is, and what each has
  lease,        // request, renew, where its sessions are
  changeLease,  // release, suspend, resume, migrate, checkpoint
  serve,        // join, beat, leave
  dropLost,     // forget a lost lease
  cordon,       // and uncordon
  setQuota,
  tokens,  // create, list, revoke
};
inline constexpr unsigned kOperations = 10;

bool may(const Principal& who, Operation operation);
// Why not, in one line for people; "": it may.
std::string refusalOf(const Principal& who, Operation operation);

inline constexpr size_t kMostSaid = 100;  // bytes of what Principal::saying is told; the rest is cut

using Role = Principal::Role;
inline constexpr unsigned kRoles = 5;
const char* name(Role role);  // "operator"
std::optional<Role> roleOf(const std::string& name);

}  // namespace gpupool::pool
