#pragma once
// What a worker and the copier say to each other, over a SOCK_SEQPACKET pair.
//
//   One datagram is one CopierMessage and what follows it (below), at most kCopierDatagram bytes; numbers are
//   in the machine's own order, for both run on one machine and come from one build (kCopierMagic tells
//   otherwise). Pieces are named by their index in the plan.
//
//     worker -> copier          behind it                    descriptors   answer
//     plan                      count × CopierPlanned        -             none
//     reserve                   -                            -             done | refused
//     takeOut                   count × uint32, the indices  count         done | refused
//     beginBringIn              -                            -             done | refused
//     bringIn                   count × CopierPlaced         count         done | refused
//     across                    count × CopierCrossing       2 × count     done | refused
//
//   In this order: plans, one reserve, batches of takeOut, then beginBringIn and batches of bringIn, which
//   may be repeated. Descriptor i of a batch is the piece of index i, as cuMemExportToShareableHandle gives
//   it. A piece is taken out once, and brought in only after that, perhaps on another device than it was on:
//   a session that has moved has other ones. `count` of reserve: all pieces.
//
//   `across` stands for itself, at any time: pieces of one process are copied to those of another, from
//   device to device, and the copier keeps nothing. First come the descriptors that are read, then, in the
//   same order, those that are written.
//
//   Answers come in the order of what they answer and repeat its `sequence`, which the worker chooses;
//   behind them stand `count` bytes of text, for people, where they are `refused`. When a batch is answered
//   the copier holds none of its pieces any more. Of a batch that is refused no piece counts as moved; other
//   batches do.
//
//   kCopierBatches batches may be sent before the first is answered: the copier imports one while it copies
//   the other. More wait in the socket.
//
// The copier takes a worker for hostile: whoever breaks these rules is cut off, for good. A refusal that the
// rules allow for (no room, a descriptor that is no memory of that size) leaves the connection as it was.

#include <cstddef>
#include <cstdint>

#include "base/descriptor_passing.h"

namespace gpupool::server {

inline constexpr uint32_t kCopierMagic = 0x67705202;  // its last byte grows with every change
inline constexpr size_t kCopierDatagram = size_t{32} << 10;
inline constexpr uint64_t kCopierUnit = uint64_t{2} << 20;  // pieces are multiples of it
inline constexpr uint64_t kMostPieceBytes = uint64_t{1} << 40;
inline constexpr size_t kMostPieces = size_t{1} << 20;
inline constexpr size_t kMostInBatch = kMostDescriptors;
inline constexpr size_t kCopierBatches = 2;
// Where a worker ends a batch: what was taken out is released while the next is copied.
inline constexpr uint64_t kCopierBatchBytes = uint64_t{512} << 20;
inline constexpr size_t kMostRefusalText = 1024;

enum class CopierVerb : uint32_t {
  plan = 1,
  reserve = 2,
  takeOut = 3,
  beginBringIn = 4,
  bringIn = 5,
  done = 6,
  refused = 7,
  across = 8,
};

struct CopierMessage {
  uint32_t magic = kCopierMagic;
  CopierVerb verb{};
  uint32_t sequence = 0;
  uint32_t count = 0;
};
static_assert(sizeof(CopierMessage) == 16);

struct CopierPlanned {
  uint32_t ordinal = 0;
  uint32_t units = 0;  // of kCopierUnit
};
static_assert(sizeof(CopierPlanned) == 8);

struct CopierPlaced {
  uint32_t index = 0;
  uint32_t ordinal = 0;  // where the piece is now
};
static_assert(sizeof(CopierPlaced) == 8);

struct CopierCrossing {
  uint32_t from = 0, to = 0;  // ordinals
  uint32_t units = 0;         // of kCopierUnit
};
static_assert(sizeof(CopierCrossing) == 12);

inline constexpr size_t kMostInCrossing = kMostInBatch / 2;
inline constexpr size_t kMostInPlan = (kCopierDatagram - sizeof(CopierMessage)) / sizeof(CopierPlanned);
static_assert(sizeof(CopierMessage) + kMostInBatch * sizeof(CopierPlaced) <= kCopierDatagram);
static_assert(sizeof(CopierMessage) + kMostRefusalText <= kCopierDatagram);

}  // namespace gpupool::server
