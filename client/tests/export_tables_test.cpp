#include "client/export_tables.h"

#include <sys/types.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>

#include "catch.h"
#include "client/contexts.h"
#include "client/lookup.h"
#include "client/process.h"
#if GPUPOOL_CUDART_SELFTEST
#include "client/selftest.h"
#endif

using namespace gpupool::client;

namespace {

CUuuid idOf(const char* hex) {
  CUuuid id;
  for (size_t i = 0; i < 16; ++i)
    id.bytes[i] = static_cast<char>(std::stoi(std::string(hex + 2 * i, 2), nullptr, 16));
  return id;
}
const CUuuid kCudart = idOf("6bd5fb6c5bf4e74a8987d93912fd9df9");
const CUuuid kHooks = idOf("a094798c2e742e7493f20800200c0a66");
const CUuuid kTls = idOf("42d85a8123f6cb478298f6e78a3aecdc");
const CUuuid kStorage = idOf("c693336e1121df11a8c368f355d89593");
const CUuuid kChecks = idOf("263e88607cd2614392f6bbd5006dfa7e");
const CUuuid kIntegrity = idOf("d4082055bde6704b8d34ba123c66e1f2");
const CUuuid kToolsContext = idOf("21318c60971432488ca641ff7324c8f2");
const CUuuid kToolsModule = idOf("6e163fbeb958444d835ce182aff1991e");
const CUuuid kTpcMap = idOf("1734dc26800d47458726c0f1e7dd8bca");
const CUuuid kRequirements = idOf("f8cff95121468b4eb9e2fb469e7c0dd9");

void* const* table(const CUuuid& id) {
  const void* found = nullptr;
  REQUIRE(getExportTable(&found, &id) == CUDA_SUCCESS);
  return static_cast<void* const*>(found);
}
template <typename Function>
Function slot(const CUuuid& id, size_t index) {
  return reinterpret_cast<Function>(table(id)[index]);
}

const auto kStream = reinterpret_cast<CUstream>(makeHandle(Kind::stream, 3, 0));
const auto kModule = reinterpret_cast<CUmodule>(makeHandle(Kind::module, 4, 0));
CUfunction functionAt(uint32_t i) { return reinterpret_cast<CUfunction>(makeHandle(Kind::function, i, 0)); }

const ExportTableHooks kFakes{[](CUcontext, CUstream stream, uint64_t* id) {
                                if (stream != kStream && toId(stream) > 2) return CUDA_ERROR_INVALID_HANDLE;
                                *id = stream == kStream ? 95 : 10 + toId(stream);
                                return CUDA_SUCCESS;
                              },
                              [](CUmodule module, std::vector<CUfunction>* functions) {
                                if (module != kModule) return CUDA_ERROR_INVALID_HANDLE;
                                functions->assign({functionAt(1), functionAt(2)});
                                return CUDA_SUCCESS;
                              },
                              [](CUmodule* module, const void* image) {
                                *module = image == &kFakes ? kModule : nullptr;
                                return CUDA_SUCCESS;
                              },
                              [] { return 2; },
                              [](int ordinal, CUuuid* uuid, int* domain, int* bus, int* device) {
                                std::memset(uuid->bytes, 0x10 + ordinal, 16);
                                *domain = 1;
                                *bus = 2 + ordinal;
                                *device = 3;
                                return CUDA_SUCCESS;
                              },
                              [](std::vector<unsigned char>* gpcs, std::vector<unsigned char>* ranks) {
                                *gpcs = {0, 1, 0};
                                *ranks = {0, 0, 1};
                                return CUDA_SUCCESS;
                              }};

const RemoteContexts kRemote{[](CUdevice, unsigned, CUcontext) { return CUDA_SUCCESS; },
                             [](CUdevice, unsigned, CUcontext) { return CUDA_SUCCESS; },
                             [](CUcontext, unsigned) { return CUDA_SUCCESS; },
                             [](CUcontext) { return CUDA_SUCCESS; }};

void initialise() {
  CUresult result;
  if (!process::begin(&result)) return;
  contexts().start(2, kRemote);
  setExportTableHooks(kFakes);
  process::finish(CUDA_SUCCESS);
}

}  // namespace

