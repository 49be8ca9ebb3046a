#include "server/softgpu/runtime/texture.h"

#include <bit>

#include "server/softgpu/engine.h"
#include "server/softgpu/runtime/worker.h"

namespace gpupool::softgpu::runtime {
namespace {

// Runs `work` on the OS thread's own stack; false ends the grid.
template <typename Work>
void onHost(Work work) {
  struct Call {
    Work& work;
    bool fine;
  } call{work, false};
  Worker::current()->callOnHost(
      [](void* argument) {
        auto* one = static_cast<Call*>(argument);
        one->fine = one->work();
      },
      &call);
  if (!call.fine) Worker::current()->abandon(Outcome::illegalAddress);
}

}  // namespace

void fetch(uint64_t object, uint32_t flags, uint32_t x, uint32_t y, uint32_t z, uint32_t layer, uint32_t lod,
           uint32_t* result) {
  TextureFetch fetch;
  fetch.geometry = static_cast<TextureFetch::Geometry>(flags & kGeometryMask);
  fetch.integerCoordinates = (flags & kIntegerCoordinates) != 0;
  fetch.integerResult = (flags & kIntegerResult) != 0;
  const uint32_t at[3] = {x, y, z};
  for (int i = 0; i < 3; ++i) {
    if (fetch.integerCoordinates)
      fetch.integerCoordinate[i] = static_cast<int32_t>(at[i]);
    else
      fetch.coordinate[i] = std::bit_cast<float>(at[i]);
  }
  fetch.layer = static_cast<int32_t>(layer);
  fetch.lod = std::bit_cast<float>(lod);
  onHost([&] { return fetchTexture(object, fetch, result); });
}

void store(uint64_t object, uint32_t dimensions, uint32_t x, uint32_t y, uint32_t z, const void* data,
           uint32_t bytes, uint32_t clampMode) {
  onHost([&] {
    return surfaceStore(object, static_cast<int>(dimensions), static_cast<int32_t>(x),
                        static_cast<int32_t>(y), static_cast<int32_t>(z), data, bytes,
                        static_cast<int>(clampMode));
  });
}

void load(uint64_t object, uint32_t dimensions, uint32_t x, uint32_t y, uint32_t z, void* data,
          uint32_t bytes, uint32_t clampMode) {
  onHost([&] {
    return surfaceLoad(object, static_cast<int>(dimensions), static_cast<int32_t>(x), static_cast<int32_t>(y),
                       static_cast<int32_t>(z), data, bytes, static_cast<int>(clampMode));
  });
}

}  // namespace gpupool::softgpu::runtime
