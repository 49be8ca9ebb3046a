#pragma once
// Two servers in this process's event loop, between which sessions move over a real connection; the workers
// are processes. The test is the client.

#include "server/tests/session_bench.h"

namespace gpupool::server::test {

inline SideSettings sideSettings(const std::string& name) {
  SideSettings settings;
  settings.server = name;
  settings.migration = [](Migration::Settings& migration) { migration.leftBound = 50 * kj::MILLISECONDS; };
  return settings;
}

// Servers node1 and node2 with the same lease, as its move has it.
struct Pair : EventLoop {
  std::unique_ptr<ServerSide> a, b;
  Destination there;

  explicit Pair(SideSettings of1 = sideSettings("node1"), SideSettings of2 = sideSettings("node2"))
      : a(std::make_unique<ServerSide>(io, std::move(of1))),
        b(std::make_unique<ServerSide>(io, std::move(of2))) {
    REQUIRE(a->grant(kLease, 1, kGiB, {0, 1}) == "");
    REQUIRE(b->grant(kLease, 7, kGiB, {1, 0}) == "");
    there = b->listen();
  }
  ~Pair() {
    if (a) a->stop();
    if (b) b->stop();
    // Of a server that died they end by themselves.
    CHECK(failure([&] {
            eventually(io.provider->getTimer(), [] { return children().empty(); }, 2000).wait(io.waitScope);
          }) == "");
  }
  MoveTarget target() const { return {7, there}; }
  Opening session(uint64_t number) { return a->session(number, "test", "ucx"); }
  kj::Promise<Migrated> migrate(uint32_t drainMs = 1000) { return a->migrate(drainMs, target()); }
  // The client's way to node2; what that says.
  std::string come(Opening& opening, uint64_t number, uint64_t epoch = 2) {
    opening.transport = "ucx";
    return b->open(opening, number, epoch);
  }
  // One session's course; its new connection.
  Opening follow(Opening& old) {
    CHECK(a->hear(old) == "moved 2");
    Opening after;
    REQUIRE(come(after, old.session.low) == "");
    b->worker(after);  // it has its client
    CHECK(a->order(old, 'L').empty());
    return after;
  }
  static void die(std::unique_ptr<ServerSide>& side) {
    side->dies = true;
    side.reset();
  }
  // Nothing of any session is left there, and of the lease all memory is free.
  static void isEmpty(ServerSide& side) {
    side.until([&] { return side.known() == 0; });
    CHECK(side.sessions.living(kLease) == 0);
    CHECK(side.sessions.arriving(kLease) == 0);
    side.until([&] { return !side.paused(); });  // Migration::Settings::leftBound after it has left
    static uint64_t probes = 1000;
    Opening probe = side.session(probes++);
    CHECK(side.order(probe, 'm') == "taken, others have 0 MiB");
    CHECK(contains(side.order(probe, 'q'), "client closed"));
  }
};

}  // namespace gpupool::server::test
