#include "server/fabric/inventory.h"

#include <algorithm>

namespace gpupool::fabric {
namespace {

bool isIpv4(const GidValue& value) {
  return std::all_of(value.begin(), value.begin() + 10, [](uint8_t byte) { return byte == 0; }) &&
         value[10] == 0xff && value[11] == 0xff;
}

bool isLinkLocal(const GidValue& value) { return value[0] == 0xfe && (value[1] & 0xc0) == 0x80; }

int merit(const Gid& gid) {
  switch (gid.type) {
    case GidType::ROCE_V2:
      return isIpv4(gid.value) ? 5 : isLinkLocal(gid.value) ? 3 : 4;
    case GidType::INFINI_BAND:
      return 2;
    case GidType::ROCE_V1:
      return 1;
    default:
      return 0;
  }
}

// Keeps the default one among those that a report has room for.
void keepWithinBounds(Port& port) {
  if (port.gids.size() <= kMaxGids) return;
  const auto best = std::find_if(port.gids.begin(), port.gids.end(), [&](const Gid& gid) {
    return static_cast<int32_t>(gid.index) == port.defaultGid;
  });
  if (best != port.gids.end() && best - port.gids.begin() >= static_cast<ptrdiff_t>(kMaxGids))
    port.gids[kMaxGids - 1] = *best;
  port.gids.resize(kMaxGids);
}

}  // namespace

int32_t chooseGid(const std::vector<Gid>& gids) {
  const Gid* best = nullptr;
  for (const Gid& gid : gids)
    if (best == nullptr || merit(gid) > merit(*best)) best = &gid;
  return best == nullptr ? -1 : static_cast<int32_t>(best->index);
}

Fabric takeInventory(Verbs& verbs, const Sysfs& sysfs, const std::vector<std::string>& gpus) {
  Fabric fabric = verbs.query();
  std::vector<PciPlace> places;
  places.reserve(gpus.size());
  for (const std::string& address : gpus) places.push_back(sysfs.pciPlace(address));
  const unsigned nodes = sysfs.numaNodes();
  for (Device& device : fabric.devices) {
    for (Port& port : device.ports) {
      port.defaultGid = chooseGid(port.gids);
      port.netdev = sysfs.netdev(device.name, port.number, port.defaultGid);
      if (const uint32_t rate = sysfs.rateMbps(device.name, port.number); rate != 0) port.rateMbps = rate;
      keepWithinBounds(port);
    }
    const PciPlace place = sysfs.rdmaPlace(device.name, device.ports.empty() ? "" : device.ports[0].netdev);
    device.pciAddress = place.address;
    device.numaNode = place.numaNode;
    for (const PciPlace& gpu : places) device.gpuDistances.push_back(distance(place, gpu, nodes));
  }
  return fabric;
}

}  // namespace gpupool::fabric
