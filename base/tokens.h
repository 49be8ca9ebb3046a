#pragma once
// Tokens: secrets that tenants share with the pool's manager. A file of lines "tenant: token", '#' begins a
// comment; the same format for the manager (all tenants), a user (one line, usually) and a server (tenant
// kServersTenant).

#include <map>
#include <string>

namespace gpupool {

using Tokens = std::map<std::string, std::string>;  // by tenant

inline constexpr char kServersTenant[] = "servers";  // servers join with this one's; it may not lease
inline constexpr size_t kShortestToken = 16, kMostTenantBytes = 64;

// Reads the file, which only its owner may read, who is this process's user or root. Throws
// std::runtime_error with one line that names the file and what to do.
Tokens readTokens(const std::string& path);

// The tenant whose token is shown: `tenant`, or the file's only one where that is empty. Throws as
// readTokens.
struct Credentials {
  std::string tenant, token;  // no token: there is none to show
};
Credentials readCredentials(const std::string& path, const std::string& tenant);

}  // namespace gpupool
