#pragma once
// Addresses where nothing lies, for memory of the tests' own.

#include <cstdint>

namespace gpupool::softgpu::test {

#ifdef __SANITIZE_THREAD__  // has its shadow there; server/softgpu/address_plan.cpp
inline constexpr uint64_t kUnusedAddresses = 0x58'0000'0000;
#else
inline constexpr uint64_t kUnusedAddresses = 0x2000'0000'0000;
#endif

}  // namespace gpupool::softgpu::test
