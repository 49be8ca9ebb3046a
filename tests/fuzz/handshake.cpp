// The handshake on a session's socket, before anything is proven: what a holder says to a server, and what a
// server, perhaps not ours, says to a holder.
//
// Input: u8: 0 to the server, raw; 1 to the server, after a hello that it likes; 2 to the holder, raw; 3 to
// the holder, after a challenge with the right proof. Then what is said (Cap'n Proto's stream framing).
#include <capnp/message.h>
#include <capnp/serialize.h>

#include <utility>

#include "pool-manager/cli/session_opener.h"
#include "pool-manager/convert.h"
#include "schema/convert.h"
#include "schema/session.capnp.h"
#include "server/front/admission.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/stream.h"

namespace {

using namespace gpupool;
using fuzz::eventLoop;
using fuzz::InputStream;

constexpr uint64_t kRows = 0x1234;
constexpr char kServer[] = "node1";
const std::string kKey(32, 'k');

kj::ArrayPtr<const kj::byte> asBytes(const std::string& text) {
  return {reinterpret_cast<const kj::byte*>(text.data()), text.size()};
}

std::string flat(capnp::MessageBuilder& message) {
  auto words = capnp::messageToFlatArray(message);
  return {words.asChars().begin(), words.asChars().size()};
}

// A server with one lease and no worker.
struct Front {
  kj::Timer& timer = eventLoop().provider->getTimer();
  server::LeaseTable leases{
      {Device{std::string(16, 'u'), "GPU", uint64_t{1} << 33, 9, 0, "", 0, true, 13000}}};
  server::SessionTable sessions{timer, {}, {}};
  kj::Own<server::WorkerPools> pool;
  kj::Own<server::Admission> admission;

  Front() {
    server::WorkerPool::Settings workers;
    workers.program = "/nonexistent";
    workers.warm = 0;
    workers.rowsHash = kRows;
    pool = kj::heap<server::WorkerPools>(eventLoop().unixEventPort, timer, workers);
    server::Admission::Settings settings;
    settings.server = kServer;
    settings.failureBurst = 1e18;  // failing is all that happens here
    admission = kj::heap<server::Admission>(timer, leases, sessions, *pool, settings);
    capnp::MallocMessageBuilder message;
    auto lease = message.initRoot<schema::Lease>();
    lease.initId().setLow(1);
    lease.setDeviceEpoch(1);
    lease.setSessionKey(asBytes(kKey));
    lease.initDevices(1)[0].initInfo().setUuid(asBytes(std::string(16, 'u')));
    if (leases.grant(lease.asReader())) __builtin_trap();
  }
};

std::string goodHello() {
  capnp::MallocMessageBuilder message;
  auto hello = message.initRoot<schema::SessionHello>();
  hello.setProtocol(schema::PROTOCOL_VERSION);
  hello.setRowsHash(kRows);
  hello.initLease().setLow(1);
  hello.initSession().setLow(2);
  hello.setEpoch(1);
  hello.setClientNonce(asBytes(std::string(32, 'n')));
  hello.setTransport("shm");
  hello.setCommand("a.out");
  return flat(message);
}

void toServer(std::span<const std::byte> bytes, bool afterHello) {
  static auto* front = new Front;
  static const std::string hello = goodHello();
  auto stream = kj::heap<InputStream>(afterHello ? std::as_bytes(std::span(hello)) : bytes);
  if (afterHello) {
    stream->more = [bytes, said = false](const std::string&) mutable {
      return std::exchange(said, true) ? std::span<const std::byte>() : bytes;
    };
  }
  front->admission->admit(kj::mv(stream), "peer");
  while (front->admission->underWay() != 0) eventLoop().waitScope.poll();
  if (front->sessions.living() != 0) __builtin_trap();  // nobody knows the key
}

// The answer of a server that knows the key, to the hello that was written.
std::string goodChallenge(const std::string& written) {
  capnp::FlatArrayMessageReader read(kj::arrayPtr(reinterpret_cast<const capnp::word*>(written.data()),
                                                  written.size() / sizeof(capnp::word)));
  const auto hello = read.getRoot<schema::SessionHello>();
  const std::string serverNonce(32, 's'), clientNonce = pool::bytes(hello.getClientNonce());
  const schema::HandshakeFacts facts{schema::read(hello.getSession()), 1,
                                     std::as_bytes(std::span(clientNonce)),
                                     std::as_bytes(std::span(serverNonce)), kServer};
  const auto proof = schema::handshakeProof(std::as_bytes(std::span(kKey)), schema::kRoleServer, facts);
  capnp::MallocMessageBuilder message;
  auto challenge = message.initRoot<schema::SessionChallenge>();
  challenge.setServerNonce(asBytes(serverNonce));
  challenge.setProof(kj::arrayPtr(reinterpret_cast<const kj::byte*>(proof.data()), proof.size()));
  return flat(message);
}

void toHolder(std::span<const std::byte> bytes, bool afterChallenge) {
  static const pool::Lease lease = [] {
    pool::Lease one;
    one.server.name = kServer;
    one.key = kKey;
    return one;
  }();
  auto stream = kj::heap<InputStream>(afterChallenge ? std::span<const std::byte>() : bytes);
  std::string challenge;
  if (afterChallenge) {
    stream->more = [&, step = 0](const std::string& written) mutable {
      if (++step == 1) {
        // The stream keeps bytes, a reader wants words.
        challenge = goodChallenge(written);
        return std::as_bytes(std::span(challenge));
      }
      return step == 2 ? bytes : std::span<const std::byte>();
    };
  }
  bool over = false;
  auto opened = cli::openOver(kj::mv(stream), lease,
                              {.rowsHash = kRows, .transport = "shm", .pid = 1, .command = "a.out"}, "shm")
                    .then([](cli::OpenSession&&) {},
                          [](kj::Exception&& error) {
                            const auto failure = cli::toFailure(error);
                            fuzz::touch(failure.text.data(), failure.text.size());
                          })
                    .then([&] { over = true; })
                    .eagerlyEvaluate(nullptr);
  while (!over) eventLoop().waitScope.poll();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const auto kind = input.value<uint8_t>() & 3;
  kind < 2 ? toServer(input.all(), kind == 1) : toHolder(input.all(), kind == 3);
  return 0;
}
