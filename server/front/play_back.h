#pragma once
// Ends of state sockets (server/worker/state_socket.h), and a session that comes from a file to a worker.

#include <kj/async-io.h>

#include <functional>
#include <string>
#include <utility>

#include "server/front/sessions.h"
#include "server/front/worker_starts.h"
#include "server/images/image_cache.h"
#include "server/worker/state_socket.h"

namespace gpupool::server {

// The worker's end, and the other. Throws kj::Exception.
std::pair<kj::AutoCloseFd, kj::AutoCloseFd> stateSocket();

// `worker` gets the session, and `play`, which a thread calls, sends it what it is: "" or why it has not.
// Fulfilled when the worker has rebuilt it, else rejected with a text for people. state: becomes this side's
// end of the socket: the worker waits for its client while that is open. The thread has one of its own.
using Play = std::function<std::string(StateSocket&)>;
kj::Promise<void> playBackTo(kj::Own<WorkerChild> worker, const SessionFacts& facts, const Grant& grant,
                             Play play, SessionTable& sessions, const WorkerStarts& starts,
                             Descriptor& state);
// From a file, which the thread has for itself.
Play playOf(int file);
// Of a session of which nothing was kept: it is as it was before its first call.
Play playOfBeginning();

}  // namespace gpupool::server
