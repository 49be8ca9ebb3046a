#include "pool-manager/cli/session_opener.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <span>

#include "base/transport_names.h"
#include "pool-manager/convert.h"
#include "pool-manager/rpc.h"
#include "schema/fault.h"
#include "schema/handshake.h"
#include "schema/protocol.h"

namespace gpupool::cli {
namespace {

using holder::Status;

constexpr capnp::ReaderOptions kSmall{.traversalLimitInWords = 8192, .nestingLimit = 8};

[[noreturn]] void fail(Status status, const std::string& text) {
  kj::throwFatalException(toException({status, text}));
}

std::span<const std::byte> view(const std::string& text) { return std::as_bytes(std::span(text)); }

// One handshake: its state lives here until the promise of run() is done.
class Handshake {
 public:
  Handshake(const pool::Lease& lease, SessionWish wish, std::string transport,
            kj::Own<kj::AsyncIoStream> stream)
      : lease_(lease),
        wish_(std::move(wish)),
        transport_(std::move(transport)),
        stream_(kj::mv(stream)),
        session_(wish_.moves() ? wish_.session : Id::random()),
        epoch_(wish_.moves() ? wish_.epoch : 1),
        nonce_(schema::kNonceBytes, '\0') {
    randomBytes(std::as_writable_bytes(std::span(nonce_)));
  }

  kj::Promise<OpenSession> run() {
    auto hello = kj::heap<capnp::MallocMessageBuilder>();
    fillHello(hello->initRoot<schema::SessionHello>());
    auto sent = capnp::writeMessage(*stream_, *hello);
    return sent.attach(kj::mv(hello))
        .then([this]() { return capnp::readMessage(*stream_, kSmall); })
        .then([this](kj::Own<capnp::MessageReader> message) {
          auto proof = kj::heap<capnp::MallocMessageBuilder>();
          answer(message->getRoot<schema::SessionChallenge>(), proof->initRoot<schema::SessionProof>());
          auto written = capnp::writeMessage(*stream_, *proof);
          return written.attach(kj::mv(proof));
        })
        .then([this]() { return capnp::readMessage(*stream_, kSmall); })
        .then([this](kj::Own<capnp::MessageReader> message) {
          const auto verdict = message->getRoot<schema::SessionAnswer>();
          if (!verdict.getOk())
            fail(verdict.getSuspended() ? Status::waiting : Status::serverLost,
                 pool::text(verdict.getError()));
          return OpenSession{detach(), session_, epoch_, transport_, lease_.server.name};
        });
  }

 private:
  void fillHello(schema::SessionHello::Builder hello) {
    hello.setProtocol(schema::poolProtocol());
    hello.setRowsHash(wish_.rowsHash);
    pool::write(lease_.id, hello.initLease());
    pool::write(session_, hello.initSession());
    hello.setEpoch(epoch_);
    hello.setClientNonce(pool::data(nonce_));
    hello.setTransport(transport_);
    hello.setPid(wish_.pid);
    hello.setCommand(wish_.command);
  }

  // The server shows first that it knows the key; only then does it see ours.
  void answer(schema::SessionChallenge::Reader challenge, schema::SessionProof::Builder out) {
    const std::string error = pool::text(challenge.getError());
    const bool mismatch =
        challenge.getProtocol() != schema::poolProtocol() || challenge.getRowsHash() != wish_.rowsHash;
    if (!error.empty() && !mismatch && challenge.getUnknownLease())
      fail(Status::leaseEnded, "the lease has ended: server " + lease_.server.name +
                                   " does not know it any more; start the program again");
    if (!error.empty())
      fail(mismatch ? Status::mismatch : Status::refused, "server " + lease_.server.name + ": " + error);
    const std::string serverNonce = pool::bytes(challenge.getServerNonce());
    const std::string proof = pool::bytes(challenge.getProof());
    if (serverNonce.size() != schema::kNonceBytes)
      fail(Status::refused, "server " + lease_.server.name + " sent a malformed challenge");
    const schema::HandshakeFacts facts{session_, epoch_, view(nonce_), view(serverNonce), lease_.server.name};
    const auto expected = schema::handshakeProof(view(lease_.key), schema::kRoleServer, facts);
    if (!equalConstantTime(expected, view(proof)))
      fail(Status::refused,
           "whoever answers at server " + lease_.server.name + "'s address does not know this lease's key");
    const auto mine = schema::handshakeProof(view(lease_.key), schema::kRoleHolder, facts);
    out.setProof(kj::arrayPtr(reinterpret_cast<const kj::byte*>(mine.data()), mine.size()));
  }

