#pragma once
// The way to a manager, for holders, the `gpupool` tool and servers: a stream, with TLS where the manager's
// certificate is known. Manager.login comes next (manager_login.h).
//
// An address is "unix:/path", "host:port" or "host" (port kDefaultManagerPort).

#include <kj/async-io.h>

#include <optional>
#include <string>

#include "base/tokens.h"

namespace gpupool::schema {

inline constexpr uint16_t kDefaultManagerPort = 4780;

struct ManagerLink {
  kj::Own<kj::AsyncIoStream> stream;
  std::string address;                     // for the texts
  Credentials credentials;                 // to log in with
  std::optional<Fingerprint> certificate;  // that the manager shows; none: no TLS
};

// Over a Unix socket there is no TLS. Fails, where the credentials cannot be read or the manager is not
// trusted, with an exception of which loginRefusal (manager_login.h) gives the text for people. Takes as long
// as the peer does.
kj::Promise<ManagerLink> reachManager(kj::Network& network, const std::string& address,
                                      const CredentialSource& credentials);

// For a connection over TCP, either end: it ends when the peer's host has not answered for 15 s, also while
// the connection is idle, so that a host that vanished leaves no connection open. No effect on a Unix socket.
void endWithHost(kj::AsyncIoStream& stream);

}  // namespace gpupool::schema
