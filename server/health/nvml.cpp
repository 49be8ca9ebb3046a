// NVML by dlopen: the server links nothing of NVIDIA's, and runs where there is no driver.
#include <dlfcn.h>
#include <nvml.h>

#include <filesystem>

#include "server/health/gpus.h"
#include "server/health/questions.h"

namespace gpupool::health {
namespace {

struct Library {
  // Names as exported; the header's macros choose the versions of nvmlInit and nvmlEventSetWait.
  decltype(&nvmlInit_v2) init = nullptr;
  decltype(&nvmlErrorString) errorString = nullptr;
  decltype(&nvmlDeviceGetHandleByUUID) handleByUuid = nullptr;
  // Null where the library is too old, or too new.
  decltype(&nvmlDeviceGetUtilizationRates) utilization = nullptr;
  decltype(&nvmlDeviceGetMemoryInfo) memory = nullptr;
  nvmlReturn_t (*temperature)(nvmlDevice_t, nvmlTemperatureSensors_t, unsigned*) = nullptr;
  decltype(&nvmlDeviceGetPowerUsage) power = nullptr;
  decltype(&nvmlDeviceGetEnforcedPowerLimit) powerLimit = nullptr;
  decltype(&nvmlDeviceGetClockInfo) clock = nullptr;
  decltype(&nvmlDeviceGetTotalEccErrors) eccErrors = nullptr;
  decltype(&nvmlDeviceGetNvLinkState) nvlink = nullptr;
  decltype(&nvmlDeviceGetP2PStatus) p2pStatus = nullptr;
  decltype(&nvmlEventSetCreate) eventSetCreate = nullptr;
  decltype(&nvmlDeviceRegisterEvents) registerEvents = nullptr;
  decltype(&nvmlEventSetWait_v2) eventSetWait = nullptr;

  void* handle = nullptr;  // for what is found by name when it is asked

  bool load(const std::string& path, std::string* why);
};

template <class Function>
void find(void* handle, Function*& function, const char* name) {
  function = reinterpret_cast<Function*>(dlsym(handle, name));
}

bool Library::load(const std::string& path, std::string* why) {
  handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    *why = error != nullptr ? error : path + " cannot be loaded";
    return false;
  }
  find(handle, init, "nvmlInit_v2");
  find(handle, errorString, "nvmlErrorString");
  find(handle, handleByUuid, "nvmlDeviceGetHandleByUUID");
  if (init == nullptr || errorString == nullptr || handleByUuid == nullptr) {
    *why = path + " is no NVML";
    return false;
  }
  find(handle, utilization, "nvmlDeviceGetUtilizationRates");
  find(handle, memory, "nvmlDeviceGetMemoryInfo");
  find(handle, temperature, "nvmlDeviceGetTemperature");
  find(handle, power, "nvmlDeviceGetPowerUsage");
  find(handle, powerLimit, "nvmlDeviceGetEnforcedPowerLimit");
  find(handle, clock, "nvmlDeviceGetClockInfo");
  find(handle, eccErrors, "nvmlDeviceGetTotalEccErrors");
  find(handle, nvlink, "nvmlDeviceGetNvLinkState");
  find(handle, p2pStatus, "nvmlDeviceGetP2PStatus");
  find(handle, eventSetCreate, "nvmlEventSetCreate");
  find(handle, registerEvents, "nvmlDeviceRegisterEvents");
  find(handle, eventSetWait, "nvmlEventSetWait_v2");
  if (const nvmlReturn_t status = init(); status != NVML_SUCCESS) {
    *why = path + ": " + errorString(status);
    return false;
  }
  return true;
}

class Nvml final : public Gpus {
 public:
  Nvml(const Library& library, const std::vector<std::string>& uuids)
      : library_(library), figures_(library.handle) {
    for (const std::string& uuid : uuids) {
      nvmlDevice_t device = nullptr;
      handles_.push_back(library_.handleByUuid(uuid.c_str(), &device) == NVML_SUCCESS ? device : nullptr);
    }
    watchEvents();
  }

  size_t count() const override { return handles_.size(); }

