#include "server/softgpu/address_plan.h"

#include "base/reserve.h"

namespace gpupool::softgpu {
namespace {

// Below the session windows (from 0x2000_0000_0000) and above AddressSanitizer's shadow. Visibility goes by
// TiB: nothing of the process's own lies here.
constexpr AddressPlan kWide = {.heap = 0x1100'0000'0000,
                               .heapStep = uint64_t{1} << 40,
                               .globals = 0x1a00'0000'0000,
                               .globalsBytes = uint64_t{32} << 30,
                               .host = 0x1c00'0000'0000,
                               .reservations = 0x1d00'0000'0000,
                               .engine = 0x1e00'0000'0000,
                               .engineEnd = 0x1f00'0000'0000,
                               .functions = 0x1f00'0000'0000};
// Within the lowest 512 GiB, all that ThreadSanitizer leaves beside the programs and libraries themselves.
constexpr AddressPlan kNarrow = {.heap = 0x10'0000'0000,
                                 .heapStep = uint64_t{16} << 30,
                                 .globals = 0x30'0000'0000,
                                 .globalsBytes = uint64_t{16} << 30,
                                 .host = 0x38'0000'0000,
                                 .reservations = 0x50'0000'0000,
                                 .engine = 0x60'0000'0000,
                                 .engineEnd = 0x7f'0000'0000,
                                 .functions = 0x7f'0000'0000};

bool granted(uint64_t address) {
  constexpr uint64_t kPage = 4096;
  if (!reserveAt(address, kPage)) return false;
  munmap(reinterpret_cast<void*>(address), kPage);
  return true;
}

}  // namespace

const AddressPlan& addressPlan() {
  static const AddressPlan& plan = granted(kWide.heap) ? kWide : kNarrow;
  return plan;
}

}  // namespace gpupool::softgpu
