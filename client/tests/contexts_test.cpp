// The expected values are what driver 580.159 answered to the same calls on an H200.
#include "client/contexts.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"

using namespace gpupool::client;

namespace {

std::mutex logMutex;
std::vector<std::string> remoteLog;
CUresult nextResult = CUDA_SUCCESS;

CUresult note(const std::string& text) {
  std::lock_guard lock(logMutex);
  remoteLog.push_back(text);
  return nextResult;
}

const RemoteContexts fakeRemote{
    [](CUdevice device, unsigned flags, CUcontext) {
      return note("activate " + std::to_string(device) + " " + std::to_string(flags));
    },
    [](CUdevice device, unsigned flags, CUcontext) {
      return note("create " + std::to_string(device) + " " + std::to_string(flags));
    },
    [](CUcontext, unsigned flags) { return note("flags " + std::to_string(flags)); },
    [](CUcontext) { return note("destroy"); }};

// Contexts are never destructed in the product, and not here; the list keeps leak checkers quiet.
Contexts& fresh(int devices = 2) {
  static auto* kept = new std::vector<Contexts*>;
  auto* made = kept->emplace_back(new Contexts);
  made->start(devices, fakeRemote);
  CUcontext ignored;
  while (made->pop(&ignored) == CUDA_SUCCESS) {
  }
  remoteLog.clear();
  nextResult = CUDA_SUCCESS;
  return *made;
}

CUcontext current(Contexts& contexts) {
  CUcontext context = nullptr;
  contexts.getCurrent(&context);
  return context;
}

struct Destructed {
  CUcontext context;
  void* key;
  void* value;
};
std::vector<Destructed> destructed;
void recordDestruction(CUcontext context, void* key, void* value) {
  destructed.push_back({context, key, value});
}

void* pointer(uintptr_t value) { return reinterpret_cast<void*>(value); }

}  // namespace

