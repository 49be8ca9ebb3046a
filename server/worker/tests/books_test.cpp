// The worker's books without a session: objects, images, mirrors, captured output.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <random>
#include <sstream>
#include <string>
#include <thread>

#include "base/hmac.h"
#include "schema/handle_ids.h"
#include "schema/mirror.h"
#include "server/host_room.h"
#include "server/worker/images.h"
#include "server/worker/objects.h"
#include "server/worker/output.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
using handles::Kind;
using handles::makeHandle;

namespace {

template <class T>
T real(uint64_t v) {
  return reinterpret_cast<T>(v);
}

schema::ImageName nameOf(std::span<const std::byte> bytes) {
  schema::ImageName name;
  auto digest = sha256(bytes);
  std::memcpy(name.words, digest.data(), sizeof name.words);
  name.bytes = bytes.size();
  return name;
}

// Takes runs over as the peer does. The bytes that travelled, without their headers.
size_t take(schema::MirrorBase& base, std::vector<std::byte>& memory, std::span<const unsigned char> runs) {
  schema::Reader in(std::as_bytes(runs));
  size_t travelled = 0;
  while (in.remaining() > 0) {
    auto offset = in.value<uint64_t>();
    auto bytes = in.blob();
    REQUIRE_FALSE(in.bad());
    REQUIRE(offset + bytes.size() <= memory.size());
    std::memcpy(memory.data() + offset, bytes.data(), bytes.size());
    base.apply(offset, bytes);
    travelled += bytes.size();
  }
  return travelled;
}

// Everything that differs, in messages of `room` bytes.
size_t exchange(schema::MirrorBase& from, std::vector<std::byte>& source, schema::MirrorBase& to,
                std::vector<std::byte>& target, size_t room) {
  size_t travelled = 0;
  do {
    std::vector<unsigned char> out(room);
    size_t used = from.collect(source.data(), source.size(), out);
    REQUIRE(used <= room);
    travelled += take(to, target, std::span(out).first(used));
  } while (from.more());
  return travelled;
}

}  // namespace

TEST_CASE("objects: names and kinds") {
  Objects objects({4, 9});
  const uint64_t stream = makeHandle(Kind::stream, 1, 1);
  CUstream found = nullptr;
  CHECK_FALSE(objects.find(stream, found));
  CHECK(objects.mayMint(Kind::stream, stream));
  CHECK_FALSE(objects.mayMint(Kind::event, stream));
  CHECK_FALSE(objects.mayMint(Kind::stream, makeHandle(Kind::stream, schema::kServerIndexBit | 1, 1)));
  CHECK_FALSE(objects.mayMint(Kind::stream, 0x12345670));
  objects.mint(stream, real<CUstream>(0x7000));
  CHECK_FALSE(objects.mayMint(Kind::stream, stream));
  REQUIRE(objects.find(stream, found));
  CHECK(found == real<CUstream>(0x7000));
  CUevent event = nullptr;
  CHECK_FALSE(objects.find(stream, event));
  CHECK(objects.name(real<CUstream>(0x7000)) == stream);
  CHECK(objects.known(real<CUevent>(0x7000)) == 0);  // one address, another kind

  for (uint64_t special : {0, 1, 2}) {
    REQUIRE(objects.find(special, found));
    CHECK(found == real<CUstream>(special));
    CHECK(objects.name(real<CUstream>(special)) == special);
  }
  CHECK_FALSE(objects.find(1, event));

  objects.retire(stream);
  CHECK_FALSE(objects.find(stream, found));
  CHECK(objects.known(real<CUstream>(0x7000)) == 0);
}

