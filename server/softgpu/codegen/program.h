#pragma once
// A set of linked PTX modules as code generation sees it: who a name means, where variables lie, what
// functions need. Filled once by load(); read-only afterwards.

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "server/softgpu/engine.h"
#include "server/softgpu/ptx/module.h"
#include "server/softgpu/runtime/function_slots.h"

namespace gpupool::softgpu::codegen {

// What keeps PTX from becoming code.
struct Problem {
  CompileError::Kind kind = CompileError::Kind::unsupported;
  uint32_t line = 0;
  std::string text;
};

struct FunctionId {
  int module = -1;
  int function = -1;
  auto operator<=>(const FunctionId&) const = default;
  bool valid() const { return module >= 0; }
};

// What a function does itself, and with everything it calls.
struct FunctionFacts {
  std::vector<FunctionId> calls;
  bool indirect = false;      // calls through a pointer
  bool synchronizes = false;  // meets other threads: barriers, warp operations
  bool allocates = false;     // alloca
  bool indirectDeep = false;  // the same, of it and all it calls
  bool synchronizesDeep = false;
  bool allocatesDeep = false;
  bool recursive = false;
  uint32_t frameBytes = 0;  // local memory of its own
  uint32_t chainBytes = 0;  // and of the deepest chain of calls
  bool addressTaken = false;
};

struct LinkedModule {
  ptx::Module ptx;
  std::unordered_map<std::string_view, int> variables;
  std::unordered_map<std::string_view, int> functions;
  std::vector<uint64_t> addresses;  // of variables; 0 for .shared
};

struct Program {
  std::vector<LinkedModule> modules;
  std::map<std::string_view, FunctionId> visibleFunctions;
  std::map<std::string_view, std::pair<int, int>> visibleVariables;  // module, variable
  std::map<FunctionId, FunctionFacts> facts;
  bool usesReservedShared = false;
  std::map<FunctionId, runtime::FunctionSlot*> slots;  // of functions whose address is taken

  const ptx::Function& function(FunctionId id) const {
    return modules[static_cast<size_t>(id.module)].ptx.functions[static_cast<size_t>(id.function)];
  }
  // The definition `name` means inside `module`; invalid if there is none.
  FunctionId findFunction(int module, std::string_view name) const;
  // {module, variable}, or {-1, -1}.
  std::pair<int, int> findVariable(int module, std::string_view name) const;
  const ptx::Variable& variable(std::pair<int, int> id) const {
    return modules[static_cast<size_t>(id.first)].ptx.variables[static_cast<size_t>(id.second)];
  }
};

// A function the runtime provides ("vprintf", "malloc" ...).
bool isBuiltin(std::string_view name);

// Fills `facts`; throws Problem on a call of a function nobody defines.
void analyse(Program& program);

// Everything reachable from `root` by direct calls, root first; with `pointers`, also all functions whose
// address is taken and what they call.
std::vector<FunctionId> reachable(const Program& program, FunctionId root, bool pointers);

// Where the .shared variables of a kernel lie; of an invalid id: of the functions called through pointers.
// {module, function (-1: module scope), variable} -> offset from the block's base.
struct SharedLayout {
  std::map<std::array<int, 3>, uint32_t> offsets;
  uint32_t bytes = 0;
  uint32_t reserved = 0;  // of `bytes`, the system's own at the beginning
  uint32_t dynamicAlignment = 16;
};
// What %reserved_smem_offset_* describe, where a program asks for it: cooperative groups keep their scratch
// there.
constexpr uint32_t kReservedShared = 1024;
SharedLayout layOutShared(const Program& program, FunctionId kernel);

}  // namespace gpupool::softgpu::codegen
