#pragma once
// What a server's next life must know, in a file of its state folder: the highest epoch that each device was
// granted with, which workers run, so that one that outlives its server is known by its lease, and which
// leases go into files (held_notes.h). Written whole and renamed; not synced: workers and leases that go into
// files do not outlive the machine.

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "schema/id.h"

namespace gpupool::server {

struct StoredWorker {
  pid_t pid = 0;
  uint64_t startTicks = 0;
  Id lease;
  std::vector<std::string> devices;  // uuids
  bool operator==(const StoredWorker&) const = default;
};

struct NotedHold {
  Id lease, checkpoint;
  std::string folder, server;  // HeldLease's
  bool operator==(const NotedHold&) const = default;
};

struct ServerState {
  std::map<std::string, uint64_t> epochs;  // by uuid
  std::vector<StoredWorker> workers;
  std::vector<NotedHold> holds = {};
  bool operator==(const ServerState&) const = default;
};

class StateFile {
 public:
  // path: empty for none. bootId: of this machine's present life; workers and holds of another are gone.
  StateFile(std::string path, std::string bootId) : path_(std::move(path)), bootId_(std::move(bootId)) {}

  // Nothing where there is no file, or none that can be read (the log says so).
  ServerState read();
  // Does nothing where that is stored already. A failure is logged once: the server goes on.
  void write(const ServerState& state);

 private:
  bool replace(const ServerState& state) const;

  std::string path_, bootId_;
  ServerState stored_;
  bool failed_ = false;
};

}  // namespace gpupool::server
