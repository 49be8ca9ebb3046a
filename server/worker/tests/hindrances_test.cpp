// What a session tells of why it could not be moved.
#include "server/worker/hindrances.h"

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <filesystem>

#include "server/worker/tests/client.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;
using namespace std::chrono_literals;

#define ROW(name) schema::RowOf<name>::id

namespace {

constexpr uint64_t kModule = makeHandle(handles::Kind::module, 1, 1);
constexpr char kHeap[] =
    ".version 9.0\n.target sm_75\n.address_size 64\n"
    ".extern .func (.param .b64 r) malloc (.param .b64 n);\n.visible .entry k() { ret; }\n";
constexpr char kPlain[] = ".version 9.0\n.target sm_75\n.address_size 64\n.visible .entry k() { ret; }\n";
using Reasons = std::vector<std::string>;

class Cache {
 public:
  Cache() : path_(mkdtemp(name_)) {}
  ~Cache() { std::filesystem::remove_all(path_); }
  // Some other process trims it.
  void empty() {
    for (const auto& file : std::filesystem::directory_iterator(path_)) std::filesystem::remove(file);
  }
  int open() const { return dup(openFolder(path_)); }

 private:
  char name_[32] = "/tmp/gpupool-test-XXXXXX";
  std::string path_;
};

class Watched {
 public:
  explicit Watched(Session& session)
      : watch_(session, [this](const Reasons& now) {
          std::lock_guard lock(mutex_);
          told_.push_back(now);
          came_.notify_all();
        }) {}
  Reasons next() {
    std::unique_lock lock(mutex_);
    REQUIRE(came_.wait_for(lock, 20s, [this] { return !told_.empty(); }));
    const Reasons first = told_.front();
    told_.pop_front();
    return first;
  }
  bool nothing() {
    std::lock_guard lock(mutex_);
    return told_.empty();
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<Reasons> told_;
  HindranceWatch watch_;
};

void load(Client& client, std::span<const char> code, uint64_t module = kModule) {
  const auto loading = client.loading(module, code);
  REQUIRE(client.await(ROW("sessionModuleLoad"), loading).status() == CUDA_SUCCESS);
}

void unload(Client& client, uint64_t module = kModule) {
  REQUIRE(client.await(ROW("cuModuleUnload"), Arguments().value(module)).status() == CUDA_SUCCESS);
}

}  // namespace

TEST_CASE(
    "kernels that may use the device's heap are told of when they are loaded, until they are unloaded") {
  Cache cache;
  Client client(softDriver(), nullptr, cache.open());
  client.open();
  CHECK(hindrances(*client.session).empty());
  Watched watched(*client.session);
  load(client, kHeap);
  const Reasons heap{"kernels of the program may use the device's heap (malloc, new)"};
  CHECK(watched.next() == heap);
  CHECK(hindrances(*client.session) == heap);
  const uint64_t other = makeHandle(handles::Kind::module, 2, 1);
  load(client, kPlain, other);
  load(client, kHeap, makeHandle(handles::Kind::module, 3, 1));
  unload(client, other);
  unload(client);
  CHECK(hindrances(*client.session) == heap);
  std::this_thread::sleep_for(2 * HindranceWatch::kLook);
  CHECK(watched.nothing());  // it is what it was
  unload(client, makeHandle(handles::Kind::module, 3, 1));
  CHECK(watched.next().empty());
}

TEST_CASE("code that is not in the cache, or not any more, is told of") {
  Cache cache;
  const bool kept = GENERATE(true, false);
  Client client(softDriver(), nullptr, kept ? cache.open() : -1);
  client.open();
  load(client, kPlain);
  cache.empty();
  Watched watched(*client.session);
  CHECK(watched.next() ==
        Reasons{"a code image of the program is not in the server's cache, or cannot be read"});
}

TEST_CASE("the end of a context ends what hinders in it") {
  Cache cache;
  Client client(softDriver(), nullptr, cache.open());
  client.open();
  load(client, kHeap);
  Watched watched(*client.session);
  CHECK(watched.next().size() == 1);
  REQUIRE(client.await(ROW("cuDevicePrimaryCtxReset_v2"), Arguments().value(0)).status() == CUDA_SUCCESS);
  CHECK(watched.next().empty());
}

TEST_CASE("arrays can be copied but for formats of blocks or planes, and what has no memory of its own") {
  CUDA_ARRAY3D_DESCRIPTOR_v2 shape{16, 16, 0, CU_AD_FORMAT_FLOAT, 4, 0};
  CHECK(canBeCopied(shape));
  shape.Flags = CUDA_ARRAY3D_SPARSE;
  CHECK_FALSE(canBeCopied(shape));
  shape.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING;
  CHECK_FALSE(canBeCopied(shape));
  for (const CUarray_format format : {CU_AD_FORMAT_NV12, CU_AD_FORMAT_BC1_UNORM}) {
    shape = {16, 16, 0, format, 3, 0};
    CHECK_FALSE(canBeCopied(shape));
  }
  Client client;
  client.open();
  shape = {16, 16, 2, CU_AD_FORMAT_UNSIGNED_INT8, 2, CUDA_ARRAY3D_LAYERED};
  const uint64_t array = makeHandle(handles::Kind::array, 1, 1);
  REQUIRE(
      client.await(ROW("cuArray3DCreate_v2"), Arguments().value(array).value(1).structure(shape)).status() ==
      CUDA_SUCCESS);
  CHECK(hindrances(*client.session).empty());
}
