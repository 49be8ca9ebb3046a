// The ordinary life of a session: posted calls, completion words, callbacks, calls beside the executor.
#include "server/worker/tests/client.h"

#include <malloc.h>

#include <functional>
#include <memory>
#include <set>

#include "base/reserve.h"

using namespace gpupool;
using namespace gpupool::server::test;

#define ROW(name) schema::RowOf<name>::id

TEST_CASE("a posted call that fails is told by name, and stays told") {
  Client client;
  client.open();
  CHECK(client.sticky() == CUDA_SUCCESS);
  uint64_t seq = client.post(ROW("cuMemsetD8Async"), Arguments().value(4096).value(0).value(64).value(0));
  auto told = client.failure();
  REQUIRE(told);
  CHECK(told->body.seq == seq);
  CHECK(told->body.call == ROW("cuMemsetD8Async"));
  CHECK(told->body.status == CUDA_ERROR_INVALID_VALUE);
  CHECK(contains(told->text, "cuMemsetD8Async"));
  CHECK(contains(told->text, "CUDA_ERROR_INVALID_VALUE"));
  CHECK(client.sticky() == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a stream writes its word and a watch is answered") {
  Client client;
  client.open();
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0))
              .status() == CUDA_SUCCESS);
  uint32_t bell = client.bell();
  client.tell(NoticeType::watch, schema::WordUpdate{5, 7});
  client.tell(NoticeType::watch,
              schema::WordUpdate{schema::kWordsCount, 1});  // no such word: nothing happens
  CHECK(client.word(5) == 0);
  client.post(ROW("sessionWord"), Arguments().value(kStream).value(5).value(7));
  CHECK(eventually([&] { return client.word(5) == 7; }));
  CHECK(eventually([&] { return client.bell() != bell; }));
  CHECK(client.sticky() == CUDA_SUCCESS);

  client.post(ROW("sessionWord"), Arguments().value(kStream).value(schema::kWordsCount).value(1));
  auto told = client.failure();
  REQUIRE(told);
  CHECK(told->body.status == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("a session that begins anew has the context ahead that its first worker had") {
  const auto told = GENERATE(schema::kContextAheadUnknown, schema::kNoContextAhead, schema::kContextAheadOf);
  auto start = sessionStart();
  start.rebuild = GENERATE(true, false);
  const bool made = start.rebuild && told == schema::kContextAheadOf;
  {
    Client client(start);
    auto mine = Client::goodHello();
    mine.contextAhead = told;
    client.sayHello(mine);
    CHECK(client.hello.status == CUDA_SUCCESS);
    CHECK(client.hello.contextAhead == (made ? schema::kContextAheadOf : schema::kNoContextAhead));
    CHECK(client.session->contextAhead() == (made ? 1 : 0));
    CHECK((client.session->views().warmContext() != nullptr) == made);
  }
  if (made) softDriver().cuDevicePrimaryCtxRelease_v2(0);
}

TEST_CASE("a call that blocks holds up no other frame") {
  Client client;
  client.open();
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0))
              .status() == CUDA_SUCCESS);
  client.post(ROW("sessionHostFunction"), Arguments().value(kStream).value(42).value(0));
  auto bytes = client.notice(NoticeType::callback);
  REQUIRE(bytes);
  schema::CallbackBody body;
  REQUIRE(bytes->size() >= sizeof body);
  std::memcpy(&body, bytes->data(), sizeof body);
  CHECK(body.id == 42);

  // The stream stands still until the callback is answered.
  uint64_t drain = client.post(ROW("sessionDrain"), Arguments().value(kStream).value(0), Frame::kAwait);
  for (int i = 0; i < 3; ++i)
    CHECK(client.await(ROW("sessionImageOffer"), Arguments().structure(schema::ImageName{}).value(1))
              .status() == CUDA_SUCCESS);
  CHECK_FALSE(client.receive(50));
  client.tell(NoticeType::callbackDone, schema::CallbackBody{41, 0, 0});  // of no callback that runs
  CHECK_FALSE(client.receive(50));
  client.tell(NoticeType::callbackDone, body);
  auto answer = client.receive();
  REQUIRE(answer);
  CHECK(answer->header.seq == drain);
  CHECK(answer->status() == CUDA_SUCCESS);
}

