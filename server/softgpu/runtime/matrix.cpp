#include "server/softgpu/runtime/matrix.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "server/softgpu/runtime/calls.h"
#include "server/softgpu/runtime/math.h"
#include "server/softgpu/runtime/memory.h"

namespace gpupool::softgpu::runtime {
namespace {

constexpr unsigned kMaxElements = 32 * 32;

struct Place {
  unsigned row;
  unsigned column;
};

double decode(Element element, const void* from) {
  switch (element) {
    case Element::s8:
      return *static_cast<const int8_t*>(from);
    case Element::u8:
      return *static_cast<const uint8_t*>(from);
    case Element::s32: {
      int32_t value;
      std::memcpy(&value, from, 4);
      return value;
    }
    case Element::f64: {
      double value;
      std::memcpy(&value, from, 8);
      return value;
    }
    case Element::f16:
    case Element::bf16: {
      uint16_t bits;
      std::memcpy(&bits, from, 2);
      return element == Element::f16 ? halfToFloat(bits) : std::bit_cast<float>(uint32_t{bits} << 16);
    }
    default: {
      uint32_t bits;
      std::memcpy(&bits, from, 4);
      if (element == Element::tf32) bits &= ~0x1FFFu;
      return std::bit_cast<float>(bits);
    }
  }
}

void encode(Element element, double value, void* to) {
  if (element == Element::f64) {
    std::memcpy(to, &value, 8);
  } else if (element == Element::f16) {
    auto bits = static_cast<uint16_t>(toSmall(value, kHalf, Rounding::nearest));
    std::memcpy(to, &bits, 2);
  } else {
    auto single = static_cast<float>(value);
    std::memcpy(to, &single, 4);
  }
}

// Where element i of a lane's fragment lies. `which`: 'a' is m x k, 'b' k x n, 'c' m x n.
Place placeOf(const MatrixShape& shape, char which, unsigned lane, unsigned i) {
  unsigned rows = which == 'b' ? shape.k : shape.m;
  unsigned columns = which == 'a' ? shape.k : shape.n;
  if (shape.opaque) {
    unsigned index = lane * (rows * columns / 32) + i;
    return {index / columns, index % columns};
  }
  unsigned group = lane / 4;
  unsigned within = lane % 4;
  if (which == 'c') return {group + 8 * (i / 2), within * 2 + i % 2};
  unsigned pack = std::max(1u, 32 / bitsOf(shape.ab));  // neighbours along k in one register
  unsigned word = i / pack;
  if (which == 'b') return {within * pack + i % pack + word * 4 * pack, group};
  bool tall = shape.m == 16;
  unsigned half = tall ? word % 2 : 0;
  unsigned step = tall ? word / 2 : word;
  return {group + 8 * half, within * pack + i % pack + step * 4 * pack};
}

unsigned elementsOf(const MatrixShape& shape, char which) {
  unsigned rows = which == 'b' ? shape.k : shape.m;
  unsigned columns = which == 'a' ? shape.k : shape.n;
  return rows * columns / 32;
}

void gather(const MatrixShape& shape, char which, Element element, const Lane* lanes, double* matrix) {
  unsigned columns = which == 'a' ? shape.k : shape.n;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const auto* product = reinterpret_cast<const MatrixProduct*>(lanes[lane].value);
    const auto* from = static_cast<const char*>(which == 'a'   ? product->a
                                                : which == 'b' ? product->b
                                                               : product->c);
    for (unsigned i = 0; i < elementsOf(shape, which); ++i) {
      Place place = placeOf(shape, which, lane, i);
      matrix[place.row * columns + place.column] = decode(element, from + i * bitsOf(element) / 8);
    }
  }
}

// Sums of small products in double: exact for integers, and rounded once for small floats but where
// magnitudes differ by more than 2^29.
void encodeInteger(double sum, bool saturate, void* to) {
  auto exact = static_cast<int64_t>(sum);
  if (saturate) exact = std::clamp<int64_t>(exact, INT32_MIN, INT32_MAX);
  auto wrapped = static_cast<int32_t>(static_cast<uint32_t>(exact));
  std::memcpy(to, &wrapped, 4);
}

// Element addresses are checked one by one: a fragment's rows may lie anywhere.
void check(ThreadContext* thread, uint64_t address, unsigned bytes) {
  if (!isVisible(address) || address % bytes != 0) faultAddress(address, bytes);
  const BlockContext& block = *thread->block;
  uint64_t offset = address - block.sharedBase;
  if (offset < block.sharedCapacity && offset + bytes > block.sharedLimit) faultAddress(address, 0);
}

template <typename Visit>
void forElements(ThreadContext* thread, const MatrixShape& shape, char which, Element element,
                 uint64_t address, uint32_t stride, bool column, Visit visit) {
  unsigned bytes = bitsOf(element) / 8;
  for (unsigned i = 0; i < elementsOf(shape, which); ++i) {
    Place place = placeOf(shape, which, thread->linear % kWarpSize, i);
    uint64_t index =
        column ? uint64_t{place.column} * stride + place.row : uint64_t{place.row} * stride + place.column;
    uint64_t at = address + index * bytes;
    check(thread, at, bytes);
    visit(reinterpret_cast<void*>(at), i * bytes, bytes);
  }
}

Element elementOf(const MatrixShape& shape, uint32_t which) { return which == 'c' ? shape.c : shape.ab; }

}  // namespace