TEST_CASE("objects: handles the driver made") {
  Objects objects({0});
  const uint64_t first = objects.name(real<CUgraphNode>(0x9000));
  CHECK(handles::kindOf(first) == Kind::graphNode);
  CHECK(schema::mintedByServer(first));
  CHECK(objects.name(real<CUgraphNode>(0x9000)) == first);
  objects.forget(real<CUgraphNode>(0x9000));
  CHECK(objects.name(real<CUgraphNode>(0x9000)) != first);

  // An address used again belongs to its new object, and the old one's end does not touch it.
  const uint64_t old = makeHandle(Kind::event, 1, 1), young = makeHandle(Kind::event, 2, 1);
  objects.mint(old, real<CUevent>(0x100));
  objects.mint(young, real<CUevent>(0x100));
  objects.retire(old);
  CHECK(objects.name(real<CUevent>(0x100)) == young);

  const uint64_t kernel = makeHandle(Kind::kernel, 1, 1);
  objects.mint(kernel, real<CUkernel>(0x200));
  CUfunction function = nullptr;
  CHECK(objects.find(kernel, function));
  CHECK(objects.name(real<CUfunction>(0x200)) == kernel);
}

TEST_CASE("objects: what the worker names is noted, and named again as it was") {
  Objects objects({0});
  std::vector<uint64_t> made, again;
  {
    Objects::Naming naming(made);
    objects.name(real<CUgraphNode>(0x100));
    objects.name(real<CUgraphNode>(0x200));
    objects.name(real<CUgraphNode>(0x100));
  }
  objects.name(real<CUgraphNode>(0x300));
  REQUIRE(made.size() == 2);
  Objects other({0});
  const std::vector<uint64_t> given{made[1], made[0]};
  {
    Objects::Naming outer(again, given);
    std::vector<uint64_t> inner;
    {
      Objects::Naming naming(inner);
      CHECK(other.name(real<CUgraphNode>(0x1000)) == made[1]);
    }
    CHECK(inner == std::vector<uint64_t>{made[1]});
    CHECK(other.name(real<CUgraphNode>(0x2000)) == made[0]);
  }
  CHECK(again == std::vector<uint64_t>{made[1], made[0]});
  other.setNamed(objects.named());
  const uint64_t next = other.name(real<CUgraphNode>(0x3000));
  CHECK(handles::indexOf(next) == handles::indexOf(made[0]) + 3);
}

TEST_CASE("objects: devices are the lease's") {
  Objects objects({4, 9});
  CUdevice device = -1;
  REQUIRE(objects.device(1, device));
  CHECK(device == 9);
  CHECK_FALSE(objects.device(2, device));
  CHECK_FALSE(objects.device(~uint64_t{0}, device));
}

TEST_CASE("images: pieces, in order, checked, held for the loads that were announced") {
  std::vector<std::byte> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  Images images;
  auto name = nameOf(bytes);
  auto all = std::span<const std::byte>(bytes);
  CHECK_FALSE(images.offer(name));  // announces a load
  CHECK(images.append(name, 0, all.first(600)) == CUDA_SUCCESS);
  CHECK_FALSE(images.offer(name));  // another thread's: the second
  CHECK(images.take(name) == nullptr);
  CHECK(images.append(name, 700, all.subspan(700)) == CUDA_ERROR_INVALID_VALUE);  // a gap
  CHECK(images.append(name, 500, all.subspan(500)) ==
        CUDA_ERROR_INVALID_VALUE);                                // neither new nor sent before
  CHECK(images.append(name, 0, all.first(600)) == CUDA_SUCCESS);  // another thread's, the same
  CHECK(images.append(name, 600, all.subspan(600)) == CUDA_SUCCESS);
  CHECK(images.append(name, 600, all.subspan(600)) == CUDA_SUCCESS);
  CHECK(images.offer(name));  // the third
  for (int load = 0; load < 3; ++load) {
    auto image = images.take(name);
    REQUIRE(image != nullptr);
    CHECK(std::ranges::equal(image->bytes(), bytes));
    CHECK(image->bytes().data()[bytes.size()] == std::byte{0});
  }
  CHECK(images.take(name) == nullptr);  // no longer than needed
  CHECK_FALSE(images.offer(name));

  auto longer = name;
  ++longer.bytes;  // the length belongs to the name
  CHECK(images.append(name, 0, all) == CUDA_SUCCESS);
  CHECK_FALSE(images.offer(longer));
  schema::ImageName none;
  CHECK(images.append(none, 0, {}) == CUDA_ERROR_OUT_OF_MEMORY);
  // A piece without bytes takes nothing, and stands for none.
  const auto lacking = nameOf(std::vector<std::byte>(60000, std::byte{9}));
  CHECK(images.append(lacking, 0, {}) == CUDA_SUCCESS);
  CHECK(images.take(lacking) == nullptr);
  auto vast = name;
  vast.bytes = Images::kMostBytes + 1;
  CHECK(images.append(vast, 0, all) == CUDA_ERROR_OUT_OF_MEMORY);
}

