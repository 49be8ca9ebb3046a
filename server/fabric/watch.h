#pragma once
// Watches the fabric from a thread of its own and keeps the last report.
//
// Why a thread: libibverbs asks the adapter's firmware, and a sick adapter answers after seconds or not at
// all; the server's loop must not wait for it. Why events and polling: an event reports at once that a port
// went down. What causes no event (a new address, a new adapter, a driver without events) is noticed by
// polling once a second. The report goes to the manager with each heartbeat.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "server/fabric/inventory.h"
#include "server/watch_thread.h"

namespace gpupool::fabric {

class Watch {
 public:
  struct Settings {
    std::vector<std::string> gpus;  // PCI addresses, as takeInventory's
    std::string sysfs = "/sys";
    std::chrono::milliseconds period{1000};
    std::chrono::milliseconds stopBound{1000};
  };
  Watch(std::unique_ptr<Verbs> verbs, Settings settings);
  // Without a thread: always this report.
  explicit Watch(std::string note);
  // Waits for the thread, within a bound: a thread that an adapter blocks is abandoned.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // The same object while nothing changes. Never null. Any thread.
  std::shared_ptr<const Fabric> latest() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::unique_ptr<WatchThread> thread_;  // null: the report stays
};

// library: "libibverbs.so.1", or "none": nothing is watched.
std::unique_ptr<Watch> watchFabric(const std::string& library, Watch::Settings settings);

}  // namespace gpupool::fabric
