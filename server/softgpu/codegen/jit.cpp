#include "server/softgpu/codegen/jit.h"

#include <llvm/Analysis/AliasAnalysis.h>
#include <llvm/Analysis/CGSCCPassManager.h>
#include <llvm/Analysis/InlineCost.h>
#include <llvm/Analysis/LoopAnalysisManager.h>
#include <llvm/ExecutionEngine/Orc/CompileUtils.h>
#include <llvm/ExecutionEngine/Orc/ExecutionUtils.h>
#include <llvm/ExecutionEngine/Orc/LLJIT.h>
#include <llvm/Passes/PassBuilder.h>
#include <llvm/Support/TargetSelect.h>
#include <llvm/Target/TargetMachine.h>
#include <llvm/Transforms/IPO/GlobalDCE.h>
#include <llvm/Transforms/IPO/ModuleInliner.h>
#include <llvm/Transforms/InstCombine/InstCombine.h>
#include <llvm/Transforms/Scalar/DCE.h>
#include <llvm/Transforms/Scalar/EarlyCSE.h>
#include <llvm/Transforms/Scalar/GVN.h>
#include <llvm/Transforms/Scalar/LICM.h>
#include <llvm/Transforms/Scalar/LoopPassManager.h>
#include <llvm/Transforms/Scalar/SROA.h>
#include <llvm/Transforms/Scalar/SimplifyCFG.h>

#include <atomic>

#include "server/softgpu/runtime/calls.h"

namespace gpupool::softgpu::codegen {
namespace {

// Beyond it, optimising costs more than it brings: register allocation alone takes tens of seconds.
constexpr size_t kLargeModule = 30000;

#if LLVM_VERSION_MAJOR >= 18
constexpr auto kNoOptimisation = llvm::CodeGenOptLevel::None;
#else
constexpr auto kNoOptimisation = llvm::CodeGenOpt::None;
#endif

[[noreturn]] void fail(llvm::Error error) {
  throw Problem{CompileError::Kind::unsupported, 0, "code generation: " + llvm::toString(std::move(error))};
}

template <typename T>
T orFail(llvm::Expected<T> value) {
  if (!value) fail(value.takeError());
  return std::move(*value);
}

// Lives as long as the process: code of it may still run while the process exits.
struct Engine {
  std::unique_ptr<llvm::orc::JITTargetMachineBuilder> target;
  std::unique_ptr<llvm::orc::LLJIT> jit;
  std::atomic<uint64_t> nextLibrary{0};

  Engine() {
    llvm::InitializeNativeTarget();
    llvm::InitializeNativeTargetAsmPrinter();
    target = std::make_unique<llvm::orc::JITTargetMachineBuilder>(
        orFail(llvm::orc::JITTargetMachineBuilder::detectHost()));
    target->getOptions().AllowFPOpFusion = llvm::FPOpFusion::Strict;
    target->setRelocationModel(llvm::Reloc::PIC_);
    target->setCodeModel(llvm::CodeModel::Small);
    llvm::orc::LLJITBuilder builder;
    builder.setJITTargetMachineBuilder(*target);
    builder.setPlatformSetUp(llvm::orc::setUpInactivePlatform);
    jit = orFail(builder.create());
    defineSymbols();
  }

