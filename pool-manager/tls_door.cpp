#include "pool-manager/tls_door.h"

#include <capnp/rpc-twoparty.h>

#include "pool-manager/login.h"
#include "pool-manager/peeked_stream.h"
#include "schema/pool.capnp.h"

namespace gpupool::pool {
namespace {

constexpr kj::byte kTlsHandshake = 0x16;  // a record's type (RFC 8446, 5.1)
constexpr char kSpeaksTls[] =
    "the manager speaks TLS: put the line with its certificate into the token file (`gpupool-manager "
    "certificate` prints it), or name its authority with --tls-ca";

class Refusal final : public schema::Manager::Server {
 protected:
  kj::Promise<void> login(LoginContext) override { refuseLogin(kSpeaksTls); }
};

bool isLoopback(const std::string& peer) {
  return peer.starts_with("127.") || peer == "[::1]" || peer.starts_with("[::ffff:127.") ||
         peer.starts_with("unix:") || peer.starts_with("uid ");
}

// Cap'n Proto begins with a number of segments, whose first byte is no letter.
bool isHttp(kj::byte first) { return (first >= 'A' && first <= 'Z') || (first >= 'a' && first <= 'z'); }

// A connection that is closed with bytes unread may lose the answer.
kj::Promise<void> discard(kj::AsyncIoStream& stream, kj::ArrayPtr<kj::byte> buffer, size_t most) {
  return stream.tryRead(buffer.begin(), 1, buffer.size())
      .then([&stream, buffer, most](size_t size) -> kj::Promise<void> {
        if (size == 0 || size > most) return kj::READY_NOW;
        return discard(stream, buffer, most - size);
      });
}

kj::Promise<void> refuseHttp(kj::AsyncIoStream& stream) {
  auto text = kj::str(
      "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
      "{\"error\":{\"code\":\"tls_required\",\"message\":\"the manager speaks TLS\",\"hint\":\"ask for "
      "https://\"}}\n");
  auto written = stream.write(text.begin(), text.size());
  return written.attach(kj::mv(text)).then([&stream] {
    stream.shutdownWrite();
    auto buffer = kj::heapArray<kj::byte>(4096);
    const auto into = buffer.asPtr();
    return discard(stream, into, 64 << 10).attach(kj::mv(buffer));
  });
}

// Until the peer has gone, which it does when it has read why.
kj::Promise<void> refuseRpc(kj::AsyncIoStream& stream) {
  auto network = kj::heap<capnp::TwoPartyVatNetwork>(stream, capnp::rpc::twoparty::Side::SERVER);
  auto system = kj::heap(capnp::makeRpcServer(*network, schema::Manager::Client(kj::heap<Refusal>())));
  auto gone = network->onDisconnect();
  return gone.attach(kj::mv(system), kj::mv(network));
}

}  // namespace

kj::Promise<TlsDoor::Entered> TlsDoor::enter(kj::Own<kj::AsyncIoStream> stream, const std::string& peer) {
  auto place = entering_.take(peer);
  if (place == nullptr) return Entered{};
  return timer_.timeoutAfter(limit_, decide(kj::mv(stream), peer)).attach(kj::mv(place));
}

kj::Promise<TlsDoor::Entered> TlsDoor::decide(kj::Own<kj::AsyncIoStream> stream, const std::string& peer) {
  return peek(kj::mv(stream)).then([this, peer](Peeked&& peeked) -> kj::Promise<Entered> {
    if (peeked.stream.get() == nullptr) return Entered{};
    if (peeked.first == kTlsHandshake)
      return certificate_.accept(kj::mv(peeked.stream))
          .then([shown = certificate_.fingerprint()](kj::Own<kj::AsyncIoStream>&& secured) {
            return Entered{kj::mv(secured), shown};
          });
    if (plainFromLoopback_ && isLoopback(peer)) return Entered{kj::mv(peeked.stream), std::nullopt};
    auto refused = isHttp(peeked.first) ? refuseHttp(*peeked.stream) : refuseRpc(*peeked.stream);
    return refused.attach(kj::mv(peeked.stream)).then([] { return Entered{}; });
  });
}

}  // namespace gpupool::pool
