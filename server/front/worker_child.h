#pragma once
// One worker process as its parent sees it: started, spoken to over its socket pair, killed, and seen to be
// gone.
//
// "Gone" is the kernel's word (pidfd): only then is the device memory of the process free. A worker runs in a
// session and process group of its own with a scrubbed environment; it gets SIGHUP when the server dies,
// besides the end-of-file on its socket. Belongs to the event loop's thread.

#include <capnp/serialize.h>
#include <kj/async-io.h>
#include <kj/async-unix.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "schema/worker.capnp.h"
#include "server/front/worker_parent.h"
#include "server/front/worker_program.h"

namespace gpupool::server {

// One datagram from a worker. Its framing is checked, its content is not.
class WorkerMessage {
 public:
  explicit WorkerMessage(kj::Array<capnp::word> words);
  schema::WorkerReport::Reader get() { return reader_.getRoot<schema::WorkerReport>(); }

 private:
  kj::Array<capnp::word> words_;
  capnp::FlatArrayMessageReader reader_;
};

class WorkerChild {
 public:
  struct Exit {
    bool clean = false;  // status 0
    std::string text;    // "exited with status 1", "was killed by signal 11 (Segmentation fault)"
  };

  // A device (the driver's ordinal) that broke, and the error that showed it.
  using Lost = std::function<void(uint32_t ordinal, const std::string& error)>;

  // Throws kj::Exception if the process cannot be created; that the executable fails shows as an exit.
  static kj::Own<WorkerChild> start(kj::UnixEventPort& port, const WorkerProgram& program,
                                    const std::vector<std::string>& arguments,
                                    WorkerParent& parent = ownChildren());
  WorkerChild(kj::UnixEventPort& port, WorkerParent& parent, WorkerParent::Process process,
              kj::AutoCloseFd socket);
  ~WorkerChild();  // kills it, without waiting; it is reaped as soon as it is gone
  KJ_DISALLOW_COPY(WorkerChild);

  pid_t pid() const { return pid_; }
  // It is not ended with this process. Its door's name is kept for as long as this object is.
  void outlive(kj::Own<void> door) {
    door_ = kj::mv(door);
    parent_.outlive(pid_);
  }
  // The next report; none when the worker closed its end. Rejects on a malformed one. One receive at a time.
  kj::Promise<kj::Maybe<kj::Own<WorkerMessage>>> receive();
  // Called for every such report as it is read, whoever reads it.
  void onLost(Lost lost) { lost_ = std::move(lost); }
  // Why the session ended, as far as the worker has reported it by now; includes reports that nobody has
  // received yet.
  std::string lastWords();
  // Called for every such report as it is read.
  using Memory = std::function<void(schema::MemoryRequest::Reader)>;
  void onMemory(Memory memory) { memory_ = std::move(memory); }
  // The same, and the descriptor that came with it, or none.
  using Share = std::function<void(schema::ShareReport::Reader, kj::AutoCloseFd)>;
  void onShare(Share share) { share_ = std::move(share); }
  // The same: of a worker that exits behind it, the exit may be heard first.
  using Moved = std::function<void(schema::MoveReport::Reader)>;
  void onMoved(Moved moved) { moved_ = std::move(moved); }
  // A WorkerOrder, and descriptors of which the worker gets its own copies. False: the worker is gone, or has
  // left so many orders unread that it takes no more.
  bool send(capnp::MessageBuilder& order, std::span<const int> descriptors = {});
  bool sendStop(const std::string& reason);
  // Whether the worker has read all that it was sent.
  bool hasRead() const;
  // An order that changes nothing: whether it is read tells whether the worker runs.
  void probe();
  // SIGKILL to the whole process group. Idempotent.
  void kill();
  // Resolves when the process is gone and reaped; any number of callers.
  kj::Promise<Exit> exited() { return exited_.addBranch(); }
  bool gone() const { return gone_; }

 private:
  enum class Heard { message, nothing, end };
  struct Process {
    Process(kj::UnixEventPort& port, kj::AutoCloseFd process)
        : descriptor(kj::mv(process)),
          observer(port, descriptor, kj::UnixEventPort::FdObserver::OBSERVE_READ) {}
    kj::AutoCloseFd descriptor;  // pidfd_open(2)
    kj::UnixEventPort::FdObserver observer;
  };
  Heard tryReceive(kj::Maybe<kj::Own<WorkerMessage>>& message);
  Exit reap();

  WorkerParent& parent_;
  pid_t pid_;
  kj::Own<Process> process_;
  kj::AutoCloseFd socket_;
  kj::UnixEventPort::FdObserver socketObserver_;
  kj::Array<capnp::word> buffer_;
  bool gone_ = false;
  kj::Own<void> door_;
  std::string lastWords_;
  Lost lost_;
  Memory memory_;
  Share share_;
  Moved moved_;
  kj::ForkedPromise<Exit> exited_;
};

// The environment a worker gets: what the driver and the loader read, no tokens, no pool addresses.
std::vector<std::string> workerEnvironment(char** environment);

}  // namespace gpupool::server
