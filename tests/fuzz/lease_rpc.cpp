// Cap'n Proto RPC of leases: whatever comes on a connection to the manager, or on one to a server's control;
// and what the manager's store gives back.
//
// Input: u8: 0 the manager, 1 the server's control, 2 a stored lease, 3 the manager that wants a token proven
// first; then the bytes.
#include <capnp/rpc-twoparty.h>

#include <stdexcept>

#include "pool-manager/records.h"
#include "pool-manager/service.h"
#include "pool-manager/store/store.h"
#include "server/front/control.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/stream.h"

namespace {

using namespace gpupool;
using fuzz::eventLoop;
using fuzz::InputStream;

void toManager(std::span<const std::byte> bytes, bool trusted) {
  auto store = pool::makeMemoryStore();
  uint64_t now = 1'000'000;
  {
    pool::Service service(eventLoop().provider->getTimer(), *store, {}, {}, [&] { return now; });
    static const Tokens tokens{{"tenant", std::string(32, 't')}};
    if (!trusted) service.demandTokens([]() -> const Tokens& { return tokens; });
    service.accept(kj::heap<InputStream>(bytes), trusted, "peer", 0);
    eventLoop().waitScope.poll();
    now += 60'000;
    service.pool().tick(now);  // what was joined and leased times out
    eventLoop().waitScope.poll();
  }
  eventLoop().waitScope.poll();
}

void toControl(std::span<const std::byte> bytes) {
  server::LeaseTable leases(
      {Device{std::string(16, 'u'), "GPU", uint64_t{1} << 33, 9, 0, "", 0, true, 13000}});
  server::SessionTable sessions(eventLoop().provider->getTimer(), {}, {});
  server::Suspension::Settings settings;
  settings.copier = []() -> kj::Promise<kj::AutoCloseFd> { return KJ_EXCEPTION(FAILED, "there is none"); };
  server::Suspension suspension(eventLoop().provider->getTimer(), leases, sessions, std::move(settings));
  capnp::TwoPartyServer server(schema::ServerControl::Client(
      kj::heap<server::Control>(leases, sessions, suspension, server::Control::Hooks{})));
  InputStream stream(bytes);
  bool over = false;
  auto done = server.accept(stream)
                  .then([&] { over = true; }, [&](kj::Exception&&) { over = true; })
                  .eagerlyEvaluate(nullptr);
  for (int round = 0; round < 4 && !over; ++round) eventLoop().waitScope.poll();
}

void stored(std::span<const std::byte> bytes) {
  try {
    const auto lease = pool::decodeLease({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, "boot");
    const auto& key = lease.primary().key;
    fuzz::touch(key.data(), key.size());
    // What was read is written again as it was.
    const auto again = pool::decodeLease(pool::encodeLease(lease, "boot"), "boot");
    if (again.primary().key != key || again.placements.size() != lease.placements.size()) __builtin_trap();
  } catch (const std::runtime_error&) {  // the contract's
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const auto kind = input.value<uint8_t>() % 4;
  switch (kind) {
    case 0:
    case 3:
      toManager(input.all(), kind == 0);
      break;
    case 1:
      toControl(input.all());
      break;
    default:
      stored(input.all());
  }
  return 0;
}