TEST_CASE("what ends while the device waits for a later call holds up no other frame") {
  Client client;
  client.open();
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0))
              .status() == CUDA_SUCCESS);
  constexpr uint64_t kArray = handles::makeHandle(handles::Kind::array, 1, 1);
  const uint64_t host = client.space().hostBase;
  const CUDA_ARRAY_DESCRIPTOR shape{64, 64, CU_AD_FORMAT_FLOAT, 1};
  REQUIRE(
      client.await(ROW("cuArrayCreate_v2"), Arguments().value(kArray).value(1).structure(shape)).status() ==
      CUDA_SUCCESS);
  const auto map = [&] {
    return client
        .await(ROW("sessionHostMap"), Arguments().value(host).value(uint64_t{1} << 21).value(0).value(1))
        .status();
  };
  REQUIRE(map() == CUDA_SUCCESS);
  beginHostFunction(client);
  std::set<uint64_t> ending{client.post(ROW("cuArrayDestroy"), Arguments().value(kArray), Frame::kAwait),
                            client.post(ROW("sessionHostUnmap"), Arguments().value(host), Frame::kAwait)};
  REQUIRE(eventually([&] { return !client.session->besideIdle(); }));
  for (int i = 0; i < 3; ++i)
    CHECK(client.await(ROW("sessionImageOffer"), Arguments().structure(schema::ImageName{}).value(1))
              .status() == CUDA_SUCCESS);
  CHECK_FALSE(client.receive(50));
  endHostFunction(client);
  while (!ending.empty()) {
    const auto answer = client.receive();
    REQUIRE(answer);
    CHECK(answer->status() == CUDA_SUCCESS);
    CHECK(ending.erase(answer->header.seq) == 1);
  }
  CHECK(map() == CUDA_SUCCESS);  // at the same addresses
}

TEST_CASE("a host function that ran leaves nothing behind") {
  Client client;
  client.open();
  auto runHostFunctions = [&](uint64_t first, uint64_t count) {
    for (uint64_t id = first; id < first + count; ++id) {
      client.post(ROW("sessionHostFunction"), Arguments().value(0).value(id).value(0));
      REQUIRE(client.notice(NoticeType::callback));
      client.tell(NoticeType::callbackDone, schema::CallbackBody{id, 0, 0});
    }
  };
  runHostFunctions(1, 500);
  const size_t before = mallinfo2().uordblks;
  constexpr uint64_t kMore = 4000;
  runHostFunctions(1000, kMore);
  const size_t after = mallinfo2().uordblks;
  CHECK(after < before + kMore * 16);
}

TEST_CASE("a session ends while a callback is open") {
  Client client;
  client.open();
  client.post(ROW("sessionHostFunction"), Arguments().value(0).value(1).value(0));
  REQUIRE(client.notice(NoticeType::callback));
  client.tell(NoticeType::goodbye, uint64_t{0});
  CHECK(eventually([&] { return client.ended(); }));
  CHECK(client.reason() == "client closed the session");
}

TEST_CASE("stop tells the client why") {
  Client client;
  client.greet();
  client.session->stop("the lease is over");
  auto told = client.failure();
  REQUIRE(told);
  CHECK(told->text == "the lease is over");
  CHECK(eventually([&] { return client.ended(); }));
  CHECK(client.sticky() == CUDA_ERROR_DEVICE_UNAVAILABLE);
}

// Of a server that goes while a session asks for memory (server_account.h): the session is told first.
class AccountOfTheDead final : public server::Account {
 public:
  std::function<void()> goes;
  CUresult take(unsigned, uint64_t) override {
    goes();
    return CUDA_ERROR_UNKNOWN;
  }
  void give(unsigned, uint64_t) override {}
  uint64_t others(unsigned) override { return 0; }
};

