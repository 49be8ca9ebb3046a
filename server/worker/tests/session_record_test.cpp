// What a session records of the calls that it serves (record.h). record_test.cpp has the record by itself.
#include "server/worker/tests/client.h"

using namespace gpupool;
using namespace gpupool::server::test;

#define ROW(name) schema::RowOf<name>::id

TEST_CASE("the record holds what lives") {
  Client client;
  client.open();
  auto& record = client.session->record();
  const size_t before = record.size();
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0))
              .status() == CUDA_SUCCESS);
  REQUIRE(record.size() == before + 1);
  auto last = record.entries().back();
  CHECK(record.knows(kStream));
  CHECK(last.frame.call == ROW("cuStreamCreateWithPriority"));
  CHECK(last.frame.context == kContext);
  CHECK(last.arguments.size() == 24);

  REQUIRE(client.await(ROW("cuStreamDestroy_v2"), Arguments().value(kStream)).status() == CUDA_SUCCESS);
  CHECK(record.size() == before);
  CHECK(client.await(ROW("cuStreamDestroy_v2"), Arguments().value(kStream)).status() ==
        CUDA_ERROR_INVALID_HANDLE);

  // What failed is not recorded.
  CHECK(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(0xffff).value(0))
            .status() != CUDA_SUCCESS);
  CHECK(record.size() == before);
}

TEST_CASE("values that kernels hold stay in the record") {
  Client client;
  client.open();
  const uint64_t device = client.space().deviceBase;
  REQUIRE(
      client.await(ROW("sessionExtentMap"), Arguments().value(0).value(device).value(2 * kMiB)).status() ==
      CUDA_SUCCESS);
  CUDA_RESOURCE_DESC resource{};
  resource.resType = CU_RESOURCE_TYPE_LINEAR;
  resource.res.linear.devPtr = device;
  resource.res.linear.format = CU_AD_FORMAT_FLOAT;
  resource.res.linear.numChannels = 1;
  resource.res.linear.sizeInBytes = 4096;
  CUDA_TEXTURE_DESC texture{};
  auto& record = client.session->record();
  const size_t before = record.size();
  auto made =
      client.await(ROW("cuTexObjectCreate"),
                   Arguments().value(1).value(1).structure(resource).value(1).structure(texture).value(0));
  REQUIRE(made.status() == CUDA_SUCCESS);
  REQUIRE(made.outputs.size() >= 8);
  uint64_t object = 0;
  std::memcpy(&object, made.outputs.data(), sizeof object);
  REQUIRE(record.size() == before + 1);
  CHECK(record.knows(server::Record::texture(object)));
  CHECK(record.entries().back().outputs.size() == made.outputs.size());
  REQUIRE(client.await(ROW("cuTexObjectDestroy"), Arguments().value(object)).status() == CUDA_SUCCESS);
  CHECK(record.size() == before);
}

TEST_CASE("a captured graph is recorded as the calls that made it, and goes with its last exec") {
  Client client;
  client.open();
  auto& record = client.session->record();
  const uint64_t device = client.space().deviceBase;
  REQUIRE(
      client.await(ROW("sessionExtentMap"), Arguments().value(0).value(device).value(2 * kMiB)).status() ==
      CUDA_SUCCESS);
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0))
              .status() == CUDA_SUCCESS);
  const size_t before = record.size();
  const auto memset = Arguments().value(device).value(0).value(64).value(kStream);
  REQUIRE(client.await(ROW("cuMemsetD8Async"), memset).status() == CUDA_SUCCESS);
  CHECK(record.size() == before);  // what is done is in the memory
  REQUIRE(client.await(ROW("cuStreamBeginCapture_v2"), Arguments().value(kStream).value(0)).status() ==
          CUDA_SUCCESS);
  for (int i = 0; i < 3; ++i) REQUIRE(client.await(ROW("cuMemsetD8Async"), memset).status() == CUDA_SUCCESS);
  const auto captured = client.await(ROW("cuStreamEndCapture"), Arguments().value(kStream).value(1));
  REQUIRE(captured.status() == CUDA_SUCCESS);
  uint64_t graph = 0;
  std::memcpy(&graph, captured.outputs.data(), sizeof graph);
  CHECK(record.size() == before + 5);
  CHECK(record.knows(graph));
  const uint64_t exec = makeHandle(handles::Kind::graphExec, 1, 1);
  REQUIRE(client
              .await(ROW("sessionGraphInstantiate"),
                     Arguments().value(exec).value(graph).value(0).value(0).value(1))
              .status() == CUDA_SUCCESS);
  // A graph that is destroyed has made the exec.
  REQUIRE(client.await(ROW("cuGraphDestroy"), Arguments().value(graph)).status() == CUDA_SUCCESS);
  CHECK(record.size() == before + 7);
  REQUIRE(client.await(ROW("cuGraphExecDestroy"), Arguments().value(exec)).status() == CUDA_SUCCESS);
  CHECK(record.size() == before);
}

