#pragma once
// Limits the memory that a peer's calls hold here. Cap'n Proto keeps each answer until the peer releases it
// (Finish, rpc.capnp), and does not limit how many answers a peer leaves unreleased.

#include <capnp/serialize-async.h>

namespace gpupool::pool {

// Messages of `stream`, which must outlive it. Reading fails, and so ends the connection, at the call with
// which the peer would have more than `most` of them begun and not finished.
kj::Own<capnp::MessageStream> limitCalls(kj::AsyncIoStream& stream, size_t most);

}  // namespace gpupool::pool
