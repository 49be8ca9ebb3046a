#include "pool-manager/cli/session_opener.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/transport_names.h"
#include "pool-manager/convert.h"
#include "pool-manager/rpc.h"
#include "schema/fault.h"
#include "schema/session_opening.h"

namespace gpupool::cli {
namespace {

using holder::Status;

[[noreturn]] void fail(Status status, const std::string& text) {
  kj::throwFatalException(toException({status, text}));
}

Status statusOf(schema::OpeningVerdict verdict) {
  switch (verdict) {
    case schema::OpeningVerdict::open:
      return Status::ok;
    case schema::OpeningVerdict::waiting:
      return Status::waiting;
    case schema::OpeningVerdict::refused:
      return Status::refused;
    case schema::OpeningVerdict::mismatch:
      return Status::mismatch;
    case schema::OpeningVerdict::unknownLease:
      return Status::leaseEnded;
    case schema::OpeningVerdict::failed:
      return Status::serverLost;
  }
  return Status::internal;
}

kj::AutoCloseFd detach(kj::AsyncIoStream& stream) {
  int raw = -1;
  KJ_IF_MAYBE (descriptor, stream.getFd()) raw = ::fcntl(*descriptor, F_DUPFD_CLOEXEC, 3);
  if (raw < 0)
    fail(Status::internal, std::string("cannot pass on the session's socket: ") + std::strerror(errno));
  // The application's library waits with poll and blocking calls; KJ had made the socket non-blocking.
  ::fcntl(raw, F_SETFL, ::fcntl(raw, F_GETFL) & ~O_NONBLOCK);
  return kj::AutoCloseFd(raw);
}

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
  if (takesNetwork(server)) {
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

// Another container of this machine may not see the path.
std::string sharingTransport(const pool::Server& server, const std::string& transport) {
  for (const TransportFacts& one : kTransports) {
    std::string why;
    if (one.reach == TransportFacts::Reach::sameHost && one.name != transport &&
        !addressFor(one, server, why).empty() && ::access(server.localPath.c_str(), F_OK) == 0)
      return std::string(one.name);
  }
  return "";
}

bool takesNetwork(const pool::Server& server) { return !server.host.empty() && server.port != 0; }

kj::Exception toException(const OpenFailure& failure) {
  return schema::faultException(schema::FaultKind::open, failure.text, static_cast<uint32_t>(failure.status));
}

OpenFailure toFailure(const kj::Exception& error) {
  const schema::Fault fault = schema::faultOf(error);
  if (fault.kind == schema::FaultKind::open && !fault.remote)
    return {static_cast<Status>(fault.code), fault.text};
  return {Status::internal, pool::errorText(error)};
}

kj::Promise<ServerConnection> connectServer(kj::AsyncIoProvider& io, const pool::Server& server,
                                            const std::string& transport) {
  Route route = chooseRoute(server, transport);
  return connectTo(io, route.address)
      .then([name = std::move(route.transport)](kj::Own<kj::AsyncIoStream> stream) {
        return ServerConnection{kj::mv(stream), name};
      });
}

kj::Promise<kj::Own<kj::AsyncIoStream>> openWithout(
    kj::AsyncIoProvider& io, const pool::Lease& lease, const std::string& transport,
    const std::function<void(schema::SessionOpening&)>& fill) {
  auto opening = kj::heap<schema::SessionOpening>();
  opening->lease = lease.id;
  opening->key = lease.key;
  opening->server = lease.server.name;
  opening->session = Id::random();
  opening->rowsHash = lease.server.rowsHash;
  fill(*opening);
  return kj::evalNow([&] { return connectServer(io, lease.server, transport); })
      .then([opening = kj::mv(opening)](ServerConnection&& connection) mutable {
        if (opening->transport.empty()) opening->transport = connection.transport;
        auto stream = kj::mv(connection.stream);
        auto answered = schema::openSession(*stream, *opening);
        return answered.then([stream = kj::mv(stream),
                              opening = kj::mv(opening)](const schema::OpeningAnswer& answer) mutable {
          const bool ended = answer.verdict == schema::OpeningVerdict::unknownLease;
          if (answer.verdict != schema::OpeningVerdict::open)
            fail(ended ? Status::leaseEnded : Status::refused, answer.text);
          return kj::mv(stream);
        });
      });
}

kj::Promise<OpenSession> openOver(kj::Own<kj::AsyncIoStream> stream, const pool::Lease& lease,
                                  SessionWish wish, std::string transport) {
  auto opening = kj::heap<schema::SessionOpening>();
  opening->lease = lease.id;
  opening->key = lease.key;
  opening->server = lease.server.name;
  opening->session = wish.moves() ? wish.session : Id::random();
  opening->epoch = wish.moves() ? wish.epoch : 1;
  opening->rowsHash = wish.rowsHash;
  opening->transport = std::move(transport);
  opening->transportNamed = wish.transportNamed;
  opening->pid = wish.pid;
  opening->command = std::move(wish.command);
  auto answered = schema::openSession(*stream, *opening);
  return answered.then([stream = kj::mv(stream), opening = kj::mv(opening), left = wish.left,
                        server = lease.server.life()](const schema::OpeningAnswer& answer) mutable {
    // A session that is nowhere is waited for where its server is away; not where that says no.
    if (left && answer.verdict == schema::OpeningVerdict::failed) fail(Status::refused, answer.text);
    if (answer.verdict != schema::OpeningVerdict::open) fail(statusOf(answer.verdict), answer.text);
    return OpenSession{detach(*stream), opening->session, opening->epoch, opening->transport,
                       std::move(server)};
  });
}

namespace {

// A server closes a connection on which nothing comes for a while (--handshake-time), as it may be where many
// programs begin at once. A session that moves is not tried again: it may be there already.
kj::Promise<OpenSession> openInTries(kj::AsyncIoProvider& io, const pool::Lease& lease,
                                     const SessionWish& wish, const Route& route, unsigned tries) {
  return connectTo(io, route.address)
      .then([&io, &lease, wish, route, tries](kj::Own<kj::AsyncIoStream> stream) {
        return openOver(kj::mv(stream), lease, wish, route.transport)
            .catch_([&io, &lease, wish, route, tries](kj::Exception&& error) -> kj::Promise<OpenSession> {
              const bool closed = error.getType() == kj::Exception::Type::DISCONNECTED &&
                                  schema::faultOf(error).kind != schema::FaultKind::open;
              if (!closed || wish.moves() || tries == 1) return kj::mv(error);
              return openInTries(io, lease, wish, route, tries - 1);
            });
      });
}

}  // namespace

kj::Promise<OpenSession> openSession(kj::AsyncIoProvider& io, const pool::Lease& lease, SessionWish wish,
                                     kj::Duration limit) {
  constexpr unsigned kTries = 3;
  const Route route = chooseRoute(lease.server, wish.transport);
  auto opened = openInTries(io, lease, wish, route, kTries);
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
