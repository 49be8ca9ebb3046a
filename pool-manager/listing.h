#pragma once
// What the manager lists: its answers to Manager.devices, servers and leases (pool.capnp) as plain structs,
// for the tool and for the REST interface.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pool-manager/fabric.h"
#include "pool-manager/model.h"
#include "schema/device_sample.h"
#include "schema/pool.capnp.h"

namespace gpupool::pool {

struct ListedDevice {
  Device info;
  std::string server;
  uint64_t freeBytes = 0;
  std::vector<Id> leases;
  std::optional<DeviceSample> sample;
};

struct ListedServer {
  Server info;
  uint64_t lastBeatMs = 0;
  bool alive = false;
  uint32_t warmWorkers = 0;
  bool cordoned = false;
  std::string cordonReason, cordonedBy;
  uint64_t cordonedS = 0;  // ago; 0: unknown
  bool absent = false;     // it is not in the pool now: nothing else is known of it
  fabric::Fabric fabric;
};

std::vector<ListedDevice> read(capnp::List<schema::DeviceState>::Reader from);
std::vector<ListedServer> read(capnp::List<schema::ServerState>::Reader from);
std::vector<Lease> read(capnp::List<schema::Lease>::Reader from);

// What must be known beside a device to say how it is used. The three lists are asked for one after the
// other: a device may name a lease that has ended since.
struct PoolView {
  PoolView(std::vector<Lease> all, const std::vector<ListedServer>& servers);

  const Lease* find(const Id& id) const;  // null: it has ended since
  bool isSuspended(const Id& id) const;
  bool allSuspended(const ListedDevice& device) const;
  uint32_t percent(const ListedDevice& device) const;   // of its memory, so much may be leased
  uint64_t leasable(const ListedDevice& device) const;  // bytes
  // Bytes, whatever is free: of a server that is away nothing is.
  uint64_t leased(const ListedDevice& device) const;

  std::map<Id, Lease> leases;
  std::set<std::string> cordoned;
  std::map<std::string, uint32_t> percents;  // by server
  bool overcommits = false;                  // one of them
};

std::string uuidText(const std::string& bytes);  // "GPU-...", as nvidia-smi writes it

}  // namespace gpupool::pool
