#pragma once
// The way to another server for a session that moves there: a connection, over which this server announces
// the session as SessionHello.arrives says, and which is then the state socket. Belongs to the event loop's
// thread.

#include <kj/async-io.h>
#include <kj/io.h>

#include <string>
#include <vector>

#include "schema/session_opening.h"

namespace gpupool::server {

struct Destination {
  std::string name, host;  // ServerInfo's
  uint16_t port = 0;
  std::vector<uint64_t> rows = {};  // of the clients that it serves; none: it does not say
};

// Resolves within `bound`, when a worker waits there for the session. Rejects with a text for people.
kj::Promise<kj::AutoCloseFd> announceSession(kj::Network& network, kj::Timer& timer, const Destination& where,
                                             schema::SessionOpening opening, kj::Duration bound);

}  // namespace gpupool::server
