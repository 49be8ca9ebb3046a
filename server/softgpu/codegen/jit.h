#pragma once
// Translated modules -> machine code, by LLVM's ORC.

#include <llvm/IR/Module.h>

#include <string>

#include "server/softgpu/codegen/translator.h"

namespace llvm::orc {
class JITDylib;
}

namespace gpupool::softgpu::codegen {

// The code of one program; freed with it. Any thread.
class CodeSpace {
 public:
  CodeSpace();
  ~CodeSpace();
  CodeSpace(const CodeSpace&) = delete;

  // Optimises and compiles a module. Its external functions can be looked up then. Throws Problem.
  void add(llvm::Module& module);
  // Links what is needed for it. Throws Problem.
  void* lookup(const std::string& name);

 private:
  llvm::orc::JITDylib* library_;
};

HostFeatures hostFeatures();
// Sets the module's target and layout.
void prepareModule(llvm::Module& module);

}  // namespace gpupool::softgpu::codegen
