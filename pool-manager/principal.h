#pragma once
// On whose behalf something is asked of the pool. Every operation has one, texts about other people's leases
// too.

#include <string>

namespace gpupool::pool {

struct Principal {
  // user: leases, in the name of its tenant. server: joins, and leases nothing. admin: everything (the
  // manager's own user, and everybody where the manager demands no tokens).
  enum class Role { user, server, admin } role = Role::admin;
  std::string tenant;

  bool mayServe() const { return role != Role::user; }
  bool mayLease() const { return role != Role::server; }
  // For the audit log.
  std::string text() const {
    return role == Role::admin ? "the operator" : role == Role::server ? "a server" : "tenant " + tenant;
  }
  bool owns(const std::string& other) const { return role == Role::admin || other == tenant; }
};

}  // namespace gpupool::pool
