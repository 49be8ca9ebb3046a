#pragma once
// One case per instruction form: a kernel body over many inputs, edge values first. An NVIDIA GPU ran them
// all once (hardware_cases.cpp) and a hash of each case's results is in engine_golden.txt; the software GPU
// must match.

#include <cstdint>
#include <string>
#include <vector>

namespace gpupool::softgpu::test {

constexpr uint32_t kCaseThreads = 1024;

struct Input {
  uint64_t a, b, c, d;
};

struct InstructionCase {
  std::string name;  // the instruction
  std::string ptx;   // a module with a kernel `test`
  std::vector<Input> inputs;
  char result = 'r';  // class of the results: floats are compared with all NaNs alike
};

std::vector<InstructionCase> instructionCases();

// Each thread writes 16 bytes. NaNs become one NaN.
uint64_t hashResults(const InstructionCase& one, std::vector<uint64_t>& results);

}  // namespace gpupool::softgpu::test
