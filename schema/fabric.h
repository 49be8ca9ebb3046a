#pragma once
// What a server's GPUs reach others by, as plain values: inventory.capnp's Fabric without Cap'n Proto's
// lifetimes. The server fills them (server/fabric/; NVLinks: server/health/) and writes; manager and tool
// read (pool-manager/fabric.h, which checks).

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "schema/inventory.capnp.h"

namespace gpupool::fabric {

using schema::DmaBuf;
using schema::GidType;
using schema::LinkLayer;
using schema::PciDistance;
using schema::PortState;

// What a report may hold; a server leaves out what is beyond, a manager refuses it.
inline constexpr unsigned kMaxDevices = 64;  // virtual functions among them
inline constexpr unsigned kMaxPorts = 16;    // of one device
inline constexpr unsigned kMaxGids = 64;     // of one port: two for each of its addresses
inline constexpr size_t kMaxText = 120;

using GidValue = std::array<uint8_t, 16>;

struct Gid {
  uint32_t index = 0;
  GidValue value{};
  GidType type = GidType::UNKNOWN;
  bool operator==(const Gid&) const = default;
};

struct Port {
  uint32_t number = 0;
  PortState state = PortState::UNKNOWN;
  LinkLayer linkLayer = LinkLayer::UNKNOWN;
  uint32_t rateMbps = 0;
  uint32_t mtu = 0;
  uint32_t lid = 0;
  std::string netdev;
  std::vector<Gid> gids;
  int32_t defaultGid = -1;
  bool operator==(const Port&) const = default;
};

struct Device {
  std::string name;
  uint64_t nodeGuid = 0;
  std::string transport, firmware, pciAddress;
  int32_t numaNode = -1;
  std::vector<PciDistance> gpuDistances;
  DmaBuf dmaBuf = DmaBuf::UNKNOWN;
  std::string dmaBufReason, problem;
  std::vector<Port> ports;
  bool operator==(const Device&) const = default;
};

struct Fabric {
  std::vector<Device> devices;
  std::string note;
  // Of each GPU of the server: those that NVLink joins it with, as bits by their index. Not by groups: GPUs
  // that are linked without switches need not all be linked with one another (DGX-1). Empty: not known.
  std::vector<uint64_t> nvlinks = {};
  bool operator==(const Fabric&) const = default;
};

// Those of the bits of nvlinks.
std::vector<unsigned> indices(uint64_t bits);

void write(const Fabric& from, schema::Fabric::Builder to);

// For people and logs: "active", "Ethernet", "RoCE v2", "yes", "PIX"; "unknown" or, for a distance, "n/a".
const char* text(PortState state);
const char* text(LinkLayer layer);
const char* text(GidType type);
const char* text(DmaBuf capability);
const char* text(PciDistance distance);

// What a person wants to read in the log when one report follows another: ports that changed their state,
// devices that came and went.
struct Change {
  bool worse = false;
  std::string text;  // "mlx5_0 port 1 is down (was active)"
};
std::vector<Change> changes(const Fabric& before, const Fabric& after);

}  // namespace gpupool::fabric