TEST_CASE("a session stands on its pinned memory as long as something lives that names it") {
  Client client;
  client.open();
  const uint64_t device = client.space().deviceBase, host = client.space().hostBase;
  const auto done = [&](uint32_t call, const Arguments& arguments) {
    const auto answer = client.await(call, arguments);
    REQUIRE(answer.status() == CUDA_SUCCESS);
    return answer;
  };
  done(ROW("sessionExtentMap"), Arguments().value(0).value(device).value(2 * kMiB));
  done(ROW("sessionHostMap"), Arguments().value(host).value(4096).value(0).value(1));
  done(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0));
  const auto copy = Arguments().value(device).value(host + 64).value(64).value(kStream);
  done(ROW("cuMemcpyHtoDAsync_v2"), copy);
  CHECK_FALSE(client.session->standsOnHost());  // what is done is over
  done(ROW("cuStreamBeginCapture_v2"), Arguments().value(kStream).value(0));
  done(ROW("cuMemcpyHtoDAsync_v2"), copy);
  const auto captured = done(ROW("cuStreamEndCapture"), Arguments().value(kStream).value(1));
  CHECK(client.session->standsOnHost());
  uint64_t graph = 0;
  std::memcpy(&graph, captured.outputs.data(), sizeof graph);
  done(ROW("cuGraphDestroy"), Arguments().value(graph));
  CHECK_FALSE(client.session->standsOnHost());
}

TEST_CASE("a capture is numbered by the frame that it began with, which is the same where it is made again") {
  Client client;
  client.open();
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0))
              .status() == CUDA_SUCCESS);
  for (int round = 0; round < 2; ++round) {
    REQUIRE(client.await(ROW("cuStreamBeginCapture_v2"), Arguments().value(kStream).value(0)).status() ==
            CUDA_SUCCESS);
    const uint64_t frame = client.seq;
    for (int asked = 0; asked < 2; ++asked) {
      // The status and the number alone are wanted.
      const auto answer =
          client.await(ROW("sessionCaptureInfo"),
                       Arguments().value(kStream).value(1).value(1).value(0).value(0).value(0).value(0));
      REQUIRE(answer.status() == CUDA_SUCCESS);
      uint64_t stateAndId[2] = {};
      REQUIRE(answer.outputs.size() >= sizeof stateAndId);
      std::memcpy(stateAndId, answer.outputs.data(), sizeof stateAndId);
      CHECK(stateAndId[0] == CU_STREAM_CAPTURE_STATUS_ACTIVE);
      CHECK(stateAndId[1] == frame);
    }
    REQUIRE(client.await(ROW("cuStreamEndCapture"), Arguments().value(kStream).value(1)).status() ==
            CUDA_SUCCESS);
  }
}

