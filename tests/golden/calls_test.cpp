// The bytes of some calls: written by the client's codec, pinned, and read back by the worker's. All roles
// that travel are among them.
#include <array>
#include <cstring>

#include "catch.h"
#include "client/codec.h"
#include "server/worker/codec.h"
#include "tests/golden/golden.h"

// Which devices are visible is the session's business; here all are, in order.
int gpupool::client::sessionDevice(CUdevice device) { return device; }

using namespace gpupool;
using handles::Kind;
using schema::RowOf;

namespace {

template <class T>
T handle(Kind kind, uint32_t index) {
  return reinterpret_cast<T>(handles::makeHandle(kind, index, 0));
}

// The driver's own handle for the object of that index: what the worker must pass on.
template <class T>
T real(uint32_t index) {
  return reinterpret_cast<T>(uintptr_t{0x10000} + uintptr_t{index} * 16);
}

void addSomeObjects(server::Objects& objects) {
  objects.mint(handles::makeHandle(Kind::stream, 1, 0), real<CUstream>(1));
  objects.mint(handles::makeHandle(Kind::event, 2, 0), real<CUevent>(2));
  objects.mint(handles::makeHandle(Kind::function, 3, 0), real<CUfunction>(3));
  objects.mint(handles::makeHandle(Kind::graph, 4, 0), real<CUgraph>(4));
  objects.mint(handles::makeHandle(Kind::graphNode, 5, 0), real<CUgraphNode>(5));
  objects.mint(handles::makeHandle(Kind::graphNode, 6, 0), real<CUgraphNode>(6));
  objects.mint(handles::makeHandle(Kind::context, 7, 0), real<CUcontext>(7));
  objects.mint(handles::makeHandle(Kind::greenContext, 8, 0), real<CUgreenCtx>(8));
}

// Encodes a call, pins its bytes, decodes the golden ones, and calls `driver` as the worker would.
template <schema::Name N, class F, class... A>
void call(const std::string& what, F&& driver, A... arguments) {
  using R = RowOf<N>;
  const std::string name(N.view());
  INFO(name);
  const typename R::Arguments all{arguments...};
  std::vector<std::byte> bytes(client::RowCodec<R>::measure(all), std::byte{0xFF});
  schema::Writer out(bytes.data(), bytes.size());
  client::RowCodec<R>::encode(out, all);
  CHECK_FALSE(out.overflow());
  CHECK(out.size() == bytes.size());
  const auto pinned = golden::pinned(name, name + ": " + what, bytes);

  server::Objects objects({CUdevice{7}, CUdevice{9}});
  addSomeObjects(objects);
  server::Arguments<R> decoded;
  schema::Reader in(pinned);
  REQUIRE(decoded.read(in, objects));
  CHECK(in.remaining() == 0);
  CHECK(decoded.wrong() == CUDA_SUCCESS);
  CHECK(decoded.call(driver) == CUDA_SUCCESS);
  // Every byte counts: a frame cut anywhere is refused.
  for (size_t size = 0; size + 8 <= pinned.size(); size += 8) {
    server::Arguments<R> cut;
    schema::Reader less({pinned.data(), size});
    CHECK_FALSE(cut.read(less, objects));
  }
}

}  // namespace

TEST_CASE("names on the wire") {
  // FNV-1a of the call's name; the server knows calls by nothing else.
  CHECK(RowOf<"cuMemsetD32Async">::id == schema::fnv32("cuMemsetD32Async"));
  CHECK(schema::fnv32("") == 0x811C9DC5);
  CHECK(schema::fnv32("a") == 0xE40C292C);
  const uint32_t ids[] = {RowOf<"cuMemsetD32Async">::id, RowOf<"sessionLaunch">::id,
                          RowOf<"sessionEventRecord">::id, RowOf<"sessionGraphAddKernelNode">::id,
                          RowOf<"sessionExtentMap">::id};
  golden::pinned("call_ids",
                 "ids of cuMemsetD32Async, sessionLaunch, sessionEventRecord, sessionGraphAddKernelNode, "
                 "sessionExtentMap",
                 std::as_bytes(std::span(ids)));
}

