// Two- and three-dimensional copies. Ordinary memory is packed, part by part, into staging slots when the
// call is made. Memory that only copies behind others in a stream may read or write, but that the device
// cannot reach at its place, is carried row by row (client/memory/carrier.h): registered memory, and on a
// network the arena.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "client/copies.h"
#include "client/graphs.h"
#include "client/memory/host.h"
#include "client/memory/registered.h"
#include "client/memory/staging.h"

namespace gpupool::client {
namespace {

constexpr size_t kMostAround = 8;  // times the width of a row, which travels for it

std::byte* bytesAt(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

struct Side {
  CUmemorytype type;
  uint64_t base;
  size_t x, y, z, pitch, height;
};

Side sourceOf(const CUDA_MEMCPY3D_v2& c) {
  uint64_t base = c.srcMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(c.srcHost) : c.srcDevice;
  return {c.srcMemoryType, base, c.srcXInBytes, c.srcY, c.srcZ, c.srcPitch, c.srcHeight};
}
Side destinationOf(const CUDA_MEMCPY3D_v2& c) {
  uint64_t base = c.dstMemoryType == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(c.dstHost) : c.dstDevice;
  return {c.dstMemoryType, base, c.dstXInBytes, c.dstY, c.dstZ, c.dstPitch, c.dstHeight};
}

uint64_t rowAddress(const Side& side, size_t row, size_t slice) {
  return side.base + ((side.z + slice) * side.height + side.y + row) * side.pitch + side.x;
}

// From its first row's first byte to its last row's last.
size_t spanOf(const Side& side, const CUDA_MEMCPY3D_v2& c) {
  return rowAddress(side, c.Height - 1, c.Depth - 1) + c.WidthInBytes - rowAddress(side, 0, 0);
}

// Which kind of end a linear side is, by its first and last byte.
End endOfSide(const Side& side, const CUDA_MEMCPY3D_v2& c) {
  return endOf(rowAddress(side, 0, 0), spanOf(side, c));
}

// Which kind it is, and where: see useShared.
End findSide(Side& side, const CUDA_MEMCPY3D_v2& c) {
  End end = endOfSide(side, c);
  const uint64_t first = rowAddress(side, 0, 0);
  uint64_t used = first;
  useShared(used, end, spanOf(side, c));
  side.base += used - first;
  return end;
}

void complete(Side& side, const CUDA_MEMCPY3D_v2& c) {
  if (side.pitch == 0) side.pitch = c.WidthInBytes + side.x;
  if (side.height == 0) side.height = c.Height + side.y;
}

// The part of `c` at columns [x, + width), rows [row, + rows) of slice `slice`.
CUDA_MEMCPY3D_v2 part(const CUDA_MEMCPY3D_v2& c, size_t x, size_t width, size_t row, size_t rows,
                      size_t slice) {
  CUDA_MEMCPY3D_v2 p = c;
  p.srcXInBytes += x;
  p.dstXInBytes += x;
  p.srcY += row;
  p.dstY += row;
  p.srcZ += slice;
  p.dstZ += slice;
  p.WidthInBytes = width;
  p.Height = rows;
  p.Depth = 1;
  return p;
}

// Both of a thread inside Transfers::named.
void useStagingAsSource(CUDA_MEMCPY3D_v2& p, const Staging::Slot& slot) {
  p.srcMemoryType = CU_MEMORYTYPE_HOST;
  p.srcHost = reinterpret_cast<const void*>(staging().address(slot));
  p.srcXInBytes = p.srcY = p.srcZ = 0;
  p.srcPitch = p.WidthInBytes;
  p.srcHeight = p.Height;
}
void useStagingAsDestination(CUDA_MEMCPY3D_v2& p, const Staging::Slot& slot) {
  p.dstMemoryType = CU_MEMORYTYPE_HOST;
  p.dstHost = reinterpret_cast<void*>(staging().address(slot));
  p.dstXInBytes = p.dstY = p.dstZ = 0;
  p.dstPitch = p.WidthInBytes;
  p.dstHeight = p.Height;
}

// The rows of a part, packed: in its slot, or where that is not mapped in a buffer, since it takes one put
// for all of them.
class PackedRows {
 public:
  PackedRows(const Staging::Slot& slot, size_t bytes) {
    if (slot.memory != nullptr)
      bytes_ = Staging::mapped(slot);
    else
      buffer_.reset(bytes_ = new std::byte[bytes]);
  }
  std::byte* row(size_t index, size_t width) const { return bytes_ + index * width; }
  std::byte* data() const { return bytes_; }

 private:
  std::unique_ptr<std::byte[]> buffer_;
  std::byte* bytes_ = nullptr;
};

CUresult uploadPart(const StreamRef& ref, CUDA_MEMCPY3D_v2 p, const Side& source) {
  Staging::Slot slot;
  const size_t bytes = p.WidthInBytes * p.Height;
  CUresult status = staging().acquire(bytes, slot);
  if (status != CUDA_SUCCESS) return status;
  PackedRows packed(slot, bytes);
  for (size_t row = 0; row < p.Height; ++row)
    std::memcpy(packed.row(row, p.WidthInBytes), bytesAt(rowAddress(source, row, 0)), p.WidthInBytes);
  bool due = false;
  {
    const Transfers::Inside inside(Session::get().transfers(), Transfers::named);
    if (!staging().isShared(slot)) {
      transport::Transfer transfer = 0;
      status = staging().write(slot, packed.data(), bytes, transfer);
      if (status == CUDA_SUCCESS) status = staging().finish(transfer);
    }
    useStagingAsSource(p, slot);
    if (status == CUDA_SUCCESS) status = sendTo<"cuMemcpy3DAsync_v2">(ref, due, &p, ref.wire);
  }
  if (due) status = keepCredit(ref);
  staging().releaseAfter(slot, ref, ref.stream->posted.load());
  return status;
}

CUresult downloadPart(const StreamRef& ref, CUDA_MEMCPY3D_v2 p, const Side& destination) {
  Staging::Slot slot;
  const size_t bytes = p.WidthInBytes * p.Height;
  CUresult status = staging().acquire(bytes, slot);
  if (status != CUDA_SUCCESS) return status;
  bool due = false;
  {
    const Transfers::Inside inside(Session::get().transfers(), Transfers::named);
    useStagingAsDestination(p, slot);
    status = sendTo<"cuMemcpy3DAsync_v2">(ref, due, &p, ref.wire);
  }
  if (due) status = keepCredit(ref);
  if (status == CUDA_SUCCESS) status = waitFor(ref, ref.stream->posted.load());
  PackedRows packed(slot, bytes);
  if (status == CUDA_SUCCESS && !staging().isShared(slot))
    status = staging().read(slot, packed.data(), bytes);
  if (status == CUDA_SUCCESS)
    for (size_t row = 0; row < p.Height; ++row)
      std::memcpy(bytesAt(rowAddress(destination, row, 0)), packed.row(row, p.WidthInBytes), p.WidthInBytes);
  staging().release(slot);
  return status;
}

// Cuts the volume into parts that fit a staging slot.
template <class F>
CUresult forEachPart(const CUDA_MEMCPY3D_v2& c, F&& f) {
  size_t width = std::min(c.WidthInBytes, Staging::kLarge);
  size_t rows = std::max<size_t>(1, Staging::kLarge / width);
  for (size_t slice = 0; slice < c.Depth; ++slice)
    for (size_t row = 0; row < c.Height; row += rows)
      for (size_t x = 0; x < c.WidthInBytes; x += width) {
        size_t n = std::min(rows, c.Height - row), w = std::min(width, c.WidthInBytes - x);
        CUresult status = f(part(c, x, w, row, n, slice), x, row, slice);
        if (status != CUDA_SUCCESS) return status;
      }
  return CUDA_SUCCESS;
}

// The rows of a side at host memory, slice by slice, and their shadow. False: they cannot be carried.
bool carriesRows(const Side& side, End end, const CUDA_MEMCPY3D_v2& c, std::vector<Carrier::Range>& rows) {
  const uint64_t first = rowAddress(side, 0, 0);
  Carrier::Range whole{first, first, spanOf(side, c)};
  if (end == End::registered && !registeredMemory().carries(first, whole.bytes, whole)) return false;
  if (end != End::registered && end != End::arena) return false;
  rows.reserve(c.Depth);
  for (size_t slice = 0; slice < c.Depth; ++slice) {
    Carrier::Range range = whole.part(0, 1);
    range.application = rowAddress(side, 0, slice);
    range.shadow = whole.shadow + (range.application - first);
    range.bytes = c.WidthInBytes;
    range.rows = c.Height;
    range.pitch = side.pitch;
    if (range.pitch == range.bytes) range.bytes *= std::exchange(range.rows, 1);
    rows.push_back(range);
  }
  return true;
}

CUresult uploadRows(const StreamRef& ref, CUDA_MEMCPY3D_v2 c, const std::vector<Carrier::Range>& rows) {
  c.srcHost = reinterpret_cast<const void*>(rows.front().shadow);
  c.srcXInBytes = c.srcY = c.srcZ = 0;
  uint64_t ahead = 0;
  CUresult status = requestWordBehindOthers(ref, ahead);
  if (status == CUDA_SUCCESS) status = carrier().fill(ref, ahead, rows);
  return status == CUDA_SUCCESS ? postTo<"cuMemcpy3DAsync_v2">(ref, &c, ref.wire) : status;
}

CUresult downloadRows(const StreamRef& ref, CUDA_MEMCPY3D_v2 c, const std::vector<Carrier::Range>& rows) {
  c.dstHost = reinterpret_cast<void*>(rows.front().shadow);
  c.dstXInBytes = c.dstY = c.dstZ = 0;
  bool due = false;
  CUresult status = CUDA_SUCCESS;
  {  // a move knows of both or of none
    const Transfers::Inside inside(Session::get().transfers(), Transfers::named);
    status = sendTo<"cuMemcpy3DAsync_v2">(ref, due, &c, ref.wire);
    if (status == CUDA_SUCCESS) status = carrier().sendLand(ref, rows);
  }
  return status == CUDA_SUCCESS ? keepCredit(ref) : status;
}

Side moved(Side side, size_t x, size_t row, size_t slice) {
  side.x += x;
  side.y += row;
  side.z += slice;
  return side;
}

// One side is host memory that kernels address, too, at `mirror`: as in copyLinear.
CUresult copyMirrored(const StreamRef& ref, CUDA_MEMCPY3D_v2 c, bool upload, uint64_t mirror, Timing timing) {
  CUresult status = hostMemory().publish();
  const CUmemorytype type = hostMemory().holds(mirror, 1) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  if (upload) {
    c.srcMemoryType = type;
    c.srcHost = reinterpret_cast<const void*>(mirror);
    c.srcDevice = mirror;
    c.srcXInBytes = c.srcY = c.srcZ = 0;
  } else {
    c.dstMemoryType = type;
    c.dstHost = reinterpret_cast<void*>(mirror);
    c.dstDevice = mirror;
    c.dstXInBytes = c.dstY = c.dstZ = 0;
  }
  if (status == CUDA_SUCCESS) status = postTo<"cuMemcpy3DAsync_v2">(ref, &c, ref.wire);
  return status == CUDA_SUCCESS && timing == Timing::sync ? synchronizeStream(ref) : status;
}

// Host memory of any kind to the device. What may still be written ahead in the stream is read behind that.
CUresult upload(const StreamRef& ref, const CUDA_MEMCPY3D_v2& c, const Side& source, End from,
                Timing timing) {
  uint64_t mirror = 0;
  if (hostMemory().mirrored(rowAddress(source, 0, 0), spanOf(source, c), mirror))
    return copyMirrored(ref, c, true, mirror, timing);
  if (from != End::host) {
    const bool idle = nothingAhead(ref);  // the rows may be read at once
    std::vector<Carrier::Range> rows;
    if (timing == Timing::async && !idle && carriesRows(source, from, c, rows))
      return uploadRows(ref, c, rows);
    if (!idle)
      if (CUresult status = synchronizeStream(ref); status != CUDA_SUCCESS) return status;
    carrier().settle();
  }
  CUresult status = forEachPart(c, [&](const CUDA_MEMCPY3D_v2& p, size_t x, size_t row, size_t slice) {
    return uploadPart(ref, p, moved(source, x, row, slice));
  });
  return status == CUDA_SUCCESS && timing == Timing::sync ? returnBeforeLanding(ref) : status;
}

CUresult download(const StreamRef& ref, const CUDA_MEMCPY3D_v2& c, const Side& destination, End to,
                  Timing timing) {
  uint64_t mirror = 0;
  if (hostMemory().mirrored(rowAddress(destination, 0, 0), spanOf(destination, c), mirror))
    return copyMirrored(ref, c, false, mirror, timing);
  // Over a network rows come with what lies between them: narrow ones are packed by the worker instead.
  const bool narrow = !Session::get().mapsMemory() && c.WidthInBytes < destination.pitch / kMostAround;
  std::vector<Carrier::Range> rows;
  if (timing == Timing::async && !narrow && carriesRows(destination, to, c, rows))
    return downloadRows(ref, c, rows);
  return forEachPart(c, [&](const CUDA_MEMCPY3D_v2& p, size_t x, size_t row, size_t slice) {
    return downloadPart(ref, p, moved(destination, x, row, slice));
  });
}

// Host memory on both ends.
CUresult betweenHosts(const StreamRef& ref, const CUDA_MEMCPY3D_v2& c, const Side& source,
                      const Side& destination) {
  CUresult status = synchronizeStream(ref);
  if (status != CUDA_SUCCESS) return status;
  for (size_t slice = 0; slice < c.Depth; ++slice)
    for (size_t row = 0; row < c.Height; ++row)
      std::memmove(bytesAt(rowAddress(destination, row, slice)), bytesAt(rowAddress(source, row, slice)),
                   c.WidthInBytes);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult copyVolume(const StreamRef& ref, CUDA_MEMCPY3D_v2 c, Timing timing) {
  if (c.WidthInBytes == 0 || c.Height == 0 || c.Depth == 0) return CUDA_SUCCESS;
  if (ref.stream->capturing.load()) {
    std::vector<GraphHold> holds;
    CUresult status = localiseCopy(c, ref.context, holds);
    for (auto& hold : holds) captureHolds(*ref.stream, std::move(hold));
    return status == CUDA_SUCCESS ? postTo<"cuMemcpy3DAsync_v2">(ref, &c, ref.wire) : status;
  }
  Side source = sourceOf(c), destination = destinationOf(c);
  complete(source, c);
  complete(destination, c);
  bool fromArray = c.srcMemoryType == CU_MEMORYTYPE_ARRAY, toArray = c.dstMemoryType == CU_MEMORYTYPE_ARRAY;
  End from = fromArray ? End::device : findSide(source, c),
      to = toArray ? End::device : findSide(destination, c);
  if (from == End::unknown || to == End::unknown) return CUDA_ERROR_INVALID_VALUE;
  if ((!fromArray && from == End::device && !mayAccess(ref.context, rowAddress(source, 0, 0), 1, false)) ||
      (!toArray && to == End::device && !mayAccess(ref.context, rowAddress(destination, 0, 0), 1, true)))
    return CUDA_ERROR_INVALID_VALUE;
  if (!fromArray) {
    c.srcMemoryType = from == End::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    c.srcDevice = source.base;
    c.srcHost = reinterpret_cast<const void*>(source.base);
    c.srcPitch = source.pitch;
    c.srcHeight = source.height;
  }
  if (!toArray) {
    c.dstMemoryType = to == End::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    c.dstDevice = destination.base;
    c.dstHost = reinterpret_cast<void*>(destination.base);
    c.dstPitch = destination.pitch;
    c.dstHeight = destination.height;
  }
  // On a network arena memory is out of reach: what lies between the rows must not be sent along.
  const Session& session = Session::get();
  const auto inReach = [&](End end) {
    return end == End::device || (end == End::arena && session.mapsMemory());
  };
  if (from != End::device && to != End::device) return betweenHosts(ref, c, source, destination);
  CUresult status = CUDA_SUCCESS;
  bool due = false, sent = false;
  {
    const Transfers::Inside inside(Session::get().transfers(), Transfers::named);
    sent = inReach(from) && inReach(to);
    if (sent) status = sendTo<"cuMemcpy3DAsync_v2">(ref, due, &c, ref.wire);
  }
  if (!sent)
    return to == End::device ? upload(ref, c, source, from, timing)
                             : download(ref, c, destination, to, timing);
  if (due) status = keepCredit(ref);
  bool waits = timing == Timing::sync && (from == End::arena || to == End::arena);
  return status == CUDA_SUCCESS && waits ? synchronizeStream(ref) : status;
}

}  // namespace gpupool::client
