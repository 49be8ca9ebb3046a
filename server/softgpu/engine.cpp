// The seam: PTX texts -> a linked program -> kernels, compiled at their first launch.
#include "server/softgpu/engine.h"

#include <llvm/IR/Verifier.h>
#include <llvm/Support/raw_ostream.h>

#include <cstring>
#include <deque>
#include <mutex>

#include "base/log.h"
#include "server/softgpu/codegen/jit.h"
#include "server/softgpu/codegen/program.h"
#include "server/softgpu/codegen/translator.h"
#include "server/softgpu/ptx/parser.h"
#include "server/softgpu/runtime/memory.h"
#include "server/softgpu/runtime/worker.h"

namespace gpupool::softgpu {

using codegen::FunctionId;
using codegen::Problem;

namespace {
class LoadedProgram;

constexpr uint32_t kRecursionAllowance = 32 << 10;  // of local memory per thread, beside the known frames
constexpr uint32_t kAllocaAllowance = 64 << 10;
constexpr uint64_t kWorkspaceBytes = 4096;
}  // namespace

class Kernel {
 public:
  Kernel(LoadedProgram& program, FunctionId id, const KernelInfo& info)
      : program_(program), id_(id), info_(info) {}
  const KernelInfo& info() const { return info_; }
  // Compiled by the first caller. Null: code generation failed; the log says why.
  const runtime::KernelCode* code() const;

 private:
  LoadedProgram& program_;
  FunctionId id_;
  const KernelInfo& info_;
  mutable std::once_flag once_;
  mutable runtime::KernelCode code_;
};

namespace {

class LoadedProgram final : public Program {
 public:
  ~LoadedProgram() override {
    for (auto& [id, slot] : linked_.slots)
      if (slot != nullptr) runtime::freeFunctionSlot(slot);
  }

  void build(std::span<const std::string_view> sources, const PlaceGlobal& place) {
    for (std::string_view source : sources) parseOne(source);
    link();
    codegen::analyse(linked_);
    placeGlobals(place);
    checkEverything();
    describeKernels();
  }

  std::span<const KernelInfo> kernels() const override { return kernelInfos_; }
  std::span<const GlobalInfo> globals() const override { return globalInfos_; }
  const Kernel* kernel(std::string_view name) const override {
    for (const Kernel& one : kernels_)
      if (one.info().name == name) return &one;
    return nullptr;
  }

  void compile(FunctionId id, runtime::KernelCode& code);

 private:
  void parseOne(std::string_view source);
  void link();
  void placeGlobals(const PlaceGlobal& place);
  void placeModule(size_t module, const PlaceGlobal& place);
  void initialise(size_t module);
  uint64_t valueOf(size_t module, const ptx::Initialiser& one) const;
  void checkEverything();
  void describeKernels();
  KernelInfo describe(FunctionId id) const;
  void compilePointers();
  void* generate(FunctionId kernel, const std::vector<FunctionId>& functions,
                 const codegen::SharedLayout& shared);

