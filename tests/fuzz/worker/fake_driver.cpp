#include "tests/fuzz/worker/fake_driver.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "schema/frame.h"
#include "schema/handles.h"
#include "server/fatbin/fatbin.h"
#include "tests/fuzz/input.h"

namespace gpupool::fuzz {

namespace {

[[noreturn]] void broken(const char* what, uint64_t address, size_t bytes) {
  std::fprintf(stderr, "the worker let the driver have %s: %llx + %zx\n", what,
               static_cast<unsigned long long>(address), bytes);
  std::abort();
}

bool within(const std::map<uint64_t, size_t>& ranges, uint64_t address, size_t bytes) {
  for (auto [start, size] : ranges)
    if (address >= start && address - start <= size && bytes <= size - (address - start)) return true;
  return false;
}

alignas(16) unsigned char managedBytes[4096];
constexpr uint64_t kGlobal = 0x4000'0000'0000;

}  // namespace

void DriverState::reset(uint64_t seed) {
  windows.clear();
  host.clear();
  managed.clear();
  globals.clear();
  own.clear();
  words.clear();
  current = nullptr;
  children = 0;
  seed_ = seed * 2 + 1;
  handles_ = 0;
}

uint64_t DriverState::random() {
  seed_ ^= seed_ << 13;
  seed_ ^= seed_ >> 7;
  seed_ ^= seed_ << 17;
  return seed_;
}

CUresult DriverState::chance() {
  switch (random() % 32) {
    case 0:
      return CUDA_ERROR_INVALID_VALUE;
    case 1:
      return random() % 8 == 0 ? CUDA_ERROR_ASSERT : CUDA_ERROR_OUT_OF_MEMORY;
    default:
      return CUDA_SUCCESS;
  }
}

bool DriverState::isWord(uint64_t address) const { return within(words, address, 8); }
bool DriverState::isHost(uint64_t address, size_t bytes) const {
  return within(host, address, bytes) || within(managed, address, bytes);
}
void DriverState::needHost(uint64_t address, size_t bytes) const {
  if (!isHost(address, bytes)) broken("host memory that is not the session's", address, bytes);
}
void DriverState::needDevice(uint64_t address, size_t bytes) const {
  if (!within(windows, address, bytes) && !within(globals, address, bytes) && !within(own, address, bytes) &&
      !isHost(address, bytes))
    broken("memory that is not the session's", address, bytes);
}

void DriverState::needHandle(uint64_t value) const {
  // 1 and 2: the special streams.
  if (value > 2 && (value <= kHandles || value > kHandles + 64 * handles_ || value % 64 != 0))
    broken("a handle that it never made", value, 0);
}

DriverState& driverState() {
  static auto* state = new DriverState;
  return *state;
}

namespace {

DriverState& state() { return driverState(); }

// ---- any function: outputs are handles and nothing else, inputs can be read
template <class T>
void argument(T& value) {
  using P = std::remove_pointer_t<T>;
  if constexpr (std::is_same_v<T, const char*>) {
    if (value != nullptr) touch(value, std::strlen(value));
  } else if constexpr (schema::isHandle<T>) {
    state().needHandle(schema::rawHandle(value));
  } else if constexpr (std::is_pointer_v<T> && !schema::isHandle<T> && !std::is_void_v<P> &&
                       !std::is_function_v<P>) {
    if (value == nullptr) return;
    if constexpr (std::is_const_v<P> && sizeof(T) != 0) {
      if constexpr (requires { sizeof(P); }) touch(value, sizeof(P));
    } else if constexpr (schema::isHandle<P>) {
      *value = schema::asHandle<P>(state().fresh());
    }
  }
}

template <class F>
struct Any;
template <class... A>
struct Any<CUresult(A...)> {
  static CUresult call(A... arguments) {
    if (CUresult status = state().chance(); status != CUDA_SUCCESS) return status;
    (argument(arguments), ...);
    return CUDA_SUCCESS;
  }
};

// ---- what the functions with something to watch do instead
CUresult getErrorText(CUresult, const char** text) {
  *text = "an error";
  return CUDA_SUCCESS;
}
// This driver has none.
CUresult exportTable(const void**, const CUuuid*) { return CUDA_ERROR_NOT_FOUND; }
CUresult deviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult deviceAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
  return CUDA_SUCCESS;
}
CUresult totalMemory(size_t* bytes, CUdevice) {
  *bytes = size_t{1} << 33;
  return CUDA_SUCCESS;
}
CUresult canAccess(int* can, CUdevice, CUdevice) {
  *can = 1;
  return CUDA_SUCCESS;
}
CUresult setCurrent(CUcontext context) {
  state().current = context;
  return CUDA_SUCCESS;
}
CUresult getCurrent(CUcontext* context) {
  *context = state().current;
  return CUDA_SUCCESS;
}
CUresult contextDevice(CUdevice* device) {
  *device = static_cast<CUdevice>(state().random() % 2);
  return CUDA_SUCCESS;
}
CUresult addressReserve(CUdeviceptr* got, size_t bytes, size_t, CUdeviceptr wanted, unsigned long long) {
  state().windows[wanted] = bytes;
  *got = wanted;
  return CUDA_SUCCESS;
}
CUresult addressFree(CUdeviceptr address, size_t) {
  state().windows.erase(address);
  return CUDA_SUCCESS;
}
CUresult memMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  if (!within(state().windows, address, bytes)) broken("an extent outside the windows", address, bytes);
  return state().chance();
}
CUresult hostRegister(void* data, size_t bytes, unsigned) {
  const auto address = reinterpret_cast<uint64_t>(data);
  // Each context has a view of the words; the client's own memory is never as large (LittleHostMemory).
  (bytes == schema::kWordsBytes ? state().words : state().host)[address] = bytes;
  return CUDA_SUCCESS;
}
CUresult hostUnregister(void* data) {
  state().host.erase(reinterpret_cast<uint64_t>(data));
  state().words.erase(reinterpret_cast<uint64_t>(data));
  return CUDA_SUCCESS;
}
CUresult hostPointer(CUdeviceptr* device, void* data, unsigned) {
  *device = reinterpret_cast<uint64_t>(data);
  return CUDA_SUCCESS;
}

