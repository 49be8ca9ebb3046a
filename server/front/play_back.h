#pragma once
// Ends of state sockets (server/worker/state_socket.h), and a session that comes from a file to a worker.

#include <kj/async-io.h>

#include <utility>

#include "server/front/sessions.h"
#include "server/front/worker_starts.h"
#include "server/images/image_cache.h"

namespace gpupool::server {

// The worker's end, and the other. Throws kj::Exception.
std::pair<kj::AutoCloseFd, kj::AutoCloseFd> stateSocket();

// `worker` gets the session and is played the file, by a thread. Fulfilled when it has rebuilt it, else
// rejected with a text for people. state: becomes this side's end of the socket: the worker waits for its
// client while that is open. The thread has descriptors of its own: file and state may be closed at any time.
kj::Promise<void> playBackTo(kj::Own<WorkerChild> worker, const SessionFacts& facts, const Grant& grant,
                             int file, SessionTable& sessions, const WorkerStarts& starts, Descriptor& state);

}  // namespace gpupool::server
