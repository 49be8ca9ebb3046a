#include "client/memory/device.h"

#include <algorithm>
#include <iterator>
#include <system_error>
#include <thread>

#include "base/signals.h"
#include "client/contexts.h"
#include "client/memory/allocations.h"
#include "client/memory/pages.h"
#include "client/session.h"

namespace gpupool::client {

Allocations& allocations() {
  static auto* all = new Allocations;
  return *all;
}

void Allocations::add(Allocation allocation) {
  std::unique_lock lock(mutex_);
  allocation.bufferId = nextBufferId_++;
  byAddress_[allocation.address] = allocation;
}

bool Allocations::remove(uint64_t address, Allocation* out) {
  std::unique_lock lock(mutex_);
  auto found = byAddress_.find(address);
  if (found == byAddress_.end()) return false;
  if (out != nullptr) *out = found->second;
  byAddress_.erase(found);
  return true;
}

void Allocations::setAccess(uint64_t address, int device, bool reads, bool writes) {
  std::unique_lock lock(mutex_);
  auto found = byAddress_.find(address);
  if (found == byAddress_.end()) return;
  const uint32_t bit = 1u << device;
  found->second.readers = (found->second.readers & ~bit) | (reads ? bit : 0);
  found->second.writers = (found->second.writers & ~bit) | (writes ? bit : 0);
}

bool Allocations::find(uint64_t address, Allocation& out) const {
  std::shared_lock lock(mutex_);
  auto after = byAddress_.upper_bound(address);
  if (after == byAddress_.begin()) return false;
  const Allocation& candidate = std::prev(after)->second;
  if (address - candidate.address >= candidate.bytes) return false;
  out = candidate;
  return true;
}

bool Allocations::isManaged(uint64_t address, size_t bytes) const {
  Allocation part;
  for (bool more = bytes != 0; more;) {
    if (!find(address, part) ||
        (part.kind != Allocation::Kind::managed && part.kind != Allocation::Kind::managedSymbol))
      return false;
    const size_t rest = part.bytes - (address - part.address);
    more = bytes > rest;
    address += rest;
    bytes -= rest;
  }
  return true;
}

namespace {
DeviceMemory* windows = nullptr;
}  // namespace

DeviceMemory& deviceMemory(CUdevice device) { return windows[device]; }

void startDeviceMemory() {
  Session& session = Session::get();
  windows = new DeviceMemory[schema::kMaxDevices];
  const schema::AddressSpace& space = session.space();
  for (CUdevice device = 0; device < deviceCount(); ++device) {
    const auto window = static_cast<uint64_t>(sessionDevice(device));
    windows[device].start(device, space.deviceBase + window * space.windowBytes, space.windowBytes,
                          propertiesOf(device)->limitBytes);
  }
}

void DeviceMemory::start(CUdevice device, uint64_t window, uint64_t windowBytes, uint64_t limit) {
  device_ = device;
  limit_ = limit;
  addresses_[window] = windowBytes;
}

uint64_t DeviceMemory::reserveAddresses(size_t bytes, size_t alignment) {
  std::lock_guard lock(mutex_);
  alignment = std::max(alignment, kExtentUnit);
  for (auto it = addresses_.begin(); it != addresses_.end(); ++it) {
    uint64_t start = roundUp(it->first, alignment), end = it->first + it->second;
    if (start >= end || bytes > end - start) continue;
    uint64_t before = start - it->first;
    uint64_t first = it->first;
    addresses_.erase(it);
    if (before != 0) addresses_[first] = before;
    if (start + bytes != end) addresses_[start + bytes] = end - start - bytes;
    return start;
  }
  return 0;
}

CUresult DeviceMemory::charge(CUcontext context, size_t bytes) {
  std::lock_guard lock(mutex_);
  auto fits = [&] { return mapped_ + charged_ <= limit_ && bytes <= limit_ - mapped_ - charged_; };
  if (!fits()) trimLocked(context, 0);
  if (!fits()) return CUDA_ERROR_OUT_OF_MEMORY;
  charged_ += bytes;
  return CUDA_SUCCESS;
}

void DeviceMemory::release(size_t bytes) {
  std::lock_guard lock(mutex_);
  charged_ -= std::min(charged_, bytes);
}

void DeviceMemory::releaseAddresses(uint64_t address, size_t bytes) {
  std::lock_guard lock(mutex_);
  auto next = addresses_.upper_bound(address);
  if (next != addresses_.end() && address + bytes == next->first) {
    bytes += next->second;
    next = addresses_.erase(next);
  }
  if (next != addresses_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == address) {
      before->second += bytes;
      return;
    }
  }
  addresses_[address] = bytes;
}

