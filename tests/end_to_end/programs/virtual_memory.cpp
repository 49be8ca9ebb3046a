// Virtual memory management: a range made of several pieces of physical memory, access, handles that outlive
// their release, and what is refused; and textures asked for what they are made of. The driver API alone.
#include <unistd.h>

#include "driver_check.h"

constexpr size_t kPiece = size_t{4} << 20;

static CUmemAllocationProp onDevice(CUdevice device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  return properties;
}

static CUmemGenericAllocationHandle mapPiece(CUdeviceptr at, CUdevice device) {
  const CUmemAllocationProp properties = onDevice(device);
  CUmemGenericAllocationHandle handle;
  DRIVER(cuMemCreate(&handle, kPiece, &properties, 0));
  DRIVER(cuMemMap(at, kPiece, 0, handle, 0));
  return handle;
}

static void pieces(CUdevice device) {
  const CUmemAllocationProp properties = onDevice(device);
  size_t granularity = 0;
  DRIVER(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  REQUIRE(granularity != 0 && kPiece % granularity == 0);
  CUdeviceptr range;
  DRIVER(cuMemAddressReserve(&range, 4 * kPiece, 0, 0, 0));
  const CUmemGenericAllocationHandle first = mapPiece(range, device),
                                     second = mapPiece(range + kPiece, device);
  CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, {device}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  DRIVER(cuMemSetAccess(range, 2 * kPiece, &access, 1));
  unsigned long long flags = 0;
  DRIVER(cuMemGetAccess(&flags, &access.location, range + kPiece));
  REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

  // One copy and one memset across the boundary.
  std::vector<unsigned> numbers(2 * kPiece / 4), got(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<unsigned>(i * 2654435761u);
  DRIVER(cuMemcpyHtoD(range, numbers.data(), 2 * kPiece));
  DRIVER(cuMemsetD32(range + kPiece - 64, 7, 32));
  for (size_t i = 0; i < 32; ++i) numbers[kPiece / 4 - 16 + i] = 7;
  DRIVER(cuMemcpyDtoH(got.data(), range, 2 * kPiece));
  check::same("two pieces", got, numbers);

  // A released handle lives on in its mapping and can be had again from it.
  DRIVER(cuMemRelease(first));
  CUmemGenericAllocationHandle again;
  DRIVER(cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(range + 12345)));
  CUmemAllocationProp asked = {};
  DRIVER(cuMemGetAllocationPropertiesFromHandle(&asked, again));
  REQUIRE(asked.location.id == device);
  DRIVER(cuMemRelease(again));
  DRIVER(cuMemRelease(second));

  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(range, 4 * kPiece));
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(range, kPiece / 2));
  DRIVER(cuMemUnmap(range, 2 * kPiece));
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(got.data(), range, 16));
  // The same addresses take other memory.
  const CUmemGenericAllocationHandle third = mapPiece(range, device);
  DRIVER(cuMemSetAccess(range, kPiece, &access, 1));
  DRIVER(cuMemsetD32(range, 3, 4));
  DRIVER(cuMemcpyDtoH(got.data(), range, 16));
  REQUIRE(got[0] == 3 && got[3] == 3);
  DRIVER(cuMemUnmap(range, kPiece));
  DRIVER(cuMemRelease(third));
  DRIVER(cuMemAddressFree(range, 4 * kPiece));
}

static void expect(const char* name, CUdeviceptr at, unsigned value) {
  std::vector<unsigned> got(kPiece / 4), wanted(kPiece / 4, value);
  DRIVER(cuMemcpyDtoH(got.data(), at, kPiece));
  check::same(name, got, wanted);
}

