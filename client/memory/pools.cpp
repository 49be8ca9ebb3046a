#include "client/memory/pools.h"

#include <algorithm>
#include <cstring>

#include "client/devices.h"
#include "client/memory/device.h"
#include "client/memory/pages.h"

namespace gpupool::client {
namespace {}  // namespace

// ---- marks ----

StreamMark StreamMark::now(const StreamRef& ref) {
  return {ref.stream->word, ref.stream->id, ref.stream->posted.load(std::memory_order_acquire), ref.context,
          ref.wire};
}

bool StreamMark::reached() const { return Session::get().words().reached(word, value); }

bool StreamMark::find(StreamRef& ref) const {
  Context* object = contexts().find(context);
  if (object == nullptr || !object->alive) return false;
  Stream* stream = wire == nullptr ? &streamsOf(*object).legacy : streams.find(toId(wire));
  if (stream == nullptr || stream->id != id || stream->word != word) return false;
  ref = {stream, context, wire};
  return true;
}

void StreamMark::request() const {
  StreamRef ref;
  uint64_t asked = 0;
  if (!reached() && find(ref) && !ref.stream->capturing) requestWord(ref, asked);
}

bool StreamMark::wait() const {
  if (reached()) return true;
  StreamRef ref;
  if (find(ref)) return !ref.stream->capturing && waitFor(ref, value) == CUDA_SUCCESS;
  if (!contexts().isAlive(context)) return true;
  // The stream was destroyed; the driver lets it finish, and only its context can tell.
  return Session::get().await<"sessionDrain">(context, CUstream{nullptr}, 1u) == CUDA_SUCCESS;
}

// ---- one pool ----

MemoryPool::MemoryPool(CUdevice device, bool standard, uint64_t maximum, const PoolSharing& sharing)
    : device_(device),
      standard_(standard),
      maximum_(maximum),
      sharing_(sharing),
      access_(uint64_t{1} << device) {}

void MemoryPool::add(uint64_t address, const Free& free) {
  free_[address] = free;
  bySize_[keyOf(free)].emplace(free.bytes, address);
}

void MemoryPool::erase(std::map<uint64_t, Free>::iterator at) {
  auto sizes = bySize_.find(keyOf(at->second));
  sizes->second.erase({at->second.bytes, at->first});
  if (sizes->second.empty()) bySize_.erase(sizes);
  free_.erase(at);
}

void MemoryPool::addClean(uint64_t address, size_t bytes) {
  auto chunk = chunkOf(address);
  auto next = free_.lower_bound(address);
  if (next != free_.end() && !next->second.pending && next->first == address + bytes &&
      next->first < chunk->first + chunk->second.bytes) {
    bytes += next->second.bytes;
    auto gone = next++;
    erase(gone);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (!before->second.pending && before->first >= chunk->first &&
        before->first + before->second.bytes == address) {
      address = before->first;
      bytes += before->second.bytes;
      erase(before);
    }
  }
  add(address, {bytes, false, {}});
}

// Best fit among the blocks of one key; 0: none.
uint64_t MemoryPool::take(Key key, size_t bytes) {
  auto sizes = bySize_.find(key);
  if (sizes == bySize_.end()) return 0;
  auto fit = sizes->second.lower_bound({bytes, 0});
  if (fit == sizes->second.end()) return 0;
  uint64_t address = fit->second;
  auto at = free_.find(address);
  Free rest = at->second;
  erase(at);
  if (rest.bytes > bytes) {
    rest.bytes -= bytes;
    add(address + bytes, rest);
  }
  return address;
}

// Neighbours that the stream may use together: its own pending blocks and clean ones.
uint64_t MemoryPool::takeRun(Key key, size_t bytes) {
  uint64_t start = 0, end = 0;
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second.pending && it->second.mark.key() != key) {
      end = 0;
      continue;
    }
    if (it->first != end || chunks_.count(it->first) != 0) start = it->first;
    end = it->first + it->second.bytes;
    if (end - start < bytes) continue;
    Free last = it->second;  // the run was too short without it, so what is left over is its end
    for (auto piece = free_.find(start); piece != free_.end() && piece->first < end;) erase(piece++);
    last.bytes = end - start - bytes;
    if (last.bytes != 0) add(start + bytes, last);
    return start;
  }
  return 0;
}

