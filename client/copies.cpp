#include "client/copies.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "client/graphs.h"
#include "client/memory/allocations.h"
#include "client/memory/host.h"
#include "client/memory/staging.h"

namespace gpupool::client {
namespace {

std::byte* bytesAt(uint64_t address) { return reinterpret_cast<std::byte*>(address); }

// ---- linear
// ---------------------------------------------------------------------------------------------------------

CUresult uploadLinear(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  std::vector<transport::Transfer> open;
  CUresult status = CUDA_SUCCESS;
  for (size_t at = 0; at < bytes && status == CUDA_SUCCESS;) {
    Staging::Slot slot;
    size_t rest = bytes - at;
    status = staging().acquire(rest, slot);
    if (status != CUDA_SUCCESS) break;
    size_t n = std::min(rest, slot.bytes);
    transport::Transfer transfer = 0;
    status = staging().write(slot, 0, bytesAt(from + at), n, transfer);
    if (transfer != 0) open.push_back(transfer);
    if (status == CUDA_SUCCESS)
      status = postTo<"cuMemcpyHtoDAsync_v2">(ref, CUdeviceptr{to + at},
                                              reinterpret_cast<const void*>(slot.address), n, ref.wire);
    staging().releaseAfter(slot, ref, ref.stream->posted.load());
    at += n;
  }
  // On a network the bytes leave from the application's buffer: it may be changed only when they are gone.
  for (transport::Transfer transfer : open) {
    CUresult done = staging().finish(transfer);
    if (status == CUDA_SUCCESS) status = done;
  }
  return status;
}

// Two slots at a time: the next chunk is on its way from the device while this one is copied out.
CUresult downloadLinear(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  struct Chunk {
    Staging::Slot slot;
    uint64_t value;
    size_t at, n;
  };
  constexpr size_t kAhead = 8;
  std::vector<Chunk> open;
  size_t sent = 0, done = 0;
  CUresult status = CUDA_SUCCESS;
  while (done < bytes && status == CUDA_SUCCESS) {
    while (sent < bytes && open.size() < kAhead && status == CUDA_SUCCESS) {
      Chunk chunk{};
      status = staging().acquire(bytes - sent, chunk.slot);
      if (status != CUDA_SUCCESS) break;
      chunk.at = sent;
      chunk.n = std::min(bytes - sent, chunk.slot.bytes);
      status = postTo<"cuMemcpyDtoHAsync_v2">(ref, reinterpret_cast<void*>(chunk.slot.address),
                                              CUdeviceptr{from + sent}, chunk.n, ref.wire);
      if (status == CUDA_SUCCESS) status = requestWord(ref, chunk.value);
      sent += chunk.n;
      open.push_back(chunk);
    }
    if (status != CUDA_SUCCESS) break;
    Chunk chunk = open.front();
    open.erase(open.begin());
    status = waitFor(ref, chunk.value);
    if (status == CUDA_SUCCESS) status = staging().read(chunk.slot, 0, bytesAt(to + chunk.at), chunk.n);
    staging().release(chunk.slot);
    done += chunk.n;
  }
  for (auto& chunk : open) staging().releaseAfter(chunk.slot, ref, ref.stream->posted.load());
  return status;
}

// Host memory on both ends: after everything before it in the stream.
CUresult betweenHosts(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  CUresult status = synchronizeStream(ref);
  if (status == CUDA_SUCCESS) std::memmove(bytesAt(to), bytesAt(from), bytes);
  return status;
}

// The node reads and writes the application's memory when the graph runs, not now.
CUresult captureEnd(const StreamRef& ref, uint64_t& address, End end, size_t bytes) {
  if (end == End::arena) hostMemory().mirrorArena(address);
  if (end != End::host) return CUDA_SUCCESS;
  GraphHold hold;
  CUresult status = borrowForGraph(address, bytes, ref.context, address, hold);
  if (hold != nullptr) captureHolds(*ref.stream, std::move(hold));
  return status;
}

CUresult captureLinear(const StreamRef& ref, uint64_t to, End toEnd, uint64_t from, End fromEnd,
                       size_t bytes) {
  CUresult status = captureEnd(ref, to, toEnd, bytes);
  if (status == CUDA_SUCCESS) status = captureEnd(ref, from, fromEnd, bytes);
  if (status != CUDA_SUCCESS) return status;
  if (toEnd == End::device)
    return postTo<"cuMemcpyHtoDAsync_v2">(ref, CUdeviceptr{to}, reinterpret_cast<const void*>(from), bytes,
                                          ref.wire);
  if (fromEnd == End::device)
    return postTo<"cuMemcpyDtoHAsync_v2">(ref, reinterpret_cast<void*>(to), CUdeviceptr{from}, bytes,
                                          ref.wire);
  return postTo<"cuMemcpyDtoDAsync_v2">(ref, CUdeviceptr{to}, CUdeviceptr{from}, bytes, ref.wire);
}

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
  if (allocations().find(address, found)) {
    switch (found.kind) {
      case Allocation::Kind::device:
      case Allocation::Kind::symbol:
        return inAllocation(found, address, bytes) ? End::device : End::unknown;
      case Allocation::Kind::mapped:
        return inMappings(found, address, bytes) ? End::device : End::unknown;
      case Allocation::Kind::registered:
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

CUresult copyLinear(const StreamRef& ref, uint64_t to, End toEnd, uint64_t from, End fromEnd, size_t bytes,
                    Timing timing) {
  if (bytes == 0) return CUDA_SUCCESS;
  if (toEnd == End::unknown || fromEnd == End::unknown || to == 0 || from == 0)
    return CUDA_ERROR_INVALID_VALUE;
  bool toDevice = toEnd == End::device, fromDevice = fromEnd == End::device;
  if (ref.stream->capturing.load() && !(toDevice && fromDevice))
    return captureLinear(ref, to, toEnd, from, fromEnd, bytes);
  if (!toDevice && !fromDevice) return betweenHosts(ref, to, from, bytes);
  if (toDevice && fromDevice)
    return postTo<"cuMemcpyDtoDAsync_v2">(ref, CUdeviceptr{to}, CUdeviceptr{from}, bytes, ref.wire);
  if (toDevice) {
    if (fromEnd == End::host) return uploadLinear(ref, to, from, bytes);
    CUresult status = hostMemory().upload(bytesAt(from), bytes);
    if (status == CUDA_SUCCESS)
      status = postTo<"cuMemcpyHtoDAsync_v2">(ref, CUdeviceptr{to}, reinterpret_cast<const void*>(from),
                                              bytes, ref.wire);
    if (status == CUDA_SUCCESS && timing == Timing::sync) status = synchronizeStream(ref);
    return status;
  }
  if (toEnd == End::host) return downloadLinear(ref, to, from, bytes);
  CUresult status =
      postTo<"cuMemcpyDtoHAsync_v2">(ref, reinterpret_cast<void*>(to), CUdeviceptr{from}, bytes, ref.wire);
  if (status == CUDA_SUCCESS && !Session::get().mapsMemory()) {
    uint64_t value = 0;
    status = requestWord(ref, value);
    if (status == CUDA_SUCCESS) {
      Session::get().watch(ref.stream->word, value);
      hostMemory().expect(ref, value, bytesAt(to), bytes);
    }
  }
  if (status == CUDA_SUCCESS && timing == Timing::sync) status = synchronizeStream(ref);
  return status;
}

// ---- volumes
// --------------------------------------------------------------------------------------------------------

namespace {

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

// Which kind of end a linear side is, by its first and last byte.
End endOfSide(const Side& side, const CUDA_MEMCPY3D_v2& c) {
  uint64_t first = rowAddress(side, 0, 0),
           last = rowAddress(side, c.Height - 1, c.Depth - 1) + c.WidthInBytes;
  return endOf(first, last - first);
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

void useStagingAsSource(CUDA_MEMCPY3D_v2& p, const Staging::Slot& slot) {
  p.srcMemoryType = CU_MEMORYTYPE_HOST;
  p.srcHost = reinterpret_cast<const void*>(slot.address);
  p.srcXInBytes = p.srcY = p.srcZ = 0;
  p.srcPitch = p.WidthInBytes;
  p.srcHeight = p.Height;
}
void useStagingAsDestination(CUDA_MEMCPY3D_v2& p, const Staging::Slot& slot) {
  p.dstMemoryType = CU_MEMORYTYPE_HOST;
  p.dstHost = reinterpret_cast<void*>(slot.address);
  p.dstXInBytes = p.dstY = p.dstZ = 0;
  p.dstPitch = p.WidthInBytes;
  p.dstHeight = p.Height;
}

CUresult uploadPart(const StreamRef& ref, CUDA_MEMCPY3D_v2 p, const Side& source) {
  Staging::Slot slot;
  CUresult status = staging().acquire(p.WidthInBytes * p.Height, slot);
  if (status != CUDA_SUCCESS) return status;
  std::vector<std::byte> packed;  // a network takes one put for many rows
  packed.resize(p.WidthInBytes * p.Height);
  for (size_t row = 0; row < p.Height; ++row)
    std::memcpy(packed.data() + row * p.WidthInBytes, bytesAt(rowAddress(source, row, 0)), p.WidthInBytes);
  transport::Transfer transfer = 0;
  status = staging().write(slot, 0, packed.data(), packed.size(), transfer);
  if (status == CUDA_SUCCESS && transfer != 0) status = staging().finish(transfer);
  useStagingAsSource(p, slot);
  if (status == CUDA_SUCCESS) status = postTo<"cuMemcpy3DAsync_v2">(ref, &p, ref.wire);
  staging().releaseAfter(slot, ref, ref.stream->posted.load());
  return status;
}

CUresult downloadPart(const StreamRef& ref, CUDA_MEMCPY3D_v2 p, const Side& destination) {
  Staging::Slot slot;
  CUresult status = staging().acquire(p.WidthInBytes * p.Height, slot);
  if (status != CUDA_SUCCESS) return status;
  useStagingAsDestination(p, slot);
  status = postTo<"cuMemcpy3DAsync_v2">(ref, &p, ref.wire);
  if (status == CUDA_SUCCESS) status = waitFor(ref, ref.stream->posted.load());
  std::vector<std::byte> packed(p.WidthInBytes * p.Height);
  if (status == CUDA_SUCCESS) status = staging().read(slot, 0, packed.data(), packed.size());
  if (status == CUDA_SUCCESS)
    for (size_t row = 0; row < p.Height; ++row)
      std::memcpy(bytesAt(rowAddress(destination, row, 0)), packed.data() + row * p.WidthInBytes,
                  p.WidthInBytes);
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
  End from = fromArray ? End::device : endOfSide(source, c),
      to = toArray ? End::device : endOfSide(destination, c);
  if (from == End::unknown || to == End::unknown) return CUDA_ERROR_INVALID_VALUE;
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
  // On a network arena memory is copied like ordinary memory: a pitched copy must not touch the bytes between
  // its rows.
  bool shared = Session::get().mapsMemory();
  bool stageFrom = from == End::host || (from == End::arena && !shared);
  bool stageTo = to == End::host || (to == End::arena && !shared);
  if (from != End::device && to != End::device) {
    CUresult status = synchronizeStream(ref);
    if (status != CUDA_SUCCESS) return status;
    for (size_t slice = 0; slice < c.Depth; ++slice)
      for (size_t row = 0; row < c.Height; ++row)
        std::memmove(bytesAt(rowAddress(destination, row, slice)), bytesAt(rowAddress(source, row, slice)),
                     c.WidthInBytes);
    return CUDA_SUCCESS;
  }
  auto moved = [](Side side, size_t x, size_t row, size_t slice) {
    side.x += x;
    side.y += row;
    side.z += slice;
    return side;
  };
  if (stageFrom)
    return forEachPart(c, [&](const CUDA_MEMCPY3D_v2& p, size_t x, size_t row, size_t slice) {
      return uploadPart(ref, p, moved(source, x, row, slice));
    });
  if (stageTo)
    return forEachPart(c, [&](const CUDA_MEMCPY3D_v2& p, size_t x, size_t row, size_t slice) {
      return downloadPart(ref, p, moved(destination, x, row, slice));
    });
  CUresult status = postTo<"cuMemcpy3DAsync_v2">(ref, &c, ref.wire);
  bool waits = timing == Timing::sync && (from == End::arena || to == End::arena);
  return status == CUDA_SUCCESS && waits ? synchronizeStream(ref) : status;
}

}  // namespace gpupool::client