// One piece of physical memory at several addresses. It outlives its handle and its first mapping.
static void aliases(CUdevice device) {
  const CUmemAllocationProp properties = onDevice(device);
  CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, {device}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUdeviceptr range;
  CUmemGenericAllocationHandle handle, other, again;
  DRIVER(cuMemAddressReserve(&range, 4 * kPiece, 0, 0, 0));
  DRIVER(cuMemCreate(&handle, kPiece, &properties, 0));
  DRIVER(cuMemCreate(&other, kPiece, &properties, 0));
  DRIVER_GIVES(CUDA_ERROR_NOT_SUPPORTED, cuMemMap(range, kPiece / 2, 0, handle, 0));
  DRIVER(cuMemMap(range, kPiece, 0, handle, 0));
  DRIVER_GIVES(CUDA_ERROR_INVALID_VALUE, cuMemMap(range, kPiece, 0, other, 0));
  DRIVER(cuMemMap(range + 2 * kPiece, kPiece, 0, handle, 0));
  unsigned long long flags = 77;
  DRIVER(cuMemGetAccess(&flags, &access.location, range));
  REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_NONE);
  DRIVER(cuMemSetAccess(range, kPiece, &access, 1));
  DRIVER(cuMemSetAccess(range + 2 * kPiece, kPiece, &access, 1));
  DRIVER(cuMemsetD32(range, 0x11111111, kPiece / 4));
  expect("written through one, read through the other", range + 2 * kPiece, 0x11111111);
  DRIVER(cuMemsetD32(range + 2 * kPiece, 0x22222222, kPiece / 4));
  expect("and the other way round", range, 0x22222222);

  DRIVER(cuMemUnmap(range, kPiece));
  DRIVER(cuMemRelease(handle));
  REQUIRE(cuMemRelease(handle) != CUDA_SUCCESS);
  expect("after its first mapping and its handle", range + 2 * kPiece, 0x22222222);
  DRIVER(cuMemRetainAllocationHandle(&again, reinterpret_cast<void*>(range + 2 * kPiece + 4096)));
  DRIVER(cuMemMap(range + 3 * kPiece, kPiece, 0, again, 0));
  DRIVER(cuMemSetAccess(range + 3 * kPiece, kPiece, &access, 1));
  DRIVER(cuMemUnmap(range + 2 * kPiece, kPiece));
  DRIVER(cuMemRelease(again));
  expect("by a handle that was had again", range + 3 * kPiece, 0x22222222);
  // Unmapped and held by its handle alone, it keeps what was written.
  DRIVER(cuMemMap(range, kPiece, 0, other, 0));
  DRIVER(cuMemSetAccess(range, kPiece, &access, 1));
  DRIVER(cuMemsetD32(range, 0x33333333, kPiece / 4));
  DRIVER(cuCtxSynchronize());  // unmapping waits for nothing
  DRIVER(cuMemUnmap(range, kPiece));
  DRIVER(cuMemMap(range + kPiece, kPiece, 0, other, 0));
  DRIVER(cuMemSetAccess(range + kPiece, kPiece, &access, 1));
  expect("mapped again elsewhere", range + kPiece, 0x33333333);
  DRIVER(cuMemUnmap(range + kPiece, kPiece));
  DRIVER(cuMemUnmap(range + 3 * kPiece, kPiece));
  DRIVER(cuMemRelease(other));
  DRIVER(cuMemAddressFree(range, 4 * kPiece));
}

