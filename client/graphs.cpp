#include "client/graphs.h"

#include <algorithm>

#include "client/copies.h"
#include "client/memory/allocations.h"
#include "client/memory/device.h"
#include "client/memory/host.h"
#include "client/memory/pools.h"
#include "client/process.h"

namespace gpupool::client {
namespace {

struct Record {
  std::vector<GraphHold> holds;
  std::vector<uint64_t> nodes;
};
struct Borrowing {
  uint64_t host = 0, arena = 0;
  size_t bytes = 0;
  std::weak_ptr<Hold> hold;
};
struct Usage {
  uint64_t now = 0, usedHigh = 0, reservedHigh = 0;
};
struct Books {
  std::mutex mutex;
  std::unordered_map<uint64_t, Record> graphs;
  std::unordered_map<uint64_t, std::shared_ptr<NodeInfo>> nodes;
  std::vector<Borrowing> borrowings;
  std::unordered_map<CUdevice, Usage> usage;  // memory of graphs
};
Books& books() {
  static auto* all = new Books;
  return *all;
}

// A graph may end while its last launch still runs: memory is given back when the device is done.
bool quiet(CUcontext context) {
  if (process::state() != process::State::ready || Session::get().sticky() != CUDA_SUCCESS) return false;
  return contexts().find(context) != nullptr && synchronizeContext(context) == CUDA_SUCCESS;
}

struct DeviceHold : Hold {
  CUcontext context = nullptr;
  int device = 0;
  uint64_t address = 0;
  size_t bytes = 0;
  DeviceHold() { memory = true; }
  ~DeviceHold() override {
    {
      std::lock_guard lock(books().mutex);
      books().usage[device].now -= bytes;
    }
    if (!quiet(context) || !allocations().remove(address)) return;
    deviceMemory(sessionDevice(device)).release(context, address);
  }
};

struct BorrowHold : Hold {
  CUcontext context = nullptr;
  uint64_t host = 0, arena = 0;
  ~BorrowHold() override {
    {
      std::lock_guard lock(books().mutex);
      std::erase_if(books().borrowings, [&](const Borrowing& b) { return b.arena == arena; });
    }
    bool done = quiet(context);
    hostMemory().removeMirror(host, arena);
    if (done) hostMemory().release(context, arena);
  }
};

bool findBorrowing(uint64_t host, size_t bytes, uint64_t& arena, GraphHold& hold) {
  std::lock_guard lock(books().mutex);
  for (auto& known : books().borrowings) {
    if (host < known.host || host - known.host > known.bytes || bytes > known.bytes - (host - known.host))
      continue;
    hold = known.hold.lock();
    if (hold == nullptr) continue;
    arena = known.arena + (host - known.host);
    return true;
  }
  return false;
}

struct Side {
  CUmemorytype& type;
  const void* host;
  CUdeviceptr device;
  size_t x, y, z, pitch, height;
};

// The bytes [first, + length) a side covers. False: more than an address space.
bool extentOf(const Side& side, const CUDA_MEMCPY3D_v2& copy, uint64_t& first, size_t& length) {
  using Wide = unsigned __int128;
  size_t pitch = side.pitch != 0 ? side.pitch : copy.WidthInBytes + side.x;
  size_t height = side.height != 0 ? side.height : copy.Height + side.y;
  Wide start = (Wide{side.z} * height + side.y) * pitch + side.x;
  Wide last = (Wide{side.z + copy.Depth - 1} * height + side.y + copy.Height - 1) * pitch + side.x +
              copy.WidthInBytes;
  if (last >> 47 != 0) return false;
  uint64_t base = side.type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uint64_t>(side.host) : side.device;
  first = base + static_cast<uint64_t>(start);
  length = static_cast<size_t>(last - start);
  return true;
}

// What the side becomes: its memory type and, for host memory, the address of its first byte on both sides.
CUresult localiseSide(const Side& side, const CUDA_MEMCPY3D_v2& copy, CUcontext context, CUmemorytype& type,
                      uint64_t& start, std::vector<GraphHold>& holds) {
  uint64_t first = 0;
  size_t length = 0;
  if (!extentOf(side, copy, first, length)) return CUDA_ERROR_INVALID_VALUE;
  End end = endOf(first, length);
  if (end == End::unknown || (end == End::host && side.type == CU_MEMORYTYPE_DEVICE))
    return CUDA_ERROR_INVALID_VALUE;
  type = end == End::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  start = first;
  if (end == End::device) return CUDA_SUCCESS;
  if (end == End::arena) {
    hostMemory().mirrorArena(first);
    return CUDA_SUCCESS;
  }
  GraphHold hold;
  CUresult status = borrowForGraph(first, length, context, start, hold);
  if (hold != nullptr) holds.push_back(std::move(hold));
  return status;
}

}  // namespace

void holdForGraph(uint64_t graph, const std::vector<GraphHold>& holds) {
  if (holds.empty()) return;
  std::lock_guard lock(books().mutex);
  auto& kept = books().graphs[graph].holds;
  kept.insert(kept.end(), holds.begin(), holds.end());
}

std::vector<GraphHold> holdsOf(uint64_t graph) {
  std::lock_guard lock(books().mutex);
  auto found = books().graphs.find(graph);
  return found == books().graphs.end() ? std::vector<GraphHold>() : found->second.holds;
}

bool allocates(const std::vector<GraphHold>& holds) {
  return std::any_of(holds.begin(), holds.end(), [](const GraphHold& hold) { return hold->memory; });
}

std::vector<GraphHold> takeUserHolds(uint64_t graph, uint64_t userObject) {
  std::vector<GraphHold> taken;
  std::lock_guard lock(books().mutex);
  auto found = books().graphs.find(graph);
  if (found == books().graphs.end()) return taken;
  for (auto& hold : found->second.holds)
    if (hold->userObject == userObject) taken.push_back(hold);
  std::erase_if(found->second.holds, [&](const GraphHold& hold) { return hold->userObject == userObject; });
  return taken;
}

void forgetGraph(uint64_t graph) {
  Record gone;  // its holds end outside the lock
  std::lock_guard lock(books().mutex);
  auto found = books().graphs.find(graph);
  if (found == books().graphs.end()) return;
  gone = std::move(found->second);
  books().graphs.erase(found);
  for (uint64_t node : gone.nodes) books().nodes.erase(node);
}

void rememberNode(uint64_t graph, CUgraphNode node, std::shared_ptr<NodeInfo> info) {
  std::lock_guard lock(books().mutex);
  auto& known = books().nodes[toId(node)];
  if (known != nullptr)
    info->graph = known->graph;
  else if (graph != 0)
    books().graphs[graph].nodes.push_back(toId(node));
  if (graph != 0) info->graph = graph;
  known = std::move(info);
}

std::shared_ptr<NodeInfo> recallNode(CUgraphNode node) {
  std::lock_guard lock(books().mutex);
  auto found = books().nodes.find(toId(node));
  return found == books().nodes.end() ? nullptr : found->second;
}

bool isGraphMemory(uint64_t address) {
  Allocation found;
  return allocations().find(address, found) && found.address == address && found.ofGraph;
}

CUresult allocateForGraph(Context& context, size_t bytes, uint64_t& address, GraphHold& hold) {
  CUresult status = deviceMemory(sessionDevice(context.device)).allocate(context.handle, bytes, address);
  if (status != CUDA_SUCCESS) return status;
  Allocation entry{address, bytes,  Allocation::Kind::device, context.device, context.handle, 0, address,
                   0,       nullptr};
  entry.ofGraph = true;
  allocations().add(entry);
  auto made = std::make_shared<DeviceHold>();
  made->context = context.handle;
  made->device = context.device;
  made->address = address;
  made->bytes = bytes;
  hold = std::move(made);
  std::lock_guard lock(books().mutex);
  Usage& usage = books().usage[context.device];
  usage.now += bytes;
  usage.usedHigh = std::max(usage.usedHigh, usage.now);
  usage.reservedHigh = std::max(usage.reservedHigh, usage.now);
  return CUDA_SUCCESS;
}

// What the pool calls ask (client/memory/pools.h). Nothing is kept beyond the graphs, so there is nothing to
// trim.
uint64_t graphMemory(CUdevice device, CUgraphMem_attribute what) {
  std::lock_guard lock(books().mutex);
  const Usage& usage = books().usage[device];
  if (what == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) return usage.usedHigh;
  return what == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH ? usage.reservedHigh : usage.now;
}
void resetGraphMemoryHigh(CUdevice device, CUgraphMem_attribute what) {
  std::lock_guard lock(books().mutex);
  Usage& usage = books().usage[device];
  (what == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH ? usage.usedHigh : usage.reservedHigh) = usage.now;
}

CUresult borrowForGraph(uint64_t host, size_t bytes, CUcontext context, uint64_t& arena, GraphHold& hold) {
  Allocation found;
  if (allocations().find(host, found) &&
      (found.kind == Allocation::Kind::registered || found.kind == Allocation::Kind::managedSymbol)) {
    if (bytes > found.bytes - (host - found.address)) return CUDA_ERROR_INVALID_VALUE;
    arena = found.deviceAddress + (host - found.address);
    return CUDA_SUCCESS;
  }
  if (findBorrowing(host, bytes, arena, hold)) return CUDA_SUCCESS;
  CUresult status =
      hostMemory().allocate(context, std::max<size_t>(bytes, 4096), 0, HostMemory::Use::target, arena);
  if (status != CUDA_SUCCESS) return status;
  hostMemory().addMirror(host, arena, bytes, true);
  auto made = std::make_shared<BorrowHold>();
  made->context = context;
  made->host = host;
  made->arena = arena;
  hold = std::move(made);
  std::lock_guard lock(books().mutex);
  books().borrowings.push_back({host, arena, bytes, hold});
  return CUDA_SUCCESS;
}

CUresult localiseCopy(CUDA_MEMCPY3D_v2& copy, CUcontext context, std::vector<GraphHold>& holds) {
  if (copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0) return CUDA_SUCCESS;
  if (copy.srcMemoryType != CU_MEMORYTYPE_ARRAY) {
    Side side{copy.srcMemoryType, copy.srcHost, copy.srcDevice, copy.srcXInBytes,
              copy.srcY,          copy.srcZ,    copy.srcPitch,  copy.srcHeight};
    CUmemorytype type{};
    uint64_t start = 0;
    CUresult status = localiseSide(side, copy, context, type, start, holds);
    if (status != CUDA_SUCCESS) return status;
    if (copy.srcMemoryType == CU_MEMORYTYPE_HOST && type == CU_MEMORYTYPE_DEVICE)
      copy.srcDevice = reinterpret_cast<CUdeviceptr>(copy.srcHost);
    copy.srcMemoryType = type;
    if (type == CU_MEMORYTYPE_HOST) {
      copy.srcPitch = copy.srcPitch != 0 ? copy.srcPitch : copy.WidthInBytes + copy.srcXInBytes;
      copy.srcHeight = copy.srcHeight != 0 ? copy.srcHeight : copy.Height + copy.srcY;
      copy.srcHost = reinterpret_cast<const void*>(start);
      copy.srcXInBytes = copy.srcY = copy.srcZ = 0;
    }
  }
  if (copy.dstMemoryType != CU_MEMORYTYPE_ARRAY) {
    Side side{copy.dstMemoryType, copy.dstHost, copy.dstDevice, copy.dstXInBytes,
              copy.dstY,          copy.dstZ,    copy.dstPitch,  copy.dstHeight};
    CUmemorytype type{};
    uint64_t start = 0;
    CUresult status = localiseSide(side, copy, context, type, start, holds);
    if (status != CUDA_SUCCESS) return status;
    if (copy.dstMemoryType == CU_MEMORYTYPE_HOST && type == CU_MEMORYTYPE_DEVICE)
      copy.dstDevice = reinterpret_cast<CUdeviceptr>(copy.dstHost);
    copy.dstMemoryType = type;
    if (type == CU_MEMORYTYPE_HOST) {
      copy.dstPitch = copy.dstPitch != 0 ? copy.dstPitch : copy.WidthInBytes + copy.dstXInBytes;
      copy.dstHeight = copy.dstHeight != 0 ? copy.dstHeight : copy.Height + copy.dstY;
      copy.dstHost = reinterpret_cast<void*>(start);
      copy.dstXInBytes = copy.dstY = copy.dstZ = 0;
    }
  }
  return CUDA_SUCCESS;
}

uint64_t originalAddress(uint64_t arena) {
  std::lock_guard lock(books().mutex);
  for (auto& known : books().borrowings)
    if (arena >= known.arena && arena - known.arena < known.bytes) return known.host + (arena - known.arena);
  return arena;
}

}  // namespace gpupool::client
