#pragma once
// The fabric of this server: what libibverbs reports (verbs.h) and what sysfs adds (sysfs.h).

#include <string>
#include <vector>

#include "server/fabric/sysfs.h"
#include "server/fabric/verbs.h"

namespace gpupool::fabric {

// gpus: the PCI address of each device of the server, in the inventory's order; empty: it has none
// (software).
Fabric takeInventory(Verbs& verbs, const Sysfs& sysfs, const std::vector<std::string>& gpus);

// The index of the GID that a peer is best reached by: over Ethernet RoCE v2 with an IPv4 address, with a
// routable IPv6 one, then whatever is there; over InfiniBand the first. -1: there is none.
int32_t chooseGid(const std::vector<Gid>& gids);

}  // namespace gpupool::fabric