TEST_CASE("memory that is refused because the server is gone is refused as the session's end is") {
  auto account = std::make_unique<AccountOfTheDead>();
  AccountOfTheDead& server = *account;
  Client client(softDriver(), std::move(account));
  server.goes = [&] { client.session->stop("the GPU server died"); };
  client.open();
  const uint64_t address = client.space().deviceBase + 4 * kMiB;
  const auto answer =
      client.await(ROW("sessionExtentMap"), Arguments().value(0).value(address).value(4 * kMiB));
  CHECK(answer.status() == CUDA_ERROR_DEVICE_UNAVAILABLE);
}

TEST_CASE("a client that is gone ends the session") {
  Client client;
  client.greet();
  client.wire->close();
  CHECK(eventually([&] { return client.ended(); }));
  CHECK(client.reason() == "client closed the session");
}

TEST_CASE("a session that is gone leaves its addresses to the next") {
  schema::AddressSpace space;
  {
    Client client;
    client.open();
    space = client.space();
    auto pinned = Arguments().value(space.hostBase + 4096).value(8192).value(0).value(1);
    REQUIRE(client.await(ROW("sessionHostMap"), pinned).status() == CUDA_SUCCESS);
  }
  REQUIRE(reserveAt(space.hostBase, space.hostBytes));
  munmap(reinterpret_cast<void*>(space.hostBase), space.hostBytes);
}

// Memory of a device comes with its last owner's bytes (the software GPU's arrays are made dirty), which the
// client must never see.
TEST_CASE("arrays are cleared before the client has them") {
  Client client;
  client.open();
  const auto handle = [](uint32_t index) { return handles::makeHandle(handles::Kind::array, index, 1); };
  const auto read = [&](CUarray array, size_t x, size_t y, size_t z, size_t bytes) {
    std::vector<unsigned char> got(bytes, 0x77);
    CUDA_MEMCPY3D copy{};
    copy.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.srcArray = array;
    copy.srcXInBytes = x;
    copy.srcY = y;
    copy.srcZ = z;
    copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.dstHost = got.data();
    copy.WidthInBytes = bytes;
    copy.Height = copy.Depth = 1;
    client.session->objects().forEach(handles::Kind::context, [](uint64_t, uint64_t real) {
      softDriver().cuCtxSetCurrent(reinterpret_cast<CUcontext>(real));
    });
    REQUIRE(softDriver().cuMemcpy3D_v2(&copy) == CUDA_SUCCESS);
    return got;
  };
  CUarray array = nullptr;
  SECTION("two dimensions, more than one copy of zeros covers") {
    CUDA_ARRAY_DESCRIPTOR shape{4096, 700, CU_AD_FORMAT_FLOAT, 1};
    REQUIRE(client.await(ROW("cuArrayCreate_v2"), Arguments().value(handle(1)).value(1).structure(shape))
                .status() == CUDA_SUCCESS);
    REQUIRE(client.session->objects().find(handle(1), array));
    for (size_t row : {0, 255, 256, 699})
      CHECK(read(array, 0, row, 0, 16384) == std::vector<unsigned char>(16384));
  }
  SECTION("layers") {
    CUDA_ARRAY3D_DESCRIPTOR shape{33, 5, 3, CU_AD_FORMAT_UNSIGNED_INT8, 4, CUDA_ARRAY3D_LAYERED};
    REQUIRE(client.await(ROW("cuArray3DCreate_v2"), Arguments().value(handle(2)).value(1).structure(shape))
                .status() == CUDA_SUCCESS);
    REQUIRE(client.session->objects().find(handle(2), array));
    for (size_t layer : {0, 1, 2}) CHECK(read(array, 0, 4, layer, 132) == std::vector<unsigned char>(132));
  }
}