  kj::AutoCloseFd detach() {
    int raw = -1;
    KJ_IF_MAYBE (descriptor, stream_->getFd()) raw = ::fcntl(*descriptor, F_DUPFD_CLOEXEC, 3);
    if (raw < 0)
      fail(Status::internal, std::string("cannot pass on the session's socket: ") + std::strerror(errno));
    kj::AutoCloseFd socket(raw);
    // The application's library waits with poll and blocking calls; KJ had made the socket non-blocking.
    ::fcntl(raw, F_SETFL, ::fcntl(raw, F_GETFL) & ~O_NONBLOCK);
    stream_ = nullptr;
    return socket;
  }

  const pool::Lease& lease_;
  SessionWish wish_;
  std::string transport_;
  kj::Own<kj::AsyncIoStream> stream_;
  const Id session_;
  const uint64_t epoch_;
  std::string nonce_;
};

kj::Promise<kj::Own<kj::AsyncIoStream>> connectTo(kj::AsyncIoProvider& io, const std::string& address) {
  return io.getNetwork().parseAddress(address.c_str()).then([](kj::Own<kj::NetworkAddress> parsed) {
    auto connected = parsed->connect();
    return connected.attach(kj::mv(parsed));
  });
}

struct Route {
  std::string transport, address;
};

// Where a session over that transport begins, or empty and why it cannot.
std::string addressFor(const TransportFacts& transport, const pool::Server& server, std::string& why) {
  const std::string name(transport.name);
  if (transport.reach == TransportFacts::Reach::sameHost) {
    if (server.bootId == pool::bootId() && server.bootId != "unknown" && !server.localPath.empty())
      return "unix:" + server.localPath;
    why = "is on another machine, which --transport " + name + " cannot reach";
    return "";
  }
  if (!server.host.empty() && server.port != 0) {
    const bool v6 = server.host.find(':') != std::string::npos;
    return (v6 ? "[" + server.host + "]" : server.host) + ":" + std::to_string(server.port);
  }
  why = "takes no network sessions: start it with --transport " + name + " (gpupool up --transport " + name +
        ")";
  return "";
}

Route chooseRoute(const pool::Server& server, const std::string& wanted) {
  std::string why;
  if (!wanted.empty()) {
    const TransportFacts* transport = findTransport(wanted);
    if (transport == nullptr)
      fail(Status::refused, "there is no transport '" + wanted + "': choose " + transportChoices(" or "));
    const std::string address = addressFor(*transport, server, why);
    if (!address.empty()) return {wanted, address};
    if (transport->reach == TransportFacts::Reach::sameHost)
      why += ": use " + std::string(transportWith(TransportFacts::Reach::anyHost).name);
    fail(Status::refused, "server " + server.name + " " + why);
  }
  Route last;
  for (const TransportFacts& transport : kTransports) {
    std::string address = addressFor(transport, server, why);
    if (address.empty()) continue;
    last = {std::string(transport.name), address};
    // Another container of this machine may not see the path; the network then still goes.
    if (transport.reach != TransportFacts::Reach::sameHost || ::access(server.localPath.c_str(), F_OK) == 0)
      return last;
  }
  if (last.address.empty())
    fail(Status::refused, "server " + server.name + " is on another machine and " + why);
  return last;
}

}  // namespace

kj::Exception toException(const OpenFailure& failure) {
  return schema::faultException(schema::FaultKind::open, failure.text, static_cast<uint32_t>(failure.status));
}

OpenFailure toFailure(const kj::Exception& error) {
  const schema::Fault fault = schema::faultOf(error);
  if (fault.kind == schema::FaultKind::open && !fault.remote)
    return {static_cast<Status>(fault.code), fault.text};
  return {Status::internal, pool::errorText(error)};
}

kj::Promise<OpenSession> openOver(kj::Own<kj::AsyncIoStream> stream, const pool::Lease& lease,
                                  SessionWish wish, std::string transport) {
  auto handshake = kj::heap<Handshake>(lease, std::move(wish), std::move(transport), kj::mv(stream));
  auto done = handshake->run();
  return done.attach(kj::mv(handshake));
}

kj::Promise<OpenSession> openSession(kj::AsyncIoProvider& io, const pool::Lease& lease, SessionWish wish,
                                     kj::Duration limit) {
  const Route route = chooseRoute(lease.server, wish.transport);
  auto opened =
      connectTo(io, route.address).then([&lease, wish, route](kj::Own<kj::AsyncIoStream> stream) mutable {
        return openOver(kj::mv(stream), lease, std::move(wish), route.transport);
      });
  const std::string where = "server " + lease.server.name + " at " + route.address;
  return io.getTimer()
      .timeoutAfter(limit, kj::mv(opened))
      .catch_([where](kj::Exception&& error) -> OpenSession {
        if (schema::faultOf(error).kind == schema::FaultKind::open) kj::throwFatalException(kj::mv(error));
        const bool late = error.getType() == kj::Exception::Type::OVERLOADED;
        fail(Status::serverLost, where + (late ? " does not answer" : ": " + pool::errorText(error)) +
                                     "; start the program again (`gpupool servers` says which are there)");
      });
}

}  // namespace gpupool::cli
