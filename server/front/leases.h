#pragma once
// The leases that this server has accepted and the sessions that it admits. The server decides last about its
// devices.
//
// A grant is accepted only if its epoch is higher than every one seen on its devices and its memory fits
// beside that of the leases not yet closed. A lease being revoked admits no session but keeps its memory
// until `remove`, which comes after its workers are gone. Renewal is the manager's task: here a lease runs
// until it is revoked, also while the manager is unreachable.
//
// A lease is paused from the moment when it is to be suspended until it runs again, and while its sessions
// move to other workers: no session of it begins.
// While it is suspended it reserves what its sessions keep on their devices; whoever resumes it first has its
// whole reservation back, or learns what is missing.
//
// A lease that moves to other devices of this server has two placements until all of its sessions are on one
// of them: its own, and the target. Both are reserved. A session is on one of the two
// (SessionFacts.deviceEpoch), and new ones begin on the lease's own. What lies behind a settled move is the
// sessions' concern: who settles has seen to it that none is left on the side that goes. Leases that take
// turns have no target.
//
// With overcommit, leases take turns (turns.h): one that is `aside` is suspended too, but by the server and
// not by order. So much may be granted that each lease has room when all others are aside. What a lease takes
// beside its memory is counted as the manager does (schema/lease_memory.h). Pure bookkeeping, no I/O;
// one thread.

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "schema/device.h"
#include "schema/handshake.h"
#include "schema/id.h"
#include "schema/pool.capnp.h"
#include "server/front/server_state.h"

namespace gpupool::server {

// Not a LeasedDevice: the server goes by its own inventory, whatever a lease says of the device.
struct GrantedDevice {
  size_t index = 0;  // into the inventory
  uint64_t memoryBytes = 0;
};

// What suspending a lease has come to; schema/pool.capnp says what each is.
struct Suspended {
  std::vector<uint64_t> kept;  // by device of the lease
  uint64_t movedBytes = 0;
  uint32_t drainMs = 0, moveMs = 0;
};

// The files in which a lease is held; schema/pool.capnp says what each is.
struct HeldFiles {
  Id checkpoint;
  std::string folder, server;
};

// Devices that a lease has together, and the device epoch with which it has them: its name among the
// placements.
struct Placement {
  uint64_t epoch = 0;
  std::vector<GrantedDevice> devices;
};

// A lease, and its own placement, which is the only one unless there is a target.
struct Grant : Placement {
  Id id;
  std::vector<std::byte> key;
  std::optional<Placement> target;
  std::string holder, tenant;
  uint32_t sharePercent = 0;  // TurnTerms; 0: none is named
  schema::Priority priority = schema::Priority::NORMAL;
  uint32_t protectMs = 0;     // TurnTerms; 0: its sessions are not protected
  bool holderKeeps = false;   // TurnTerms; with protectMs
  bool standbyKeeps = false;  // TurnTerms; with holderKeeps
  uint32_t idleMs = 0;        // TurnTerms; 0: nobody asks whether it is used
  bool closing = false;
  bool paused = false;
  bool aside = false;      // paused, so that others have their turn, and not by order
  bool moving = false;     // paused, while its sessions move to other workers
  bool readopted = false;  // an earlier life of this server has granted it
  std::optional<Suspended> suspended;
  // Suspended, and its sessions are in files: none of them is here, and none comes before it is restored. So
  // is one from the beginning that is granted to be restored here.
  std::optional<HeldFiles> held;
  bool holding = false;                  // paused, while its sessions go into files and leave
  bool resuming = false;                 // suspended, with its whole reservation
  std::vector<uint64_t> lastKept;        // when it was last suspended or aside; empty: it never was
  std::map<Id, uint64_t> sessionEpochs;  // highest admitted, by session

  // Null: none of that epoch.
  const Placement* placement(uint64_t deviceEpoch) const {
    if (deviceEpoch == epoch) return this;
    return target && target->epoch == deviceEpoch ? &*target : nullptr;
  }
};

void write(const HeldFiles& from, schema::HeldLease::Builder to);

class LeaseTable {
 public:
  // epochs: the highest of each device so far, by uuid; of an earlier life of this server. overcommitPercent:
  // ServerInfo's.
  explicit LeaseTable(std::vector<Device> devices, const std::map<std::string, uint64_t>& epochs = {},
                      uint32_t overcommitPercent = 100);

