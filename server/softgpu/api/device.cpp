// Driver manual: Initialization, Version Management, Device Management.
#include "server/softgpu/api/device.h"

#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>

#include "server/softgpu/address_plan.h"
#include "server/softgpu/api/context.h"
#include "server/softgpu/api/pool.h"

namespace gpupool::softgpu::api {
namespace {

constexpr uint64_t kDefaultMemory = 2ull << 30;

std::atomic<bool> ready{false};
std::atomic<bool> forked{false};  // a child of the process that initialised: the driver does not work there
std::vector<std::unique_ptr<Device>>& all() {
  static auto* const list = new std::vector<std::unique_ptr<Device>>;
  return *list;
}

uint64_t memoryFromEnvironment() {
  const char* text = std::getenv("GPUPOOL_SOFT_MEMORY");
  if (!text || !*text) return kDefaultMemory;
  char* end = nullptr;
  double value = std::strtod(text, &end);
  switch (*end) {
    case 'k':
    case 'K':
      value *= 1024.0;
      break;
    case 'm':
    case 'M':
      value *= 1024.0 * 1024;
      break;
    case 'g':
    case 'G':
      value *= 1024.0 * 1024 * 1024;
      break;
    case 't':
    case 'T':
      value *= 1024.0 * 1024 * 1024 * 1024;
      break;
    case 0:
      break;
    default:
      value = 0;
  }
  if (!(value >= 1 << 20) || value > double(1ull << 39)) {
    std::fprintf(stderr, "gpupool: GPUPOOL_SOFT_MEMORY=%s is not between 1MiB and 512GiB; using 2GiB\n",
                 text);
    return kDefaultMemory;
  }
  return uint64_t(value);
}

int countFromEnvironment() {
  const char* text = std::getenv("GPUPOOL_SOFT_DEVICES");
  int count = text ? std::atoi(text) : 1;
  return count < 1 ? 1 : count > kMaxDevices ? kMaxDevices : count;
}

// CUDA_VISIBLE_DEVICES as ordinals: enumeration stops at the first entry that is none of ours.
std::vector<int> visibleDevices(int count) {
  std::vector<int> visible;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (int i = 0; i < count; ++i) visible.push_back(i);
    return visible;
  }
  for (const char* at = text; *at;) {
    char* end = nullptr;
    long ordinal = std::strtol(at, &end, 10);
    if (end == at || ordinal < 0 || ordinal >= count) break;
    for (int seen : visible) {
      if (seen == ordinal) return {};
    }
    visible.push_back(int(ordinal));
    if (*end != ',') break;
    at = end + 1;
  }
  return visible;
}

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15 + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccd;
  return hash ^ (hash >> 33);
}

// The same in every process of a machine, different on every machine and for every ordinal. A server of the
// pool names its own (GPUPOOL_SOFT_IDENTITY), since two servers of a machine have GPUs of their own.
CUuuid makeUuid(int physical) {
  std::string machine;
  std::ifstream("/etc/machine-id") >> machine;
  if (const char* server = std::getenv("GPUPOOL_SOFT_IDENTITY")) machine += server;
  uint64_t high = 0x677075706f6f6c00, low = 0x736f66742d677075;
  for (char c : machine) {
    high = mix(high, uint8_t(c));
    low = mix(low, uint8_t(c) + 1);
  }
  high = mix(high, uint64_t(physical));
  low = mix(low, uint64_t(physical) + 17);
  CUuuid uuid;
  std::memcpy(uuid.bytes, &high, 8);
  std::memcpy(uuid.bytes + 8, &low, 8);
  uuid.bytes[6] = char((uuid.bytes[6] & 0x0f) | 0x40);
  uuid.bytes[8] = char((uuid.bytes[8] & 0x3f) | 0x80);
  return uuid;
}

}  // namespace

Device::Device(int ordinal, int physical, uint64_t bytes)
    : ordinal_(ordinal),
      physical_(physical),
      total_(bytes),
      uuid_(makeUuid(physical)),
      heap_(addressPlan().heap + physical * addressPlan().heapStep, addressPlan().heapStep) {}

VaHeap& globalsHeap() {
  static auto* const heap = new VaHeap(addressPlan().globals, addressPlan().globalsBytes);
  return *heap;
}

std::string Device::pciName() const {
  char text[16];
  std::snprintf(text, sizeof text, "0000:%02X:00.0", pciBus());
  return text;
}

bool Device::reserve(uint64_t bytes) {
  uint64_t used = used_.load();
  do {
    if (bytes > total_ - used) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes));
  return true;
}

void Device::release(uint64_t bytes) { used_ -= bytes; }

bool initialized() { return ready.load(std::memory_order_acquire); }
const std::vector<std::unique_ptr<Device>>& devices() { return all(); }

Device* findDevice(CUdevice device) {
  if (!initialized() || device < 0 || size_t(device) >= all().size()) return nullptr;
  return all()[size_t(device)].get();
}