void DeviceMemory::addFree(uint64_t address, size_t bytes) {
  free_[address] = bytes;
  freeBySize_.emplace(bytes, address);
}

// Best fit; 0 if nothing fits.
uint64_t DeviceMemory::takeFree(size_t bytes) {
  auto fit = freeBySize_.lower_bound({bytes, 0});
  if (fit == freeBySize_.end()) return 0;
  auto [size, address] = *fit;
  freeBySize_.erase(fit);
  free_.erase(address);
  if (size > bytes) addFree(address + bytes, size - bytes);
  return address;
}

std::map<uint64_t, DeviceMemory::Extent>::iterator DeviceMemory::extentOf(uint64_t address) {
  return std::prev(extents_.upper_bound(address));
}

CUresult DeviceMemory::grow(CUcontext context, size_t bytes) {
  // Called with the mutex held; addresses_ is ours.
  uint64_t address = 0;
  if (charged_ != 0 && (mapped_ + charged_ > limit_ || bytes > limit_ - mapped_ - charged_))
    return CUDA_ERROR_OUT_OF_MEMORY;
  for (auto it = addresses_.begin(); it != addresses_.end(); ++it) {
    if (it->second < bytes) continue;
    address = it->first;
    size_t rest = it->second - bytes;
    addresses_.erase(it);
    if (rest != 0) addresses_[address + bytes] = rest;
    break;
  }
  if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult status = Session::get().await<"sessionExtentMap">(context, device_, CUdeviceptr{address}, bytes);
  if (status != CUDA_SUCCESS) {
    addresses_[address] =
        bytes;  // may leave two neighbours unmerged: only addresses, found again at the next release
    return status;
  }
  extents_[address] = {bytes, 0};
  mapped_ += bytes;
  addFree(address, bytes);
  return CUDA_SUCCESS;
}

CUresult DeviceMemory::allocate(CUcontext context, size_t bytes, uint64_t& address) {
  CUresult status = tryAllocate(context, bytes, address);
  if (status != CUDA_ERROR_OUT_OF_MEMORY || !othersMayKeep(context, bytes)) return status;
  constexpr std::chrono::milliseconds kOnItsWay{100};
  Session::get().nap(kKeepTime + kOnItsWay);
  status = tryAllocate(context, bytes, address);
  constexpr std::chrono::seconds kInVain{10};
  std::lock_guard lock(mutex_);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) notAgain_ = Clock::now() + kInVain;
  return status;
}

// Not in a protected program: what it was refused, and had a moment later, depends on others, and would not
// be answered so again.
bool DeviceMemory::othersMayKeep(CUcontext context, size_t bytes) const {
  if (Session::get().isProtected()) return false;
  {
    std::lock_guard lock(mutex_);
    const size_t own = used_ + charged_;
    if (own > limit_ || bytes > limit_ - own || Clock::now() < notAgain_) return false;
  }
  size_t elsewhere = 0;
  return Session::get().await<"sessionMemoryElsewhere">(context, CUdevice{device_}, &elsewhere) ==
             CUDA_SUCCESS &&
         elsewhere != 0;
}

CUresult DeviceMemory::tryAllocate(CUcontext context, size_t bytes, uint64_t& address) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > limit_) return CUDA_ERROR_OUT_OF_MEMORY;
  size_t size = roundUp(bytes, kGranularity);
  std::lock_guard lock(mutex_);
  bool large = size > kSharedExtent / 2;
  address = large ? 0 : takeFree(size);
  if (large) {  // an exact extent, so that big buffers do not pin small ones
    size = roundUp(size, kExtentUnit);
    auto fit = freeBySize_.lower_bound({size, 0});
    if (fit != freeBySize_.end() && fit->first <= size + size / 8) address = takeFree(size);
  }
  if (address == 0) {
    const size_t least = roundUp(size, kExtentUnit);
    if (!large) sharedExtent_ = std::clamp(2 * sharedExtent_, least, kSharedExtent);
    size_t wanted = large ? least : sharedExtent_;
    CUresult status = grow(context, wanted);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) {
      address = takeFree(size);
      if (address == 0) trimLocked(context, 0);
      // Near the end of the memory, what is left in smaller pieces.
      for (bool last = false; address == 0 && status == CUDA_ERROR_OUT_OF_MEMORY && !last;) {
        last = wanted == least;
        status = grow(context, wanted);
        wanted = std::max(roundUp(wanted / 2, kExtentUnit), least);
      }
    }
    if (address == 0 && status != CUDA_SUCCESS) return status;
    if (address == 0) address = takeFree(size);
    if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  blocks_[address] = size;
  extentOf(address)->second.used += size;
  used_ += size;
  return CUDA_SUCCESS;
}

