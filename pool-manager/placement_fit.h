#pragma once
// Whether what is claimed of a device fits there, and what people are told of it: for placement's files
// alone.

#include <string>
#include <vector>

#include "pool-manager/placement.h"

namespace gpupool::pool::fit {

// What a claim takes of a device; by value, for this is asked of many.
struct Need {
  uint64_t bytes = 0, reserved = 0, aside = 0;
  uint32_t sharePercent = 0;
};

uint64_t reservedOf(uint64_t bytes, const Device& device);
Need needOf(uint64_t bytes, uint64_t kept, uint32_t sharePercent, const Device& device);
Need needOf(const Claim& claim);

// Why a lease cannot have that on a device which is in order.
enum class Lack {
  none,
  kind,    // it is another device than was asked for
  size,    // the device is smaller
  memory,  // too much of it is leased
  own,     // it would not fit beside the others aside
  others,  // another lease would not fit beside it and the others aside
  share,   // too much of the device's time is promised
  queue,   // somebody else waits for it, and has precedence
};

Lack lack(const Need& need, const DeviceUse& device);
Lack lack(const Claim& claim, const DeviceUse& device);

bool overcommitted(const DeviceUse& device);
uint64_t leasable(const DeviceUse& device);
// What a lease can have there without taking turns.
uint64_t roomBytes(const DeviceUse& device);
// By room on the whole server; of equal ones the first.
bool preferred(Policy policy, const ServerUse& server, const ServerUse& best);

// Whether the server has worker programs for these clients; and for people the first for which it has none:
// "has no worker program for this client (call rows 3b1f... of gpupool 0.1.0)".
bool serves(const ServerUse& server, const std::vector<WorkerVersion>& clients);
std::string describeClient(const ServerUse& server, const std::vector<WorkerVersion>& clients);
std::string describeNoWorker(const ServerUse& server, const std::vector<WorkerVersion>& clients);
inline constexpr char kInstallWorker[] = "install the worker of that version there (docs/admin.md, Upgrade)";
// Holders without a name are those that the asker may not know.
std::string describe(const std::vector<std::string>& holders);
std::string describeFree(const DeviceUse& device);
// What hinders it on a device that leases share by turns: more than that too much of it is leased.
std::string describeTurns(const Claim& claim, const DeviceUse& device);
// A line that holds this and a remedy has to pass through OpenReply.text (schema/holder.h).
inline constexpr size_t kMostDetails = 300;
std::string shortened(const std::string& text, size_t most);

}  // namespace gpupool::pool::fit
