#include "server/worker/callbacks.h"

#include <atomic>

namespace gpupool::server::session_callbacks {
namespace {

std::atomic<Session*> serving{nullptr};

}  // namespace

void* dataOf(Session& session, uint64_t callback) {
  serving.store(&session, std::memory_order_release);
  return reinterpret_cast<void*>(callback);
}

void run(void* data, CUresult status) {
  serving.load(std::memory_order_acquire)->runCallback(reinterpret_cast<uint64_t>(data), status);
}

void CUDA_CB hostNode(void* data) { run(data, CUDA_SUCCESS); }

uint64_t idOf(CUhostFn function, void* data) {
  return function == &hostNode ? reinterpret_cast<uint64_t>(data) : 0;
}

}  // namespace gpupool::server::session_callbacks
