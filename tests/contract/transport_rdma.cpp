// What RDMA adds to the contract: who may move bytes, and that no processor does. Where there is no RDMA
// device, only that its absence is said; tests/rdma runs this where there is one.

#include <algorithm>
#include <cstring>
#include <thread>

#include "catch.h"
#include "pairs.h"
#include "transports/ucx_link.h"

using namespace gpupool::transport;
using namespace gpupool::transport::testing;

namespace {

constexpr size_t kLarge = 1 << 20;

Region shareNamed(Connection& owner, Connection& user, const std::shared_ptr<SharedMemory>& memory) {
  Region region = owner.share(memory);
  REQUIRE(sendBytes(owner, Channel::control, &region, sizeof region));
  REQUIRE(user.receive(Channel::control, in(10s)).size() == sizeof region);
  return region;
}

bool wanted(const char* transport) {
  auto names = processTransports();
  return std::find(names.begin(), names.end(), transport) != names.end();
}

// A client that says what it likes over the real wire.
struct HostileRdmaClient final : UcxLink::Sink {
  std::unique_ptr<Connection> worker;
  std::unique_ptr<UcxLink> link;
  Descriptor bootstrap;
  std::vector<WireHeader> heard;

  HostileRdmaClient() {
    Options options;
    options.wire = NetworkWire::rdma;
    auto [client, accepted] = bootstrapSockets("ucx-rdma");
    std::thread accepting([&, accepted = accepted] { worker = acceptUcx(accepted, options); });
    UcxGreeting greeting;
    link = UcxLink::connect(client, options, greeting);
    link->setSink(this);
    TimeLeft time(5s);
    UcxLink::sayReady(client, time);
    bootstrap = Descriptor(client);
    accepting.join();
    REQUIRE(worker);
  }
  bool received(const WireHeader& header, void*, size_t, bool) override {
    heard.push_back(header);
    return false;
  }
  void failed(const std::string&) override {}
  void say(const WireHeader& header, const std::vector<std::byte>& payload = {},
           uint32_t flags = UCP_AM_SEND_FLAG_EAGER) {
    bool sent = false;
    link->send(header, payload.data(), payload.size(), flags, [&](bool) { sent = true; });
    for (Deadline limit = in(2s); !sent && Clock::now() < limit;) link->progress();
  }
  bool hears(WireKind kind, uint32_t channel) {
    for (Deadline limit = in(5s); Clock::now() < limit && worker->peer() == Peer::alive;) {
      link->progress();
      for (auto& header : heard)
        if (header.kind == kind && header.channel == channel) return true;
    }
    return false;
  }
};

bool losesPeer(Connection& connection) {
  for (Deadline limit = in(5s); Clock::now() < limit; std::this_thread::sleep_for(1ms))
    if (connection.peer() == Peer::lost) return true;
  return false;
}

}  // namespace

