#include "pool-manager/cli/fabric_table.h"

#include <arpa/inet.h>

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "pool-manager/cli/table.h"

namespace gpupool::cli {
namespace {

using nlohmann::json;
using Rows = std::vector<std::vector<std::string>>;

// "b83f:d203:0011:2233", as ibv_devinfo has it.
std::string guidText(uint64_t guid) {
  char text[20];
  std::snprintf(text, sizeof text, "%04x:%04x:%04x:%04x", static_cast<unsigned>(guid >> 48 & 0xffff),
                static_cast<unsigned>(guid >> 32 & 0xffff), static_cast<unsigned>(guid >> 16 & 0xffff),
                static_cast<unsigned>(guid & 0xffff));
  return text;
}

std::string gidText(const fabric::GidValue& value) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(AF_INET6, value.data(), text, sizeof text);
  return text;
}

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

json portJson(const fabric::Port& port) {
  json gids = json::array();
  for (const fabric::Gid& gid : port.gids)
    gids.push_back({{"index", gid.index},
                    {"type", fabric::text(gid.type)},
                    {"value", gidText(gid.value)},
                    {"default", port.defaultGid == static_cast<int64_t>(gid.index)}});
  return {{"number", port.number},
          {"state", fabric::text(port.state)},
          {"linkLayer", fabric::text(port.linkLayer)},
          {"rateGbps", port.rateMbps / 1000.0},
          {"mtu", port.mtu},
          {"lid", port.lid},
          {"interface", port.netdev},
          {"gids", gids}};
}

}  // namespace

void printFabric(const ListedServer& server) {
  std::cout << "\n" << server.info.name << ":";
  if (server.fabric.devices.empty()) std::cout << " no RDMA devices";
  if (!server.fabric.note.empty()) std::cout << " (" << server.fabric.note << ")";
  std::cout << "\n";
  if (server.fabric.devices.empty()) return;
  printTable(deviceRows(server), 2);
  for (const Rows& rows : {portRows(server.fabric), gidRows(server.fabric)})
    if (rows.size() > 1) printTable(rows, 2);
  for (const fabric::Device& device : server.fabric.devices)
    if (!device.problem.empty()) std::cout << "  " << device.name << ": " << device.problem << "\n";
}

json fabricJson(const fabric::Fabric& fabric) {
  json devices = json::array();
  for (const fabric::Device& device : fabric.devices) {
    json distances = json::array(), ports = json::array();
    for (auto distance : device.gpuDistances) distances.push_back(fabric::text(distance));
    for (const fabric::Port& port : device.ports) ports.push_back(portJson(port));
    devices.push_back({{"name", device.name},
                       {"nodeGuid", guidText(device.nodeGuid)},
                       {"transport", device.transport},
                       {"firmware", device.firmware},
                       {"pciAddress", device.pciAddress},
                       {"numaNode", device.numaNode},
                       {"gpuDistances", distances},
                       {"dmaBuf", fabric::text(device.dmaBuf)},
                       {"dmaBufReason", device.dmaBufReason},
                       {"problem", device.problem},
                       {"ports", ports}});
  }
  return {{"note", fabric.note}, {"devices", devices}};
}

}  // namespace gpupool::cli
