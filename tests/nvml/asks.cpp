// A program that asks NVML, and CUDA beside it, for the scripts of this folder. Both libraries are found as
// programs find them: by their names.
//   asks agree COUNT      CUDA and NVML name the same COUNT GPUs alike, and NVML sees this program's memory
//   asks alone COUNT      the same without `gpupool run`: there is no lease before cuInit
//   asks often            initialised twice, from threads and from a child; the end by counting
//   asks none             what nvmlInit answers
//   asks lines            for each line on stdin: what the first GPU's memory and name answer, and after how
//   long
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <strings.h>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "client/nvml/api.h"
#include "schema/cuda.h"

namespace {

#define REQUIRE(condition)                                     \
  do {                                                         \
    if (!(condition)) {                                        \
      std::printf("FAIL line %d: %s\n", __LINE__, #condition); \
      std::exit(1);                                            \
    }                                                          \
  } while (false)

struct Library {
  explicit Library(const char* name) : handle(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (handle == nullptr) std::printf("%s\n", dlerror());
    REQUIRE(handle != nullptr);
  }
  template <class Result, class... Arguments>
  Result call(const char* name, Arguments... arguments) const {
    const auto function = reinterpret_cast<Result (*)(Arguments...)>(dlsym(handle, name));
    REQUIRE(function != nullptr);
    return function(arguments...);
  }
  void* handle;
};

const Library& nvml() {
  static const Library library("libnvidia-ml.so.1");
  return library;
}
template <class... Arguments>
nvmlReturn_t ask(const char* name, Arguments... arguments) {
  return nvml().call<nvmlReturn_t>(name, arguments...);
}
template <class... Arguments>
CUresult cuda(const char* name, Arguments... arguments) {
  static const Library library("libcuda.so.1");
  return library.call<CUresult>(name, arguments...);
}

nvmlDevice_t deviceAt(unsigned index) {
  nvmlDevice_t device = nullptr;
  REQUIRE(ask("nvmlDeviceGetHandleByIndex_v2", index, &device) == NVML_SUCCESS);
  return device;
}
nvmlReturn_t memoryOf(nvmlDevice_t device, nvmlMemory_t* memory) {
  return ask("nvmlDeviceGetMemoryInfo", device, memory);
}

bool until(const std::function<bool()>& condition) {
  for (int i = 0; i < 3000; ++i, std::this_thread::sleep_for(std::chrono::milliseconds(10)))
    if (condition()) return true;
  return false;
}

std::string uuidText(const CUuuid& uuid) {
  char text[48];
  const auto* b = reinterpret_cast<const unsigned char*>(uuid.bytes);
  std::snprintf(text, sizeof text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14],
                b[15]);
  return text;
}

// CUDA's device of that number and NVML's.
void sameNames(int ordinal) {
  CUdevice device = 0;
  CUuuid uuid{};
  char bus[32] = {}, text[48] = {}, name[96] = {}, cudaName[96] = {};
  int domain = 0, major = 0, minor = 0, cudaMajor = 0;
  REQUIRE(cuda("cuDeviceGet", &device, ordinal) == CUDA_SUCCESS);
  REQUIRE(cuda("cuDeviceGetUuid_v2", &uuid, device) == CUDA_SUCCESS);
  REQUIRE(cuda("cuDeviceGetPCIBusId", static_cast<char*>(bus), int{sizeof bus}, device) == CUDA_SUCCESS);
  REQUIRE(cuda("cuDeviceGetName", static_cast<char*>(cudaName), int{sizeof cudaName}, device) ==
          CUDA_SUCCESS);
  REQUIRE(cuda("cuDeviceGetAttribute", &domain, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, device) == CUDA_SUCCESS);
  REQUIRE(cuda("cuDeviceGetAttribute", &cudaMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device) ==
          CUDA_SUCCESS);
  const nvmlDevice_t byIndex = deviceAt(static_cast<unsigned>(ordinal));
  nvmlDevice_t byBus = nullptr, byUuid = nullptr;
  nvmlPciInfo_t pci{};
  unsigned index = 99;
  REQUIRE(ask("nvmlDeviceGetHandleByPciBusId_v2", static_cast<const char*>(bus), &byBus) == NVML_SUCCESS);
  REQUIRE(ask("nvmlDeviceGetHandleByUUID", uuidText(uuid).c_str(), &byUuid) == NVML_SUCCESS);
  REQUIRE(byBus == byIndex && byUuid == byIndex);
  REQUIRE(ask("nvmlDeviceGetIndex", byIndex, &index) == NVML_SUCCESS && static_cast<int>(index) == ordinal);
  REQUIRE(ask("nvmlDeviceGetUUID", byIndex, static_cast<char*>(text), unsigned{sizeof text}) == NVML_SUCCESS);
  REQUIRE(uuidText(uuid) == text);
  REQUIRE(ask("nvmlDeviceGetUUID", byIndex, static_cast<char*>(text), 8u) == NVML_ERROR_INSUFFICIENT_SIZE);
  REQUIRE(ask("nvmlDeviceGetName", byIndex, static_cast<char*>(name), unsigned{sizeof name}) == NVML_SUCCESS);
  REQUIRE(std::string(name) == cudaName);
  REQUIRE(ask("nvmlDeviceGetPciInfo_v3", byIndex, &pci) == NVML_SUCCESS);
  REQUIRE(static_cast<int>(pci.domain) == domain && domain >= 0x8000 && domain <= 0xffff);
  REQUIRE(::strcasecmp(pci.busId + 4, bus) == 0 && ::strcasecmp(pci.busIdLegacy, bus) == 0);
  REQUIRE(ask("nvmlDeviceGetCudaComputeCapability", byIndex, &major, &minor) == NVML_SUCCESS &&
          major == cudaMajor);
  std::printf("GPU %d: %s %s\n", ordinal, text, bus);
}

// What this program allocates is used afterwards, and by it; and its lease cannot use more than it has.
void seesMemory() {
  constexpr size_t kBytes = size_t{64} << 20;
  const nvmlDevice_t device = deviceAt(0);
  nvmlMemory_t memory{};
  size_t total = 0;
  CUcontext context = nullptr;
  CUdeviceptr address = 0;
  REQUIRE(cuda("cuDeviceTotalMem_v2", &total, CUdevice{0}) == CUDA_SUCCESS);
  REQUIRE(cuda("cuDevicePrimaryCtxRetain", &context, CUdevice{0}) == CUDA_SUCCESS);
  REQUIRE(cuda("cuCtxSetCurrent", context) == CUDA_SUCCESS);
  REQUIRE(cuda("cuMemAlloc_v2", &address, kBytes) == CUDA_SUCCESS);
  REQUIRE(until([&] { return memoryOf(device, &memory) == NVML_SUCCESS && memory.used >= kBytes; }));
  REQUIRE(memory.total >= total && memory.used + memory.free == memory.total);
  REQUIRE(until([&] {
    unsigned count = 8;
    nvmlProcessInfo_t processes[8];
    if (ask("nvmlDeviceGetComputeRunningProcesses_v3", device, &count,
            static_cast<nvmlProcessInfo_t*>(processes)) != NVML_SUCCESS)
      return false;
    return count == 1 && processes[0].pid == static_cast<unsigned>(getpid()) &&
           processes[0].usedGpuMemory >= kBytes;
  }));
  unsigned room = 0;
  REQUIRE(ask("nvmlDeviceGetComputeRunningProcesses_v3", device, &room,
              static_cast<nvmlProcessInfo_t*>(nullptr)) == NVML_ERROR_INSUFFICIENT_SIZE);
  REQUIRE(room == 1);
}

int agree(unsigned wanted, bool alone = false) {
  unsigned count = 99;
  int devices = 0;
  REQUIRE(ask("nvmlDeviceGetCount_v2", &count) == NVML_ERROR_UNINITIALIZED);
  if (alone) {
    REQUIRE(ask("nvmlInit_v2") == NVML_ERROR_DRIVER_NOT_LOADED);
    REQUIRE(cuda("cuInit", 0u) == CUDA_SUCCESS);
  }
  REQUIRE(ask("nvmlInit_v2") == NVML_SUCCESS);
  REQUIRE(ask("nvmlDeviceGetCount_v2", &count) == NVML_SUCCESS && count == wanted);
  REQUIRE(cuda("cuInit", 0u) == CUDA_SUCCESS);
  REQUIRE(cuda("cuDeviceGetCount", &devices) == CUDA_SUCCESS && devices == static_cast<int>(wanted));
  for (int d = 0; d < devices; ++d) sameNames(d);
  nvmlDevice_t none = nullptr;
  REQUIRE(ask("nvmlDeviceGetHandleByIndex_v2", wanted, &none) == NVML_ERROR_INVALID_ARGUMENT);
  // Where a machine's own first device is; a lease's is elsewhere.
  REQUIRE(ask("nvmlDeviceGetHandleByPciBusId_v2", "0000:01:00.0", &none) == NVML_ERROR_NOT_FOUND);
  nvmlMemory_t memory{};
  REQUIRE(memoryOf(nullptr, &memory) == NVML_ERROR_INVALID_ARGUMENT);
  REQUIRE(memoryOf(deviceAt(0), nullptr) == NVML_ERROR_INVALID_ARGUMENT);
  REQUIRE(ask("nvmlDeviceSetPersistenceMode", deviceAt(0), NVML_FEATURE_ENABLED) == NVML_ERROR_NOT_SUPPORTED);
  seesMemory();
  std::printf("PASS\n");
  return 0;
}

void manyThreads() {
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) {
        nvmlMemory_t memory{};
        REQUIRE(ask("nvmlInit_v2") == NVML_SUCCESS);
        REQUIRE(memoryOf(deviceAt(0), &memory) == NVML_SUCCESS && memory.total != 0);
        REQUIRE(ask("nvmlShutdown") == NVML_SUCCESS);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

int often() {
  nvmlMemory_t memory{};
  REQUIRE(ask("nvmlShutdown") == NVML_ERROR_UNINITIALIZED);
  REQUIRE(ask("nvmlInit_v2") == NVML_SUCCESS);
  REQUIRE(ask("nvmlInitWithFlags", 0u) == NVML_SUCCESS);
  const nvmlDevice_t device = deviceAt(0);
  REQUIRE(ask("nvmlShutdown") == NVML_SUCCESS);
  REQUIRE(memoryOf(device, &memory) == NVML_SUCCESS);
  manyThreads();
  const pid_t child = fork();
  for (int i = 0; i < 50; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(i % 5 == 0 ? 110 : 0));  // what is known is too old
    REQUIRE(memoryOf(device, &memory) == NVML_SUCCESS && memory.total != 0);
  }
  if (child == 0) _exit(0);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  REQUIRE(ask("nvmlShutdown") == NVML_SUCCESS);
  REQUIRE(memoryOf(device, &memory) == NVML_ERROR_UNINITIALIZED);
  REQUIRE(ask("nvmlDeviceSetPersistenceMode", device, NVML_FEATURE_ENABLED) == NVML_ERROR_UNINITIALIZED);
  REQUIRE(ask("nvmlShutdown") == NVML_ERROR_UNINITIALIZED);
  REQUIRE(ask("nvmlInit_v2") == NVML_SUCCESS);
  REQUIRE(memoryOf(device, &memory) == NVML_SUCCESS);
  std::printf("PASS\n");
  return 0;
}

// As NCCL finds the links that are up, from compute capability 9.0 on; it leaves nvmlReturn as it is.
int links(unsigned wanted) {
  REQUIRE(ask("nvmlInit_v2") == NVML_SUCCESS);
  const nvmlDevice_t device = deviceAt(0);
  unsigned up = 0;
  for (unsigned link = 0; link < NVML_NVLINK_MAX_LINKS; ++link) {
    unsigned peers = 0;
    if (ask("nvmlDeviceGetNvLinkCapability", device, link, NVML_NVLINK_CAP_P2P_SUPPORTED, &peers) !=
            NVML_SUCCESS ||
        peers == 0)
      continue;
    nvmlFieldValue_t state{};
    state.fieldId = NVML_FI_DEV_NVLINK_GET_STATE;
    state.scopeId = link;
    state.nvmlReturn = NVML_ERROR_UNKNOWN;
    REQUIRE(ask("nvmlDeviceGetFieldValues", device, 1, &state) == NVML_SUCCESS);
    REQUIRE(state.nvmlReturn == NVML_SUCCESS && state.value.uiVal == NVML_FEATURE_ENABLED);
    nvmlPciInfo_t peer{};
    REQUIRE(ask("nvmlDeviceGetNvLinkRemotePciInfo", device, link, &peer) == NVML_SUCCESS && peer.domain != 0);
    ++up;
  }
  REQUIRE(up == wanted);
  std::printf("PASS\n");
  return 0;
}

int none() {
  const nvmlReturn_t status = ask("nvmlInit_v2");
  unsigned count = 99;
  REQUIRE(ask("nvmlDeviceGetCount_v2", &count) == NVML_ERROR_UNINITIALIZED && count == 99);
  std::printf("%d %s\n", status, nvml().call<const char*>("nvmlErrorString", status));
  return 0;
}

int lines() {
  REQUIRE(ask("nvmlInit_v2") == NVML_SUCCESS);
  const nvmlDevice_t device = deviceAt(0);
  for (char line[16]; std::fgets(line, sizeof line, stdin) != nullptr;) {
    const auto began = std::chrono::steady_clock::now();
    nvmlMemory_t memory{};
    char name[96];
    const nvmlReturn_t live = memoryOf(device, &memory);
    const nvmlReturn_t fact =
        ask("nvmlDeviceGetName", device, static_cast<char*>(name), unsigned{sizeof name});
    const auto took = std::chrono::steady_clock::now() - began;
    std::printf("%d %d %lld\n", live, fact,
                static_cast<long long>(std::chrono::duration_cast<std::chrono::milliseconds>(took).count()));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int count, char** words) {
  const std::string what = count > 1 ? words[1] : "";
  if (what == "agree" && count > 2) return agree(static_cast<unsigned>(std::atoi(words[2])));
  if (what == "alone" && count > 2) return agree(static_cast<unsigned>(std::atoi(words[2])), true);
  if (what == "often") return often();
  if (what == "links" && count > 2) return links(static_cast<unsigned>(std::atoi(words[2])));
  if (what == "none") return none();
  if (what == "lines") return lines();
  std::printf("asks agree COUNT | alone COUNT | often | links COUNT | none | lines\n");
  return 2;
}
