// What the fake driver watches of code: launches, modules, graphs and textures.
#include <algorithm>
#include <cstring>

#include "schema/handles.h"
#include "server/fatbin/fatbin.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/worker/fake_functions.h"

namespace gpupool::fuzz {
namespace {

alignas(16) unsigned char managedBytes[4096];
constexpr uint64_t kGlobal = 0x4000'0000'0000;

// ---- launches
void readParameters(void** kernelParams, void** extra) {
  if (kernelParams != nullptr) broken("kernel parameters by pointer", 0, 0);
  if (extra == nullptr) return;
  const void* data = nullptr;
  size_t bytes = 0;
  for (void** p = extra; *p != CU_LAUNCH_PARAM_END; p += 2) {
    if (*p == CU_LAUNCH_PARAM_BUFFER_POINTER) data = p[1];
    if (*p == CU_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t*>(p[1]);
  }
  touch(data, bytes);
}
void readAttribute(CUlaunchAttributeID id, const CUlaunchAttributeValue& value) {
  if (id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT)
    state().needHandle(schema::rawHandle(value.programmaticEvent.event));
  if (id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
    state().needHandle(schema::rawHandle(value.launchCompletionEvent.event));
}
void readAttributes(const CUlaunchConfig& config) {
  for (unsigned i = 0; config.attrs != nullptr && i < config.numAttrs; ++i)
    readAttribute(config.attrs[i].id, config.attrs[i].value);
}
CUresult setNodeAttribute(CUgraphNode, CUkernelNodeAttrID id, const CUkernelNodeAttrValue* value) {
  if (value != nullptr) readAttribute(id, *value);
  return state().chance();
}
CUresult setStreamAttribute(CUstream, CUstreamAttrID id, const CUstreamAttrValue* value) {
  if (value != nullptr) readAttribute(id, *value);
  return state().chance();
}
CUresult launch(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                void** kernelParams, void** extra) {
  readParameters(kernelParams, extra);
  return state().chance();
}
CUresult launchEx(const CUlaunchConfig* config, CUfunction, void** kernelParams, void** extra) {
  readAttributes(*config);
  readParameters(kernelParams, extra);
  return state().chance();
}
CUresult configured(int* value, CUfunction, const CUlaunchConfig* config) {
  readAttributes(*config);
  *value = 1;
  return state().chance();
}
CUresult addKernelNode(CUgraphNode* node, CUgraph, const CUgraphNode* dependencies, size_t count,
                       const CUDA_KERNEL_NODE_PARAMS* params) {
  if (dependencies != nullptr) touch(dependencies, count * sizeof *dependencies);
  readParameters(params->kernelParams, params->extra);
  *node = schema::asHandle<CUgraphNode>(state().fresh());
  return state().chance();
}
CUresult setKernelNode(CUgraphNode, const CUDA_KERNEL_NODE_PARAMS* params) {
  readParameters(params->kernelParams, params->extra);
  return state().chance();
}
CUresult execSetKernelNode(CUgraphExec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS* params) {
  return setKernelNode(node, params);
}
// Three parameters: of 8 bytes, 4 and 16.
constexpr size_t kParameters[][2] = {{0, 8}, {8, 4}, {16, 16}};
CUresult parameterInfo(size_t index, size_t* offset, size_t* size) {
  if (index >= std::size(kParameters)) return CUDA_ERROR_INVALID_VALUE;
  *offset = kParameters[index][0];
  *size = kParameters[index][1];
  return CUDA_SUCCESS;
}
CUresult functionParameter(CUfunction, size_t index, size_t* offset, size_t* size) {
  return parameterInfo(index, offset, size);
}
CUresult kernelParameter(CUkernel, size_t index, size_t* offset, size_t* size) {
  return parameterInfo(index, offset, size);
}
CUresult getKernelNode(CUgraphNode, CUDA_KERNEL_NODE_PARAMS* params) {
  static unsigned char bytes[32];
  static void* pointers[] = {bytes, bytes + 8, bytes + 16};
  static size_t size = sizeof bytes;
  static void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, bytes, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                          CU_LAUNCH_PARAM_END};
  *params = {};
  params->func = schema::asHandle<CUfunction>(state().fresh());
  if (state().random() % 2 == 0) {
    params->kernelParams = pointers;
  } else {
    params->extra = extra;
  }
  return state().chance();
}

// ---- code: what a driver reads of it, and where its options have it write
void readCode(const void* image) {
  uint32_t magic;
  std::memcpy(&magic, image, sizeof magic);
  auto fatbinAt = [](const void* data) {
    fatbin::Header header;
    std::memcpy(&header, data, sizeof header);
    if (header.magic != fatbin::kMagic) broken("a wrapper around no fatbin", 0, 0);
    touch(data, header.headerBytes + header.bodyBytes);
  };
  if (magic == fatbin::kWrapperMagic) {
    fatbin::Wrapper wrapper;
    std::memcpy(&wrapper, image, sizeof wrapper);
    fatbinAt(wrapper.data);
    for (auto* part = wrapper.auxiliary; wrapper.version == 2 && *part != nullptr; ++part) fatbinAt(*part);
  } else if (magic == fatbin::kMagic) {
    fatbinAt(image);
  } else {
    touch(image, std::strlen(static_cast<const char*>(image)));
  }
}
void obey(const CUjit_option* options, void** values, unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    switch (options[i]) {
      case CU_JIT_INFO_LOG_BUFFER:
      case CU_JIT_ERROR_LOG_BUFFER:
        for (unsigned j = 0; j < count; ++j)
          if (options[j] == options[i] + 1)
            std::memset(values[i], 'x', static_cast<unsigned>(reinterpret_cast<uintptr_t>(values[j])));
        break;
      case CU_JIT_GLOBAL_SYMBOL_NAMES:
      case CU_JIT_GLOBAL_SYMBOL_ADDRESSES:
      case CU_JIT_REFERENCED_KERNEL_NAMES:
      case CU_JIT_REFERENCED_VARIABLE_NAMES:
        touch(*static_cast<void**>(values[i]), 1);
        break;
      default:
        touch(&values[i], sizeof values[i]);
    }
  }
}
CUresult moduleLoad(CUmodule* module, const void* image, unsigned count, CUjit_option* options,
                    void** values) {
  readCode(image);
  obey(options, values, count);
  *module = schema::asHandle<CUmodule>(state().fresh());
  return state().chance();
}
CUresult libraryLoad(CUlibrary* library, const void* code, CUjit_option* options, void** values,
                     unsigned count, CUlibraryOption*, void**, unsigned) {
  readCode(code);
  obey(options, values, count);
  *library = schema::asHandle<CUlibrary>(state().fresh());
  return state().chance();
}
CUresult linkCreate(unsigned count, CUjit_option* options, void** values, CUlinkState* link) {
  obey(options, values, count);
  *link = schema::asHandle<CUlinkState>(state().fresh());
  return state().chance();
}
CUresult linkAdd(CUlinkState, CUjitInputType, void* data, size_t bytes, const char* name, unsigned count,
                 CUjit_option* options, void** values) {
  touch(data, bytes);
  if (name != nullptr) touch(name, std::strlen(name));
  obey(options, values, count);
  return state().chance();
}
CUresult linkComplete(CUlinkState, void** image, size_t* bytes) {
  static unsigned char result[100];
  *image = result;
  *bytes = sizeof result;
  return state().chance();
}
CUresult global(CUdeviceptr* address, size_t* bytes, const char* name) {
  *address = kGlobal + std::strlen(name) * 4096;
  *bytes = 100;
  state().globals[*address] = *bytes;
  return state().chance();
}
CUresult moduleGlobal(CUdeviceptr* address, size_t* bytes, CUmodule, const char* name) {
  return global(address, bytes, name);
}
CUresult libraryGlobal(CUdeviceptr* address, size_t* bytes, CUlibrary, const char* name) {
  return global(address, bytes, name);
}
CUresult libraryManaged(CUdeviceptr* address, size_t* bytes, CUlibrary, const char* name) {
  touch(name, std::strlen(name));
  *address = reinterpret_cast<uint64_t>(managedBytes);
  *bytes = sizeof managedBytes;
  state().managed[*address] = *bytes;
  return state().chance();
}
CUresult count3(unsigned* count, CUmodule) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = 3;
  return CUDA_SUCCESS;
}
CUresult enumerateFunctions(CUfunction* functions, unsigned count, CUmodule) {
  for (unsigned i = 0; i < count; ++i) functions[i] = schema::asHandle<CUfunction>(state().fresh());
  return CUDA_SUCCESS;
}
CUresult kernelCount(unsigned* count, CUlibrary) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *count = 3;
  return CUDA_SUCCESS;
}
CUresult enumerateKernels(CUkernel* kernels, unsigned count, CUlibrary) {
  for (unsigned i = 0; i < count; ++i) kernels[i] = schema::asHandle<CUkernel>(state().fresh());
  return CUDA_SUCCESS;
}
CUresult functionName(const char** name, CUfunction) {
  *name = "a_function_of_some_length";
  return state().chance();
}
CUresult kernelName(const char** name, CUkernel) {
  *name = "a_kernel";
  return state().chance();
}

