// Initialisation, version, and everything about devices: answered from the worker's greeting.
#include <strings.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "base/log.h"
#include "client/calls/context_events.h"
#include "client/capture.h"
#include "client/entry.h"
#include "client/errors.h"
#include "client/export_tables.h"
#include "client/lookup.h"
#include "client/memory/device.h"
#include "client/memory/host.h"
#include "client/memory/registered.h"
#include "client/memory/staging.h"
#include "client/streams.h"
#include "client/visible_devices.h"

namespace gpupool::client {

CUresult startContexts(int deviceCount);                                    // calls/context.cpp
CUresult functionsOfModule(CUmodule module, std::vector<CUfunction>* out);  // calls/module.cpp

namespace {

std::vector<int>* visible = nullptr;

CUresult deviceIdentity(int ordinal, CUuuid* uuid, int* domain, int* bus, int* device) {
  const schema::DeviceProperties* properties = propertiesOf(ordinal);
  if (properties == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *uuid = properties->uuid;
  *domain = properties->attributes[CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID];
  *bus = properties->attributes[CU_DEVICE_ATTRIBUTE_PCI_BUS_ID];
  *device = properties->attributes[CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID];
  return CUDA_SUCCESS;
}

CUresult streamIdOf(CUcontext, CUstream stream, uint64_t* id) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status == CUDA_SUCCESS) *id = ref.stream->id;
  return status;
}

// A device's map never changes: asked once.
CUresult tpcMap(std::vector<unsigned char>* gpcs, std::vector<unsigned char>* ranks) {
  struct Known {
    std::mutex mutex;
    std::map<CUdevice, std::pair<std::vector<unsigned char>, std::vector<unsigned char>>> maps;
  };
  static auto* known = new Known;
  Context* context = nullptr;
  if (CUresult status = contexts().resolve(nullptr, &context); status != CUDA_SUCCESS) return status;
  {
    std::lock_guard lock(known->mutex);
    if (auto found = known->maps.find(context->device); found != known->maps.end()) {
      std::tie(*gpcs, *ranks) = found->second;
      return CUDA_SUCCESS;
    }
  }
  size_t count = 4096;
  gpcs->resize(count);
  ranks->resize(count);
  CUresult status =
      Session::get().await<"sessionTpcMap">(context->handle, gpcs->data(), ranks->data(), &count);
  if (status != CUDA_SUCCESS) return status;
  gpcs->resize(std::min(count, gpcs->size()));
  ranks->resize(gpcs->size());
  std::lock_guard lock(known->mutex);
  known->maps[context->device] = {*gpcs, *ranks};
  return CUDA_SUCCESS;
}

CUresult loadModule(CUmodule* module, const void* image) {
  return custom::cuModuleLoadData != nullptr ? custom::cuModuleLoadData(module, image)
                                             : CUDA_ERROR_NOT_SUPPORTED;
}

void childHandler() { Session::get().abandon(); }

// The library's own last word. Libraries that are unloaded after this one still call in: cleanup succeeds
// silently then.
__attribute__((destructor)) void leave() {
  if (process::state() != process::State::ready) return;
  process::lose();
  Session::get().goodbye();
}

// Over a network it leaves as an exit handler, before the libraries' destructors: UCX's come before ours,
// since it was loaded later, and what still runs in UCX then ends the process by an assertion. A session that
// shares memory goes to no network any more; one that moves, or is nowhere, leaves at once, or what comes
// behind this would wait for it.
void leaveNetwork() {
  if (process::state() != process::State::ready) return;
  Session& session = Session::get();
  if (!session.mapsMemory() || !session.moveNoMore()) leave();
}

CUresult initialise() {
  const char* named = std::getenv("CUDA_VISIBLE_DEVICES");
  if (namesNoDevice(named)) return CUDA_ERROR_NO_DEVICE;  // and no lease is taken
  CUresult status = checkDeviceOrder(std::getenv("CUDA_DEVICE_ORDER"));
  if (status != CUDA_SUCCESS) return status;
  std::string text;
  std::vector<int> chosen;
  const auto choose = [&](const schema::WorkerHello& hello) {
    std::vector<CUuuid> uuids;
    uuids.reserve(hello.deviceCount);
    for (uint32_t d = 0; d < hello.deviceCount; ++d) uuids.push_back(hello.devices[d].uuid);
    return visibleDevices(named, uuids, &chosen);
  };
  if (Session::open(choose, status, text) == nullptr) {
    // A program may call cuInit again and again; what has not changed is not said again.
    static std::string said;
    if (said != text && !text.empty()) GPUPOOL_ERROR("%s", text.c_str());
    said = text;
    return status;
  }
  visible = new std::vector<int>(std::move(chosen));
  startDeviceMemory();
  static constexpr Session::MoveHooks moves{
      [] { return hostMemory().regions(); },
      [](transport::Connection& next, std::span<const schema::MovedRegion> regions, bool lends,
         std::string& why) {
        const bool fetches = lends && !Session::get().mapsMemory();
        if (!hostMemory().prepareMove(next, regions, lends, why)) return false;
        if (!fetches || carrier().fetchNext(next)) return true;
        why = "the new worker does not give what copies have brought to pinned memory";
        return false;
      },
      [](std::shared_ptr<transport::SharedMemory> shared) {
        staging().moved(std::move(shared));
        hostMemory().moved();
      },
      [] { hostMemory().bring(); },
      [](transport::Connection& next, std::string& why) { return hostMemory().lend(next, why); },
      [](uint64_t address, transport::Region& region, uint64_t& offset) {
        return hostMemory().lentAtNext(address, region, offset);
      },
      [](const std::map<uint64_t, transport::Region>& pinned, std::string& why) {
        return hostMemory().arrive(pinned, why);
      },
      [] { hostMemory().settleAll(); }};
  Session::get().hookMoves(moves);
  const auto settle = [](WordMark behind) {
    Session::get().observed();
    return settleHostMemory(behind);
  };
  hookStreams({settle, &captureAccepts, &orderNewStream});
  startContexts(deviceCount());
  static constexpr ExportTableHooks hooks{&streamIdOf,  &functionsOfModule, &loadModule,
                                          &deviceCount, &deviceIdentity,    &tpcMap};
  setExportTableHooks(hooks);
  process::setChildHandler(&childHandler);
  std::atexit(&leaveNetwork);
  return CUDA_SUCCESS;
}

CUresult copyText(char* to, int room, const char* text) {
  if (to == nullptr || room <= 0) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(to, static_cast<size_t>(room), "%s", text);
  return CUDA_SUCCESS;
}

}  // namespace

