#pragma once
// The peer's side of the handshake on a session's socket (SessionHello in session.capnp), which a holder goes
// through for a program, and a server for a session that leaves it.

#include <kj/async-io.h>

#include <functional>
#include <string>

#include "schema/id.h"
#include "schema/session.capnp.h"

namespace gpupool::schema {

// What is said and proven.
struct SessionOpening {
  Id lease;
  std::string key;     // the lease's
  std::string server;  // ServerInfo.name
  Id session;
  uint64_t epoch = 1;
  uint64_t rowsHash = 0;  // this and release: the client's
  std::string release;    // empty: this program's
  std::string transport;
  bool transportNamed = false;  // SessionHello's
  uint32_t pid = 0;
  std::string command;
  bool arrives = false;
  bool asks = false;   // no session: SessionHello.asks
  bool keeps = false;  // no session: SessionHello.keeps
  Id handsTo;          // likewise, if it is not all zero
  bool over = false;   // likewise
  // SessionHello.brings; null: none.
  std::function<void(SessionCheckpoint::Builder)> brings = nullptr;
};

enum class OpeningVerdict : uint8_t {
  open,
  waiting,       // not now, since the lease is suspended: ask again
  refused,       // of what was said
  mismatch,      // the two are of other versions
  unknownLease,  // the server does not know it any more
  failed,        // by the server, which knows the key
};

struct OpeningAnswer {
  OpeningVerdict verdict = OpeningVerdict::refused;
  std::string text;  // why not, for people
};

// Over a connection that is there, and stays the caller's; both live until it resolves. Rejects with the
// stream's exception, or one of a malformed message; has no bound.
kj::Promise<OpeningAnswer> openSession(kj::AsyncIoStream& stream, const SessionOpening& opening);

}  // namespace gpupool::schema
