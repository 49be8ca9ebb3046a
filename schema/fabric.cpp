#include "schema/fabric.h"

#include <bit>

namespace gpupool::fabric {
namespace {

void write(const Port& from, schema::FabricPort::Builder to) {
  to.setNumber(from.number);
  to.setState(from.state);
  to.setLinkLayer(from.linkLayer);
  to.setRateMbps(from.rateMbps);
  to.setMtu(from.mtu);
  to.setLid(from.lid);
  to.setNetdev(from.netdev);
  to.setDefaultGid(from.defaultGid);
  auto gids = to.initGids(static_cast<unsigned>(from.gids.size()));
  for (unsigned i = 0; i < gids.size(); ++i) {
    const Gid& gid = from.gids[i];
    gids[i].setIndex(gid.index);
    gids[i].setValue(kj::arrayPtr(gid.value.data(), gid.value.size()));
    gids[i].setType(gid.type);
  }
}

void write(const Device& from, schema::FabricDevice::Builder to) {
  to.setName(from.name);
  to.setNodeGuid(from.nodeGuid);
  to.setTransport(from.transport);
  to.setFirmware(from.firmware);
  to.setPciAddress(from.pciAddress);
  to.setNumaNode(from.numaNode);
  auto distances = to.initGpuDistances(static_cast<unsigned>(from.gpuDistances.size()));
  for (unsigned i = 0; i < distances.size(); ++i) distances.set(i, from.gpuDistances[i]);
  to.setDmaBuf(from.dmaBuf);
  to.setDmaBufReason(from.dmaBufReason);
  to.setProblem(from.problem);
  auto ports = to.initPorts(static_cast<unsigned>(from.ports.size()));
  for (unsigned i = 0; i < ports.size(); ++i) write(from.ports[i], ports[i]);
}

const Device* find(const Fabric& fabric, const std::string& name) {
  for (const Device& device : fabric.devices)
    if (device.name == name) return &device;
  return nullptr;
}

bool up(PortState state) { return state == PortState::ACTIVE; }

void compare(const Device& before, const Device& after, std::vector<Change>& list) {
  if (before.problem != after.problem)
    list.push_back({!after.problem.empty(),
                    after.name + ": " + (after.problem.empty() ? "is well again" : after.problem)});
  for (const Port& port : after.ports)
    for (const Port& old : before.ports) {
      if (old.number != port.number || old.state == port.state) continue;
      list.push_back({up(old.state), after.name + " port " + std::to_string(port.number) + " is " +
                                         text(port.state) + " (was " + text(old.state) + ")"});
    }
}

size_t nvlinkPairs(const Fabric& fabric) {
  size_t ends = 0;
  for (const uint64_t joined : fabric.nvlinks) ends += static_cast<size_t>(std::popcount(joined));
  return ends / 2;
}

// Of the names, the one that belongs to the value.
template <class Enum, size_t Count>
const char* named(Enum value, const char* const (&names)[Count]) {
  const auto at = static_cast<size_t>(value);
  return names[at < Count ? at : 0];
}

}  // namespace

std::vector<unsigned> indices(uint64_t bits) {
  std::vector<unsigned> list;
  for (; bits != 0; bits &= bits - 1) list.push_back(static_cast<unsigned>(std::countr_zero(bits)));
  return list;
}

void write(const Fabric& from, schema::Fabric::Builder to) {
  auto devices = to.initDevices(static_cast<unsigned>(from.devices.size()));
  for (unsigned i = 0; i < devices.size(); ++i) write(from.devices[i], devices[i]);
  to.setNote(from.note);
  auto nvlinks = to.initNvlinks(static_cast<unsigned>(from.nvlinks.size()));
  for (unsigned i = 0; i < nvlinks.size(); ++i) nvlinks.set(i, from.nvlinks[i]);
}

const char* text(PortState state) {
  return named(state, {"unknown", "down", "initializing", "armed", "active", "active, deferred"});
}
const char* text(LinkLayer layer) { return named(layer, {"unknown", "InfiniBand", "Ethernet"}); }
const char* text(GidType type) { return named(type, {"unknown", "InfiniBand", "RoCE v1", "RoCE v2"}); }
const char* text(DmaBuf capability) { return named(capability, {"unknown", "yes", "no"}); }
const char* text(PciDistance distance) {
  return named(distance, {"n/a", "PIX", "PXB", "PHB", "NODE", "SYS"});
}

std::vector<Change> changes(const Fabric& before, const Fabric& after) {
  std::vector<Change> list;
  if (before.note != after.note && !after.note.empty()) list.push_back({false, after.note});
  if (before.nvlinks != after.nvlinks) {
    const size_t were = nvlinkPairs(before), are = nvlinkPairs(after);
    list.push_back({are < were, "NVLink joins " + std::to_string(are) + " pairs of GPUs (" +
                                    std::to_string(were) + " before)"});
  }
  for (const Device& old : before.devices)
    if (find(after, old.name) == nullptr) list.push_back({true, old.name + " is gone"});
  for (const Device& device : after.devices) {
    if (const Device* old = find(before, device.name)) {
      compare(*old, device, list);
      continue;
    }
    std::string text = device.name + " is here";
    for (const Port& port : device.ports)
      text += ", port " + std::to_string(port.number) + " " + fabric::text(port.state);
    if (!device.problem.empty()) text += ", " + device.problem;
    list.push_back({!device.problem.empty(), text});
  }
  return list;
}

}  // namespace gpupool::fabric
