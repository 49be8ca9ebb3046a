#pragma once
// Small things that manager and tool both need around Cap'n Proto RPC: addresses, errors as text, connecting.
//
// An address is "unix:/path", "host:port" or "host" (port kDefaultManagerPort).

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <string>

#include "schema/manager_link.h"
#include "schema/pool.capnp.h"

namespace gpupool::pool {

using schema::endWithHost;
using schema::kDefaultManagerPort;

// Exceptions cross the wire as a type and a text. OVERLOADED: nothing free now; UNIMPLEMENTED: the pool has
// nothing of the kind; DISCONNECTED: a server or the wire was lost; FAILED: refused.
kj::Exception rpcError(kj::Exception::Type type, const std::string& text);
// The text as it was thrown on the other side, without what RPC wraps around it.
std::string errorText(const kj::Exception& error);

// One connection to a manager. Belongs to one event loop; the promises that use it end before it.
class ManagerConnection {
 public:
  explicit ManagerConnection(kj::Own<kj::AsyncIoStream> stream);
  schema::Manager::Client manager() { return manager_; }
  kj::Promise<void> onDisconnect() { return network_.onDisconnect(); }

 private:
  kj::Own<kj::AsyncIoStream> stream_;
  capnp::TwoPartyVatNetwork network_;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> system_;
  schema::Manager::Client manager_;
};

// Connects, and checks within `limit` that a manager answers there and accepts the login. The promise fails
// with a text that names the address, or with schema::loginRefusal's, if it is the token that is at fault.
kj::Promise<kj::Own<ManagerConnection>> connectManager(
    kj::AsyncIoProvider& io, const std::string& address, kj::Duration limit,
    CredentialSource credentials = [] { return Credentials{}; });

}  // namespace gpupool::pool
