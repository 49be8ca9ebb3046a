#pragma once
// Matrix instructions of a warp (wmma, mma, ldmatrix, stmatrix; PTX ISA 9.0, 9.7.14). Each lane holds a part
// of every matrix, a fragment. mma's fragments are laid out as the manual says; wmma's layout is opaque to
// programs, and here lane l holds the l-th 32nd of the matrix, row after row.

#include <cstdint>

#include "server/softgpu/runtime/context.h"

namespace gpupool::softgpu::runtime {

enum class Element : uint8_t { none, f16, bf16, tf32, f32, f64, s8, u8, s32 };
constexpr unsigned bitsOf(Element element) {
  switch (element) {
    case Element::s8:
    case Element::u8:
      return 8;
    case Element::f16:
    case Element::bf16:
      return 16;
    case Element::f64:
      return 64;
    default:
      return 32;
  }
}

// Known when the instruction is translated; travels as one 64-bit number.
struct MatrixShape {
  uint8_t m = 0;
  uint8_t n = 0;
  uint8_t k = 0;
  bool opaque = false;  // wmma
  Element ab = Element::none;
  Element b = Element::none;  // mixes signs with `ab` only
  Element c = Element::none;
  Element d = Element::none;
};
static_assert(sizeof(MatrixShape) == 8);

// What each lane brings to a product: its fragments. Lives on the lane's stack while it waits.
struct MatrixProduct {
  uint64_t shape;
  const void* a;
  const void* b;
  const void* c;
  void* d;
  uint64_t saturate;
};
void multiply(Lane* lanes, uint32_t members);

// wmma.load and wmma.store: `which` is 'a', 'b' or 'c'; stride in elements; column: columns lie one after the
// other.
void loadFragment(ThreadContext* thread, uint64_t shape, uint32_t which, uint64_t address, uint32_t stride,
                  uint32_t column, void* fragment);
void storeFragment(ThreadContext* thread, uint64_t shape, uint64_t address, uint32_t stride, uint32_t column,
                   const void* fragment);

// ldmatrix and stmatrix: each lane brings the address of a row of 16 bytes (Lane::value) and its registers
// (Lane::b of the count, the pointer in MatrixRows).
struct MatrixRows {
  uint64_t row;
  uint32_t* registers;
  uint32_t count;
  uint32_t transposed;
  uint32_t store;
};
void moveRows(Lane* lanes, uint32_t members);

}  // namespace gpupool::softgpu::runtime
