#include "server/front/figures.h"

#include <capnp/message.h>
#include <capnp/serialize-async.h>

#include <algorithm>
#include <cstdio>

#include "base/log.h"
#include "schema/pci_bus_id.h"
#include "schema/session.capnp.h"
#include "server/front/device_lock.h"

namespace gpupool::server {
namespace {

using schema::NvmlFigures;

constexpr capnp::ReaderOptions kSmallMessages{.traversalLimitInWords = 64, .nestingLimit = 4};

template <size_t size>
void setText(char (&to)[size], const std::string& from) {
  std::snprintf(to, size, "%s", from.c_str());
}

// As NVML writes them.
void setAddress(nvmlPciInfo_t& pci, const schema::PciAddress& address) {
  pci.domain = address.domain;
  pci.bus = address.bus;
  pci.device = address.device;
  std::snprintf(pci.busId, sizeof pci.busId, NVML_DEVICE_PCI_BUS_ID_FMT, address.domain, address.bus,
                address.device);
  std::snprintf(pci.busIdLegacy, sizeof pci.busIdLegacy, NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT,
                address.domain & 0xffffu, address.bus & 0xffu, address.device & 0xffu);
}

}  // namespace

FigureDesk::FigureDesk(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, health::Watch& health,
                       Settings settings)
    : timer_(timer),
      leases_(leases),
      sessions_(sessions),
      health_(health),
      settings_(std::move(settings)),
      tasks_(*this) {}

void FigureDesk::serve(kj::Own<kj::AsyncIoStream> stream, const Id& lease) {
  size_t& count = connections_[lease];
  if (count >= settings_.perLease) {
    GPUPOOL_INFO("lease %s asks for its devices' figures on %zu connections already", lease.text().c_str(),
                 count);
    return;
  }
  ++count;
  auto served = serveNext(*stream, lease);
  tasks_.add(served
                 .catch_([lease](kj::Exception&& exception) {
                   GPUPOOL_DEBUG("figures of lease %s: %s", lease.text().c_str(),
                                 exception.getDescription().cStr());
                 })
                 .attach(kj::mv(stream))
                 .then([this, lease] {
                   if (--connections_[lease] == 0) connections_.erase(lease);
                 }));
}

kj::Promise<void> FigureDesk::serveNext(kj::AsyncIoStream& stream, Id lease) {
  return timer_.timeoutAfter(settings_.idleBound, capnp::tryReadMessage(stream, kSmallMessages))
      .then([this, &stream, lease](kj::Maybe<kj::Own<capnp::MessageReader>> message) -> kj::Promise<void> {
        KJ_IF_MAYBE (query, message) {
          const std::chrono::milliseconds age((*query)->getRoot<schema::FiguresQuery>().getMaxAgeMs());
          health_.want();
          return fresh(age, timer_.now() + settings_.freshBound)
              .then([this, &stream, lease] { return answer(stream, lease); })
              .then([this, &stream, lease] { return serveNext(stream, lease); });
        }
        return kj::READY_NOW;
      });
}

kj::Promise<void> FigureDesk::fresh(std::chrono::milliseconds age, kj::TimePoint until) {
  if (!health_.takesFigures() || timer_.now() >= until) return kj::READY_NOW;
  if (const auto taken = health_.figuresAge(); taken && *taken <= age) return kj::READY_NOW;
  return timer_.afterDelay(settings_.look).then([this, age, until] { return fresh(age, until); });
}

kj::Promise<void> FigureDesk::answer(kj::AsyncIoStream& stream, Id lease) {
  auto message = kj::heap<capnp::MallocMessageBuilder>();
  auto report = message->initRoot<schema::FiguresReport>();
  const Grant* grant = leases_.admissible(lease);
  if (grant == nullptr) {
    report.setError("the lease has ended");
  } else {
    const health::Figures taken = health_.figures();
    const auto all = figures(*grant, taken);
    auto list = report.initDevices(static_cast<unsigned>(all.size()));
    for (unsigned i = 0; i < list.size(); ++i)
      list.set(i, kj::arrayPtr(reinterpret_cast<const kj::byte*>(&all[i]), sizeof all[i]));
    // Without NVML all of it is of this moment.
    if (health_.takesFigures()) {
      report.setAgeMs(taken.devices.empty() ? UINT32_MAX : static_cast<uint32_t>(taken.age.count()));
      if (taken.devices.empty()) report.setError("NVML does not answer");
    }
  }
  auto written = capnp::writeMessage(stream, *message);
  return timer_.timeoutAfter(settings_.writeBound, kj::mv(written)).attach(kj::mv(message));
}

std::vector<NvmlFigures> FigureDesk::figures(const Grant& grant, const health::Figures& taken) const {
  std::vector<NvmlFigures> all;
  for (size_t place = 0; place < grant.devices.size() && place < schema::kFigureDevices; ++place) {
    const size_t device = grant.devices[place].index;
    const bool asked = device < taken.devices.size();
    NvmlFigures& one = all.emplace_back(asked ? taken.devices[device] : schema::emptyFigures());
    one.deviceCount = static_cast<uint32_t>(std::min<size_t>(grant.devices.size(), schema::kFigureDevices));
    for (size_t other = 0; asked && other < one.deviceCount; ++other)
      one.pairs[other] = taken.between[device][grant.devices[other].index];
    fillOwn(leases_.devices()[device], one);
    if (leases_.devices()[device].software) fillSoftwarePairs(place, one);
    fillMemory(grant, place, one);
    fillProcesses(grant, place, one);
  }
  return all;
}

void FigureDesk::fillOwn(const Device& device, NvmlFigures& to) const {
  setText(to.uuid, uuidText(device.uuid));
  schema::PciAddress real;
  if (schema::readPciAddress(device.pciBusId, real))
    setAddress(to.pci, schema::poolAddress(settings_.server, real));
  for (auto& peer : to.linkPeers)
    if (schema::readPciAddress(peer.value.busId, real))
      setAddress(peer.value, schema::poolAddress(settings_.server, real));
  if (to.name.status != NVML_SUCCESS) {
    to.name.status = NVML_SUCCESS;
    setText(to.name.value.text, device.name);
  }
  if (to.capability.status != NVML_SUCCESS)
    to.capability = {NVML_SUCCESS,
                     {static_cast<int>(device.computeMajor), static_cast<int>(device.computeMinor)}};
  if (to.cudaVersion.status != NVML_SUCCESS)
    to.cudaVersion = {NVML_SUCCESS, static_cast<int>(device.driverVersion)};
  if (to.driverVersion.status != NVML_SUCCESS && device.software) {
    to.driverVersion.status = NVML_SUCCESS;
    setText(to.driverVersion.value.text, "software");
  }
}

// No NVML knows software GPUs. They reach one another, as cuDeviceCanAccessPeer says, through host memory;
// NCCL refuses GPUs of which it cannot ask.
void FigureDesk::fillSoftwarePairs(size_t place, NvmlFigures& to) {
  for (size_t other = 0; other < to.deviceCount; ++other) {
    schema::FigurePair& pair = to.pairs[other];
    const bool self = other == place;
    for (auto& p2p : pair.p2p) p2p = {NVML_SUCCESS, NVML_P2P_STATUS_OK};
    if (!self) pair.p2p[NVML_P2P_CAPS_INDEX_NVLINK].value = NVML_P2P_STATUS_NOT_SUPPORTED;
    pair.ancestor = {NVML_SUCCESS, self ? NVML_TOPOLOGY_INTERNAL : NVML_TOPOLOGY_NODE};
    pair.sameBoard = {NVML_SUCCESS, self ? 1 : 0};
  }
}

void FigureDesk::fillMemory(const Grant& grant, size_t place, NvmlFigures& to) const {
  const GrantedDevice& granted = grant.devices[place];
  const uint64_t whole = leases_.devices()[granted.index].memoryBytes;
  const bool limited = granted.memoryBytes != 0 && granted.memoryBytes < whole;
  if (!limited && to.memory.status == NVML_SUCCESS) return;
  if (to.memory.status == NVML_ERROR_GPU_IS_LOST) return;
  const uint64_t total = limited ? granted.memoryBytes : whole;
  const uint64_t used =
      std::min(total, limited ? sessions_.used(grant.id, grant.epoch, static_cast<uint32_t>(place))
                              : usedByLeases(granted.index));
  to.memory = {NVML_SUCCESS, {total, total - used, used}};
  to.memoryV2 = {NVML_SUCCESS, {nvmlMemory_v2, total, 0, total - used, used}};
}

void FigureDesk::fillProcesses(const Grant& grant, size_t place, NvmlFigures& to) const {
  for (const SessionTable::Client& client : sessions_.clients(grant.id)) {
    if (to.processCount == schema::kFigureProcesses) return;
    to.processes[to.processCount++] = {client.pid, 0, place < client.bytes.size() ? client.bytes[place] : 0};
  }
}

uint64_t FigureDesk::usedByLeases(size_t device) const {
  uint64_t used = 0;
  for (const auto& [id, grant] : leases_.all())
    for (size_t place = 0; place < grant.devices.size(); ++place)
      if (grant.devices[place].index == device)
        used += sessions_.used(id, grant.epoch, static_cast<uint32_t>(place));
  return used;
}

void FigureDesk::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("figures: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
