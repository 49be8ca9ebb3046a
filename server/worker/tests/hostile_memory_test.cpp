// What a session does with addresses that are not its own: nothing, and the client gets an error.
#include <sys/mman.h>

#include "server/worker/tests/client.h"

using namespace gpupool;
using namespace gpupool::server::test;

#define ROW(name) schema::RowOf<name>::id

TEST_CASE("copies touch nothing but the session's memory") {
  Client client;
  client.open();
  const uint64_t device = client.space().deviceBase, window = client.space().windowBytes;
  const uint64_t staging = client.hello.stagingAddress;
  auto* bytes = reinterpret_cast<unsigned char*>(staging);  // the worker is this process
  REQUIRE(
      client.await(ROW("sessionExtentMap"), Arguments().value(0).value(device).value(2 * kMiB)).status() ==
      CUDA_SUCCESS);
  std::vector<unsigned char> heap(4096, 0x5a);
  unsigned char stack[64];
  std::memset(stack, 0x5a, sizeof stack);
  const uint64_t heapAt = reinterpret_cast<uint64_t>(heap.data()),
                 stackAt = reinterpret_cast<uint64_t>(stack);
  auto copy = [&](uint32_t call, uint64_t to, uint64_t from, size_t n) {
    return client.await(call, Arguments().value(to).value(from).value(n).value(0)).status();
  };
  const uint32_t in = ROW("cuMemcpyHtoDAsync_v2"), out = ROW("cuMemcpyDtoHAsync_v2"),
                 on = ROW("cuMemcpyDtoDAsync_v2");
  const uint32_t set = ROW("cuMemsetD8Async");
  auto drain = [&] {
    REQUIRE(client.await(ROW("sessionDrain"), Arguments().value(0).value(1)).status() == CUDA_SUCCESS);
  };

  std::memset(bytes, 0x11, 64);
  CHECK(copy(in, device, staging, 64) == CUDA_SUCCESS);  // what is allowed moves
  CHECK(copy(out, staging + 4096, device, 64) == CUDA_SUCCESS);
  drain();
  CHECK(bytes[4096 + 63] == 0x11);

  for (uint64_t alien : {heapAt, stackAt, uint64_t{0}, staging + client.hello.stagingBytes - 8,
                         device + window, ~uint64_t{0} - 7}) {
    CAPTURE(alien);
    CHECK(copy(in, device, alien, 64) == CUDA_ERROR_INVALID_VALUE);
    CHECK(copy(out, alien, device, 64) == CUDA_ERROR_INVALID_VALUE);
    CHECK(copy(on, alien, device, 64) == CUDA_ERROR_INVALID_VALUE);
    CHECK(copy(on, device, alien, 64) == CUDA_ERROR_INVALID_VALUE);
    CHECK(copy(set, alien, 7, 64) == CUDA_ERROR_INVALID_VALUE);
  }
  CHECK(copy(in, device, staging, ~size_t{0}) == CUDA_ERROR_INVALID_VALUE);
  CHECK(copy(out, staging, device, client.hello.stagingBytes + 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(copy(in, device, device, 64) == CUDA_ERROR_INVALID_VALUE);  // a device address is no host address

  CHECK(copy(out, staging + 8192, device, 64) == CUDA_SUCCESS);
  drain();
  CHECK(std::memcmp(bytes + 8192, bytes, 64) == 0);
  CHECK(heap == std::vector<unsigned char>(4096, 0x5a));
  for (unsigned char byte : stack) CHECK(byte == 0x5a);
}

TEST_CASE("mirrors reach nothing but the session's host memory") {
  Client client;
  client.greet();
  std::vector<unsigned char> heap(64, 0x5a);
  const uint64_t heapAt = reinterpret_cast<uint64_t>(heap.data()), staging = client.hello.stagingAddress;
  auto apply = [&](uint64_t address, uint64_t offset) {
    schema::ByteBuffer run;
    run.value(offset);
    run.blob("12345678", 8);
    return client
        .awaitAside(ROW("sessionMirrorApply"),
                    Arguments().value(address).blob(run.span().data(), run.size()).value(run.size()))
        .status();
  };
  CHECK(apply(staging, 16) == CUDA_SUCCESS);
  CHECK(std::memcmp(reinterpret_cast<char*>(staging + 16), "12345678", 8) == 0);
  CHECK(apply(heapAt, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(apply(staging, heapAt - staging) == CUDA_ERROR_INVALID_VALUE);
  CHECK(apply(staging, client.hello.stagingBytes - 4) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client
            .awaitAside(ROW("sessionMirrorCollect"),
                        Arguments().value(heapAt).value(64).value(0).value(0).value(1).value(1).value(4096))
            .status() == CUDA_ERROR_INVALID_VALUE);
  CHECK(heap == std::vector<unsigned char>(64, 0x5a));
}

TEST_CASE("extents and host pieces stay in their windows") {
  Client client;
  client.open();
  const auto& space = client.space();
  auto extent = [&](uint64_t address, uint64_t bytes) {
    return client.await(ROW("sessionExtentMap"), Arguments().value(0).value(address).value(bytes)).status();
  };
  CHECK(extent(space.deviceBase + 4 * kMiB, 4 * kMiB) == CUDA_SUCCESS);
  CHECK(extent(space.deviceBase + 4 * kMiB, 4 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(extent(space.deviceBase + 6 * kMiB, 4 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(extent(space.deviceBase + 2 * kMiB, 4 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(extent(space.deviceBase + 4096, 2 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(extent(space.deviceBase, 4096) == CUDA_ERROR_INVALID_VALUE);
  CHECK(extent(space.deviceBase, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(extent(space.deviceBase - 2 * kMiB, 2 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(extent(space.deviceBase + space.windowBytes - 2 * kMiB, 4 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(extent(space.deviceBase + space.windowBytes, 2 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(extent(space.deviceBase + 8 * kMiB, ~uint64_t{0} - 2 * kMiB + 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(extent(space.deviceBase + 8 * kMiB, kLimit - 2 * kMiB) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(extent(space.deviceBase + 8 * kMiB, kLimit - 4 * kMiB) == CUDA_SUCCESS);
  CHECK(extent(space.deviceBase, 2 * kMiB) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(client.session->space().physicalBytes(0) == kLimit);

  // Physical memory by name: the same account, mapped often, gone with its name and its last mapping.
  auto unmap = [&](uint64_t address) {
    return client.await(ROW("sessionExtentUnmap"), Arguments().value(address)).status();
  };
  auto create = [&](uint64_t name, uint64_t bytes) {
    return client.await(ROW("sessionPhysicalCreate"), Arguments().value(0).value(name).value(bytes)).status();
  };
  auto map = [&](uint64_t name, uint64_t address) {
    return client.await(ROW("sessionPhysicalMap"), Arguments().value(name).value(address)).status();
  };
  auto access = [&](uint64_t address, uint64_t flags) {
    return client.await(ROW("sessionExtentAccess"), Arguments().value(address).value(0).value(flags))
        .status();
  };
  auto release = [&](uint64_t name) {
    return client.await(ROW("sessionPhysicalRelease"), Arguments().value(name)).status();
  };
  CHECK(create(7, 2 * kMiB) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(unmap(space.deviceBase + 8 * kMiB) == CUDA_SUCCESS);
  CHECK(unmap(space.deviceBase + 8 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(create(0, 2 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(create(7, 2 * kMiB + 4096) == CUDA_ERROR_INVALID_VALUE);
  CHECK(create(7, 2 * kMiB) == CUDA_SUCCESS);
  CHECK(create(7, 2 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(map(8, space.deviceBase + 16 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(map(7, space.deviceBase + 6 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(map(7, space.deviceBase - 2 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(map(7, space.deviceBase + 16 * kMiB) == CUDA_SUCCESS);
  CHECK(map(7, space.deviceBase + 18 * kMiB) == CUDA_SUCCESS);
  CHECK(access(space.deviceBase + 16 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE) == CUDA_SUCCESS);
  CHECK(access(space.deviceBase + 16 * kMiB, 77) != CUDA_SUCCESS);
  CHECK(access(space.deviceBase + 4 * kMiB, CU_MEM_ACCESS_FLAGS_PROT_NONE) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client.session->space().physicalBytes(0) == 6 * kMiB);
  CHECK(release(7) == CUDA_SUCCESS);
  CHECK(release(7) == CUDA_ERROR_INVALID_VALUE);
  CHECK(unmap(space.deviceBase + 16 * kMiB) == CUDA_SUCCESS);
  CHECK(client.session->space().physicalBytes(0) == 6 * kMiB);
  CHECK(unmap(space.deviceBase + 18 * kMiB) == CUDA_SUCCESS);
  CHECK(client.session->space().physicalBytes(0) == 4 * kMiB);

  auto host = [&](uint64_t address, uint64_t bytes) {
    return client.await(ROW("sessionHostMap"), Arguments().value(address).value(bytes).value(0).value(1))
        .status();
  };
  CHECK(host(space.hostBase + 4096, 8192) == CUDA_SUCCESS);
  CHECK(host(space.hostBase, 8192) == CUDA_ERROR_INVALID_VALUE);
  CHECK(host(space.hostBase + 8192, 4096) == CUDA_ERROR_INVALID_VALUE);
  CHECK(host(space.hostBase + 1, 4096) == CUDA_ERROR_INVALID_VALUE);
  CHECK(host(space.hostBase - 4096, 4096) == CUDA_ERROR_INVALID_VALUE);
  CHECK(host(space.hostBase + space.hostBytes, 4096) == CUDA_ERROR_INVALID_VALUE);
  CHECK(host(client.hello.stagingAddress, 4096) == CUDA_ERROR_INVALID_VALUE);
  CHECK(host(space.hostBase + 64 * kMiB, ~uint64_t{0} - 4095) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("pages of a file lie in the arena, and the worker's processor leaves them alone") {
  Client client;
  client.open();
  const schema::AddressSpace& space = client.space();
  const int file = memfd_create("file", MFD_CLOEXEC);
  REQUIRE(ftruncate(file, 16384) == 0);
  const auto pages = transport::SharedMemory::ofFile(dup(file), 4096, 8192, nullptr);
  const auto sealed = transport::SharedMemory::create(8192);
  const transport::Region region = client.wire->share(pages), other = client.wire->share(sealed);
  auto share = [&](uint64_t address, transport::Region shared) {
    return client
        .await(ROW("sessionHostShare"),
               Arguments().value(address).structure(schema::RegionName{shared.id, shared.generation}))
        .status();
  };
  CHECK(share(space.hostBase + 1, region) == CUDA_ERROR_INVALID_VALUE);
  CHECK(share(space.hostBase - 4096, region) == CUDA_ERROR_INVALID_VALUE);
  CHECK(share(space.hostBase + space.hostBytes - 4096, region) == CUDA_ERROR_INVALID_VALUE);
  CHECK(share(client.hello.stagingAddress, region) == CUDA_ERROR_INVALID_VALUE);
  CHECK(share(~uint64_t{0} - 4095, region) == CUDA_ERROR_INVALID_VALUE);
  CHECK(share(space.hostBase, {region.id, region.generation + 1}) == CUDA_ERROR_INVALID_VALUE);
  CHECK(share(space.hostBase, other) == CUDA_ERROR_NOT_SUPPORTED);
  CHECK(client.session->shared() == 0);
  REQUIRE(share(space.hostBase, region) == CUDA_SUCCESS);
  CHECK(share(space.hostBase + 4096, region) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client.session->shared() == 1);
  CHECK(client.session->whyShared() == std::string(server::Session::kSharesFiles));

  // Nobody's pages from here on: whoever touched one would end this process.
  REQUIRE(ftruncate(file, 0) == 0);
  schema::ByteBuffer run;
  run.value(uint64_t{16});
  run.blob("12345678", 8);
  CHECK(
      client
          .awaitAside(ROW("sessionMirrorApply"),
                      Arguments().value(space.hostBase).blob(run.span().data(), run.size()).value(run.size()))
          .status() == CUDA_ERROR_INVALID_VALUE);
  CHECK(client
            .awaitAside(
                ROW("sessionMirrorCollect"),
                Arguments().value(space.hostBase).value(64).value(0).value(0).value(1).value(1).value(4096))
            .status() == CUDA_ERROR_INVALID_VALUE);
  CHECK(share(space.hostBase + 64 * kMiB, region) == CUDA_ERROR_NOT_SUPPORTED);
  CHECK(client.await(ROW("sessionHostUnmap"), Arguments().value(space.hostBase)).status() == CUDA_SUCCESS);
  CHECK(client.session->shared() == 0);
  close(file);
}

TEST_CASE("graph nodes write nothing but the session's memory") {
  Client client;
  client.open();
  const uint64_t device = client.space().deviceBase;
  const uint64_t graph = makeHandle(handles::Kind::graph, 1, 1);
  REQUIRE(
      client.await(ROW("sessionExtentMap"), Arguments().value(0).value(device).value(2 * kMiB)).status() ==
      CUDA_SUCCESS);
  REQUIRE(client.await(ROW("cuGraphCreate"), Arguments().value(graph).value(0)).status() == CUDA_SUCCESS);
  std::vector<unsigned char> heap(4096, 0x5a);
  uint32_t next = 0;
  // A node without dependencies.
  auto add = [&](uint32_t call, const auto& parameters) {
    return client
        .await(call, Arguments()
                         .value(makeHandle(handles::Kind::graphNode, ++next, 1))
                         .value(graph)
                         .blob(nullptr, 0)
                         .value(0)
                         .value(1)
                         .structure(parameters)
                         .value(kContext))
        .status();
  };
  auto set = [&](uint64_t at, size_t pitch, size_t width, size_t height) {
    return add(ROW("cuGraphAddMemsetNode"), CUDA_MEMSET_NODE_PARAMS{at, pitch, 7, 1, width, height});
  };
  auto copy = [&](const CUDA_MEMCPY3D& p) { return add(ROW("cuGraphAddMemcpyNode"), p); };
  const uint64_t alien = reinterpret_cast<uint64_t>(heap.data());
  CHECK(set(device, 0, 64, 1) == CUDA_SUCCESS);
  CHECK(set(alien, 0, 64, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(set(device, client.space().windowBytes, 64, 2) == CUDA_ERROR_INVALID_VALUE);
  CHECK(set(device, ~size_t{0} / 2, 64, 4) == CUDA_ERROR_INVALID_VALUE);

  CUDA_MEMCPY3D p{};
  p.srcMemoryType = p.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  p.srcDevice = device;
  p.dstDevice = device + kMiB;
  p.WidthInBytes = 64;
  p.Height = p.Depth = 1;
  CHECK(copy(p) == CUDA_SUCCESS);
  SECTION("host memory that is not shared") {
    p.srcMemoryType = CU_MEMORYTYPE_HOST;
    p.srcHost = heap.data();
  }
  SECTION("a unified address of the worker's own") {
    p.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    p.dstDevice = alien;
  }
  SECTION("a start that wraps to where the session's memory lies") {
    p.srcPitch = 64;
    p.srcHeight = 1;
    p.srcZ = ~size_t{0} - 1;
    p.Depth = 4;
    p.srcDevice = device + uint64_t{64} * 2;
  }
  CHECK(copy(p) == CUDA_ERROR_INVALID_VALUE);
  CHECK(heap == std::vector<unsigned char>(4096, 0x5a));
}
