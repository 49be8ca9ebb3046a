#pragma once
// What a server's next life must know, in a file of its state folder: the highest epoch that each device was
// granted with, which workers run, so that one that outlives its server is known by its lease, which leases
// go into files (held_notes.h), and with which leases and sessions it is to go on (readoption.h). It has
// their keys: it is the server's user's alone (0600). Written whole and renamed; not synced: workers and
// leases that go into files do not outlive the machine.

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "schema/id.h"
#include "schema/pool.capnp.h"

namespace gpupool::server {

struct StoredSession {
  Id id;
  uint64_t epoch = 0, deviceEpoch = 0;
  uint32_t clientPid = 0;
  std::string command, transport;
  uint64_t rowsHash = 0;
  bool transportNamed = false;
  bool operator==(const StoredSession&) const = default;
};

struct StoredWorker {
  pid_t pid = 0;
  uint64_t startTicks = 0;
  Id lease;
  std::vector<std::string> devices;           // uuids
  std::optional<StoredSession> session = {};  // with which the next life may go on
  uint64_t number = 0;                        // its session's, by which those that share with it know it
  bool operator==(const StoredWorker&) const = default;
};

struct NotedHold {
  Id lease, checkpoint;
  std::string folder, server;  // HeldLease's
  bool operator==(const NotedHold&) const = default;
};

// Of a lease whose memory the copier has, or that is on its way there or back.
struct StoredAside {
  bool byTurns = false;   // Grant.aside
  bool changing = false;  // on its way: it has its whole reservation
  std::vector<uint64_t> kept;
  uint64_t movedBytes = 0;
  bool operator==(const StoredAside&) const = default;
};

struct StoredCopier {
  pid_t pid = 0;
  uint64_t startTicks = 0;
  bool operator==(const StoredCopier&) const = default;
};

// Grant.target.
struct StoredTarget {
  uint64_t epoch = 0;
  std::vector<std::pair<std::string, uint64_t>> devices;  // StoredGrant's
  bool operator==(const StoredTarget&) const = default;
};

// A lease with which the next life may go on (Grant).
struct StoredGrant {
  Id id;
  uint64_t epoch = 0;
  std::vector<std::byte> key;
  std::vector<std::pair<std::string, uint64_t>> devices;  // uuids, and the lease's memory there
  std::string holder, tenant;
  uint32_t sharePercent = 0;
  schema::Priority priority = schema::Priority::NORMAL;
  uint32_t protectMs = 0, idleMs = 0;
  std::optional<StoredAside> aside = {};
  std::optional<StoredTarget> target = {};
  bool ending = false;  // it has ended, and others have memory of it
  bool operator==(const StoredGrant&) const = default;
};

// What holds in all lives of a server for what sessions share (share_receipts.h).
struct StoredSharing {
  Id server;                            // Offers::Token.server
  std::vector<std::byte> seal;          // the key of receipts
  uint32_t life = 0;                    // this one's number: those of its sessions begin with it
  std::vector<uint64_t> sessions = {};  // these; until it knows which go on, also the earlier life's
  bool operator==(const StoredSharing&) const = default;
};

// Of a server without an earlier life.
StoredSharing newSharing();

struct ServerState {
  std::map<std::string, uint64_t> epochs;  // by uuid
  std::vector<StoredWorker> workers;
  std::vector<NotedHold> holds = {};
  std::vector<StoredGrant> leases = {};
  std::optional<StoredCopier> copier = {};  // with which the next life may go on
  std::optional<StoredSharing> sharing = {};
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
