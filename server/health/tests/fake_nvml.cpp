// A management library of GPUs that do not exist. It knows every GPU by whichever UUID it is asked for, and
// reads what it answers from the file that FAKE_NVML_STATE names, anew for each call: lines of "NAME VALUE".
//   joined 2: NVLink joins the first two GPUs, the next two, ...
//   load 37, memory 1024 (bytes in use of 4096), temperature, power, ecc, links (0 to 18, up): absent: not
//   supported xid NUMBER: an event, once for each such line lost: the first GPU does not answer any more;
//   init: nvmlInit fails; stuck: utilization is not answered
#include <nvml.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

struct State {
  std::map<std::string, long> values;
  std::vector<unsigned long long> xids;

  State() {
    // No streams of C++: several copies of their library in one process share parts of their locales.
    const char* path = std::getenv("FAKE_NVML_STATE");
    FILE* file = path == nullptr ? nullptr : std::fopen(path, "re");
    if (file == nullptr) return;
    char name[16];
    for (long value = 0; std::fscanf(file, "%15s %ld", name, &value) == 2;) {
      if (std::string(name) == "xid")
        xids.push_back(static_cast<unsigned long long>(value));
      else
        values[name] = value;
    }
    std::fclose(file);
  }
  bool has(const char* name) const { return values.contains(name); }
};

std::vector<std::string>& known() {
  static std::vector<std::string> uuids;
  return uuids;
}
nvmlDevice_t handle(size_t index) { return reinterpret_cast<nvmlDevice_t>(index + 1); }

template <class T>
nvmlReturn_t answer(nvmlDevice_t device, const char* name, T* out) {
  const State state;
  if (state.has("lost") && device == handle(0)) return NVML_ERROR_GPU_IS_LOST;
  if (!state.has(name)) return NVML_ERROR_NOT_SUPPORTED;
  *out = static_cast<T>(state.values.at(name));
  return NVML_SUCCESS;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT nvmlReturn_t nvmlInit_v2() {
  return State().has("init") ? NVML_ERROR_DRIVER_NOT_LOADED : NVML_SUCCESS;
}
EXPORT const char* nvmlErrorString(nvmlReturn_t status) {
  return status == NVML_ERROR_DRIVER_NOT_LOADED ? "Driver Not Loaded" : "another error";
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  if (std::string(uuid).starts_with("GPU-ff")) return NVML_ERROR_NOT_FOUND;
  *device = handle(known().size());
  known().emplace_back(uuid);
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t* rates) {
  while (State().has("stuck")) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  rates->memory = 5;
  return answer(device, "load", &rates->gpu);
}
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  memory->total = 4096;
  return answer(device, "memory", &memory->used);
}
EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t,
                                             unsigned* degrees) {
  return answer(device, "temperature", degrees);
}
EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned* milliwatts) {
  return answer(device, "power", milliwatts);
}
EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned* milliwatts) {
  return answer(device, "limit", milliwatts);
}
EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned* megahertz) {
  return answer(device, type == NVML_CLOCK_SM ? "sm" : "mem", megahertz);
}
EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t,
                                                nvmlEccCounterType_t, unsigned long long* errors) {
  return answer(device, "ecc", errors);
}
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, nvmlEnableState_t* up) {
  unsigned links = 0;
  const nvmlReturn_t status = answer(device, "links", &links);
  *up = link < links ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
  return status;
}
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned link,
                                                  nvmlNvLinkCapability_t capability, unsigned* has) {
  unsigned links = 0;
  const nvmlReturn_t status = answer(device, "links", &links);
  *has = capability == NVML_NVLINK_CAP_P2P_SUPPORTED && link < links;
  return status;
}
// All links lead to one switch.
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link,
                                                        nvmlPciInfo_t* pci) {
  unsigned links = 0;
  const nvmlReturn_t status = answer(device, "links", &links);
  if (status != NVML_SUCCESS || link >= links)
    return status == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : status;
  *pci = {};
  pci->bus = 0x77;
  std::snprintf(pci->busId, sizeof pci->busId, "00000000:77:00.0");
  std::snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:77:00.0");
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t other,
                                           nvmlGpuP2PCapsIndex_t index, nvmlGpuP2PStatus_t* p2p) {
  size_t together = 0;
  const nvmlReturn_t status = answer(device, "joined", &together);
  if (status != NVML_SUCCESS || index != NVML_P2P_CAPS_INDEX_NVLINK) return NVML_ERROR_NOT_SUPPORTED;
  const auto group = [&](nvmlDevice_t one) { return (reinterpret_cast<size_t>(one) - 1) / together; };
  *p2p = group(device) == group(other) ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t* values) {
  for (nvmlFieldValue_t* value = values; value != values + count; ++value) {
    if (value->nvmlReturn != NVML_SUCCESS) continue;  // as driver 580
    unsigned links = 0;
    value->nvmlReturn = value->fieldId == NVML_FI_DEV_NVLINK_GET_STATE ? answer(device, "links", &links)
                                                                       : NVML_ERROR_NOT_SUPPORTED;
    value->value.uiVal = value->scopeId < links ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
  }
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t* set) {
  *set = reinterpret_cast<nvmlEventSet_t>(1);
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t, unsigned long long, nvmlEventSet_t) {
  return NVML_SUCCESS;
}
// Of the last GPU, so that the first one goes on.
EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t, nvmlEventData_t* data, unsigned ms) {
  static size_t told = 0;
  const State state;
  if (state.xids.size() <= told) {
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    return NVML_ERROR_TIMEOUT;
  }
  *data = {handle(known().size() - 1), nvmlEventTypeXidCriticalError, state.xids[told++]};
  return NVML_SUCCESS;
}
