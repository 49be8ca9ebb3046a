#pragma once
// A manager's service in process, with a clock made by hand, for the tests of its RPC.

#include "catch.h"
#include "fake_server.h"
#include "pool-manager/convert.h"
#include "pool-manager/service.h"
#include "serve_at.h"
#include "support.h"

namespace gpupool::test {

using namespace gpupool::pool;

struct ServiceFixture {
  ServiceFixture()
      : io(kj::setupAsyncIo()), store(makeMemoryStore()), address("unix:" + folder.path + "/manager") {
    PoolTimes times;
    times.beatMs = 100;
    ServiceLimits limits;
    limits.call = 300 * kj::MILLISECONDS;
    limits.tick = 10 * kj::MILLISECONDS;
    service = kj::heap<Service>(io.provider->getTimer(), *store, times, limits, [this] { return now; });
    housekeeping = serveAt(io, *service, folder.path + "/manager");
  }
  kj::Own<ManagerConnection> connect() {
    return connectManager(*io.provider, address, 2 * kj::SECONDS).wait(io.waitScope);
  }
  template <class T>
  T await(kj::Promise<T>&& promise) {
    return io.provider->getTimer().timeoutAfter(5 * kj::SECONDS, kj::mv(promise)).wait(io.waitScope);
  }
  // Time in which the manager runs: it never takes a long step.
  void pass(uint64_t ms) {
    for (; ms != 0; ms -= std::min<uint64_t>(ms, 400)) {
      now += std::min<uint64_t>(ms, 400);
      pause(12);
      await(connect()->manager().devicesRequest().send());  // has read the clock, whatever the ticks do
    }
  }
  void pause(unsigned ms) { io.provider->getTimer().afterDelay(ms * kj::MILLISECONDS).wait(io.waitScope); }

  Folder folder;
  kj::AsyncIoContext io;
  uint64_t now = 1'000'000;
  std::unique_ptr<Store> store;
  std::string address;
  kj::Own<Service> service;
  kj::Promise<void> housekeeping = nullptr;
};

inline kj::Promise<Lease> lease(ManagerConnection& connection, const LeaseRequest& wish) {
  auto request = connection.manager().leaseRequest();
  write(wish, request.initRequest());
  return request.send().then([](auto&& response) { return read(response.getLease()); });
}

inline kj::Promise<uint32_t> renew(ManagerConnection& connection, const Id& id) {
  auto request = connection.manager().renewRequest();
  write(id, request.initId());
  return request.send().then([](auto&& response) { return response.getTtlMs(); });
}

inline kj::Promise<void> release(ManagerConnection& connection, const Id& id, bool drop = false) {
  auto request = connection.manager().releaseRequest();
  write(id, request.initId());
  request.setDrop(drop);
  return request.send().ignoreResult();
}

inline LeaseRequest wish(uint32_t count = 1) {
  LeaseRequest request;
  request.id = Id::random();
  request.deviceCount = count;
  request.holder = "tester";
  return request;
}

// What the promise fails with.
template <class T>
kj::Exception failure(ServiceFixture& fixture, kj::Promise<T>&& promise) {
  KJ_IF_MAYBE (exception, kj::runCatchingExceptions([&]() { fixture.await(kj::mv(promise)); }))
    return kj::mv(*exception);
  return kj::Exception(kj::Exception::Type::FAILED, "", 0, kj::heapString("it succeeded"));
}

}  // namespace gpupool::test