TEST_CASE("contexts: a primary handle exists before it is retained and stays the same") {
  Contexts& contexts = fresh();
  CUcontext handle = nullptr, retained = nullptr;
  REQUIRE(contexts.primaryHandle(&handle, 1) == CUDA_SUCCESS);
  CHECK(contexts.primaryHandle(&handle, 2) == CUDA_ERROR_INVALID_DEVICE);
  CHECK(contexts.primaryHandle(&handle, -1) == CUDA_ERROR_INVALID_DEVICE);
  CHECK(remoteLog.empty());
  CHECK(contexts.primaryRetain(&retained, 1) == CUDA_SUCCESS);
  CHECK(retained == handle);
  CHECK(contexts.primaryRetain(&retained, 1) == CUDA_SUCCESS);
  CHECK(remoteLog == std::vector<std::string>{"activate 1 0"});
  CHECK(contexts.primaryRetain(nullptr, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(contexts.primaryRetain(&retained, 9) == CUDA_ERROR_INVALID_DEVICE);
}

TEST_CASE("contexts: an inactive primary context can be current but refuses work") {
  Contexts& contexts = fresh();
  CUcontext handle;
  contexts.primaryHandle(&handle, 0);
  CHECK(contexts.setCurrent(handle) == CUDA_SUCCESS);
  CHECK(current(contexts) == handle);
  CUdevice device = -1;
  CHECK(contexts.getDevice(&device, nullptr) == CUDA_SUCCESS);
  CHECK(device == 0);
  unsigned flags = 77, version = 0;
  CHECK(contexts.getFlags(&flags) == CUDA_SUCCESS);
  CHECK(flags == 0);
  Context* context = nullptr;
  CHECK(contexts.resolve(nullptr, &context) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CHECK(contexts.getApiVersion(handle, &version) == CUDA_ERROR_INVALID_CONTEXT);
  uint64_t id = 0;
  CHECK(contexts.getId(handle, &id) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  void* value = nullptr;
  CHECK(contexts.storageGet(&value, nullptr, pointer(1)) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts.storageGet(&value, handle, pointer(1)) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(contexts.storagePut(nullptr, pointer(1), nullptr, nullptr) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

TEST_CASE("contexts: without a current context") {
  Contexts& contexts = fresh();
  CUdevice device;
  unsigned flags;
  auto handle = reinterpret_cast<CUcontext>(5);
  void* value;
  CHECK(contexts.getDevice(&device, nullptr) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts.getFlags(&flags) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts.pop(&handle) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts.push(nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(contexts.setCurrent(nullptr) == CUDA_SUCCESS);
  CHECK(contexts.getApiVersion(nullptr, &flags) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts.attach(&handle, 0) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts.detach(nullptr) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts.destroy(nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(contexts.storageGet(&value, nullptr, pointer(1)) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts.getCurrent(&handle) == CUDA_SUCCESS);
  CHECK(handle == nullptr);
  CHECK(contexts.setCurrent(reinterpret_cast<CUcontext>(0x1234)) == CUDA_ERROR_INVALID_CONTEXT);
}

TEST_CASE("contexts: retains are counted, reset keeps the count, ids tell lives apart") {
  Contexts& contexts = fresh();
  CUcontext handle;
  unsigned flags = 9;
  int active = 9;
  uint64_t firstId = 0, secondId = 0;
  CHECK(contexts.primaryRelease(0) == CUDA_ERROR_INVALID_CONTEXT);
  contexts.primaryRetain(&handle, 0);
  contexts.primaryRetain(&handle, 0);
  contexts.getId(handle, &firstId);
  CHECK(contexts.primaryGetState(0, &flags, &active) == CUDA_SUCCESS);
  CHECK(active == 1);
  CHECK(contexts.primaryReset(0) == CUDA_SUCCESS);
  contexts.primaryGetState(0, &flags, &active);
  CHECK(active == 0);
  CHECK(contexts.primaryRelease(0) == CUDA_SUCCESS);
  CHECK(contexts.primaryRelease(0) == CUDA_SUCCESS);
  CHECK(contexts.primaryRelease(0) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts.primaryReset(0) == CUDA_SUCCESS);
  contexts.primaryRetain(&handle, 0);
  contexts.getId(handle, &secondId);
  CHECK(firstId != 0);
  CHECK(secondId != firstId);
  CHECK(remoteLog == std::vector<std::string>{"activate 0 0", "destroy", "activate 0 0"});
  CHECK(contexts.destroy(handle) == CUDA_ERROR_INVALID_CONTEXT);
}

TEST_CASE("contexts: a failed activation leaves the context inactive") {
  Contexts& contexts = fresh();
  CUcontext handle = nullptr;
  nextResult = CUDA_ERROR_OUT_OF_MEMORY;
  CHECK(contexts.primaryRetain(&handle, 0) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(contexts.create(&handle, 0, 0) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(current(contexts) == nullptr);
  nextResult = CUDA_SUCCESS;
  CHECK(contexts.primaryRelease(0) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(contexts.primaryRetain(&handle, 0) == CUDA_SUCCESS);
}

TEST_CASE("contexts: flags") {
  Contexts& contexts = fresh();
  CUcontext primary, created;
  unsigned flags = 0;
  int active;
  CHECK(contexts.primarySetFlags(0, CU_CTX_SCHED_BLOCKING_SYNC) == CUDA_SUCCESS);
  CHECK(contexts.primarySetFlags(0, 0x10000) == CUDA_ERROR_INVALID_VALUE);
  CHECK(contexts.primarySetFlags(0, 3) == CUDA_ERROR_INVALID_VALUE);
  contexts.primaryRetain(&primary, 0);
  contexts.setCurrent(primary);
  contexts.primaryGetState(0, &flags, &active);
  CHECK(flags == 4);
  contexts.getFlags(&flags);
  CHECK(flags == 12);
  contexts.primaryReset(0);
  contexts.primaryGetState(0, &flags, &active);
  CHECK(flags == 0);
  CHECK(contexts.create(&created, 0x100000, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(contexts.create(&created, 0, 77) == CUDA_ERROR_INVALID_DEVICE);
  CHECK(contexts.create(nullptr, 0, 0) == CUDA_ERROR_INVALID_VALUE);
  REQUIRE(contexts.create(&created, CU_CTX_SCHED_YIELD | CU_CTX_MAP_HOST, 0) == CUDA_SUCCESS);
  contexts.getFlags(&flags);
  CHECK(flags == 10);
  CHECK(contexts.setFlags(CU_CTX_SCHED_SPIN) == CUDA_SUCCESS);
  contexts.getFlags(&flags);
  CHECK(flags == 9);
}

TEST_CASE("contexts: the stack") {
  Contexts& contexts = fresh();
  CUcontext a, b, popped;
  REQUIRE(contexts.create(&a, 0, 0) == CUDA_SUCCESS);
  REQUIRE(contexts.create(&b, 0, 1) == CUDA_SUCCESS);
  CUdevice device;
  contexts.getDevice(&device, nullptr);
  CHECK(device == 1);
  contexts.getDevice(&device, a);
  CHECK(device == 0);
  CHECK(contexts.setCurrent(nullptr) == CUDA_SUCCESS);
  CHECK(current(contexts) == a);
  CHECK(contexts.push(b) == CUDA_SUCCESS);
  CHECK(contexts.push(b) == CUDA_SUCCESS);
  CHECK(contexts.setCurrent(a) == CUDA_SUCCESS);
  CHECK(contexts.pop(&popped) == CUDA_SUCCESS);
  CHECK(popped == a);
  CHECK(current(contexts) == b);
  for (int i = 0; i < 1000; ++i) REQUIRE(contexts.push(a) == CUDA_SUCCESS);
  CHECK(contexts.destroy(a) == CUDA_SUCCESS);
  int pops = 0;
  while (contexts.pop(&popped) == CUDA_SUCCESS) ++pops;
  CHECK(pops == 1001);  // 999 dead handles, b, and the dead a at the bottom
}

TEST_CASE("contexts: destroyed while current elsewhere") {
  Contexts& contexts = fresh();
  CUcontext created;
  REQUIRE(contexts.create(&created, 0, 0) == CUDA_SUCCESS);
  std::thread([&] {
    CHECK(current(contexts) == nullptr);  // each thread has its own stack
    contexts.setCurrent(created);
    std::thread([&] { CHECK(contexts.destroy(created) == CUDA_SUCCESS); }).join();
    CHECK(current(contexts) == created);
    Context* context;
    CHECK(contexts.resolve(nullptr, &context) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    unsigned value;
    CHECK(contexts.getApiVersion(created, &value) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(contexts.push(created) == CUDA_SUCCESS);
    CHECK(contexts.destroy(created) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    CUcontext popped = nullptr;
    CHECK(contexts.pop(&popped) == CUDA_SUCCESS);
    CHECK(popped == created);
  }).join();
  CHECK(current(contexts) == created);
  CHECK_FALSE(contexts.isAlive(created));
}

TEST_CASE("contexts: a green context's stands for the primary context") {
  Contexts& contexts = fresh();
  CUcontext primary = nullptr, top = nullptr;
  REQUIRE(contexts.primaryRetain(&primary, 0) == CUDA_SUCCESS);
  const auto green = reinterpret_cast<CUgreenCtx>(uint64_t{64});
  Context* mine = contexts.addGreen(0, green, nullptr);
  REQUIRE(mine != nullptr);
  CHECK(mine->handle != primary);
  CHECK(contexts.find(mine->handle) == contexts.find(primary));
  CHECK(contexts.greenOf(mine->handle) == green);
  CHECK(contexts.greenOf(primary) == nullptr);
  Context* found = nullptr;
  CHECK(contexts.resolve(mine->handle, &found) == CUDA_SUCCESS);
  CHECK(found->handle == primary);
  CHECK(contexts.currentGreen() == nullptr);
  REQUIRE(contexts.push(mine->handle) == CUDA_SUCCESS);
  CHECK(current(contexts) == mine->handle);
  CHECK(contexts.working() == primary);
  CHECK(contexts.currentGreen() == mine);
  CHECK(contexts.resolve(nullptr, &found) == CUDA_SUCCESS);
  CHECK(found->handle == primary);
  CHECK(contexts.destroy(mine->handle) == CUDA_ERROR_INVALID_CONTEXT);
  size_t alive = 0;
  contexts.forEachAlive([&](Context&) { ++alive; });
  CHECK(alive == 1);
  // Its end is not the primary context's.
  mine->alive = false;
  CHECK(contexts.resolve(nullptr, &found) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CHECK(contexts.resolve(mine->handle, &found) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CHECK(contexts.resolve(primary, &found) == CUDA_SUCCESS);
  CHECK(contexts.pop(&top) == CUDA_SUCCESS);
  CHECK(top == mine->handle);
  CHECK(contexts.primaryRelease(0) == CUDA_SUCCESS);
}

TEST_CASE("contexts: old contexts, attach and detach") {
  Contexts& contexts = fresh();
  CUcontext created, attached;
  unsigned version = 0;
  REQUIRE(contexts.create(&created, 0, 0, kApiVersionOld) == CUDA_SUCCESS);
  contexts.getApiVersion(created, &version);
  CHECK(version == 3010);
  CHECK(contexts.attach(&attached, 0) == CUDA_SUCCESS);
  CHECK(attached == created);
  CHECK(contexts.attach(&attached, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(contexts.detach(created) == CUDA_SUCCESS);
  CHECK(contexts.isAlive(created));
  CHECK(contexts.detach(created) == CUDA_SUCCESS);
  CHECK_FALSE(contexts.isAlive(created));
  CHECK(current(contexts) == nullptr);
}

TEST_CASE("contexts: storage destructors run once, newest first, not for removed entries") {
  Contexts& contexts = fresh();
  CUcontext handle;
  contexts.primaryRetain(&handle, 0);
  contexts.setCurrent(handle);
  destructed.clear();
  CHECK(contexts.storagePut(nullptr, pointer(0x11), pointer(0xa1), recordDestruction) == CUDA_SUCCESS);
  CHECK(contexts.storagePut(handle, pointer(0x11), pointer(0xa2), recordDestruction) ==
        CUDA_ERROR_INVALID_HANDLE);
  void* value = nullptr;
  CHECK(contexts.storageGet(&value, handle, pointer(0x11)) == CUDA_SUCCESS);
  CHECK(value == pointer(0xa1));
  CHECK(contexts.storageGet(&value, nullptr, pointer(0x99)) == CUDA_ERROR_INVALID_HANDLE);
  contexts.storagePut(handle, pointer(0x12), pointer(0xb), recordDestruction);
  contexts.storagePut(handle, pointer(0x13), pointer(0xc), nullptr);
  contexts.storagePut(handle, pointer(0x14), pointer(0xd), recordDestruction);
  CHECK(contexts.storageRemove(handle, pointer(0x14)) == CUDA_SUCCESS);
  CHECK(contexts.storageRemove(handle, pointer(0x14)) == CUDA_ERROR_INVALID_HANDLE);
  contexts.primaryReset(0);
  REQUIRE(destructed.size() == 2);
  CHECK(destructed[0].key == pointer(0x12));
  CHECK(destructed[1].key == pointer(0x11));
  CHECK(destructed[1].value == pointer(0xa1));
  CHECK(destructed[1].context == handle);
  contexts.primaryRetain(&handle, 0);
  CHECK(contexts.storageGet(&value, handle, pointer(0x11)) == CUDA_ERROR_INVALID_HANDLE);
  contexts.storagePut(handle, pointer(0x21), pointer(0xe), recordDestruction);
  contexts.primaryRelease(0);
  CHECK(destructed.size() == 2);  // one retain is left
  contexts.primaryRelease(0);
  CHECK(destructed.size() == 3);
}

TEST_CASE("contexts: storage destructors may call in") {
  static Contexts* shared = nullptr;
  static CUresult inside[3];
  Contexts& contexts = fresh();
  shared = &contexts;
  CUcontext handle;
  contexts.primaryRetain(&handle, 0);
  contexts.setCurrent(handle);
  contexts.storagePut(nullptr, pointer(1), pointer(2), [](CUcontext context, void*, void*) {
    unsigned version;
    CUcontext again;
    inside[0] = shared->getApiVersion(context, &version);
    inside[1] = shared->storagePut(context, pointer(3), nullptr, nullptr);
    inside[2] = shared->primaryRetain(&again, 0);  // must not deadlock
  });
  contexts.primaryReset(0);
  CHECK(inside[0] == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(inside[1] == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CHECK(inside[2] == CUDA_SUCCESS);
  CHECK(contexts.isAlive(handle));
}

TEST_CASE("contexts: limits are cached for one life") {
  Contexts& contexts = fresh();
  CUcontext handle;
  contexts.primaryRetain(&handle, 0);
  Context& context = *contexts.find(handle);
  size_t value = 1;
  CHECK_FALSE(context.cachedLimit(CU_LIMIT_STACK_SIZE, &value));
  context.storeLimit(CU_LIMIT_STACK_SIZE, 0);
  CHECK(context.cachedLimit(CU_LIMIT_STACK_SIZE, &value));
  CHECK(value == 0);
  contexts.primaryReset(0);
  CHECK_FALSE(context.cachedLimit(CU_LIMIT_STACK_SIZE, &value));
}

TEST_CASE("contexts: a version belongs to one life of one context") {
  Contexts& contexts = fresh();
  CUcontext first, second, made;
  contexts.primaryRetain(&first, 0);
  contexts.primaryRetain(&second, 1);
  contexts.create(&made, 0, 0);
  std::vector<uint64_t> seen;
  auto isNew = [&](CUcontext context) {
    const uint64_t version = contexts.find(context)->version;
    const bool fresh = version != 0 && std::find(seen.begin(), seen.end(), version) == seen.end();
    seen.push_back(version);
    return fresh;
  };
  CHECK(isNew(first));
  CHECK(isNew(second));
  CHECK(isNew(made));
  const uint64_t before = contexts.find(second)->version;
  contexts.primaryReset(0);
  contexts.primaryRetain(&first, 0);
  CHECK(isNew(first));
  CHECK(contexts.find(second)->version == before);
  contexts.destroy(made);
  contexts.create(&made, 0, 0);
  CHECK(isNew(made));
  contexts.find(made)->newVersion();
  CHECK(isNew(made));
}

TEST_CASE("contexts: threads retaining, using and releasing at once") {
  Contexts& contexts = fresh(1);
  std::atomic<int> destructions{0}, puts{0};
  static std::atomic<int>* counter = nullptr;
  counter = &destructions;
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 500; ++i) {
        CUcontext handle;
        contexts.primaryRetain(&handle, 0);
        contexts.setCurrent(handle);
        void* key = pointer(0x1000 * (static_cast<uintptr_t>(t) + 1));
        void* value;
        if (contexts.storageGet(&value, nullptr, key) != CUDA_SUCCESS &&
            contexts.storagePut(nullptr, key, pointer(7),
                                [](CUcontext, void*, void*) { counter->fetch_add(1); }) == CUDA_SUCCESS) {
          ++puts;
        }
        contexts.primaryRelease(0);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(puts == destructions);
  std::lock_guard lock(logMutex);
  CHECK(remoteLog.size() % 2 == 0);
  for (size_t i = 0; i < remoteLog.size(); ++i)
    REQUIRE(remoteLog[i] == (i % 2 == 0 ? "activate 0 0" : "destroy"));
}

TEST_CASE("contexts: the hot calls cost nanoseconds", "[.timing]") {
  Contexts& contexts = fresh();
  CUcontext handle;
  contexts.primaryRetain(&handle, 0);
  contexts.setCurrent(handle);
  for (uintptr_t key = 1; key <= 20; ++key)
    contexts.storagePut(nullptr, pointer(key * 0x240), pointer(key), nullptr);
  constexpr int kRounds = 200000;
  const auto start = std::chrono::steady_clock::now();
  uintptr_t sum = 0;
  for (int i = 0; i < kRounds; ++i) {
    void* value = nullptr;
    CUdevice device = 0;
    contexts.storageGet(&value, nullptr, pointer(0x240 * (1 + static_cast<uintptr_t>(i % 20))));
    contexts.getDevice(&device, nullptr);
    sum += reinterpret_cast<uintptr_t>(value);
  }
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  WARN("storage get + device: " << time.count() / kRounds << " ns");
  CHECK(sum == uintptr_t{kRounds} / 20 * 210);
}
