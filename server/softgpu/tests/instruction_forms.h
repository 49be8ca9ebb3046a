#pragma once
// The instructions that engine_cases.cpp makes cases of.
//
// A form is "classes > result: instruction", with operands %x0 for the result and %x1.. for the inputs.
// Classes of operands: r 32-bit, R 64-bit, s 16-bit, b 8-bit integers; f and F floats; h half, H half pair, g
// bfloat, G bfloat pair; n small numbers (shifts, counts); S selectors.

#include <span>

namespace gpupool::softgpu::test {

std::span<const char* const> instructionForms();

// Whole bodies for what has several results or other operands.
struct InstructionBody {
  const char* form;  // with a name in place of the instruction
  const char* body;
};
std::span<const InstructionBody> instructionBodies();

}  // namespace gpupool::softgpu::test
