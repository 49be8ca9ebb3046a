#pragma once
// Events (driver manual: Event Management). An event is the fence of the task that last recorded it.

#include <memory>
#include <mutex>

#include "server/softgpu/api/graph.h"
#include "server/softgpu/api/handles.h"
#include "server/softgpu/api/operation.h"

namespace gpupool::softgpu::api {

struct Capture;

struct Event {
  using Handle = CUevent;
  static constexpr Tag kTag = Tag::event;
  Handle handle = nullptr;
  ContextPtr context;
  unsigned flags = 0;

  FencePtr recorded() {
    std::lock_guard lock(mutex);
    return fence;
  }
  void record(FencePtr done) {
    std::lock_guard lock(mutex);
    fence = std::move(done);
  }

  // Its last record was in a capture. When that has ended the event means nothing until it is recorded again.
  std::atomic<bool> inCapture{false};
  bool isCaptured();  // and the capture still goes on
  // Guarded by captureMutex(): where in a capture it was last recorded.
  std::weak_ptr<Capture> capture;
  std::vector<GraphNodePtr> captureAfter;

 private:
  std::mutex mutex;
  FencePtr fence;
};
using EventPtr = std::shared_ptr<Event>;

struct EventRecordOperation : Operation {
  EventPtr event;
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_EVENT_RECORD; }
  CUresult run(Context&) const override {
    auto now = std::make_shared<Fence>();
    now->complete();
    event->record(now);
    return CUDA_SUCCESS;
  }
};

struct EventWaitOperation : Operation {
  EventPtr event;
  CUgraphNodeType type() const override { return CU_GRAPH_NODE_TYPE_WAIT_EVENT; }
  CUresult run(Context&) const override {
    if (auto fence = event->recorded()) fence->wait();
    return CUDA_SUCCESS;
  }
};

}  // namespace gpupool::softgpu::api