// Graphs that are captured and instantiated anew, graphs that are updated, textures, events and streams that
// come and go, attributes that are set again: what a training program does for an hour.
TEST_CASE("the record stays as large as what lives, however long the program runs") {
  Client client;
  client.open();
  auto& record = client.session->record();
  const uint64_t device = client.space().deviceBase;
  const auto done = [&](uint32_t call, const Arguments& arguments) {
    const auto answer = client.await(call, arguments);
    REQUIRE(answer.status() == CUDA_SUCCESS);
    uint64_t first = 0;
    if (!answer.outputs.empty())
      std::memcpy(&first, answer.outputs.data(), std::min(sizeof first, answer.outputs.size()));
    return first;
  };
  done(ROW("sessionExtentMap"), Arguments().value(0).value(device).value(2 * kMiB));
  done(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0));
  CUDA_RESOURCE_DESC resource{};
  resource.resType = CU_RESOURCE_TYPE_LINEAR;
  resource.res.linear.devPtr = device;
  resource.res.linear.format = CU_AD_FORMAT_FLOAT;
  resource.res.linear.numChannels = 1;
  resource.res.linear.sizeInBytes = 4096;
  const CUDA_TEXTURE_DESC texture{};
  const auto exec = [](uint32_t round) { return makeHandle(handles::Kind::graphExec, 1 + round % 2, round); };
  const auto beside = [](uint32_t round) { return makeHandle(handles::Kind::stream, 2, round); };
  const auto event = [](uint32_t round) { return makeHandle(handles::Kind::event, 1, round); };
  const auto step = [&](uint32_t round) {
    done(ROW("cuStreamBeginCapture_v2"), Arguments().value(kStream).value(0));
    for (int i = 0; i < 3; ++i)
      done(ROW("cuMemsetD8Async"), Arguments().value(device).value(i).value(64).value(kStream));
    const uint64_t graph = done(ROW("cuStreamEndCapture"), Arguments().value(kStream).value(1));
    done(ROW("sessionGraphInstantiate"),
         Arguments().value(exec(round)).value(graph).value(0).value(0).value(1));
    done(ROW("cuGraphDestroy"), Arguments().value(graph));
    done(ROW("cuGraphLaunch"), Arguments().value(exec(round)).value(kStream));
    if (round > 1) done(ROW("cuGraphExecDestroy"), Arguments().value(exec(round - 1)));
    const uint64_t view =
        done(ROW("cuTexObjectCreate"),
             Arguments().value(1).value(1).structure(resource).value(1).structure(texture).value(0));
    done(ROW("cuTexObjectDestroy"), Arguments().value(view));
    done(ROW("cuStreamCreateWithPriority"), Arguments().value(beside(round)).value(1).value(0));
    done(ROW("cuEventCreate"), Arguments().value(event(round)).value(0));
    done(ROW("cuStreamDestroy_v2"), Arguments().value(beside(round)));
    done(ROW("cuEventDestroy_v2"), Arguments().value(event(round)));
    done(ROW("cuCtxSetLimit"), Arguments().value(CU_LIMIT_PRINTF_FIFO_SIZE).value(1 << 20));
  };
  for (uint32_t round = 1; round <= 3; ++round) step(round);
  const size_t size = record.size(), bytes = record.bytes();
  for (uint32_t round = 4; round <= 300; ++round) step(round);
  CHECK(record.size() == size);
  CHECK(record.bytes() == bytes);
}

// Where a variable of a module lies depends on what was loaded before. The next worker loads in the record's
// order, so that has to be the driver's.
TEST_CASE("code is loaded by one call at a time, with its entry in the record") {
  static const server::Driver* real = nullptr;
  static std::atomic<int> inside, most;
  static std::atomic<bool> held;
  inside = most = 0;
  held = true;
  const auto driver = server::Driver::load(SOFT_DRIVER);
  auto& table = const_cast<server::Driver&>(*driver);  // the test's own, that nobody reads yet
  real = &softDriver();
  table.cuModuleLoadDataEx = [](CUmodule* module, const void* image, unsigned count, CUjit_option* options,
                                void** values) {
    most = std::max<int>(most, ++inside);
    held.wait(true);
    const CUresult result = real->cuModuleLoadDataEx(module, image, count, options, values);
    --inside;
    return result;
  };
  constexpr char kCode[] = ".version 9.0\n.target sm_75\n.address_size 64\n.global .u32 variable;\n";
  Client client(*driver);
  client.open();
  const uint64_t one = makeHandle(handles::Kind::module, 1, 1), two = makeHandle(handles::Kind::module, 2, 1);
  const size_t before = client.session->record().size();
  const auto first = client.loading(one, kCode), second = client.loading(two, kCode);
  client.post(ROW("sessionModuleLoad"), first, Frame::kAwait);
  client.post(ROW("sessionModuleLoad"), second, Frame::kAwait);
  CHECK(eventually([&] { return inside == 1; }));
  CHECK_FALSE(client.receive(300));
  CHECK(most == 1);
  held = false;
  held.notify_all();
  for (int i = 0; i < 2; ++i) {
    const auto answer = client.receive();
    REQUIRE(answer);
    CHECK(answer->status() == CUDA_SUCCESS);
  }
  CHECK(most == 1);
  CHECK(client.session->record().size() == before + 2);
}
