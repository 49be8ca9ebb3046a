// Which GPUs there are, what lies between them, and what takes more than one figure to answer.
#include <strings.h>

#include <algorithm>
#include <cstdio>

#include "client/nvml/answers.h"
#include "schema/pci_bus_id.h"

using gpupool::nvml::answer;
using gpupool::nvml::Fact;
using gpupool::nvml::give;
using gpupool::nvml::giveText;
using gpupool::nvml::Library;
using gpupool::nvml::Live;
using gpupool::schema::FigurePair;
using gpupool::schema::NvmlFigures;

namespace {

// The first GPU of which `is` holds.
template <class Is>
nvmlReturn_t find(bool valid, nvmlDevice_t* device, Is is) {
  unsigned count = 0;
  if (const nvmlReturn_t status = Library::get().count(&count); status != NVML_SUCCESS) return status;
  if (!valid || device == nullptr) return NVML_ERROR_INVALID_ARGUMENT;
  for (unsigned i = 0; i < count; ++i) {
    NvmlFigures figures;
    Library::get().facts(i, figures);
    if (!is(figures)) continue;
    *device = Library::get().handle(i);
    return NVML_SUCCESS;
  }
  return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t byIndex(unsigned index, nvmlDevice_t* device) {
  unsigned count = 0;
  if (const nvmlReturn_t status = Library::get().count(&count); status != NVML_SUCCESS) return status;
  if (device == nullptr || index >= count) return NVML_ERROR_INVALID_ARGUMENT;
  *device = Library::get().handle(index);
  return NVML_SUCCESS;
}

// "domain:bus:device.function", or without the domain, or without the function.
bool readBusId(const char* text, gpupool::schema::PciAddress& address) {
  char end = 0;
  const int whole = std::sscanf(text, "%8x:%2x:%2x%c", &address.domain, &address.bus, &address.device, &end);
  if (whole == 3 || (whole == 4 && end == '.')) return true;
  address.domain = 0;
  const int part = std::sscanf(text, "%2x:%2x%c", &address.bus, &address.device, &end);
  return part == 2 || (part == 3 && end == '.');
}

nvmlReturn_t byBusId(const char* text, nvmlDevice_t* device) {
  gpupool::schema::PciAddress address;
  const bool valid = text != nullptr && readBusId(text, address);
  return find(valid, device, [&](const NvmlFigures& figures) {
    return figures.pci.domain == address.domain && figures.pci.bus == address.bus &&
           figures.pci.device == address.device;
  });
}

// pick(pair) of what lies between two GPUs.
template <class Pick>
nvmlReturn_t between(nvmlDevice_t one, nvmlDevice_t other, bool valid, Pick pick) {
  unsigned place = 0;
  if (const nvmlReturn_t status = Library::get().indexOf(other, &place); status != NVML_SUCCESS)
    return status;
  return answer<Fact>(one, valid, [&](const NvmlFigures& figures) { return pick(figures.pairs[place]); });
}

// Info: nvmlProcessInfo_v1_t or a later one.
template <class Info>
nvmlReturn_t processes(nvmlDevice_t device, unsigned* count, Info* infos) {
  return answer<Live>(device, count != nullptr, [&](const NvmlFigures& figures) {
    const unsigned room = infos == nullptr ? 0 : *count;
    *count = figures.processCount;
    if (room < figures.processCount) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < figures.processCount; ++i) {
      infos[i] = {};
      infos[i].pid = figures.processes[i].pid;
      infos[i].usedGpuMemory = figures.processes[i].usedBytes;
      if constexpr (requires { infos[i].gpuInstanceId; })
        infos[i].gpuInstanceId = infos[i].computeInstanceId = 0xffffffff;  // not of MIG
    }
    return NVML_SUCCESS;
  });
}

nvmlReturn_t noProcesses(nvmlDevice_t device, unsigned* count) {
  return answer<Fact>(device, count != nullptr, [&](const NvmlFigures&) {
    *count = 0;
    return NVML_SUCCESS;
  });
}

nvmlReturn_t zero(nvmlDevice_t device, unsigned* out) { return noProcesses(device, out); }

}  // namespace

// ---- which there are ----

NVML_EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) { return Library::get().count(count); }
NVML_EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned* count) { return Library::get().count(count); }
NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) {
  return byIndex(index, device);
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t* device) {
  return byIndex(index, device);
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* text, nvmlDevice_t* device) {
  return byBusId(text, device);
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char* text, nvmlDevice_t* device) {
  return byBusId(text, device);
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  return find(uuid != nullptr, device,
              [&](const NvmlFigures& figures) { return ::strcasecmp(figures.uuid, uuid) == 0; });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char* serial, nvmlDevice_t* device) {
  return find(serial != nullptr, device, [&](const NvmlFigures& figures) {
    return figures.serial.status == NVML_SUCCESS && std::strcmp(figures.serial.value.text, serial) == 0;
  });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned* index) {
  unsigned found = 0;
  const nvmlReturn_t status = Library::get().indexOf(device, &found);
  if (status == NVML_SUCCESS && index == nullptr) return NVML_ERROR_INVALID_ARGUMENT;
  if (status == NVML_SUCCESS) *index = found;
  return status;
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* uuid, unsigned room) {
  return answer<Fact>(device, uuid != nullptr,
                      [&](const NvmlFigures& figures) { return giveText(figures.uuid, uuid, room); });
}
// The header gives all versions one type; who calls an early one by its name, as NCCL does, reads all of it.
#define PCI_INFO(function)                                                        \
  NVML_EXPORT nvmlReturn_t function(nvmlDevice_t device, nvmlPciInfo_t* pci) {    \
    return answer<Fact>(device, pci != nullptr, [&](const NvmlFigures& figures) { \
      *pci = figures.pci;                                                         \
      return NVML_SUCCESS;                                                        \
    });                                                                           \
  }