TEST_CASE("rdma: large transfers are copied by no processor, small ones by messages") {
  if (!wanted("ucx-rdma")) return;
  Pair pair = connectPair("ucx-rdma");
  auto theirs = SharedMemory::create(4 * kLarge), mine = SharedMemory::create(4 * kLarge);
  Region remote = shareNamed(*pair.worker, *pair.client, theirs);
  Region lent = shareNamed(*pair.client, *pair.worker, mine);
  std::vector<std::byte> ordinary(kLarge);
  auto moved = [&](Connection& user, Transfer transfer, uint64_t bytes, uint64_t already) {
    REQUIRE(user.wait(transfer, in(20s)));
    for (Deadline limit = in(5s);
         Clock::now() < limit && pair.client->traffic().movedBytes != already + bytes;)
      std::this_thread::sleep_for(1ms);  // the client is told of what the worker placed
    CHECK(pair.client->traffic().movedBytes == already + bytes);
    CHECK(pair.worker->traffic().movedBytes == already + bytes);
    CHECK(pair.client->traffic().copiedBytes == 0);
    CHECK(pair.worker->traffic().copiedBytes == 0);
  };
  uint64_t total = 0;
  fillPattern(mine->data(), mine->size(), 1);
  moved(*pair.client, pair.client->put(mine->data() + 8, remote, 3, 2 * kLarge), 2 * kLarge, total);
  total += 2 * kLarge;
  CHECK(std::memcmp(theirs->data() + 3, mine->data() + 8, 2 * kLarge) == 0);
  fillPattern(ordinary.data(), ordinary.size(), 2);  // registered for the transfer alone
  moved(*pair.client, pair.client->put(ordinary.data(), remote, 0, kLarge), kLarge, total);
  total += kLarge;
  CHECK(hasPattern(theirs->data(), kLarge, 2));
  moved(*pair.client, pair.client->get(mine->data(), remote, 0, kLarge), kLarge, total);
  total += kLarge;
  CHECK(hasPattern(mine->data(), kLarge, 2));
  fillPattern(theirs->data(), theirs->size(), 3);
  moved(*pair.worker, pair.worker->put(theirs->data(), lent, kLarge, 3 * kLarge), 3 * kLarge, total);
  total += 3 * kLarge;
  CHECK(hasPattern(mine->data() + kLarge, 3 * kLarge, 3));
  REQUIRE(pair.worker->wait(pair.worker->get(ordinary.data(), lent, kLarge, kLarge), in(20s)));
  CHECK(pair.worker->traffic().movedBytes == total + kLarge);  // the client does not notice
  CHECK(hasPattern(ordinary.data(), kLarge, 3));

  REQUIRE(pair.client->wait(pair.client->put(ordinary.data(), remote, 0, 1000), in(5s)));
  CHECK(pair.client->traffic().copiedBytes == 1000);
  CHECK(pair.worker->traffic().copiedBytes == 1000);
}

TEST_CASE("rdma: memory that was taken back is let go only after the peer's transfers there") {
  if (!wanted("ucx-rdma")) return;
  Pair pair = connectPair("ucx-rdma");
  std::vector<std::byte> source(kLarge);
  fillPattern(source.data(), source.size(), 5);
  for (int round = 0; round < 5; ++round) {
    auto mine = SharedMemory::create(kLarge);
    std::weak_ptr<SharedMemory> watched = mine;
    Region lent = shareNamed(*pair.client, *pair.worker, mine);
    Transfer put = pair.worker->put(source.data(), lent, 0, kLarge);
    REQUIRE(put != kRefused);
    pair.client->unshare(lent);
    pair.worker->wait(put, in(10s));  // lands, or is refused: the memory is there all the while
    mine.reset();
    for (Deadline limit = in(5s); Clock::now() < limit && !watched.expired();)
      std::this_thread::sleep_for(1ms);
    CHECK(watched.expired());
    CHECK(pair.client->peer() == Peer::alive);
    CHECK(pair.worker->peer() == Peer::alive);
  }
  // And with the peer gone, by then at the latest.
  auto mine = SharedMemory::create(kLarge);
  std::weak_ptr<SharedMemory> watched = mine;
  Region lent = shareNamed(*pair.client, *pair.worker, mine);
  mine.reset();
  pair.worker.reset();
  for (Deadline limit = in(5s); Clock::now() < limit && pair.client->peer() == Peer::alive;)
    std::this_thread::sleep_for(1ms);
  pair.client->unshare(lent);
  for (Deadline limit = in(5s); Clock::now() < limit && !watched.expired();) std::this_thread::sleep_for(1ms);
  CHECK(watched.expired());
}