int deviceCount() { return visible == nullptr ? 0 : static_cast<int>(visible->size()); }
int sessionDevice(CUdevice device) {
  return device >= 0 && device < deviceCount() ? (*visible)[static_cast<size_t>(device)] : -1;
}
const schema::DeviceProperties* propertiesOf(CUdevice device) {
  int index = sessionDevice(device);
  return index < 0 ? nullptr : &Session::get().hello().devices[index];
}

bool notInThePool(CUdevice_attribute attribute) {
  switch (attribute) {
    // The application's registered pages are its own; the device sees a mirror at another address.
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    // Managed memory is host-resident and coherent, without page faults.
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
    case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES:
    case CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST:
    // Memory is not shared with devices of other machines or network cards.
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
    case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES:
    // Host memory of these kinds cannot be created through the pool (calls/virtual_memory.cpp,
    // calls/pool.cpp).
    case CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_MULTINODE_IPC_SUPPORTED:
    // Arrays are mapped when they are created; graphics and external semaphores stay on the server.
    case CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_TIMELINE_SEMAPHORE_INTEROP_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_D3D12_CIG_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VULKAN_CIG_SUPPORTED:
      return true;
    default:
      return false;
  }
}

namespace custom {

CUresult cuInit(unsigned flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = CUDA_SUCCESS;
  if (process::begin(&result)) {
    result = initialise();
    process::finish(result);
  }
  return result;
}

CUresult cuDriverGetVersion(int* version) {
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** text) { return errorName(error, text); }
CUresult cuGetErrorString(CUresult error, const char** text) { return errorString(error, text); }
CUresult cuGetProcAddress(const char* name, void** address, int version, cuuint64_t flags) {
  return lookupOld(name, version, flags, address);
}
CUresult cuGetProcAddress_v2(const char* name, void** address, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  return lookup(name, version, flags, address, status);
}
CUresult cuGetExportTable(const void** table, const CUuuid* id) { return getExportTable(table, id); }

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (propertiesOf(ordinal) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = deviceCount();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int room, CUdevice device) {
  const auto* properties = propertiesOf(device);
  return properties == nullptr ? CUDA_ERROR_INVALID_DEVICE : copyText(name, room, properties->name);
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  const auto* properties = propertiesOf(device);
  if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (properties == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *uuid = properties->uuid;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) { return custom::cuDeviceGetUuid(uuid, device); }

CUresult cuDeviceGetLuid(char* luid, unsigned* mask, CUdevice device) {
  const auto* properties = propertiesOf(device);
  if (properties == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (luid == nullptr || mask == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (properties->luidStatus != CUDA_SUCCESS) return static_cast<CUresult>(properties->luidStatus);
  std::memcpy(luid, properties->luid, sizeof properties->luid);
  *mask = properties->luidMask;
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  const auto* properties = propertiesOf(device);
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (properties == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *bytes = properties->limitBytes;
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(unsigned* bytes, CUdevice device) {
  size_t whole = 0;
  CUresult status = bytes == nullptr ? CUDA_ERROR_INVALID_VALUE : custom::cuDeviceTotalMem_v2(&whole, device);
  if (status == CUDA_SUCCESS) *bytes = static_cast<unsigned>(std::min<size_t>(whole, UINT32_MAX));
  return status;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  const auto* properties = propertiesOf(device);
  if (value == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (properties == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute <= 0 || attribute >= schema::kDeviceAttributes || !properties->attributeKnown[attribute])
    return CUDA_ERROR_INVALID_VALUE;
  // Events are shared by the workers, whatever the driver can.
  if (attribute == CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED) return *value = 1, CUDA_SUCCESS;
  // Pools are the client's own (calls/pool_share.cpp).
  if (attribute == CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES)
    return *value = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_SUCCESS;
  *value = notInThePool(attribute) ? 0 : properties->attributes[attribute];
  return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice device) {
  CUresult status = custom::cuDeviceGetAttribute(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  return status != CUDA_SUCCESS
             ? status
             : custom::cuDeviceGetAttribute(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
}

CUresult cuDeviceGetProperties(CUdevprop* out, CUdevice device) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  auto get = [&](CUdevice_attribute attribute) {
    int value = 0;
    custom::cuDeviceGetAttribute(&value, attribute, device);
    return value;
  };
  *out = {};
  out->maxThreadsPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  for (int i = 0; i < 3; ++i) {
    out->maxThreadsDim[i] = get(static_cast<CUdevice_attribute>(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i));
    out->maxGridSize[i] = get(static_cast<CUdevice_attribute>(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i));
  }
  out->sharedMemPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  out->totalConstantMemory = get(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY);
  out->SIMDWidth = get(CU_DEVICE_ATTRIBUTE_WARP_SIZE);
  out->memPitch = get(CU_DEVICE_ATTRIBUTE_MAX_PITCH);
  out->regsPerBlock = get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK);
  out->clockRate = get(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  out->textureAlign = get(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* id, int room, CUdevice device) {
  const auto* properties = propertiesOf(device);
  return properties == nullptr ? CUDA_ERROR_INVALID_DEVICE : copyText(id, room, properties->pciBusId);
}

CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* id) {
  if (device == nullptr || id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (int d = 0; d < deviceCount(); ++d) {
    const auto* properties = propertiesOf(d);
    if (properties == nullptr) continue;
    const char* known = properties->pciBusId;
    if (::strcasecmp(known, id) == 0 || (std::strlen(known) > 5 && ::strcasecmp(known + 5, id) == 0)) {
      *device = d;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to) {
  const auto* properties = propertiesOf(from);
  if (value == nullptr || attribute <= 0 || attribute >= schema::kP2PAttributes)
    return CUDA_ERROR_INVALID_VALUE;
  if (properties == nullptr || propertiesOf(to) == nullptr || from == to) return CUDA_ERROR_INVALID_DEVICE;
  *value = properties->p2p[sessionDevice(to)][attribute];
  return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  const auto* properties = propertiesOf(device);
  if (can == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (properties == nullptr || propertiesOf(peer) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *can = device == peer ? 0 : properties->canAccessPeer[sessionDevice(peer)];
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetExecAffinitySupport(int* supported, CUexecAffinityType, CUdevice device) {
  if (supported == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  *supported = 0;
  return CUDA_SUCCESS;
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope) {
  return CUDA_ERROR_NOT_SUPPORTED;  // as where GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS reads 0
}
CUresult cuProfilerInitialize(const char*, const char*, CUoutput_mode) {
  return CUDA_ERROR_PROFILER_DISABLED;
}
// What a program wants profiled is what GPUPOOL_STATS=1 counts: from start to stop.
CUresult cuProfilerStart() {
  Session::get().restartStats();
  return CUDA_SUCCESS;
}
CUresult cuProfilerStop() {
  Session::get().printStats();
  return CUDA_SUCCESS;
}

}  // namespace custom
}  // namespace gpupool::client
