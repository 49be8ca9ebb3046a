#pragma once
// Calls of the session itself: what the client needs from its worker and no driver function provides. They
// have rows like other calls (schema/calls/session.h); these prototypes give the rows their types and are
// never defined.
//
// Addresses are the session's: the client chose them inside windows both sides reserved, and the worker
// checks every one against the session's own extents and host memory before the driver sees it.

#include "schema/cuda.h"

namespace gpupool::schema {

// Region of the transport (transport::Region), as it travels.
struct RegionName {
  uint32_t id = 0;
  uint32_t generation = 0;
};

struct LaunchShape {
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t sharedBytes = 0;
  uint32_t cooperative = 0;  // cuLaunchCooperativeKernel
};

// A launch attribute as it travels: events inside are handles. Same layout as CUlaunchAttribute.
using LaunchAttribute = CUlaunchAttribute;

struct ParameterLayout {
  uint32_t offset = 0;
  uint32_t size = 0;
};

inline constexpr int kFunctionAttributes = 16;  // CU_FUNC_ATTRIBUTE_* 0..15
struct FunctionInfo {
  int32_t attributes[kFunctionAttributes] = {};
  uint32_t known = 0;  // bit i: attributes[i] was answered
  uint32_t parameterCount = 0;
};

// What a session offers to the other sessions of its lease and of its tenant's, for them to open. The server
// makes `key`, at random, and keeps what it stands for; `server` names that server, in that life of it. In a
// session of another tenant it opens nothing.
struct ShareToken {
  uint64_t server[2] = {};
  uint64_t key[2] = {};
  bool operator==(const ShareToken&) const = default;
};

struct ImageName {  // contentDigest of the bytes (base/content.h)
  uint64_t words[4] = {};
  uint64_t bytes = 0;
};

// ---- memory ----
// Maps fresh zeroed device memory at [address, address + bytes) of one of the session's windows, accessible
// from every device of the session that has peer access. Multiples of 2 MiB.
CUresult sessionExtentMap(CUdevice device, CUdeviceptr address, size_t bytes);
// Ends a mapping of sessionExtentMap or sessionPhysicalMap.
CUresult sessionExtentUnmap(CUdeviceptr address);
// Physical memory apart from its mappings (cuMemCreate): a piece that the client names, zeroed before it can
// be read. It lives until it has been released and its last mapping has ended.
CUresult sessionPhysicalCreate(CUdevice device, uint64_t name, size_t bytes);
CUresult sessionPhysicalRelease(uint64_t name);
// Maps the whole piece, accessible to no device until sessionExtentAccess. flags: CUmemAccess_flags.
CUresult sessionPhysicalMap(uint64_t name, CUdeviceptr address);
CUresult sessionExtentAccess(CUdeviceptr address, CUdevice device, unsigned flags);
// Bytes of the lease on that device that are not in this session's extents: what its other sessions have, and
// arrays.
CUresult sessionMemoryElsewhere(CUdevice device, size_t* bytes);
// Opens the owner's extents, present and future, to the peer.
CUresult sessionPeerAccess(CUdevice owner, CUdevice peer);
// Maps pinned host memory of the worker at `address` of the host arena, registered with the driver, and
// shares it as `region`. Multiples of 4 KiB. flags: CU_MEMHOSTALLOC_*.
CUresult sessionHostMap(CUdeviceptr address, size_t bytes, unsigned flags, RegionName* region);
// One host: the same with pages of a file that the client has shared as `region`, and that other processes
// may have, too. The worker registers them with the driver and touches none itself.
CUresult sessionHostShare(CUdeviceptr address, RegionName region);
// Of either.
CUresult sessionHostUnmap(CUdeviceptr address);
// Offers a piece of the session's device memory: that of the name, or, where it is 0, the one mapped at
// `address`. What others open is [address, + bytes) of it; of a named piece, all. The token is valid until
// sessionOfferEnd, or until the piece ends.
CUresult sessionMemoryOffer(uint64_t name, CUdeviceptr address, size_t bytes, ShareToken* token);
// When it is answered, the token of memory opens nothing any more. Who has opened it keeps what it has.
CUresult sessionOfferEnd(ShareToken token);
// Names a piece of another session of the lease as sessionPhysicalCreate names a new one. It is charged to
// who has made it, and lives until nobody has it. `bytes`: of the piece, of which [offset, + length) was
// offered. device: as the session counts. CUDA_ERROR_INVALID_HANDLE: there is no such offer for this lease.
// CUDA_ERROR_INVALID_CONTEXT: it is this session's own. CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: it is another
// server's.
CUresult sessionMemoryOpen(ShareToken token, uint64_t name, unsigned* device, size_t* bytes, size_t* offset,
                           size_t* length);
// Bytes of host memory that differ from the worker's last exchanged copy: runs {offset, length, bytes}.
// Networks, and registered memory, whose pages are the application's own. set: 0, or twice the number of the
// client's set of mirrors, plus 1 for the last of them (NoticeType::wordsUnchanged, schema/frame.h).
CUresult sessionMirrorApply(CUdeviceptr address, const unsigned char* runs, size_t bytes);
CUresult sessionMirrorCollect(CUdeviceptr address, size_t length, size_t limit, uint64_t set,
                              unsigned char* runs, size_t* bytes);

// ---- copies ----
// Each is a copy and, right behind it in the stream, the completion word (0: none). Host memory is staging
// memory or the arena.
//
// Host memory at `from` to the device. data: over a network, the bytes of a small copy, which are stored at
// `from` first; else null.
CUresult sessionWrite(CUstream stream, CUdeviceptr to, CUdeviceptr from, const unsigned char* data,
                      size_t bytes, uint64_t word, uint64_t value);
// Device memory to host memory at `to`. Awaited: answered when the word is reached, with the bytes in `data`.
// region: over a network not {0, 0}; the bytes are then put at `offset` of that region of the client before
// the word is sent to it.
CUresult sessionRead(CUstream stream, CUdeviceptr to, CUdeviceptr from, size_t bytes, uint64_t word,
                     uint64_t value, RegionName region, uint64_t offset, unsigned char* data, size_t* count);

// ---- order ----
// Completion word `word` takes `value` when everything before it in `stream` is done.
CUresult sessionWord(CUstream stream, uint64_t word, uint64_t value);
// The stream waits until `word` is at least `value`: a word that no stream writes but the client, by this
// call or, where it maps the words, directly.
CUresult sessionGate(CUstream stream, uint64_t word, uint64_t value);
CUresult sessionGateOpen(uint64_t word, uint64_t value);
// The same behind cuEventRecordWithFlags. tell: not 0: networks: the worker tells the client when the word
// has come, without being asked for it (NoticeType::watch).
CUresult sessionEventRecord(CUevent event, CUstream stream, unsigned flags, uint64_t word, uint64_t value,
                            unsigned tell);
// Offers an event to the lease's other sessions. From here on it is recorded, waited for and queried by the
// calls below, which are awaited: the order of records and waits in several processes is the order in which
// their calls return. A record that it has already counts.
CUresult sessionEventOffer(CUevent event, ShareToken* token);
// Another session's. Errors as of sessionMemoryOpen.
CUresult sessionEventOpen(CUevent* event, ShareToken token);
CUresult sessionSharedRecord(CUevent event, CUstream stream);
// For the record that is the last one now, of whichever session; without one, for nothing.
CUresult sessionSharedWait(CUstream stream, CUevent event);
// CUDA_ERROR_NOT_READY: that record has not been reached.
CUresult sessionSharedQuery(CUevent event);
// Runs host function `callback` of the client in stream order. error: run it even in an errored context
// (cuStreamAddCallback).
CUresult sessionHostFunction(CUstream stream, uint64_t callback, unsigned error);
// Waits for the stream (wholeContext 0) or for the context (1), and brings the device output that was written
// by then with the reply.
CUresult sessionDrain(CUstream stream, unsigned wholeContext);
// The device output that has been written by now. When it is answered, every aside call before it has been
// served.
CUresult sessionOutput();

// ---- green contexts ----
// Where a part of a device's multiprocessors comes from: all of the device or of a green context (split 0),
// or a part of that, as cuDevSmResourceSplitByCount would make it with these arguments. What the driver says
// of it does not travel back: the worker asks the driver again.
struct SmSource {
  CUgreenCtx green;   // null: the device's
  uint32_t device;    // of the lease
  uint32_t split;     // names the split: parts of one green context are of one
  uint32_t flags;     // useFlags
  uint32_t minCount;  // minCount
  uint32_t wanted;    // nbGroups
  uint32_t part;      // index of the group; kSmRest: what remains
};
inline constexpr uint32_t kSmRest = ~uint32_t{0};
inline constexpr uint32_t kMostSmGroups = 1024;  // of one split, and parts of one green context

CUresult sessionSmResource(const SmSource* source, CUdevResourceType type, CUdevSmResource* sm);
// source: split, but for its part. simulate: only `groups`' number is wanted. rest: smCount 0 if nothing is
// left.
CUresult sessionSmSplit(const SmSource* source, unsigned simulate, CUdevSmResource* groups, size_t* count,
                        CUdevSmResource* rest);
CUresult sessionGreenCreate(CUgreenCtx* green, CUdevice device, const SmSource* parts, unsigned count,
                            unsigned flags);

// ---- code ----
// have = 1: the worker has an image of that content; else send it in pieces, then load. bytes = 0: no piece.
CUresult sessionImageOffer(ImageName image, unsigned* have);
CUresult sessionImageData(ImageName image, size_t offset, const unsigned char* data, size_t bytes);
// kind: 0 bare fatbin / ELF / PTX as is; 1 fatbin wrapper version 1; 2 wrapper version 2 around it.
// Options: JIT options by number with 64-bit values; log buffers come back as text. printing: the code may
// print.
CUresult sessionModuleLoad(CUmodule* module, ImageName image, unsigned kind, const CUjit_option* options,
                           const uint64_t* values, unsigned optionCount, char* infoLog, int infoBytes,
                           char* errorLog, int errorBytes, unsigned* printing);
CUresult sessionLibraryLoad(CUlibrary* library, ImageName image, unsigned kind, const CUjit_option* options,
                            const uint64_t* values, unsigned optionCount, char* infoLog, int infoBytes,
                            char* errorLog, int errorBytes, unsigned* printing);
// Layout and attributes of a kernel or function, in its context's device.
CUresult sessionFunctionInfo(CUfunction function, CUdevice device, FunctionInfo* info,
                             ParameterLayout* layout, size_t* layoutCount);
CUresult sessionFunctionName(CUfunction function, char* name, int bytes);
CUresult sessionModuleFunctions(CUmodule module, CUfunction* functions, size_t* count);
CUresult sessionLibraryKernels(CUlibrary library, CUkernel* kernels, size_t* count);

// Linker: inputs travel as images.
CUresult sessionLinkCreate(const CUjit_option* options, const uint64_t* values, unsigned optionCount,
                           CUlinkState* link);
CUresult sessionLinkAdd(CUlinkState link, CUjitInputType type, ImageName image, const char* name,
                        const CUjit_option* options, const uint64_t* values, unsigned optionCount,
                        char* infoLog, int infoBytes, char* errorLog, int errorBytes);
CUresult sessionLinkComplete(CUlinkState link, char* infoLog, int infoBytes, char* errorLog, int errorBytes,
                             size_t* bytes);
CUresult sessionLinkRead(CUlinkState link, size_t offset, unsigned char* data, size_t* bytes);

// ---- execution ----
CUresult sessionLaunch(CUfunction function, CUstream stream, LaunchShape shape,
                       const unsigned char* parameters, size_t parameterBytes,
                       const LaunchAttribute* attributes, unsigned attributeCount);
CUresult sessionGraphAddKernelNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                                   size_t dependencyCount, CUfunction function, CUcontext context,
                                   LaunchShape shape, const unsigned char* parameters, size_t parameterBytes);