// ---- copies
bool noContext() { return state().current == nullptr; }  // of the thread, or of the stream: there is none

CUresult copyIn(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  state().needDevice(to, bytes);
  state().needHost(reinterpret_cast<uint64_t>(from), bytes);
  touch(from, std::min<size_t>(bytes, 64));
  return state().chance();
}
CUresult copyOut(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  state().needDevice(from, bytes);
  state().needHost(reinterpret_cast<uint64_t>(to), bytes);
  std::memset(to, 0x5a, std::min<size_t>(bytes, 64));
  return state().chance();
}
CUresult copyOn(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  state().needDevice(to, bytes);
  state().needDevice(from, bytes);
  return state().chance();
}
CUresult copyPeer(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream stream) {
  return copyOn(to, from, bytes, stream);
}
template <class Element>
CUresult set(CUdeviceptr to, Element, size_t count, CUstream) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  if (count > SIZE_MAX / sizeof(Element)) broken("a memset that overflows", to, count);
  state().needDevice(to, count * sizeof(Element));
  return state().chance();
}

// Every row of a box that a driver would touch; of many, some. As the driver counts, addresses are 64 bits.
template <class Need>
void eachRow(uint64_t base, size_t pitch, size_t height, size_t x, size_t y, size_t z, size_t width,
             size_t rows, size_t depth, Need need) {
  if (width == 0 || rows == 0 || depth == 0) return;
  const size_t slices[] = {0, 1, depth / 2, depth - 1}, lines[] = {0, 1, rows / 2, rows - 1};
  for (size_t slice : slices)
    for (size_t line : lines)
      if (slice < depth && line < rows) need(base + ((z + slice) * height + y + line) * pitch + x, width);
}
CUresult set2D(CUdeviceptr to, size_t pitch, size_t element, size_t width, size_t height) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  // What the driver itself refuses: rows that overlap.
  if (height > 1 && pitch < width * element) return CUDA_ERROR_INVALID_VALUE;
  if (width > SIZE_MAX / element) return CUDA_ERROR_INVALID_VALUE;
  eachRow(to, pitch, 1, 0, 0, 0, width * element, 1, height,
          [](uint64_t at, size_t bytes) { state().needDevice(at, bytes); });
  return state().chance();
}
template <class Element>
CUresult setRows(CUdeviceptr to, size_t pitch, Element, size_t width, size_t height, CUstream) {
  return set2D(to, pitch, sizeof(Element), width, height);
}
CUresult box(const CUDA_MEMCPY3D_v2& copy) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  auto side = [&](CUmemorytype type, const void* host, CUdeviceptr device, size_t x, size_t y, size_t z,
                  size_t pitch, size_t height) {
    if (type == CU_MEMORYTYPE_ARRAY) return true;
    if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED)
      return false;
    if (pitch == 0) pitch = copy.WidthInBytes + x;
    if (height == 0) height = copy.Height + y;
    if (pitch < copy.WidthInBytes || height < copy.Height) return false;  // the driver's own check
    const bool atHost = type == CU_MEMORYTYPE_HOST;
    eachRow(atHost ? reinterpret_cast<uint64_t>(host) : device, pitch, height, x, y, z, copy.WidthInBytes,
            copy.Height, copy.Depth, [&](uint64_t at, size_t bytes) {
              atHost ? state().needHost(at, bytes) : state().needDevice(at, bytes);
            });
    return true;
  };
  bool good = side(copy.srcMemoryType, copy.srcHost, copy.srcDevice, copy.srcXInBytes, copy.srcY, copy.srcZ,
                   copy.srcPitch, copy.srcHeight);
  good = good && side(copy.dstMemoryType, copy.dstHost, copy.dstDevice, copy.dstXInBytes, copy.dstY,
                      copy.dstZ, copy.dstPitch, copy.dstHeight);
  return good ? state().chance() : CUDA_ERROR_INVALID_VALUE;
}
CUresult copyBox(const CUDA_MEMCPY3D_v2* copy, CUstream) {
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : box(*copy);
}
CUresult addCopyNode(CUgraphNode* node, CUgraph, const CUgraphNode* dependencies, size_t count,
                     const CUDA_MEMCPY3D* copy, CUcontext) {
  if (dependencies != nullptr) touch(dependencies, count * sizeof *dependencies);
  *node = schema::asHandle<CUgraphNode>(state().fresh());
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : box(*copy);
}
CUresult setCopyNode(CUgraphNode, const CUDA_MEMCPY3D* copy) {
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : box(*copy);
}
CUresult execSetCopyNode(CUgraphExec, CUgraphNode, const CUDA_MEMCPY3D* copy, CUcontext) {
  return copy == nullptr ? CUDA_ERROR_INVALID_VALUE : box(*copy);
}
CUresult setNode(const CUDA_MEMSET_NODE_PARAMS* params) {
  if (params == nullptr || (params->elementSize != 1 && params->elementSize != 2 && params->elementSize != 4))
    return CUDA_ERROR_INVALID_VALUE;
  return set2D(params->dst, params->pitch, params->elementSize, params->width, params->height);
}
CUresult addSetNode(CUgraphNode* node, CUgraph, const CUgraphNode* dependencies, size_t count,
                    const CUDA_MEMSET_NODE_PARAMS* params, CUcontext) {
  if (dependencies != nullptr) touch(dependencies, count * sizeof *dependencies);
  *node = schema::asHandle<CUgraphNode>(state().fresh());
  return setNode(params);
}
CUresult setSetNode(CUgraphNode, const CUDA_MEMSET_NODE_PARAMS* params) { return setNode(params); }
CUresult execSetSetNode(CUgraphExec, CUgraphNode, const CUDA_MEMSET_NODE_PARAMS* params, CUcontext) {
  return setNode(params);
}

