#include "server/softgpu/codegen/program.h"

#include <algorithm>
#include <functional>
#include <set>

namespace gpupool::softgpu::codegen {
namespace {

using ptx::Function;
using ptx::Instruction;
using ptx::Operand;

bool meetsOthers(const Instruction& one) {
  static const std::set<std::string_view> kOpcodes = {"bar",      "barrier",  "shfl",       "vote",
                                                      "match",    "redux",    "mma",        "wmma",
                                                      "ldmatrix", "stmatrix", "activemask", "elect"};
  return kOpcodes.contains(one.opcode);
}

uint32_t frameOf(const Function& function) {
  uint32_t bytes = 0;
  for (const ptx::Variable& variable : function.variables) {
    bool framed = variable.space == ptx::Space::local ||
                  (variable.space == ptx::Space::param && variable.addressTaken && !function.entry);
    if (!framed) continue;
    bytes = (bytes + variable.alignment - 1) & ~(variable.alignment - 1);
    bytes += static_cast<uint32_t>(variable.bytes);
  }
  return (bytes + 15) & ~15u;
}

class Analysis {
 public:
  explicit Analysis(Program& program) : program_(program) {}

  void run() {
    for (size_t m = 0; m < program_.modules.size(); ++m) {
      const auto& functions = program_.modules[m].ptx.functions;
      for (size_t f = 0; f < functions.size(); ++f)
        if (functions[f].defined) scan({static_cast<int>(m), static_cast<int>(f)});
      initialisers(static_cast<int>(m));
    }
    for (auto& [id, facts] : program_.facts) close(id, facts);
  }

 private:
  void scan(FunctionId id) {
    FunctionFacts& facts = program_.facts[id];
    const Function& function = program_.function(id);
    facts.frameBytes = frameOf(function);
    for (const Instruction& one : function.instructions) {
      if (meetsOthers(one)) facts.synchronizes = true;
      if (one.opcode == "alloca") facts.allocates = true;
      if (one.opcode == "call")
        call(id, facts, one);
      else
        for (const Operand& operand : one.operands) take(id.module, operand);
    }
  }

  void call(FunctionId id, FunctionFacts& facts, const Instruction& one) {
    size_t at = !one.operands.empty() && one.operands[0].kind == Operand::Kind::list ? 1 : 0;
    if (at >= one.operands.size())
      throw Problem{CompileError::Kind::syntax, one.line, "call without a function"};
    const Operand& target = one.operands[at];
    if (target.kind != Operand::Kind::symbol) {
      facts.indirect = true;
      return;
    }
    FunctionId callee = program_.findFunction(id.module, target.text);
    if (callee.valid())
      facts.calls.push_back(callee);
    else if (!isBuiltin(target.text))
      throw Problem{CompileError::Kind::unresolved, one.line,
                    "undefined function " + std::string(target.text)};
  }

  void take(int module, const Operand& operand) {
    if (operand.kind == Operand::Kind::special && operand.text.starts_with("%reserved_smem"))
      program_.usesReservedShared = true;
    if (operand.kind == Operand::Kind::symbol) takeAddress(module, operand.text);
    for (const Operand& part : operand.parts) take(module, part);
  }

  void takeAddress(int module, std::string_view name) {
    if (program_.findVariable(module, name).first >= 0) return;
    FunctionId id = program_.findFunction(module, name);
    if (!id.valid() || program_.function(id).entry) return;
    program_.facts[id].addressTaken = true;
    auto& slot = program_.slots[id];
    if (slot == nullptr) slot = runtime::newFunctionSlot();
  }

  void initialisers(int module) {
    for (const ptx::Variable& variable : program_.modules[static_cast<size_t>(module)].ptx.variables)
      for (const ptx::Initialiser& one : variable.initialisers)
        if (!one.symbol.empty()) takeAddress(module, one.symbol);
  }

  // What a function is with everything it calls.
  void close(FunctionId id, FunctionFacts& facts) {
    std::vector<FunctionId> all = reachable(program_, id, false);
    bool indirect = false;
    for (FunctionId one : all) indirect |= program_.facts[one].indirect;
    if (indirect) all = reachable(program_, id, true);
    bool synchronizes = false;
    bool allocates = false;
    for (FunctionId one : all) {
      synchronizes |= program_.facts[one].synchronizes;
      allocates |= program_.facts[one].allocates;
      const auto& calls = program_.facts[one].calls;
      if (std::find(calls.begin(), calls.end(), id) != calls.end()) facts.recursive = true;
    }
    if (facts.addressTaken && indirect) facts.recursive = true;
    facts.synchronizesDeep = synchronizes;
    facts.indirectDeep = indirect;
    facts.allocatesDeep = allocates;
    std::set<FunctionId> path;
    facts.chainBytes = chain(id, path);
  }

