// Launches and occupancy. The first launch of each shape is awaited, so that synchronous errors come where
// CUDA gives them; once the driver accepted a shape, its repeats are posted.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "client/accepted_settings.h"
#include "client/entry.h"
#include "client/functions.h"
#include "client/memory/host.h"
#include "client/memory/registered.h"
#include "client/streams.h"

namespace gpupool::client {
namespace {

using schema::LaunchShape;

// How much of an attribute's value means something: programs leave the rest as the stack had it.
size_t meaningfulBytes(CUlaunchAttributeID id) {
  const CUlaunchAttributeValue* value = nullptr;
  switch (id) {
    case CU_LAUNCH_ATTRIBUTE_IGNORE:
      return 0;
    case CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW:
      return offsetof(CUaccessPolicyWindow, missProp) + sizeof value->accessPolicyWindow.missProp;
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return sizeof(int);
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      return sizeof value->clusterDim;
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
      return sizeof value->preferredClusterDim;
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
      return sizeof value->programmaticEvent;
    case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
      return offsetof(CUlaunchAttributeValue, launchCompletionEvent.flags) + sizeof(int);
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      return sizeof value->memSyncDomainMap;
    default:
      return sizeof *value;
  }
}

// What the driver judges synchronously: block, cluster, dynamic shared memory, attributes; and the grid's
// bounds, which are checked here. Cooperative grids are judged by size too.
uint64_t shapeKey(const LaunchShape& shape, const CUlaunchAttribute* attributes, unsigned count) {
  uint64_t key = mix(0x51, shape.block[0] | uint64_t{shape.block[1]} << 32);
  key = mix(key, shape.block[2] | uint64_t{shape.sharedBytes} << 32);
  key = mix(key, shape.cooperative);
  bool sized = shape.cooperative != 0;
  for (unsigned i = 0; i < count; ++i) {
    key = mix(key, attributes[i].id);
    uint64_t words[sizeof(CUlaunchAttributeValue) / 8] = {};
    std::memcpy(words, &attributes[i].value, meaningfulBytes(attributes[i].id));
    if (attributes[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT ||
        attributes[i].id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
      words[0] = 0;  // any event will do
    for (uint64_t word : words) key = mix(key, word);
    sized = sized || attributes[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION ||
            attributes[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  }
  if (sized)
    for (uint32_t g : shape.grid) key = mix(key, g);
  return key;
}

// In one version of one context, through one handle: a function of another context is refused there.
uint64_t launchKey(uint64_t shape, uint64_t version, uint64_t handle) {
  return mix(mix(shape, version), handle) | 1;
}

CUresult gridFits(const LaunchShape& shape, CUdevice device) {
  const schema::DeviceProperties* properties = propertiesOf(device);
  for (int i = 0; i < 3; ++i) {
    int most = properties->attributes[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i];
    if (shape.grid[i] == 0 || shape.block[i] == 0 ||
        (most > 0 && shape.grid[i] > static_cast<uint32_t>(most)))
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

// A kernel that is handed a pointer into memory that client and worker do not share will address it: it is
// mirrored from now on. Pinned memory over a network, and registered memory; on one host it is noted, for the
// session may go to another one.
void noticeArenaPointers(const std::byte* parameters, size_t bytes) {
  const bool told = registeredMemory().anyTold();
  const schema::AddressSpace& space = Session::get().space();
  for (size_t at = 0; at + 8 <= bytes; at += 8) {
    uint64_t word;
    std::memcpy(&word, parameters + at, 8);
    if (word - space.hostBase >= space.hostBytes) continue;
    if (told) registeredMemory().noticeAddress(word);
    mirrorArena(word);
  }
}

CUresult launch(CUfunction handle, LaunchShape shape, CUstream streamHandle, void** kernelParams,
                void** extra, const CUlaunchAttribute* attributes, unsigned attributeCount) {
  StreamRef ref;
  CUresult status = resolveStream(streamHandle, ref);
  if (status != CUDA_SUCCESS) return status;
  Function* function = findFunction(handle);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Context* context = contexts().find(ref.context);
  if (kernelParams != nullptr && extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
  status = describe(handle, *function, context);
  if (status == CUDA_SUCCESS) status = gridFits(shape, context->device);
  if (status != CUDA_SUCCESS) return status;
  KernelState& state = *function->state;

  std::byte packed[4096];
  std::vector<std::byte> large;
  const std::byte* parameters = packed;
  size_t bytes = state.packer().bytes();
  if (extra != nullptr) {
    status = parseLaunchExtra(extra, &parameters, &bytes);
  } else if (state.packer().count() != 0) {
    if (kernelParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::byte* to = packed;
    if (bytes > sizeof packed) {
      large.resize(bytes);
      to = large.data();
    }
    status = state.packer().pack(kernelParams, to);
    parameters = to;
  }
  if (status != CUDA_SUCCESS) return status;
  noticeArenaPointers(parameters, bytes);
  if (hostMemory().mirroring()) {
    status = hostMemory().publish();
    if (status != CUDA_SUCCESS) return status;
  }
  uint64_t judged = shapeKey(shape, attributes, attributeCount);
  if (extra != nullptr) judged = mix(judged, bytes + 1);  // a packed buffer of another size may be refused
  const uint64_t key = launchKey(judged, context->version.load(), toId(handle));
  auto data = reinterpret_cast<const unsigned char*>(parameters);
  if (state.accepted(key))
    return postTo<"sessionLaunch">(ref, handle, ref.wire, shape, data, bytes, attributes, attributeCount);
  status = loadIn(*context, handle, *function);
  if (status != CUDA_SUCCESS) return status;
  notePrinting(*function);
  const uint64_t revision = state.revision();
  status = Session::get().await<"sessionLaunch">(ref.context, handle, ref.wire, shape, data, bytes,
                                                 attributes, attributeCount);
  if (status != CUDA_SUCCESS) return status;
  if (!ref.stream->capturing) ref.stream->posted.fetch_add(1, std::memory_order_acq_rel);
  state.accept(key, revision);
  return CUDA_SUCCESS;
}

// context: the function's own, or the current one.
CUresult occupancyContext(CUfunction handle, Context*& context) {
  CUresult status = contexts().resolve(nullptr, &context);
  if (status != CUDA_SUCCESS) return status;
  Function* function = findFunction(handle);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  context = homeOf(*function, context);
  return CUDA_SUCCESS;
}

// Occupancy depends on the context, the kernel, its attributes and the question only: asked once.
template <class Ask>
CUresult remembered(CUfunction handle, const Context& context, uint64_t question, uint64_t a, uint64_t b,
                    uint64_t& answer, Ask&& ask) {
  KernelState& state = *findFunction(handle)->state;
  const KernelState::Question key{context.version.load(), toId(handle), question, a, b};
  if (state.findAnswer(key, answer)) return CUDA_SUCCESS;
  const uint64_t revision = state.revision();
  CUresult status = ask(context.handle);
  if (status == CUDA_SUCCESS) state.keepAnswer(key, answer, revision);
  return status;
}

CUresult clusters(int* value, CUfunction function, const CUlaunchConfig* config, unsigned active) {
  Context* context = nullptr;
  CUresult status = occupancyContext(function, context);
  if (status != CUDA_SUCCESS) return status;
  if (value == nullptr || config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  LaunchShape shape{{config->gridDimX, config->gridDimY, config->gridDimZ},
                    {config->blockDimX, config->blockDimY, config->blockDimZ},
                    config->sharedMemBytes,
                    0};
  uint64_t key = shapeKey(shape, config->attrs, config->numAttrs);
  for (uint32_t g : shape.grid) key = mix(key, g);
  uint64_t answer = 0;
  status = remembered(function, *context, 10 + active, key, 0, answer, [&](CUcontext in) {
    int got = 0;
    CUresult r = Session::get().await<"sessionLaunchAttributes">(
        in, function, static_cast<const LaunchShape*>(&shape),
        static_cast<const CUlaunchAttribute*>(config->attrs), config->numAttrs, active, &got);
    answer = static_cast<uint32_t>(got);
    return r;
  });
  if (status == CUDA_SUCCESS) *value = static_cast<int>(answer);
  return status;
}

}  // namespace

CUresult packParameters(CUfunction handle, void** kernelParams, void** extra, Context& context,
                        std::vector<std::byte>& out) {
  Function* function = findFunction(handle);
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  CUresult status = loadIn(context, handle, *function);
  if (status != CUDA_SUCCESS) return status;
  notePrinting(*function);
  if (extra != nullptr) {
    const std::byte* buffer = nullptr;
    size_t bytes = 0;
    status = parseLaunchExtra(extra, &buffer, &bytes);
    if (status != CUDA_SUCCESS) return status;
    out.assign(buffer, buffer + bytes);
    noticeArenaPointers(out.data(), out.size());
    return CUDA_SUCCESS;
  }
  const ParameterPacker& packer = function->state->packer();
  if (packer.count() != 0 && kernelParams == nullptr) return CUDA_ERROR_INVALID_VALUE;
  out.resize(packer.bytes());
  if (packer.count() != 0) status = packer.pack(kernelParams, out.data());
  if (status == CUDA_SUCCESS) noticeArenaPointers(out.data(), out.size());
  return status;
}

namespace custom {

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned sharedBytes, CUstream stream, void** kernelParams,
                        void** extra) {
  return launch(f, {{gx, gy, gz}, {bx, by, bz}, sharedBytes, 0}, stream, kernelParams, extra, nullptr, 0);
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned sharedBytes, CUstream stream,
                                   void** kernelParams) {
  return launch(f, {{gx, gy, gz}, {bx, by, bz}, sharedBytes, 1}, stream, kernelParams, nullptr, nullptr, 0);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams, void** extra) {
  if (config == nullptr || (config->numAttrs != 0 && config->attrs == nullptr))
    return CUDA_ERROR_INVALID_VALUE;
  LaunchShape shape{{config->gridDimX, config->gridDimY, config->gridDimZ},
                    {config->blockDimX, config->blockDimY, config->blockDimZ},
                    config->sharedMemBytes,
                    0};
  return launch(f, shape, config->hStream, kernelParams, extra, config->attrs, config->numAttrs);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction f, int blockSize,
                                                              size_t sharedBytes, unsigned flags) {
  Context* context = nullptr;
  CUresult status = occupancyContext(f, context);
  if (status != CUDA_SUCCESS) return status;
  if (blocks == nullptr) return CUDA_ERROR_INVALID_VALUE;
  uint64_t answer = 0;
  status = remembered(f, *context, 1 | uint64_t{flags} << 32, static_cast<uint32_t>(blockSize), sharedBytes,
                      answer, [&](CUcontext in) {
                        int got = 0;
                        CUresult r =
                            Session::get().await<"cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags">(
                                in, &got, f, blockSize, sharedBytes, flags);
                        answer = static_cast<uint32_t>(got);
                        return r;
                      });
  if (status == CUDA_SUCCESS) *blocks = static_cast<int>(answer);
  return status;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction f, int blockSize,
                                                     size_t sharedBytes) {
  return custom::cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, f, blockSize, sharedBytes, 0);
}
CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, CUfunction f, int blocks, int blockSize) {
  Context* context = nullptr;
  CUresult status = occupancyContext(f, context);
  if (status != CUDA_SUCCESS) return status;
  if (bytes == nullptr) return CUDA_ERROR_INVALID_VALUE;
  uint64_t answer = 0;
  status = remembered(f, *context, 2, static_cast<uint32_t>(blocks), static_cast<uint32_t>(blockSize), answer,
                      [&](CUcontext in) {
                        size_t got = 0;
                        CUresult r = Session::get().await<"cuOccupancyAvailableDynamicSMemPerBlock">(
                            in, &got, f, blocks, blockSize);
                        answer = got;
                        return r;
                      });
  if (status == CUDA_SUCCESS) *bytes = answer;
  return status;
}

// The block size with the most resident threads, largest first: what the driver documents.
CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int* minGrid, int* blockSize, CUfunction f,
                                                   CUoccupancyB2DSize sharedOf, size_t sharedBytes, int limit,
                                                   unsigned flags) {
  Context* context = nullptr;
  CUresult status = occupancyContext(f, context);
  if (status != CUDA_SUCCESS) return status;
  if (minGrid == nullptr || blockSize == nullptr) return CUDA_ERROR_INVALID_VALUE;
  int most = 0,
      multiprocessors = propertiesOf(context->device)->attributes[CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT];
  int warp = propertiesOf(context->device)->attributes[CU_DEVICE_ATTRIBUTE_WARP_SIZE];
  status = custom::cuFuncGetAttribute(&most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, f);
  if (status != CUDA_SUCCESS) return status;
  if (limit > 0) most = std::min(most, limit);
  int best = 0, bestThreads = 0, bestBlocks = 0;
  for (int size = (most + warp - 1) / warp * warp; size > 0; size -= warp) {
    int tried = std::min(size, most), blocks = 0;
    size_t shared = sharedOf != nullptr ? sharedOf(tried) : sharedBytes;
    status = custom::cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, f, tried, shared, flags);
    if (status != CUDA_SUCCESS) return status;
    if (blocks * tried > bestThreads) best = tried, bestThreads = blocks * tried, bestBlocks = blocks;
  }
  *blockSize = best;
  *minGrid = bestBlocks * multiprocessors;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxPotentialBlockSize(int* minGrid, int* blockSize, CUfunction f,
                                          CUoccupancyB2DSize sharedOf, size_t sharedBytes, int limit) {
  return custom::cuOccupancyMaxPotentialBlockSizeWithFlags(minGrid, blockSize, f, sharedOf, sharedBytes,
                                                           limit, 0);
}
CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction f, const CUlaunchConfig* config) {
  return clusters(n, f, config, 1);
}
CUresult cuOccupancyMaxPotentialClusterSize(int* n, CUfunction f, const CUlaunchConfig* config) {
  return clusters(n, f, config, 0);
}

}  // namespace custom
}  // namespace gpupool::client
