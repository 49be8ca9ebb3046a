#include "pool-manager/rpc.h"

#include "schema/fault.h"
#include "schema/manager_link.h"
#include "schema/manager_login.h"

namespace gpupool::pool {
namespace {

capnp::Capability::Client bootstrap(capnp::RpcSystem<capnp::rpc::twoparty::VatId>& system) {
  capnp::MallocMessageBuilder message;
  auto id = message.initRoot<capnp::rpc::twoparty::VatId>();
  id.setSide(capnp::rpc::twoparty::Side::SERVER);
  return system.bootstrap(id);
}

}  // namespace

kj::Exception rpcError(kj::Exception::Type type, const std::string& text) {
  return kj::Exception(type, "", 0, kj::heapString(text.c_str()));
}

std::string errorText(const kj::Exception& error) { return schema::plainText(error); }

ManagerConnection::ManagerConnection(kj::Own<kj::AsyncIoStream> stream)
    : stream_(kj::mv(stream)),
      network_(*stream_, capnp::rpc::twoparty::Side::CLIENT),
      system_(capnp::makeRpcClient(network_)),
      manager_(bootstrap(system_).castAs<schema::Manager>()) {}

kj::Promise<kj::Own<ManagerConnection>> connectManager(kj::AsyncIoProvider& io, const std::string& address,
                                                       kj::Duration limit, CredentialSource credentials) {
  auto attempt =
      schema::reachManager(io.getNetwork(), address, credentials).then([](schema::ManagerLink&& link) {
        auto connection = kj::heap<ManagerConnection>(kj::mv(link.stream));
        auto let = schema::logIn(connection->manager(), link);
        return let.then([connection = kj::mv(connection)]() mutable { return kj::mv(connection); });
      });
  return io.getTimer()
      .timeoutAfter(limit, kj::mv(attempt))
      .catch_([address, limit](kj::Exception&& error) -> kj::Own<ManagerConnection> {
        if (!schema::loginRefusal(error).empty()) kj::throwFatalException(kj::mv(error));
        std::string text = errorText(error);
        if (error.getType() == kj::Exception::Type::OVERLOADED && text.find("timed out") != std::string::npos)
          text = "no answer within " + std::to_string(limit / kj::SECONDS) + " s";
        const std::string port =
            address.find(':') == std::string::npos ? ":" + std::to_string(schema::kDefaultManagerPort) : "";
        kj::throwFatalException(rpcError(error.getType(), address + port + ": " + text));
      });
}

}  // namespace gpupool::pool