// ---- graphs
CUresult graphNodes(CUgraph, CUgraphNode* nodes, size_t* count) {
  if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const size_t have = state().random() % 3;
  for (size_t i = 0; nodes != nullptr && i < *count; ++i)
    nodes[i] = i < have ? schema::asHandle<CUgraphNode>(state().fresh()) : nullptr;
  *count = nodes == nullptr ? have : std::min(have, *count);
  return CUDA_SUCCESS;
}
CUresult nodeType(CUgraphNode, CUgraphNodeType* type) {
  if (type == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const bool graph = state().random() % 4 == 0 && ++state().children < 8;
  *type = graph ? CU_GRAPH_NODE_TYPE_GRAPH : CU_GRAPH_NODE_TYPE_KERNEL;
  return CUDA_SUCCESS;
}
CUresult captureInfo(CUstream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                     const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
  static CUgraphNode nodes[3];
  static CUgraphEdgeData data[3];
  for (CUgraphNode& node : nodes) node = schema::asHandle<CUgraphNode>(state().fresh());
  if (status == nullptr || id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  *id = 7;
  if (graph != nullptr) *graph = schema::asHandle<CUgraph>(state().fresh());
  if (dependencies != nullptr) *dependencies = nodes;
  if (edges != nullptr) *edges = state().random() % 2 == 0 ? data : nullptr;
  if (count != nullptr) *count = 3;
  return state().chance();
}

// ---- textures
CUresult createTexture(CUtexObject* object, const CUDA_RESOURCE_DESC* resource, const CUDA_TEXTURE_DESC*,
                       const CUDA_RESOURCE_VIEW_DESC*) {
  if (resource == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (resource->resType == CU_RESOURCE_TYPE_LINEAR)
    state().needDevice(resource->res.linear.devPtr, resource->res.linear.sizeInBytes);
  if (object != nullptr) *object = 1;
  return state().chance();
}

}  // namespace

std::span<const Function> codeFunctions() {
  static const Function functions[] = {
      FUNCTION(cuLaunchKernel, launch),
      FUNCTION(cuLaunchKernelEx, launchEx),
      FUNCTION(cuOccupancyMaxActiveClusters, configured),
      FUNCTION(cuOccupancyMaxPotentialClusterSize, configured),
      FUNCTION(cuGraphAddKernelNode_v2, addKernelNode),
      FUNCTION(cuGraphKernelNodeSetParams_v2, setKernelNode),
      FUNCTION(cuGraphExecKernelNodeSetParams_v2, execSetKernelNode),
      FUNCTION(cuGraphKernelNodeGetParams_v2, getKernelNode),
      FUNCTION(cuFuncGetParamInfo, functionParameter),
      FUNCTION(cuKernelGetParamInfo, kernelParameter),
      FUNCTION(cuGraphGetNodes, graphNodes),
      FUNCTION(cuGraphNodeGetType, nodeType),
      FUNCTION(cuModuleLoadDataEx, moduleLoad),
      FUNCTION(cuLibraryLoadData, libraryLoad),
      FUNCTION(cuLinkCreate_v2, linkCreate),
      FUNCTION(cuLinkAddData_v2, linkAdd),
      FUNCTION(cuLinkComplete, linkComplete),
      FUNCTION(cuModuleGetGlobal_v2, moduleGlobal),
      FUNCTION(cuLibraryGetGlobal, libraryGlobal),
      FUNCTION(cuLibraryGetManaged, libraryManaged),
      FUNCTION(cuModuleGetFunctionCount, count3),
      FUNCTION(cuModuleEnumerateFunctions, enumerateFunctions),
      FUNCTION(cuLibraryGetKernelCount, kernelCount),
      FUNCTION(cuLibraryEnumerateKernels, enumerateKernels),
      FUNCTION(cuFuncGetName, functionName),
      FUNCTION(cuKernelGetName, kernelName),
      FUNCTION(cuStreamGetCaptureInfo_v3, captureInfo),
      FUNCTION(cuTexObjectCreate, createTexture),
      FUNCTION(cuGraphKernelNodeSetAttribute, setNodeAttribute),
      FUNCTION(cuStreamSetAttribute, setStreamAttribute),
  };
  return functions;
}

}  // namespace gpupool::fuzz
