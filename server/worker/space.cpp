#include "server/worker/space.h"

#include <sys/mman.h>

#include "base/log.h"
#include "base/reserve.h"
#include "server/worker/host_room.h"

namespace gpupool::server {
namespace {

constexpr size_t kExtentUnit = size_t{2} << 20;
constexpr size_t kHostUnit = 4096;

// True if [address, + bytes) lies in one entry of `ranges` (start -> size).
bool inRanges(const std::map<uint64_t, size_t>& ranges, uint64_t address, size_t bytes) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  auto& [start, size] = *std::prev(after);
  return address - start <= size && bytes <= size - (address - start);
}

}  // namespace

Space::Space(const Driver& driver, std::vector<CUdevice> devices, std::vector<uint64_t> limits)
    : driver_(driver), devices_(std::move(devices)), limits_(std::move(limits)) {
  peers_.assign(devices_.size(), 0);
  mapped_.assign(devices_.size(), 0);
}

Space::~Space() {
  for (auto& [address, piece] : host_)
    if (piece.registered) driver_.cuMemHostUnregister(piece.memory->data());
  for (auto& [address, extent] : extents_) {
    driver_.cuMemUnmap(extent.address, extent.bytes);
    driver_.cuMemRelease(extent.handle);
  }
  for (CUdeviceptr window : windows_) driver_.cuMemAddressFree(window, layout_.windowBytes);
  host_.clear();  // each leaves a reservation behind, which is the arena's
  if (layout_.hostBytes != 0) munmap(reinterpret_cast<void*>(layout_.hostBase), layout_.hostBytes);
}

int Space::reserve(uint32_t offered, std::string& reason) {
  for (int i = 0; i < schema::kMaxSpaces; ++i) {
    if ((offered >> i & 1) == 0) continue;
    const schema::AddressSpace& space = schema::kSpaces[i];
    if (!reserveAt(space.hostBase, space.hostBytes)) continue;
    bool good = true;
    for (size_t d = 0; good && d < devices_.size(); ++d) {
      CUdeviceptr want = space.deviceBase + d * space.windowBytes, got = 0;
      CUresult result = driver_.cuMemAddressReserve(&got, space.windowBytes, 0, want, 0);
      if (result == CUDA_SUCCESS) windows_.push_back(got);
      good = result == CUDA_SUCCESS && got == want;
    }
    if (good) {
      layout_ = space;
      return i;
    }
    for (CUdeviceptr window : windows_) driver_.cuMemAddressFree(window, space.windowBytes);
    windows_.clear();
    munmap(reinterpret_cast<void*>(space.hostBase), space.hostBytes);
  }
  reason =
      "client and worker can reserve no common address space for the session: lift the limit of "
      "the program's address space (ulimit -v)";
  return -1;
}

CUresult Space::setAccess(const Extent& extent) {
  CUmemAccessDesc access[schema::kMaxDevices] = {};
  size_t count = 0;
  for (size_t d = 0; d < devices_.size(); ++d) {
    if (d != extent.device && (peers_[extent.device] >> d & 1) == 0) continue;
    access[count].location = {CU_MEM_LOCATION_TYPE_DEVICE, {devices_[d]}};
    access[count++].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  return driver_.cuMemSetAccess(extent.address, extent.bytes, access, count);
}

// Another tenant's data must never be readable. On a stream of its own: the NULL stream would order itself
// with the session's streams, and a stream waiting for a later launch would stop the executor. The software
// GPU's memory is fresh from the kernel.
CUresult Space::scrub(const Extent& extent) {
  if (driver_.software()) return CUDA_SUCCESS;
  CUcontext context = nullptr;
  CUresult result = driver_.cuCtxGetCurrent(&context);
  if (result != CUDA_SUCCESS) return result;
  CUstream& stream = scrubbers_[context];  // kept: making one takes longer than clearing 64 MiB
  if (stream == nullptr) result = driver_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS) result = driver_.cuMemsetD8Async(extent.address, 0, extent.bytes, stream);
  if (result == CUDA_SUCCESS) result = driver_.cuStreamSynchronize(stream);
  return result;
}

