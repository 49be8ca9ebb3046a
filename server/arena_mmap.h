#pragma once
// Makes the addresses that the driver gives to module globals reproducible.
//
// The driver places globals in memory it gets from mmap, natively at random addresses. Linking this into an
// executable makes that executable export mmap and mmap64, which every library loaded later binds to. While a
// PlaceGlobals exists on the calling thread, anonymous requests without a hint of at least 1 MiB are served
// from a fixed arena, one after the other and never twice: the same driver calls in the same order give the
// same addresses, whatever else the process did before. All other requests go to the kernel untouched.
//
// What to guard: context creation first of all (driver 580 reserves there the address pools it places globals
// in; with module loading alone guarded nothing is served), loading of modules and libraries, and best every
// call of the one thread that executes a session. Measured on an H200: the same addresses in three runs with
// different heap histories.
//
// The caller serialises the calls it guards: order decides the addresses. Under AddressSanitizer and
// ThreadSanitizer, which own mmap themselves, nothing is exported and reserveGlobalArena() returns false.

#include <cstddef>
#include <cstdint>

namespace gpupool::server {

inline constexpr uint64_t kGlobalArenaBase = 0x4000'0000'0000;
inline constexpr uint64_t kGlobalArenaBytes = uint64_t{1} << 40;
inline constexpr size_t kGlobalArenaSmallest = size_t{1} << 20;
inline constexpr size_t kGlobalArenaAlignment = size_t{2} << 20;  // the driver's large pages

// Reserves the arena's addresses; once per process, before the first guarded call. False, and guards do
// nothing, if they are taken or a sanitizer runs: the session is then not restorable, but works.
bool reserveGlobalArena();

// Address space handed out so far, and requests that no longer fitted (served by the kernel instead).
struct GlobalArenaUse {
  uint64_t bytes = 0;
  uint64_t misses = 0;
};
GlobalArenaUse globalArenaUse();

// "Inside a driver call that may place globals", for this thread; nests.
class PlaceGlobals {
 public:
  PlaceGlobals();
  ~PlaceGlobals();
  PlaceGlobals(const PlaceGlobals&) = delete;
  PlaceGlobals& operator=(const PlaceGlobals&) = delete;

 private:
  uint64_t before_;  // handed out when it began, for the log
};

}  // namespace gpupool::server