TEST_CASE("a memset") {
  call<"cuMemsetD32Async">(
      "address, value, count, stream",
      [](CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
        CHECK(address == 0x200000001000);
        CHECK(value == 0xDEADBEEF);
        CHECK(count == 1000);
        CHECK(stream == real<CUstream>(1));
        return CUDA_SUCCESS;
      },
      CUdeviceptr{0x200000001000}, 0xDEADBEEFu, size_t{1000}, handle<CUstream>(Kind::stream, 1));
}

TEST_CASE("a launch") {
  const unsigned char parameters[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  schema::LaunchAttribute attribute;
  std::memset(&attribute, 0, sizeof attribute);
  attribute.id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
  attribute.value.priority = -3;
  call<"sessionLaunch">(
      "function, stream, shape (grid, block, shared bytes, cooperative), parameters, attributes",
      [&](CUfunction function, CUstream stream, schema::LaunchShape shape, const unsigned char* bytes,
          size_t size, const schema::LaunchAttribute* attributes, unsigned count) {
        CHECK(function == real<CUfunction>(3));
        CHECK(stream == nullptr);
        CHECK(shape.grid[2] == 3);
        CHECK(shape.block[0] == 128);
        CHECK(shape.sharedBytes == 4096);
        CHECK(shape.cooperative == 1);
        REQUIRE(size == sizeof parameters);
        CHECK(std::memcmp(bytes, parameters, size) == 0);
        REQUIRE(count == 1);
        CHECK(attributes[0].id == CU_LAUNCH_ATTRIBUTE_PRIORITY);
        CHECK(attributes[0].value.priority == -3);
        return CUDA_SUCCESS;
      },
      handle<CUfunction>(Kind::function, 3), CUstream{nullptr},
      schema::LaunchShape{{5, 4, 3}, {128, 2, 1}, 4096, 1}, static_cast<const unsigned char*>(parameters),
      sizeof parameters, static_cast<const schema::LaunchAttribute*>(&attribute), 1u);
}

TEST_CASE("a green context") {
  auto made = handle<CUgreenCtx>(Kind::greenContext, 9);
  const schema::SmSource parts[] = {{handle<CUgreenCtx>(Kind::greenContext, 8), 1, 2, 3, 4, 5, 6},
                                    {nullptr, 1, 2, 3, 4, 5, schema::kSmRest}};
  call<"sessionGreenCreate">(
      "green context, device, parts (green context, device, split, flags, least count, groups, part), count, "
      "flags",
      [](CUgreenCtx* green, CUdevice device, const schema::SmSource* sources, unsigned count,
         unsigned flags) {
        CHECK(green != nullptr);
        CHECK(device == 9);
        REQUIRE(count == 2);
        CHECK(sources[0].green == real<CUgreenCtx>(8));
        CHECK(sources[0].device == 1);
        CHECK(sources[0].split == 2);
        CHECK(sources[0].flags == 3);
        CHECK(sources[0].minCount == 4);
        CHECK(sources[0].wanted == 5);
        CHECK(sources[0].part == 6);
        CHECK(sources[1].green == nullptr);
        CHECK(sources[1].part == schema::kSmRest);
        CHECK(flags == CU_GREEN_CTX_DEFAULT_STREAM);
        return CUDA_SUCCESS;
      },
      &made, CUdevice{1}, static_cast<const schema::SmSource*>(parts), 2u,
      unsigned{CU_GREEN_CTX_DEFAULT_STREAM});
}

TEST_CASE("an event's record") {
  call<"sessionEventRecord">(
      "event, stream, flags, word, value, tell",
      [](CUevent event, CUstream stream, unsigned flags, uint64_t word, uint64_t value, unsigned tell) {
        CHECK(event == real<CUevent>(2));
        CHECK(stream == real<CUstream>(1));
        CHECK(flags == 1);
        CHECK(word == 77);
        CHECK(value == 0x0102030405060708);
        CHECK(tell == 1);
        return CUDA_SUCCESS;
      },
      handle<CUevent>(Kind::event, 2), handle<CUstream>(Kind::stream, 1), 1u, uint64_t{77},
      uint64_t{0x0102030405060708}, 1u);
}

TEST_CASE("a graph's kernel node") {
  const CUgraphNode dependencies[] = {handle<CUgraphNode>(Kind::graphNode, 5),
                                      handle<CUgraphNode>(Kind::graphNode, 6)};
  CUgraphNode minted = handle<CUgraphNode>(Kind::graphNode, 8);
  const unsigned char parameters[8] = {8, 7, 6, 5, 4, 3, 2, 1};
  call<"sessionGraphAddKernelNode">(
      "new node, graph, dependencies, function, context, shape, parameters",
      [&](CUgraphNode* node, CUgraph graph, const CUgraphNode* from, size_t count, CUfunction function,
          CUcontext context, schema::LaunchShape shape, const unsigned char* bytes, size_t size) {
        CHECK(node != nullptr);
        CHECK(graph == real<CUgraph>(4));
        REQUIRE(count == 2);
        CHECK(from[0] == real<CUgraphNode>(5));
        CHECK(from[1] == real<CUgraphNode>(6));
        CHECK(function == real<CUfunction>(3));
        CHECK(context == real<CUcontext>(7));
        CHECK(shape.block[1] == 8);
        REQUIRE(size == sizeof parameters);
        CHECK(std::memcmp(bytes, parameters, size) == 0);
        return CUDA_SUCCESS;
      },
      &minted, handle<CUgraph>(Kind::graph, 4), static_cast<const CUgraphNode*>(dependencies), size_t{2},
      handle<CUfunction>(Kind::function, 3), handle<CUcontext>(Kind::context, 7),
      schema::LaunchShape{{1, 1, 1}, {16, 8, 1}, 0, 0}, static_cast<const unsigned char*>(parameters),
      sizeof parameters);
}

TEST_CASE("fresh device memory") {
  call<"sessionExtentMap">(
      "device of the session, address, bytes",
      [](CUdevice device, CUdeviceptr address, size_t bytes) {
        CHECK(device == 9);  // the driver's ordinal of the session's second device
        CHECK(address == 0x200000200000);
        CHECK(bytes == 0x4000000);
        return CUDA_SUCCESS;
      },
      CUdevice{1}, CUdeviceptr{0x200000200000}, size_t{0x4000000});
}

TEST_CASE("a struct, a text, and outputs") {
  CUDA_MEMSET_NODE_PARAMS memset;
  std::memset(&memset, 0, sizeof memset);
  memset.dst = 0x200000003000;
  memset.elementSize = 4;
  memset.width = 100;
  memset.height = 2;
  memset.pitch = 512;
  memset.value = 0x55;
  call<"cuGraphMemsetNodeSetParams">(
      "node, parameters by value",
      [](CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS* parameters) {
        CHECK(node == real<CUgraphNode>(5));
        REQUIRE(parameters != nullptr);
        CHECK(parameters->dst == 0x200000003000);
        CHECK(parameters->pitch == 512);
        return CUDA_SUCCESS;
      },
      handle<CUgraphNode>(Kind::graphNode, 5), static_cast<const CUDA_MEMSET_NODE_PARAMS*>(&memset));

  CUgraphNode nodes[4];
  size_t count = 4;
  call<"cuGraphGetNodes">(
      "graph, whether nodes are wanted, their capacity",
      [](CUgraph graph, CUgraphNode* list, size_t* capacity) {
        CHECK(graph == real<CUgraph>(4));
        CHECK(list != nullptr);
        REQUIRE(capacity != nullptr);
        CHECK(*capacity == 4);
        return CUDA_SUCCESS;
      },
      handle<CUgraph>(Kind::graph, 4), static_cast<CUgraphNode*>(nodes), &count);
}
