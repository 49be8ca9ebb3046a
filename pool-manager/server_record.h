#pragma once
// What the pool keeps of a server: what it has said, and what it is beside other servers.

#include <map>
#include <set>
#include <string>
#include <vector>

#include "pool-manager/fabric.h"
#include "pool-manager/records.h"
#include "schema/device_sample.h"

namespace gpupool::pool {

struct ServerRecord {
  Server facts;
  bool connected = false;
  bool reported = false;  // has named its leases since it joined, and so lives
  bool told = false;      // the audit log has it as alive, or is about to
  std::string arrival;    // why it is alive then
  uint64_t beatMs = 0;    // last sign of life
  uint64_t joined = 0;    // the number of its latest join, of all servers' joins
  uint32_t warmWorkers = 0;
  std::string suspect;  // why grants failed; until the next beat
  fabric::Fabric fabric;
  std::vector<Adapter> adapters;      // by device: the nearest one of the fabric; empty: it has told of none
  std::vector<DeviceSample> samples;  // of each device, as of samplesMs; empty: it takes none
  uint64_t samplesMs = 0;
  // Leases that it runs and this pool does not know, or has ended: where, by index into facts.devices (empty:
  // it did not say). Nothing is placed there until the server has confirmed their end.
  std::map<Id, std::set<size_t>> strangers;
  // What it said when it joined, until its first beat: leases of its earlier lives that still run, and where.
  std::map<Id, std::set<size_t>> running;
  std::map<Id, uint64_t> readopted;     // as it joined with
  std::vector<std::string> duplicates;  // by device: the device of another server that it is; empty: none
};

}  // namespace gpupool::pool
