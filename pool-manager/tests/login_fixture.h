#pragma once
// A manager's service that demands tokens, and connections to it, for the tests of who may do what.

#include "catch.h"
#include "fake_server.h"
#include "pool-manager/convert.h"
#include "pool-manager/rpc.h"
#include "pool-manager/service.h"
#include "schema/manager_login.h"
#include "support.h"

namespace gpupool::test {

using namespace gpupool::pool;

inline const std::string kAlicesToken(32, 'a'), kBobsToken(32, 'b'), kServers(32, 's');

inline std::string refusal(const std::function<void()>& action) {
  KJ_IF_MAYBE (error, kj::runCatchingExceptions([&]() { action(); })) {
    const std::string text = schema::loginRefusal(*error);
    return text.empty() ? errorText(*error) : text;
  }
  return "";
}

// A service on TCP that demands tokens, and a server that joined with its own.
struct LoginFixture {
  explicit LoginFixture(size_t connections = 512, kj::Duration login = 60 * kj::SECONDS)
      : io(kj::setupAsyncIo()), store(makeMemoryStore()) {
    ServiceLimits limits;
    limits.tick = 10 * kj::MILLISECONDS;
    limits.login = login;
    limits.connections = connections;
    service = kj::heap<Service>(io.provider->getTimer(), *store, PoolTimes{}, limits, bootTimeMs);
    service->demandTokens([this]() -> const Tokens& { return tokens; });
    listen();
    housekeeping = service->run();
    server = kj::heap<FakeServer>(io, "a", 1, folder.path + "/server");
    server->credentials = {kServersTenant, kServers};
    server->join(address);
    server->joined().wait(io.waitScope);
  }
  void listen() {
    auto parsed = io.provider->getNetwork().parseAddress("127.0.0.1:0").wait(io.waitScope);
    auto listener = parsed->listen();
    address = "127.0.0.1:" + std::to_string(listener->getPort());
    service->serve(kj::mv(listener), false);
  }
  kj::Own<ManagerConnection> connect(const std::string& tenant, const std::string& token) {
    return connectManager(*io.provider, address, 2 * kj::SECONDS, [&] { return Credentials{tenant, token}; })
        .wait(io.waitScope);
  }
  // A connection that has not logged in.
  kj::Own<ManagerConnection> bare() {
    auto parsed = io.provider->getNetwork().parseAddress(address.c_str()).wait(io.waitScope);
    return kj::heap<ManagerConnection>(parsed->connect().wait(io.waitScope));
  }
  Lease lease(ManagerConnection& connection, const LeaseRequest& wish) {
    auto request = connection.manager().leaseRequest();
    pool::write(wish, request.initRequest());
    return read(request.send().wait(io.waitScope).getLease());
  }
  template <class Request>
  void send(Request&& request, const Id& id) {
    pool::write(id, request.initId());
    request.send().wait(io.waitScope);
  }
  // Looks until it is so, for as long as a busy machine may take.
  bool eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 200; ++i, pause(50))
      if (condition()) return true;
    return false;
  }
  void pause(unsigned ms) { io.provider->getTimer().afterDelay(ms * kj::MILLISECONDS).wait(io.waitScope); }

  Tokens tokens{{"alice", kAlicesToken}, {"bob", kBobsToken}, {kServersTenant, kServers}};
  Folder folder;
  kj::AsyncIoContext io;
  std::unique_ptr<Store> store;
  std::string address;
  kj::Own<Service> service;
  kj::Promise<void> housekeeping = nullptr;
  kj::Own<FakeServer> server;
};

inline LeaseRequest wish(const std::string& tenant = "") {
  LeaseRequest request;
  request.id = Id::random();
  request.tenant = tenant;
  return request;
}

}  // namespace gpupool::test
