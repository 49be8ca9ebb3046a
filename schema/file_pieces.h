#pragma once
// A file's bytes over a connection, piece by piece, so that neither side holds all of them in its buffers,
// and one that stands still is noticed. The length is known to both sides before.

#include <kj/async-io.h>
#include <kj/timer.h>

#include <cstdint>
#include <string>

namespace gpupool::schema {

// Sends so many `bytes` of the file, from `offset` on. The descriptor stays the caller's and open, and the
// stream alive, until it resolves. Rejects with the stream's exception, with OVERLOADED where a piece takes
// longer than `bound`, or with FAILED if the file cannot be read.
kj::Promise<void> sendPieces(kj::Timer& timer, kj::AsyncOutputStream& to, int file, uint64_t offset,
                             uint64_t bytes, kj::Duration bound);

// Receives so many bytes into the file, from `offset` on. Returns "" or why they cannot be written; then,
// and where `file` is -1, what comes is passed over, and the connection can be used on. Lifetimes and
// rejections are those of sendPieces.
kj::Promise<std::string> receivePieces(kj::Timer& timer, kj::AsyncInputStream& from, int file,
                                       uint64_t offset, uint64_t bytes, kj::Duration bound);

}  // namespace gpupool::schema
