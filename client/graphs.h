#pragma once
// What the client keeps of graphs: which memory and user objects they hold, and the parameters of nodes in
// the application's own terms (cuGraph*NodeGetParams answers with its pointers, not the worker's).
//
// Memory of graph allocations (cuGraphAddMemAllocNode, cuMemAllocAsync in a capture) is taken when the node
// is made and kept until the last graph that holds it is gone; freeing it, inside a graph or outside, is no
// operation of the device. Its addresses are fixed, as natively, but memory of different nodes is never
// shared. Threads: any; one mutex, never held across the wire or while a hold ends.

#include <unordered_map>

#include "client/capture.h"
#include "client/memory/carrier.h"

namespace gpupool::client {

// Ends when the last graph or executable graph that has it is gone.
struct Hold {
  virtual ~Hold() = default;
  uint64_t userObject = 0;  // references to a user object: which and how many
  unsigned count = 0;
  bool memory = false;  // of an allocation node
  // Of memory of the application's that its copies move by way of a shadow: false, or where it is.
  virtual bool carried(Carrier::Range&) const { return false; }
};

// A node as the application described it. Pointers handed out stay valid until its parameters change.
struct NodeInfo {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  uint64_t graph = 0;  // 0: not known
  schema::LaunchShape shape;
  CUfunction function = nullptr;
  CUkernel kernel = nullptr;
  CUcontext context = nullptr;
  std::vector<std::byte> parameters;
  std::vector<void*> pointers;
  CUDA_MEMCPY3D_v2 copy{};
  CUDA_MEM_ALLOC_NODE_PARAMS_v1 allocation{};
  CUdeviceptr freed = 0;
  std::vector<CUstreamBatchMemOpParams> operations;
  std::vector<CUgraph> inner;    // bodies of a conditional node, or a child graph that was moved into it
  std::vector<GraphHold> holds;  // of a node whose graph is not known

  // A kernel node's function or, where a function is expected, its kernel.
  CUfunction launched() const {
    return function != nullptr ? function : reinterpret_cast<CUfunction>(kernel);
  }
};

// The graph, an id of a CUgraph or CUgraphExec, keeps `holds`.
void holdForGraph(uint64_t graph, const std::vector<GraphHold>& holds);
// Its own and those of the graphs that its nodes contain.
std::vector<GraphHold> holdsOf(uint64_t graph);
// A graph with allocation nodes can be neither cloned nor a child.
bool allocates(const std::vector<GraphHold>& holds);
// Takes the graph's own references to a user object away from it.
std::vector<GraphHold> takeUserHolds(uint64_t graph, uint64_t userObject);
// The graph is gone: its holds, what is remembered of its nodes, and the graphs these contain.
void forgetGraph(uint64_t graph);

// What is remembered of a node; shared, because another thread may destroy it.
// graph 0: as before.
void rememberNode(uint64_t graph, CUgraphNode node, std::shared_ptr<NodeInfo> info);
std::shared_ptr<NodeInfo> recallNode(CUgraphNode node);
// The node is gone, and the graphs it contains.
void forgetNode(CUgraphNode node);

// Allocation and free as nodes of the stream's capture (calls/graph_nodes.cpp).
CUresult captureAllocation(const StreamRef& ref, CUmemoryPool pool, size_t bytes, CUdeviceptr* out);
CUresult captureFree(const StreamRef& ref, CUdeviceptr address);
// What graphs hold on a device (CU_GRAPH_MEM_ATTR_*). Nothing is kept beyond them, so there is nothing to
// trim.
uint64_t graphMemory(CUdevice device, CUgraphMem_attribute what);
void resetGraphMemoryHigh(CUdevice device, CUgraphMem_attribute what);

// Device memory for a graph's own allocation.
bool isGraphMemory(uint64_t address);
CUresult allocateForGraph(Context& context, size_t bytes, uint64_t& address, GraphHold& hold);
// The shadow at `arena` of ordinary or registered memory at [host, + bytes) that a node copies: to, if
// `written`. It is filled before every launch and lands behind it. No hold: the memory is mirrored.
CUresult borrowForGraph(uint64_t host, size_t bytes, bool written, CUcontext context, uint64_t& arena,
                        GraphHold& hold);
// What a launch of `graph` has to carry.
std::vector<Carrier::Range> carriedBy(uint64_t graph);
// Turns the host ends of a copy into addresses that both sides have.
CUresult localiseCopy(CUDA_MEMCPY3D_v2& copy, CUcontext context, std::vector<GraphHold>& holds);
// The application's address behind an arena address of borrowForGraph; any other address is its own.
uint64_t originalAddress(uint64_t arena);

}  // namespace gpupool::client
