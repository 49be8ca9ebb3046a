// Physical memory that several sessions of a tenant have.
#include <unistd.h>

#include "base/log.h"
#include "server/worker/space.h"

namespace gpupool::server {
namespace {

constexpr size_t kUnit = size_t{2} << 20;

}  // namespace

// Under mapping_. Null: there is none such.
std::shared_ptr<Space::Physical> Space::pieceAt(uint64_t name, CUdeviceptr address, size_t bytes,
                                                uint64_t& offset) const {
  offset = 0;
  if (name != 0) {
    const auto named = named_.find(name);
    return named == named_.end() ? nullptr : named->second;
  }
  const auto after = mappings_.upper_bound(address);
  if (after == mappings_.begin()) return nullptr;
  const auto& [start, mapping] = *std::prev(after);
  const uint64_t whole = mapping.physical->bytes;
  offset = address - start;
  if (mapping.ofClient || bytes == 0 || offset >= whole || bytes > whole - offset) return nullptr;
  return mapping.physical;
}

// Under mapping_. As scrub, of a piece that may have been mapped nowhere.
CUresult Space::clear(Physical& physical) {
  if (physical.clean || driver_.software()) return CUDA_SUCCESS;
  CUdeviceptr address = 0;
  CUresult result = mapAside(physical.device, physical.handle, physical.bytes, address);
  if (result != CUDA_SUCCESS) return result;
  result = scrub(physical, address);
  unmapAside(address, physical.bytes);
  return result;
}

CUresult Space::offer(uint64_t name, CUdeviceptr address, size_t bytes, schema::ShareToken& token) {
  if (driver_.cuMemExportToShareableHandle == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  std::lock_guard one(offering_);
  std::shared_ptr<Physical> physical;
  Account::Part part;
  int descriptor = -1;
  {
    std::lock_guard order(mapping_);
    physical = pieceAt(name, address, bytes, part.offset);
    if (physical == nullptr || physical->opening != 0) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = clear(*physical);
    if (result == CUDA_SUCCESS)
      result = driver_.cuMemExportToShareableHandle(&descriptor, physical->handle,
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS) return result;
    ++physical->mappings;  // until the server has heard of it, it does not end
  }
  part.place = physical->device;
  part.bytes = physical->bytes;
  part.length = name != 0 ? physical->bytes : bytes;
  const uint64_t piece = physical->offered != 0 ? physical->offered : nextOffered_++;
  const CUresult result = account_.offer(piece, part, descriptor, token);
  ::close(descriptor);
  std::lock_guard order(mapping_);
  if (result == CUDA_SUCCESS && physical->offered == 0) {
    physical->offered = piece;
    shared_.fetch_add(1, std::memory_order_acq_rel);
  }
  --physical->mappings;
  endUnused(*physical);
  return result;
}

CUresult Space::open(const schema::ShareToken& token, uint64_t name, OpenedPiece& opened) {
  if (driver_.cuMemImportFromShareableHandle == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  Account::Opened got;
  CUresult result = account_.open(token, got);
  if (result != CUDA_SUCCESS) return result;
  auto physical = std::make_shared<Physical>();
  const bool fits = got.part.place < devices_.size() && got.part.bytes != 0 && got.part.bytes % kUnit == 0;
  result = !fits ? CUDA_ERROR_INVALID_HANDLE
                 : driver_.cuMemImportFromShareableHandle(&physical->handle,
                                                          reinterpret_cast<void*>(intptr_t{got.descriptor}),
                                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  ::close(got.descriptor);
  if (result != CUDA_SUCCESS) {
    account_.close(got.opening);
    return result;
  }
  physical->device = got.part.place;
  physical->bytes = got.part.bytes;
  physical->clean = true;  // its bytes are the tenant's own
  physical->opening = got.opening;
  physical->named = true;
  shared_.fetch_add(1, std::memory_order_acq_rel);
  std::lock_guard order(mapping_);
  if (name == 0 || !named_.emplace(name, physical).second) {
    physical->named = false;
    endUnused(*physical);
    return CUDA_ERROR_INVALID_VALUE;
  }
  opened = {got.part.place, got.part.bytes, got.part.offset, got.part.length};
  return CUDA_SUCCESS;
}

}  // namespace gpupool::server
