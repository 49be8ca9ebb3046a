// Memory of every kind, copies, sets, pointer attributes.
#include <sys/mman.h>
#include <unistd.h>

#include "addresses.h"
#include "api_support.h"

using namespace apitest;

TEST_CASE("device memory: copies there and back, ranges, errors") {
  Session session;
  CUdeviceptr p = 0, base = 0;
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&p, 0));
  OK(cuMemFree(0));
  OK(cuMemAlloc(&p, 1000));
  CHECK(p % 256 == 0);
  std::vector<unsigned char> in(1000), out(1000);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i * 7);
  OK(cuMemcpyHtoD(p, in.data(), 1000));
  OK(cuMemcpyDtoH(out.data(), p, 1000));
  CHECK(in == out);
  size_t size = 0;
  OK(cuMemGetAddressRange(&base, &size, p + 500));
  CHECK(base == p);
  CHECK(size == 1000);
  OK(cuMemFree(p));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemFree(p));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(out.data(), p, 10));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD(64, in.data(), 10));
}

TEST_CASE("out of memory is exact and leaves the context well") {
  Session session;
  size_t free = 0, total = 0, now = 0;
  OK(cuMemGetInfo(&free, &total));
  CHECK(free <= total);
  CUdeviceptr p = 0, q = 0;
  GIVES(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&p, total + 1));
  GIVES(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&p, size_t(1) << 60));
  OK(cuMemAlloc(&p, free / 2));
  OK(cuMemGetInfo(&now, &total));
  CHECK(now <= free - free / 2);
  GIVES(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&q, free / 2 + (64 << 20)));
  OK(cuMemFree(p));
  OK(cuMemGetInfo(&now, &total));
  CHECK(now == free);
}

TEST_CASE("memory sets of every width, in rows and in streams") {
  Session session;
  Buffer<uint32_t> b(64);
  OK(cuMemsetD32(b.address, 0x01020304, 64));
  CHECK(b.get()[63] == 0x01020304);
  OK(cuMemsetD8(b.address + 1, 0xff, 2));
  CHECK(b.get()[0] == 0x01ffff04);
  OK(cuMemsetD16(b.address + 8, 0xabcd, 3));
  CHECK(b.get()[2] == 0xabcdabcd);
  CHECK(b.get()[3] == 0x0102abcd);
  OK(cuMemsetD2D8(b.address, 16, 0x11, 4, 3));
  CHECK(b.get()[4] == 0x11111111);
  CHECK(b.get()[5] == 0x01020304);
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemsetD32(b.address + 2, 0, 1));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemsetD2D32(b.address, 8, 0, 4, 2));
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  OK(cuMemsetD32Async(b.address, 9, 64, stream));
  OK(cuStreamSynchronize(stream));
  CHECK(b.get()[0] == 9);
  OK(cuStreamDestroy(stream));
}

TEST_CASE("two- and three-dimensional copies") {
  Session session;
  CUdeviceptr p;
  size_t pitch;
  OK(cuMemAllocPitch(&p, &pitch, 20, 8, 4));
  CHECK(pitch >= 20);
  std::vector<unsigned char> in(160), out(40);  // 20 by 8, 10 by 4
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<unsigned char>(i);
  CUDA_MEMCPY2D c{};
  c.srcMemoryType = CU_MEMORYTYPE_HOST;
  c.srcHost = in.data();
  c.srcPitch = 20;
  c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  c.dstDevice = p;
  c.dstPitch = pitch;
  c.WidthInBytes = 20;
  c.Height = 8;
  OK(cuMemcpy2D(&c));
  CUDA_MEMCPY2D d{};
  d.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  d.srcDevice = p;
  d.srcPitch = pitch;
  d.srcXInBytes = 5;
  d.srcY = 2;
  d.dstMemoryType = CU_MEMORYTYPE_HOST;
  d.dstHost = out.data();
  d.dstPitch = 10;
  d.WidthInBytes = 10;
  d.Height = 4;
  OK(cuMemcpy2D(&d));
  CHECK(out[0] == 45);
  CHECK(out[39] == 5 * 20 + 14);
  d.dstPitch = 4;
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemcpy2D(&d));
  CUDA_MEMCPY3D e{};
  std::vector<unsigned char> cube(24);  // 2 by 3 by 4
  e.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  e.srcDevice = p;
  e.srcPitch = pitch;
  e.srcHeight = 4;
  e.dstMemoryType = CU_MEMORYTYPE_HOST;
  e.dstHost = cube.data();
  e.dstPitch = 4;
  e.dstHeight = 3;
  e.WidthInBytes = 4;
  e.Height = 3;
  e.Depth = 2;
  OK(cuMemcpy3D(&e));
  CHECK(cube[4] == 20);
  CHECK(cube[12] == 80);
  OK(cuMemFree(p));
}

