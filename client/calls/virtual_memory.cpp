// Virtual Memory Management. Ranges come from the session's windows, where addresses are the same on both
// sides. Physical memory is the worker's, under the handle that is minted here; it is mapped whole, as the
// driver demands, and as often as the application likes. Handles, mappings and access are counted here, so
// that only what changes the device's page tables travels.
#include <cstring>
#include <map>
#include <mutex>

#include "base/log.h"
#include "client/calls/physical.h"
#include "client/devices.h"
#include "client/entry.h"
#include "client/memory/allocations.h"
#include "client/memory/device.h"
#include "client/memory/pools.h"
#include "client/memory/shares.h"

namespace gpupool::client {
namespace {

constexpr size_t kGranularity = DeviceMemory::kExtentUnit;

HandleTable<Plain> physicalHandles{Kind::memAllocation};

struct Reservation {
  size_t bytes = 0;
  CUdevice device = 0;  // whose window it lies in
};
struct Physical {
  CUmemAllocationProp properties{};
  size_t bytes = 0;
  unsigned references = 1;  // of the application; a mapping keeps the memory without any
  unsigned mappings = 0;
  bool shared = false;         // others can open it, or this process has opened it
  bool opened = false;         // another process has made it, and it is charged there
  schema::ShareToken token{};  // shared
};
struct Mapping {
  size_t bytes = 0;
  uint64_t handle = 0;
  unsigned access[schema::kMaxDevices] = {};  // CUmemAccess_flags by application device
};

// Null: none, or one that is destroyed. These calls need none.
CUcontext currentContext() {
  Context* context = nullptr;
  return contexts().resolve(nullptr, &context) == CUDA_SUCCESS ? context->handle : nullptr;
}

// A context of the device, where there is one: its memory is cleared there.
CUcontext contextOn(CUdevice device) {
  CUcontext found = currentContext();
  Context* object = contexts().find(found);
  if (object != nullptr && object->device == device) return found;
  contexts().forEachAlive([&](Context& context) {
    if (context.device == device) found = context.handle;
  });
  return found;
}

// One mutex for all three, held while the worker is awaited: calls here are rare, and must not overtake each
// other.
struct VirtualMemory {
  std::mutex mutex;
  std::map<uint64_t, Reservation> reservations;
  std::map<uint64_t, Mapping> mappings;
  std::map<uint64_t, Physical> physical;

