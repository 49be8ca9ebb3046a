#pragma once
// Tokens: secrets that tenants share with the pool's manager. A file of lines "tenant: token", '#' begins a
// comment; the same format for the manager (all tenants), a user (one line, usually) and a server (tenant
// kServersTenant). A user's or server's file may also have lines "certificate sha256:...": those of the
// manager that the tokens are for, and then nobody else is shown them. Those that the manager has made
// (`gpupool tokens create`) name themselves by an id.

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/fingerprint.h"

namespace gpupool {

using Tokens = std::map<std::string, std::string>;  // by tenant

inline constexpr char kServersTenant[] = "servers";  // servers join with this one's; it may not lease
inline constexpr size_t kShortestToken = 16, kMostTenantBytes = 64;

// A tenant's name is a word of printable ASCII, at most kMostTenantBytes.
bool isTenantName(const std::string& text);

// "gpt_<id>_<secret>": 16 and 64 hexadecimal digits. The id is no secret, and of no other token.
struct NewToken {
  std::string id, text;
};
NewToken makeToken();  // of random bytes
// Of a token of that form; "" of any other.
std::string tokenId(const std::string& token);

// Reads the file, which only its owner may read, who is this process's user or root. Throws
// std::runtime_error with one line that names the file and what to do.
Tokens readTokens(const std::string& path);

// The tenant whose token is shown: `tenant`, or the file's only one where that is empty. Throws as
// readTokens.
struct Credentials {
  std::string tenant, token;  // no token: there is none to show
  std::vector<Fingerprint>
      certificates;         // the manager has one of these, or one of an authority of this file;
  std::string authorities;  // neither is named: it may speak without TLS
};
// authorities: a PEM file, or empty.
Credentials readCredentials(const std::string& path, const std::string& tenant,
                            const std::string& authorities = "");
// A line of a token file.
std::string certificateLine(const Fingerprint& certificate);

// What is shown to a manager; asked at every connection, throws as readTokens.
using CredentialSource = std::function<Credentials()>;
// Reads the file now, and again each time: a token may be exchanged while the process runs.
CredentialSource credentialsOf(const std::string& path, const std::string& tenant,
                               const std::string& authorities = "");

// A manager's file of tokens, which may change while it runs.
class TokenFile {
 public:
  explicit TokenFile(std::string path);  // reads it; throws as readTokens
  // Read again if the file is another than it was. One that cannot be used is logged, and changes nothing.
  // What is returned stays where it is, and valid as long as this.
  const Tokens& current();

 private:
  struct Stamp {
    int64_t device = 0, inode = 0, bytes = 0, modifiedNs = 0, changedNs = 0;
    auto operator<=>(const Stamp&) const = default;
  };
  Stamp stamp() const;

  std::string path_;
  Stamp stamp_;
  Tokens tokens_;
};

}  // namespace gpupool
