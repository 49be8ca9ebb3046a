#pragma once
// A session over shared memory that goes to another host, or into files and back, goes on over a network.

#include <string>

#include "base/transport_names.h"
#include "server/front/sessions.h"

namespace gpupool::server {

// Empty, or why it does not, for people. Who has named shared memory may need it: what kernels and the
// program tell each other while a kernel runs does not go over a network. The client of such a session keeps
// no log of calls, and cannot begin one in the middle (client/call_log.h): nobody must be told that it is
// protected then.
inline std::string whyNotApart(const SessionFacts& session, bool isProtected) {
  if (transportApart(session.transport) == session.transport) return "";
  if (session.transportNamed)
    return "its program was started with --transport " + session.transport +
           ", which shares memory with this server";
  if (!isProtected) return "";
  return "the session is not protected, for it began over shared memory (transport " + session.transport +
         "), and it would not be where it goes: start the program again with --transport " +
         std::string(transportApart(session.transport));
}

}  // namespace gpupool::server
