// Peers that do not keep to the protocol: they lose their own session and reach nothing else.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "catch.h"
#include "pairs.h"
#include "transports/bootstrap.h"
#include "transports/ring.h"
#include "transports/ucx_link.h"

using namespace gpupool::transport;
using namespace gpupool::transport::testing;

namespace {

bool becomesLost(Connection& connection) {
  for (Deadline limit = in(3s); Clock::now() < limit; std::this_thread::sleep_for(1ms)) {
    if (connection.peer() != Peer::alive) break;
  }
  return connection.peer() == Peer::lost && !connection.reason().empty();
}

// A shm client made by hand: it has the rings and the socket, and no manners.
struct HostileClient {
  std::unique_ptr<Connection> worker;
  std::unique_ptr<Bootstrap> socket;
  std::shared_ptr<SharedMemory> memory;
  std::unique_ptr<RingMemory> rings;

  HostileClient() {
    Options options;
    options.callBytes = 64 << 10;
    options.controlBytes = 16 << 10;
    auto [client, accepted] = bootstrapSockets("shm");
    std::thread accepting([&, accepted = accepted] { worker = acceptShm(accepted, options); });
    socket = std::make_unique<Bootstrap>(client);
    Record hello;
    Descriptor descriptor;
    bool greeted = socket->receive(hello, descriptor, TimeLeft(5s));
    RingMemory::Sizes sizes = RingMemory::sizes(options);
    memory = SharedMemory::adopt(descriptor.release(), RingMemory::totalBytes(sizes));
    rings = std::make_unique<RingMemory>(memory->descriptor(), sizes);
    greeted = greeted && socket->send({RecordKind::hello, 1, 0}, -1, TimeLeft(5s));
    accepting.join();
    REQUIRE(greeted);
    REQUIRE(worker);
  }
  // The client's ring to the worker.
  RingWords* words(Channel channel) { return rings->words(kChannels + static_cast<int>(channel)); }
  std::byte* data(Channel channel) { return rings->data(kChannels + static_cast<int>(channel)); }
  RingWords* back(Channel channel) { return rings->words(static_cast<int>(channel)); }
  bool say(const Record& record, int attached = -1) { return socket->send(record, attached, TimeLeft(1s)); }
};

int sealed(size_t bytes) {
  int descriptor = memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(ftruncate(descriptor, static_cast<off_t>(bytes)) == 0);
  REQUIRE(fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
  return descriptor;
}

}  // namespace

TEST_CASE("hostile: a scribbled length or position ends the session") {
  HostileClient client;
  auto* length = reinterpret_cast<uint64_t*>(client.data(Channel::call));
  SECTION("length") {
    *length = 1 << 20;
    client.words(Channel::call)->tail = 64;
  }
  SECTION("length that wraps") {
    *length = UINT64_MAX;
    client.words(Channel::call)->tail = 64;
  }
  SECTION("tail") { client.words(Channel::call)->tail = 1 << 30; }
  CHECK(client.worker->receive(Channel::call, in(2s)).data() == nullptr);
  CHECK(client.worker->peer() == Peer::lost);
  CHECK(client.worker->receive(Channel::call, kForever).data() == nullptr);
  CHECK(client.worker->reserve(Channel::call, 8, kForever) == nullptr);
}

TEST_CASE("hostile: a scribbled head ends the session and never lets the worker overrun") {
  HostileClient client;
  std::vector<std::byte> bytes(1000);
  client.back(Channel::call)->head = GENERATE(uint64_t{1} << 40, UINT64_MAX, uint64_t{1} << 20);
  int sent = 0;
  while (sent < 1000 && sendBytes(*client.worker, Channel::call, bytes.data(), bytes.size(), in(100ms)))
    ++sent;
  CHECK(sent < 66);
  CHECK(client.worker->peer() == Peer::lost);
}

TEST_CASE("hostile: a message cannot be changed after it was received") {
  HostileClient client;
  auto* length = reinterpret_cast<uint64_t*>(client.data(Channel::call));
  fillPattern(client.data(Channel::call) + 8, 512, 1);
  *length = 512;
  client.words(Channel::call)->tail = 520;
  auto message = client.worker->receive(Channel::call, in(2s));
  REQUIRE(message.size() == 512);
  std::memset(client.data(Channel::call), 0xFF, 4096);
  *length = 1 << 30;
  CHECK(hasPattern(message.data(), 512, 1));
  CHECK(message.size() == 512);
}

TEST_CASE("hostile: the rings cannot be resized") {
  HostileClient client;
  CHECK(ftruncate(client.memory->descriptor(), 0) != 0);
  CHECK(ftruncate(client.memory->descriptor(), 1 << 30) != 0);
  CHECK(fcntl(client.memory->descriptor(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
  uint64_t word = 5;
  CHECK(sendBytes(*client.worker, Channel::call, &word, sizeof word));
}

TEST_CASE("hostile: random bytes in every shared word and record") {
  for (unsigned seed = 0; seed < 12; ++seed) {
    HostileClient client;
    std::atomic<bool> stop{false};
    std::thread scribbler([&] {
      std::mt19937_64 random(seed);
      while (!stop) {
        for (Channel channel : {Channel::call, Channel::control}) {
          auto* data = reinterpret_cast<uint64_t*>(client.data(channel));
          size_t words = channel == Channel::call ? 8192 : 2048;
          for (int i = 0; i < 64; ++i) data[random() % words] = random() % 3 ? random() % 600 : random();
          // Mostly plausible, so that messages are parsed; now and then not.
          uint64_t step = random() % 200 ? random() % 512 * 8 : random();
          client.words(channel)->tail.fetch_add(step);
          if (random() % 8 == 0) client.back(channel)->head = random() % 4 ? random() % 4096 : random();
          client.words(channel)->consumerArmed = static_cast<uint32_t>(random());
        }
      }
    });
    std::vector<std::byte> bytes(3000);
    std::thread sender([&] {
      while (sendBytes(*client.worker, Channel::control, bytes.data(), bytes.size(), in(20ms))) {
      }
    });
    Deadline limit = in(100ms);
    uint64_t sum = 0;
    while (Clock::now() < limit && client.worker->peer() == Peer::alive) {
      auto message = client.worker->receive(Channel::call, in(10ms));
      REQUIRE(message.size() <= client.worker->maxMessage(Channel::call));
      sum += checksum(message.data(), message.size());
    }
    CHECK(sum + 1 != 0);
    stop = true;
    scribbler.join();
    sender.join();
    client.worker.reset();
  }
}

TEST_CASE("hostile: announcements on the bootstrap socket") {
  HostileClient client;
  SECTION("without a descriptor") { client.say({RecordKind::region, 1, 1, 0, 4096}); }
  SECTION("of an unknown kind") { client.say({static_cast<RecordKind>(77), 1, 1, 0, 4096}); }
  SECTION("twice") {
    Descriptor memory(sealed(4096));
    client.say({RecordKind::region, 1, 1, 0, 4096}, memory.get());
    client.say({RecordKind::region, 1, 1, 0, 4096}, memory.get());
  }
  SECTION("with an id beyond the limit") {
    Descriptor memory(sealed(4096));
    client.say({RecordKind::region, 1u << 31, 1, 0, 4096}, memory.get());
  }
  SECTION("withdrawn before it was made") { client.say({RecordKind::withdraw, 1, 1}); }
  CHECK(becomesLost(*client.worker));
}

TEST_CASE("hostile: memory that is not what was announced is never mapped") {
  HostileClient client;
  Descriptor memory;
  uint64_t size = 8192;
  SECTION("unsealed") {
    memory = Descriptor(memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    REQUIRE(ftruncate(memory.get(), 8192) == 0);
  }
  SECTION("smaller than announced") { memory = Descriptor(sealed(4096)); }
  SECTION("a device") { memory = Descriptor(open("/dev/zero", O_RDWR | O_CLOEXEC)); }
  SECTION("absurdly large") {
    memory = Descriptor(sealed(4096));
    size = UINT64_MAX;
  }
  REQUIRE(client.say({RecordKind::region, 1, 1, 0, size}, memory.get()));
  std::byte bytes[64] = {};
  CHECK(client.worker->put(bytes, {1, 1}, 0, sizeof bytes) == kRefused);
  CHECK(client.worker->map({1, 1}, nullptr, in(100ms)) == nullptr);
  CHECK(becomesLost(*client.worker));
}

TEST_CASE("hostile: records in pieces are put together, a cut one ends in loss") {
  HostileClient client;
  Record region{RecordKind::region, 7, 1, 0, 4096};
  Descriptor memory(sealed(4096));
  REQUIRE(client.say(region, memory.get()));
  Record withdraw{RecordKind::withdraw, 7, 1};
  for (size_t i = 0; i < sizeof withdraw; ++i) {
    REQUIRE(send(client.socket->descriptor(), reinterpret_cast<char*>(&withdraw) + i, 1, MSG_NOSIGNAL) == 1);
    if (i % 8 == 0) std::this_thread::sleep_for(1ms);
  }
  Deadline limit = in(3s);
  while (client.worker->map({7, 1}, nullptr, in(1ms)) && Clock::now() < limit)
    std::this_thread::sleep_for(1ms);
  CHECK(Clock::now() < limit);
  CHECK(client.worker->peer() == Peer::alive);
  REQUIRE(send(client.socket->descriptor(), &withdraw, 11, MSG_NOSIGNAL) == 11);
  client.socket.reset();
  CHECK(becomesLost(*client.worker));
}

// --- over the network ---

namespace {

// A client that speaks UCX itself and says what it likes.
struct HostileNetworkClient : UcxLink::Sink {
  std::unique_ptr<Connection> worker;
  std::unique_ptr<UcxLink> link;
  Descriptor bootstrap;
  std::vector<WireHeader> heard;

  HostileNetworkClient() {
    Options options;
    options.callBytes = 64 << 10;
    options.controlBytes = 16 << 10;
    auto [client, accepted] = bootstrapSockets("ucx");
    std::thread accepting([&, accepted = accepted] { worker = acceptUcx(accepted, options); });
    UcxGreeting greeting;
    link = UcxLink::connect(client, options, greeting);
    link->setSink(this);
    TimeLeft time(2s);
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
  void say(const WireHeader& header, size_t payload = 0) {
    static const std::vector<std::byte> zeros(1 << 20);
    bool sent = false;
    link->send(header, zeros.data(), payload, UCP_AM_SEND_FLAG_EAGER, [&](bool) { sent = true; });
    for (Deadline limit = in(2s); !sent && Clock::now() < limit;) link->progress();
  }
  bool hears(WireKind kind, uint32_t channel) {
    for (Deadline limit = in(2s); Clock::now() < limit;) {
      link->progress();
      for (auto& header : heard) {
        if (header.kind == kind && header.channel == channel) return true;
      }
    }
    return false;
  }
};

bool haveUcx() {
  auto names = processTransports();
  return std::find(names.begin(), names.end(), "ucx") != names.end();
}

}  // namespace

TEST_CASE("hostile: network headers that break the protocol end the session") {
  if (!haveUcx()) return;
  HostileNetworkClient client;
  SECTION("unknown kind") { client.say({.kind = static_cast<WireKind>(99)}); }
  SECTION("no such channel") { client.say({.kind = WireKind::messages, .channel = 7}, 64); }
  SECTION("half a record") { client.say({.kind = WireKind::messages}, 60); }
  SECTION("more than the credit") {
    for (uint64_t i = 0; i < 3; ++i) {
      client.say({.kind = WireKind::messages, .number = i * (32 << 10)}, 32 << 10);
    }
  }
  SECTION("a position far ahead") { client.say({.kind = WireKind::messages, .number = 1ull << 40}, 64); }
  SECTION("the same position twice") {
    client.say({.kind = WireKind::messages}, 64);
    client.say({.kind = WireKind::messages}, 64);
  }
  SECTION("credit for nothing") { client.say({.kind = WireKind::credit, .number = 4096}); }
  SECTION("a put number that skips far") { client.say({.kind = WireKind::put, .number = 1ull << 50}); }
  SECTION("an answer to no put") { client.say({.kind = WireKind::putDone, .number = 1}); }
  SECTION("an answer to no get") { client.say({.kind = WireKind::getData, .number = 1}, 64); }
  SECTION("a broken announcement") { client.say({.kind = WireKind::region, .region = {0, 0}, .length = 1}); }
  SECTION("a withdrawal of nothing") { client.say({.kind = WireKind::withdraw, .region = {3, 1}}); }
  CHECK(becomesLost(*client.worker));
}

TEST_CASE("hostile: network transfers outside a region are refused and change nothing") {
  if (!haveUcx()) return;
  HostileNetworkClient client;
  auto memory = SharedMemory::create(4096);
  fillPattern(memory->data(), 4096, 8);
  Region region = client.worker->share(memory);
  REQUIRE(client.hears(WireKind::region, 0));
  WireHeader put{.kind = WireKind::put, .number = 1, .region = region, .offset = 4090, .length = 64};
  client.say(put, 64);
  CHECK(client.hears(WireKind::putDone, 1));
  client.heard.clear();
  put = {.kind = WireKind::put, .number = 2, .region = region, .offset = UINT64_MAX - 7, .length = 64};
  client.say(put, 64);
  CHECK(client.hears(WireKind::putDone, 1));
  client.heard.clear();
  put = {.kind = WireKind::put, .number = 3, .region = {region.id, region.generation + 1}, .length = 64};
  client.say(put, 64);
  CHECK(client.hears(WireKind::putDone, 1));
  client.heard.clear();
  put = {.kind = WireKind::put, .number = 4, .region = region, .offset = 0, .length = 8};
  client.say(put, 64);  // more than it says
  CHECK(client.hears(WireKind::putDone, 1));
  client.say({.kind = WireKind::get, .number = 5, .region = region, .offset = 1, .length = 4096});
  CHECK(client.hears(WireKind::getData, 1));
  CHECK(hasPattern(memory->data(), 4096, 8));
  CHECK(client.worker->peer() == Peer::alive);
}

TEST_CASE("hostile: records with broken lengths over the network end the session") {
  if (!haveUcx()) return;
  HostileNetworkClient client;
  static const uint64_t record[8] = {1 << 20};
  bool sent = false;
  client.link->send({.kind = WireKind::messages}, record, sizeof record, UCP_AM_SEND_FLAG_EAGER,
                    [&](bool) { sent = true; });
  for (Deadline limit = in(2s); !sent && Clock::now() < limit;) client.link->progress();
  CHECK(client.worker->receive(Channel::call, in(2s)).data() == nullptr);
  CHECK(becomesLost(*client.worker));
}

TEST_CASE("a stranger who does not know the nonce does not become the client") {
  if (!haveUcx()) return;
  Options options;
  options.setupTimeout = 2s;
  auto [client, accepted] = bootstrapSockets("ucx");
  std::unique_ptr<Connection> worker;
  std::string refused;
  std::thread accepting([&, accepted = accepted] {
    try {
      worker = acceptUcx(accepted, options);
    } catch (const std::exception& error) {
      refused = error.what();
    }
  });
  // The stranger overheard the port but not the nonce.
  UcxGreeting greeting;
  REQUIRE(recv(client, &greeting, sizeof greeting, MSG_PEEK | MSG_WAITALL) == sizeof greeting);
  greeting.nonce[0] ^= 1;
  auto [ours, theirs] = bootstrapSockets("ucx");
  REQUIRE(send(theirs, &greeting, sizeof greeting, 0) == sizeof greeting);
  Options impatient;
  impatient.setupTimeout = 300ms;
  UcxGreeting seen;
  CHECK_THROWS(UcxLink::connect(ours, impatient, seen));
  std::unique_ptr<Connection> real;
  CHECK_NOTHROW(real = connectUcx(client, options));
  accepting.join();
  REQUIRE(real);
  CHECK(refused == "");
  REQUIRE(worker);
  uint64_t word = 9;
  REQUIRE(sendBytes(*real, Channel::call, &word, sizeof word));
  CHECK(worker->receive(Channel::call, in(2s)).size() == sizeof word);
  ::close(ours);
  ::close(theirs);
}