TEST_CASE("images: what is not what it was called is dropped, and may be sent again") {
  Images images;
  std::vector<std::byte> bytes(16), wrong(16, std::byte{1});
  auto name = nameOf(bytes);
  CHECK(images.append(name, 0, wrong) == CUDA_ERROR_INVALID_IMAGE);
  CHECK(images.take(name) == nullptr);
  CHECK(images.append(name, 0, bytes) == CUDA_SUCCESS);
  CHECK(images.take(name) != nullptr);
}

TEST_CASE("images: unfinished ones count too") {
  Images images;
  std::vector<std::byte> bytes(16);
  auto name = nameOf(bytes);
  name.bytes = Images::kMostBytes - 8;
  CHECK(images.append(name, 0, bytes) == CUDA_SUCCESS);
  auto second = name;
  second.words[0] ^= 1;
  CHECK(images.append(second, 0, bytes) == CUDA_ERROR_OUT_OF_MEMORY);
}

TEST_CASE("images: names that no load follows are bounded") {
  Images images;
  std::vector<std::byte> bytes(16);
  auto name = nameOf(bytes);
  for (uint64_t n = 0; n < Images::kMostNames; ++n) {
    schema::ImageName other;
    other.words[0] = n;
    other.bytes = 16;
    CHECK_FALSE(images.offer(other));
  }
  CHECK(images.append(name, 0, bytes) == CUDA_ERROR_OUT_OF_MEMORY);
}

TEST_CASE("mirrors: writers on both sides converge") {
  constexpr size_t kBytes = 3 * 4096 + 100;
  std::mt19937 random(1);
  schema::MirrorBase clientBase, workerBase;
  std::vector<std::byte> client(kBytes), worker(kBytes), expected(kBytes);
  for (int round = 0; round < 100; ++round) {
    // Even bytes are the client's, odd ones the worker's: neighbours, never the same byte.
    size_t changed = 0;
    for (unsigned n = random() % 200; n > 0; --n) {
      size_t at = random() % kBytes;
      auto value = static_cast<std::byte>(random());
      (at % 2 == 0 ? client : worker)[at] = value;
      expected[at] = value;
      ++changed;
    }
    size_t room = 24 + 8 * (random() % 512);
    size_t travelled = exchange(clientBase, client, workerBase, worker, room);
    travelled += exchange(workerBase, worker, clientBase, client, room);
    REQUIRE(client == expected);
    REQUIRE(worker == expected);
    REQUIRE(travelled <= changed);  // bytes neither side changed stay home
    REQUIRE(exchange(clientBase, client, workerBase, worker, 4096) == 0);
  }
}

namespace {

// Runs in the descriptors' absence: they are an Output's meanwhile.
class KeptDescriptors {
 public:
  ~KeptDescriptors() {
    for (int i = 0; i < 2; ++i) {
      dup2(saved_[i], i + 1);
      close(saved_[i]);
    }
  }

