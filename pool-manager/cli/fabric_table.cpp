#include "pool-manager/cli/fabric_table.h"

#include <cstdio>
#include <iostream>

#include "pool-manager/cli/table.h"
#include "pool-manager/listing_json.h"

namespace gpupool::cli {
namespace {

using pool::gidText;
using pool::guidText;
using Rows = std::vector<std::vector<std::string>>;

std::string rateText(uint32_t mbps) {
  if (mbps == 0) return "-";
  char text[32];
  std::snprintf(text, sizeof text, mbps % 1000 == 0 ? "%.0f Gbit/s" : "%.1f Gbit/s", mbps / 1000.0);
  return text;
}

std::string orDash(const std::string& text) { return text.empty() ? "-" : text; }

std::string distancesText(const fabric::Device& device, const pool::Server& server) {
  std::string text;
  for (size_t i = 0; i < device.gpuDistances.size(); ++i)
    text += (text.empty() ? "" : ", ") + std::string("GPU ") + std::to_string(server.devices[i].ordinal) +
            " " + fabric::text(device.gpuDistances[i]);
  return orDash(text);
}

std::string dmaBufText(const fabric::Device& device) {
  std::string text = fabric::text(device.dmaBuf);
  if (device.dmaBuf == fabric::DmaBuf::UNKNOWN && !device.dmaBufReason.empty())
    text += " (" + device.dmaBufReason + ")";
  return text;
}

Rows deviceRows(const ListedServer& server) {
  Rows rows = {{"RDMA DEVICE", "NODE GUID", "FIRMWARE", "PCI", "NUMA", "DMA-BUF", "DISTANCES"}};
  for (const fabric::Device& device : server.fabric.devices)
    rows.push_back({device.name, guidText(device.nodeGuid), orDash(device.firmware),
                    orDash(device.pciAddress), device.numaNode < 0 ? "-" : std::to_string(device.numaNode),
                    dmaBufText(device), distancesText(device, server.info)});
  return rows;
}

Rows portRows(const fabric::Fabric& fabric) {
  Rows rows = {{"PORT", "STATE", "LINK", "RATE", "MTU", "LID", "INTERFACE"}};
  for (const fabric::Device& device : fabric.devices)
    for (const fabric::Port& port : device.ports)
      rows.push_back({device.name + ":" + std::to_string(port.number), fabric::text(port.state),
                      fabric::text(port.linkLayer), rateText(port.rateMbps),
                      port.mtu == 0 ? "-" : std::to_string(port.mtu),
                      port.lid == 0 ? "-" : std::to_string(port.lid), orDash(port.netdev)});
  return rows;
}

Rows gidRows(const fabric::Fabric& fabric) {
  Rows rows = {{"GID OF", "INDEX", "TYPE", "VALUE"}};
  for (const fabric::Device& device : fabric.devices)
    for (const fabric::Port& port : device.ports)
      for (const fabric::Gid& gid : port.gids)
        rows.push_back(
            {device.name + ":" + std::to_string(port.number), std::to_string(gid.index),
             fabric::text(gid.type),
             gidText(gid.value) + (port.defaultGid == static_cast<int64_t>(gid.index) ? " (default)" : "")});
  return rows;
}

// Of each GPU that has some: those that NVLink joins it with.
Rows nvlinkRows(const ListedServer& server) {
  Rows rows = {{"NVLINK OF", "JOINS IT WITH"}};
  const auto& nvlinks = server.fabric.nvlinks;
  const auto name = [&](size_t i) { return "GPU " + std::to_string(server.info.devices.at(i).ordinal); };
  for (size_t i = 0; i < nvlinks.size(); ++i) {
    std::string others;
    for (const unsigned other : fabric::indices(nvlinks[i]))
      others += (others.empty() ? "" : ", ") + name(other);
    if (!others.empty()) rows.push_back({name(i), others});
  }
  return rows;
}

}  // namespace

void printFabric(const ListedServer& server) {
  std::cout << "\n" << server.info.name << ":";
  if (server.fabric.devices.empty()) std::cout << " no RDMA devices";
  if (!server.fabric.note.empty()) std::cout << " (" << server.fabric.note << ")";
  std::cout << "\n";
  if (const Rows rows = nvlinkRows(server); rows.size() > 1) printTable(rows, 2);
  if (server.fabric.devices.empty()) return;
  printTable(deviceRows(server), 2);
  for (const Rows& rows : {portRows(server.fabric), gidRows(server.fabric)})
    if (rows.size() > 1) printTable(rows, 2);
  for (const fabric::Device& device : server.fabric.devices)
    if (!device.problem.empty()) std::cout << "  " << device.name << ": " << device.problem << "\n";
}

}  // namespace gpupool::cli
