#pragma once
// A server whose sessions move to other workers of it.

#include "server/tests/session_bench.h"

namespace gpupool::server::test {

inline SideSettings moving(std::function<void(Migration::Settings&)> adjust) {
  SideSettings settings;
  if (adjust) settings.migration = std::move(adjust);
  return settings;
}

// A lease on both devices.
struct MigrationBench : SessionBench {
  explicit MigrationBench(SideSettings settings) : SessionBench(std::move(settings)) {
    REQUIRE(grant(kLease, 1, kGiB) == "");
  }
  explicit MigrationBench(std::function<void(Migration::Settings&)> adjust = {})
      : SessionBench(moving(std::move(adjust))) {
    REQUIRE(grant(kLease, 1, kGiB) == "");
  }
  ~MigrationBench() {
    stop();
    CHECK(children().empty());
  }
  // The whole course; the session's new connection.
  Opening moved(Opening& old, uint64_t epoch) {
    auto order = migrate();
    CHECK(hear(old) == "moved " + std::to_string(epoch));
    Opening after;
    REQUIRE(open(after, old.session.low, epoch).empty());
    CHECK(this->order(old, 'L').empty());
    CHECK(order.wait(io.waitScope).sessions == 1);
    return after;
  }
};

}  // namespace gpupool::server::test