void DeviceMemory::release(CUcontext context, uint64_t address) {
  std::lock_guard lock(mutex_);
  auto block = blocks_.find(address);
  if (block == blocks_.end()) return;
  size_t size = block->second;
  blocks_.erase(block);
  used_ -= size;
  auto extent = extentOf(address);
  extent->second.used -= size;
  uint64_t end = extent->first + extent->second.bytes;
  auto next = free_.find(address + size);
  if (next != free_.end() && next->first < end) {
    freeBySize_.erase({next->second, next->first});
    size += next->second;
    free_.erase(next);
  }
  if (const auto behind = free_.lower_bound(address); behind != free_.begin()) {
    const auto before = std::prev(behind);
    if (before->first >= extent->first && before->first + before->second == address) {
      address = before->first;
      size += before->second;
      freeBySize_.erase({before->second, before->first});
      free_.erase(before);
    }
  }
  addFree(address, size);
  // Of a small lease less: its other processes cannot have what this one keeps.
  if (trimLocked(context, std::min<size_t>(kCacheBytes, limit_ / 16)) != 0) trimLater();
}

void DeviceMemory::trim(CUcontext context, size_t keep) {
  std::lock_guard lock(mutex_);
  trimLocked(context, keep);
}

void DeviceMemory::trimLater() {
  freed_ = Clock::now();
  if (waiting_) return;
  SignalsBlocked blocked;
  try {
    std::thread([this] { trimWhenIdle(); }).detach();
    waiting_ = true;
  } catch (const std::system_error&) {  // as many threads as the process may have
    trimAll();
  }
}

// On a thread of its own, which may wait in a call as the program's threads do.
void DeviceMemory::trimWhenIdle() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (const auto due = freed_ + kKeepTime; Clock::now() < due) {
      lock.unlock();
      std::this_thread::sleep_until(due);
      lock.lock();
    } else if (Session::get().capturing()) {  // nothing that the program did not ask for gets into that
      freed_ = Clock::now();
    } else {
      break;
    }
  }
  trimAll();
  waiting_ = false;
}

// In a living context of this device: who ends it takes the mutex, to trim what is left, before the worker
// hears of that. Where there is none, nothing is left.
void DeviceMemory::trimAll() {
  CUcontext living = nullptr;
  contexts().forEachAlive([&](const Context& context) {
    if (context.device == device_) living = context.handle;
  });
  if (living != nullptr) trimLocked(living, 0);
}

size_t DeviceMemory::trimLocked(CUcontext context, size_t keep) {
  size_t idle = 0;
  for (auto& [address, extent] : extents_)
    if (extent.used == 0) idle += extent.bytes;
  for (auto it = extents_.end(); it != extents_.begin() && idle > keep;) {
    --it;
    if (it->second.used != 0) continue;
    uint64_t address = it->first;
    size_t bytes = it->second.bytes;
    Session::get().post<"sessionExtentUnmap">(context, CUdeviceptr{address});
    freeBySize_.erase({bytes, address});
    free_.erase(address);
    addresses_[address] = bytes;
    mapped_ -= bytes;
    idle -= bytes;
    it = extents_.erase(it);
  }
  if (extents_.empty()) sharedExtent_ = 0;
  return idle;
}

void DeviceMemory::reset(CUcontext context) {
  std::lock_guard lock(mutex_);
  while (!blocks_.empty()) {
    auto block = blocks_.begin();
    extentOf(block->first)->second.used -= block->second;
    used_ -= block->second;
    blocks_.erase(block);
  }
  free_.clear();
  freeBySize_.clear();
  for (auto& [address, extent] : extents_) addFree(address, extent.bytes);
  trimLocked(context, 0);
}

void DeviceMemory::info(size_t& freeBytes, size_t& totalBytes) const {
  std::lock_guard lock(mutex_);
  totalBytes = limit_;
  freeBytes = limit_ - std::min<uint64_t>(limit_, used_ + charged_);
}

CUresult DeviceMemory::leaseInfo(CUcontext context, size_t& freeBytes, size_t& totalBytes) const {
  size_t elsewhere = 0;
  const CUresult status =
      Session::get().await<"sessionMemoryElsewhere">(context, CUdevice{device_}, &elsewhere);
  info(freeBytes, totalBytes);
  freeBytes -= std::min(freeBytes, elsewhere);
  return status;
}

}  // namespace gpupool::client
