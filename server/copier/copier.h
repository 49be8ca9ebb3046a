#pragma once
// The copier: one process of a server, which keeps the bytes of suspended sessions' device memory.
//
//   gpupool-worker --copier --driver PATH --budget BYTES [--folder DIR] [--touch-ahead BYTES] [--verify]
//
// Started by gpupool-server, with a SOCK_SEQPACKET pair as descriptor 3, as workers are. It reports ready or
// failed (WorkerReport); then each WorkerOrder.serve brings one connection, of which a worker has the other
// end (server/copier/protocol.h), and WorkerOrder.stop, the end of the pair, SIGTERM or SIGHUP end the
// process at once: what is kept is lost with it. A connection's bytes are forgotten when it ends.
//
// With WorkerOrder.outlive comes a door (server/front/doors.h). From then on the server's death, which the
// end of the pair tells, is not the process's: it goes on for as long as it has connections, and their
// workers wait for another server. The server's next life sends a new socket there (WorkerOrder.adopt), which
// takes the place of descriptor 3.
//
// A worker's device memory comes as descriptors, and the bytes go straight between the device and host memory
// that stays registered with the driver for the process's life: nothing else of a worker is looked at. It is
// a process of its own since that memory, and a context on each device, outlive sessions.
//
// Threads: one a connection; the main thread reads the server's orders. A connection that is malformed, slow
// or dead concerns no other.

#include <cstdint>
#include <string>

namespace gpupool::server {

struct CopierArguments {
  std::string driver;       // --driver; empty: searched for
  uint64_t budget = 0;      // --budget: bytes of host memory
  std::string folder;       // --folder: for what is beyond it; empty: nothing is
  uint64_t touchAhead = 0;  // --touch-ahead: so much of it is made ready before the first session needs it
  bool verify = false;      // --verify, for tests: what is brought in is read back and compared, and what
                            // was given up is overwritten (server/copier/hoard.h)
  uint64_t rowsHash = 0;    // of the build, for its reports
};

// True: the words ask for a copier and not for a worker.
bool isCopier(int count, char** words);
// Throws std::runtime_error naming the argument it does not know.
CopierArguments parseCopierArguments(int count, char** words);
// The exit status.
int runCopier(const CopierArguments& arguments);

}  // namespace gpupool::server
