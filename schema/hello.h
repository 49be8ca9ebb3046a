#pragma once
// The first message each way on a new session's call channel, before any frame: protocol versions, where the
// session's memory lies, and all device properties, so that no query needs the wire later. Flat structs, host
// order.

#include <cstdint>

#include "schema/cuda.h"
#include "schema/session_calls.h"

namespace gpupool::schema {

inline constexpr uint32_t kClientMagic = 0x47504331;  // "GPC1"
inline constexpr uint32_t kWorkerMagic = 0x47505731;  // "GPW1"
inline constexpr int kMaxDevices = 8;                 // of one session
inline constexpr int kMaxSpaces = 4;
inline constexpr int kDeviceAttributes = 160;  // > CU_DEVICE_ATTRIBUTE_MAX
inline constexpr int kP2PAttributes = 8;

// Where a session's memory can lie. Both processes reserve the same one. Device d's window is
// [deviceBase + d * windowBytes, + windowBytes).
struct AddressSpace {
  uint64_t deviceBase = 0;
  uint64_t windowBytes = 0;
  uint64_t hostBase = 0;  // pinned and managed memory: one address on both sides
  uint64_t hostBytes = 0;
};
// Candidates in order of preference. The last fits between ThreadSanitizer's regions.
inline constexpr AddressSpace kSpaces[kMaxSpaces] = {
    {0x2000'0000'0000, uint64_t{4} << 40, 0x5000'0000'0000, uint64_t{1} << 40},
    {0x2800'0000'0000, uint64_t{1} << 40, 0x5200'0000'0000, uint64_t{1} << 40},
    {0x1800'0000'0000, uint64_t{256} << 30, 0x5300'0000'0000, uint64_t{256} << 30},
    {0x7e90'0000'0000, uint64_t{32} << 30, 0x7ee0'0000'0000, uint64_t{64} << 30},
};

// Whether the session's first worker had a context before the session's first call, and of which device:
// where the driver places variables of code depends on that (server/arena_mmap.h).
inline constexpr uint32_t kContextAheadUnknown = 0;  // an older client or worker
inline constexpr uint32_t kNoContextAhead = 1;
inline constexpr uint32_t kContextAheadOf = 2;  // + the device's index

struct ClientHello {
  uint32_t magic = kClientMagic;
  uint32_t protocol = 0;
  uint64_t rowsHash = 0;
  uint64_t epoch = 0;
  uint32_t spaces = 0;                           // bit i: kSpaces[i] is free in the client
  uint32_t contextAhead = kContextAheadUnknown;  // what the session's first worker said
  uint32_t lends = 0;                            // 1: it lends the worker its pinned memory (MovedRegion)
  uint32_t reserved = 0;
};
static_assert(sizeof(ClientHello) == 40);

struct DeviceProperties {
  char name[256] = {};
  CUuuid uuid = {};
  char luid[8] = {};
  uint32_t luidMask = 0;
  int32_t luidStatus = 0;  // CUresult of cuDeviceGetLuid
  uint64_t totalBytes = 0;
  uint64_t limitBytes = 0;  // what the lease allows
  char pciBusId[32] = {};
  int32_t attributes[kDeviceAttributes] = {};
  uint8_t attributeKnown[kDeviceAttributes] = {};
  int32_t p2p[kMaxDevices][kP2PAttributes] = {};
  int32_t canAccessPeer[kMaxDevices] = {};
};

struct WorkerHello {
  uint32_t magic = kWorkerMagic;
  uint32_t protocol = 0;
  uint64_t rowsHash = 0;
  uint64_t epoch = 0;
  uint32_t status = 0;  // CUresult; not success: text says why, and nothing follows
  uint32_t space = 0;   // index into kSpaces
  char text[256] = {};
  RegionName words;
  RegionName staging;
  uint64_t stagingAddress = 0;  // in the worker: what copies through staging name
  uint64_t stagingBytes = 0;
  int32_t driverVersion = 0;
  uint32_t deviceCount = 0;
  uint32_t softwareDriver = 0;
  uint32_t contextAhead = kContextAheadUnknown;
  // Of a session that was rebuilt: the numbers of the last frame and of the last aside call that it has
  // served.
  uint64_t lastFrame = 0, lastAside = 0;
  DeviceProperties devices[kMaxDevices];
};

// Behind the WorkerHello of a moved session (epoch above 1), as one further message of the call channel: how
// the new connection names the worker's pinned memory. Count × MovedRegion, by ascending address; where there
// is no pinned memory, one of address 0. The client offers only the address space that the session has, and
// keeps its words, staging memory and pinned memory where they are: on one host the new worker has adopted
// the same memory, on a network it has copies.
//
// A client that shares memory with the new worker, and did not with the one before, lends it its own pinned
// memory (ClientHello.lends): it answers with a message like this one, with its own names for the same
// addresses, behind which it does not write to the worker's. The worker puts the client's pages where its own
// were, and names all of it once more. If it cannot, it closes the connection.
struct MovedRegion {
  uint64_t address = 0;
  RegionName region;
};
static_assert(sizeof(MovedRegion) == 16);

}  // namespace gpupool::schema
