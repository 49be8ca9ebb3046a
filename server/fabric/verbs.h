#pragma once
// The interface to libibverbs: RDMA devices, the state of their ports, and events.
//
// The library is loaded when the server starts and may be missing; nothing links it. One thread uses a Verbs.

#include <memory>
#include <string>
#include <vector>

#include "schema/fabric.h"

namespace gpupool::fabric {

class Verbs {
 public:
  virtual ~Verbs() = default;
  // All devices, queried again: new ones are opened, removed ones are dropped. Fills in what the library
  // knows: names, GUID, transport, firmware, dma-buf, ports without netdev and default GID. A device that
  // cannot be opened is listed with its problem. May take as long as a faulty adapter's firmware.
  virtual Fabric query() = 0;
  // Become readable when a device has an event; valid until the next query() or events().
  virtual std::vector<int> descriptors() = 0;
  // Takes the events that have come, as text: "mlx5_0: port 1: port error". Without, the kernel would keep
  // them.
  virtual std::vector<std::string> events() = 0;
};

// Null if the library is missing or lacks a function; `why` gives the reason.
std::unique_ptr<Verbs> loadVerbs(const std::string& library, std::string* why);

}  // namespace gpupool::fabric
