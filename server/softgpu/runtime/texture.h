#pragma once
// Generated code's way to the texture functions above the seam.

#include <cstdint>

namespace gpupool::softgpu::runtime {

constexpr uint32_t kGeometryMask = 15;  // TextureFetch::Geometry
constexpr uint32_t kIntegerCoordinates = 16;
constexpr uint32_t kIntegerResult = 32;

// x, y, z and lod are the bits of floats, or integers. A dead object, or a trapping surface access, ends the
// grid.
void fetch(uint64_t object, uint32_t flags, uint32_t x, uint32_t y, uint32_t z, uint32_t layer, uint32_t lod,
           uint32_t* result);
void store(uint64_t object, uint32_t dimensions, uint32_t x, uint32_t y, uint32_t z, const void* data,
           uint32_t bytes, uint32_t clampMode);
void load(uint64_t object, uint32_t dimensions, uint32_t x, uint32_t y, uint32_t z, void* data,
          uint32_t bytes, uint32_t clampMode);

}  // namespace gpupool::softgpu::runtime