// Pending blocks of which `over` is true are anybody's.
template <class Over>
void MemoryPool::clean(Over&& over) {
  std::vector<std::pair<uint64_t, size_t>> done;
  for (auto& [address, free] : free_)
    if (free.pending && over(free)) done.emplace_back(address, free.bytes);
  for (auto& [address, bytes] : done) {
    erase(free_.find(address));
    addClean(address, bytes);
  }
}

void MemoryPool::sweep() {
  clean([](const Free& free) { return free.mark.reached(); });
}

CUresult MemoryPool::grow(CUcontext context, size_t bytes) {
  // Large blocks get a chunk of their own, so that they can be given back alone.
  size_t chunk = bytes > kChunk / 2 ? roundUp(bytes, kUnit) : kChunk;
  if (maximum_ != 0) {
    if (reserved_ + roundUp(bytes, kUnit) > roundUp(maximum_, kUnit)) return CUDA_ERROR_OUT_OF_MEMORY;
    chunk = std::min<uint64_t>(chunk, roundUp(maximum_, kUnit) - reserved_);
  }
  uint64_t address = 0;
  DeviceMemory& memory = deviceMemory(device_);
  CUresult status = memory.allocate(context, chunk, address);
  if (status == CUDA_ERROR_OUT_OF_MEMORY && chunk > roundUp(bytes, kUnit)) {
    chunk = roundUp(bytes, kUnit);
    status = memory.allocate(context, chunk, address);
  }
  if (status != CUDA_SUCCESS) return status;
  chunks_[address] = {chunk, 0};
  reserved_ += chunk;
  reservedHigh_ = std::max(reservedHigh_, reserved_);
  add(address, {chunk, false, {}});
  return CUDA_SUCCESS;
}

CUresult MemoryPool::allocate(const StreamRef& ref, size_t bytes, uint64_t& address) {
  if (bytes > SIZE_MAX - kUnit) return CUDA_ERROR_OUT_OF_MEMORY;
  size_t size = roundUp(bytes, DeviceMemory::kGranularity);
  Key mine{ref.stream->word, ref.stream->id};
  std::lock_guard lock(mutex_);
  address = take(mine, size);
  if (address == 0) address = take({0, 0}, size);
  if (address == 0) {
    sweep();
    address = take({0, 0}, size);
    if (address == 0) address = takeRun(mine, size);
  }
  if (address == 0) {
    std::set<Key> asked;  // the next one to come this way may find them done
    for (auto& [at, free] : free_)
      if (free.pending && asked.insert(free.mark.key()).second) free.mark.request();
    CUresult status = grow(ref.context, size);
    if (status != CUDA_SUCCESS) return status;
    address = take({0, 0}, size);
  }
  blocks_[address] = size;
  chunkOf(address)->second.used += size;
  used_ += size;
  usedHigh_ = std::max(usedHigh_, used_);
  return CUDA_SUCCESS;
}

bool MemoryPool::release(uint64_t address, const StreamMark* mark) {
  std::lock_guard lock(mutex_);
  auto block = blocks_.find(address);
  if (block == blocks_.end()) return false;
  size_t size = block->second;
  blocks_.erase(block);
  chunkOf(address)->second.used -= size;
  used_ -= size;
  if (mark != nullptr && !mark->reached())
    add(address, {size, true, *mark});
  else
    addClean(address, size);
  return true;
}

