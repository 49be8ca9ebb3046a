// Driver manual: cuGraphDebugDotPrint. The text is this device's own; what it shows of a node is what a
// debugging programmer looks for first: its kind, a kernel's name and shape, and with the flag its handle.
#include <cstdio>
#include <map>
#include <string>

#include "server/softgpu/api/capture.h"
#include "server/softgpu/api/conditional.h"
#include "server/softgpu/api/graph_nodes.h"

namespace gpupool::softgpu::api {
namespace {

const char* typeName(CUgraphNodeType type) {
  switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
      return "KERNEL";
    case CU_GRAPH_NODE_TYPE_MEMCPY:
      return "MEMCPY";
    case CU_GRAPH_NODE_TYPE_MEMSET:
      return "MEMSET";
    case CU_GRAPH_NODE_TYPE_HOST:
      return "HOST";
    case CU_GRAPH_NODE_TYPE_GRAPH:
      return "GRAPH";
    case CU_GRAPH_NODE_TYPE_EMPTY:
      return "EMPTY";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      return "EVENT_WAIT";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
      return "EVENT_RECORD";
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
      return "MEM_ALLOC";
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
      return "MEM_FREE";
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
      return "BATCH_MEM_OP";
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
      return "CONDITIONAL";
    default:
      return "OTHER";
  }
}

class Dot {
 public:
  explicit Dot(unsigned flags) : flags_(flags) {}

  std::string text(const Graph& graph) {
    add("digraph dot {\n");
    cluster(graph);
    add("}\n");
    return std::move(text_);
  }

 private:
  bool wants(unsigned flag) const { return (flags_ & (flag | CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE)) != 0; }

  template <class... Values>
  void add(const char* format, Values... values) {
    char line[512];
    int length = std::snprintf(line, sizeof line, format, values...);
    text_.append(line, size_t(std::min<int>(length, sizeof line - 1)));
  }
  void add(const char* words) { text_ += words; }

  void cluster(const Graph& graph) {
    const size_t number = graphs_++;
    add("subgraph cluster_%zu {\nlabel=\"graph_%zu\" graph[style=\"dashed\"];\n", number, number);
    std::map<const GraphNode*, size_t> index;
    for (auto& node : graph.nodes) {
      const size_t at = index.size();
      index[node.get()] = at;
      label(*node, number, at);
    }
    for (auto& node : graph.nodes)
      for (GraphNode* next : node->dependents)
        add("\"graph_%zu_node_%zu\" -> \"graph_%zu_node_%zu\";\n", number, index[node.get()], number,
            index[next]);
    for (auto& node : graph.nodes) {
      auto* nested = dynamic_cast<const NestedOperation*>(node->operation.get());
      for (size_t i = 0; nested && i < nested->graphs.size(); ++i) cluster(*nested->graphs[i]);
    }
    add("}\n");
  }

  void label(const GraphNode& node, size_t graph, size_t at) {
    add("\"graph_%zu_node_%zu\" [shape=\"rectangle\" label=\"%zu\\n%s", graph, at, at,
        typeName(node.operation->type()));
    if (wants(CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES))
      add("\\nnode handle 0x%llX", static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(node.handle)));
    if (auto* kernel = dynamic_cast<const KernelOperation*>(node.operation.get())) {
      const auto& p = kernel->parameters;
      add("\\n%s\\n<<<{%u,%u,%u},{%u,%u,%u},%u>>>", kernel->function->info->name.c_str(), p.gridDimX,
          p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ, p.sharedMemBytes);
    }
    if (auto* conditional = dynamic_cast<const ConditionalOperation*>(node.operation.get())) {
      static const char* const kKinds[] = {"IF", "WHILE", "SWITCH"};
      add("\\n%s of %zu", kKinds[conditional->kind], conditional->graphs.size());
    }
    add("\"];\n");
  }

  const unsigned flags_;
  size_t graphs_ = 0;
  std::string text_;
};

}  // namespace
}  // namespace gpupool::softgpu::api

using namespace gpupool::softgpu::api;

CUresult cuGraphDebugDotPrint(CUgraph handle, const char* path, unsigned int flags) {
  if (!initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  auto graph = table<Graph>().find(handle);
  if (!graph || !path) return CUDA_ERROR_INVALID_VALUE;
  std::string text;
  {
    std::lock_guard lock(captureMutex());
    text = Dot(flags).text(*graph);
  }
  std::FILE* file = std::fopen(path, "w");
  if (!file) return CUDA_ERROR_OPERATING_SYSTEM;
  bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  written = std::fclose(file) == 0 && written;
  return written ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}
