#include "pool-manager/cli/smi_fields.h"

#include <sys/time.h>

#include <algorithm>
#include <cstdio>
#include <ctime>

namespace gpupool::cli {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

std::string failed(const SmiGpu& gpu, nvmlReturn_t status) {
  const bool lacks = status == NVML_ERROR_NOT_SUPPORTED || status == NVML_ERROR_FUNCTION_NOT_FOUND;
  return lacks ? "[N/A]" : "[" + gpu.nvml.errorText(status) + "]";
}

// show(out) of a function (device, arguments..., T*).
template <class T, class Show, class... Arguments>
std::string one(const SmiGpu& gpu, const char* function, Show show, Arguments... arguments) {
  T out{};
  const nvmlReturn_t status = gpu.nvml.ask(function, gpu.device, arguments..., &out);
  return status == NVML_SUCCESS ? show(out) : failed(gpu, status);
}
template <class T, class Show>
std::string pair(const SmiGpu& gpu, const char* function, Show show) {
  T first{}, second{};
  const nvmlReturn_t status = gpu.nvml.ask(function, gpu.device, &first, &second);
  return status == NVML_SUCCESS ? show(first, second) : failed(gpu, status);
}

template <class... Arguments>
std::string number(const SmiGpu& gpu, const char* function, Arguments... arguments) {
  return one<unsigned>(gpu, function, [](unsigned value) { return std::to_string(value); }, arguments...);
}
std::string text(const SmiGpu& gpu, const char* function) {
  char out[96] = {};
  const nvmlReturn_t status =
      gpu.nvml.ask(function, gpu.device, static_cast<char*>(out), unsigned{sizeof out});
  return status == NVML_SUCCESS ? out : failed(gpu, status);
}
std::string enabled(nvmlEnableState_t state) {
  return state == NVML_FEATURE_ENABLED ? "Enabled" : "Disabled";
}
std::string state(const SmiGpu& gpu, const char* function) {
  return one<nvmlEnableState_t>(gpu, function, enabled);
}
std::string watts(const SmiGpu& gpu, const char* function) {
  return one<unsigned>(gpu, function, [](unsigned milliwatts) {
    char out[32];
    std::snprintf(out, sizeof out, "%.2f", milliwatts / 1000.0);
    return std::string(out);
  });
}

template <class Show>
std::string memory(const SmiGpu& gpu, Show show) {
  return one<nvmlMemory_t>(gpu, "nvmlDeviceGetMemoryInfo",
                           [&](const nvmlMemory_t& memory) { return std::to_string(show(memory) / kMiB); });
}
template <class Show>
std::string pci(const SmiGpu& gpu, Show show) {
  return one<nvmlPciInfo_t>(gpu, "nvmlDeviceGetPciInfo_v3", show);
}
std::string hex(const char* format, unsigned value) {
  char out[16];
  std::snprintf(out, sizeof out, format, value);
  return out;
}
template <class Show>
std::string utilization(const SmiGpu& gpu, Show show) {
  return one<nvmlUtilization_t>(gpu, "nvmlDeviceGetUtilizationRates",
                                [&](const nvmlUtilization_t& rates) { return std::to_string(show(rates)); });
}
template <nvmlClockType_t type>
std::string clock(const SmiGpu& gpu) {
  return number(gpu, "nvmlDeviceGetClockInfo", type);
}
template <nvmlClockType_t type>
std::string maxClock(const SmiGpu& gpu) {
  return number(gpu, "nvmlDeviceGetMaxClockInfo", type);
}
template <nvmlMemoryErrorType_t type, nvmlEccCounterType_t since>
std::string eccErrors(const SmiGpu& gpu) {
  return one<unsigned long long>(
      gpu, "nvmlDeviceGetTotalEccErrors", [](unsigned long long count) { return std::to_string(count); },
      type, since);
}
std::string computeMode(nvmlComputeMode_t mode) {
  return mode == NVML_COMPUTEMODE_DEFAULT             ? "Default"
         : mode == NVML_COMPUTEMODE_EXCLUSIVE_PROCESS ? "Exclusive_Process"
                                                      : "Prohibited";
}
std::string migMode(const SmiGpu& gpu, bool current) {
  return pair<unsigned>(gpu, "nvmlDeviceGetMigMode", [&](unsigned now, unsigned later) {
    return (current ? now : later) == NVML_DEVICE_MIG_ENABLE ? "Enabled" : "Disabled";
  });
}
std::string now(const SmiGpu&) {
  timeval time{};
  ::gettimeofday(&time, nullptr);
  std::tm local{};
  ::localtime_r(&time.tv_sec, &local);
  char day[32], out[48];
  std::strftime(day, sizeof day, "%Y/%m/%d %H:%M:%S", &local);
  std::snprintf(out, sizeof out, "%s.%03d", day, static_cast<int>(time.tv_usec / 1000));
  return out;
}
std::string count(const SmiGpu& gpu) {
  unsigned out = 0;
  const nvmlReturn_t status = gpu.nvml.ask("nvmlDeviceGetCount_v2", &out);
  return status == NVML_SUCCESS ? std::to_string(out) : failed(gpu, status);
}
std::string driverVersion(const SmiGpu& gpu) {
  char out[96] = {};
  const nvmlReturn_t status =
      gpu.nvml.ask("nvmlSystemGetDriverVersion", static_cast<char*>(out), unsigned{sizeof out});
  return status == NVML_SUCCESS ? out : failed(gpu, status);
}
std::string memoryTemperature(const SmiGpu& gpu) {
  nvmlFieldValue_t field{};
  field.fieldId = NVML_FI_DEV_MEMORY_TEMP;
  nvmlReturn_t status = gpu.nvml.ask("nvmlDeviceGetFieldValues", gpu.device, 1, &field);
  if (status == NVML_SUCCESS) status = field.nvmlReturn;
  return status == NVML_SUCCESS ? std::to_string(field.value.uiVal) : failed(gpu, status);
}

using Gpu = const SmiGpu&;
constexpr auto kCorrected = NVML_MEMORY_ERROR_TYPE_CORRECTED;
constexpr auto kUncorrected = NVML_MEMORY_ERROR_TYPE_UNCORRECTED;

std::vector<SmiField> identityFields() {
  return {
      {"timestamp", {}, "", now},
      {"driver_version", {}, "", driverVersion},
      {"count", {}, "", count},
      {"name", {"gpu_name"}, "", [](Gpu gpu) { return text(gpu, "nvmlDeviceGetName"); }},
      {"serial", {"gpu_serial"}, "", [](Gpu gpu) { return text(gpu, "nvmlDeviceGetSerial"); }},
      {"uuid", {"gpu_uuid"}, "", [](Gpu gpu) { return text(gpu, "nvmlDeviceGetUUID"); }},
      {"index", {}, "", [](Gpu gpu) { return std::to_string(gpu.index); }},
      {"pci.bus_id",
       {"gpu_bus_id"},
       "",
       [](Gpu gpu) { return pci(gpu, [](const nvmlPciInfo_t& pci) { return std::string(pci.busId); }); }},
      {"pci.domain",
       {},
       "",
       [](Gpu gpu) { return pci(gpu, [](const nvmlPciInfo_t& pci) { return hex("0x%04X", pci.domain); }); }},
      {"pci.bus",
       {},
       "",
       [](Gpu gpu) { return pci(gpu, [](const nvmlPciInfo_t& pci) { return hex("0x%02X", pci.bus); }); }},
      {"pci.device",
       {},
       "",
       [](Gpu gpu) { return pci(gpu, [](const nvmlPciInfo_t& pci) { return hex("0x%02X", pci.device); }); }},
      {"vbios_version", {}, "", [](Gpu gpu) { return text(gpu, "nvmlDeviceGetVbiosVersion"); }},
      {"compute_cap",
       {},
       "",
       [](Gpu gpu) {
         return pair<int>(gpu, "nvmlDeviceGetCudaComputeCapability", [](int major, int minor) {
           return std::to_string(major) + "." + std::to_string(minor);
         });
       }},
  };
}

std::vector<SmiField> stateFields() {
  return {
      {"persistence_mode", {}, "", [](Gpu gpu) { return state(gpu, "nvmlDeviceGetPersistenceMode"); }},
      {"display_mode", {}, "", [](Gpu gpu) { return state(gpu, "nvmlDeviceGetDisplayMode"); }},
      {"display_active", {}, "", [](Gpu gpu) { return state(gpu, "nvmlDeviceGetDisplayActive"); }},
      {"compute_mode",
       {},
       "",
       [](Gpu gpu) { return one<nvmlComputeMode_t>(gpu, "nvmlDeviceGetComputeMode", computeMode); }},
      {"pstate",
       {},
       "",
       [](Gpu gpu) {
         return one<nvmlPstates_t>(gpu, "nvmlDeviceGetPerformanceState",
                                   [](nvmlPstates_t state) { return "P" + std::to_string(state); });
       }},
      {"mig.mode.current", {}, "", [](Gpu gpu) { return migMode(gpu, true); }},
      {"mig.mode.pending", {}, "", [](Gpu gpu) { return migMode(gpu, false); }},
      {"ecc.mode.current",
       {},
       "",
       [](Gpu gpu) {
         return pair<nvmlEnableState_t>(gpu, "nvmlDeviceGetEccMode",
                                        [](auto now, auto) { return enabled(now); });
       }},
      {"ecc.mode.pending",
       {},
       "",
       [](Gpu gpu) {
         return pair<nvmlEnableState_t>(gpu, "nvmlDeviceGetEccMode",
                                        [](auto, auto later) { return enabled(later); });
       }},
      {"ecc.errors.corrected.volatile.total", {}, "", eccErrors<kCorrected, NVML_VOLATILE_ECC>},
      {"ecc.errors.corrected.aggregate.total", {}, "", eccErrors<kCorrected, NVML_AGGREGATE_ECC>},
      {"ecc.errors.uncorrected.volatile.total", {}, "", eccErrors<kUncorrected, NVML_VOLATILE_ECC>},
      {"ecc.errors.uncorrected.aggregate.total", {}, "", eccErrors<kUncorrected, NVML_AGGREGATE_ECC>},
  };
}

std::vector<SmiField> loadFields() {
  return {
      {"fan.speed", {}, "%", [](Gpu gpu) { return number(gpu, "nvmlDeviceGetFanSpeed"); }},
      {"utilization.gpu",
       {},
       "%",
       [](Gpu gpu) { return utilization(gpu, [](auto& rates) { return rates.gpu; }); }},
      {"utilization.memory",
       {},
       "%",
       [](Gpu gpu) { return utilization(gpu, [](auto& rates) { return rates.memory; }); }},
      {"memory.total",
       {},
       "MiB",
       [](Gpu gpu) { return memory(gpu, [](auto& memory) { return memory.total; }); }},
      {"memory.used",
       {},
       "MiB",
       [](Gpu gpu) { return memory(gpu, [](auto& memory) { return memory.used; }); }},
      {"memory.free",
       {},
       "MiB",
       [](Gpu gpu) { return memory(gpu, [](auto& memory) { return memory.free; }); }},
      {"temperature.gpu",
       {},
       "",
       [](Gpu gpu) { return number(gpu, "nvmlDeviceGetTemperature", NVML_TEMPERATURE_GPU); }},
      {"temperature.memory", {}, "", memoryTemperature},
      {"power.draw", {}, "W", [](Gpu gpu) { return watts(gpu, "nvmlDeviceGetPowerUsage"); }},
      {"power.limit", {}, "W", [](Gpu gpu) { return watts(gpu, "nvmlDeviceGetPowerManagementLimit"); }},
      {"enforced.power.limit",
       {},
       "W",
       [](Gpu gpu) { return watts(gpu, "nvmlDeviceGetEnforcedPowerLimit"); }},
      {"power.default_limit",
       {},
       "W",
       [](Gpu gpu) { return watts(gpu, "nvmlDeviceGetPowerManagementDefaultLimit"); }},
      {"clocks.current.graphics", {"clocks.gr"}, "MHz", clock<NVML_CLOCK_GRAPHICS>},
      {"clocks.current.sm", {"clocks.sm"}, "MHz", clock<NVML_CLOCK_SM>},
      {"clocks.current.memory", {"clocks.mem"}, "MHz", clock<NVML_CLOCK_MEM>},
      {"clocks.current.video", {"clocks.video"}, "MHz", clock<NVML_CLOCK_VIDEO>},
      {"clocks.max.graphics", {"clocks.max.gr"}, "MHz", maxClock<NVML_CLOCK_GRAPHICS>},
      {"clocks.max.sm", {}, "MHz", maxClock<NVML_CLOCK_SM>},
      {"clocks.max.memory", {"clocks.max.mem"}, "MHz", maxClock<NVML_CLOCK_MEM>},
      {"pcie.link.gen.current",
       {},
       "",
       [](Gpu gpu) { return number(gpu, "nvmlDeviceGetCurrPcieLinkGeneration"); }},
      {"pcie.link.gen.max",
       {},
       "",
       [](Gpu gpu) { return number(gpu, "nvmlDeviceGetMaxPcieLinkGeneration"); }},
      {"pcie.link.width.current",
       {},
       "",
       [](Gpu gpu) { return number(gpu, "nvmlDeviceGetCurrPcieLinkWidth"); }},
      {"pcie.link.width.max", {}, "", [](Gpu gpu) { return number(gpu, "nvmlDeviceGetMaxPcieLinkWidth"); }},
  };
}

}  // namespace

const std::vector<SmiField>& smiFields() {
  static const std::vector<SmiField> kFields = [] {
    std::vector<SmiField> all = identityFields();
    for (const auto& more : {stateFields(), loadFields()}) all.insert(all.end(), more.begin(), more.end());
    return all;
  }();
  return kFields;
}

const SmiField* findSmiField(const std::string& name) {
  for (const SmiField& field : smiFields())
    if (name == field.name ||
        std::find(field.otherNames.begin(), field.otherNames.end(), name) != field.otherNames.end())
      return &field;
  return nullptr;
}

std::string smiHeading(const SmiField& field) {
  return field.unit[0] == 0 ? field.name : std::string(field.name) + " [" + field.unit + "]";
}

std::string smiText(const SmiField& field, const SmiGpu& gpu, bool units) {
  const std::string value = field.value(gpu);
  return !units || field.unit[0] == 0 || value.starts_with("[") ? value : value + " " + field.unit;
}

}  // namespace gpupool::cli
