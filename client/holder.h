#pragma once
// The client's end of the lease holder's protocol (schema/holder.h): finds or starts the holder, asks for a
// session, gets the connected bootstrap socket.

#include <chrono>
#include <cstdint>
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

}  // namespace gpupool::client
