#pragma once
// Bounds what a peer's calls keep alive here. An answer, with all it holds, is kept until the peer says that
// it needs it no more (Finish, rpc.capnp), and nothing in Cap'n Proto bounds how many a peer leaves
// unfinished.

#include <capnp/serialize-async.h>

namespace gpupool::pool {

// Messages of `stream`, which must outlive it. Reading fails, and so ends the connection, at the call with
// which the peer would have more than `most` of them begun and not finished.
kj::Own<capnp::MessageStream> limitCalls(kj::AsyncIoStream& stream, size_t most);

}  // namespace gpupool::pool