void MemoryPool::trimLocked(CUcontext context, uint64_t keep) {
  for (auto it = chunks_.end(); it != chunks_.begin() && reserved_ > keep;) {
    --it;
    auto whole = free_.find(it->first);
    if (it->second.used != 0 || whole == free_.end() || whole->second.pending ||
        whole->second.bytes != it->second.bytes)
      continue;
    erase(whole);
    deviceMemory(device_).release(context, it->first);
    reserved_ -= it->second.bytes;
    it = chunks_.erase(it);
  }
}

void MemoryPool::trim(CUcontext context, uint64_t keep) {
  std::lock_guard lock(mutex_);
  sweep();
  trimLocked(context, keep);
}

void MemoryPool::settle() {
  CUcontext context = contexts().working();
  std::lock_guard lock(mutex_);
  sweep();
  trimLocked(context, destroyed ? 0 : threshold_);
}

bool MemoryPool::drain() {
  if (Session::get().capturing()) return false;
  std::map<Key, StreamMark> open;
  {
    std::lock_guard lock(mutex_);
    for (auto& [address, free] : free_) {
      if (!free.pending) continue;
      StreamMark& latest = open.try_emplace(free.mark.key(), free.mark).first->second;
      if (free.mark.value > latest.value) latest = free.mark;
    }
  }
  std::erase_if(open, [](auto& entry) { return !entry.second.wait(); });
  std::lock_guard lock(mutex_);
  clean([&](const Free& free) {
    auto over = open.find(free.mark.key());
    return over != open.end() && free.mark.value <= over->second.value;
  });
  return !open.empty();
}

void MemoryPool::contextEnded(CUcontext context) {
  std::lock_guard lock(mutex_);
  clean([&](const Free& free) { return free.mark.context == context; });
  sweep();
  trimLocked(context, destroyed ? 0 : threshold_);
}

bool MemoryPool::empty() {
  std::lock_guard lock(mutex_);
  return chunks_.empty();
}

// ---- attributes ----

CUresult MemoryPool::getAttribute(CUmemPool_attribute what, void* value) {
  settle();
  std::lock_guard lock(mutex_);
  auto give = [&](uint64_t answer) {
    std::memcpy(value, &answer, sizeof answer);
    return CUDA_SUCCESS;
  };
  switch (what) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
      std::memcpy(value, &reuse_[what - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES], sizeof(int));
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      return give(threshold_);
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
      return give(reserved_);
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      return give(reservedHigh_);
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
      return give(used_);
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      return give(usedHigh_);
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// The reuse modes are kept for who asks; every way of reuse here is safe whatever they say.
CUresult MemoryPool::setAttribute(CUmemPool_attribute what, const void* value) {
  std::lock_guard lock(mutex_);
  uint64_t number = 0;
  switch (what) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: {
      int on = 0;
      std::memcpy(&on, value, sizeof on);
      reuse_[what - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = on != 0;
      return CUDA_SUCCESS;
    }
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
      std::memcpy(&threshold_, value, sizeof threshold_);
      return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
      std::memcpy(&number, value, sizeof number);
      if (number != 0) return CUDA_ERROR_INVALID_VALUE;
      if (what == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        usedHigh_ = used_;
      else
        reservedHigh_ = reserved_;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult MemoryPool::setAccess(CUdevice device, CUmemAccess_flags flags) {
  if (propertiesOf(device) == nullptr) return CUDA_ERROR_INVALID_DEVICE;
  if (device == device_)
    return flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  uint64_t bit = uint64_t{1} << device;
  if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    CUcontext context = contexts().working();
    CUresult status = Session::get().await<"sessionPeerAccess">(context, device_, device);
    if (status != CUDA_SUCCESS) return status;
    std::lock_guard lock(mutex_);
    access_ |= bit;
    return CUDA_SUCCESS;
  }
  if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex_);
  access_ &= ~bit;  // the mapping stays open to the device: extents are shared with other allocations
  return CUDA_SUCCESS;
}

CUmemAccess_flags MemoryPool::access(CUdevice device) {
  std::lock_guard lock(mutex_);
  return (access_ >> device & 1) != 0 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
}

}  // namespace gpupool::client
