// Graphs as wholes: life, instantiation, update, launch, user objects. Their nodes: graph_nodes.cpp.
#include <climits>
#include <cstdio>
#include <string>

#include "client/entry.h"
#include "client/graphs.h"
#include "client/memory/host.h"
#include "client/memory/registered.h"

namespace gpupool::client {
namespace {

CUresult currentHandle(CUcontext& context) {
  Context* object = nullptr;
  CUresult status = contexts().resolve(nullptr, &object);
  if (status == CUDA_SUCCESS) context = object->handle;
  return status;
}

CUresult instantiate(CUgraphExec* out, CUgraph graph, unsigned long long flags, CUstream uploadTo,
                     CUgraphNode* errorNode, CUgraphInstantiateResult* result) {
  CUcontext context = nullptr;
  CUresult status = currentHandle(context);
  if (status != CUDA_SUCCESS) return status;
  if (out == nullptr || graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  bool upload = (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0;  // done below: the stream's name is ours
  auto made = graphExecs.create();
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  auto exec = fromId<CUgraphExec>(made.id);
  CUgraphNode bad = nullptr;
  unsigned code = 0;
  unsigned long long sent = flags & ~static_cast<unsigned long long>(CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD);
  status = Session::get().await<"sessionGraphInstantiate">(context, &exec, graph, sent, &bad, &code);
  if (errorNode != nullptr) *errorNode = bad;
  if (result != nullptr) *result = static_cast<CUgraphInstantiateResult>(code);
  if (status != CUDA_SUCCESS) {
    graphExecs.destroy(made.id);
    return status;
  }
  holdForGraph(made.id, holdsOf(toId(graph)));
  *out = exec;
  return upload ? custom::cuGraphUpload(exec, uploadTo) : CUDA_SUCCESS;
}

CUresult update(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo& info) {
  CUcontext context = nullptr;
  CUresult status = currentHandle(context);
  if (status != CUDA_SUCCESS) return status;
  unsigned result = 0;
  info = {};
  status = Session::get().await<"sessionGraphUpdate">(context, exec, graph, &result, &info.errorNode,
                                                      &info.errorFromNode);
  info.result = static_cast<CUgraphExecUpdateResult>(result);
  if (GraphExec* known = graphExecs.find(toId(exec)); known != nullptr) known->settings.forget();
  if (status == CUDA_SUCCESS) holdForGraph(toId(exec), holdsOf(toId(graph)));
  return status;
}

// The first launch is awaited, so that what the driver refuses comes where CUDA says so; later ones are
// posted.
CUresult start(const StreamRef& ref, CUgraphExec handle, GraphExec& exec) {
  if (exec.accepted.load(std::memory_order_acquire)) return postTo<"cuGraphLaunch">(ref, handle, ref.wire);
  CUresult status = Session::get().await<"cuGraphLaunch">(ref.context, handle, ref.wire);
  if (status != CUDA_SUCCESS) return status;
  exec.accepted.store(true, std::memory_order_release);
  ref.stream->posted.fetch_add(1, std::memory_order_acq_rel);
  return CUDA_SUCCESS;
}

CUresult launch(CUgraphExec handle, CUstream streamHandle) {
  StreamRef ref;
  CUresult status = resolveStream(streamHandle, ref);
  if (status != CUDA_SUCCESS) return status;
  GraphExec* exec = graphExecs.find(toId(handle));
  if (exec == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (ref.stream->capturing) {
    for (auto& hold : holdsOf(toId(handle))) captureHolds(*ref.stream, hold);
    return Session::get().await<"cuGraphLaunch">(ref.context, handle, ref.wire);
  }
  if (registeredMemory().anyTold())
    registeredMemory().mirrorTold();  // its kernels may have been given any of it
  if (status = hostMemory().publish(); status != CUDA_SUCCESS) return status;
  auto ranges = carriedBy(toId(handle));
  if (ranges.empty()) return start(ref, handle, *exec);
  auto carried = std::make_shared<Carrier::Launch>(Carrier::Launch{std::move(ranges)});
  const WordMark before = exec->carried.load();
  carried->afterWord = before.word;
  carried->afterValue = before.value;
  uint64_t ahead = 0;
  status = requestWordBehindOthers(ref, ahead);
  if (status == CUDA_SUCCESS) status = carrier().fill(ref, ahead, carried->ranges, carried);
  if (status == CUDA_SUCCESS) status = start(ref, handle, *exec);
  if (status != CUDA_SUCCESS) {
    carrier().land(ref, {}, carried);  // its end
    return status;
  }
  status = carrier().land(ref, carried->ranges, carried);
  exec->carried.store(WordMark{carried->word, carried->value});
  return status;
}

// The worker's driver prints; the file is this process's.
CUresult printGraph(CUgraph graph, const char* path, unsigned flags) {
  CUcontext context = nullptr;
  CUresult status = currentHandle(context);
  if (status != CUDA_SUCCESS) return status;
  if (graph == nullptr || path == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::string text;
  std::vector<unsigned char> piece(size_t{256} << 10);
  size_t total = 0;
  do {
    size_t bytes = piece.size();
    status = Session::get().await<"sessionGraphText">(context, graph, flags, text.size(), piece.data(),
                                                      &bytes, &total);
    if (status != CUDA_SUCCESS) return status;
    if (bytes == 0) break;
    text.append(reinterpret_cast<const char*>(piece.data()), bytes);
  } while (text.size() < total);
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
  bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  written = std::fclose(file) == 0 && written;
  return written ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

// ---- user objects: counted here, the worker never hears of them ----

struct UserObject {
  void* pointer = nullptr;
  CUhostFn destroy = nullptr;
  uint64_t references = 0;  // under the mutex
};
HandleTable<UserObject> userObjects{Kind::userObject};
std::mutex& userMutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

bool retainUser(uint64_t id, unsigned count) {
  std::lock_guard lock(userMutex());
  UserObject* object = userObjects.find(id);
  if (object == nullptr) return false;
  object->references += count;
  return true;
}

// The destructor runs here, in the releasing thread, holding nothing.
bool releaseUser(uint64_t id, unsigned count) {
  UserObject last;
  {
    std::lock_guard lock(userMutex());
    UserObject* object = userObjects.find(id);
    if (object == nullptr || object->references < count) return false;
    object->references -= count;
    if (object->references != 0) return true;
    last = *object;
    userObjects.destroy(id);
  }
  last.destroy(last.pointer);
  return true;
}

struct UserHold : Hold {
  UserHold(uint64_t object, unsigned references) {
    userObject = object;
    count = references;
  }
  ~UserHold() override { releaseUser(userObject, count); }
};

}  // namespace

namespace custom {

CUresult cuGraphDestroy(CUgraph graph) {
  if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUcontext context = contexts().working();
  CUresult status = Session::get().await<"cuGraphDestroy">(context, graph);
  if (status != CUDA_SUCCESS) return status;
  forgetGraph(toId(graph));
  graphs.destroy(toId(graph));
  return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
  if (graphExecs.find(toId(exec)) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUcontext context = contexts().working();
  CUresult status = Session::get().await<"cuGraphExecDestroy">(context, exec);
  if (status != CUDA_SUCCESS) return status;
  graphExecs.destroy(toId(exec));
  forgetGraph(toId(exec));
  return CUDA_SUCCESS;
}

CUresult cuGraphClone(CUgraph* out, CUgraph original) {
  CUcontext context = nullptr;
  CUresult status = currentHandle(context);
  if (status != CUDA_SUCCESS) return status;
  if (out == nullptr || original == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (allocates(holdsOf(toId(original)))) return CUDA_ERROR_NOT_SUPPORTED;
  auto clone = mintPlain<CUgraph>();
  status = Session::get().await<"cuGraphClone">(context, &clone, original);
  if (status != CUDA_SUCCESS) {
    dropPlain(clone);
    return status;
  }
  holdForGraph(toId(clone), holdsOf(toId(original)));
  *out = clone;
  return CUDA_SUCCESS;
}

CUresult cuGraphDebugDotPrint(CUgraph graph, const char* path, unsigned flags) {
  return printGraph(graph, path, flags);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  if ((flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) != 0)
    return CUDA_ERROR_INVALID_VALUE;  // only with parameters
  return instantiate(exec, graph, flags, nullptr, nullptr, nullptr);
}
CUresult cuGraphInstantiate_v2(CUgraphExec* exec, CUgraph graph, CUgraphNode* errorNode, char* log,
                               size_t bytes) {
  if (log != nullptr && bytes != 0) *log = 0;
  return instantiate(exec, graph, 0, nullptr, errorNode, nullptr);
}
CUresult cuGraphInstantiate(CUgraphExec* exec, CUgraph graph, CUgraphNode* errorNode, char* log,
                            size_t bytes) {
  return custom::cuGraphInstantiate_v2(exec, graph, errorNode, log, bytes);
}
CUresult cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  if (params == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return instantiate(exec, graph, params->flags, params->hUploadStream, &params->hErrNode_out,
                     &params->result_out);
}

CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
  return info == nullptr ? CUDA_ERROR_INVALID_VALUE : update(exec, graph, *info);
}
CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* errorNode,
                           CUgraphExecUpdateResult* result) {
  CUgraphExecUpdateResultInfo info{};
  if (result == nullptr) return CUDA_ERROR_INVALID_VALUE;
  CUresult status = update(exec, graph, info);
  *result = info.result;
  if (errorNode != nullptr) *errorNode = info.errorNode;
  return status;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) { return launch(exec, stream); }
CUresult cuGraphUpload(CUgraphExec exec, CUstream stream) {
  StreamRef ref;
  CUresult status = resolveStream(stream, ref);
  if (status != CUDA_SUCCESS) return status;
  if (graphExecs.find(toId(exec)) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return Session::get().await<"cuGraphUpload">(ref.context, exec, ref.wire);
}

CUresult cuUserObjectCreate(CUuserObject* out, void* pointer, CUhostFn destroy, unsigned references,
                            unsigned flags) {
  if (out == nullptr || destroy == nullptr || references == 0 || references > INT_MAX ||
      flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    return CUDA_ERROR_INVALID_VALUE;
  auto made = userObjects.create();
  if (made.object == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  {
    std::lock_guard lock(userMutex());
    *made.object = {pointer, destroy, references};
  }
  *out = fromId<CUuserObject>(made.id);
  return CUDA_SUCCESS;
}
CUresult cuUserObjectRetain(CUuserObject object, unsigned count) {
  return count != 0 && count <= INT_MAX && retainUser(toId(object), count) ? CUDA_SUCCESS
                                                                           : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuUserObjectRelease(CUuserObject object, unsigned count) {
  return count != 0 && releaseUser(toId(object), count) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
  if (graph == nullptr || count == 0 || count > INT_MAX ||
      (flags & ~unsigned{CU_GRAPH_USER_OBJECT_MOVE}) != 0)
    return CUDA_ERROR_INVALID_VALUE;
  bool moves = (flags & CU_GRAPH_USER_OBJECT_MOVE) != 0;  // the caller's references become the graph's
  if (!retainUser(toId(object), moves ? 0 : count)) return CUDA_ERROR_INVALID_VALUE;
  holdForGraph(toId(graph), {std::make_shared<UserHold>(toId(object), count)});
  return CUDA_SUCCESS;
}
CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned count) {
  if (graph == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  auto taken = takeUserHolds(toId(graph), toId(object));
  uint64_t had = 0;
  for (auto& hold : taken) had += hold->count;
  if (had < count) {
    holdForGraph(toId(graph), taken);
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto rest = static_cast<unsigned>(had - count);
  if (rest != 0 && retainUser(toId(object), rest))
    holdForGraph(toId(graph), {std::make_shared<UserHold>(toId(object), rest)});
  return CUDA_SUCCESS;
}

}  // namespace custom
}  // namespace gpupool::client