  uint32_t chain(FunctionId id, std::set<FunctionId>& path) {
    if (auto known = chains_.find(id); known != chains_.end()) return known->second;
    if (!path.insert(id).second) return 0;  // recursion: the allowance for it is the launch's matter
    uint32_t deepest = 0;
    for (FunctionId callee : program_.facts[id].calls) deepest = std::max(deepest, chain(callee, path));
    path.erase(id);
    return chains_[id] = program_.facts[id].frameBytes + deepest;
  }

  Program& program_;
  std::map<FunctionId, uint32_t> chains_;
};

}  // namespace

FunctionId Program::findFunction(int module, std::string_view name) const {
  const LinkedModule& own = modules[static_cast<size_t>(module)];
  if (auto found = own.functions.find(name); found != own.functions.end()) return {module, found->second};
  if (auto found = visibleFunctions.find(name); found != visibleFunctions.end()) return found->second;
  return {};
}

std::pair<int, int> Program::findVariable(int module, std::string_view name) const {
  const LinkedModule& own = modules[static_cast<size_t>(module)];
  auto found = own.variables.find(name);
  if (found == own.variables.end()) return {-1, -1};
  const ptx::Variable& variable = own.ptx.variables[static_cast<size_t>(found->second)];
  bool elsewhere = variable.external && !(variable.space == ptx::Space::shared && variable.unsized);
  if (elsewhere || variable.weak)
    if (auto other = visibleVariables.find(name); other != visibleVariables.end()) return other->second;
  return {module, found->second};
}

bool isBuiltin(std::string_view name) {
  return name == "vprintf" || name == "malloc" || name == "free" || name == "__assertfail" ||
         name == "cudaGraphSetConditional";
}

void analyse(Program& program) { Analysis(program).run(); }

std::vector<FunctionId> reachable(const Program& program, FunctionId root, bool pointers) {
  std::vector<FunctionId> found;
  std::set<FunctionId> seen;
  std::vector<FunctionId> open;
  auto add = [&](FunctionId id) {
    if (seen.insert(id).second) open.push_back(id);
  };
  if (root.valid()) add(root);
  if (pointers)
    for (const auto& [id, slot] : program.slots) add(id);
  for (size_t i = 0; i < open.size(); ++i) {
    found.push_back(open[i]);
    auto facts = program.facts.find(open[i]);
    if (facts == program.facts.end()) continue;
    for (FunctionId callee : facts->second.calls) add(callee);
  }
  return found;
}

namespace {

// Adds the .shared variables of `functions` that have no place yet.
void layOutFunctions(const Program& program, const std::vector<FunctionId>& functions, SharedLayout& layout) {
  auto place = [&](std::array<int, 3> key, const ptx::Variable& variable) {
    uint32_t alignment = std::max(variable.alignment, 1u);
    if (variable.unsized) {
      layout.dynamicAlignment = std::max(layout.dynamicAlignment, alignment);
      return;
    }
    if (layout.offsets.contains(key)) return;
    layout.bytes = (layout.bytes + alignment - 1) & ~(alignment - 1);
    layout.offsets[key] = layout.bytes;
    layout.bytes += static_cast<uint32_t>(variable.bytes);
  };
  std::function<void(FunctionId, const Operand&)> visit = [&](FunctionId id, const Operand& operand) {
    if (operand.kind == Operand::Kind::symbol) {
      auto variable = program.findVariable(id.module, operand.text);
      if (variable.first >= 0 && program.variable(variable).space == ptx::Space::shared)
        place({variable.first, -1, variable.second}, program.variable(variable));
    }
    for (const Operand& part : operand.parts) visit(id, part);
  };
  for (FunctionId id : functions) {
    const Function& function = program.function(id);
    for (size_t i = 0; i < function.variables.size(); ++i)
      if (function.variables[i].space == ptx::Space::shared)
        place({id.module, id.function, static_cast<int>(i)}, function.variables[i]);
    for (const Instruction& one : function.instructions)
      for (const Operand& operand : one.operands) visit(id, operand);
  }
}

}  // namespace

// Functions called through pointers are compiled once for all kernels: their variables come first, at the
// same offsets everywhere.
SharedLayout layOutShared(const Program& program, FunctionId kernel) {
  SharedLayout layout;
  if (program.usesReservedShared) layout.bytes = layout.reserved = kReservedShared;
  bool pointers = !kernel.valid() || program.facts.at(kernel).indirectDeep;
  if (pointers) layOutFunctions(program, reachable(program, {}, true), layout);
  if (kernel.valid()) layOutFunctions(program, reachable(program, kernel, false), layout);
  return layout;
}

}  // namespace gpupool::softgpu::codegen
