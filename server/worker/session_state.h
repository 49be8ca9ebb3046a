#pragma once
// What a session is, for another worker (schema/record.capnp): read from the session while everything stands
// still, and sent. What has a length in the record goes as contents (StateSocket::sendContent).
//
// While the session runs, what of it can be made without its memory goes ahead, in one record or several
// (SessionRecord.ahead): contexts, code, streams, events, arrays. Of each:
//
//   old worker -> new worker   SessionRecord, as one block; its digest
//                              of the same server, with the first one: descriptors: words, staging memory
//   of another server:
//   new worker -> old worker   its answer; one block: the names of the code images that it lacks, and
//                              perhaps an offer (below)
//   old worker -> new worker   these images, in that order
//   both:
//   new worker -> old worker   of the same server: 4 bytes, which say nothing; its answer, when it has served
//                              the recorded calls again
//
// Where the device has no room for them beside the old worker's memory the new one serves the rest later.
// Nothing goes ahead of what goes into a file. Then, while everything stands still:
//
// To a worker of the same server; the device memory is with the copier:
//
//   old worker -> new worker   SessionRecord, as one block; its digest
//                              descriptors: words, staging memory (unless they went ahead), the link to the
//                              copier (if there are pieces), pinned memory by ascending address
//                              contents of variables and arrays, in the record's order
//   new worker -> old worker   4 bytes: the number of its last message to the copier; its answer
//
// To a worker of another server, as a stream; the device memory is where it was:
//
//   old worker -> new worker   SessionRecord, as one block; its digest
//   new worker -> old worker   its answer; one block: the names of the code images that it lacks, and
//                              perhaps an offer (below)
//   old worker -> new worker   these images, in that order
//   new worker -> old worker   its answer, when it has served the recorded calls again
//   old worker -> new worker   contents of words, staging memory, pinned memory by ascending address, device
//                              memory (device_stream.h), variables and arrays
//   new worker -> old worker   its answer
//
// A record of no bytes, of a stream: the session begins anew, as it was before its first call. The worker
// answers, and nothing follows.
//
// The first record says how many connections the old worker can use beside the stream
// (SessionRecord.parallel). If the new one can too, it makes an offer behind the names, and both agree on
// some before images are sent (parallel_sockets.h). Parts of the device memory are dealt out to these and the
// stream, in turns; all else goes on the stream.
//
// An answer is one block: empty, all is well; or why the session cannot be rebuilt, for people, and it is the
// last. The staging memory's bytes count: a program may stand between a copy into it and the read of them.

#include <string>
#include <vector>

#include "schema/record.capnp.h"
#include "server/copier/link.h"
#include "server/worker/contents.h"
#include "server/worker/parallel_sockets.h"
#include "server/worker/session.h"
#include "server/worker/state_socket.h"
#include "server/worker/stream_layout.h"

namespace gpupool::server {

// One record ahead. The session runs. "" or why it cannot go there; in `entries`: how many went.
// parallel: of a stream: how the session's memory is to travel; else null.
std::string sendAhead(Session& session, StateSocket& socket, ParallelSockets* parallel, size_t& entries);

// "" or why the session cannot be rebuilt elsewhere, and then nothing was sent. link: null if the session has
// no device memory. direct: what is on the devices is there still, and the other worker has none of these. In
// `sequence`: the number of the copier's last message, by whoever spoke to it last.
// Tests: `seen` is what this worker sees of the contents (contentDigests); the other one compares what it
// sees in the end. Empty: it does not.
std::string sendState(Session& session, StateSocket& socket, CopierLink* link, bool direct,
                      uint32_t& sequence, const Digests& seen = {});
// The same as a stream. The session is as it was, whatever comes of it. accepted: the other end has the
// record and the code: where it is gone then, it may have had all.
std::string streamState(Session& session, StateSocket& socket, ParallelSockets& parallel, bool& accepted,
                        const Digests& seen = {});

// What these begin with, each "" or why not. Describes the session, of which nothing was sent.
std::string describeSession(Session& session, const Digests& seen, schema::SessionRecord::Builder out,
                            Contents& contents);
// The record, and the code images that the other end lacks.
std::string streamRecord(Session& session, StateSocket& socket, capnp::MessageBuilder& message,
                         ParallelSockets* parallel = nullptr);
// Of a sender that cannot go on: `why`, or what the other end has said, which then takes no more.
std::string hearRefusal(StateSocket& socket, const std::string& why);

uint64_t bootTimeNs();

}  // namespace gpupool::server