// ---- what the worker has for itself: no call of a client comes here
constexpr CUdeviceptr kOwnMemory = 0x7f00'0000'0000;
CUresult memAlloc(CUdeviceptr* address, size_t bytes) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  *address = kOwnMemory;
  state().own[kOwnMemory] = bytes;
  return state().chance();
}
CUresult memFree(CUdeviceptr) { return CUDA_SUCCESS; }

// ---- words
CUresult write64(CUstream, CUdeviceptr address, cuuint64_t value, unsigned) {
  if (state().isWord(address)) {
    std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
    return CUDA_SUCCESS;
  }
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  state().needDevice(address, 8);
  return state().chance();
}
CUresult write32(CUstream, CUdeviceptr address, cuuint32_t, unsigned) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  state().needDevice(address, 4);
  return state().chance();
}
CUresult wait64(CUstream, CUdeviceptr address, cuuint64_t, unsigned) {
  if (noContext()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!state().isWord(address)) state().needDevice(address, 8);
  return state().chance();
}

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

#define FUNCTION(name, with) {#name, reinterpret_cast<void*>(static_cast<decltype(&::name)>(&with))}

const std::unordered_map<std::string_view, void*>& table() {
  static const auto* functions = [] {
    auto* all = new std::unordered_map<std::string_view, void*>{
#define NAME(name) {#name, reinterpret_cast<void*>(&Any<decltype(::name)>::call)},
#include "schema/names.def"
#undef NAME
    };
    const std::pair<std::string_view, void*> special[] = {
        FUNCTION(cuGetErrorName, getErrorText),
        FUNCTION(cuGetErrorString, getErrorText),
        FUNCTION(cuGetExportTable, exportTable),
        FUNCTION(cuDeviceGet, deviceGet),
        FUNCTION(cuDeviceGetAttribute, deviceAttribute),
        FUNCTION(cuDeviceTotalMem_v2, totalMemory),
        FUNCTION(cuDeviceCanAccessPeer, canAccess),
        FUNCTION(cuCtxSetCurrent, setCurrent),
        FUNCTION(cuCtxGetCurrent, getCurrent),
        FUNCTION(cuCtxGetDevice, contextDevice),
        FUNCTION(cuMemAddressReserve, addressReserve),
        FUNCTION(cuMemAddressFree, addressFree),
        FUNCTION(cuMemMap, memMap),
        FUNCTION(cuMemAlloc_v2, memAlloc),
        FUNCTION(cuMemFree_v2, memFree),
        FUNCTION(cuMemHostRegister_v2, hostRegister),
        FUNCTION(cuMemHostUnregister, hostUnregister),
        FUNCTION(cuMemHostGetDevicePointer_v2, hostPointer),
        FUNCTION(cuMemcpyHtoDAsync_v2, copyIn),
        FUNCTION(cuMemcpyDtoHAsync_v2, copyOut),
        FUNCTION(cuMemcpyDtoDAsync_v2, copyOn),
        FUNCTION(cuMemcpyPeerAsync, copyPeer),
        FUNCTION(cuMemcpy3DAsync_v2, copyBox),
        FUNCTION(cuMemsetD8Async, set<unsigned char>),
        FUNCTION(cuMemsetD16Async, set<unsigned short>),
        FUNCTION(cuMemsetD32Async, set<unsigned>),
        FUNCTION(cuMemsetD2D8Async, setRows<unsigned char>),
        FUNCTION(cuMemsetD2D16Async, setRows<unsigned short>),
        FUNCTION(cuMemsetD2D32Async, setRows<unsigned>),
        FUNCTION(cuStreamWriteValue64_v2, write64),
        FUNCTION(cuStreamWriteValue32_v2, write32),
        FUNCTION(cuStreamWaitValue64_v2, wait64),
        FUNCTION(cuStreamWaitValue32_v2, write32),
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
        FUNCTION(cuGraphAddMemcpyNode, addCopyNode),
        FUNCTION(cuGraphMemcpyNodeSetParams, setCopyNode),
        FUNCTION(cuGraphExecMemcpyNodeSetParams, execSetCopyNode),
        FUNCTION(cuGraphAddMemsetNode, addSetNode),
        FUNCTION(cuGraphMemsetNodeSetParams, setSetNode),
        FUNCTION(cuGraphExecMemsetNodeSetParams, execSetSetNode),
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
    for (auto& [name, function] : special) (*all)[name] = function;
    return all;
  }();
  return *functions;
}

}  // namespace

const server::Driver& fakeDriver() {
  static const server::Driver* driver = server::Driver::load().release();
  return *driver;
}

void* functionOf(const char* name) {
  auto found = table().find(name);
  return found == table().end() ? nullptr : found->second;
}

}  // namespace gpupool::fuzz

// In place of server/driver.cpp.
namespace gpupool::server {

std::unique_ptr<const Driver> Driver::load(const std::string&) {
  std::unique_ptr<Driver> driver(new Driver);
#define NAME(name) driver->name = reinterpret_cast<decltype(&::name)>(fuzz::functionOf(#name));
#include "schema/names.def"
#undef NAME
  return driver;
}

std::string Driver::describe(CUresult result) const { return "error " + std::to_string(result); }

}  // namespace gpupool::server
