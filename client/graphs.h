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

namespace gpupool::client {

// Ends when the last graph or executable graph that has it is gone.
struct Hold {
  virtual ~Hold() = default;
  uint64_t userObject = 0;  // references to a user object: which and how many
  unsigned count = 0;
  bool memory = false;  // of an allocation node
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
  std::vector<GraphHold> holds;  // of a node whose graph is not known
};

// The graph, an id of a CUgraph or CUgraphExec, keeps `holds`.
void holdForGraph(uint64_t graph, const std::vector<GraphHold>& holds);
std::vector<GraphHold> holdsOf(uint64_t graph);
// A graph with allocation nodes can be neither cloned nor a child.
bool allocates(const std::vector<GraphHold>& holds);
// Takes the graph's own references to a user object away from it.
std::vector<GraphHold> takeUserHolds(uint64_t graph, uint64_t userObject);
// The graph is gone: its holds, and what is remembered of its nodes.
void forgetGraph(uint64_t graph);

// What is remembered of a node; shared, because another thread may destroy it.
// graph 0: as before.
void rememberNode(uint64_t graph, CUgraphNode node, std::shared_ptr<NodeInfo> info);
std::shared_ptr<NodeInfo> recallNode(CUgraphNode node);

// Device memory for a graph's own allocation.
bool isGraphMemory(uint64_t address);
CUresult allocateForGraph(Context& context, size_t bytes, uint64_t& address, GraphHold& hold);
// Memory for the ordinary host memory at [host, + bytes) that a node copies: `arena` is kept alike from now
// on. No hold: the memory is registered and has a mirror of its own.
CUresult borrowForGraph(uint64_t host, size_t bytes, CUcontext context, uint64_t& arena, GraphHold& hold);
// Turns the host ends of a copy into addresses that both sides have.
CUresult localiseCopy(CUDA_MEMCPY3D_v2& copy, CUcontext context, std::vector<GraphHold>& holds);
// The application's address behind an arena address of borrowForGraph; any other address is its own.
uint64_t originalAddress(uint64_t arena);

}  // namespace gpupool::client
