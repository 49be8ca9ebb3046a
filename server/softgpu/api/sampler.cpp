// Texture fetches and surface accesses: called by generated code on the engine's threads. No lock is taken
// and nothing allocated here, because a fault on memory that is gone leaves these functions without
// unwinding.
//
// Arithmetic as the CUDA programming guide gives it (Texture Fetching): texel centres at 0.5, weights of
// linear filtering in 1.8 fixed point.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "server/softgpu/api/texture.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu {
namespace {

using api::Sampler;
using Geometry = TextureFetch::Geometry;

struct Texel {
  float value[4] = {};    // or, where the sampler reads integers,
  uint32_t bits[4] = {};  // their bits
};

float halfToFloat(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
  uint32_t bits;
  if (exponent == 0) {
    float value = std::ldexp(float(mantissa), -24);
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  } else if (exponent == 31) {
    bits = sign | 0x7f800000 | mantissa << 13;
  } else {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float fromSrgb(float value) {
  return value <= 0.04045f ? value / 12.92f : std::pow((value + 0.055f) / 1.055f, 2.4f);
}

template <class T>
T channelAt(const std::byte* element, uint32_t channel) {
  T value;
  std::memcpy(&value, element + channel * sizeof(T), sizeof(T));
  return value;
}

void decode(const Sampler& s, const std::byte* element, Texel& out) {
  for (uint32_t c = 0; c < s.channels; ++c) {
    int64_t integer = 0;
    float scale = 1;
    switch (s.format) {
      case CU_AD_FORMAT_UNSIGNED_INT8:
        integer = channelAt<uint8_t>(element, c);
        scale = 255;
        break;
      case CU_AD_FORMAT_SIGNED_INT8:
        integer = int16_t{channelAt<int8_t>(element, c)};
        scale = 127;
        break;
      case CU_AD_FORMAT_UNSIGNED_INT16:
        integer = channelAt<uint16_t>(element, c);
        scale = 65535;
        break;
      case CU_AD_FORMAT_SIGNED_INT16:
        integer = channelAt<int16_t>(element, c);
        scale = 32767;
        break;
      case CU_AD_FORMAT_UNSIGNED_INT32:
        integer = channelAt<uint32_t>(element, c);
        break;
      case CU_AD_FORMAT_SIGNED_INT32:
        integer = channelAt<int32_t>(element, c);
        break;
      case CU_AD_FORMAT_HALF:
        out.value[c] = halfToFloat(channelAt<uint16_t>(element, c));
        continue;
      default:
        out.value[c] = channelAt<float>(element, c);
        continue;
    }
    if (s.readInteger) {
      out.bits[c] = uint32_t(integer);
      continue;
    }
    float value = std::max(float(integer) / scale, -1.0f);
    out.value[c] = s.srgb && c < 3 ? fromSrgb(value) : value;
  }
  if (s.channels < 4) {
    out.value[3] = 1;
    out.bits[3] = 1;
  }
}

// The texel index an address mode makes of `index`; negative: the border.
int64_t addressed(int64_t index, int64_t extent, CUaddress_mode mode) {
  if (index >= 0 && index < extent) return index;
  switch (mode) {
    case CU_TR_ADDRESS_MODE_WRAP:
      return ((index % extent) + extent) % extent;
    case CU_TR_ADDRESS_MODE_MIRROR: {
      int64_t period = 2 * extent, m = ((index % period) + period) % period;
      return m < extent ? m : period - 1 - m;
    }
    case CU_TR_ADDRESS_MODE_BORDER:
      return -1;
    default:
      return index < 0 ? 0 : extent - 1;
  }
}

void border(const Sampler& s, Texel& out) {
  for (int c = 0; c < 4; ++c) {
    out.value[c] = s.border[c];
    std::memcpy(&out.bits[c], &s.border[c], 4);
  }
}

// `at`: texel indices before addressing; `plane`: the layer, or the third index where dimensions == 3.
void texel(const Sampler& s, const Sampler::Level& level, int dimensions, const int64_t at[3], uint32_t layer,
           Texel& out) {
  int64_t x = addressed(at[0], level.width, s.address[0]);
  int64_t y = dimensions > 1 ? addressed(at[1], level.height, s.address[1]) : 0;
  int64_t z = dimensions > 2 ? addressed(at[2], level.depth, s.address[2]) : int64_t(layer);
  if (x < 0 || y < 0 || z < 0) return border(s, out);
  uint64_t address =
      level.base + uint64_t(z) * level.slice + uint64_t(y) * level.pitch + uint64_t(x) * s.elementBytes;
  decode(s, reinterpret_cast<const std::byte*>(address), out);
}

int64_t toIndex(float value) {
  // Beyond any texture, and defined for every float (NaN reads texel 0).
  if (!(value > -1e9f)) return value != value ? 0 : -1000000000;
  return value < 1e9f ? int64_t(value) : 1000000000;
}

void filterLinear(const Sampler& s, const Sampler::Level& level, int dimensions, const float at[3],
                  uint32_t layer, Texel& out) {
  int64_t base[3] = {};
  float weight[3] = {};
  for (int d = 0; d < dimensions; ++d) {
    float shifted = at[d] - 0.5f, whole = std::floor(shifted);
    base[d] = toIndex(whole);
    weight[d] = std::nearbyint((shifted - whole) * 256) / 256;
    if (!(weight[d] >= 0 && weight[d] <= 1)) weight[d] = 0;
  }
  for (int corner = 0; corner < 1 << dimensions; ++corner) {
    int64_t index[3] = {};
    float share = 1;
    for (int d = 0; d < dimensions; ++d) {
      bool upper = corner >> d & 1;
      index[d] = base[d] + upper;
      share *= upper ? weight[d] : 1 - weight[d];
    }
    if (share == 0) continue;
    Texel part;
    texel(s, level, dimensions, index, layer, part);
    for (int c = 0; c < 4; ++c) out.value[c] += share * part.value[c];
  }
}

void sampleLevel(const Sampler& s, size_t levelIndex, int dimensions, const float coordinate[3],
                 bool normalized, uint32_t layer, Texel& out) {
  const Sampler::Level& level = s.levels[levelIndex];
  const uint32_t extent[3] = {level.width, level.height, level.depth};
  float at[3] = {};
  for (int d = 0; d < dimensions; ++d) {
    at[d] = coordinate[d];
    if (!normalized) continue;
    // Repetition first, so that large coordinates keep their fraction.
    if (s.address[d] == CU_TR_ADDRESS_MODE_WRAP) at[d] -= std::floor(at[d]);
    at[d] *= float(extent[d]);
  }
  if (s.linear && !s.readInteger) return filterLinear(s, level, dimensions, at, layer, out);
  int64_t index[3] = {};
  for (int d = 0; d < dimensions; ++d) index[d] = toIndex(std::floor(at[d]));
  texel(s, level, dimensions, index, layer, out);
}

void sample(const Sampler& s, int dimensions, const float coordinate[3], bool normalized, uint32_t layer,
            float lod, Texel& out) {
  if (s.levels.size() == 1) return sampleLevel(s, 0, dimensions, coordinate, normalized, layer, out);
  float level = std::min(std::max(lod + s.levelBias, s.minLevel), std::max(s.maxLevel, 0.0f));
  if (!s.mipLinear) {
    auto nearest = size_t(std::floor(level + 0.5f));
    return sampleLevel(s, std::min(nearest, s.levels.size() - 1), dimensions, coordinate, normalized, layer,
                       out);
  }
  auto lower = std::min(size_t(level), s.levels.size() - 1);
  float weight = std::nearbyint((level - float(lower)) * 256) / 256;
  Texel first, second;
  sampleLevel(s, lower, dimensions, coordinate, normalized, layer, first);
  if (weight == 0 || lower + 1 == s.levels.size() || s.readInteger) {
    out = first;
    return;
  }
  sampleLevel(s, lower + 1, dimensions, coordinate, normalized, layer, second);
  for (int c = 0; c < 4; ++c) out.value[c] = (1 - weight) * first.value[c] + weight * second.value[c];
}

// The face a direction meets and where (faces +x -x +y -y +z -z).
uint32_t cubeFace(const float d[3], float at[3]) {
  float ax = std::fabs(d[0]), ay = std::fabs(d[1]), az = std::fabs(d[2]);
  uint32_t face;
  float s, t, major;
  if (ax >= ay && ax >= az) {
    face = d[0] < 0;
    s = face ? d[2] : -d[2];
    t = -d[1];
    major = ax;
  } else if (ay >= az) {
    bool negative = d[1] < 0;
    face = 2u + negative;
    s = d[0];
    t = negative ? -d[2] : d[2];
    major = ay;
  } else {
    bool negative = d[2] < 0;
    face = 4u + negative;
    s = negative ? -d[0] : d[0];
    t = -d[1];
    major = az;
  }
  at[0] = (s / major + 1) / 2;
  at[1] = (t / major + 1) / 2;
  return face;
}

uint32_t clampLayer(int32_t layer, const Sampler::Level& level) {
  return layer < 0 ? 0 : std::min(uint32_t(layer), level.depth - 1);
}

int dimensionsOf(Geometry geometry) {
  switch (geometry) {
    case Geometry::d3:
      return 3;
    case Geometry::d1:
    case Geometry::a1:
    case Geometry::linear1:
      return 1;
    default:
      return 2;
  }
}

void fetchInteger(const Sampler& s, const TextureFetch& fetch, uint32_t layer, Texel& out) {
  int dimensions = dimensionsOf(fetch.geometry);
  auto levelIndex = size_t(std::min(std::max(fetch.lod, 0.0f), float(s.levels.size() - 1)));
  const Sampler::Level& level = s.levels[levelIndex];
  int64_t at[3] = {fetch.integerCoordinate[0], fetch.integerCoordinate[1], fetch.integerCoordinate[2]};
  // Beyond linear memory a fetch reads zero.
  if (s.linearBytes && dimensions == 1 && (at[0] < 0 || at[0] >= level.width)) return;
  texel(s, level, dimensions, at, layer, out);
}

}  // namespace

bool fetchTexture(uint64_t object, const TextureFetch& fetch, uint32_t result[4]) {
  const api::TextureObject* texture = api::textures().peek(object);
  if (!texture || texture->sampler.levels.empty()) return false;
  const Sampler& s = texture->sampler;
  Texel out;
  bool layered = fetch.geometry == Geometry::a1 || fetch.geometry == Geometry::a2;
  uint32_t layer = layered ? clampLayer(fetch.layer, s.levels[0]) : 0;
  if (fetch.integerCoordinates) {
    fetchInteger(s, fetch, layer, out);
  } else if (fetch.geometry == Geometry::cube || fetch.geometry == Geometry::acube) {
    float at[3] = {};
    uint32_t face = cubeFace(fetch.coordinate, at);
    int32_t first = fetch.geometry == Geometry::acube ? fetch.layer * 6 : 0;
    sample(s, 2, at, true, clampLayer(first + int32_t(face), s.levels[0]), fetch.lod, out);
  } else {
    sample(s, dimensionsOf(fetch.geometry), fetch.coordinate, s.normalizedCoordinates, layer, fetch.lod, out);
  }
  for (int c = 0; c < 4; ++c) {
    if (s.readInteger) {
      result[c] = out.bits[c];
    } else {
      std::memcpy(&result[c], &out.value[c], 4);
    }
  }
  return true;
}

namespace {

enum class Place { inside, skip, trap };

// Where an access goes; x in bytes.
Place place(const api::Array& array, int64_t x, int64_t y, int64_t z, uint32_t bytes, int clampMode,
            uint64_t& at) {
  int64_t row = int64_t(array.width) * array.elementBytes;
  // One-dimensional layered surfaces carry their layer in the second coordinate.
  if (array.dimensions() == 1 && array.layered() && y) {
    z = y;
    y = 0;
  }
  bool inside = x >= 0 && x + bytes <= row && y >= 0 && y < array.height && z >= 0 && z < array.depth;
  if (!inside) {
    if (clampMode == 0) return Place::trap;
    if (clampMode == 2) return Place::skip;
    x = std::clamp<int64_t>(x, 0, std::max<int64_t>(row - bytes, 0));
    y = std::clamp<int64_t>(y, 0, array.height - 1);
    z = std::clamp<int64_t>(z, 0, array.depth - 1);
  }
  at = array.base + uint64_t(z) * array.slice + uint64_t(y) * array.pitch + uint64_t(x);
  return Place::inside;
}

}  // namespace

bool surfaceStore(uint64_t object, int, int32_t x, int32_t y, int32_t z, const void* data, uint32_t bytes,
                  int clampMode) {
  const api::SurfaceObject* surface = api::surfaces().peek(object);
  if (!surface) return false;
  uint64_t at = 0;
  Place where = place(*surface->array, x, y, z, bytes, clampMode, at);
  if (where == Place::inside) std::memcpy(reinterpret_cast<void*>(at), data, bytes);
  return where != Place::trap;
}

bool surfaceLoad(uint64_t object, int, int32_t x, int32_t y, int32_t z, void* data, uint32_t bytes,
                 int clampMode) {
  const api::SurfaceObject* surface = api::surfaces().peek(object);
  if (!surface) return false;
  uint64_t at = 0;
  Place where = place(*surface->array, x, y, z, bytes, clampMode, at);
  if (where == Place::inside) std::memcpy(data, reinterpret_cast<const void*>(at), bytes);
  if (where == Place::skip) std::memset(data, 0, bytes);
  return where != Place::trap;
}

}  // namespace gpupool::softgpu
