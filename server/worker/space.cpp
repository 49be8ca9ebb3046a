#include "server/worker/space.h"

#include <sys/mman.h>

#include <algorithm>

#include "base/log.h"
#include "base/reserve.h"
#include "server/arena_mmap.h"

namespace gpupool::server {
namespace {

constexpr size_t kExtentUnit = size_t{2} << 20;

// True if [address, + bytes) lies in one entry of `ranges` (start -> size).
bool inRanges(const std::map<uint64_t, size_t>& ranges, uint64_t address, size_t bytes) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  auto& [start, size] = *std::prev(after);
  return address - start <= size && bytes <= size - (address - start);
}

}  // namespace

Space::Space(const Driver& driver, std::vector<CUdevice> devices, Account& account)
    : driver_(driver), devices_(std::move(devices)), account_(account) {
  peers_.assign(devices_.size(), 0);
  used_.assign(devices_.size(), 0);
}

Space::~Space() {
  for (auto& [address, piece] : host_)
    if (piece.context != nullptr) driver_.cuMemHostUnregister(piece.memory->data());
  for (auto& [address, mapping] : mappings_) {
    driver_.cuMemUnmap(address, mapping.physical->bytes);
    --mapping.physical->mappings;
    endUnused(*mapping.physical);
  }
  for (auto& [name, physical] : named_) {
    physical->named = false;
    endUnused(*physical);
  }
  for (CUdeviceptr window : windows_) driver_.cuMemAddressFree(window, layout_.windowBytes);
  if (aside_ != 0) driver_.cuMemAddressFree(aside_, asideBytes_);
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
      reserveAside();
      return reserved_ = i;
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

CUresult Space::makePhysical(unsigned device, size_t bytes, std::shared_ptr<Physical>& made) {
  const CUresult result = tryPhysical(device, bytes, made);
  return result == CUDA_ERROR_OUT_OF_MEMORY && full_ && full_() ? tryPhysical(device, bytes, made) : result;
}

CUresult Space::tryPhysical(unsigned device, size_t bytes, std::shared_ptr<Physical>& made) {
  if (device >= devices_.size() || bytes == 0 || bytes % kExtentUnit != 0) return CUDA_ERROR_INVALID_VALUE;
  Taken taken(account_, device, bytes);
  if (taken.status() != CUDA_SUCCESS) return taken.status();
  auto fresh = std::make_shared<Physical>();
  fresh->device = device;
  fresh->bytes = bytes;
  CUresult result = create(*fresh);
  if (result != CUDA_SUCCESS) return result;
  taken.keep();
  made = std::move(fresh);
  std::lock_guard lock(mutex_);
  used_[device] += bytes;
  return CUDA_SUCCESS;
}

CUresult Space::create(Physical& physical) const {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = devices_[physical.device];
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return driver_.cuMemCreate(&physical.handle, physical.bytes, &prop, 0);
}

void Space::endUnused(Physical& physical) {
  if (physical.named || physical.mappings != 0) return;
  if (physical.handle != 0) driver_.cuMemRelease(physical.handle);
  if (physical.offered != 0 || physical.opening != 0) shared_.fetch_sub(1, std::memory_order_acq_rel);
  if (physical.opening != 0) return account_.close(physical.opening);
  if (physical.offered != 0)
    account_.endPiece(physical.offered, physical.device, physical.bytes);
  else
    account_.give(physical.device, physical.bytes);
  std::lock_guard lock(mutex_);
  used_[physical.device] -= physical.bytes;
}

CUresult Space::open(const Physical& physical, CUdeviceptr address) {
  CUmemAccessDesc access[schema::kMaxDevices] = {};
  size_t count = 0;
  for (size_t d = 0; d < devices_.size(); ++d) {
    if (d != physical.device && (peers_[physical.device] >> d & 1) == 0) continue;
    access[count].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access[count].location.id = devices_[d];
    access[count++].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }
  return driver_.cuMemSetAccess(address, physical.bytes, access, count);
}

// Another tenant's data must never be readable. The software GPU's memory is fresh from the kernel.
CUresult Space::scrub(Physical& physical, CUdeviceptr address) {
  if (physical.clean || driver_.software()) return CUDA_SUCCESS;
  CUdevice current = 0;
  CUresult result = driver_.cuCtxGetDevice(&current);  // without a context, too, memory is exported
  if (result == CUDA_SUCCESS && current == devices_[physical.device]) {
    CUcontext context = nullptr;
    result = driver_.cuCtxGetCurrent(&context);
    if (result == CUDA_SUCCESS)
      result = scrubbers_.try_emplace(context, driver_).first->second.clear(address, physical.bytes);
  } else {
    result = scrubElsewhere(physical, address);
  }
  physical.clean = result == CUDA_SUCCESS;
  return result;
}

// Memory of another device than the current context's, which may not reach it: its own device clears it.
CUresult Space::scrubElsewhere(const Physical& physical, CUdeviceptr address) {
  const CUdevice device = devices_[physical.device];
  CUcontext context = nullptr, popped = nullptr;
  CUresult result = driver_.cuDevicePrimaryCtxRetain(&context, device);
  if (result != CUDA_SUCCESS) return result;
  result = driver_.cuCtxPushCurrent_v2(context);
  if (result == CUDA_SUCCESS) {
    result = Scrubber(driver_).clear(address, physical.bytes);
    driver_.cuCtxPopCurrent_v2(&popped);
  }
  driver_.cuDevicePrimaryCtxRelease_v2(device);
  return result;
}

// A rebuilt session's memory is not cleared, so its contexts would be without what clearing makes in them.
void Space::contextMade(CUcontext context, unsigned device) {
  std::lock_guard lock(mapping_);
  openToOthers(device);
  if (driver_.software()) return;
  const auto [at, made] = scrubbers_.try_emplace(context, driver_);
  if (!made || driver_.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS) return;
  PlaceGlobals place;
  if (const CUresult result = at->second.prepare(); result != CUDA_SUCCESS)
    GPUPOOL_WARNING("a context could not be prepared: %s", driver_.describe(result).c_str());
  driver_.cuCtxPopCurrent_v2(&context);
}

// What cuMemAlloc makes, every device may copy, whichever context is current and whether peer access is
// enabled or not (driver manual, Unified Addressing). Mapped memory takes part in copies of those devices
// only that cuMemSetAccess names, so memory is open to all devices that the session works on. A kernel that
// uses another device's memory without having enabled it is not stopped here; natively it is. Between devices
// that cannot reach one another's memory (no NVLink, no peer access over PCIe) such copies fail.
void Space::openToOthers(unsigned device) {
  if (device >= devices_.size() || (withContext_ >> device & 1) != 0) return;
  withContext_ |= 1u << device;
  for (unsigned other = 0; other < devices_.size(); ++other) {
    if (other == device || (withContext_ >> other & 1) == 0) continue;
    for (const auto& [owner, user] : {std::pair(device, other), std::pair(other, device)}) {
      int can = 0;
      if (driver_.cuDeviceCanAccessPeer(&can, devices_[user], devices_[owner]) != CUDA_SUCCESS || can == 0)
        continue;
      if (const CUresult result = allow(owner, user); result != CUDA_SUCCESS)
        GPUPOOL_WARNING("memory of one GPU cannot be opened to another: %s",
                        driver_.describe(result).c_str());
    }
  }
}

void Space::contextEnds() {
  std::lock_guard lock(mapping_);
  scrubbers_.clear();
}

// In any window: an application reserves addresses before it says whose memory comes there.
bool Space::inWindow(CUdeviceptr address, size_t bytes) const {
  bool inside = false;
  for (CUdeviceptr window : windows_)
    inside |=
        address >= window && bytes <= layout_.windowBytes && address - window <= layout_.windowBytes - bytes;
  return inside && address % kExtentUnit == 0;
}

bool Space::isFree(CUdeviceptr address, size_t bytes) const {
  auto after = mappings_.lower_bound(address);
  if (after != mappings_.end() && after->first < address + bytes) return false;
  if (after == mappings_.begin()) return true;
  auto& [start, before] = *std::prev(after);
  return start + before.physical->bytes <= address;
}

// A piece is cleared when it is mapped first. For that it is opened to its device; a client's mapping is then
// made anew, closed to everybody.
CUresult Space::map(const std::shared_ptr<Physical>& physical, CUdeviceptr address, bool ofClient) {
  CUresult result = driver_.cuMemMap(address, physical->bytes, 0, physical->handle, 0);
  if (result != CUDA_SUCCESS) return result;
  const bool dirty = !physical->clean && !driver_.software();
  if (!ofClient || dirty) result = open(*physical, address);
  if (result == CUDA_SUCCESS) result = scrub(*physical, address);
  if (result == CUDA_SUCCESS && ofClient && dirty) {
    result = driver_.cuMemUnmap(address, physical->bytes);
    if (result == CUDA_SUCCESS) result = driver_.cuMemMap(address, physical->bytes, 0, physical->handle, 0);
    if (result != CUDA_SUCCESS) return result;
  }
  if (result != CUDA_SUCCESS) {
    driver_.cuMemUnmap(address, physical->bytes);
    return result;
  }
  ++physical->mappings;
  std::lock_guard lock(mutex_);
  mappings_[address] = {physical, ofClient, {}};
  return CUDA_SUCCESS;
}

CUresult Space::createPhysical(unsigned device, uint64_t name, size_t bytes) {
  std::shared_ptr<Physical> made;
  CUresult result = makePhysical(device, bytes, made);
  if (result != CUDA_SUCCESS) return result;
  std::lock_guard order(mapping_);
  if (name == 0 || named_.count(name) != 0) {
    endUnused(*made);
    return CUDA_ERROR_INVALID_VALUE;
  }
  made->named = true;
  named_[name] = std::move(made);
  return CUDA_SUCCESS;
}

CUresult Space::releasePhysical(uint64_t name) {
  std::lock_guard order(mapping_);
  auto found = named_.find(name);
  if (found == named_.end()) return CUDA_ERROR_INVALID_VALUE;
  auto physical = found->second;
  named_.erase(found);
  physical->named = false;
  endUnused(*physical);
  return CUDA_SUCCESS;
}

CUresult Space::mapPhysical(uint64_t name, CUdeviceptr address) {
  std::lock_guard order(mapping_);
  auto found = named_.find(name);
  if (found == named_.end()) return CUDA_ERROR_INVALID_VALUE;
  const size_t bytes = found->second->bytes;
  if (!inWindow(address, bytes) || !isFree(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return map(found->second, address, true);
}

CUresult Space::setAccess(CUdeviceptr address, unsigned device, CUmemAccess_flags flags) {
  std::lock_guard order(mapping_);
  auto found = mappings_.find(address);
  if (found == mappings_.end() || !found->second.ofClient) return CUDA_ERROR_INVALID_VALUE;
  if (device >= devices_.size()) return CUDA_ERROR_INVALID_DEVICE;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = devices_[device];
  access.flags = flags;
  CUresult result = driver_.cuMemSetAccess(address, found->second.physical->bytes, &access, 1);
  if (result == CUDA_SUCCESS) found->second.access[device] = flags;
  return result;
}

CUresult Space::mapExtent(unsigned device, CUdeviceptr address, size_t bytes) {
  if (!inWindow(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  std::shared_ptr<Physical> made;
  CUresult result = makePhysical(device, bytes, made);
  if (result != CUDA_SUCCESS) return result;
  std::lock_guard order(mapping_);
  result = isFree(address, bytes) ? map(made, address, false) : CUDA_ERROR_INVALID_VALUE;
  if (result != CUDA_SUCCESS) endUnused(*made);
  return result;
}

CUresult Space::unmapExtent(CUdeviceptr address) {
  std::lock_guard order(mapping_);
  auto found = mappings_.find(address);
  if (found == mappings_.end()) return CUDA_ERROR_INVALID_VALUE;
  auto physical = found->second.physical;
  CUresult result = driver_.cuMemUnmap(address, physical->bytes);
  {
    std::lock_guard lock(mutex_);
    mappings_.erase(found);
  }
  --physical->mappings;
  endUnused(*physical);
  return result;
}

CUresult Space::allowPeer(unsigned device, unsigned peer) {
  std::lock_guard order(mapping_);
  if (device >= devices_.size() || peer >= devices_.size()) return CUDA_ERROR_INVALID_DEVICE;
  return allow(device, peer);
}

// Under mapping_.
CUresult Space::allow(unsigned device, unsigned peer) {
  if ((peers_[device] >> peer & 1) != 0) return CUDA_SUCCESS;
  peers_[device] |= 1u << peer;
  for (auto& [address, mapping] : mappings_) {
    if (mapping.ofClient || mapping.physical->device != device) continue;
    CUresult result = open(*mapping.physical, address);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

void Space::addGlobal(uint64_t owner, const Global& global) {
  std::lock_guard lock(mutex_);
  size_t& size = globals_[global.address];
  size = std::max(size, global.bytes);
  if (global.managed) hostRanges_[global.address] = size;
  globalsOf_[owner].insert(global.address);
}

bool Space::hasManaged(uint64_t owner) const {
  std::lock_guard lock(mutex_);
  const auto found = globalsOf_.find(owner);
  return found != globalsOf_.end() &&
         std::ranges::any_of(found->second, [&](uint64_t address) { return hostRanges_.contains(address); });
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

bool Space::owns(uint64_t address, size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    for (CUdeviceptr window : windows_)
      if (address >= window && address - window <= layout_.windowBytes &&
          bytes <= layout_.windowBytes - (address - window))
        return true;
    if (inRanges(globals_, address, bytes)) return true;
  }
  return ownsHost(address, bytes);
}

bool Space::ownsHost(uint64_t address, size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    if (inRanges(hostRanges_, address, bytes)) return true;
  }
  return repeating_ && lend(address, bytes);
}

uint64_t Space::physicalBytes(unsigned device) const {
  std::lock_guard lock(mutex_);
  return device < used_.size() ? used_[device] : 0;
}

}  // namespace gpupool::server
