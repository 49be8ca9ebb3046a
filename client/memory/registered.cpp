#include "client/memory/registered.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/log.h"
#include "client/memory/allocations.h"
#include "client/memory/host.h"
#include "client/memory/mapped_files.h"
#include "client/memory/pages.h"

namespace gpupool::client {
namespace {

constexpr size_t kPiece = size_t{4} << 20;  // of a large copy: one is carried while another is copied
constexpr size_t kMostPieces = 16;
constexpr size_t kMostShared = 8192;  // files registered at once: each takes two descriptors of the worker

size_t pieceOf(size_t bytes) { return std::max(kPiece, (bytes / kMostPieces / kPage + 1) * kPage); }

Carrier::Range part(Carrier::Range whole, size_t at, size_t bytes) {
  whole.application += at;
  whole.shadow += at;
  whole.bytes = bytes;
  return whole;
}

// A mirror is exchanged at launches, and a kernel that waits for another one's write would wait for ever.
bool waitsForOthers(uint64_t host) {
  if (Session::get().mapsMemory()) return false;
  const auto mapping = mappingAt(host);
  if (!mapping || host < mapping->start || !isSegmentOfNccl(*mapping)) return false;
  static std::atomic<bool> said{false};
  if (!said.exchange(true))
    GPUPOOL_ERROR(
        "NCCL's shared-memory transport, which it uses between GPUs without peer access, does not work over "
        "a network: use --transport shm on the GPUs' server, or GPUs with peer access");
  return true;
}

}  // namespace

RegisteredMemory& registeredMemory() {
  static auto* memory = new RegisteredMemory;
  return *memory;
}

CUresult RegisteredMemory::add(CUcontext context, uint64_t host, size_t bytes, unsigned flags, int device) {
  Registration fresh;
  fresh.bytes = bytes;
  fresh.context = context;
  if (!share(context, host, bytes, fresh)) {
    if (waitsForOthers(host)) return CUDA_ERROR_NOT_SUPPORTED;
    CUresult status =
        hostMemory().allocate(context, std::max(bytes, kPage), 0, HostMemory::Use::target, fresh.shadow);
    if (status != CUDA_SUCCESS) return status;
  }
  allocations().add(
      {host, bytes, Allocation::Kind::registered, device, context, flags, fresh.shadow, 0, nullptr});
  std::lock_guard lock(mutex_);
  registrations_[host] = fresh;
  return CUDA_SUCCESS;
}

// Whole pages, as the driver registers them. False: it is not possible with this memory.
bool RegisteredMemory::share(CUcontext context, uint64_t host, size_t bytes, Registration& fresh) {
  if (!Session::get().mapsMemory() || bytes > UINT64_MAX - host - kPage) return false;
  const uint64_t first = host / kPage * kPage, end = (host + bytes + kPage - 1) / kPage * kPage;
  if (shared_.fetch_add(1) < kMostShared)
    if (auto file = mappedFile(first, end - first)) {
      uint64_t address = 0;
      fresh.shared = hostMemory().shareFile(context, file->descriptor.release(), file->offset, end - first,
                                            address) == CUDA_SUCCESS;
      fresh.shadow = address + (host - first);
    }
  if (!fresh.shared) --shared_;
  return fresh.shared;
}

CUresult RegisteredMemory::remove(uint64_t host) {
  Registration gone;
  {
    std::lock_guard lock(mutex_);
    auto known = registrations_.find(host);
    if (known == registrations_.end()) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    gone = known->second;
    registrations_.erase(known);
    if (gone.told) --told_;
  }
  allocations().remove(host);
  carrier().await(host, gone.bytes);
  if (gone.mirrored) hostMemory().removeMirror(host, gone.shadow);
  if (!gone.shared) return hostMemory().release(gone.context, gone.shadow);
  --shared_;
  return hostMemory().release(gone.context, gone.shadow / kPage * kPage);
}

RegisteredMemory::At RegisteredMemory::find(uint64_t host) {
  auto after = registrations_.upper_bound(host);
  if (after == registrations_.begin()) return registrations_.end();
  auto found = std::prev(after);
  return host - found->first < found->second.bytes ? found : registrations_.end();
}

bool RegisteredMemory::shares(uint64_t host, size_t bytes, uint64_t& address) const {
  if (shared_.load(std::memory_order_relaxed) == 0) return false;
  std::lock_guard lock(mutex_);
  auto found = const_cast<RegisteredMemory*>(this)->find(host);
  if (found == registrations_.end() || !found->second.shared) return false;
  const uint64_t at = host - found->first;
  if (bytes > found->second.bytes - at) return false;
  address = found->second.shadow + at;
  return true;
}

bool RegisteredMemory::carries(uint64_t host, size_t bytes, Carrier::Range& range) const {
  std::lock_guard lock(mutex_);
  auto found = const_cast<RegisteredMemory*>(this)->find(host);
  if (found == registrations_.end() || found->second.mirrored || found->second.shared) return false;
  const uint64_t at = host - found->first;
  if (bytes > found->second.bytes - at) return false;
  range = {host, found->second.shadow + at, bytes};
  return true;
}

void RegisteredMemory::mirror(uint64_t host) {
  uint64_t start = 0;
  Registration known;
  {
    std::lock_guard lock(mutex_);
    auto found = find(host);
    if (found == registrations_.end() || found->second.shared || std::exchange(found->second.mirrored, true))
      return;
    if (std::exchange(found->second.told, false)) --told_;
    start = found->first;
    known = found->second;
  }
  // What is under way was begun without the mirror's books, and the shadow holds what was carried last.
  carrier().await(start, known.bytes);
  hostMemory().addMirror(start, known.shadow, known.bytes, HostMemory::Begins::unknown);
}

void RegisteredMemory::addressTold(uint64_t host) {
  std::lock_guard lock(mutex_);
  auto found = find(host);
  if (found == registrations_.end() || found->second.shared || found->second.mirrored) return;
  if (!std::exchange(found->second.told, true)) ++told_;
}

void RegisteredMemory::noticeAddress(uint64_t device) {
  uint64_t host = 0;
  {
    std::lock_guard lock(mutex_);
    for (auto& [start, known] : registrations_)
      if (known.told && device - known.shadow < known.bytes) host = start;
  }
  if (host != 0) mirror(host);
}

void RegisteredMemory::mirrorTold() {
  std::vector<uint64_t> hosts;
  {
    std::lock_guard lock(mutex_);
    for (auto& [start, known] : registrations_)
      if (known.told) hosts.push_back(start);
  }
  for (uint64_t host : hosts) mirror(host);
}

CUresult RegisteredMemory::upload(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  Carrier::Range whole;
  if (!carries(from, bytes, whole)) return CUDA_ERROR_INVALID_VALUE;
  uint64_t ahead = 0;
  CUresult status = requestWordBehindOthers(ref, ahead);
  const size_t piece = pieceOf(bytes);
  for (size_t at = 0; at < bytes && status == CUDA_SUCCESS; at += piece) {
    const Carrier::Range range = part(whole, at, std::min(piece, bytes - at));
    status = carrier().fill(ref, ahead, {range});
    if (status == CUDA_SUCCESS)
      status = postTo<"cuMemcpyHtoDAsync_v2">(
          ref, CUdeviceptr{to + at}, reinterpret_cast<const void*>(range.shadow), range.bytes, ref.wire);
  }
  return status;
}

CUresult RegisteredMemory::download(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  Carrier::Range whole;
  if (!carries(to, bytes, whole)) return CUDA_ERROR_INVALID_VALUE;
  const size_t piece = pieceOf(bytes);
  for (size_t at = 0; at < bytes; at += piece) {
    const Carrier::Range range = part(whole, at, std::min(piece, bytes - at));
    CUresult status = postTo<"cuMemcpyDtoHAsync_v2">(ref, reinterpret_cast<void*>(range.shadow),
                                                     CUdeviceptr{from + at}, range.bytes, ref.wire);
    if (status == CUDA_SUCCESS) status = carrier().land(ref, {range});
    if (status != CUDA_SUCCESS) return status;
  }
  return CUDA_SUCCESS;
}

void mirrorArena(uint64_t address) {
  uint64_t start = 0;
  size_t bytes = 0;
  do {  // the session may come to share memory, or leave it, between two looks
    if (Session::get().mapsMemory() && hostMemory().noteAddressed(address)) return;
    if (!hostMemory().mirrorable(address, start, bytes)) continue;
    if (carrier().busy()) carrier().await(start, bytes);
    return hostMemory().mirrorBlock(start, bytes);
  } while (Session::get().mapsMemory());
}

CUresult settleHostMemory() {
  Session::get().observed();
  carrier().settle();
  return hostMemory().settle();
}

CUresult settleHostMemory(WordMark behind) {
  carrier().settle();
  return hostMemory().settle(behind);
}

void carryBytes(Session::HostFunction& function, bool inGraph) {
  function.prepare = [inGraph] {
    settleHostMemory();
    if (inGraph) carrier().landRunning();
  };
  function.publish = [inGraph] {
    if (inGraph) carrier().fillRunning();
    hostMemory().publish();
  };
}

}  // namespace gpupool::client
