// When servers beat: a manager in this process, and a clock that the test turns.
#include "server/front/membership.h"

#include <capnp/rpc-twoparty.h>
#include <kj/timer.h>

#include <set>
#include <vector>

#include "catch.h"
#include "schema/fabric.h"
#include "schema/pool.capnp.h"

using namespace gpupool;
using server::Membership;

namespace {

constexpr int64_t kBeatMs = 1000;

// Where everybody joins, and whose beats are noted.
struct FakeManager final : schema::Manager::Server {
  FakeManager(kj::Timer& clock, std::map<std::string, std::vector<int64_t>>& noted)
      : timer(clock), beatsMs(noted) {}
  kj::Promise<void> login(LoginContext context) override {
    context.getResults().setProtocol(context.getParams().getProtocol());
    context.getResults().setOldest(context.getParams().getOldest());
    return kj::READY_NOW;
  }
  kj::Promise<void> join(JoinContext context) override {
    context.getResults().setBeatMs(static_cast<uint32_t>(kBeatMs));
    return kj::READY_NOW;
  }
  kj::Promise<void> beat(BeatContext context) override {
    const auto sinceBegin = timer.now() - kj::origin<kj::TimePoint>();
    beatsMs[context.getParams().getName()].push_back(sinceBegin / kj::MILLISECONDS);
    context.getResults().setKnown(true);
    return kj::READY_NOW;
  }
  kj::Timer& timer;
  std::map<std::string, std::vector<int64_t>>& beatsMs;
};

struct Control final : schema::ServerControl::Server {};

// Of one address, behind which the manager is.
struct PipeNetwork final : kj::Network {
  struct Address final : kj::NetworkAddress {
    explicit Address(PipeNetwork& of) : network(of) {}
    kj::Promise<kj::Own<kj::AsyncIoStream>> connect() override {
      auto pipe = kj::newTwoWayPipe();
      network.manager.accept(kj::mv(pipe.ends[0]));
      return kj::mv(pipe.ends[1]);
    }
    kj::Own<kj::ConnectionReceiver> listen() override { KJ_UNIMPLEMENTED("nobody listens"); }
    kj::Own<kj::NetworkAddress> clone() override { return kj::heap<Address>(network); }
    kj::String toString() override { return kj::str("manager"); }
    PipeNetwork& network;
  };

  explicit PipeNetwork(capnp::Capability::Client bootstrap) : manager(kj::mv(bootstrap)) {}
  kj::Promise<kj::Own<kj::NetworkAddress>> parseAddress(kj::StringPtr, uint) override {
    return kj::Own<kj::NetworkAddress>(kj::heap<Address>(*this));
  }
  kj::Own<kj::NetworkAddress> getSockaddr(const void*, uint) override { KJ_UNIMPLEMENTED("names only"); }
  kj::Own<kj::Network> restrictPeers(kj::ArrayPtr<const kj::StringPtr>,
                                     kj::ArrayPtr<const kj::StringPtr>) override {
    KJ_UNIMPLEMENTED("everybody is let in");
  }
  capnp::TwoPartyServer manager;
};

Membership::Facts factsOf(const std::string& name) {
  Membership::Facts facts;
  facts.name = name;
  facts.incarnation = Id::random();
  facts.describe = [](auto) {};
  facts.activeLeases = [] { return std::vector<Id>{}; };
  facts.suspended = [] { return std::vector<std::pair<Id, std::vector<uint64_t>>>{}; };
  facts.held = [](const Id&) -> const server::HeldFiles* { return nullptr; };
  facts.hindrances = facts.protection = [] { return std::map<Id, std::vector<std::string>>{}; };
  facts.problems = [] { return std::vector<std::string>{}; };
  facts.warmWorkers = [] { return 0u; };
  facts.fabric = [fabric = std::make_shared<const fabric::Fabric>()] { return fabric; };
  return facts;
}

}  // namespace

TEST_CASE("servers that join together do not beat together") {
  constexpr size_t kServers = 64;
  kj::EventLoop loop;
  kj::WaitScope scope(loop);
  kj::TimerImpl timer(kj::origin<kj::TimePoint>());
  std::map<std::string, std::vector<int64_t>> beatsMs;
  PipeNetwork network(kj::heap<FakeManager>(timer, beatsMs));
  std::vector<std::unique_ptr<Membership>> servers;
  servers.reserve(kServers);
  Membership::Settings settings;
  settings.manager = "unix:/manager";
  for (size_t i = 0; i < kServers; ++i)
    servers.push_back(std::make_unique<Membership>(network, timer, settings,
                                                   factsOf("node" + std::to_string(i)), kj::heap<Control>()));
  scope.poll();
  for (int64_t ms = 1; ms <= 3 * kBeatMs; ++ms) {
    timer.advanceTo(kj::origin<kj::TimePoint>() + ms * kj::MILLISECONDS);
    scope.poll();
  }
  REQUIRE(beatsMs.size() == kServers);
  std::set<int64_t> tenths;
  for (const auto& [name, times] : beatsMs) {
    INFO(name);
    REQUIRE(times.size() >= 3);
    CHECK(times[0] == 0);  // it follows the join at once
    CHECK(times[1] <= kBeatMs);
    for (size_t i = 2; i < times.size(); ++i) CHECK(times[i] - times[i - 1] == kBeatMs);
    tenths.insert(times[1] / (kBeatMs / 10));
  }
  CHECK(tenths.size() >= 5);  // fewer: with a chance of 10^-19
}