 private:
  int saved_[2] = {dup(STDOUT_FILENO), dup(STDERR_FILENO)};
};

bool say(int descriptor, const std::string& text) {
  return write(descriptor, text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

}  // namespace

TEST_CASE("mirrors: what the peer has may be anything") {
  std::mt19937 random(6);
  for (size_t room : {24, 1024, 1 << 20}) {
    CAPTURE(room);
    schema::MirrorBase base, peer;
    std::vector<std::byte> mine(10'000), its(mine.size());
    for (auto& byte : its) byte = std::byte(random());
    for (size_t i = 0; i < mine.size(); i += 3) mine[i] = std::byte(random());
    base.distrust();
    CHECK_FALSE(base.agreed());
    CHECK(exchange(base, mine, peer, its, room) == mine.size());
    CHECK(base.agreed());
    CHECK(its == mine);
    CHECK(exchange(peer, its, base, mine, room) == 0);
    mine[77] ^= std::byte{1};
    CHECK(exchange(base, mine, peer, its, room) == 1);
    CHECK(its == mine);
  }
}

#ifndef __SANITIZE_THREAD__  // the application's own race
TEST_CASE("mirrors: bytes that change while they are compared are sent by the next comparison") {
  schema::MirrorBase base, peer;
  std::vector<std::byte> mine(1 << 20), its(mine.size());
  std::atomic<bool> done{false};
  std::thread writer([&] {
    std::mt19937 random(7);
    for (int i = 0; i < 3'000'000; ++i)
      std::atomic_ref<std::byte>(mine[random() % mine.size()]).store(std::byte(i), std::memory_order_relaxed);
    done = true;
  });
  while (!done) exchange(base, mine, peer, its, 64 << 10);
  writer.join();
  exchange(base, mine, peer, its, 64 << 10);
  CHECK(std::memcmp(its.data(), mine.data(), mine.size()) == 0);
}
#endif

TEST_CASE("output: what the driver prints is taken once, in pieces where it is long") {
  std::fflush(stdout);
  std::string first, second, third, long1, long2, long3;
  bool wrote = false;
  {
    KeptDescriptors kept;
    Output output;
    std::printf("from the device\n");
    first = output.take();
    second = output.take();
    wrote = say(STDOUT_FILENO, "again");
    third = output.take();
    wrote = wrote && say(STDOUT_FILENO, std::string(Output::kMost, 'a') + "b");
    long1 = output.take();
    wrote = wrote && say(STDOUT_FILENO, "c");
    long2 = output.take();
    long3 = output.take();
  }
  CHECK(wrote);
  CHECK(first == "from the device\n");
  CHECK(second.empty());
  CHECK(third == "again");
  CHECK(long1 == std::string(Output::kMost, 'a'));
  CHECK(long2 == "bc");
  CHECK(long3.empty());
}

TEST_CASE("output: assertions are the client's, the rest of stderr is the log's") {
  const std::string assertion =
      "a.cu:8: void f(int): block: [0,0,0], thread: [40,0,0] Assertion `i < 100` failed.\n";
  int log[2];
  REQUIRE(pipe(log) == 0);
  std::string device, nothing;
  bool wrote = false;
  {
    KeptDescriptors kept;
    dup2(log[1], STDERR_FILENO);
    Output output;
    wrote =
        say(STDERR_FILENO, "a library complains\n" + assertion + "and again\n" + assertion + "half a line");
    device = output.takeErrors();
    nothing = output.takeErrors();
  }
  close(log[1]);
  char text[1000];
  const ssize_t n = read(log[0], text, sizeof text);
  close(log[0]);
  CHECK(wrote);
  CHECK(device == assertion + assertion);
  CHECK(nothing.empty());
  REQUIRE(n > 0);
  CHECK(std::string(text, static_cast<size_t>(n)) == "a library complains\nand again\nhalf a line");
}

TEST_CASE("host memory: what a session may pin leaves room for the others") {
  auto leavesRoom = [](const std::string& text, uint64_t bytes) {
    std::istringstream lines(text);
    return server::leavesRoom(readMemoryInfo(lines), bytes);
  };
  const std::string info =
      "MemTotal:       16777216 kB\nMemFree:         1 kB\nMemAvailable:    2097152 kB\n";
  CHECK(leavesRoom(info, uint64_t{1} << 30));  // 2 GiB are there, a sixteenth of 16 GiB stays
  CHECK_FALSE(leavesRoom(info, (uint64_t{1} << 30) + 4096));
  CHECK_FALSE(leavesRoom(info, ~uint64_t{0}));
  CHECK_FALSE(leavesRoom("MemTotal: 1048576 kB\nMemAvailable: 262144 kB\n", 4096));
  CHECK(leavesRoom("nothing of the kind", uint64_t{1} << 40));
  CHECK(hostHasRoom(4096));
}