void Space::contextEnded() {
  std::lock_guard lock(mapping_);
  scrubbers_.clear();
}

CUresult Space::mapExtent(unsigned device, CUdeviceptr address, size_t bytes) {
  std::lock_guard order(mapping_);
  if (device >= windows_.size() || bytes == 0 || bytes % kExtentUnit || address % kExtentUnit)
    return CUDA_ERROR_INVALID_VALUE;
  // In any window: an application reserves addresses before it says whose memory comes there.
  bool inside = false;
  for (CUdeviceptr window : windows_)
    inside |=
        address >= window && bytes <= layout_.windowBytes && address - window <= layout_.windowBytes - bytes;
  if (!inside) return CUDA_ERROR_INVALID_VALUE;
  auto after = extents_.lower_bound(address);
  if (after != extents_.end() && after->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (after != extents_.begin()) {
    const Extent& before = std::prev(after)->second;
    if (before.address + before.bytes > address) return CUDA_ERROR_INVALID_VALUE;
  }
  if (bytes > limits_[device] - std::min(limits_[device], mapped_[device])) return CUDA_ERROR_OUT_OF_MEMORY;

  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {devices_[device]}};
  Extent extent{device, address, bytes, 0};
  CUresult result = driver_.cuMemCreate(&extent.handle, bytes, &prop, 0);
  if (result != CUDA_SUCCESS) return result;
  result = driver_.cuMemMap(address, bytes, 0, extent.handle, 0);
  if (result == CUDA_SUCCESS) {
    result = setAccess(extent);
    if (result == CUDA_SUCCESS) result = scrub(extent);
    if (result != CUDA_SUCCESS) driver_.cuMemUnmap(address, bytes);
  }
  if (result != CUDA_SUCCESS) {
    driver_.cuMemRelease(extent.handle);
    return result;
  }
  std::lock_guard lock(mutex_);
  extents_[address] = extent;
  mapped_[device] += bytes;
  return CUDA_SUCCESS;
}

CUresult Space::unmapExtent(CUdeviceptr address) {
  std::lock_guard order(mapping_);
  auto found = extents_.find(address);
  if (found == extents_.end()) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = driver_.cuMemUnmap(found->second.address, found->second.bytes);
  if (result == CUDA_SUCCESS) result = driver_.cuMemRelease(found->second.handle);
  std::lock_guard lock(mutex_);
  mapped_[found->second.device] -= found->second.bytes;
  extents_.erase(found);
  return result;
}