// exec null: the node itself.
CUresult sessionGraphSetKernelNode(CUgraphExec exec, CUgraphNode node, CUfunction function, CUcontext context,
                                   LaunchShape shape, const unsigned char* parameters, size_t parameterBytes);
// function or kernel may be null: the session has no name for it.
CUresult sessionGraphGetKernelNode(CUgraphNode node, CUfunction* function, CUkernel* kernel,
                                   CUcontext* context, LaunchShape* shape, unsigned char* parameters,
                                   size_t* parameterBytes);
// A conditional node of `size` bodies, which the worker names. condition: a CUgraphConditionalHandle; type: a
// CUgraphConditionalNodeType.
CUresult sessionGraphAddConditional(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                                    size_t dependencyCount, cuuint64_t condition, unsigned type,
                                    CUcontext context, CUgraph* bodies, size_t* size);
// A child graph node that takes `child` itself (CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE).
CUresult sessionGraphMoveChild(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                               size_t dependencyCount, CUgraph child);
// A node of stream memory operations (CU_GRAPH_NODE_TYPE_BATCH_MEM_OP).
CUresult sessionGraphAddMemOps(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                               size_t dependencyCount, CUcontext context,
                               const CUstreamBatchMemOpParams* operations, size_t count);
// exec null: the node itself.
CUresult sessionGraphSetMemOps(CUgraphExec exec, CUgraphNode node, CUcontext context,
                               const CUstreamBatchMemOpParams* operations, size_t count);