TEST_CASE("rdma: a client's keys and requests are checked, and it is given no key") {
  if (!wanted("ucx-rdma")) return;
  HostileRdmaClient client;
  auto memory = SharedMemory::create(64 << 10);
  fillPattern(memory->data(), memory->size(), 8);
  Region region = client.worker->share(memory);
  REQUIRE(client.hears(WireKind::region, 0));
  std::vector<std::byte> nonsense(300, std::byte{0xFF});
  WireHeader fetch{.kind = WireKind::fetch, .number = 1, .region = region, .length = 40 << 10};
  SECTION("a key of nonsense, none, and one too long are refused") {
    for (size_t bytes : {size_t{300}, size_t{8}, size_t{0}, size_t{5000}}) {
      client.heard.clear();
      nonsense.resize(bytes, std::byte{0});
      client.say(fetch, nonsense);
      bool refused = client.hears(WireKind::putDone, 1);
      CHECK((refused || client.worker->peer() == Peer::lost));
      if (!refused) break;
      ++fetch.number;
    }
  }
  SECTION("beyond the region") {
    auto own = SharedMemory::create(64 << 10);
    auto key = client.link->registered()->map(own->data(), own->size(), true);
    REQUIRE(key);
    std::vector<std::byte> place(8 + key->key().size());
    auto address = reinterpret_cast<uint64_t>(own->data());
    std::memcpy(place.data(), &address, 8);
    std::memcpy(place.data() + 8, key->key().data(), key->key().size());
    fetch.offset = 32 << 10;
    client.say(fetch, place);
    CHECK(client.hears(WireKind::putDone, 1));
    fetch = {.kind = WireKind::fill, .number = 7, .region = region, .offset = 32 << 10, .length = 40 << 10};
    client.say(fetch, place);
    CHECK(client.hears(WireKind::filled, 1));
    fetch.offset = 0;
    client.say(fetch, place);
    CHECK(client.hears(WireKind::filled, 0));
    CHECK(hasPattern(own->data(), 40 << 10, 8));
  }
  SECTION("a rendezvous ends the session") {
    client.say({.kind = WireKind::put, .number = 1, .region = region, .length = 40 << 10},
               std::vector<std::byte>(40 << 10), UCP_AM_SEND_FLAG_RNDV);
    CHECK(losesPeer(*client.worker));
  }
  SECTION("what only a worker says ends the session") {
    client.say({.kind = WireKind::placed, .number = 1, .length = 8});
    CHECK(losesPeer(*client.worker));
  }
  CHECK(hasPattern(memory->data(), memory->size(), 8));
}

TEST_CASE("rdma: both fall back to tcp where one of them cannot or may not") {
  if (!wanted("ucx-rdma")) return;
  Options worker, client;
  auto [clientEnd, workerEnd] = bootstrapSockets("ucx-rdma");
  bool workerMay = GENERATE(true, false);
  (workerMay ? client : worker).wire = NetworkWire::tcp;
  std::unique_ptr<Connection> accepted;
  std::thread accepting([&, socket = workerEnd] { accepted = acceptUcx(socket, worker); });
  auto connected = connectUcx(clientEnd, client);
  accepting.join();
  REQUIRE(accepted);
  auto memory = SharedMemory::create(kLarge);
  Region region = shareNamed(*accepted, *connected, memory);
  std::vector<std::byte> bytes(kLarge);
  REQUIRE(connected->wait(connected->put(bytes.data(), region, 0, kLarge), in(10s)));
  CHECK(connected->traffic().movedBytes == 0);
  CHECK(connected->traffic().copiedBytes == kLarge);
}

TEST_CASE("rdma: what is asked for and cannot be had is said") {
  if (!wanted("ucx")) return;
  Options options;
  options.wire = NetworkWire::rdma;
  options.setupTimeout = 2s;
  auto [client, worker] = bootstrapSockets("ucx");
  std::string why;
  try {
    accept("ucx", worker, options);
  } catch (const std::exception& error) {
    why = error.what();
  }
  CHECK(why.find("no RDMA device") != std::string::npos);
  CHECK(why.find("'lo'") != std::string::npos);
  ::close(client);
  CHECK_THROWS(wireNamed("string"));
  CHECK(wireNamed("auto") == NetworkWire::automatic);
}
