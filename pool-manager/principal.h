#pragma once
// On whose behalf something is asked of the pool. Every operation has one, texts about other people's leases
// too.

#include <string>

namespace gpupool::pool {

struct Principal {
  // What each may: roles.h. admin: the operator: by a token, as the manager's own user, or anybody where the
  // manager demands no tokens.
  enum class Role { user, server, admin, viewer, scheduler } role = Role::admin;
  std::string tenant;
  std::string token = {};  // the id of the token that was shown; empty: none that the manager's store has
  bool open = false;       // nothing was proven, since the manager demands no tokens

  // Both as roles.h says.
  bool mayServe() const;
  bool mayLease() const;
  // For the audit log.
  std::string text() const;
  // The same, and what it says of itself, which nobody has proven: "the operator (says: eve@head)".
  std::string saying(const std::string& said) const;
  // Is told whose a lease of that tenant is, and may do with it what its role may with leases.
  bool owns(const std::string& other) const {
    return role == Role::admin || role == Role::scheduler || other == tenant;
  }
};

}  // namespace gpupool::pool
