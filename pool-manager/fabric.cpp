#include "pool-manager/fabric.h"

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

}  // namespace

fabric::Fabric read(schema::Fabric::Reader from, size_t gpus) {
  fabric::Fabric to;
  require(from.getDevices().size() <= fabric::kMaxDevices, "too many devices");
  for (auto device : from.getDevices()) to.devices.push_back(read(device, gpus));
  to.note = checked(from.getNote());
  return to;
}

}  // namespace gpupool::pool