  codegen::Program linked_;
  std::vector<KernelInfo> kernelInfos_;
  std::vector<GlobalInfo> globalInfos_;
  std::deque<Kernel> kernels_;
  std::mutex mutex_;  // compilation
  codegen::CodeSpace code_;
  bool pointersReady_ = false;
};

void LoadedProgram::parseOne(std::string_view source) {
  codegen::LinkedModule module;
  module.ptx = ptx::parse(source);
  module.addresses.assign(module.ptx.variables.size(), 0);
  linked_.modules.push_back(std::move(module));
}

// Names within modules first, then what they show each other.
void LoadedProgram::link() {
  for (size_t m = 0; m < linked_.modules.size(); ++m) {
    codegen::LinkedModule& module = linked_.modules[m];
    for (size_t i = 0; i < module.ptx.variables.size(); ++i) {
      const ptx::Variable& variable = module.ptx.variables[i];
      auto known = module.variables.find(variable.name);
      if (known != module.variables.end() && variable.external)
        continue;  // a declaration after the definition
      module.variables[variable.name] = static_cast<int>(i);
      if (variable.visible && !variable.external)
        linked_.visibleVariables.emplace(variable.name, std::pair{static_cast<int>(m), static_cast<int>(i)});
    }
    for (size_t i = 0; i < module.ptx.functions.size(); ++i) {
      const ptx::Function& function = module.ptx.functions[i];
      if (!function.defined) continue;
      module.functions[function.name] = static_cast<int>(i);
      if (function.visible)
        linked_.visibleFunctions.emplace(function.name, FunctionId{static_cast<int>(m), static_cast<int>(i)});
    }
  }
}

void LoadedProgram::placeGlobals(const PlaceGlobal& place) {
  for (size_t m = 0; m < linked_.modules.size(); ++m) placeModule(m, place);
  for (auto& module : linked_.modules)  // names that mean another module's variable
    for (size_t i = 0; i < module.ptx.variables.size(); ++i) {
      const ptx::Variable& variable = module.ptx.variables[i];
      if (variable.space == ptx::Space::shared || module.addresses[i] != 0) continue;
      auto other = linked_.visibleVariables.find(variable.name);
      if (other == linked_.visibleVariables.end())
        throw Problem{CompileError::Kind::unresolved, 0, "undefined variable " + std::string(variable.name)};
      module.addresses[i] = linked_.modules[static_cast<size_t>(other->second.first)]
                                .addresses[static_cast<size_t>(other->second.second)];
    }
  for (size_t m = 0; m < linked_.modules.size(); ++m) initialise(m);
}

void LoadedProgram::placeModule(size_t m, const PlaceGlobal& place) {
  codegen::LinkedModule& module = linked_.modules[m];
  for (size_t i = 0; i < module.ptx.variables.size(); ++i) {
    const ptx::Variable& variable = module.ptx.variables[i];
    if (variable.space == ptx::Space::shared || variable.external) continue;
    if (variable.weak &&
        linked_.visibleVariables.at(variable.name) != std::pair{static_cast<int>(m), static_cast<int>(i)})
      continue;
    GlobalInfo info;
    info.name = std::string(variable.name);
    info.size = variable.bytes;
    info.alignment = variable.alignment;
    info.constant = variable.space == ptx::Space::constant;
    info.managed = variable.managed;
    info.address = place(info);
    if (info.address == 0)
      throw Problem{CompileError::Kind::unresolved, 0, "out of device memory for " + info.name};
    module.addresses[i] = info.address;
    globalInfos_.push_back(std::move(info));
  }
}

uint64_t LoadedProgram::valueOf(size_t m, const ptx::Initialiser& one) const {
  if (one.symbol.empty()) return one.value;
  uint64_t address = 0;
  auto variable = linked_.findVariable(static_cast<int>(m), one.symbol);
  if (variable.first >= 0) {
    address =
        linked_.modules[static_cast<size_t>(variable.first)].addresses[static_cast<size_t>(variable.second)];
  } else {
    FunctionId function = linked_.findFunction(static_cast<int>(m), one.symbol);
    auto slot = linked_.slots.find(function);
    if (slot != linked_.slots.end()) address = reinterpret_cast<uint64_t>(slot->second);
  }
  if (address == 0)
    throw Problem{CompileError::Kind::unresolved, 0,
                  "undefined symbol " + std::string(one.symbol) + " in an initialiser"};
  return (address + one.value) >> one.shift;
}

void LoadedProgram::initialise(size_t m) {
  codegen::LinkedModule& module = linked_.modules[m];
  for (size_t i = 0; i < module.ptx.variables.size(); ++i)
    for (const ptx::Initialiser& one : module.ptx.variables[i].initialisers) {
      if (module.ptx.variables[i].space == ptx::Space::shared) continue;
      uint64_t value = valueOf(m, one);
      std::memcpy(reinterpret_cast<void*>(module.addresses[i] + one.offset), &value,
                  std::min<size_t>(one.bytes, 8));
    }
}

// Every function is translated once before anything runs, so that an instruction without a translation is
// load()'s answer and not a launch's.
void LoadedProgram::checkEverything() {
  codegen::HostFeatures features = codegen::hostFeatures();
  for (const auto& [id, facts] : linked_.facts) {
    llvm::LLVMContext context;
    llvm::Module module("check", context);
    codegen::prepareModule(module);
    codegen::SharedLayout shared = codegen::layOutShared(linked_, id);
    llvm::Function* function = codegen::Translator(linked_, id, shared, module, features).run();
    std::string text;
    llvm::raw_string_ostream stream(text);
    if (llvm::verifyFunction(*function, &stream))
      throw Problem{CompileError::Kind::unsupported, linked_.function(id).line,
                    "translation of " + std::string(linked_.function(id).name) + ": " + stream.str()};
  }
}

KernelInfo LoadedProgram::describe(FunctionId id) const {
  const codegen::LinkedModule& module = linked_.modules[static_cast<size_t>(id.module)];
  const ptx::Function& function = linked_.function(id);
  KernelInfo info;
  info.name = std::string(function.name);
  for (int index : function.parameters) {
    const ptx::Variable& variable = function.variables[static_cast<size_t>(index)];
    uint32_t offset = (info.parameterBytes + variable.alignment - 1) & ~(variable.alignment - 1);
    info.parameters.push_back({offset, static_cast<uint32_t>(variable.bytes), variable.alignment});
    info.parameterBytes = offset + static_cast<uint32_t>(variable.bytes);
  }
  codegen::SharedLayout shared = codegen::layOutShared(linked_, id);
  info.staticSharedBytes = shared.bytes - shared.reserved;
  info.localBytes = linked_.facts.at(id).chainBytes;
  for (const ptx::Variable& variable : module.ptx.variables)
    if (variable.space == ptx::Space::constant) info.constantBytes += static_cast<uint32_t>(variable.bytes);
  if (function.maxThreads != 0) info.maxThreads = std::min(function.maxThreads, runtime::kMaxThreads);
  info.ptxVersion = module.ptx.target;
  return info;
}

void LoadedProgram::describeKernels() {
  std::vector<FunctionId> ids;
  for (const auto& [id, facts] : linked_.facts)
    if (linked_.function(id).entry) ids.push_back(id);
  for (FunctionId id : ids) kernelInfos_.push_back(describe(id));
  for (size_t i = 0; i < ids.size(); ++i) kernels_.emplace_back(*this, ids[i], kernelInfos_[i]);
}

void* LoadedProgram::generate(FunctionId kernel, const std::vector<FunctionId>& functions,
                              const codegen::SharedLayout& shared) {
  llvm::LLVMContext context;
  llvm::Module module("kernel", context);
  codegen::prepareModule(module);
  std::string name;
  for (FunctionId id : functions) {
    llvm::Function* function =
        codegen::Translator(linked_, id, shared, module, codegen::hostFeatures()).run();
    bool external = id == kernel || (!kernel.valid() && linked_.slots.contains(id));
    if (!external) continue;
    function->setLinkage(llvm::Function::ExternalLinkage);
    function->setName((kernel.valid() ? "kernel." : "pointed.") + codegen::functionName(linked_, id));
    if (kernel.valid()) name = function->getName().str();
  }
  code_.add(module);
  return kernel.valid() ? code_.lookup(name) : nullptr;
}

// The functions that pointers may call, once for all kernels.
void LoadedProgram::compilePointers() {
  if (pointersReady_) return;
  generate({}, codegen::reachable(linked_, {}, true), codegen::layOutShared(linked_, {}));
  for (auto& [id, slot] : linked_.slots) {
    void* code = code_.lookup("pointed." + codegen::functionName(linked_, id));
    if (slot != nullptr) __atomic_store_n(&slot->code, code, __ATOMIC_RELEASE);
  }
  pointersReady_ = true;
}

void LoadedProgram::compile(FunctionId id, runtime::KernelCode& code) {
  std::lock_guard lock(mutex_);
  const codegen::FunctionFacts& facts = linked_.facts.at(id);
  // Pointers travel: functions of this program may be called from kernels of another one.
  if (!linked_.slots.empty()) compilePointers();
  codegen::SharedLayout shared = codegen::layOutShared(linked_, id);
  std::vector<FunctionId> functions = codegen::reachable(linked_, id, false);
  code.staticSharedBytes = shared.bytes;
  code.dynamicAlignment = shared.dynamicAlignment;
  code.localBytes = facts.chainBytes;
  for (FunctionId one : functions) code.recursive |= linked_.facts.at(one).recursive;
  code.recursive |= facts.indirectDeep;
  if (code.recursive) code.localBytes += kRecursionAllowance;
  if (facts.allocatesDeep) code.localBytes += kAllocaAllowance;
  code.entry = reinterpret_cast<runtime::Entry>(generate(id, functions, shared));
}

}  // namespace

const runtime::KernelCode* Kernel::code() const {
  std::call_once(once_, [this] {
    try {
      program_.compile(id_, code_);
    } catch (const Problem& problem) {
      GPUPOOL_ERROR("kernel %s: %s", info_.name.c_str(), problem.text.c_str());
      code_.entry = nullptr;
    }
  });
  return code_.entry != nullptr ? &code_ : nullptr;
}

std::unique_ptr<Program> load(std::span<const std::string_view> sources, const PlaceGlobal& place,
                              CompileError& error) {
  auto at = [](uint32_t line, const std::string& text) {
    return line != 0 ? "line " + std::to_string(line) + ": " + text : text;
  };
  try {
    auto program = std::make_unique<LoadedProgram>();
    program->build(sources, place);
    return program;
  } catch (const ptx::SyntaxError& problem) {
    bool unsupported = problem.text.find("supported") != std::string::npos;
    error = {unsupported ? CompileError::Kind::unsupported : CompileError::Kind::syntax,
             at(problem.line, problem.text)};
  } catch (const Problem& problem) {
    error = {problem.kind, at(problem.line, problem.text)};
  } catch (const std::exception& problem) {
    error = {CompileError::Kind::syntax, problem.what()};
  }
  return nullptr;
}

// ---- running ----
namespace {

// Parameters and the cooperative workspace lie where kernels can reach them; a launch borrows such a place.
class ArgumentMemory {
 public:
  static constexpr uint64_t kParameters = 32 << 10;

