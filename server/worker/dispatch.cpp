#include "server/worker/dispatch.h"

#include <cstdlib>

#include "server/worker/serve.h"

namespace gpupool::server {

void HandlerTable::put(uint32_t id, const Handler& handler) {
  size_t at = id % kPlaces;
  while (places_[at].first != 0 && places_[at].first != id) at = (at + 1) % kPlaces;
  if (places_[at].first == 0 && ++used_ > kPlaces / 2) std::abort();  // more rows: make it larger
  places_[at] = {id, handler};
}

const Handler* HandlerTable::find(uint32_t id) const {
  for (size_t at = id % kPlaces; places_[at].first != 0; at = (at + 1) % kPlaces)
    if (places_[at].first == id) return &places_[at].second;
  return nullptr;
}

namespace {

template <class R, auto Member>
void addRow(HandlerTable& table) {
  if constexpr (R::kind == schema::Kind::Post || R::kind == schema::Kind::Await ||
                R::kind == schema::Kind::MayBlock)
    table.add<R>(&serveDriver<R, Member>);
}

HandlerTable build() {
  HandlerTable table;
#define CALL(function, ...) addRow<GPUPOOL_ROW(function), &Driver::function>(table);
#define SESSION_CALL(function, ...)
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL

// Rows whose policy is the client's alone: here they are plain driver calls.
#define PLAIN(function) \
  table.add<GPUPOOL_ROW(function)>(&serveDriver<GPUPOOL_ROW(function), &Driver::function>);
  PLAIN(cuStreamCreateWithPriority)
  PLAIN(cuStreamDestroy_v2)
  PLAIN(cuStreamWaitEvent)
  PLAIN(cuStreamQuery)
  PLAIN(cuEventQuery)
  PLAIN(cuStreamEndCapture)
  PLAIN(cuStreamIsCapturing)
  PLAIN(cuStreamUpdateCaptureDependencies_v2)
  PLAIN(cuEventCreate)
  PLAIN(cuEventDestroy_v2)
  PLAIN(cuEventElapsedTime_v2)
  PLAIN(cuCtxGetLimit)
  PLAIN(cuCtxSetLimit)
  PLAIN(cuCtxGetStreamPriorityRange)
  PLAIN(cuModuleGetFunction)
  PLAIN(cuLibraryGetKernel)
  PLAIN(cuLibraryGetModule)
  PLAIN(cuKernelGetFunction)
  PLAIN(cuKernelSetAttribute)
  PLAIN(cuFuncSetAttribute)
  PLAIN(cuKernelSetCacheConfig)
  PLAIN(cuFuncSetCacheConfig)
  PLAIN(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
  PLAIN(cuOccupancyAvailableDynamicSMemPerBlock)
  PLAIN(cuGraphNodeGetType)
  PLAIN(cuGraphAddChildGraphNode)
  PLAIN(cuGraphClone)
  PLAIN(cuGraphUpload)
  PLAIN(cuGraphExecDestroy)
  PLAIN(cuGraphLaunch)
#undef PLAIN
  addContextHandlers(table);
  addMemoryHandlers(table);
  addCopyHandlers(table);
  addModuleHandlers(table);
  addTextureHandlers(table);
  addStreamHandlers(table);
  addLaunchHandlers(table);
  addGraphHandlers(table);
  return table;
}

}  // namespace

const Handler* findHandler(uint32_t id) {
  static const HandlerTable* table = new HandlerTable(build());
  return table->find(id);
}

}  // namespace gpupool::server
