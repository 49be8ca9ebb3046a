// Driver manual: Virtual Memory Management.
#include "server/softgpu/api/virtual_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <string>

#include "server/softgpu/address_plan.h"
#include "server/softgpu/api/pool.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu::api {
namespace {

constexpr uint64_t kGranularity = 2 << 20;

struct Reservations {
  std::mutex mutex;
  std::map<uint64_t, uint64_t> ranges;  // base -> bytes
  uint64_t cursor = addressPlan().reservations;

  bool contain(uint64_t address, uint64_t bytes) const {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return false;
    auto& [base, size] = *std::prev(after);
    return address - base <= size && bytes <= size - (address - base);
  }
};
Reservations& reservations() {
  static auto* const instance = new Reservations;
  return *instance;
}

bool aligned(uint64_t value) { return value % kGranularity == 0; }

uint64_t up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

uint64_t reserve(uint64_t hint, uint64_t bytes, uint64_t alignment) {
  if (hint && hint % alignment == 0) {
    if (uint64_t got = reserveAddresses(hint, bytes, true)) return got;
  }
  auto& all = reservations();
  constexpr int kTries = 64;
  for (int i = 0; i < 2 * kTries; ++i) {
    // Nothing that follows is free (ThreadSanitizer leaves little): what was given back at the front is.
    if (i == kTries) all.cursor = addressPlan().reservations;
    uint64_t at = up(all.cursor, alignment);
    all.cursor = at + up(bytes, alignment);
    if (uint64_t got = reserveAddresses(at, bytes, true)) return got;
  }
  return 0;
}

CUresult checkLocation(const CUmemLocation& location) {
  switch (location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return findDevice(location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult checkProperties(const CUmemAllocationProp* properties) {
  if (!properties || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  if (properties->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    return CUDA_ERROR_NOT_SUPPORTED;
  return checkLocation(properties->location);
}

int protection(CUmemAccess_flags flags) {
  switch (flags) {
    case CU_MEM_ACCESS_FLAGS_PROT_READ:
      return PROT_READ;
    case CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
      return PROT_READ | PROT_WRITE;
    default:
      return PROT_NONE;
  }
}

// The mappings that make up [address, address + bytes) exactly; empty if they do not.
std::vector<AllocationPtr> wholeMappings(uint64_t address, uint64_t bytes) {
  auto found = addresses().overlapping(address, bytes);
  uint64_t at = address;
  for (auto& mapping : found) {
    if (mapping->kind != Allocation::Kind::mapped || mapping->base != at) return {};
    at += mapping->size;
  }
  return at == address + bytes ? found : std::vector<AllocationPtr>{};
}

// Another process learns from the file's name whose memory it is, by the device's PCI bus (ordinals differ
// from process to process).
constexpr char kMemoryName[] = "gpupool-soft-";
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// Of a size that nobody can change, or whoever maps it could be made to fault.
int createMemory(uint64_t bytes, const Device* device) {
  const std::string name = kMemoryName + (device ? std::to_string(device->pciBus()) : "host");
  const int descriptor = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return -1;
  if (ftruncate(descriptor, off_t(bytes)) == 0 && fcntl(descriptor, F_ADD_SEALS, kSeals) == 0)
    return descriptor;
  close(descriptor);
  return -1;
}

// What cuMemExportToShareableHandle gives, and nothing else that a process may pass for it. Huge pages would
// have memory of their own, which may be used up.
bool isMemory(int descriptor, uint64_t& bytes) {
  struct stat status{};
  struct statfs system{};
  constexpr decltype(system.f_type) kTmpfs = 0x01021994;
  if (fstat(descriptor, &status) || status.st_size <= 0 || !aligned(uint64_t(status.st_size))) return false;
  if (fstatfs(descriptor, &system) || system.f_type != kTmpfs) return false;
  const int seals = fcntl(descriptor, F_GET_SEALS);
  bytes = uint64_t(status.st_size);
  return seals >= 0 && (seals & kSeals) == kSeals;
}

CUmemLocation locationOf(int descriptor) {
  char target[PATH_MAX] = "";
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  const ssize_t length = readlink(link.c_str(), target, sizeof target - 1);
  const std::string name(target, size_t(std::max<ssize_t>(length, 0)));
  const size_t at = name.find(kMemoryName);
  if (at == std::string::npos) return {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  const std::string owner = name.substr(at + sizeof kMemoryName - 1);
  if (owner.starts_with("host")) return {CU_MEM_LOCATION_TYPE_HOST, {0}};
  for (const auto& device : devices())
    if (device->pciBus() == std::atoi(owner.c_str()))
      return {CU_MEM_LOCATION_TYPE_DEVICE, {device->ordinal()}};
  return {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
}

std::mutex& referenceMutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

// Kernels of any device may use what one may: all devices are one process here. Copies are checked.
void openTo(Allocation& mapping, const CUmemAccessDesc& description) {
  if (description.location.type != CU_MEM_LOCATION_TYPE_DEVICE) return;
  const uint64_t bit = uint64_t{1} << (description.location.id & 63);
  if (description.flags == CU_MEM_ACCESS_FLAGS_PROT_NONE)
    mapping.openTo &= ~bit;
  else
    mapping.openTo |= bit;
}

}  // namespace

Physical::~Physical() {
  if (descriptor >= 0) close(descriptor);
  if (charged >= 0) devices()[size_t(charged)]->release(size);
}

}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu;
using namespace gpupool::softgpu::api;

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!granularity || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(checkProperties(properties));
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out || !bytes || !aligned(bytes) || flags) return CUDA_ERROR_INVALID_VALUE;
  if (alignment & (alignment - 1)) return CUDA_ERROR_INVALID_VALUE;
  auto& all = reservations();
  std::lock_guard lock(all.mutex);
  uint64_t base = reserve(hint, bytes, std::max<uint64_t>(alignment, kGranularity));
  if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
  all.ranges[base] = bytes;
  *out = base;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  auto& all = reservations();
  std::lock_guard lock(all.mutex);
  auto range = all.ranges.find(address);
  if (range == all.ranges.end() || range->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  if (!addresses().overlapping(address, bytes).empty()) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(address), bytes);
  all.ranges.erase(range);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out || !bytes || !aligned(bytes) || flags) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(checkProperties(properties));
  auto physical = std::make_shared<Physical>();
  physical->properties = *properties;
  physical->size = bytes;
  if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
    Device& device = *findDevice(properties->location.id);
    if (!device.reserve(bytes)) {
      trimPools(device.ordinal());
      if (!device.reserve(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    }
    physical->charged = properties->location.id;
  }
  physical->descriptor = createMemory(bytes, physical->charged < 0 ? nullptr : findDevice(physical->charged));
  if (physical->descriptor < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = table<Physical>().add(physical);
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  std::lock_guard lock(referenceMutex());
  auto physical = table<Physical>().find(handle);
  if (!physical) return CUDA_ERROR_INVALID_VALUE;
  // Mappings keep the memory.
  if (--physical->references == 0) table<Physical>().take(handle);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (flags || !bytes || !aligned(bytes) || !aligned(address)) return CUDA_ERROR_INVALID_VALUE;
  auto physical = table<Physical>().find(handle);
  if (!physical) return CUDA_ERROR_INVALID_VALUE;
  if (offset || bytes != physical->size) return CUDA_ERROR_NOT_SUPPORTED;  // extents are indivisible
  auto& all = reservations();
  std::lock_guard lock(all.mutex);
  if (!all.contain(address, bytes) || !addresses().overlapping(address, bytes).empty()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  void* got = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                   physical->descriptor, 0);
  if (got == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  auto mapping = std::make_shared<Allocation>();
  mapping->kind = Allocation::Kind::mapped;
  mapping->base = address;
  mapping->size = bytes;
  const auto& location = physical->properties.location;
  mapping->device = location.type == CU_MEM_LOCATION_TYPE_DEVICE ? location.id : 0;
  mapping->readable = mapping->writable = false;
  mapping->physical = physical;
  markVisible(address, bytes);
  addresses().insert(mapping);
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  auto& all = reservations();
  std::lock_guard lock(all.mutex);
  auto mappings = wholeMappings(address, bytes);
  if (mappings.empty()) return CUDA_ERROR_INVALID_VALUE;
  std::unique_lock unmapping(unmapMutex());
  ++unmapGeneration();
  for (auto& mapping : mappings) {
    addresses().take(mapping->base);
    unmarkVisible(mapping->base, mapping->size);
  }
  void* const reserved = mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return reserved == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* descriptions,
                        size_t count) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!descriptions || !count) return CUDA_ERROR_INVALID_VALUE;
  auto& all = reservations();
  std::lock_guard lock(all.mutex);
  auto mappings = wholeMappings(address, bytes);
  if (mappings.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    SOFT_TRY(checkLocation(descriptions[i].location));
    auto flags = descriptions[i].flags;
    if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  // All devices are one process here: the widest access that some device of the list gets.
  int wanted = PROT_NONE;
  for (size_t i = 0; i < count; ++i) wanted |= protection(descriptions[i].flags);
  std::unique_lock changing(unmapMutex());
  ++unmapGeneration();
  if (mprotect(reinterpret_cast<void*>(address), bytes, wanted)) return CUDA_ERROR_OUT_OF_MEMORY;
  for (auto& mapping : mappings) {
    mapping->readable = wanted & PROT_READ;
    mapping->writable = wanted & PROT_WRITE;
    for (size_t i = 0; i < count; ++i) openTo(*mapping, descriptions[i]);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!flags || !location) return CUDA_ERROR_INVALID_VALUE;
  SOFT_TRY(checkLocation(*location));
  auto mapping = addresses().find(address);
  if (!mapping || mapping->kind != Allocation::Kind::mapped) return CUDA_ERROR_INVALID_VALUE;
  *flags = mapping->writable   ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
           : mapping->readable ? CU_MEM_ACCESS_FLAGS_PROT_READ
                               : CU_MEM_ACCESS_FLAGS_PROT_NONE;
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out || flags) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  auto physical = table<Physical>().find(handle);
  if (!physical || !(physical->properties.requestedHandleTypes & type)) return CUDA_ERROR_INVALID_VALUE;
  int copy = fcntl(physical->descriptor, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(out) = copy;
  return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* osHandle,
                                        CUmemAllocationHandleType type) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  int descriptor = int(reinterpret_cast<intptr_t>(osHandle));
  uint64_t bytes = 0;
  if (!isMemory(descriptor, bytes)) return CUDA_ERROR_INVALID_VALUE;
  // Charged to nobody here: the process that made it has it on its account.
  auto physical = std::make_shared<Physical>();
  physical->properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  physical->properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  physical->properties.location = locationOf(descriptor);
  physical->size = bytes;
  physical->descriptor = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (physical->descriptor < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *out = table<Physical>().add(physical);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                CUmemGenericAllocationHandle handle) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!properties) return CUDA_ERROR_INVALID_VALUE;
  auto physical = table<Physical>().find(handle);
  if (!physical) return CUDA_ERROR_INVALID_VALUE;
  *properties = physical->properties;
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* pointer) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  auto mapping = addresses().find(reinterpret_cast<uint64_t>(pointer));
  if (!mapping || !mapping->physical) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(referenceMutex());
  auto& physical = mapping->physical;
  if (!table<Physical>().find(physical->handle)) {
    physical->references = 0;  // released by everybody, alive by its mapping
    table<Physical>().add(physical);
  }
  ++physical->references;
  *out = physical->handle;
  return CUDA_SUCCESS;
}

CUresult cuMemGetHandleForAddressRange(void*, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  return CUDA_ERROR_NOT_SUPPORTED;
}
