// Physical memory that leaves its addresses for a while.
#include <unistd.h>

#include "base/log.h"
#include "server/worker/space.h"

namespace gpupool::server {

std::vector<Space::Piece> Space::takeStock() {
  std::lock_guard order(mapping_);
  stock_.clear();
  std::map<const Physical*, size_t> known;
  const auto at = [&](const std::shared_ptr<Physical>& physical) -> Stock& {
    const auto [entry, fresh] = known.try_emplace(physical.get(), stock_.size());
    if (fresh) stock_.push_back({physical, {}});
    return stock_[entry->second];
  };
  for (const auto& [name, physical] : named_) at(physical);
  for (const auto& [address, mapping] : mappings_) at(mapping.physical).mappedAt.push_back(address);
  std::vector<Piece> pieces;
  pieces.reserve(stock_.size());
  for (const Stock& stock : stock_) pieces.push_back({stock.physical->device, stock.physical->bytes});
  return pieces;
}

int Space::exportPiece(size_t index) const {
  std::lock_guard order(mapping_);
  int descriptor = -1;
  const CUresult result = driver_.cuMemExportToShareableHandle(&descriptor, stock_.at(index).physical->handle,
                                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result == CUDA_SUCCESS) return descriptor;
  GPUPOOL_ERROR("memory of %zu bytes cannot be exported: %s", stock_[index].physical->bytes,
                driver_.describe(result).c_str());
  return -1;
}

void Space::letGo(size_t index) {
  std::lock_guard order(mapping_);
  Stock& stock = stock_.at(index);
  Physical& physical = *stock.physical;
  if (physical.handle == 0) return;
  for (const CUdeviceptr address : stock.mappedAt) driver_.cuMemUnmap(address, physical.bytes);
  const CUresult result = driver_.cuMemRelease(physical.handle);
  if (result != CUDA_SUCCESS)
    GPUPOOL_ERROR("memory of %zu bytes is not released: %s", physical.bytes,
                  driver_.describe(result).c_str());
  physical.handle = 0;
}

// Under mapping_.
CUresult Space::mapAgain(const Stock& stock) {
  const Physical& physical = *stock.physical;
  CUresult result = CUDA_SUCCESS;
  for (const CUdeviceptr address : stock.mappedAt) {
    if (result == CUDA_SUCCESS) result = driver_.cuMemMap(address, physical.bytes, 0, physical.handle, 0);
    if (result != CUDA_SUCCESS) return result;
    const Mapping& mapping = mappings_.at(address);
    if (!mapping.ofClient) result = open(physical, address);
    for (const auto& [device, flags] : mapping.access) {
      CUmemAccessDesc access{};
      access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {devices_[device]}};
      access.flags = flags;
      if (result == CUDA_SUCCESS) result = driver_.cuMemSetAccess(address, physical.bytes, &access, 1);
    }
  }
  return result;
}

CUresult Space::comeBack() {
  std::vector<size_t> fresh;
  CUresult result = CUDA_SUCCESS;
  {
    std::lock_guard order(mapping_);
    for (size_t i = 0; result == CUDA_SUCCESS && i < stock_.size(); ++i) {
      if (stock_[i].physical->handle != 0) continue;
      result = create(*stock_[i].physical);
      if (result == CUDA_SUCCESS) fresh.push_back(i);
    }
    for (size_t i = 0; result == CUDA_SUCCESS && i < fresh.size(); ++i) result = mapAgain(stock_[fresh[i]]);
  }
  if (result != CUDA_SUCCESS)
    for (const size_t i : fresh) letGo(i);
  return result;
}

}  // namespace gpupool::server
