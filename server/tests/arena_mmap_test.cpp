// The arena that makes module globals reproducible, as a library loaded later meets it.
#include "server/arena_mmap.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>
#include <vector>

#include "catch.h"

using namespace gpupool::server;

namespace {

constexpr int kAnonymous = MAP_PRIVATE | MAP_ANONYMOUS;
constexpr size_t kMiB = size_t{1} << 20;

using Mmap = void* (*)(void*, size_t, int);

Mmap loadCaller() {
  void* library = dlopen(MMAP_CALLER, RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library != nullptr);
  return reinterpret_cast<Mmap>(dlsym(library, "callMmap"));
}

bool inArena(const void* place) {
  const auto address = reinterpret_cast<uint64_t>(place);
  return address >= kGlobalArenaBase && address < kGlobalArenaBase + kGlobalArenaBytes;
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
TEST_CASE("under a sanitizer the arena stays away") {
  CHECK_FALSE(reserveGlobalArena());
  Mmap call = loadCaller();
  PlaceGlobals guard;
  CHECK_FALSE(inArena(call(nullptr, 2 * kMiB, kAnonymous)));
}
#else
namespace {

// The addresses that a fresh process hands out, after `noise` allocations of its own.
std::vector<void*> placesInChild(Mmap call, int noise) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    for (int i = 0; i < noise; ++i) call(nullptr, 3 * kMiB, kAnonymous);
    void* places[3] = {};
    {
      PlaceGlobals guard;
      places[0] = call(nullptr, 2 * kMiB, kAnonymous);
      places[1] = call(nullptr, 5 * kMiB + 1, kAnonymous);
      munmap(places[0], 2 * kMiB);
      places[2] = call(nullptr, 2 * kMiB, kAnonymous);
    }
    _exit(write(ends[1], places, sizeof places) == sizeof places ? 0 : 1);
  }
  std::vector<void*> places(3);
  REQUIRE(read(ends[0], places.data(), 3 * sizeof(void*)) == static_cast<ssize_t>(3 * sizeof(void*)));
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  close(ends[0]);
  close(ends[1]);
  return places;
}

}  // namespace

TEST_CASE("only guarded, large, anonymous requests without a hint are placed") {
  REQUIRE(reserveGlobalArena());
  REQUIRE(reserveGlobalArena());
  Mmap call = loadCaller();
  CHECK_FALSE(inArena(call(nullptr, 4 * kMiB, kAnonymous)));
  PlaceGlobals guard;
  void* place = call(nullptr, 4 * kMiB, kAnonymous);
  REQUIRE(inArena(place));
  CHECK(reinterpret_cast<uint64_t>(place) % kGlobalArenaAlignment == 0);
  std::memset(place, 1, 4 * kMiB);
  CHECK(munmap(place, 4 * kMiB) == 0);
  CHECK_FALSE(inArena(call(nullptr, kMiB - 1, kAnonymous)));
  CHECK_FALSE(inArena(call(reinterpret_cast<void*>(0x7000'0000'0000), 4 * kMiB, kAnonymous)));
  CHECK_FALSE(inArena(call(nullptr, 4 * kMiB, kAnonymous | MAP_32BIT)));
  {
    PlaceGlobals nested;
  }
  CHECK(inArena(call(nullptr, kMiB, kAnonymous)));
  void* elsewhere = nullptr;
  std::thread([&] { elsewhere = call(nullptr, 4 * kMiB, kAnonymous); }).join();
  CHECK_FALSE(inArena(elsewhere));
}

TEST_CASE("the same requests get the same places, whatever went before") {
  REQUIRE(reserveGlobalArena());
  Mmap call = loadCaller();
  const auto first = placesInChild(call, 0);
  const auto second = placesInChild(call, 37);
  CHECK(first == second);
  CHECK(inArena(first[0]));
  CHECK(first[2] != first[0]);
}

TEST_CASE("a request that does not fit goes to the kernel and is counted") {
  REQUIRE(reserveGlobalArena());
  Mmap call = loadCaller();
  PlaceGlobals guard;
  const uint64_t misses = globalArenaUse().misses;
  void* place = call(nullptr, kGlobalArenaBytes + kMiB, kAnonymous | MAP_NORESERVE);
  CHECK_FALSE(inArena(place));
  CHECK(globalArenaUse().misses == misses + 1);
  if (place != MAP_FAILED) munmap(place, kGlobalArenaBytes + kMiB);
}
#endif
