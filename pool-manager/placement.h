#pragma once
// Which devices a request gets: a pure function of the request and the inventory, so that it can be tested
// alone and asked "what if" questions. All devices of one lease are on one server (v1).
//
// Policy: the fullest server that fits, and on it the fullest devices that fit, so that whole devices and
// large servers stay free for those who need them.

#include <span>
#include <string>
#include <vector>

#include "pool-manager/model.h"

namespace gpupool::pool {

struct DeviceUse {
  Device info;
  uint64_t freeBytes = 0;            // not reserved; 0 where a lease that runs holds the whole device
  std::vector<std::string> holders;  // of the leases on it, for people; "": whose the asker may not know
  std::string duplicateOf;           // not empty: another server's device, leased only there
};

struct ServerUse {
  std::string name;
  std::string unusable;  // why nothing can be placed here now; empty: it can
  std::vector<DeviceUse> devices;
};

struct Wish {
  uint32_t deviceCount = 1;
  uint64_t memoryBytes = 0;  // per device; 0: the whole device
  std::string server;        // only this one; empty: any
};

struct Choice {
  std::string server;  // empty: not placed
  std::vector<LeasedDevice> devices;
  std::string missing;  // not placed: what is missing and who holds what, in one line
  bool never = false;   // not placed, and would not be if every device were free
};

// What a lease with a memory limit takes beyond it on a real GPU: context, code, local memory.
inline constexpr uint64_t kOverheadBytes = uint64_t{1} << 30;
// What a lease takes from the device's free memory.
uint64_t reservedBytes(const LeasedDevice& device);
// What it takes while it is suspended and `kept` bytes stay there, besides its context and code.
uint64_t suspendedBytes(const LeasedDevice& device, uint64_t kept);

Choice place(const Wish& wish, std::span<const ServerUse> servers);

// Whether the wish could be served if every device were free and in order. With no servers: false.
bool couldEver(const Wish& wish, std::span<const ServerUse> servers);
// What is missing for the wish, and who holds what, in one line.
std::string explain(const Wish& wish, std::span<const ServerUse> servers);

// What is missing on `server` to give these very devices to a lease that has been suspended there, and who
// holds it, in one line; "": nothing. The inventory is one without that lease.
std::string missingFor(std::span<const LeasedDevice> devices, const ServerUse& server);

}  // namespace gpupool::pool