void multiply(Lane* lanes, uint32_t members) {
  if (members != ~0u) faultInstruction();
  const auto& first = *reinterpret_cast<const MatrixProduct*>(lanes[0].value);
  auto shape = std::bit_cast<MatrixShape>(first.shape);
  // Not arrays in thread-local storage: libcuda-soft.so is opened at run time and has only the loader's small
  // reserve.
  static thread_local const std::unique_ptr<double[]> scratch(new double[size_t{3} * kMaxElements]);
  double* const a = scratch.get();
  double* const b = a + kMaxElements;
  double* const c = b + kMaxElements;
  gather(shape, 'a', shape.ab, lanes, a);
  gather(shape, 'b', shape.b, lanes, b);
  gather(shape, 'c', shape.c, lanes, c);
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const auto& product = *reinterpret_cast<const MatrixProduct*>(lanes[lane].value);
    for (unsigned i = 0; i < elementsOf(shape, 'c'); ++i) {
      Place place = placeOf(shape, 'c', lane, i);
      double sum = shape.d == Element::f64 ? c[place.row * shape.n + place.column] : 0;
      for (unsigned k = 0; k < shape.k; ++k)
        sum = std::fma(a[place.row * shape.k + k], b[k * shape.n + place.column], sum);
      if (shape.d != Element::f64) sum += c[place.row * shape.n + place.column];
      char* to = static_cast<char*>(product.d) + i * bitsOf(shape.d) / 8;
      if (shape.d == Element::s32)
        encodeInteger(sum, first.saturate != 0, to);
      else
        encode(shape.d, sum, to);
    }
  }
}

void loadFragment(ThreadContext* thread, uint64_t shapeBits, uint32_t which, uint64_t address,
                  uint32_t stride, uint32_t column, void* fragment) {
  auto shape = std::bit_cast<MatrixShape>(shapeBits);
  forElements(thread, shape, static_cast<char>(which), elementOf(shape, which), address, stride, column != 0,
              [&](void* at, unsigned offset, unsigned bytes) {
                std::memcpy(static_cast<char*>(fragment) + offset, at, bytes);
              });
}

void storeFragment(ThreadContext* thread, uint64_t shapeBits, uint64_t address, uint32_t stride,
                   uint32_t column, const void* fragment) {
  auto shape = std::bit_cast<MatrixShape>(shapeBits);
  forElements(thread, shape, 'c', shape.c, address, stride, column != 0,
              [&](void* at, unsigned offset, unsigned bytes) {
                std::memcpy(at, static_cast<const char*>(fragment) + offset, bytes);
              });
}

void moveRows(Lane* lanes, uint32_t members) {
  if (members != ~0u) faultInstruction();
  const auto& first = *reinterpret_cast<const MatrixRows*>(lanes[0].value);
  for (unsigned matrix = 0; matrix < first.count; ++matrix)
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      uint32_t* word = &reinterpret_cast<const MatrixRows*>(lanes[lane].value)->registers[matrix];
      for (unsigned half = 0; half < 2; ++half) {
        unsigned row = lane / 4;
        unsigned column = lane % 4 * 2 + half;
        if (first.transposed != 0) std::swap(row, column);
        uint64_t base = reinterpret_cast<const MatrixRows*>(lanes[matrix * 8 + row].value)->row;
        auto* memory = reinterpret_cast<uint16_t*>(base) + column;
        if (first.store != 0)
          *memory = static_cast<uint16_t>(*word >> (16 * half));
        else
          *word = (*word & ~(0xFFFFu << (16 * half))) | static_cast<uint32_t>(*memory) << (16 * half);
      }
    }
}

}  // namespace gpupool::softgpu::runtime