PCI_INFO(nvmlDeviceGetPciInfo)
PCI_INFO(nvmlDeviceGetPciInfo_v2)
PCI_INFO(nvmlDeviceGetPciInfo_v3)
NVML_EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int* major, int* minor) {
  return answer<Fact>(device, major != nullptr && minor != nullptr,
                      [&](const NvmlFigures& figures) { return give(figures.capability, major, minor); });
}
// A lease has whole GPUs, or shares of their memory; none is a MIG instance to its programs.
NVML_EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned* is) {
  return zero(device, is);
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned* count) {
  return zero(device, count);
}

// ---- between two ----

NVML_EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t one, nvmlDevice_t other,
                                                nvmlGpuP2PCapsIndex_t index, nvmlGpuP2PStatus_t* status) {
  const auto which = static_cast<unsigned>(index);
  return between(one, other, status != nullptr && which < gpupool::schema::kFigureP2P,
                 [&](const FigurePair& pair) { return give(pair.p2p[which], status); });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other,
                                                             nvmlGpuTopologyLevel_t* level) {
  return between(one, other, level != nullptr,
                 [&](const FigurePair& pair) { return give(pair.ancestor, level); });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t one, nvmlDevice_t other, int* same) {
  return between(one, other, same != nullptr,
                 [&](const FigurePair& pair) { return give(pair.sameBoard, same); });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level,
                                                          unsigned* count, nvmlDevice_t* devices) {
  return answer<Fact>(device, count != nullptr, [&](const NvmlFigures& figures) {
    const unsigned room = devices == nullptr ? 0 : *count;
    unsigned found = 0;
    for (unsigned i = 0; i < figures.deviceCount; ++i) {
      if (Library::get().handle(i) == device) continue;
      const auto& ancestor = figures.pairs[i].ancestor;
      if (ancestor.status != NVML_SUCCESS) return ancestor.status;
      if (ancestor.value != level) continue;
      if (found < room) devices[found] = Library::get().handle(i);
      ++found;
    }
    *count = room == 0 ? found : std::min(found, room);
    return NVML_SUCCESS;
  });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned link,
                                                          nvmlPciInfo_t* pci) {
  return nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, pci);
}

// ---- memory and processes ----

NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  return answer<Live>(device, memory != nullptr,
                      [&](const NvmlFigures& figures) { return give(figures.memory, memory); });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t* memory) {
  return answer<Live>(device, memory != nullptr, [&](const NvmlFigures& figures) {
    if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return give(figures.memoryV2, memory);
  });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned* count,
                                                              nvmlProcessInfo_v1_t* infos) {
  return processes(device, count, infos);
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned* count,
                                                                 nvmlProcessInfo_v2_t* infos) {
  return processes(device, count, infos);
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned* count,
                                                                 nvmlProcessInfo_t* infos) {
  return processes(device, count, infos);
}
#define NO_PROCESSES(function, type)                                               \
  NVML_EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned* count, type*) { \
    return noProcesses(device, count);                                             \
  }
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

// ---- other ways to the same figures ----

NVML_EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t* values) {
  return answer<Live>(device, values != nullptr && count > 0, [&](const NvmlFigures& figures) {
    for (nvmlFieldValue_t* value = values; value != values + count; ++value) {
      if (const auto* known = gpupool::schema::findField(figures, value->fieldId, value->scopeId))
        *value = *known;
      else
        value->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    }
    return NVML_SUCCESS;
  });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t* temperature) {
  return answer<Live>(device, temperature != nullptr, [&](const NvmlFigures& figures) {
    if (temperature->version != nvmlTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    const auto sensor = static_cast<unsigned>(temperature->sensorType);
    if (sensor >= NVML_TEMPERATURE_COUNT) return NVML_ERROR_INVALID_ARGUMENT;
    unsigned degrees = 0;
    const nvmlReturn_t status = give(figures.temperatures[sensor], &degrees);
    if (status == NVML_SUCCESS) temperature->temperature = static_cast<int>(degrees);
    return status;
  });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id,
                                            unsigned* megahertz) {
  const auto which = static_cast<unsigned>(type);
  return answer<Live>(device, megahertz != nullptr && which < NVML_CLOCK_COUNT,
                      [&](const NvmlFigures& figures) {
                        switch (id) {
                          case NVML_CLOCK_ID_CURRENT:
                            return give(figures.clocks[which], megahertz);
                          case NVML_CLOCK_ID_APP_CLOCK_TARGET:
                            return give(figures.applicationClocks[which], megahertz);
                          case NVML_CLOCK_ID_APP_CLOCK_DEFAULT:
                            return give(figures.defaultClocks[which], megahertz);
                          case NVML_CLOCK_ID_CUSTOMER_BOOST_MAX:
                            return give(figures.boostClocks[which], megahertz);
                          default:
                            return NVML_ERROR_INVALID_ARGUMENT;
                        }
                      });
}
NVML_EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned fan, unsigned* percent) {
  return answer<Live>(device, percent != nullptr, [&](const NvmlFigures& figures) {
    return fan == 0 ? give(figures.fanSpeed, percent) : NVML_ERROR_NOT_SUPPORTED;
  });
}