TEST_CASE("arrays: copies, descriptors, bounds") {
  Session session;
  CUDA_ARRAY3D_DESCRIPTOR d{};
  d.Width = 8;
  d.Height = 4;
  d.Format = CU_AD_FORMAT_UNSIGNED_INT8;
  d.NumChannels = 4;
  CUarray array;
  OK(cuArray3DCreate(&array, &d));
  CUDA_ARRAY3D_DESCRIPTOR back{};
  OK(cuArray3DGetDescriptor(&back, array));
  CHECK(back.Width == 8);
  CHECK(back.NumChannels == 4);
  std::vector<uint32_t> in(32), out(32);
  for (size_t i = 0; i < 32; ++i) in[i] = uint32_t(i * i);
  CUDA_MEMCPY3D c{};
  c.srcMemoryType = CU_MEMORYTYPE_HOST;
  c.srcHost = in.data();
  c.srcPitch = 32;
  c.dstMemoryType = CU_MEMORYTYPE_ARRAY;
  c.dstArray = array;
  c.WidthInBytes = 32;
  c.Height = 4;
  c.Depth = 1;
  OK(cuMemcpy3D(&c));
  CUDA_MEMCPY3D e{};
  e.srcMemoryType = CU_MEMORYTYPE_ARRAY;
  e.srcArray = array;
  e.dstMemoryType = CU_MEMORYTYPE_HOST;
  e.dstHost = out.data();
  e.dstPitch = 32;
  e.WidthInBytes = 32;
  e.Height = 4;
  e.Depth = 1;
  OK(cuMemcpy3D(&e));
  CHECK(in == out);
  e.Height = 5;
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemcpy3D(&e));
  d.NumChannels = 3;
  CUarray bad;
  GIVES(CUDA_ERROR_INVALID_VALUE, cuArray3DCreate(&bad, &d));
  OK(cuArrayDestroy(array));
}

TEST_CASE("pinned, registered and managed memory have one address on both sides") {
  Session session;
  void* pinned = nullptr;
  OK(cuMemHostAlloc(&pinned, 5000, CU_MEMHOSTALLOC_PORTABLE));
  CUdeviceptr device = 0;
  OK(cuMemHostGetDevicePointer(&device, pinned, 0));
  CHECK(device == reinterpret_cast<CUdeviceptr>(pinned));
  unsigned flags = 0;
  OK(cuMemHostGetFlags(&flags, pinned));
  CHECK((flags & CU_MEMHOSTALLOC_PORTABLE) != 0);
  unsigned type = 0;
  OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device));
  CHECK(type == CU_MEMORYTYPE_HOST);
  OK(cuMemFreeHost(pinned));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(pinned));

  int fd = memfd_create("api-test", 0);
  REQUIRE(ftruncate(fd, 1 << 20) == 0);
  void* at = mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  REQUIRE(at != MAP_FAILED);
  OK(cuMemHostRegister(at, 1 << 20, CU_MEMHOSTREGISTER_DEVICEMAP));
  GIVES(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister(at, 1 << 20, 0));
  OK(launch(session.function("addTo"), 1, 0, nullptr, reinterpret_cast<CUdeviceptr>(at), 42));
  OK(cuCtxSynchronize());
  CHECK(*static_cast<int*>(at) == 42);
  OK(cuMemHostUnregister(at));
  GIVES(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(at));
  munmap(at, 1 << 20);
  close(fd);

  CUdeviceptr managed = 0;
  OK(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
  auto* word = reinterpret_cast<int*>(managed);
  *word = 3;
  OK(launch(session.function("addTo"), 2, 0, nullptr, managed, 10));
  OK(cuCtxSynchronize());
  CHECK(*word == 23);
  unsigned isManaged = 0;
  OK(cuPointerGetAttribute(&isManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED, managed));
  CHECK(isManaged == 1);
  OK(cuMemFree(managed));
}

TEST_CASE("attributes of a pointer nobody knows are nulls, not an error") {
  Session session;
  int local = 0;
  unsigned type = 7, managed = 7;
  CUdeviceptr device = 7;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                  CU_POINTER_ATTRIBUTE_IS_MANAGED};
  void* out[] = {&type, &device, &managed};
  OK(cuPointerGetAttributes(3, wanted, out, reinterpret_cast<CUdeviceptr>(&local)));
  CHECK(type == 0);
  CHECK(device == 0);
  CHECK(managed == 0);
  GIVES(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                        reinterpret_cast<CUdeviceptr>(&local)));
}