// Else its variables would lie where the frame before has left them.
TEST_CASE("a library is loaded for no context, and the next frame finds its own") {
  static const server::Driver* real = nullptr;
  static CUcontext seen, later;
  const auto driver = server::Driver::load(SOFT_DRIVER);
  auto& table = const_cast<server::Driver&>(*driver);  // the test's own, that nobody reads yet
  real = &softDriver();
  table.cuLibraryLoadData = [](CUlibrary* library, const void* image, CUjit_option* options, void** values,
                               unsigned count, CUlibraryOption* names, void** settings,
                               unsigned settingCount) {
    real->cuCtxGetCurrent(&seen);
    return real->cuLibraryLoadData(library, image, options, values, count, names, settings, settingCount);
  };
  table.cuModuleLoadDataEx = [](CUmodule* module, const void* image, unsigned count, CUjit_option* options,
                                void** values) {
    real->cuCtxGetCurrent(&later);
    return real->cuModuleLoadDataEx(module, image, count, options, values);
  };
  constexpr char kCode[] = ".version 9.0\n.target sm_75\n.address_size 64\n.global .u32 variable;\n";
  Client client(*driver);
  client.open();
  const auto load = [&](uint32_t call, handles::Kind kind, uint32_t index) {
    const uint64_t handle = makeHandle(kind, index, 1);
    REQUIRE(client.await(call, client.loading(handle, kCode)).status() == CUDA_SUCCESS);
  };
  load(ROW("sessionModuleLoad"), handles::Kind::module, 1);
  const CUcontext mine = later;
  REQUIRE(mine != nullptr);
  seen = mine;
  load(ROW("sessionLibraryLoad"), handles::Kind::library, 1);
  CHECK(seen == nullptr);
  later = nullptr;
  load(ROW("sessionModuleLoad"), handles::Kind::module, 2);
  CHECK(later == mine);
}

// NVIDIA's driver takes a stream's handle for a pointer, also when that stream has been destroyed: it crashed
// on an H200. The software GPU looks handles up.
TEST_CASE("a stream that has been destroyed is not asked about, also while another one captures") {
  static const server::Driver* real = nullptr;
  static std::atomic<CUstream> destroyed{nullptr};
  static std::atomic<int> asked{0};
  const auto driver = server::Driver::load(SOFT_DRIVER);
  auto& table = const_cast<server::Driver&>(*driver);  // the test's own, that nobody reads yet
  real = &softDriver();
  table.cuStreamDestroy_v2 = [](CUstream stream) {
    destroyed = stream;
    return real->cuStreamDestroy_v2(stream);
  };
  table.cuStreamGetCaptureInfo_v3 = [](CUstream stream, auto... rest) {
    asked += stream == destroyed;
    return real->cuStreamGetCaptureInfo_v3(stream, rest...);
  };
  Client client(*driver);
  client.open();
  const uint64_t other = makeHandle(handles::Kind::stream, 9, 1);
  for (const uint64_t stream : {kStream, other})
    REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(stream).value(1).value(0))
                .status() == CUDA_SUCCESS);
  REQUIRE(client.await(ROW("cuStreamBeginCapture_v2"), Arguments().value(kStream).value(0)).status() ==
          CUDA_SUCCESS);
  REQUIRE(client.await(ROW("cuStreamDestroy_v2"), Arguments().value(other)).status() == CUDA_SUCCESS);
  CHECK(destroyed.load() != nullptr);
  CHECK(asked == 0);
  CHECK(client.await(ROW("cuStreamEndCapture"), Arguments().value(kStream).value(1)).status() ==
        CUDA_SUCCESS);
}

