#pragma once
// Which devices a request gets: a pure function of the request and the inventory, so that it can be tested
// alone and asked "what if" questions. All devices of one lease are on one server (v1).
//
// Policy: the fullest server that fits, and on it the fullest devices that fit, so that whole devices and
// large servers stay free for those who need them (pack); or, if that is wished, the emptiest (spread).
//
// A lease of several devices gets ones that NVLink joins, each with each, where such a set fits: on that
// server before fuller devices, and on another server before a fuller one. What is equal by all that is
// chosen by how near an RDMA device with an active port is; of several devices the sum counts.
//
// A server that overcommits leases more memory than its devices have, and its leases take turns: some are
// resident, the others aside. So that each can have its turn, every lease of a device has to fit there alone
// beside all others aside. Devices with room for a lease beside all others come first; of those where it
// takes turns, the least crowded does, whatever NVLink joins.

#include <span>
#include <string>
#include <vector>

#include "pool-manager/device_filter.h"
#include "pool-manager/fabric.h"
#include "pool-manager/model.h"
#include "schema/lease_memory.h"

namespace gpupool::pool {

inline constexpr uint64_t kNever = ~uint64_t{0};  // a time

struct DeviceUse {
  Device info;
  // Of what may be leased, not reserved. Without overcommit 0 where a lease that runs holds the whole device.
  uint64_t freeBytes = 0;
  std::vector<std::string> holders;  // of the leases on it, for people; "": whose the asker may not know
  std::string duplicateOf;           // not empty: another server's device, leased only there
  uint32_t overcommitPercent = 100;  // of its memory, so much may be leased
  // Of the leases on it:
  uint64_t asideBytes = 0;       // what they take while none of them is resident
  uint64_t largestBytes = 0;     // what the one that takes most takes beyond that when it is
  uint32_t sharePercent = 0;     // of the device's time, what they have named
  uint64_t firstEndMs = kNever;  // when the first of them is over; 0: at any moment; kNever: there is none
  // A request that is before others in the queue waits for this device, and will not start on it earlier than
  // then; kNever: none does. Others get it only if they end by then.
  uint64_t claimedMs = kNever;
  uint64_t joined = 0;  // by NVLink with these of ServerUse::devices: fabric::Fabric::nvlinks
  Adapter adapter;      // the nearest

  bool operator==(const DeviceUse&) const = default;
};

// What a lease has on a device, or is to have.
struct Claim {
  LeasedDevice device;
  uint64_t kept = 0;  // stays there when its memory leaves, as far as is known, besides its context and code
  uint32_t sharePercent = 0;
  bool suspended = false;  // by order: it does not become resident
};

struct ServerUse {
  std::string name;
  std::string unusable;  // why nothing can be placed here now; empty: it can
  std::vector<DeviceUse> devices;
  bool cordoned =
      false;  // by an operator: nothing is placed here before he ends it; then `unusable` says why
  std::vector<uint64_t> rows = {};  // of the clients for which it has worker programs; empty: any

  bool operator==(const ServerUse&) const = default;
};

struct Wish {
  uint32_t deviceCount = 1;
  uint64_t memoryBytes = 0;  // per device; 0: the whole device
  std::string server;        // only this one; empty: any
  uint32_t sharePercent = 0;
  DeviceFilter gpu = {};
  Policy policy = Policy::pack;
  uint64_t endsMs = kNever;  // when a lease that begins now is over at the latest
  // Of a request for whole devices: what suspended leases leave of one, at least half of it, is better than
  // none.
  bool besideSuspended = false;
  std::vector<WorkerVersion> clients = {};  // a server has worker programs for all of them

  bool operator==(const Wish&) const = default;
};

struct Choice {
  std::string server;  // empty: not placed
  std::vector<LeasedDevice> devices;
  std::string missing;  // not placed: what is missing and who holds what, in one line
  bool never = false;   // not placed, and would not be if every device were free
};

// Where a lease that runs is to go.
struct MoveWish {
  std::string from;                // the server that it is on
  std::vector<Claim> claims;       // what it has there
  std::string server;              // only this one; empty: any but `from`
  std::vector<uint32_t> ordinals;  // there, one for each claim; empty: any that fit
  DeviceFilter gpu = {};           // what its request named
  Policy policy = Policy::pack;
  std::vector<WorkerVersion> clients = {};  // as Wish's
};

using schema::leasableBytes;
// What a lease takes from the device's free memory.
uint64_t reservedBytes(const LeasedDevice& device);
// What it takes while it is suspended and `kept` bytes stay there, besides its context and code.
uint64_t suspendedBytes(const LeasedDevice& device, uint64_t kept);

// What leases can have on all of its devices without taking turns.
uint64_t totalRoom(const ServerUse& server);

// Takes what the lease has off what is free.
void occupy(const Claim& claim, DeviceUse& device);

Choice place(const Wish& wish, std::span<const ServerUse> servers);
// Devices that are free at once, each like the one that it stands for (model, memory, driver, hardware or
// software) and none of the lease's own; in the order of the claims. The inventory has the lease in it. Not
// on servers that overcommit: their leases take turns. `never` says nothing here.
Choice placeMove(const MoveWish& wish, std::span<const ServerUse> servers);
// Whether the server has such devices, whatever is free there.
bool couldMove(const MoveWish& wish, const ServerUse& server);

// A server that may keep the checkpoints of a lease that runs elsewhere.
struct KeeperUse {
  const ServerUse* server = nullptr;
  bool sameHost = false;   // as the lease
  uint64_t keepBytes = 0;  // Server::keepBytes
  size_t leases = 0;       // whose standby it is
};
struct StandbyChoice {
  std::string server;     // empty: none
  bool sameHost = false;  // it dies with the host of the lease
  std::string missing;    // none: why, in one line
};
// The one with the most memory for each lease whose standby it is, on another host if there is one: of those
// that have devices like the lease's (wish), whatever is free there. Nothing is reserved.
StandbyChoice placeStandby(const MoveWish& wish, std::span<const KeeperUse> keepers);

// Whether no server of those that it may have (one at least) has worker programs for its clients.
bool servedByNone(const Wish& wish, std::span<const ServerUse> servers);
// Whether the wish could be served if every device were free and in order. With no servers: false.
bool couldEver(const Wish& wish, std::span<const ServerUse> servers);
// Whether no server could ever serve the wish but cordoned ones: it waits for an operator, not for a device.
bool onlyCordoned(const Wish& wish, std::span<const ServerUse> servers);
// Of what was placed there, for people: "; joined by NVLink; nearest to mlx5_0: PIX"; "": nothing is known.
std::string describeLinks(const Choice& choice, std::span<const ServerUse> servers);
// What is missing for the wish, and who holds what, in one line.
std::string explain(const Wish& wish, std::span<const ServerUse> servers);
// The same by server and device: what hinders it there, each alone.
std::vector<ServerVerdict> judge(const Wish& wish, std::span<const ServerUse> servers);
// The wish waits, and has precedence over what comes after it: claims the devices that it may get one day, on
// each server from the time on at which enough of them may be free there. False: that claims nothing more.
bool claim(const Wish& wish, uint64_t nowMs, std::span<ServerUse> servers);

// What is missing on `server` to give these very devices to a lease that has been suspended there, and who
// holds it, in one line; "": nothing. The inventory is one without that lease.
std::string missingFor(std::span<const Claim> claims, const ServerUse& server);

}  // namespace gpupool::pool
