// What travels from a server to a program: PCI addresses of the pool, and figures that are read with their
// bounds.
#include <cstring>
#include <set>
#include <vector>

#include "catch.h"
#include "schema/nvml_figures.h"
#include "schema/pci_bus_id.h"

using namespace gpupool::schema;

namespace {

std::span<const std::byte> bytesOf(const NvmlFigures& figures) {
  return std::as_bytes(std::span(&figures, 1));
}

}  // namespace

TEST_CASE("PCI addresses are read as CUDA and NVML write them") {
  PciAddress address;
  REQUIRE(readPciAddress("0000:17:00.0", address));
  CHECK((address.domain == 0 && address.bus == 0x17 && address.device == 0));
  REQUIRE(readPciAddress("0009C0DE:aF:1F.0", address));
  CHECK((address.domain == 0x9c0de && address.bus == 0xaf && address.device == 0x1f));
  for (const char* wrong : {"", "17", "17:00.0", "0000:17:00", "0000:17:00.0x", "zz:17:00.0"})
    CHECK_FALSE(readPciAddress(wrong, address));
}

TEST_CASE("a pool's address keeps bus and device, and its domain is no machine's own") {
  std::set<uint32_t> domains;
  for (const char* server : {"node1", "node2", "node3"})
    for (const uint32_t real : {0u, 9u, 0x19u}) {
      const PciAddress address = poolAddress(server, {real, 0x17, 1});
      CHECK((address.bus == 0x17 && address.device == 1));
      CHECK((address.domain >= 0x8000 && address.domain <= 0xffff));
      domains.insert(address.domain);
    }
  CHECK(domains.size() == 9);
  CHECK(poolAddress("node1", {}).domain == poolAddress("node1", {}).domain);
  // What a holder tells a client of a server's name ends after 63 bytes.
  const std::string name(80, 'n');
  CHECK(poolAddress(name, {}).domain == poolAddress(name.substr(0, 63), {}).domain);
  CHECK(pciText({0x8b82, 1, 2}) == "8B82:01:02.0");
}

TEST_CASE("figures of this build are read, and others are not") {
  NvmlFigures figures = emptyFigures(), read;
  figures.deviceCount = 2;
  std::memset(figures.uuid, 'x', sizeof figures.uuid);
  std::memset(figures.name.value.text, 'n', sizeof figures.name.value.text);
  std::memset(figures.linkPeers[17].value.busId, 'b', sizeof figures.linkPeers[17].value.busId);
  REQUIRE(readFigures(bytesOf(figures), read));
  CHECK(read.deviceCount == 2);
  CHECK(std::strlen(read.uuid) == sizeof read.uuid - 1);
  CHECK(std::strlen(read.name.value.text) == sizeof read.name.value.text - 1);
  CHECK(std::strlen(read.linkPeers[17].value.busId) == sizeof read.linkPeers[17].value.busId - 1);
  CHECK(read.utilization.status == NVML_ERROR_NOT_SUPPORTED);
  REQUIRE(findField(read, NVML_FI_DEV_NVLINK_GET_STATE, 17) != nullptr);
  CHECK(findField(read, NVML_FI_DEV_NVLINK_GET_STATE, 17)->nvmlReturn == NVML_ERROR_NOT_SUPPORTED);
  CHECK(findField(read, NVML_FI_DEV_NVLINK_GET_STATE, 17) !=
        findField(read, NVML_FI_DEV_NVLINK_GET_STATE, 0));
  CHECK(findField(read, NVML_FI_DEV_NVLINK_GET_STATE, NVML_NVLINK_MAX_LINKS) == nullptr);
  CHECK(findField(read, NVML_FI_DEV_ECC_CURRENT, 1) == nullptr);
  CHECK_FALSE(readFigures(bytesOf(figures).first(sizeof figures - 1), read));
  figures.layout ^= 1;
  CHECK_FALSE(readFigures(bytesOf(figures), read));
  figures = emptyFigures();
  figures.processCount = kFigureProcesses + 1;
  CHECK_FALSE(readFigures(bytesOf(figures), read));
  figures = emptyFigures();
  figures.deviceCount = kFigureDevices + 1;
  CHECK_FALSE(readFigures(bytesOf(figures), read));
}
