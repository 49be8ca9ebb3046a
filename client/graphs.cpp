#include "client/graphs.h"

#include <algorithm>

#include "client/memory/allocations.h"
#include "client/memory/device.h"
#include "client/memory/ends.h"
#include "client/memory/host.h"
#include "client/memory/pools.h"
#include "client/memory/registered.h"
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
  std::vector<std::weak_ptr<Hold>> strays;    // of nodes whose graph is not known: any launch may use them
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
    deviceMemory(device).release(context, address);
  }
};

// The shadow of ordinary memory, which the nodes that copy parts of it share.
struct BorrowHold : Hold {
  CUcontext context = nullptr;
  uint64_t host = 0, arena = 0;
  size_t bytes = 0;
  ~BorrowHold() override {
    {
      std::lock_guard lock(books().mutex);
      std::erase_if(books().borrowings, [&](const Borrowing& b) { return b.arena == arena; });
    }
    bool done = quiet(context);
    carrier().await(host, bytes);
    if (done) hostMemory().release(context, arena);
  }
};

// What one node copies of it, or of registered memory, which has a shadow for as long as it is registered.
struct PartHold : Hold {
  Carrier::Range range;
  GraphHold shadow;
  bool carried(Carrier::Range& out) const override {
    Carrier::Range now;
    if (shadow == nullptr &&
        (!registeredMemory().carries(range.application, range.bytes, now) || now.shadow != range.shadow))
      return false;
    out = range;
    return true;
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
CUresult localiseSide(const Side& side, bool written, const CUDA_MEMCPY3D_v2& copy, CUcontext context,
                      CUmemorytype& type, uint64_t& start, std::vector<GraphHold>& holds) {
  uint64_t first = 0;
  size_t length = 0;
  if (!extentOf(side, copy, first, length)) return CUDA_ERROR_INVALID_VALUE;
  End end = endOf(first, length);
  if (end == End::unknown ||
      ((end == End::host || end == End::registered) && side.type == CU_MEMORYTYPE_DEVICE))
    return CUDA_ERROR_INVALID_VALUE;
  useShared(first, end, length);
  type = end == End::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  start = first;
  if (end == End::device) return CUDA_SUCCESS;
  if (end == End::arena) {
    mirrorArena(first);
    return CUDA_SUCCESS;
  }
  GraphHold hold;
  CUresult status = borrowForGraph(first, length, written, context, start, hold);
  if (hold != nullptr) holds.push_back(std::move(hold));
  return status;
}

// ---- under the mutex

void collectHolds(uint64_t graph, std::vector<GraphHold>& all) {
  auto found = books().graphs.find(graph);
  if (found == books().graphs.end()) return;
  all.insert(all.end(), found->second.holds.begin(), found->second.holds.end());
  for (uint64_t id : found->second.nodes)
    if (auto node = books().nodes.find(id); node != books().nodes.end())
      for (CUgraph inner : node->second->inner) collectHolds(toId(inner), all);
}

void dropGraph(uint64_t graph, std::vector<Record>& gone);

void dropNode(uint64_t id, std::vector<Record>& gone) {
  auto node = books().nodes.find(id);
  if (node == books().nodes.end()) return;
  auto info = std::move(node->second);
  books().nodes.erase(node);
  for (CUgraph inner : info->inner) dropGraph(toId(inner), gone);
}

void dropGraph(uint64_t graph, std::vector<Record>& gone) {
  auto found = books().graphs.find(graph);
  if (found == books().graphs.end()) return;
  Record record = std::move(found->second);
  books().graphs.erase(found);
  for (uint64_t id : record.nodes) dropNode(id, gone);
  gone.push_back(std::move(record));
}

}  // namespace

void holdForGraph(uint64_t graph, const std::vector<GraphHold>& holds) {
  if (holds.empty()) return;
  std::lock_guard lock(books().mutex);
  auto& kept = books().graphs[graph].holds;
  kept.insert(kept.end(), holds.begin(), holds.end());
}

std::vector<GraphHold> holdsOf(uint64_t graph) {
  std::vector<GraphHold> all;
  std::lock_guard lock(books().mutex);
  collectHolds(graph, all);
  return all;
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
  std::vector<Record> gone;  // their holds end outside the lock
  std::lock_guard lock(books().mutex);
  dropGraph(graph, gone);
}

void forgetNode(CUgraphNode node) {
  std::vector<Record> gone;
  std::lock_guard lock(books().mutex);
  auto found = books().nodes.find(toId(node));
  if (found == books().nodes.end()) return;
  auto record = books().graphs.find(found->second->graph);
  if (record != books().graphs.end()) std::erase(record->second.nodes, toId(node));
  dropNode(toId(node), gone);
}

void rememberNode(uint64_t graph, CUgraphNode node, std::shared_ptr<NodeInfo> info) {
  std::lock_guard lock(books().mutex);
  auto& known = books().nodes[toId(node)];
  if (known != nullptr)
    info->graph = known->graph;
  else if (graph != 0)
    books().graphs[graph].nodes.push_back(toId(node));
  if (graph != 0) info->graph = graph;
  std::erase_if(books().strays, [](const auto& stray) { return stray.expired(); });
  for (const GraphHold& hold : info->holds) books().strays.push_back(hold);
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
  CUresult status = deviceMemory(context.device).allocate(context.handle, bytes, address);
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

CUresult borrowForGraph(uint64_t host, size_t bytes, bool written, CUcontext context, uint64_t& arena,
                        GraphHold& hold) {
  Allocation found;
  if (allocations().find(host, found) &&
      (found.kind == Allocation::Kind::registered || found.kind == Allocation::Kind::managedSymbol)) {
    if (bytes > found.bytes - (host - found.address)) return CUDA_ERROR_INVALID_VALUE;
    arena = found.deviceAddress + (host - found.address);
    auto part = std::make_shared<PartHold>();
    if (found.kind != Allocation::Kind::registered || !registeredMemory().carries(host, bytes, part->range))
      return CUDA_SUCCESS;
    part->range.written = written;
    hold = std::move(part);
    return CUDA_SUCCESS;
  }
  auto part = std::make_shared<PartHold>();
  if (!findBorrowing(host, bytes, arena, part->shadow)) {
    CUresult status =
        hostMemory().allocate(context, std::max<size_t>(bytes, 4096), 0, HostMemory::Use::target, arena);
    if (status != CUDA_SUCCESS) return status;
    auto made = std::make_shared<BorrowHold>();
    made->context = context;
    made->host = host;
    made->arena = arena;
    made->bytes = bytes;
    part->shadow = made;
    std::lock_guard lock(books().mutex);
    books().borrowings.push_back({host, arena, bytes, part->shadow});
  }
  part->range = {host, arena, bytes, written, true};
  hold = std::move(part);
  return CUDA_SUCCESS;
}

std::vector<Carrier::Range> carriedBy(uint64_t graph) {
  std::vector<Carrier::Range> all;
  std::vector<GraphHold> kept;  // a hold must not end under the lock
  Carrier::Range range;
  const auto take = [&](const GraphHold& hold) {
    const auto known = [&](const Carrier::Range& r) {
      return r.shadow == range.shadow && r.bytes == range.bytes;
    };
    if (hold == nullptr || !hold->carried(range)) return;
    if (auto same = std::find_if(all.begin(), all.end(), known); same != all.end())
      same->written |= range.written;
    else
      all.push_back(range);
  };
  std::lock_guard lock(books().mutex);
  if (auto found = books().graphs.find(graph); found != books().graphs.end())
    for (const GraphHold& hold : found->second.holds) take(hold);
  for (const auto& stray : books().strays) take(kept.emplace_back(stray.lock()));
  return all;
}

CUresult localiseCopy(CUDA_MEMCPY3D_v2& copy, CUcontext context, std::vector<GraphHold>& holds) {
  if (copy.WidthInBytes == 0 || copy.Height == 0 || copy.Depth == 0) return CUDA_SUCCESS;
  if (copy.srcMemoryType != CU_MEMORYTYPE_ARRAY) {
    Side side{copy.srcMemoryType, copy.srcHost, copy.srcDevice, copy.srcXInBytes,
              copy.srcY,          copy.srcZ,    copy.srcPitch,  copy.srcHeight};
    CUmemorytype type{};
    uint64_t start = 0;
    CUresult status = localiseSide(side, false, copy, context, type, start, holds);
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
    CUresult status = localiseSide(side, true, copy, context, type, start, holds);
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
