#pragma once
// The engine's own memory: regions kernels may reach (shared, local, heap, parameters) and the table of
// granules.

#include <cstdint>

namespace gpupool::softgpu::runtime {

constexpr unsigned kGranuleShift = 40;
constexpr unsigned kGranules = 128;  // user addresses have 47 bits

// One byte per granule: 0 visible, 1 hidden. Generated code reads it.
extern "C" uint8_t gpupoolHidden[kGranules];

inline bool isVisible(uint64_t address) {
  return (address >> 47) == 0 && gpupoolHidden[(address >> kGranuleShift) & (kGranules - 1)] == 0;
}

// Zeroed pages in a visible granule, uncommitted until touched, with an inaccessible page behind; 0 when
// there is no room. Any thread.
uint64_t mapVisible(uint64_t bytes);
void unmapVisible(uint64_t address, uint64_t bytes);

}  // namespace gpupool::softgpu::runtime
