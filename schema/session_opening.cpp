#include "schema/session_opening.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>

#include <span>

#include "schema/convert.h"
#include "schema/handshake.h"
#include "schema/protocol.h"

namespace gpupool::schema {
namespace {

constexpr capnp::ReaderOptions kSmallMessages{.traversalLimitInWords = 8192, .nestingLimit = 8};

std::span<const std::byte> viewOf(const std::string& text) { return std::as_bytes(std::span(text)); }

// One handshake: its state lives here until the promise of run() is done.
class OpeningHandshake {
 public:
  OpeningHandshake(kj::AsyncIoStream& stream, const SessionOpening& opening)
      : stream_(stream), opening_(opening), nonce_(kNonceBytes, '\0') {
    randomBytes(std::as_writable_bytes(std::span(nonce_)));
  }

  kj::Promise<OpeningAnswer> run() {
    auto hello = kj::heap<capnp::MallocMessageBuilder>();
    fillHello(hello->initRoot<SessionHello>());
    auto sent = capnp::writeMessage(stream_, *hello);
    return sent.attach(kj::mv(hello))
        .then([this]() { return capnp::readMessage(stream_, kSmallMessages); })
        .then([this](kj::Own<capnp::MessageReader> message) -> kj::Promise<OpeningAnswer> {
          auto proof = kj::heap<capnp::MallocMessageBuilder>();
          OpeningAnswer answer = prove(message->getRoot<SessionChallenge>(), proof->initRoot<SessionProof>());
          if (answer.verdict != OpeningVerdict::open)
            return kj::evalLater([answer = std::move(answer)] { return answer; });
          auto written = capnp::writeMessage(stream_, *proof);
          return written.attach(kj::mv(proof))
              .then([this]() { return capnp::readMessage(stream_, kSmallMessages); })
              .then([](kj::Own<capnp::MessageReader> message) {
                return judge(message->getRoot<SessionAnswer>());
              });
        });
  }

 private:
  void fillHello(SessionHello::Builder hello) {
    hello.setProtocol(poolProtocol());
    hello.setOldest(oldestPoolProtocol());
    hello.setRelease(opening_.release.empty() ? release() : opening_.release.c_str());
    hello.setRowsHash(opening_.rowsHash);
    write(opening_.lease, hello.initLease());
    write(opening_.session, hello.initSession());
    hello.setEpoch(opening_.epoch);
    hello.setClientNonce(schema::data(nonce_));
    hello.setTransport(opening_.transport);
    hello.setTransportNamed(opening_.transportNamed);
    hello.setPid(opening_.pid);
    hello.setCommand(opening_.command);
    hello.setArrives(opening_.arrives);
    hello.setAsks(opening_.asks);
    hello.setKeeps(opening_.keeps);
    if (opening_.handsTo != Id{}) write(opening_.handsTo, hello.initHandsTo());
    hello.setOver(opening_.over);
    if (opening_.brings) opening_.brings(hello.initBrings());
  }

  bool isMismatch(SessionChallenge::Reader challenge) const {
    constexpr uint32_t kSaysSo = 9;
    if (challenge.getProtocol() >= kSaysSo) return challenge.getOtherVersion();
    return challenge.getProtocol() != poolProtocol() || challenge.getRowsHash() != opening_.rowsHash;
  }

  // The server shows first that it knows the key; only then does it see ours.
  OpeningAnswer prove(SessionChallenge::Reader challenge, SessionProof::Builder out) {
    const std::string error = text(challenge.getError());
    const bool mismatch = isMismatch(challenge);
    const std::string& server = opening_.server;
    if (!error.empty() && !mismatch && challenge.getUnknownLease())
      return {OpeningVerdict::unknownLease,
              "the lease has ended: server " + server + " does not know it any more"};
    if (!error.empty())
      return {mismatch ? OpeningVerdict::mismatch : OpeningVerdict::refused,
              "server " + server + ": " + error};
    const std::string serverNonce = bytes(challenge.getServerNonce()), proof = bytes(challenge.getProof());
    if (serverNonce.size() != kNonceBytes)
      return {OpeningVerdict::refused, "server " + server + " sent a malformed challenge"};
    const HandshakeFacts facts{opening_.session, opening_.epoch, viewOf(nonce_), viewOf(serverNonce), server};
    if (!equalConstantTime(handshakeProof(viewOf(opening_.key), kRoleServer, facts), viewOf(proof)))
      return {OpeningVerdict::refused,
              "whoever answers at server " + server + "'s address does not know this lease's key"};
    const Digest mine = handshakeProof(viewOf(opening_.key), kRoleHolder, facts);
    out.setProof(kj::arrayPtr(reinterpret_cast<const kj::byte*>(mine.data()), mine.size()));
    return {OpeningVerdict::open, ""};
  }

  static OpeningAnswer judge(SessionAnswer::Reader answer) {
    if (answer.getOk()) return {OpeningVerdict::open, ""};
    return {answer.getSuspended() ? OpeningVerdict::waiting : OpeningVerdict::failed,
            text(answer.getError())};
  }

  kj::AsyncIoStream& stream_;
  const SessionOpening& opening_;
  std::string nonce_;
};

}  // namespace

kj::Promise<OpeningAnswer> openSession(kj::AsyncIoStream& stream, const SessionOpening& opening) {
  auto handshake = kj::heap<OpeningHandshake>(stream, opening);
  auto done = handshake->run();
  return done.attach(kj::mv(handshake));
}

}  // namespace gpupool::schema
