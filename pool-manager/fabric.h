#pragma once
// Checks a server's report of its fabric, and what placement wants of it.

#include <string>
#include <vector>

#include "pool-manager/model.h"
#include "schema/fabric.h"

namespace gpupool::pool {

// Texts are cut and made printable, values this program does not know become "unknown". Throws
// std::invalid_argument, before it has copied more than a report may hold, when something has more entries
// than that. gpus: how many devices the server has; each RDMA device lists its distance to all of them or to
// none, and NVLinks are told of all of them or of none, the same from both ends.
fabric::Fabric read(schema::Fabric::Reader from, size_t gpus);

// The RDMA device nearest to a GPU, of those that have an active port; of equally near ones the first.
struct Adapter {
  std::string name;  // empty: there is none, or how far they are is not known
  fabric::PciDistance distance = fabric::PciDistance::UNKNOWN;
  bool operator==(const Adapter&) const = default;
};
std::vector<Adapter> nearestAdapters(const fabric::Fabric& fabric, size_t gpus);

}  // namespace gpupool::pool