// So it does with events.
TEST_CASE("an event of a context that has ended is not handed to the driver") {
  static const server::Driver* real = nullptr;
  static std::atomic<int> asked{0};
  const auto driver = server::Driver::load(SOFT_DRIVER);
  auto& table = const_cast<server::Driver&>(*driver);  // the test's own, that nobody reads yet
  real = &softDriver();
  asked = 0;
  table.cuEventQuery = [](CUevent event) {
    ++asked;
    return real->cuEventQuery(event);
  };
  Client client(*driver);
  client.open();
  const uint64_t first = makeHandle(handles::Kind::event, 9, 1);
  const uint64_t second = makeHandle(handles::Kind::event, 10, 1);
  const auto create = [&](uint64_t event) {
    return client.await(ROW("cuEventCreate"), Arguments().value(event).value(0)).status();
  };
  const auto query = [&](uint64_t event) {
    return client.await(ROW("cuEventQuery"), Arguments().value(event)).status();
  };
  REQUIRE(create(first) == CUDA_SUCCESS);
  REQUIRE(query(first) == CUDA_SUCCESS);
  client.context = 0;
  REQUIRE(client.await(ROW("cuDevicePrimaryCtxReset_v2"), Arguments().value(0)).status() == CUDA_SUCCESS);
  REQUIRE(client.await(ROW("cuDevicePrimaryCtxRetain"), Arguments().value(kContext).value(0)).status() ==
          CUDA_SUCCESS);
  client.context = kContext;
  CHECK(asked == 1);
  CHECK(query(first) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(asked == 1);
  REQUIRE(create(second) == CUDA_SUCCESS);
  CHECK(query(second) == CUDA_SUCCESS);
  CHECK(asked == 2);
}

TEST_CASE("a client that reads nothing holds up no move, and is told later that it stays") {
  Client client;
  client.open();
  auto& session = *client.session;
  const auto soon = [] { return std::chrono::steady_clock::now() + std::chrono::milliseconds(100); };
  CHECK(contains(session.stopClient(soon()), "the program does not say that it stands still: is it stopped"));
  // Its channel becomes full, and somebody waits for room there.
  std::atomic<bool> enough{false};
  std::thread filler([&] {
    while (!enough) session.setSuspended(false);
  });
  const auto takesNothing = [&] { return contains(session.stopClient(soon()), "does not take messages"); };
  bool full = false;
  for (const auto end = within(20000); !full && transport::Clock::now() < end;) {
    session.letClientStay();
    full = takesNothing();
  }
  CHECK(full);
  enough = true;
  bool stays = false;
  for (const auto end = within(20000); !stays && transport::Clock::now() < end;) {
    const auto message = client.wire->receive(Channel::control, within(1000));
    Notice header;
    if (message.size() < sizeof header) continue;
    std::memcpy(&header, message.data(), sizeof header);
    stays = header.type == NoticeType::stay;
  }
  filler.join();
  CHECK(stays);
}

TEST_CASE("what fails because the program has gone says that the session is ending") {
  Client client;
  client.open();
  auto& session = *client.session;
  CHECK(session.whyNotMoved("the other worker has ended") == "the other worker has ended");
  client.wire->close();
  CHECK(eventually([&] {
    return session.whyNotMoved("the other worker has ended") ==
           "the session is ending (the other worker has ended)";
  }));
  CHECK(session.whyNotMoved("the session is ending") == "the session is ending");
}

TEST_CASE("words: the watcher publishes what was reached and nothing else") {
  server::Objects objects({0});
  std::mutex mutex;
  std::vector<schema::WordUpdate> told;
  server::Words words(
      softDriver(), objects, transport::SharedMemory::create(schema::kWordsBytes),
      [&](const std::vector<schema::WordUpdate>& reached) {
        std::lock_guard lock(mutex);
        told.insert(told.end(), reached.begin(), reached.end());
      },
      nullptr);
  auto* first = reinterpret_cast<uint64_t*>(words.memory()->data() + schema::kWordsOffset);
  words.watch(3, 2);
  words.watch(4, 9);
  words.watch(0, 1);  // no word
  std::atomic_ref<uint64_t>(first[3]).store(1);
  std::atomic_ref<uint64_t>(first[4]).store(10);
  auto count = [&] {
    std::lock_guard lock(mutex);
    return told.size();
  };
  REQUIRE(eventually([&] { return count() == 1; }));
  std::atomic_ref<uint64_t>(first[3]).store(2);
  REQUIRE(eventually([&] { return count() == 2; }));
  words.stop();
  CHECK(told[0].index == 4);
  CHECK(told[0].value == 10);
  CHECK(told[1].index == 3);
  CHECK(told[1].value == 2);
}
