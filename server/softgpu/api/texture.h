#pragma once
// Texture and surface objects (driver manual: Texture Object Management, Surface Object Management). Their
// handles are what kernels receive: small integers, the lowest free one, as the real driver gives them.

#include <atomic>
#include <memory>

#include "server/softgpu/api/array.h"

namespace gpupool::softgpu::api {

// What a fetch needs, resolved once at creation. Extents in elements.
struct Sampler {
  // Array, linear memory or a pitched plane: rows at `pitch`, planes (or layers) at `slice`.
  struct Level {
    uint64_t base = 0, pitch = 0, slice = 0;
    uint32_t width = 1, height = 1, depth = 1;
  };
  std::vector<Level> levels;
  CUarray_format format = CU_AD_FORMAT_FLOAT;
  uint32_t channels = 1, channelBytes = 4, elementBytes = 4;
  CUaddress_mode address[3] = {};
  bool linear = false, mipLinear = false;
  bool normalizedCoordinates = false, readInteger = false, srgb = false;
  float minLevel = 0, maxLevel = 0, levelBias = 0;
  float border[4] = {};
  uint64_t linearBytes = 0;  // of memory, not arrays: looked up again at each fetch's bounds
};

struct TextureObject {
  CUDA_RESOURCE_DESC resource{};
  CUDA_TEXTURE_DESC texture{};
  CUDA_RESOURCE_VIEW_DESC view{};
  bool hasView = false;
  uint64_t contextId = 0;
  Sampler sampler;
  std::vector<std::shared_ptr<const void>> keep;
};

struct SurfaceObject {
  CUDA_RESOURCE_DESC resource{};
  uint64_t contextId = 0;
  ArrayPtr array;
};

// Slots that generated code reads without a lock. Objects that are destroyed stay readable for a while: a
// kernel that still uses one is wrong, but must not crash the process.
template <class T>
class SlotTable {
 public:
  static constexpr uint64_t kSlots = 1 << 16;
  uint64_t add(std::shared_ptr<T> object);  // 0: all slots taken
  const T* peek(uint64_t handle) const {
    return handle && handle < kSlots ? slots_[handle].load(std::memory_order_acquire) : nullptr;
  }
  std::shared_ptr<T> find(uint64_t handle);
  bool remove(uint64_t handle);
  void removeContext(uint64_t contextId);

 private:
  static constexpr size_t kGraveyard = 4096;
  std::mutex mutex_;
  std::atomic<const T*> slots_[kSlots] = {};
  std::vector<std::shared_ptr<T>> owners_{1};
  std::vector<std::shared_ptr<T>> graveyard_;
};
SlotTable<TextureObject>& textures();
SlotTable<SurfaceObject>& surfaces();

}  // namespace gpupool::softgpu::api