  // Adds the lease, or renews the key of one that is there. With overcommit it is aside if there is no room
  // for it now. The error: why it is refused, for the manager's log.
  std::optional<std::string> grant(schema::Lease::Reader lease);
  // The next life of this server may go on with the lease, and its sessions that are as they were: it does
  // not go elsewhere when this server dies.
  static bool outlives(const Grant& lease) { return !lease.holderKeeps; }
  // Those of them with which it could go on now: not what is in files, or on its way there, or is about to
  // end. And as ending ones all others of which others have memory (lend).
  std::vector<StoredGrant> readoptable(const std::set<Id>& lend = {}) const;
  // As an earlier life of this server had it; one that was on its way to the copier or back is paused, until
  // its sessions have said where it is. sessionEpochs: Grant's. The error: why not.
  std::optional<std::string> readopt(const StoredGrant& lease, std::map<Id, uint64_t> sessionEpochs);
  // Those that an earlier life has granted, with the epoch of their placement.
  std::vector<std::pair<Id, uint64_t>> readopted() const;
  // Called after every change of what readoptable() says, and perhaps besides.
  void onChange(std::function<void()> changed) { changed_ = std::move(changed); }
  // With overcommit: does another lease wait for the device? Then a new one does not take it.
  void onWaitedFor(std::function<bool(size_t device)> waitedFor) { waitedFor_ = std::move(waitedFor); }
  bool overcommitted() const { return overcommitPercent_ > 100; }
  // Gives a lease that is here its target, as a grant would give it these devices: as many as it has. Again
  // with the same ones: does nothing. The error: why not.
  std::optional<std::string> addTarget(schema::Lease::Reader target);
  // From now on the lease's placement is the target (moved) or its own, and the other one is reserved no
  // more. Does nothing where there is none.
  void settle(const Id& id, bool moved);
  // Null if there is none, or it is closing.
  Grant* admissible(const Id& id);
  // Both are admissible, and of the same tenant, by the manager's word: it proves who asks for a lease.
  bool ofOneTenant(const Id& one, const Id& other);
  bool contains(const Id& id) const { return leases_.contains(id); }
  // No new sessions from now on. False if there is none.
  bool close(const Id& id);
  void remove(const Id& id);
  std::vector<Id> active() const;  // those that admit sessions
  const std::map<Id, Grant>& all() const { return leases_; }
  uint64_t reserved(size_t device) const;
  // What the lease takes on a device of it: now, when it is not suspended, and while it is.
  uint64_t reserved(const Grant& lease, size_t place) const;
  uint64_t whole(const GrantedDevice& device) const;
  uint64_t left(const Grant& lease, size_t place) const;
  // As `reserved`, when no lease were suspended: each of them wants to come back.
  uint64_t promised(size_t device) const;

  // The following are for leases that are admissible; of others they do nothing.
  // aside: what is done with it is not by order.
  void pause(const Id& id, bool aside = false);
  // As pause, while its sessions move to other workers: it keeps its whole reservation.
  void pauseToMove(const Id& id);
  // It runs, with its whole reservation.
  void unpause(const Id& id);
  // pauseToMove, to hold it.
  void pauseToHold(const Id& id);
  // Suspended, with nothing left of it here.
  void setHeld(const Id& id, HeldFiles held, Suspended suspended);
  // From here on it reserves `suspended.kept` alone, which has a number for each of its devices.
  void setSuspended(const Id& id, Suspended suspended);
  // Reserves all that the suspended lease had, until unpause or setSuspended. The error: what is missing.
  std::optional<std::string> reserveAgain(const Id& id);
  // With overcommit: why the lease, which is suspended by order, cannot be one of those that take turns.
  std::optional<std::string> crowded(const Id& id) const;
  // Those that are suspended by order; not those on their way back, whose whole reservation counts: were the
  // manager told that they are suspended, it would lease their memory to others.
  std::vector<std::pair<Id, std::vector<uint64_t>>> suspended() const;
  // Null: it is not held.
  const HeldFiles* held(const Id& id) const;
  std::vector<Id> holders(size_t device) const;
  // A device that broke while a session used it is not trusted again in the life of this server: somebody has
  // to look at it first. No lease on it is accepted from then on. False: that is known already, or there is
  // no such device.
  bool setBroken(uint32_t ordinal, const std::string& problem);
  // Nothing is granted on the device while this is not empty: a worker of an earlier life still uses it.
  void setBusy(size_t device, const std::string& why) { busy_[device] = why; }
  std::string problem(size_t device) const {
    return problems_[device].empty() ? busy_[device] : problems_[device];
  }
  uint64_t epoch(size_t device) const { return epochs_[device]; }
  // What the lease has of each device, in its placement of that epoch; empty: there is none. Also of one that
  // is closing.
  std::vector<uint64_t> limits(const Id& id, uint64_t deviceEpoch) const;
  const std::vector<Device>& devices() const { return devices_; }
  std::vector<int> ordinals(const Placement& placement) const;  // the driver's

 private:
  // StoredGrant's devices, and a placement of these as an earlier life had it. The error: why not.
  std::vector<std::pair<std::string, uint64_t>> named(const Placement& placement) const;
  std::optional<std::string> readopt(uint64_t epoch,
                                     const std::vector<std::pair<std::string, uint64_t>>& named,
                                     Placement& placement) const;
  // Of one device, beside what is reserved there. The error: what is missing.
  std::optional<std::string> lacks(size_t device, uint64_t amount) const;
  // A lease with this device of it, beside all others: as `crowded`.
  std::optional<std::string> crowds(const Id& id, const GrantedDevice& device) const;
  // What the lease names, as it could be granted now but for the room. The error: why not.
  std::optional<std::string> readPlacement(schema::Lease::Reader lease, Placement& placement) const;
  // Calls `see` with each of its devices, those of its target too.
  template <class F>
  static void eachDevice(const Grant& lease, F&& see);
  // Puts the new lease aside if it has to be.
  std::optional<std::string> findRoom(Grant& lease) const;
  uint64_t overhead(size_t device) const;

  std::vector<Device> devices_;
  std::function<void()> changed_ = [] {};
  uint32_t overcommitPercent_;
  std::function<bool(size_t device)> waitedFor_ = [](size_t) { return false; };
  std::vector<uint64_t> epochs_;       // by device
  std::vector<std::string> problems_;  // by device: broken
  std::vector<std::string> busy_;      // by device
  std::map<Id, Grant> leases_;
};

}  // namespace gpupool::server