CUresult sessionGraphGetMemOps(CUgraphNode node, CUcontext* context, CUstreamBatchMemOpParams* operations,
                               size_t* count);
// What cuGraphDebugDotPrint prints, handles by their names in the session: `bytes` of it from `offset` on,
// and how much it is in all.
CUresult sessionGraphText(CUgraph graph, unsigned flags, size_t offset, unsigned char* text, size_t* bytes,
                          size_t* total);
CUresult sessionGraphAddHostNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* dependencies,
                                 size_t dependencyCount, uint64_t callback);
CUresult sessionGraphSetHostNode(CUgraphExec exec, CUgraphNode node, uint64_t callback);
// 0: not a host node of ours.
CUresult sessionGraphGetHostNode(CUgraphNode node, uint64_t* callback);
CUresult sessionGraphInstantiate(CUgraphExec* exec, CUgraph graph, unsigned long long flags,
                                 CUgraphNode* errorNode, unsigned* result);
CUresult sessionGraphUpdate(CUgraphExec exec, CUgraph graph, unsigned* result, CUgraphNode* errorNode,
                            CUgraphNode* errorFrom);
CUresult sessionCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                            CUgraphNode* dependencies, CUgraphEdgeData* edges, size_t* count);
CUresult sessionLaunchAttributes(CUfunction function, const LaunchShape* shape,
                                 const LaunchAttribute* attributes, unsigned attributeCount,
                                 unsigned clusters, int* value);
// Of the context's device: for every texture processing cluster (TPC, a pair of SMs) the graphics processing
// cluster (GPC) it lies in and its rank there. It differs from chip to chip, and cuBLASLt chooses by it.
CUresult sessionTpcMap(unsigned char* gpcs, unsigned char* ranks, size_t* count);

}  // namespace gpupool::schema
