#pragma once
// What a worker is sent to begin a session with (WorkerStart), whether its client is there already or the
// session moves to it from another worker. Belongs to the event loop's thread.

#include <kj/io.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "server/front/doors.h"
#include "server/front/leases.h"
#include "server/front/sessions.h"

namespace gpupool::server {

class WorkerStarts {
 public:
  struct Settings {
    std::string networkDevice;
    std::string networkWire;
    std::optional<gid_t> workersGroup;  // of workers that have user ids of their own
    std::string moduleCache;            // folder for all tenants; empty: no cache
    // Of a device (index into the inventory), for the workers that use it; -1: none.
    std::function<int(size_t device)> deviceLock = [](size_t) { return -1; };
    bool reportActivity = false;  // WorkerStart's
    uint64_t moduleCacheBytes = 0;
    // So long a session goes on without a server, where the next one may take it over; 0: it ends.
    std::chrono::milliseconds away{0};
    std::string doors;  // with `away`: the folder of their doors
  };
  WorkerStarts(LeaseTable& leases, Settings settings);
  KJ_DISALLOW_COPY(WorkerStarts);

  // Where a worker's session comes from, and what `socket` is then.
  enum class From {
    client,  // it is new: its client's socket
    worker,  // another worker of this server: the new one's end of the state socket
    stream,  // a worker of another server, or as if: a connection to it, which is the state socket
    server,  // this server has what the session is: likewise, with this server at its other end
  };
  // Of the grant's placements that of the session. The worker gets a copy of the socket. False: the worker is
  // gone.
  bool send(WorkerChild& worker, const SessionFacts& facts, const Grant& grant, int socket,
            From from = From::client) const;

 private:
  void fill(const SessionFacts& facts, const Placement& placement, schema::WorkerStart::Builder start) const;
  // What goes with the start, in the order in which it says so.
  std::vector<int> describeDescriptors(schema::WorkerStart::Builder start, const Placement& placement,
                                       int socket, int cache, int door) const;
  // None: the session ends with the server.
  kj::AutoCloseFd doorFor(WorkerChild& worker, const Grant& grant) const;
  kj::AutoCloseFd cacheFolder(const std::string& tenant) const;
  std::string folderOf(const std::string& tenant) const;

  LeaseTable& leases_;
  Settings settings_;
  Doors doors_;
  std::string cacheKey_;  // <moduleCache>.key
};

}  // namespace gpupool::server
