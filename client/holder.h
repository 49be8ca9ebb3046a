#pragma once
// The client's end of the lease holder's protocol (schema/holder.h): finds or starts the holder, asks for a
// session, gets the connected bootstrap socket.

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "schema/cuda.h"
#include "schema/holder.h"

namespace gpupool::client {

struct OpenedSession {
  int holder = -1;     // kept open: its end releases the lease
  int bootstrap = -1;  // connected to the worker; the transport's
  holder::OpenReply reply;
};

// The holder's datagram, `bytes` of it, in out.reply. On failure (the datagram is not a valid reply) `text`
// says why.
CUresult acceptReply(OpenedSession& out, ssize_t bytes, std::string& text);

// The holder's answer, however long it waits for a lease, as long as it says so: given up after `silence`.
// What else it waits for is logged, once.
CUresult receiveReply(int fd, OpenedSession& out, std::string& text, std::chrono::milliseconds silence);

// Bounded by the holder, and by its silence. The CUresult matches the holder's status; `text` is one line for
// people.
CUresult openSession(uint64_t rowsHash, OpenedSession& out, std::string& text);

// A session that has moved, and how it is reached: as before.
struct NextEpoch {
  uint64_t sessionHigh = 0, sessionLow = 0;
  uint64_t epoch = 0;
  std::string transport;
  bool left = false;  // it is nowhere until it is restored
  bool lost = false;  // for it has lost its server
  // Where it can be reached over one that shares memory, over that one: out.reply.transport says so.
  bool mayShare = false;
};
// Asks the holder at `fd` for that epoch; out.bootstrap is connected to its worker. A holder that was killed
// is replaced by `gpupool run`: then `fd` is a connection to that one. Bounded by `bound`, and given up when
// `cancelled` says so, which is asked several times a second. `owed` counts the answers to requests that were
// given up: the holder still gives them, in order, and they are passed over.
CUresult openNextEpoch(int& fd, uint64_t rowsHash, const NextEpoch& wish, OpenedSession& out, int& owed,
                       std::chrono::milliseconds bound, const std::function<bool()>& cancelled,
                       std::string& text);

}  // namespace gpupool::client
