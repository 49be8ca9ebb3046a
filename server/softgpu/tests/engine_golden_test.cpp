// Instructions against what an NVIDIA H200 answered (engine_golden.txt).
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>

#include "server/softgpu/tests/engine_cases.h"
#include "server/softgpu/tests/engine_harness.h"

namespace gpupool::softgpu::test {

namespace {

constexpr size_t kCaseBytes = size_t{kCaseThreads} * 8;

std::map<std::string, std::string> golden() {
  std::map<std::string, std::string> rows;
  std::ifstream file(GPUPOOL_GOLDEN);
  for (std::string line; std::getline(file, line);) rows[line.substr(17)] = line.substr(0, 16);
  return rows;
}

std::string hexadecimal(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

// With the results of a GPU at hand (hardware_cases' second output), says which inputs differ.
void explain(const InstructionCase& one, size_t index, const std::vector<uint64_t>& results) {
  const char* path = std::getenv("GPUPOOL_HARDWARE_RESULTS");
  if (path == nullptr) return;
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(index * kCaseBytes));
  std::vector<uint64_t> wanted(kCaseThreads);
  file.read(reinterpret_cast<char*>(wanted.data()), kCaseBytes);
  int shown = 0;
  for (uint32_t i = 0; i < kCaseThreads && shown < 6; ++i)
    if (wanted[i] != results[i]) {
      ++shown;
      std::printf(
          "%s: %llx %llx %llx %llx -> %llx, hardware %llx\n", one.name.c_str(),
          static_cast<unsigned long long>(one.inputs[i].a), static_cast<unsigned long long>(one.inputs[i].b),
          static_cast<unsigned long long>(one.inputs[i].c), static_cast<unsigned long long>(one.inputs[i].d),
          static_cast<unsigned long long>(results[i]), static_cast<unsigned long long>(wanted[i]));
    }
}

}  // namespace

TEST_CASE("instructions answer as an H200 does") {
  auto expected = golden();
  std::vector<InstructionCase> cases = instructionCases();
  REQUIRE(expected.size() == cases.size());
  DeviceMemory in(kCaseThreads * sizeof(Input));
  DeviceMemory out(kCaseBytes);
  for (size_t index = 0; index < cases.size(); ++index) {
    const InstructionCase& one = cases[index];
    INFO(one.name);
    std::memcpy(in.as<void>(), one.inputs.data(), one.inputs.size() * sizeof(Input));
    std::memset(out.as<void>(), 0, kCaseBytes);
    Loaded loaded(one.ptx);
    INFO(loaded.error().text);
    REQUIRE(loaded.fine());
    REQUIRE(loaded.run("test", {1}, {kCaseThreads}, in.address(), out.address()) == Outcome::ok);
    std::vector<uint64_t> results(out.as<uint64_t>(), out.as<uint64_t>() + kCaseThreads);
    uint64_t hash = hashResults(one, results);
    bool same = hexadecimal(hash) == expected[one.name];
    if (!same) explain(one, index, results);
    CHECK(same);
  }
}

}  // namespace gpupool::softgpu::test
