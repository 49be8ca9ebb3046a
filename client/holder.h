#pragma once
// The client's end of the lease holder's protocol (schema/holder.h): finds or starts the holder, asks for a
// session, gets the connected bootstrap socket.

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

// The holder's datagram, `bytes` of it, in out.reply. Not CUDA_SUCCESS, and why: it is not one of ours.
CUresult acceptReply(OpenedSession& out, ssize_t bytes, std::string& text);

// Within kHolderBound. The CUresult matches the holder's status; `text` is one line for people.
CUresult openSession(uint64_t rowsHash, OpenedSession& out, std::string& text);

}  // namespace gpupool::client
