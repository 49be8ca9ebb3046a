// In a lease on a machine with a GPU: what our libnvidia-ml.so.1 says of each GPU of the lease, function by
// function (schema/nvml_figures.def), beside what NVIDIA's says of the same one.
//   compare PATH    of NVIDIA's libnvidia-ml.so.1
// What never changes has to be equal, and of what does the answer's status; both values are printed where
// they differ. The exit status is 1 if something is not as it has to be.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "schema/nvml_figures.h"

namespace {

using namespace gpupool::schema;

void* load(const char* name) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::printf("FAIL %s\n", dlerror());
    std::exit(1);
  }
  return library;
}

struct Nvml {
  template <class... Arguments>
  nvmlReturn_t ask(const char* name, Arguments... arguments) const {
    const auto function = reinterpret_cast<nvmlReturn_t (*)(Arguments...)>(dlsym(library, name));
    return function == nullptr ? NVML_ERROR_NOT_SUPPORTED : function(arguments...);
  }
  void* library;
};

int failures = 0, compared = 0, same = 0;

std::string show(const void* value, size_t size) {
  char text[32];
  if (size == 4) {
    uint32_t number = 0;
    std::memcpy(&number, value, 4);
    std::snprintf(text, sizeof text, "%u", number);
    return text;
  }
  if (size == 8) {
    uint64_t number = 0;
    std::memcpy(&number, value, 8);
    std::snprintf(text, sizeof text, "%llu", static_cast<unsigned long long>(number));
    return text;
  }
  return std::to_string(size) + " bytes";
}

template <class T>
void compare(bool fact, const std::string& name, nvmlReturn_t ours, const T& mine, nvmlReturn_t theirs,
             const T& native) {
  ++compared;
  const bool equal =
      ours == theirs && (ours != NVML_SUCCESS || std::memcmp(&mine, &native, sizeof mine) == 0);
  same += equal;
  if (equal) return;
  const bool wrong = ours != theirs || fact;
  failures += wrong;
  std::printf("%s %s: %d %s, natively %d %s\n", wrong ? "FAIL" : "    ", name.c_str(), ours,
              show(&mine, sizeof mine).c_str(), theirs, show(&native, sizeof native).c_str());
}

enum When { Fact, Live };

