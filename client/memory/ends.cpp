#include "client/memory/ends.h"

#include "client/contexts.h"
#include "client/memory/allocations.h"
#include "client/memory/host.h"
#include "client/memory/registered.h"

namespace gpupool::client {
namespace {

bool inAllocation(const Allocation& a, uint64_t address, size_t bytes) {
  return address >= a.address && bytes <= a.bytes && address - a.address <= a.bytes - bytes;
}

// A range the application mapped itself may be made of several pieces.
bool inMappings(Allocation a, uint64_t address, size_t bytes) {
  while (bytes > a.bytes - (address - a.address)) {
    bytes -= a.bytes - (address - a.address);
    address = a.address + a.bytes;
    if (!allocations().find(address, a) || a.kind != Allocation::Kind::mapped) return false;
  }
  return true;
}

}  // namespace

End endOf(uint64_t address, size_t bytes) {
  Allocation found;
  Carrier::Range carried;
  uint64_t shared = 0;
  if (allocations().find(address, found)) {
    switch (found.kind) {
      case Allocation::Kind::device:
      case Allocation::Kind::symbol:
        return inAllocation(found, address, bytes) ? End::device : End::unknown;
      case Allocation::Kind::mapped:
        return inMappings(found, address, bytes) ? End::device : End::unknown;
      case Allocation::Kind::registered:
        return registeredMemory().shares(address, bytes, shared) ||
                       registeredMemory().carries(address, bytes, carried)
                   ? End::registered
                   : End::host;
      case Allocation::Kind::managedSymbol:
        return End::host;  // the application's own pages are what counts
      default:
        return inAllocation(found, address, bytes) ? End::arena : End::unknown;
    }
  }
  if (hostMemory().holds(address, bytes)) return End::arena;
  const schema::AddressSpace& space = Session::get().space();
  bool window =
      address >= space.deviceBase && address - space.deviceBase < space.windowBytes * schema::kMaxDevices;
  return window ? End::unknown : End::host;
}

void useShared(uint64_t& address, End& end, size_t bytes) {
  uint64_t shared = 0;
  if (end != End::registered || !registeredMemory().shares(address, bytes, shared)) return;
  address = shared;
  end = End::arena;
}

bool mayAccess(CUcontext context, uint64_t address, size_t bytes, bool write) {
  const Context* object = contexts().find(context);
  const int device = object == nullptr ? 0 : object->device;
  Allocation found;
  for (uint64_t at = address; at < address + bytes; at = found.address + found.bytes) {
    if (!allocations().find(at, found) || found.kind != Allocation::Kind::mapped) return true;
    if (((write ? found.writers : found.readers) >> device & 1) == 0) return false;
  }
  return true;
}

}  // namespace gpupool::client
