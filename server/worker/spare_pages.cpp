#include "server/worker/spare_pages.h"

#include <algorithm>
#include <cstring>

namespace gpupool::server {

bool SparePages::take(DevicePieces& pieces, const std::vector<Place>& places) {
  std::lock_guard lock(mutex_);
  if (make(pieces, places) == CUDA_SUCCESS) return true;
  release();
  return false;
}

CUresult SparePages::make(DevicePieces& pieces, const std::vector<Place>& places) {
  for (const Place& place : places) {
    const unsigned device = pieces.all()[place.piece].device;
    if (parts_.empty() || parts_.back().device != device) {
      Part& part = parts_.emplace_back();
      part.device = device;
      part.context = pieces.ownContext(device);
    }
    parts_.back().bytes += kPageBytes;
  }
  const Driver& driver = session_.driver();
  std::span<const Place> rest(places);
  for (Part& part : parts_) {
    if (part.context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = driver.cuCtxSetCurrent(part.context);
    if (result == CUDA_SUCCESS) result = findStream(part);
    if (result == CUDA_SUCCESS) result = session_.space().makeSpare(part.device, part.bytes, part.memory);
    if (result == CUDA_SUCCESS) result = copy(pieces, part, rest.first(part.bytes / kPageBytes));
    if (result != CUDA_SUCCESS) return result;
    rest = rest.subspan(part.bytes / kPageBytes);
  }
  return CUDA_SUCCESS;
}

CUresult SparePages::findStream(Part& part) {
  if (PageHasher* hasher = session_.hashers().find(part.context)) {
    part.stream = hasher->stream();
    part.pinned = hasher->pinned();
    return CUDA_SUCCESS;
  }
  part.ownStream = true;
  return session_.driver().cuStreamCreate(&part.stream, CU_STREAM_NON_BLOCKING);
}

size_t SparePages::inARow(std::span<const Place> places) {
  size_t count = 0;
  while (count < places.size() && places[count].piece == places[0].piece &&
         places[count].offset == places[0].offset + count * kPageBytes)
    ++count;
  return count;
}

// Pages that follow one another in a piece go as one copy. A piece's address may be there for as long as it
// is open only.
CUresult SparePages::copy(DevicePieces& pieces, const Part& part, std::span<const Place> places) {
  const Driver& driver = session_.driver();
  CUdeviceptr to = part.memory.address;
  for (size_t i = 0; i < places.size();) {
    const size_t end = i + inARow(places.subspan(i));
    CUdeviceptr from = 0;
    if (!pieces.open(places[i].piece, from).empty()) return CUDA_ERROR_UNKNOWN;
    const size_t bytes = (end - i) * kPageBytes;
    CUresult result = driver.cuMemcpyDtoDAsync_v2(to, from + places[i].offset, bytes, part.stream);
    const bool leaves = end == places.size() || places[end].piece != places[i].piece;
    if (result == CUDA_SUCCESS && leaves) result = driver.cuStreamSynchronize(part.stream);
    if (result != CUDA_SUCCESS) return result;
    to += bytes;
    i = end;
  }
  return CUDA_SUCCESS;
}

// Through pinned memory: a copy to other memory takes the driver's own, and with it locks for which the
// program's calls would wait. One half of it is filled while the processor empties the other.
CUresult SparePages::readSome(const Part& part, std::span<std::byte> room) {
  const Driver& driver = session_.driver();
  const CUdeviceptr from = part.memory.address + offset_;
  if (part.pinned.empty()) {
    const CUresult result = driver.cuMemcpyDtoHAsync_v2(room.data(), from, room.size(), part.stream);
    return result == CUDA_SUCCESS ? driver.cuStreamSynchronize(part.stream) : result;
  }
  const size_t half = part.pinned.size() / 2;
  const auto bytesAt = [&](size_t at) { return std::min(half, room.size() - at); };
  const auto fill = [&](size_t at) {
    if (at >= room.size()) return CUDA_SUCCESS;
    std::byte* to = part.pinned.data() + (at / half % 2) * half;
    return driver.cuMemcpyDtoHAsync_v2(to, from + at, bytesAt(at), part.stream);
  };
  CUresult result = fill(0);
  for (size_t at = 0; result == CUDA_SUCCESS && at < room.size(); at += half) {
    result = driver.cuStreamSynchronize(part.stream);
    if (result == CUDA_SUCCESS) result = fill(at + half);
    if (result == CUDA_SUCCESS)
      std::memcpy(room.data() + at, part.pinned.data() + (at / half % 2) * half, bytesAt(at));
  }
  // Nothing is under way behind it.
  const CUresult finished = driver.cuStreamSynchronize(part.stream);
  return result == CUDA_SUCCESS ? finished : result;
}

std::string SparePages::read(std::span<std::byte> room) {
  const Driver& driver = session_.driver();
  std::lock_guard lock(mutex_);
  while (!room.empty()) {
    if (part_ == parts_.size())
      return "its pages were given up: the program has needed their memory, or has ended their context";
    Part& part = parts_[part_];
    const size_t bytes = std::min<uint64_t>(room.size(), part.bytes - offset_);
    CUresult result = driver.cuCtxSetCurrent(part.context);
    if (result == CUDA_SUCCESS) result = readSome(part, room.first(bytes));
    // The program may destroy the context that was current here; the driver must not meet it again.
    driver.cuCtxSetCurrent(nullptr);
    if (result != CUDA_SUCCESS) return "pages that were put aside cannot be read: " + driver.describe(result);
    room = room.subspan(bytes);
    offset_ += bytes;
    if (offset_ == part.bytes) ++part_, offset_ = 0;
  }
  if (part_ == parts_.size()) release();
  return "";
}

void SparePages::end() {
  std::lock_guard lock(mutex_);
  release();
}

void SparePages::release() {
  if (parts_.empty()) return;
  const Driver& driver = session_.driver();
  CUcontext before = nullptr;
  driver.cuCtxGetCurrent(&before);
  for (Part& part : parts_) {
    if (part.context == nullptr) continue;
    driver.cuCtxSetCurrent(part.context);
    if (part.stream != nullptr) {
      driver.cuStreamSynchronize(part.stream);
      if (part.ownStream) driver.cuStreamDestroy_v2(part.stream);
    }
    session_.space().endSpare(part.memory);
  }
  driver.cuCtxSetCurrent(before);
  parts_.clear();
  part_ = 0;
}

}  // namespace gpupool::server