namespace {

CUresult checkDevice(CUdevice device, Device*& found) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  found = findDevice(device);
  return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

}  // namespace
}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuInit(unsigned int flags) {
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  static auto* const once = new std::mutex;
  std::lock_guard lock(*once);
  if (forked) return CUDA_ERROR_NOT_INITIALIZED;
  if (initialized()) return CUDA_SUCCESS;
  uint64_t bytes = memoryFromEnvironment();
  std::vector<int> visible = visibleDevices(countFromEnvironment());
  if (visible.empty()) return CUDA_ERROR_NO_DEVICE;
  for (int physical : visible) {
    int ordinal = int(all().size());
    auto device = std::make_unique<Device>(ordinal, physical, bytes);
    if (!device->heap().base() || !globalsHeap().base()) return CUDA_ERROR_OUT_OF_MEMORY;
    device->primary = std::make_shared<Context>();
    device->primary->device = ordinal;
    device->primary->isPrimary = true;
    table<Context>().add(device->primary);
    device->defaultPool = makeDefaultPool(ordinal);
    device->setPool(device->defaultPool);
    all().push_back(std::move(device));
  }
  pthread_atfork(nullptr, nullptr, [] {
    forked = true;
    ready = false;
  });
  ready.store(true, std::memory_order_release);
  return CUDA_SUCCESS;
}

// For tests: GPUPOOL_SOFT_DRIVER (a number like 13000) is another version of the driver, and
// GPUPOOL_SOFT_NAME another model of GPU.
CUresult cuDriverGetVersion(int* version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  static const int number = [] {
    const char* text = std::getenv("GPUPOOL_SOFT_DRIVER");
    return text && *text ? std::atoi(text) : kDriverVersion;
  }();
  *version = number;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!device) return CUDA_ERROR_INVALID_VALUE;
  if (!findDevice(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = int(devices().size());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  Device* found;
  SOFT_TRY(checkDevice(device, found));
  if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
  static const std::string model = [] {
    const char* text = std::getenv("GPUPOOL_SOFT_NAME");
    return std::string(text && *text ? text : "gpupool software GPU");
  }();
  std::snprintf(name, size_t(length), "%s", model.c_str());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  Device* found;
  SOFT_TRY(checkDevice(device, found));
  if (!uuid) return CUDA_ERROR_INVALID_VALUE;
  *uuid = found->uuid();
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  Device* found;
  SOFT_TRY(checkDevice(device, found));
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  *bytes = found->totalBytes();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  Device* found;
  SOFT_TRY(checkDevice(device, found));
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  bool known = false;
  int answer = deviceAttribute(*found, attribute, known);
  if (!known) return CUDA_ERROR_INVALID_VALUE;
  *value = answer;
  return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
  Device* found;
  SOFT_TRY(checkDevice(device, found));
  if (!major || !minor) return CUDA_ERROR_INVALID_VALUE;
  *major = int(kComputeCapability / 10);
  *minor = int(kComputeCapability % 10);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetProperties(CUdevprop* properties, CUdevice device) {
  Device* found;
  SOFT_TRY(checkDevice(device, found));
  if (!properties) return CUDA_ERROR_INVALID_VALUE;
  auto attribute = [&](CUdevice_attribute id) {
    bool known;
    return deviceAttribute(*found, id, known);
  };
  *properties = {};
  properties->maxThreadsPerBlock = int(kMaxThreadsPerBlock);
  for (int i = 0; i < 3; ++i) {
    properties->maxThreadsDim[i] = attribute(CUdevice_attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i));
    properties->maxGridSize[i] = attribute(CUdevice_attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i));
  }
  properties->sharedMemPerBlock = int(kSharedPerBlock);
  properties->totalConstantMemory = attribute(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  properties->SIMDWidth = int(kWarpSize);
  properties->memPitch = attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  properties->regsPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
  properties->clockRate = attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  properties->textureAlign = attribute(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* name) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!device || !name) return CUDA_ERROR_INVALID_VALUE;
  unsigned domain = 0, bus = 0, slot = 0, function = 0;
  if (std::sscanf(name, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3) {
    domain = 0;
    if (std::sscanf(name, "%x:%x.%x", &bus, &slot, &function) < 2) return CUDA_ERROR_INVALID_VALUE;
  }
  for (auto& candidate : devices()) {
    if (domain != 0 || slot != 0 || int(bus) != candidate->pciBus()) continue;
    *device = candidate->ordinal();
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetPCIBusId(char* name, int length, CUdevice device) {
  Device* found;
  SOFT_TRY(checkDevice(device, found));
  if (!name || length < 13) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(name, size_t(length), "%s", found->pciName().c_str());
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetLuid(char*, unsigned int*, CUdevice) { return CUDA_ERROR_NOT_SUPPORTED; }  // Windows only

CUresult cuDeviceGetTexture1DLinearMaxWidth(size_t* width, CUarray_format, unsigned, CUdevice device) {
  Device* found;
  SOFT_TRY(checkDevice(device, found));
  if (!width) return CUDA_ERROR_INVALID_VALUE;
  *width = 1 << 28;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetExecAffinitySupport(int* supported, CUexecAffinityType, CUdevice device) {
  Device* found;
  SOFT_TRY(checkDevice(device, found));
  if (!supported) return CUDA_ERROR_INVALID_VALUE;
  *supported = 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  Device *first, *second;
  SOFT_TRY(checkDevice(device, first));
  SOFT_TRY(checkDevice(peer, second));
  if (!can) return CUDA_ERROR_INVALID_VALUE;
  *can = first != second;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice source,
                                 CUdevice target) {
  Device *first, *second;
  SOFT_TRY(checkDevice(source, first));
  SOFT_TRY(checkDevice(target, second));
  if (!value || first == second) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK:
      *value = 0;
      break;
    case CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED:
    case CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED:
    case CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED:
      *value = 1;
      break;
    case CU_DEVICE_P2P_ATTRIBUTE_ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED:
      *value = 0;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
