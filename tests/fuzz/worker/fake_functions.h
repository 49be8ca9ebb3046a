#pragma once
// The functions of the fake driver that watch what the worker gives them, by what they are about; each table
// names its own. The other functions, and those that only answer, are in fake_driver.cpp.

#include <map>
#include <span>
#include <string_view>
#include <utility>

#include "tests/fuzz/worker/fake_driver.h"

namespace gpupool::fuzz {

using Function = std::pair<std::string_view, void*>;
#define FUNCTION(name, with) {#name, reinterpret_cast<void*>(static_cast<decltype(&::name)>(&with))}

std::span<const Function> memoryFunctions();  // addresses, copies, words
std::span<const Function> codeFunctions();    // launches, modules, graphs, textures

inline DriverState& state() { return driverState(); }
// The worker has let something through: ends the process, and says what.
[[noreturn]] void broken(const char* what, uint64_t address, size_t bytes);
// [address, + bytes) lies in one of them.
bool within(const std::map<uint64_t, size_t>& ranges, uint64_t address, size_t bytes);

}  // namespace gpupool::fuzz