TEST_CASE("export tables: before cuInit the tables are there and their functions refuse") {
  CUcontext context = nullptr;
  void* value = nullptr;
  using Get = CUresult (*)(void**, CUcontext, void*);
  REQUIRE(process::ready() == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(slot<CUresult (*)(CUcontext*, CUdevice)>(kCudart, 2)(&context, 0) == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(slot<CUresult (*)(CUcontext*)>(kTls, 2)(&context) == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(slot<Get>(kStorage, 2)(&value, nullptr, &value) == CUDA_ERROR_NOT_INITIALIZED);
}

TEST_CASE("export tables: sizes, and no empty slot") {
  const std::pair<const CUuuid*, size_t> sizes[] = {
      {&kCudart, 104},   {&kHooks, 56},         {&kTls, 24},          {&kChecks, 120},
      {&kIntegrity, 24}, {&kToolsContext, 744}, {&kToolsModule, 792}, {&kTpcMap, 136}};
  for (const auto& [id, bytes] : sizes) {
    CHECK(reinterpret_cast<size_t>(table(*id)[0]) == bytes);
    for (size_t i = 1; i < bytes / 8; ++i) REQUIRE(table(*id)[i] != nullptr);
    CHECK(table(*id) == table(*id));
  }
  CHECK(table(kStorage)[3] == nullptr);
  const void* found = &kFakes;
  CHECK(getExportTable(&found, &kRequirements) == CUDA_ERROR_INVALID_VALUE);
  CHECK(found == nullptr);
  CHECK(slot<CUresult (*)()>(kToolsContext, 50)() == CUDA_ERROR_NOT_SUPPORTED);
  CHECK(slot<CUresult (*)()>(kToolsContext, 50) != slot<CUresult (*)()>(kToolsContext, 52));
}

TEST_CASE("export tables: the TPC map is the caller's until slot 13 takes it back") {
  initialise();
  unsigned char *gpcs = nullptr, *ranks = nullptr;
  using Get = CUresult (*)(unsigned char**, unsigned char**);
  using Free = CUresult (*)(unsigned char*, unsigned char*);
  CHECK(slot<Get>(kTpcMap, 4)(nullptr, &ranks) == CUDA_ERROR_INVALID_VALUE);
  REQUIRE(slot<Get>(kTpcMap, 4)(&gpcs, &ranks) == CUDA_SUCCESS);
  CHECK(std::vector<int>(gpcs, gpcs + 3) == std::vector<int>{0, 1, 0});
  CHECK(std::vector<int>(ranks, ranks + 3) == std::vector<int>{0, 0, 1});
  CHECK(slot<Free>(kTpcMap, 13)(gpcs, ranks) == CUDA_SUCCESS);
}

TEST_CASE("export tables: primary context, current context, storage") {
  initialise();
  CUcontext context = nullptr, retained = nullptr, seen = nullptr;
  using Put = CUresult (*)(CUcontext, void*, void*, StorageDestructor);
  using Remove = CUresult (*)(CUcontext, void*);
  using Get = CUresult (*)(void**, CUcontext, void*);
  const auto primary = slot<CUresult (*)(CUcontext*, CUdevice)>(kCudart, 2);
  CHECK(primary(&context, 1) == CUDA_SUCCESS);
  CHECK(primary(&context, 2) == CUDA_ERROR_INVALID_DEVICE);
  primary(&context, 0);
  static int key;
  void* value = nullptr;
  CHECK(slot<Get>(kStorage, 2)(&value, nullptr, &key) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts().setCurrent(context) == CUDA_SUCCESS);
  CHECK(contexts().primaryRetain(&retained, 0) == CUDA_SUCCESS);
  CHECK(retained == context);
  CHECK(slot<CUresult (*)(CUcontext*)>(kTls, 2)(&seen) == CUDA_SUCCESS);
  CHECK(seen == context);
  CHECK(slot<Get>(kStorage, 2)(&value, nullptr, &key) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(slot<Put>(kStorage, 0)(context, &key, &seen, nullptr) == CUDA_SUCCESS);
  CHECK(slot<Get>(kStorage, 2)(&value, nullptr, &key) == CUDA_SUCCESS);
  CHECK(value == &seen);
  std::thread([&] {
    void* other = nullptr;
    CHECK(slot<Get>(kStorage, 2)(&other, nullptr, &key) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(slot<Get>(kStorage, 2)(&other, context, &key) == CUDA_SUCCESS);
  }).join();
  CHECK(slot<Remove>(kStorage, 1)(context, &key) == CUDA_SUCCESS);
  uint32_t flags = 9;
  const void* detail = &key;
  CHECK(slot<CUresult (*)(CUcontext, uint32_t*, const void**)>(kChecks, 2)(context, &flags, &detail) ==
        CUDA_SUCCESS);
  CHECK(flags == 0);
  CHECK(detail == &key);
  CHECK(slot<uint32_t (*)()>(kChecks, 3)() == 0);
}

TEST_CASE("export tables: callback flags are zero") {
  for (const auto& [index, count] : {std::pair<size_t, size_t>{2, 1024}, {6, 14}}) {
    void* flags = nullptr;
    size_t n = 0;
    slot<void (*)(void**, size_t*)>(kHooks, index)(&flags, &n);
    CHECK(n == count);
    for (size_t i = 0; i < n; ++i) REQUIRE(static_cast<uint32_t*>(flags)[i] == 0);
  }
}

TEST_CASE("export tables: context numbers and stream objects") {
  initialise();
  CUcontext context = nullptr;
  contexts().primaryRetain(&context, 0);
  uint64_t number = 7, expected = 0;
  const auto contextNumber = slot<CUresult (*)(CUcontext, uint64_t*)>(kToolsContext, 4);
  contexts().getId(context, &expected);
  CHECK(contextNumber(context, &number) == CUDA_SUCCESS);
  CHECK(number == expected);
  CHECK(contextNumber(nullptr, &number) == CUDA_SUCCESS);
  CHECK(number == 0);
  const auto object = slot<CUresult (*)(CUcontext, CUstream, void**)>(kToolsContext, 51);
  const auto property = slot<CUresult (*)(CUcontext, void*, uint64_t*)>(kToolsContext, 39);
  for (const auto& [stream, id] : {std::pair<CUstream, uint64_t>{kStream, 95},
                                   {nullptr, 10},
                                   {CU_STREAM_LEGACY, 11},
                                   {CU_STREAM_PER_THREAD, 12}}) {
    void* token = nullptr;
    CHECK(object(context, stream, &token) == CUDA_SUCCESS);
    CHECK(token != nullptr);
    CHECK(property(context, token, &number) == CUDA_SUCCESS);
    CHECK(number == id);
  }
  void* token = nullptr;
  CHECK(object(context, reinterpret_cast<CUstream>(0x99), &token) == CUDA_ERROR_INVALID_HANDLE);
}

TEST_CASE("export tables: the functions of a module are visited and counted") {
  initialise();
  using Visit = void (*)(void*, CUfunction, void*);
  const auto visit = slot<size_t (*)(CUcontext, CUmodule, Visit, void*)>(kToolsModule, 7);
  std::vector<CUfunction> seen;
  const Visit collect = [](void* user, CUfunction function, void*) {
    static_cast<std::vector<CUfunction>*>(user)->push_back(function);
  };
  CHECK(visit(nullptr, kModule, collect, &seen) == 2);
  CHECK(seen == std::vector<CUfunction>{functionAt(1), functionAt(2)});
  CHECK(visit(nullptr, nullptr, collect, &seen) == 0);
  CUmodule module = nullptr;
  CHECK(slot<CUresult (*)(CUmodule*, const void*)>(kCudart, 1)(&module, &kFakes) == CUDA_SUCCESS);
  CHECK(module == kModule);
}

TEST_CASE("export tables: the self-test's slot") {
  initialise();
  const auto check = slot<CUresult (*)(uint32_t, uint64_t, uint8_t*)>(kIntegrity, 1);
  uint8_t out[16] = {};
#if GPUPOOL_CUDART_SELFTEST
  REQUIRE(check(13002, 1'700'000'000, out) == CUDA_SUCCESS);
  std::vector<selftest::DeviceIdentity> devices(2);
  for (int i = 0; i < 2; ++i) {
    std::memset(devices[i].uuid.bytes, 0x10 + i, 16);
    devices[i].pciDomain = 1;
    devices[i].pciBus = 2 + i;
    devices[i].pciDevice = 3;
  }
  const auto address = [](const void* pointer) { return reinterpret_cast<uint64_t>(pointer); };
  const selftest::Question question{kDriverVersion,
                                    13002,
                                    static_cast<uint32_t>(getpid()),
                                    static_cast<uint32_t>(pthread_self()),
                                    address(table(kCudart)),
                                    address(table(kIntegrity)),
                                    address(table(kIntegrity)[1]),
                                    1'700'000'000};
  const auto expected = selftest::answer(question, devices);
  CHECK(std::memcmp(out, expected.data(), 16) == 0);
#else
  CHECK(check(13002, 1'700'000'000, out) == CUDA_ERROR_NOT_SUPPORTED);
#endif
}