  void defineSymbols() {
    llvm::orc::SymbolMap map;
    auto add = [&](const runtime::Symbol& symbol) {
      auto name = jit->getExecutionSession().intern(std::string(symbol.name));
      auto flags = llvm::JITSymbolFlags::Exported | llvm::JITSymbolFlags::Callable;
#if LLVM_VERSION_MAJOR >= 17
      map[name] = {llvm::orc::ExecutorAddr::fromPtr(symbol.address), flags};
#else
      map[name] = llvm::JITEvaluatedSymbol(reinterpret_cast<uint64_t>(symbol.address), flags);
#endif
    };
    for (const runtime::Symbol& symbol : runtime::symbols()) add(symbol);
    for (const runtime::Symbol& symbol : runtime::mathSymbols()) add(symbol);
    if (auto error = jit->getMainJITDylib().define(llvm::orc::absoluteSymbols(std::move(map))))
      fail(std::move(error));
  }
};

Engine& engine() {
  static Engine* instance = new Engine;
  return *instance;
}

llvm::FunctionPassManager cleanUp(bool large) {
  llvm::FunctionPassManager passes;
#if LLVM_VERSION_MAJOR >= 16
  passes.addPass(llvm::SROAPass(llvm::SROAOptions::ModifyCFG));
#endif
  passes.addPass(llvm::EarlyCSEPass(false));
  passes.addPass(llvm::SimplifyCFGPass());
  if (!large) passes.addPass(llvm::InstCombinePass());
  return passes;
}

void optimise(llvm::Module& module, llvm::TargetMachine& machine, bool large) {
  llvm::LoopAnalysisManager loops;
  llvm::FunctionAnalysisManager functions;
  llvm::CGSCCAnalysisManager graph;
  llvm::ModuleAnalysisManager modules;
  llvm::PassBuilder builder(&machine);
  builder.registerModuleAnalyses(modules);
  builder.registerCGSCCAnalyses(graph);
  builder.registerFunctionAnalyses(functions);
  builder.registerLoopAnalyses(loops);
  builder.crossRegisterProxies(loops, functions, graph, modules);
  bool many = false;
  for (llvm::Function& function : module) many |= !function.isDeclaration() && function.hasLocalLinkage();

  llvm::ModulePassManager passes;
  passes.addPass(llvm::createModuleToFunctionPassAdaptor(cleanUp(large)));
  if (many) {
    passes.addPass(llvm::ModuleInlinerPass(llvm::getInlineParams(225)));
    passes.addPass(llvm::GlobalDCEPass());
    passes.addPass(llvm::createModuleToFunctionPassAdaptor(cleanUp(large)));
  }
  if (large) {
    passes.run(module, modules);
    return;
  }
  llvm::FunctionPassManager late;
  late.addPass(llvm::createFunctionToLoopPassAdaptor(llvm::LICMPass(llvm::LICMOptions()), true));
  late.addPass(llvm::GVNPass());
  late.addPass(llvm::InstCombinePass());
  late.addPass(llvm::SimplifyCFGPass());
  late.addPass(llvm::DCEPass());
  passes.addPass(llvm::createModuleToFunctionPassAdaptor(std::move(late)));
  passes.run(module, modules);
}

}  // namespace

CodeSpace::CodeSpace() : library_(nullptr) {
  Engine& all = engine();
  auto library = all.jit->createJITDylib("program" + std::to_string(all.nextLibrary++));
  if (!library) fail(library.takeError());
  library_ = &*library;
  library_->addToLinkOrder(all.jit->getMainJITDylib());
}

CodeSpace::~CodeSpace() { llvm::consumeError(engine().jit->getExecutionSession().removeJITDylib(*library_)); }

void CodeSpace::add(llvm::Module& module) {
  bool large = module.getInstructionCount() > kLargeModule;
  llvm::orc::JITTargetMachineBuilder target = *engine().target;
  if (large) target.setCodeGenOptLevel(kNoOptimisation);
  std::unique_ptr<llvm::TargetMachine> machine = orFail(target.createTargetMachine());
  optimise(module, *machine, large);
  std::unique_ptr<llvm::MemoryBuffer> object = orFail(llvm::orc::SimpleCompiler(*machine)(module));
  if (auto error = engine().jit->addObjectFile(*library_, std::move(object))) fail(std::move(error));
}

void* CodeSpace::lookup(const std::string& name) {
  auto address = engine().jit->lookup(*library_, name);
  if (!address) fail(address.takeError());
  return reinterpret_cast<void*>(address->getValue());
}

HostFeatures hostFeatures() {
  HostFeatures result;
  result.f16c = engine().target->getFeatures().getString().find("+f16c") != std::string::npos;
  return result;
}

void prepareModule(llvm::Module& module) {
  module.setDataLayout(engine().jit->getDataLayout());
  module.setTargetTriple(engine().jit->getTargetTriple().str());
}

}  // namespace gpupool::softgpu::codegen
