#pragma once
// Opens one session on a leased server: connects, proves the lease's key and has the server prove it too
// (session.capnp, schema/handshake.h), and hands out the socket that the application's client library goes on
// with.

#include <kj/async-io.h>
#include <kj/io.h>

#include <functional>
#include <stdexcept>
#include <string>

#include "pool-manager/model.h"
#include "schema/holder.h"
#include "schema/session_opening.h"

namespace gpupool::cli {

// Why an OpenRequest cannot be served: a status of holder.h and a text.
struct OpenFailure {
  holder::Status status = holder::Status::internal;
  std::string text;
};

struct SessionWish {
  uint64_t rowsHash = 0;
  std::string transport;  // of base/transport_names.h; empty: the first that reaches the server
  uint32_t pid = 0;
  std::string command;
  // A session that moves (schema/frame.h): its id and its next epoch. Epoch 0: a new session.
  Id session;
  uint64_t epoch = 0;
  bool left = false;            // with epoch: it is nowhere until it is restored
  bool lost = false;            // with epoch: so is it, for it has lost its server
  pool::ServerLife ranAt = {};  // with left: where this holder has opened it last, if it has
  bool transportNamed = false;  // the transport, by the user
  bool mayShare = false;        // with epoch: over a transport that shares memory, too (sharingTransport)
  bool moves() const { return epoch != 0; }
};

struct OpenSession {
  kj::AutoCloseFd socket;  // connected, blocking, nothing read beyond the handshake
  Id id;                   // as wished, or a fresh one
  uint64_t epoch = 1;
  std::string transport;
  pool::ServerLife server = {};
};

// An OpenFailure as an exception of KJ's (schema/fault.h), and back.
kj::Exception toException(const OpenFailure& failure);
OpenFailure toFailure(const kj::Exception& error);

// Whether it takes sessions over a network.
bool takesNetwork(const pool::Server& server);

// A connection to where the server takes sessions of that transport (empty: the first that reaches it), with
// nothing said on it yet. Fails with toException(OpenFailure) or the network's exception; has no bound.
struct ServerConnection {
  kj::Own<kj::AsyncIoStream> stream;
  std::string transport;
};
kj::Promise<ServerConnection> connectServer(kj::AsyncIoProvider& io, const pool::Server& server,
                                            const std::string& transport);

// A connection to the lease's server for something else than a session: `fill` says what (SessionHello).
// Fails with toException(OpenFailure) or the network's exception; has no bound. `lease` and `fill` are not
// kept.
kj::Promise<kj::Own<kj::AsyncIoStream>> openWithout(kj::AsyncIoProvider& io, const pool::Lease& lease,
                                                    const std::string& transport,
                                                    const std::function<void(schema::SessionOpening&)>& fill);

// The handshake over a connection that is there. `lease` stays alive until it resolves. Fails with
// toException(OpenFailure) or the stream's exception; has no bound. Status::waiting: not now, since the lease
// is suspended; ask again.
kj::Promise<OpenSession> openOver(kj::Own<kj::AsyncIoStream> stream, const pool::Lease& lease,
                                  SessionWish wish, std::string transport);

// The transport over which a session that was over `transport` can share memory with that server; empty:
// none, or it does already.
std::string sharingTransport(const pool::Server& server, const std::string& transport);

// Resolves within `limit`. `io` and `lease` stay alive until then. A new session that is cut off in the
// middle of the handshake is tried again, twice. Fails with toException(OpenFailure).
kj::Promise<OpenSession> openSession(kj::AsyncIoProvider& io, const pool::Lease& lease, SessionWish wish,
                                     kj::Duration limit);

}  // namespace gpupool::cli
