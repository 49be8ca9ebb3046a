#include "server/worker/callbacks.h"

#include <memory>
#include <mutex>
#include <unordered_map>

namespace gpupool::server::session_callbacks {
namespace {

struct Callback {
  Session* session;
  uint64_t id;
};
std::mutex mutex;
std::unordered_map<uint64_t, std::unique_ptr<Callback>> all;  // a worker serves one session

}  // namespace

void* make(Session& session, uint64_t callback) {
  std::lock_guard lock(mutex);
  auto& entry = all[callback];
  if (entry == nullptr) entry = std::make_unique<Callback>(Callback{&session, callback});
  return entry.get();
}

void run(void* data, CUresult status) {
  auto* callback = static_cast<Callback*>(data);
  callback->session->runCallback(callback->id, status);
}

void CUDA_CB hostNode(void* data) { run(data, CUDA_SUCCESS); }

uint64_t idOf(CUhostFn function, void* data) {
  return function == &hostNode ? static_cast<Callback*>(data)->id : 0;
}

}  // namespace gpupool::server::session_callbacks
