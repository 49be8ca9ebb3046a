#include "pool-manager/fabric.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pool-manager/convert.h"

namespace gpupool::pool {
namespace {

std::string checked(capnp::Text::Reader from) { return printable(text(from), fabric::kMaxText); }

template <class Enum>
Enum checked(Enum value, Enum last) {
  return value <= last ? value : Enum::UNKNOWN;
}

void require(bool right, const char* what) {
  if (!right) throw std::invalid_argument(std::string("the report of the fabric has ") + what);
}

fabric::Gid read(schema::FabricGid::Reader from) {
  fabric::Gid to;
  const auto value = from.getValue();
  require(value.size() == to.value.size(), "a GID that is not 16 bytes");
  std::memcpy(to.value.data(), value.begin(), to.value.size());
  to.index = from.getIndex();
  to.type = checked(from.getType(), fabric::GidType::ROCE_V2);
  return to;
}

fabric::Port read(schema::FabricPort::Reader from) {
  fabric::Port to;
  to.number = from.getNumber();
  to.state = checked(from.getState(), fabric::PortState::ACTIVE_DEFERRED);
  to.linkLayer = checked(from.getLinkLayer(), fabric::LinkLayer::ETHERNET);
  to.rateMbps = from.getRateMbps();
  to.mtu = from.getMtu();
  to.lid = from.getLid();
  to.netdev = checked(from.getNetdev());
  to.defaultGid = from.getDefaultGid();
  require(from.getGids().size() <= fabric::kMaxGids, "too many GIDs of a port");
  for (auto gid : from.getGids()) to.gids.push_back(read(gid));
  return to;
}

fabric::Device read(schema::FabricDevice::Reader from, size_t gpus) {
  fabric::Device to;
  to.name = checked(from.getName());
  require(!to.name.empty(), "a device without a name");
  to.nodeGuid = from.getNodeGuid();
  to.transport = checked(from.getTransport());
  to.firmware = checked(from.getFirmware());
  to.pciAddress = checked(from.getPciAddress());
  to.numaNode = from.getNumaNode();
  const auto distances = from.getGpuDistances();
  require(distances.size() == 0 || distances.size() == gpus, "distances to other GPUs than the server's");
  for (auto distance : distances) to.gpuDistances.push_back(checked(distance, fabric::PciDistance::SYS));
  to.dmaBuf = checked(from.getDmaBuf(), fabric::DmaBuf::UNSUPPORTED);
  to.dmaBufReason = checked(from.getDmaBufReason());
  to.problem = checked(from.getProblem());
  require(from.getPorts().size() <= fabric::kMaxPorts, "too many ports of a device");
  for (auto port : from.getPorts()) to.ports.push_back(read(port));
  return to;
}

std::vector<uint64_t> readNvlinks(capnp::List<uint64_t>::Reader from, size_t gpus) {
  require(from.size() == 0 || from.size() == gpus, "NVLinks of other GPUs than the server's");
  require(from.size() <= kMaxDevices, "NVLinks of too many GPUs");
  std::vector<uint64_t> to;
  for (const uint64_t joined : from) to.push_back(joined);
  const auto joins = [&](size_t one, size_t other) { return (to[one] >> other & 1) != 0; };
  for (size_t i = 0; i < to.size(); ++i) {
    require(gpus == kMaxDevices || to[i] >> gpus == 0, "NVLinks to GPUs that the server does not have");
    require(!joins(i, i), "a GPU with an NVLink to itself");
    for (size_t j = 0; j < i; ++j)
      require(joins(i, j) == joins(j, i), "an NVLink that only one of its ends has");
  }
  return to;
}

}  // namespace

fabric::Fabric read(schema::Fabric::Reader from, size_t gpus) {
  fabric::Fabric to;
  require(from.getDevices().size() <= fabric::kMaxDevices, "too many devices");
  for (auto device : from.getDevices()) to.devices.push_back(read(device, gpus));
  to.note = checked(from.getNote());
  to.nvlinks = readNvlinks(from.getNvlinks(), gpus);
  return to;
}

std::vector<Adapter> nearestAdapters(const fabric::Fabric& fabric, size_t gpus) {
  std::vector<Adapter> nearest(gpus);
  for (const fabric::Device& device : fabric.devices) {
    if (std::none_of(device.ports.begin(), device.ports.end(),
                     [](const auto& port) { return port.state == fabric::PortState::ACTIVE; }))
      continue;
    for (size_t i = 0; i < std::min(gpus, device.gpuDistances.size()); ++i) {
      const auto distance = device.gpuDistances[i];
      if (distance == fabric::PciDistance::UNKNOWN) continue;
      if (nearest[i].name.empty() || distance < nearest[i].distance) nearest[i] = {device.name, distance};
    }
  }
  return nearest;
}

}  // namespace gpupool::pool