  // The reservation that holds [address, + bytes).
  bool reserved(uint64_t address, size_t bytes) const {
    auto after = reservations.upper_bound(address);
    if (after == reservations.begin()) return false;
    auto& [base, range] = *std::prev(after);
    return address - base < range.bytes && bytes <= range.bytes - (address - base);
  }
  bool overlaps(uint64_t address, size_t bytes) const {
    auto next = mappings.lower_bound(address);
    if (next != mappings.end() && next->first < address + bytes) return true;
    return next != mappings.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address;
  }
  // Calls f(address, mapping) on the mappings that make up the range exactly; false if they do not.
  template <class F>
  bool eachWhole(uint64_t address, size_t bytes, F&& f) {
    auto first = mappings.find(address);
    uint64_t at = address;
    for (auto it = first; it != mappings.end() && it->first == at && at < address + bytes; ++it)
      at += it->second.bytes;
    if (bytes == 0 || at != address + bytes) return false;
    for (auto it = first; it != mappings.end() && it->first < address + bytes;) {
      auto here = it++;
      f(here->first, here->second);
    }
    return true;
  }
  void dropUnused(uint64_t handle) {
    auto found = physical.find(handle);
    if (found == physical.end() || found->second.references != 0 || found->second.mappings != 0) return;
    const CUcontext context = contextOn(found->second.properties.location.id);
    if (found->second.shared && !found->second.opened)
      Session::get().await<"sessionOfferEnd">(context, found->second.token);
    Session::get().post<"sessionPhysicalRelease">(context, handle);
    if (!found->second.opened)
      deviceMemory(found->second.properties.location.id).release(found->second.bytes);
    physicalHandles.destroy(handle);
    physical.erase(found);
  }
};

VirtualMemory& virtualMemory() {
  static auto* all = new VirtualMemory;
  return *all;
}

bool isHost(CUmemLocationType type) {
  return type == CU_MEM_LOCATION_TYPE_HOST || type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
         type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

bool aligned(uint64_t value) { return value % kGranularity == 0; }

CUresult checkProperties(const CUmemAllocationProp* properties) {
  if (properties == nullptr || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
    return CUDA_ERROR_INVALID_VALUE;
  if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE && !isHost(properties->location.type))
    return CUDA_ERROR_INVALID_VALUE;
  if (!isHost(properties->location.type) && propertiesOf(properties->location.id) == nullptr)
    return CUDA_ERROR_INVALID_DEVICE;
  if ((properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0)
    return CUDA_ERROR_NOT_SUPPORTED;
  return CUDA_SUCCESS;
}

}  // namespace

CUdevice currentDevice() {
  const Context* context = contexts().find(currentContext());
  return context != nullptr ? context->device : 0;
}

CUresult openingResult(CUresult status) {
  if (status == CUDA_ERROR_PEER_ACCESS_NOT_ENABLED) return openingOtherGpu();
  if (status != CUDA_ERROR_PEER_ACCESS_UNSUPPORTED) return status;
  static std::atomic<bool> said{false};
  if (said.exchange(true)) return CUDA_ERROR_INVALID_HANDLE;
  GPUPOOL_WARNING(
      "the handle is of another tenant or GPU server, or of one that has been started again: only processes "
      "of one tenant on one server can share memory and events");
  return CUDA_ERROR_INVALID_HANDLE;
}

CUresult openingOtherGpu() {
  static std::atomic<bool> said{false};
  if (!said.exchange(true))
    GPUPOOL_WARNING(
        "the handle is of memory of another lease, on a GPU that this lease does not have: a worker reaches "
        "its lease's GPUs alone; put both programs into one lease");
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult openPhysical(CUcontext context, const schema::ShareToken& token, OpenedPhysical& opened) {
  auto made = physicalHandles.create();
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  landBeforeReturning();
  unsigned device = 0;
  CUresult status = openingResult(Session::get().await<"sessionMemoryOpen">(
      context, token, made.id, &device, &opened.bytes, &opened.offset, &opened.length));
  if (status != CUDA_SUCCESS) {
    physicalHandles.destroy(made.id);
    return status;
  }
  opened.name = made.id;
  opened.device = 0;
  while (opened.device < deviceCount() && sessionDevice(opened.device) != static_cast<int>(device))
    ++opened.device;
  const bool sane = opened.bytes != 0 && aligned(opened.bytes) && opened.offset < opened.bytes &&
                    opened.length <= opened.bytes - opened.offset;
  // Memory of a device that this process does not see (CUDA_VISIBLE_DEVICES) opens as any other (driver 580):
  // launchers give each process a device of its own, and NCCL reaches the others' memory so.
  if (opened.device == deviceCount()) opened.device = CU_DEVICE_INVALID;
  if (sane && device < Session::get().hello().deviceCount) return CUDA_SUCCESS;
  releasePhysicalName(context, made.id);
  return CUDA_ERROR_INVALID_HANDLE;
}

void releasePhysicalName(CUcontext context, uint64_t name) {
  Session::get().post<"sessionPhysicalRelease">(context, name);
  physicalHandles.destroy(name);
}

namespace custom {

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option) {
  if (granularity == nullptr || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
    return CUDA_ERROR_INVALID_VALUE;
  CUresult status = checkProperties(properties);
  if (status == CUDA_SUCCESS) *granularity = kGranularity;
  return status;
}

// The address asked for is a hint; ours are chosen so that both sides have them.
CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t alignment, CUdeviceptr,
                             unsigned long long flags) {
  if (out == nullptr || bytes == 0 || !aligned(bytes) || flags != 0 || (alignment & (alignment - 1)) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  CUdevice device = currentDevice();
  uint64_t address = deviceMemory(device).reserveAddresses(bytes, alignment);
  if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  all.reservations[address] = {bytes, device};
  *out = address;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  auto found = all.reservations.find(address);
  if (found == all.reservations.end() || found->second.bytes != bytes || all.overlaps(address, bytes))
    return CUDA_ERROR_INVALID_VALUE;
  deviceMemory(found->second.device).releaseAddresses(address, bytes);
  all.reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long flags) {
  if (out == nullptr || bytes == 0 || !aligned(bytes) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  CUresult status = checkProperties(properties);
  if (status != CUDA_SUCCESS) return status;
  if (isHost(properties->location.type)) {
    static std::atomic<bool> said{false};
    if (!said.exchange(true))
      GPUPOOL_WARNING(
          "cuMemCreate in host memory (NUMA) is not supported: only memory of a device can be created");
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  CUdevice device = properties->location.id;
  CUcontext context = contextOn(device);
  DeviceMemory& memory = deviceMemory(device);
  status = memory.charge(context, bytes);
  if (status == CUDA_ERROR_OUT_OF_MEMORY && reclaimPools(context, device))
    status = memory.charge(context, bytes);
  if (status != CUDA_SUCCESS) return status;
  auto made = physicalHandles.create();
  status = made.object == nullptr
               ? CUDA_ERROR_OUT_OF_MEMORY
               : Session::get().await<"sessionPhysicalCreate">(context, device, made.id, bytes);
  if (status != CUDA_SUCCESS) {
    if (made.object != nullptr) physicalHandles.destroy(made.id);
    memory.release(bytes);
    return status;
  }
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  all.physical[made.id] = {*properties, bytes};
  *out = made.id;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  auto found = all.physical.find(handle);
  if (found == all.physical.end() || found->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
  --found->second.references;
  all.dropUnused(handle);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  if (flags != 0 || bytes == 0 || !aligned(bytes) || !aligned(address)) return CUDA_ERROR_INVALID_VALUE;
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  auto found = all.physical.find(handle);
  if (found == all.physical.end() || found->second.references == 0) return CUDA_ERROR_INVALID_VALUE;
  Physical& physical = found->second;
  if (offset != 0 || bytes != physical.bytes) return CUDA_ERROR_NOT_SUPPORTED;  // as the driver
  if (!all.reserved(address, bytes) || all.overlaps(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  // Of a device that is not seen: the one that uses it, as the driver says of the pointer.
  CUdevice device = physical.properties.location.id;
  if (propertiesOf(device) == nullptr) device = currentDevice();
  CUresult status = Session::get().await<"sessionPhysicalMap">(contextOn(device), handle, address);
  if (status != CUDA_SUCCESS) return status;
  ++physical.mappings;
  all.mappings[address] = {bytes, handle, {}};
  Allocation entry{address, bytes, Allocation::Kind::mapped, device, nullptr, 0, address, 0, nullptr};
  entry.readers = entry.writers = 0;
  allocations().add(entry);
  return CUDA_SUCCESS;
}

// As the driver, this does not wait for work that uses the range.
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  CUresult status = CUDA_SUCCESS;
  CUcontext context = currentContext();
  bool whole = all.eachWhole(address, bytes, [&](uint64_t at, Mapping& mapping) {
    CUresult sent = Session::get().post<"sessionExtentUnmap">(context, CUdeviceptr{at});
    if (status == CUDA_SUCCESS) status = sent;
    allocations().remove(at);
    uint64_t handle = mapping.handle;
    all.mappings.erase(at);
    --all.physical[handle].mappings;
    all.dropUnused(handle);
  });
  return whole ? status : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* wanted, size_t count) {
  if (wanted == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (wanted[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (propertiesOf(wanted[i].location.id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (wanted[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
        wanted[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        wanted[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
      return CUDA_ERROR_INVALID_VALUE;
  }
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  CUresult status = CUDA_SUCCESS;
  CUcontext context = currentContext();
  bool whole = all.eachWhole(address, bytes, [&](uint64_t at, Mapping& mapping) {
    for (size_t i = 0; i < count && status == CUDA_SUCCESS; ++i) {
      CUdevice device = wanted[i].location.id;
      const unsigned flags = wanted[i].flags;
      if (mapping.access[device] == flags) continue;
      status = Session::get().await<"sessionExtentAccess">(context, CUdeviceptr{at}, device, flags);
      if (status != CUDA_SUCCESS) return;
      mapping.access[device] = flags;
      allocations().setAccess(at, device, flags != CU_MEM_ACCESS_FLAGS_PROT_NONE,
                              flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    }
  });
  return whole ? status : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  if (flags == nullptr || location == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (propertiesOf(location->id) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  auto after = all.mappings.upper_bound(address);
  if (after == all.mappings.begin() || address - std::prev(after)->first >= std::prev(after)->second.bytes)
    return CUDA_ERROR_INVALID_VALUE;
  *flags = std::prev(after)->second.access[location->id];
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                CUmemGenericAllocationHandle handle) {
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  auto found = all.physical.find(handle);
  if (properties == nullptr || found == all.physical.end() || found->second.references == 0)
    return CUDA_ERROR_INVALID_VALUE;
  *properties = found->second.properties;
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* pointer) {
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  auto after = all.mappings.upper_bound(address);
  if (out == nullptr || after == all.mappings.begin() ||
      address - std::prev(after)->first >= std::prev(after)->second.bytes)
    return CUDA_ERROR_INVALID_VALUE;
  *out = std::prev(after)->second.handle;
  ++all.physical[*out].references;
  return CUDA_SUCCESS;
}

// The descriptor carries a token. It does not keep the memory, as the driver's would: this process does.
CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  auto found = all.physical.find(handle);
  if (out == nullptr || flags != 0 || found == all.physical.end()) return CUDA_ERROR_INVALID_VALUE;
  Physical& physical = found->second;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
      (static_cast<unsigned>(physical.properties.requestedHandleTypes) & type) == 0)
    return CUDA_ERROR_INVALID_VALUE;
  if (!physical.shared) {
    landBeforeReturning();
    const CUresult status = Session::get().await<"sessionMemoryOffer">(
        contextOn(physical.properties.location.id), handle, CUdeviceptr{0}, physical.bytes, &physical.token);
    if (status != CUDA_SUCCESS) return status;
    physical.shared = true;
  }
  const int descriptor = makeDescriptor(ShareKind::memory, {physical.token, {}});
  if (descriptor < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  std::memcpy(out, &descriptor, sizeof descriptor);
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* osHandle,
                                        CUmemAllocationHandleType type) {
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  Share share;
  if (!readDescriptor(ShareKind::memory, static_cast<int>(reinterpret_cast<intptr_t>(osHandle)), share))
    return CUDA_ERROR_INVALID_VALUE;
  const schema::ShareToken& token = share.token;
  VirtualMemory& all = virtualMemory();
  std::lock_guard lock(all.mutex);
  for (auto& [handle, physical] : all.physical) {
    if (!physical.shared || physical.token != token) continue;
    ++physical.references;
    *out = handle;
    return CUDA_SUCCESS;
  }
  OpenedPhysical opened;
  const CUresult status = openPhysical(contextOn(0), token, opened);
  if (status != CUDA_SUCCESS) return status == CUDA_ERROR_INVALID_HANDLE ? CUDA_ERROR_INVALID_VALUE : status;
  Physical physical;
  physical.properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  physical.properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  physical.properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  physical.properties.location.id = opened.device;
  physical.bytes = opened.bytes;
  physical.shared = physical.opened = true;
  physical.token = token;
  all.physical[opened.name] = physical;
  *out = opened.name;
  return CUDA_SUCCESS;
}

}  // namespace custom
}  // namespace gpupool::client