CUresult Space::allowPeer(unsigned device, unsigned peer) {
  std::lock_guard order(mapping_);
  if (device >= devices_.size() || peer >= devices_.size()) return CUDA_ERROR_INVALID_DEVICE;
  peers_[device] |= 1u << peer;
  for (auto& [address, extent] : extents_) {
    if (extent.device != device) continue;
    CUresult result = setAccess(extent);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult Space::mapHost(uint64_t address, size_t bytes, unsigned flags,
                        std::shared_ptr<transport::SharedMemory>& memory) {
  std::lock_guard order(mapping_);
  if (bytes == 0 || bytes % kHostUnit || address % kHostUnit || address < layout_.hostBase ||
      bytes > layout_.hostBytes || address - layout_.hostBase > layout_.hostBytes - bytes)
    return CUDA_ERROR_INVALID_VALUE;
  auto after = host_.lower_bound(address);
  if (after != host_.end() && after->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  if (after != host_.begin()) {
    auto& [start, before] = *std::prev(after);
    if (start + before.memory->size() > address) return CUDA_ERROR_INVALID_VALUE;
  }
  if (!hostHasRoom(bytes)) {
    GPUPOOL_WARNING("no pinned memory of %zu bytes: this server's own memory is nearly used up", bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  try {
    memory = transport::SharedMemory::create(bytes, reinterpret_cast<void*>(address));
  } catch (const std::exception& e) {
    GPUPOOL_WARNING("no pinned memory of %zu bytes: %s", bytes, e.what());
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  unsigned how = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  (void)flags;  // write-combining is a hint that ordinary pages cannot follow
  CUresult result = driver_.cuMemHostRegister_v2(memory->data(), bytes, how);
  if (result != CUDA_SUCCESS) {
    memory.reset();
    return result;
  }
  std::lock_guard lock(mutex_);
  host_[address] = {memory, true};
  hostRanges_[address] = bytes;
  return CUDA_SUCCESS;
}

CUresult Space::unmapHost(uint64_t address) {
  std::shared_ptr<transport::SharedMemory> last;  // unmapped outside the locks
  std::lock_guard order(mapping_);
  auto found = host_.find(address);
  if (found == host_.end()) return CUDA_ERROR_INVALID_VALUE;
  CUresult result = driver_.cuMemHostUnregister(found->second.memory->data());
  std::lock_guard lock(mutex_);
  last = found->second.memory;
  host_.erase(found);
  hostRanges_.erase(address);
  return result;
}

void Space::addGlobal(uint64_t owner, const Global& global) {
  std::lock_guard lock(mutex_);
  size_t& size = globals_[global.address];
  size = std::max(size, global.bytes);
  if (global.managed) hostRanges_[global.address] = size;
  globalsOf_[owner].insert(global.address);
}

std::vector<Space::Global> Space::takeGlobals(uint64_t owner) {
  std::lock_guard lock(mutex_);
  auto found = globalsOf_.find(owner);
  if (found == globalsOf_.end()) return {};
  std::vector<Global> gone;
  for (uint64_t address : found->second)
    gone.push_back({address, globals_[address], hostRanges_.erase(address) != 0});
  for (const Global& global : gone) globals_.erase(global.address);
  globalsOf_.erase(found);
  return gone;
}

void Space::addStaging(std::shared_ptr<transport::SharedMemory> memory) {
  std::lock_guard lock(mutex_);
  hostRanges_[reinterpret_cast<uint64_t>(memory->data())] = memory->size();
  staging_ = std::move(memory);
}

std::shared_ptr<transport::SharedMemory> Space::hostMemory(uint64_t address, size_t bytes) const {
  std::lock_guard lock(mutex_);
  auto holds = [&](const std::shared_ptr<transport::SharedMemory>& memory) {
    uint64_t start = reinterpret_cast<uint64_t>(memory->data());
    return address >= start && address - start <= memory->size() &&
           bytes <= memory->size() - (address - start);
  };
  if (staging_ != nullptr && holds(staging_)) return staging_;
  auto after = host_.upper_bound(address);
  if (after == host_.begin()) return nullptr;
  const auto& memory = std::prev(after)->second.memory;
  return holds(memory) ? memory : nullptr;
}

bool Space::owns(uint64_t address, size_t bytes) const {
  std::lock_guard lock(mutex_);
  for (CUdeviceptr window : windows_)
    if (address >= window && address - window <= layout_.windowBytes &&
        bytes <= layout_.windowBytes - (address - window))
      return true;
  return inRanges(hostRanges_, address, bytes) || inRanges(globals_, address, bytes);
}

bool Space::ownsHost(uint64_t address, size_t bytes) const {
  std::lock_guard lock(mutex_);
  return inRanges(hostRanges_, address, bytes);
}

std::vector<Space::Extent> Space::extents() const {
  std::lock_guard lock(mutex_);
  std::vector<Extent> all;
  for (auto& [address, extent] : extents_) all.push_back(extent);
  return all;
}

uint64_t Space::mappedBytes(unsigned device) const {
  std::lock_guard lock(mutex_);
  return device < mapped_.size() ? mapped_[device] : 0;
}

}  // namespace gpupool::server
