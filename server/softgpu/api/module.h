#pragma once
// Loaded code (driver manual: Module Management, Library Management, Execution Control attributes).
//
// Code is one program with its globals on one device, kept alive by whoever may still run it. A module is
// code in a context; a library is code without one, instantiated as a module in each context that uses it.

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/softgpu/api/handles.h"
#include "server/softgpu/api/image.h"
#include "server/softgpu/api/memory.h"
#include "server/softgpu/engine.h"

namespace gpupool::softgpu::api {

struct Code {
  std::unique_ptr<Program> program;
  std::vector<AllocationPtr> globals;  // its own; not a library's managed variables
  int device = 0;
  ~Code();
  const GlobalInfo* global(std::string_view name) const;
  // Code that nobody has used becomes that of `target`, at the same addresses. False: no memory there.
  bool move(Device& target);
};

// What cuFuncSetAttribute and cuKernelSetAttribute set; shared by a kernel and its functions on one device.
struct FunctionAttributes {
  std::atomic<int> maxDynamicShared{-1};  // -1: as compiled
  std::atomic<int> carveout{-1};
  std::atomic<int> cluster[3] = {0, 0, 0};
  std::atomic<int> nonPortableCluster{0}, schedulingPolicy{0};
};

struct Module;

struct Function {
  using Handle = CUfunction;
  static constexpr Tag kTag = Tag::function;
  Handle handle = nullptr;
  ContextPtr context;
  std::shared_ptr<Code> code;
  const KernelInfo* info = nullptr;  // of code
  const Kernel* kernel = nullptr;
  CUmodule module = nullptr;
  CUkernel origin = nullptr;  // of a library
  std::shared_ptr<FunctionAttributes> attributes = std::make_shared<FunctionAttributes>();
  uint32_t dynamicSharedLimit() const;
};
using FunctionPtr = std::shared_ptr<Function>;

struct Module {
  using Handle = CUmodule;
  static constexpr Tag kTag = Tag::module;
  Handle handle = nullptr;
  ContextPtr context;
  std::shared_ptr<Code> code;
  CUlibrary library = nullptr;
  std::mutex mutex;
  std::map<std::string, FunctionPtr, std::less<>> functions;
  // The same handle every time; null if there is no such kernel.
  FunctionPtr function(std::string_view name);
};
using ModulePtr = std::shared_ptr<Module>;

// The JIT options a caller gave, and the log buffers among them.
class JitOptions {
 public:
  JitOptions(unsigned count, CUjit_option* options, void** values);
  void error(const std::string& text) {
    write(CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, text);
  }
  void info(const std::string& text) {
    write(CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, text);
  }

 private:
  void write(CUjit_option buffer, CUjit_option size, const std::string& text);
  unsigned count_;
  CUjit_option* options_;
  void** values_;
};

// Managed variables that exist already and must keep their address and content (a library's).
using ManagedVariables = std::map<std::string, AllocationPtr>;

CUresult loadCode(const CodeImage& image, Device& device, Context* owner, ManagedVariables* managed,
                  JitOptions& options, std::shared_ptr<Code>& code);
// Whether one text of several compiles by itself; what it leaves to the others may be missing.
CUresult checkPtx(const std::string& ptx, Device& device, JitOptions& options);
ModulePtr makeModule(const ContextPtr& context, std::shared_ptr<Code> code);
// Removes the module and its functions from the tables.
void dropModule(const ModulePtr& module);
CUresult functionAttribute(const KernelInfo& info, const FunctionAttributes& attributes,
                           CUfunction_attribute attribute, int* value);
CUresult setFunctionAttribute(const KernelInfo& info, FunctionAttributes& attributes,
                              CUfunction_attribute attribute, int value);
CUresult parameterInfo(const KernelInfo& info, size_t index, size_t* offset, size_t* bytes);

// Either kind of handle as a function in `context` (library.cpp).
CUresult resolveFunction(CUfunction handle, const ContextPtr& context, FunctionPtr& function);
// Libraries lose what they instantiated in a context that goes away.
void releaseLibraries(Context& context);

}  // namespace gpupool::softgpu::api
