#include "server/copier/hoard.h"

#include <algorithm>

#include "server/copier/protocol.h"

namespace gpupool::server {
namespace {
constexpr uint64_t kLargestBlock = uint64_t{64} << 20;
constexpr unsigned char kFill = 0xA5;
}  // namespace

bool CopierHoard::takeBlock(uint32_t ordinal, uint64_t bytes) {
  const Driver& driver = devices_.driver();
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = static_cast<int>(ordinal);
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUmemGenericAllocationHandle memory = 0;
  Block block{0, bytes};
  if (driver.cuMemAddressReserve(&block.address, bytes, 0, 0, 0) != CUDA_SUCCESS) return false;
  const bool created = driver.cuMemCreate(&memory, bytes, &properties, 0) == CUDA_SUCCESS;
  const bool mapped = created && driver.cuMemMap(block.address, bytes, 0, memory, 0) == CUDA_SUCCESS;
  if (created) driver.cuMemRelease(memory);
  if (!mapped) {
    driver.cuMemAddressFree(block.address, bytes);
    return false;
  }
  blocks_.push_back(block);
  return driver.cuMemSetAccess(block.address, bytes, &access, 1) == CUDA_SUCCESS &&
         driver.cuMemsetD8_v2(block.address, kFill, bytes) == CUDA_SUCCESS;
}

void CopierHoard::take() {
  const Driver& driver = devices_.driver();
  bool got = false;
  for (auto place = missing_.begin(); place != missing_.end();) {
    auto& [ordinal, missing] = *place;
    if (devices_.makeCurrent(ordinal) != CUDA_SUCCESS) break;
    for (uint64_t block = kLargestBlock; missing != 0 && block >= kCopierUnit;) {
      const uint64_t bytes = std::min(block, missing);
      if (takeBlock(ordinal, bytes)) {
        missing -= bytes;
        got = true;
      } else {
        block = std::min(block / 2, bytes / 2 / kCopierUnit * kCopierUnit);
      }
    }
    driver.cuStreamSynchronize(nullptr);  // release() unmaps it, perhaps at once
    place = missing == 0 ? missing_.erase(place) : std::next(place);
  }
  if (!got) --patience_;
}

void CopierHoard::release() {
  const Driver& driver = devices_.driver();
  for (const Block& block : blocks_) {
    driver.cuMemUnmap(block.address, block.bytes);
    driver.cuMemAddressFree(block.address, block.bytes);
  }
  blocks_.clear();
  missing_.clear();
}

uint64_t CopierHoard::held() const {
  uint64_t sum = 0;
  for (const Block& block : blocks_) sum += block.bytes;
  return sum;
}

}  // namespace gpupool::server
