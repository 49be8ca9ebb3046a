// What a client says of its worker's end: the worker's own words, or its server's.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>

#include "catch.h"
#include "pace.h"
#include "pairs.h"
#include "transports/last_words.h"

using namespace gpupool::transport;
using namespace gpupool::transport::testing;

TEST_CASE("a client whose worker is killed gives the reason that its server says") {
  auto transport = GENERATE(from_range(processTransports()));
  const bool says = GENERATE(true, false);  // or it is gone itself
  CAPTURE(transport, says);
  auto [clientEnd, serverEnd] = bootstrapSockets(transport);
  const pid_t worker = fork();
  if (worker == 0) {
    ::close(clientEnd);
    try {
      auto connection = acceptAs(transport, serverEnd, {});
      pause();
    } catch (const std::exception& error) {
      fprintf(stderr, "forked worker: %s\n", error.what());
    }
    _exit(3);
  }
  auto client = connectAs(transport, clientEnd, {});
  std::this_thread::sleep_for(200ms);  // signs of life come before the words
  const auto start = Clock::now();
  ::kill(worker, SIGKILL);
  waitpid(worker, nullptr, 0);
  if (says) sayLastWords(serverEnd, "the worker was killed by\x1b signal 9");
  ::close(serverEnd);
  CHECK(readable(client->wakeupDescriptor(), 2s));
  CHECK(Clock::now() - start < 2s * gpupool::test::busy());
  CHECK(client->peer() == Peer::lost);
  CHECK((client->reason() == "the worker was killed by? signal 9") == says);
  CHECK(!client->reason().empty());
}

namespace {

constexpr size_t kFlood = size_t{64} << 20;  // more than sockets hold

// In a process of its own each. The client tells the name of a region, is stopped, and prints what it heard.
void heardLast(Connection& client, int out) {
  const Region region = client.share(SharedMemory::create(kFlood));
  if (!sendBytes(client, Channel::call, &region, sizeof region)) return;
  const auto message = client.receive(Channel::control, kForever);
  const std::string heard(reinterpret_cast<const char*>(message.data()), message.size());
  const std::string said = heard.empty() ? client.reason() : heard;
  [[maybe_unused]] const ssize_t written = ::write(out, said.data(), said.size());
}

void leaveWhileNobodyReads(Connection& worker, int go, int ready) {
  const auto named = worker.receive(Channel::call, in(10s));
  if (named.size() != sizeof(Region)) return;
  Region region;
  std::memcpy(&region, named.data(), sizeof region);
  char byte = 0;
  if (::write(ready, &byte, 1) != 1 || ::read(go, &byte, 1) != 1) return;
  const std::string data(kFlood, 'x');
  worker.put(data.data(), region, 0, data.size());
  sendBytes(worker, Channel::control, "why", 3);
  worker.close();
}

pid_t forked(const std::function<void()>& body) {
  const pid_t process = fork();
  if (process != 0) return process;
  try {
    body();
  } catch (const std::exception& error) {
    fprintf(stderr, "forked end: %s\n", error.what());
  }
  _exit(0);
}

}  // namespace

TEST_CASE("a client that does not run while its worker leaves hears why, from it or from its server") {
  auto transport = GENERATE(from_range(processTransports()));
  CAPTURE(transport);
  auto [clientEnd, serverEnd] = bootstrapSockets(transport);
  int said[2], go[2], ready[2];
  REQUIRE((pipe(said) == 0 && pipe(go) == 0 && pipe(ready) == 0));
  const pid_t client = forked([&, clientEnd = clientEnd, serverEnd = serverEnd] {
    ::close(serverEnd);
    heardLast(*connectAs(transport, clientEnd, {}), said[1]);
  });
  const pid_t worker = forked([&, clientEnd = clientEnd, serverEnd = serverEnd] {
    ::close(clientEnd);
    leaveWhileNobodyReads(*acceptAs(transport, serverEnd, {}), go[0], ready[1]);
  });
  ::close(clientEnd);
  CHECK(readable(ready[0], 10s));
  ::kill(client, SIGSTOP);
  CHECK(::write(go[1], "", 1) == 1);
  waitpid(worker, nullptr, 0);
  sayLastWords(serverEnd, "why");
  ::close(serverEnd);
  ::kill(client, SIGCONT);
  char text[256] = "";
  CHECK(readable(said[0], 10s));
  CHECK(::read(said[0], text, sizeof text - 1) > 0);
  CHECK(std::string(text) == "why");
  ::kill(client, SIGKILL);
  waitpid(client, nullptr, 0);
  for (int descriptor : {said[0], said[1], go[0], go[1], ready[0], ready[1]}) ::close(descriptor);
}

TEST_CASE("last words that are cut short, or none, are no reason") {
  auto [from, to] = bootstrapSockets("shm");
  sayLastWords(from, std::string(1000, 'x'));
  std::vector<std::byte> bytes(4096);
  bytes.resize(static_cast<size_t>(read(to, bytes.data(), bytes.size())));
  for (size_t length = 0; length <= bytes.size(); ++length) {
    LastWords words;
    for (size_t i = 0; i < length; ++i) {  // in pieces
      if (i == 0) words.take(std::array{LastWords::kBeatByte, LastWords::kBeatByte});
      words.take({&bytes[i], 1});
    }
    CAPTURE(length);
    CHECK(words.text() == (length == bytes.size() ? std::string(255, 'x') : ""));
  }
  LastWords noise;
  noise.take(std::vector<std::byte>(4096, std::byte{7}));
  CHECK(noise.text().empty());
  ::close(from);
  ::close(to);
}