TEST_CASE("virtual memory: reserve at a hint, map, share, unmap") {
  Session session;
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  size_t grain = 0;
  OK(cuMemGetAllocationGranularity(&grain, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  CHECK(grain == 2 << 20);
  CUdeviceptr window = 0, second = 0;
  const CUdeviceptr hint = gpupool::softgpu::test::kUnusedAddresses;
  OK(cuMemAddressReserve(&window, 64 * grain, 0, hint, 0));
  CHECK(window == hint);
  OK(cuMemAddressReserve(&second, grain, 0, hint, 0));
  CHECK(second != hint);
  OK(cuMemAddressFree(second, grain));
  CUmemGenericAllocationHandle handle = 0;
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&handle, grain / 2, &prop, 0));
  OK(cuMemCreate(&handle, 2 * grain, &prop, 0));
  OK(cuMemMap(window, 2 * grain, 0, handle, 0));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemMap(window, 2 * grain, 0, handle, 0));
  std::vector<int> in(1000, 77), out(1000);
  CUmemAccessDesc access{};
  access.location = prop.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  OK(cuMemSetAccess(window, 2 * grain, &access, 1));
  OK(cuMemcpyHtoD(window, in.data(), 4000));
  // The same memory a second time.
  OK(cuMemMap(window + 4 * grain, 2 * grain, 0, handle, 0));
  OK(cuMemSetAccess(window + 4 * grain, 2 * grain, &access, 1));
  OK(cuMemcpyDtoH(out.data(), window + 4 * grain, 4000));
  CHECK(out == in);
  int fd = -1;
  OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  CUmemGenericAllocationHandle imported = 0;
  OK(cuMemImportFromShareableHandle(&imported, reinterpret_cast<void*>(intptr_t(fd)),
                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  close(fd);
  OK(cuMemMap(window + 8 * grain, 2 * grain, 0, imported, 0));
  OK(cuMemSetAccess(window + 8 * grain, 2 * grain, &access, 1));
  OK(launch(session.function("addTo"), 1, 0, nullptr, window + 8 * grain, 1));
  OK(cuMemcpyDtoH(out.data(), window, 4));
  CHECK(out[0] == 78);
  OK(cuMemRelease(handle));
  OK(cuMemRelease(imported));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(window, grain));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(window, 64 * grain));
  for (int i = 0; i < 3; ++i) OK(cuMemUnmap(window + CUdeviceptr(i) * 4 * grain, 2 * grain));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(out.data(), window, 4));
  OK(cuMemAddressFree(window, 64 * grain));
}

TEST_CASE("virtual memory: addresses that were given back are reserved again, however often") {
  Session session;
  constexpr size_t kBytes = size_t{64} << 30;  // more than a process's addresses hold so many of
  for (int i = 0; i < 4000; ++i) {
    CUdeviceptr address = 0;
    REQUIRE(cuMemAddressReserve(&address, kBytes, 0, 0, 0) == CUDA_SUCCESS);
    REQUIRE(cuMemAddressFree(address, kBytes) == CUDA_SUCCESS);
  }
}

TEST_CASE("stream-ordered memory and pools") {
  Session session;
  CUstream stream;
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  CUmemoryPool pool = nullptr;
  OK(cuDeviceGetDefaultMemPool(&pool, 0));
  CUdeviceptr p = 0;
  OK(cuMemAllocAsync(&p, 4096, stream));
  OK(cuMemsetD32Async(p, 5, 1024, stream));
  OK(launch(session.function("addTo"), 4, 0, stream, p, 2));
  int value = 0;
  OK(cuMemcpyDtoHAsync(&value, p, 4, stream));
  uint64_t used = 0;
  OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
  CHECK(used >= 4096);
  OK(cuMemFreeAsync(p, stream));
  OK(cuStreamSynchronize(stream));
  CHECK(value == 13);
  OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
  CHECK(used == 0);
  uint64_t threshold = 1 << 20;
  OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
  threshold = 0;
  OK(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
  CHECK(threshold == 1 << 20);
  CUmemPoolProps props{};
  props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemoryPool own = nullptr;
  OK(cuMemPoolCreate(&own, &props));
  OK(cuMemAllocFromPoolAsync(&p, 100, own, stream));
  CUmemoryPool of = nullptr;
  OK(cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, p));
  CHECK(of == own);
  OK(cuMemFreeAsync(p, stream));
  OK(cuMemPoolDestroy(own));
  OK(cuStreamSynchronize(stream));
  OK(cuStreamDestroy(stream));
}
