#pragma once
// The client's side of Manager.login and .prove: what holders, the `gpupool` tool and servers do first on a
// connection to the manager.

#include <kj/async.h>

#include <string>

#include "schema/manager_link.h"
#include "schema/pool.capnp.h"
#include "schema/protocol.h"

namespace gpupool::schema {

// Resolves when the connection may be used. link: what the manager was reached by; its stream may be gone.
// Rejects, where the manager is there and it is the token or the version that is at fault, with an exception
// of which `loginRefusal` gives the text for people; else with what the connection failed of.
kj::Promise<void> logIn(Manager::Client manager, const ManagerLink& link);

// Said by whichever side sees it.
std::string loginMismatch(const ProtocolRange& managers, const ProtocolRange& callers);

// The one line of a refusal by either side; empty: the exception is something else.
std::string loginRefusal(const kj::Exception& error);

}  // namespace gpupool::schema
