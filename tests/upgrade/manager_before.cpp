// A manager of before Manager.drain, as whoever asks it sees it: it passes what that one knew on to a real
// manager, and answers the methods that came later as every program answers a method that it does not know.
//   manager_before SOCKET SOCKET_OF_THE_REAL_ONE
#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>
#include <unistd.h>

#include <string>

#include "schema/pool.capnp.h"

namespace {

constexpr uint16_t kLastKnown = 20;  // Manager.failOver

class Before final : public capnp::Capability::Server {
 public:
  explicit Before(capnp::Capability::Client real) : real_(kj::mv(real)) {}

  DispatchCallResult dispatchCall(uint64_t interface, uint16_t method,
                                  capnp::CallContext<capnp::AnyPointer, capnp::AnyPointer> context) override {
    if (method > kLastKnown) return internalUnimplemented("pool.capnp:Manager", interface, method);
    auto request = real_.typelessRequest(interface, method, nullptr);
    request.set(context.getParams());
    context.releaseParams();
    return {context.tailCall(kj::mv(request)), false};
  }

 private:
  capnp::Capability::Client real_;
};

// One connection, with one of its own to the real manager: the end of a connection means something there.
struct Peer {
  Peer(kj::Own<kj::AsyncIoStream> from, kj::Own<kj::AsyncIoStream> to)
      : from(kj::mv(from)),
        to(kj::mv(to)),
        client(*this->to),
        network(*this->from, capnp::rpc::twoparty::Side::SERVER),
        system(capnp::makeRpcServer(network, kj::heap<Before>(client.bootstrap()))) {}
  kj::Own<kj::AsyncIoStream> from, to;
  capnp::TwoPartyClient client;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> system;
};

class Manager final : private kj::TaskSet::ErrorHandler {
 public:
  Manager(kj::Network& network, std::string real)
      : network_(network), real_(std::move(real)), peers_(*this) {}

  kj::Promise<void> serve(kj::ConnectionReceiver& receiver) {
    return receiver.accept().then([this, &receiver](kj::Own<kj::AsyncIoStream> stream) {
      peers_.add(meet(kj::mv(stream)));
      return serve(receiver);
    });
  }

 private:
  kj::Promise<void> meet(kj::Own<kj::AsyncIoStream> from) {
    return network_.parseAddress("unix:" + real_)
        .then([](kj::Own<kj::NetworkAddress> address) { return address->connect().attach(kj::mv(address)); })
        .then([from = kj::mv(from)](kj::Own<kj::AsyncIoStream> to) mutable {
          auto peer = kj::heap<Peer>(kj::mv(from), kj::mv(to));
          auto over = peer->network.onDisconnect();
          return over.attach(kj::mv(peer));
        });
  }
  void taskFailed(kj::Exception&&) override {}  // of a peer that has gone

  kj::Network& network_;
  std::string real_;
  kj::TaskSet peers_;
};

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  auto io = kj::setupAsyncIo();
  Manager manager(io.provider->getNetwork(), words[2]);
  auto address = io.provider->getNetwork().parseAddress("unix:" + std::string(words[1])).wait(io.waitScope);
  auto receiver = address->listen();
  manager.serve(*receiver).wait(io.waitScope);
}
