#pragma once
// Which of the devices that fit a lease gets: for placement's files alone.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool-manager/placement.h"

namespace gpupool::pool::fit {

struct Fitting {
  const DeviceUse* device = nullptr;
  uint64_t crowding = 0;  // with the lease; 0: it takes no turns there
};

struct DeviceSet {
  std::vector<const DeviceUse*>
      devices;            // in the driver's order, or of a move in its claims'; empty: too few fit
  uint64_t crowding = 0;  // of the most crowded one
  bool joined = false;    // NVLink joins each with each; one alone is joined
};

bool joined(const ServerUse& server, const std::vector<const DeviceUse*>& devices);

// So many of these devices of the server: the least crowded ones; of such sets a joined one; of those the one
// with the least room (or, spread, the most), and then the one that is nearest to RDMA devices, in sums over
// its devices; of equal ones the first.
//
// Of each number of devices up to 12, whatever joins them, the right set is found; of more, too, where those
// that are joined with one are joined with each other, which switches and bridges do. Elsewhere the search
// may be given up with the best that it has found: which set is the best takes exponential time.
DeviceSet chooseSet(const ServerUse& server, std::vector<Fitting> fitting, size_t count, Policy policy);

// No joined set of what is free on this server has more devices than that.
size_t mostJoined(const ServerUse& server);

}  // namespace gpupool::pool::fit