  DeviceSample sample(size_t index, bool* lost) override {
    DeviceSample sample;
    const nvmlDevice_t device = handles_[index];
    if (device == nullptr) return sample;
    // False: the GPU, or this driver, does not say.
    const auto ask = [&](auto function, auto... arguments) {
      const nvmlReturn_t status =
          function == nullptr ? NVML_ERROR_NOT_SUPPORTED : function(device, arguments...);
      *lost = *lost || status == NVML_ERROR_GPU_IS_LOST;
      return status == NVML_SUCCESS;
    };
    if (nvmlUtilization_t rates{}; ask(library_.utilization, &rates)) {
      sample.gpuPercent = static_cast<int32_t>(rates.gpu);
      sample.memoryPercent = static_cast<int32_t>(rates.memory);
    }
    if (nvmlMemory_t memory{}; ask(library_.memory, &memory)) {
      sample.usedBytes = memory.used;
      sample.totalBytes = memory.total;
    }
    if (unsigned degrees = 0; ask(library_.temperature, NVML_TEMPERATURE_GPU, &degrees))
      sample.temperatureC = static_cast<int32_t>(degrees);
    ask(library_.power, &sample.powerMw);
    ask(library_.powerLimit, &sample.powerLimitMw);
    ask(library_.clock, NVML_CLOCK_SM, &sample.smMhz);
    ask(library_.clock, NVML_CLOCK_MEM, &sample.memoryMhz);
    if (unsigned long long errors = 0;
        ask(library_.eccErrors, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, &errors))
      sample.eccErrors = static_cast<int64_t>(errors);
    for (unsigned link = 0; link < NVML_NVLINK_MAX_LINKS; ++link) {
      nvmlEnableState_t state = NVML_FEATURE_DISABLED;
      if (!ask(library_.nvlink, link, &state)) break;
      sample.nvlinks = std::max(sample.nvlinks, 0) + (state == NVML_FEATURE_ENABLED ? 1 : 0);
    }
    return sample;
  }

  void facts(size_t index, schema::NvmlFigures& to) override {
    figures_.system(to);
    if (handles_[index] != nullptr) figures_.facts(handles_[index], to);
  }
  void live(size_t index, schema::NvmlFigures& to) override {
    if (handles_[index] != nullptr) figures_.live(handles_[index], to);
  }
  schema::FigurePair between(size_t index, size_t other) override {
    if (handles_[index] == nullptr || handles_[other] == nullptr) return {};
    return figures_.between(handles_[index], handles_[other]);
  }

  bool joined(size_t index, size_t other) override {
    nvmlGpuP2PStatus_t status = NVML_P2P_STATUS_UNKNOWN;
    return index != other && handles_[index] != nullptr && handles_[other] != nullptr &&
           library_.p2pStatus != nullptr &&
           library_.p2pStatus(handles_[index], handles_[other], NVML_P2P_CAPS_INDEX_NVLINK, &status) ==
               NVML_SUCCESS &&
           status == NVML_P2P_STATUS_OK;
  }

  std::vector<Event> events(std::chrono::milliseconds time) override {
    std::vector<Event> events;
    if (set_ == nullptr) return events;
    nvmlEventData_t data{};
    auto left = static_cast<unsigned>(time.count());
    while (events.size() < kMostEvents && library_.eventSetWait(set_, &data, left) == NVML_SUCCESS) {
      for (size_t i = 0; i < handles_.size(); ++i)
        if (handles_[i] == data.device && (data.eventType & nvmlEventTypeXidCriticalError) != 0)
          events.push_back({i, data.eventData});
      left = 0;  // those that are there already
    }
    return events;
  }

 private:
  static constexpr size_t kMostEvents = 64;

  // Where the driver has no events (in some containers), there are none.
  void watchEvents() {
    if (library_.eventSetCreate == nullptr || library_.registerEvents == nullptr ||
        library_.eventSetWait == nullptr || library_.eventSetCreate(&set_) != NVML_SUCCESS) {
      set_ = nullptr;
      return;
    }
    bool any = false;
    for (const nvmlDevice_t device : handles_)
      any = (device != nullptr &&
             library_.registerEvents(device, nvmlEventTypeXidCriticalError, set_) == NVML_SUCCESS) ||
            any;
    if (!any) set_ = nullptr;
  }

  Library library_;
  NvmlQuestions figures_;
  std::vector<nvmlDevice_t> handles_;  // null: NVML does not know it
  nvmlEventSet_t set_ = nullptr;
};

}  // namespace

std::unique_ptr<Gpus> loadNvml(const std::string& library, const std::vector<std::string>& uuids,
                               std::string* why) {
  Library functions;
  if (!functions.load(library, why)) return nullptr;
  return std::make_unique<Nvml>(functions, uuids);
}

std::string nvmlBeside(const std::string& driver) {
  const char* name = "libnvidia-ml.so.1";
  const auto beside = std::filesystem::path(driver).parent_path() / name;
  std::error_code error;
  return driver.find('/') != std::string::npos && std::filesystem::exists(beside, error) ? beside.string()
                                                                                         : name;
}

}  // namespace gpupool::health