  ArgumentMemory() {
    std::lock_guard lock(mutex());
    if (!pool().empty()) {
      address_ = pool().back();
      pool().pop_back();
    }
    if (address_ == 0) address_ = runtime::mapVisible(kParameters + kWorkspaceBytes);
  }
  ~ArgumentMemory() {
    if (address_ == 0) return;
    std::lock_guard lock(mutex());
    pool().push_back(address_);
  }
  uint64_t address() const { return address_; }

 private:
  static std::mutex& mutex() {
    static auto* instance = new std::mutex;
    return *instance;
  }
  static std::vector<uint64_t>& pool() {
    static auto* instance = new std::vector<uint64_t>;
    return *instance;
  }
  uint64_t address_ = 0;
};

}  // namespace

bool prepare(const Kernel& kernel) { return kernel.code() != nullptr; }

Outcome run(const Launch& launch) {
  if (launch.kernel == nullptr) return Outcome::illegalInstruction;
  const runtime::KernelCode* code = launch.kernel->code();
  if (code == nullptr) return Outcome::illegalInstruction;
  runtime::installFaultHandler();
  ArgumentMemory memory;
  if (memory.address() == 0 || launch.parameters.size() > ArgumentMemory::kParameters)
    return Outcome::outOfMemory;
  auto* parameters = reinterpret_cast<std::byte*>(memory.address());
  if (!launch.parameters.empty()) std::memcpy(parameters, launch.parameters.data(), launch.parameters.size());
  runtime::Grid grid;
  grid.code = code;
  std::copy_n(launch.grid, 3, grid.grid);
  std::copy_n(launch.block, 3, grid.block);
  uint64_t threads = uint64_t{grid.block[0]} * grid.block[1] * grid.block[2];
  if (threads == 0 || threads > runtime::kMaxThreads) return Outcome::launchFailed;
  grid.threads = static_cast<uint32_t>(threads);
  grid.blocks = uint64_t{grid.grid[0]} * grid.grid[1] * grid.grid[2];
  if (grid.blocks == 0) return Outcome::ok;
  grid.dynamicSharedBytes = launch.dynamicSharedBytes;
  grid.parameters = parameters;
  if (launch.cooperative) {
    grid.workspace = memory.address() + ArgumentMemory::kParameters;
    std::memset(reinterpret_cast<void*>(grid.workspace), 0, kWorkspaceBytes);
  }
  static std::atomic<uint64_t> nextId{1};
  grid.id = nextId++;
  runtime::runGrid(grid);
  return grid.outcome;
}

uint32_t residentBlocks(const KernelInfo& kernel, uint32_t blockThreads, uint32_t dynamicSharedBytes) {
  constexpr uint32_t kThreads = 2048;
  constexpr uint32_t kBlocks = 32;
  constexpr uint32_t kShared = 228 << 10;
  constexpr uint32_t kSharedPerBlock = 1 << 10;  // the system's own
  if (blockThreads == 0 || blockThreads > kernel.maxThreads) return 0;
  uint32_t warps = (blockThreads + 31) / 32;
  uint32_t byThreads = kThreads / (warps * 32);
  uint64_t shared = uint64_t{kernel.staticSharedBytes} + dynamicSharedBytes + kSharedPerBlock;
  auto byShared = static_cast<uint32_t>(kShared / shared);
  return std::min({byThreads, byShared, kBlocks});
}

}  // namespace gpupool::softgpu