// As growing allocators and collectives use it: memory of one device, opened to both, in a range that was
// reserved under the other. The last device may be the first.
static void acrossDevices() {
  int count = 0, possible = 1;
  DRIVER(cuDeviceGetCount(&count));
  const CUdevice owner = 0, peer = count - 1;
  if (peer != owner) DRIVER(cuDeviceCanAccessPeer(&possible, peer, owner));
  CUcontext ofOwner, ofPeer;
  DRIVER(cuDevicePrimaryCtxRetain(&ofOwner, owner));
  DRIVER(cuDevicePrimaryCtxRetain(&ofPeer, peer));
  DRIVER(cuCtxSetCurrent(ofPeer));
  const CUmemAllocationProp properties = onDevice(owner);
  CUmemAccessDesc access[2] = {{{CU_MEM_LOCATION_TYPE_DEVICE, {owner}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
                               {{CU_MEM_LOCATION_TYPE_DEVICE, {peer}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
  CUdeviceptr range;
  DRIVER(cuMemAddressReserve(&range, 2 * kPiece, 0, 0, 0));
  CUmemGenericAllocationHandle handle;
  DRIVER(cuMemCreate(&handle, kPiece, &properties, 0));
  DRIVER(cuMemMap(range, kPiece, 0, handle, 0));
  DRIVER(cuMemMap(range + kPiece, kPiece, 0, handle, 0));
  DRIVER(cuMemSetAccess(range, kPiece, access, 1));
  DRIVER(cuMemSetAccess(range + kPiece, kPiece, access, possible ? 2 : 1));
  unsigned long long flags = 0;
  DRIVER(cuMemGetAccess(&flags, &access[0].location, range + kPiece));
  REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  if (!possible) DRIVER(cuCtxSetCurrent(ofOwner));
  DRIVER(cuMemsetD32(range + kPiece, 0x44444444, kPiece / 4));
  DRIVER(cuCtxSynchronize());
  DRIVER(cuCtxSetCurrent(ofOwner));
  expect("written by the last device, read by the first", range, 0x44444444);
  DRIVER(cuMemUnmap(range, 2 * kPiece));
  DRIVER(cuMemRelease(handle));
  DRIVER(cuMemAddressFree(range, 2 * kPiece));
  DRIVER(cuDevicePrimaryCtxRelease(peer));
  DRIVER(cuDevicePrimaryCtxRelease(owner));
}

// NCCL asks for the granularity of the host's memory and goes on without it. A device that says it has no
// such memory makes none.
static void hostMemory(CUdevice device) {
  CUmemAllocationProp properties = onDevice(device);
  properties.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
  properties.location.id = 0;
  size_t granularity = 0;
  DRIVER(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  REQUIRE(granularity != 0 && (granularity & (granularity - 1)) == 0);
  int supported = 0;
  DRIVER(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                              device));
  CUmemGenericAllocationHandle handle;
  const CUresult made = cuMemCreate(&handle, granularity, &properties, 0);
  REQUIRE(supported != 0 || made != CUDA_SUCCESS);
  if (made == CUDA_SUCCESS) DRIVER(cuMemRelease(handle));
}

static void accounting(CUdevice device) {
  const CUmemAllocationProp properties = onDevice(device);
  size_t before = 0, during = 0, after = 0, total = 0;
  CUmemGenericAllocationHandle handle;
  DRIVER(cuMemGetInfo(&before, &total));
  DRIVER(cuMemCreate(&handle, 8 * kPiece, &properties, 0));
  DRIVER(cuMemGetInfo(&during, &total));
  DRIVER(cuMemRelease(handle));
  DRIVER(cuMemGetInfo(&after, &total));
  REQUIRE(before - during >= 8 * kPiece && after > during);
  DRIVER_GIVES(CUDA_ERROR_OUT_OF_MEMORY, cuMemCreate(&handle, total / kPiece * kPiece * 2, &properties, 0));
}

static void descriptors() {
  CUDA_ARRAY_DESCRIPTOR shape = {16, 8, CU_AD_FORMAT_FLOAT, 1}, told = {};
  CUarray array;
  DRIVER(cuArrayCreate(&array, &shape));
  DRIVER(cuArrayGetDescriptor(&told, array));
  REQUIRE(told.Width == 16 && told.Height == 8 && told.NumChannels == 1);
  CUDA_RESOURCE_DESC resource = {}, resourceTold = {};
  resource.resType = CU_RESOURCE_TYPE_ARRAY;
  resource.res.array.hArray = array;
  CUDA_TEXTURE_DESC texture = {}, textureTold = {};
  texture.filterMode = CU_TR_FILTER_MODE_LINEAR;
  CUtexObject object;
  DRIVER(cuTexObjectCreate(&object, &resource, &texture, nullptr));
  DRIVER(cuTexObjectGetResourceDesc(&resourceTold, object));
  DRIVER(cuTexObjectGetTextureDesc(&textureTold, object));
  REQUIRE(resourceTold.resType == CU_RESOURCE_TYPE_ARRAY && resourceTold.res.array.hArray == array);
  REQUIRE(textureTold.filterMode == CU_TR_FILTER_MODE_LINEAR);
  DRIVER(cuTexObjectDestroy(object));
  DRIVER(cuArrayDestroy(array));
}

// Memory is created and exported without a context, too: the last one on the stack has ended.
void withoutContext(CUdevice device) {
  CUcontext contexts[2];
  for (CUcontext& context : contexts) DRIVER(cuCtxCreate(&context, nullptr, 0, device));
  for (CUcontext context : contexts) DRIVER(cuCtxDestroy(context));
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  size_t bytes = 0;
  DRIVER(cuMemGetAllocationGranularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  CUmemGenericAllocationHandle handle = 0;
  int descriptor = -1;
  DRIVER(cuMemCreate(&handle, bytes, &properties, 0));
  DRIVER(cuMemExportToShareableHandle(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  REQUIRE(descriptor >= 0);
  close(descriptor);
  DRIVER(cuMemRelease(handle));
}

// Mapped and open to no device: copies are refused, and nothing else fails for it.
static void closedToAll(CUdevice device, CUcontext context) {
  CUmemAllocationProp properties = onDevice(device);
  size_t bytes = 0;
  DRIVER(cuMemGetAllocationGranularity(&bytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr closed = 0, open = 0;
  DRIVER(cuMemCreate(&handle, bytes, &properties, 0));
  DRIVER(cuMemAddressReserve(&closed, bytes, 0, 0, 0));
  DRIVER(cuMemMap(closed, bytes, 0, handle, 0));
  DRIVER(cuMemAlloc(&open, 64));
  REQUIRE(cuMemcpyDtoD(open, closed, 64) == CUDA_ERROR_INVALID_VALUE);
  REQUIRE(cuMemcpyPeer(open, context, closed, context, 64) == CUDA_ERROR_INVALID_VALUE);
  REQUIRE(cuMemsetD8(closed, 0, 64) == CUDA_ERROR_INVALID_VALUE);
  DRIVER(cuMemsetD8(open, 1, 64));
  DRIVER(cuCtxSynchronize());
  DRIVER(cuMemFree(open));
  DRIVER(cuMemUnmap(closed, bytes));
  DRIVER(cuMemAddressFree(closed, bytes));
  DRIVER(cuMemRelease(handle));
}

int main() {
  CUdevice device;
  CUcontext context;
  DRIVER(cuInit(0));
  DRIVER(cuDeviceGet(&device, 0));
  withoutContext(device);
  DRIVER(cuDevicePrimaryCtxRetain(&context, device));
  DRIVER(cuCtxSetCurrent(context));
  pieces(device);
  aliases(device);
  closedToAll(device, context);
  acrossDevices();
  hostMemory(device);
  accounting(device);
  descriptors();
  DRIVER(cuDevicePrimaryCtxRelease(device));
  return check::pass();
}
