#pragma once
// Watches the fabric from a thread of its own and keeps the last report.
//
// Why a thread: libibverbs asks the adapter's firmware, and a sick adapter answers after seconds or not at
// all; the server's loop must not wait for it. Why both events and a second's period: an event tells at once
// that a port went down, and whatever has no event (an address that came, an adapter that was plugged in, a
// driver that forgets to tell) is seen a second later. The report is asked for with each beat to the manager.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "server/fabric/inventory.h"

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
  // No thread, and this report for ever.
  explicit Watch(std::string note);
  // Waits for the thread, but not for ever: one that an adapter holds is left behind.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // The same object while nothing changes. Never null. Any thread.
  std::shared_ptr<const Fabric> latest() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

// library: "libibverbs.so.1", or "none": nothing is watched.
std::unique_ptr<Watch> watchFabric(const std::string& library, Watch::Settings settings);

}  // namespace gpupool::fabric
