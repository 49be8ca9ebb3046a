#include "pool-manager/listing.h"

#include <algorithm>
#include <cstdio>

#include "pool-manager/convert.h"
#include "pool-manager/placement.h"

namespace gpupool::pool {

std::vector<ListedDevice> read(capnp::List<schema::DeviceState>::Reader from) {
  std::vector<ListedDevice> list;
  for (auto device : from) {
    ListedDevice one{read(device.getInfo()), text(device.getServer()), device.getFreeBytes(), {}};
    for (auto id : device.getLeases()) one.leases.push_back(read(id));
    if (device.hasSample()) one.sample = schema::read(device.getSample());
    list.push_back(std::move(one));
  }
  return list;
}

std::vector<ListedServer> read(capnp::List<schema::ServerState>::Reader from) {
  std::vector<ListedServer> list;
  for (auto server : from) {
    const auto info = server.getInfo();
    list.push_back({read(info), server.getLastBeatMs(), server.getAlive(), server.getWarmWorkers(),
                    server.getCordoned(), text(server.getCordonReason()), text(server.getCordonedBy()),
                    server.getCordonedS(), server.getAbsent(),
                    read(info.getFabric(), info.getDevices().size())});
  }
  return list;
}

std::vector<Lease> read(capnp::List<schema::Lease>::Reader from) {
  std::vector<Lease> list;
  for (auto lease : from) list.push_back(read(lease));
  return list;
}

PoolView::PoolView(std::vector<Lease> all, const std::vector<ListedServer>& servers) {
  for (Lease& lease : all) {
    const Id id = lease.id;
    leases.emplace(id, std::move(lease));
  }
  for (const ListedServer& server : servers) {
    if (server.cordoned) cordoned.insert(server.info.name);
    percents[server.info.name] = server.info.overcommitPercent;
    overcommits = overcommits || server.info.overcommitPercent > 100;
  }
}

const Lease* PoolView::find(const Id& id) const {
  const auto at = leases.find(id);
  return at == leases.end() ? nullptr : &at->second;
}

bool PoolView::isSuspended(const Id& id) const {
  const Lease* lease = find(id);
  return lease != nullptr && lease->state == "suspended";
}

bool PoolView::allSuspended(const ListedDevice& device) const {
  return std::all_of(device.leases.begin(), device.leases.end(),
                     [&](const Id& id) { return isSuspended(id); });
}

uint32_t PoolView::percent(const ListedDevice& device) const {
  const auto at = percents.find(device.server);
  return at == percents.end() ? 100 : at->second;
}

uint64_t PoolView::leasable(const ListedDevice& device) const {
  return leasableBytes(device.info.memoryBytes, percent(device));
}

uint64_t PoolView::leased(const ListedDevice& device) const {
  uint64_t sum = 0;
  for (const Id& id : device.leases)
    if (const Lease* lease = find(id); lease != nullptr)
      for (const LeasedDevice& one : lease->devices)
        if (one.info.uuid == device.info.uuid)
          sum += isSuspended(id) ? suspendedBytes(one, 0) : reservedBytes(one);
  return sum;
}

std::string uuidText(const std::string& bytes) {
  std::string text = "GPU-";
  for (size_t i = 0; i < bytes.size(); ++i) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", static_cast<unsigned char>(bytes[i]));
    text += (i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + std::string(pair);
  }
  return text;
}

}  // namespace gpupool::pool