void compareTable(const Nvml& ours, nvmlDevice_t mine, const Nvml& native, nvmlDevice_t its) {
#define ASK(when, name, function, type, ...)                                \
  {                                                                         \
    type a{}, b{};                                                          \
    const nvmlReturn_t first = ours.ask(#function, mine __VA_ARGS__, &a);   \
    const nvmlReturn_t second = native.ask(#function, its __VA_ARGS__, &b); \
    compare(when == Fact, name, first, a, second, b);                       \
  }
#define COMMA ,
#define FIGURE(when, function, type, member) ASK(when, #function, function, type)
#define FIGURE_PAIR(when, function, type, member)                                \
  {                                                                              \
    Two<type> a, b;                                                              \
    const nvmlReturn_t first = ours.ask(#function, mine, &a.first, &a.second);   \
    const nvmlReturn_t second = native.ask(#function, its, &b.first, &b.second); \
    compare(when == Fact, #function, first, a, second, b);                       \
  }
#define FIGURE_BY(when, function, argument, count, type, member) \
  for (unsigned i = 0; i < count; ++i)                           \
    if (std::string(#member) != "linkPeers")                     \
  ASK(when, #function + std::string(" ") + std::to_string(i), function, type, COMMA static_cast<argument>(i))
#define FIGURE_BY_TWO(when, function, argument, count, second, seconds, type, member)                   \
  for (unsigned i = 0; i < count; ++i)                                                                  \
    for (unsigned j = 0; j < seconds; ++j)                                                              \
  ASK(when, #function + std::string(" ") + std::to_string(i) + " " + std::to_string(j), function, type, \
      COMMA static_cast<argument>(i) COMMA static_cast<second>(j))
#define FIGURE_TEXT(function, member)                                                        \
  {                                                                                          \
    NvmlText a, b;                                                                           \
    const nvmlReturn_t first = ours.ask(#function, mine, static_cast<char*>(a.text), 96u);   \
    const nvmlReturn_t second = native.ask(#function, its, static_cast<char*>(b.text), 96u); \
    compare(true, #function, first, a, second, b);                                           \
  }
#include "schema/nvml_figures.def"
}

// In other domains, and the same device on the same bus.
void compareAddresses(const Nvml& ours, nvmlDevice_t mine, const Nvml& native, nvmlDevice_t its) {
  nvmlPciInfo_t a{}, b{};
  const auto check = [&](const char* name, nvmlReturn_t first, nvmlReturn_t second) {
    const bool right = first == second &&
                       (first != NVML_SUCCESS || (a.bus == b.bus && a.device == b.device &&
                                                  a.domain != b.domain && a.pciDeviceId == b.pciDeviceId));
    ++compared;
    right ? ++same : ++failures;
    if (!right) std::printf("FAIL %s: %d %s, natively %d %s\n", name, first, a.busId, second, b.busId);
  };
  check("nvmlDeviceGetPciInfo_v3", ours.ask("nvmlDeviceGetPciInfo_v3", mine, &a),
        native.ask("nvmlDeviceGetPciInfo_v3", its, &b));
  std::printf("%s is %s in the pool\n", b.busId, a.busId);
  for (unsigned link = 0; link < NVML_NVLINK_MAX_LINKS; ++link)
    check("nvmlDeviceGetNvLinkRemotePciInfo_v2",
          ours.ask("nvmlDeviceGetNvLinkRemotePciInfo_v2", mine, link, &a),
          native.ask("nvmlDeviceGetNvLinkRemotePciInfo_v2", its, link, &b));
}

// Of a lease of the whole GPU.
void compareMemory(const Nvml& ours, nvmlDevice_t mine, const Nvml& native, nvmlDevice_t its) {
  nvmlMemory_t a{}, b{};
  ours.ask("nvmlDeviceGetMemoryInfo", mine, &a);
  native.ask("nvmlDeviceGetMemoryInfo", its, &b);
  ++compared;
  (a.total == b.total ? same : failures) += 1;
  std::printf("%s memory: %llu of %llu MiB used, natively %llu of %llu\n",
              a.total == b.total ? "    " : "FAIL", a.used >> 20, a.total >> 20, b.used >> 20, b.total >> 20);
}

void compareFields(const Nvml& ours, nvmlDevice_t mine, const Nvml& native, nvmlDevice_t its) {
  for (const NvmlField& field : kNvmlFields) {
    nvmlFieldValue_t a{}, b{};
    a.fieldId = b.fieldId = field.id;
    a.scopeId = b.scopeId = field.scope;
    ours.ask("nvmlDeviceGetFieldValues", mine, 1, &a);
    native.ask("nvmlDeviceGetFieldValues", its, 1, &b);
    compare(false, "field " + std::to_string(field.id) + " of " + std::to_string(field.scope), a.nvmlReturn,
            a.value.ullVal, b.nvmlReturn, b.value.ullVal);
  }
}

void comparePairs(const Nvml& ours, const Nvml& native, const nvmlDevice_t* mine, const nvmlDevice_t* its,
                  unsigned count) {
  for (unsigned i = 0; i < count; ++i)
    for (unsigned j = 0; j < count; ++j) {
      const std::string name = std::to_string(i) + " and " + std::to_string(j);
      nvmlGpuTopologyLevel_t a{}, b{};
      const nvmlReturn_t first = ours.ask("nvmlDeviceGetTopologyCommonAncestor", mine[i], mine[j], &a);
      const nvmlReturn_t second = native.ask("nvmlDeviceGetTopologyCommonAncestor", its[i], its[j], &b);
      compare(true, "ancestor of " + name, first, a, second, b);
      for (int k = 0; k < kFigureP2P; ++k) {
        nvmlGpuP2PStatus_t c{}, d{};
        const auto index = static_cast<nvmlGpuP2PCapsIndex_t>(k);
        const nvmlReturn_t third = ours.ask("nvmlDeviceGetP2PStatus", mine[i], mine[j], index, &c);
        const nvmlReturn_t fourth = native.ask("nvmlDeviceGetP2PStatus", its[i], its[j], index, &d);
        compare(true, "P2P " + std::to_string(k) + " between " + name, third, c, fourth, d);
      }
    }
}

void timeAsking(const Nvml& nvml, nvmlDevice_t device, const char* name) {
  using Clock = std::chrono::steady_clock;
  unsigned milliwatts = 0;
  const timespec pause{0, 200'000'000};
  for (int i = 0; i < 3; ++i) {
    nanosleep(&pause, nullptr);  // what is known is too old then
    const auto began = Clock::now();
    nvml.ask("nvmlDeviceGetPowerUsage", device, &milliwatts);
    const std::chrono::duration<double, std::milli> took = Clock::now() - began;
    std::printf("%s: power usage in %.2f ms\n", name, took.count());
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) return 2;
  const Nvml ours{load("libnvidia-ml.so.1")}, native{load(words[1])};
  nvmlReturn_t status = ours.ask("nvmlInit_v2");
  if (status == NVML_SUCCESS) status = native.ask("nvmlInit_v2");
  unsigned devices = 0;
  ours.ask("nvmlDeviceGetCount_v2", &devices);
  if (status != NVML_SUCCESS || devices == 0 || devices > kFigureDevices) {
    std::printf("FAIL init: %d, %u GPUs\n", status, devices);
    return 1;
  }
  nvmlDevice_t mine[kFigureDevices] = {}, its[kFigureDevices] = {};
  for (unsigned i = 0; i < devices; ++i) {
    char uuid[96] = {};
    ours.ask("nvmlDeviceGetHandleByIndex_v2", i, &mine[i]);
    ours.ask("nvmlDeviceGetUUID", mine[i], static_cast<char*>(uuid), 96u);
    if (native.ask("nvmlDeviceGetHandleByUUID", static_cast<const char*>(uuid), &its[i]) != NVML_SUCCESS) {
      std::printf("FAIL natively there is no %s\n", uuid);
      return 1;
    }
    std::printf("GPU %u: %s\n", i, uuid);
    compareTable(ours, mine[i], native, its[i]);
    compareAddresses(ours, mine[i], native, its[i]);
    compareMemory(ours, mine[i], native, its[i]);
    compareFields(ours, mine[i], native, its[i]);
  }
  comparePairs(ours, native, mine, its, devices);
  timeAsking(native, its[0], "natively");
  timeAsking(ours, mine[0], "in the pool");
  std::printf("%d answers compared, %d the same, %d wrong\n%s\n", compared, same, failures,
              failures == 0 ? "PASS" : "FAIL");
  return failures == 0 ? 0 : 1;
}
