// Code, functions and their attributes (module.h).
#include <cstring>

#include "server/softgpu/api/module.h"

namespace gpupool::softgpu::api {
namespace {

CUresult compileError(CompileError::Kind kind) {
  switch (kind) {
    case CompileError::Kind::syntax:
    case CompileError::Kind::unsupported:
    case CompileError::Kind::unresolved:
      break;
  }
  return CUDA_ERROR_INVALID_PTX;
}

}  // namespace

Code::~Code() {
  program.reset();
  for (auto& global : globals) {
    if (addresses().take(global->base)) freeAllocation(*global);
  }
}

const GlobalInfo* Code::global(std::string_view name) const {
  for (const GlobalInfo& candidate : program->globals()) {
    if (candidate.name == name) return &candidate;
  }
  return nullptr;
}

uint32_t Function::dynamicSharedLimit() const {
  int set = attributes->maxDynamicShared;
  if (set >= 0) return uint32_t(set);
  return info->staticSharedBytes < kSharedPerBlock ? kSharedPerBlock - info->staticSharedBytes : 0;
}

JitOptions::JitOptions(unsigned count, CUjit_option* options, void** values)
    : count_(options && values ? count : 0), options_(options), values_(values) {
  error({});
  info({});
}

void JitOptions::write(CUjit_option buffer, CUjit_option size, const std::string& text) {
  char* target = nullptr;
  size_t room = 0;
  void** written = nullptr;
  for (unsigned i = 0; i < count_; ++i) {
    if (options_[i] == buffer) target = static_cast<char*>(values_[i]);
    if (options_[i] == size) {
      written = &values_[i];
      room = size_t(reinterpret_cast<uintptr_t>(values_[i]));
    }
  }
  // The size says how large the buffer is until the log is written, and then how much was written.
  if (!target || !written || !room || text.empty()) return;
  size_t bytes = std::min(room - 1, text.size());
  std::memcpy(target, text.data(), bytes);
  target[bytes] = 0;
  *written = reinterpret_cast<void*>(bytes + 1);
}

bool Code::move(Device& target) {
  if (device == target.ordinal()) return true;
  uint64_t bytes = 0;
  for (const AllocationPtr& one : globals) bytes += VaHeap::rounded(one->size);
  if (!target.reserve(bytes)) return false;
  devices()[size_t(device)]->release(bytes);
  for (const AllocationPtr& one : globals) one->device = target.ordinal();
  device = target.ordinal();
  return true;
}

CUresult loadCode(const CodeImage& image, Device& device, Context* owner, ManagedVariables* managed,
                  JitOptions& options, std::shared_ptr<Code>& out) {
  auto code = std::make_shared<Code>();
  code->device = device.ordinal();
  std::vector<std::string_view> sources(image.ptx.begin(), image.ptx.end());
  bool outOfMemory = false;
  std::vector<std::pair<AllocationPtr, std::string>> kept;
  PlaceGlobal place = [&](const GlobalInfo& global) -> uint64_t {
    uint64_t bytes = std::max<uint64_t>(global.size, 1);
    if (managed && global.managed) {
      auto& variable = (*managed)[global.name];
      if (variable && variable->size == bytes) {
        kept.emplace_back(variable, std::string(reinterpret_cast<const char*>(variable->base), bytes));
        return variable->base;
      }
      variable = allocateDevice(device, bytes, global.alignment, Allocation::Kind::global, nullptr);
      if (!variable) return outOfMemory = true, 0;
      std::memset(reinterpret_cast<void*>(variable->base), 0, bytes);
      return variable->base;
    }
    auto allocation = allocateDevice(device, bytes, global.alignment, Allocation::Kind::global, owner);
    if (!allocation) return outOfMemory = true, 0;
    // Its life is the code's, which may be a library's and outlive the context.
    allocation->contextId = 0;
    std::memset(reinterpret_cast<void*>(allocation->base), 0, bytes);
    code->globals.push_back(allocation);
    return allocation->base;
  };
  CompileError error;
  code->program = load(sources, place, error);
  for (auto& [variable, bytes] : kept) {
    std::memcpy(reinterpret_cast<void*>(variable->base), bytes.data(), bytes.size());
  }
  if (!code->program) {
    if (outOfMemory) return CUDA_ERROR_OUT_OF_MEMORY;
    options.error(error.text);
    return compileError(error.kind);
  }
  out = std::move(code);
  return CUDA_SUCCESS;
}

CUresult checkPtx(const std::string& ptx, Device& device, JitOptions& options) {
  std::vector<AllocationPtr> globals;
  PlaceGlobal place = [&](const GlobalInfo& global) -> uint64_t {
    auto bytes = std::max<uint64_t>(global.size, 1);
    globals.push_back(allocateDevice(device, bytes, global.alignment, Allocation::Kind::global, nullptr));
    return globals.back() ? globals.back()->base : 0;
  };
  CompileError error;
  std::string_view source = ptx;
  auto program = load(std::span(&source, 1), place, error);
  bool usable = program || error.kind == CompileError::Kind::unresolved;
  program.reset();
  for (auto& global : globals) {
    if (global && addresses().take(global->base)) freeAllocation(*global);
  }
  if (!usable) options.error(error.text);
  return usable ? CUDA_SUCCESS : CUDA_ERROR_INVALID_PTX;
}

FunctionPtr Module::function(std::string_view name) {
  std::lock_guard lock(mutex);
  if (auto known = functions.find(name); known != functions.end()) return known->second;
  const Kernel* kernel = code->program->kernel(name);
  if (!kernel) return nullptr;
  auto made = std::make_shared<Function>();
  for (const KernelInfo& info : code->program->kernels()) {
    if (info.name == name) made->info = &info;
  }
  if (!made->info) return nullptr;
  made->context = context;
  made->code = code;
  made->kernel = kernel;
  made->module = handle;
  table<Function>().add(made);
  functions.emplace(std::string(name), made);
  return made;
}

ModulePtr makeModule(const ContextPtr& context, std::shared_ptr<Code> code) {
  auto module = std::make_shared<Module>();
  module->context = context;
  module->code = std::move(code);
  table<Module>().add(module);
  return module;
}

void dropModule(const ModulePtr& module) {
  table<Module>().take(module->handle);
  std::lock_guard lock(module->mutex);
  for (auto& [name, function] : module->functions) table<Function>().take(function->handle);
  module->functions.clear();
}

void releaseModules(Context& context) {
  for (auto& module : table<Module>().takeIf([&](const Module& m) { return m.context.get() == &context; })) {
    dropModule(module);
  }
  releaseLibraries(context);
}

CUresult functionAttribute(const KernelInfo& info, const FunctionAttributes& attributes,
                           CUfunction_attribute attribute, int* value) {
  if (!value) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = int(info.maxThreads);
      break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = int(info.staticSharedBytes);
      break;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
      *value = int(info.constantBytes);
      break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
      *value = int(info.localBytes);
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = int(info.registers);
      break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      *value = int(info.ptxVersion);
      break;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = int(kComputeCapability);
      break;
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
      *value = 0;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: {
      int set = attributes.maxDynamicShared;
      *value = set >= 0 ? set : int(kSharedPerBlock - std::min(kSharedPerBlock, info.staticSharedBytes));
      break;
    }
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      *value = attributes.carveout;
      break;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
      *value = 0;
      break;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
      *value = attributes.cluster[0];
      break;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
      *value = attributes.cluster[1];
      break;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
      *value = attributes.cluster[2];
      break;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      *value = attributes.nonPortableCluster;
      break;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      *value = attributes.schedulingPolicy;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult setFunctionAttribute(const KernelInfo& info, FunctionAttributes& attributes,
                              CUfunction_attribute attribute, int value) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      if (value < 0 || uint64_t(value) + info.staticSharedBytes > kSharedPerBlockOptin) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      attributes.maxDynamicShared = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      if (value < -1 || value > 100) return CUDA_ERROR_INVALID_VALUE;
      attributes.carveout = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
      if (value < 0) return CUDA_ERROR_INVALID_VALUE;
      attributes.cluster[attribute - CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH] = value;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      attributes.nonPortableCluster = value != 0;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      attributes.schedulingPolicy = value;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult parameterInfo(const KernelInfo& info, size_t index, size_t* offset, size_t* bytes) {
  if (!offset || index >= info.parameters.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = info.parameters[index].offset;
  if (bytes) *bytes = info.parameters[index].size;
  return CUDA_SUCCESS;
}

}  // namespace gpupool::softgpu::api
