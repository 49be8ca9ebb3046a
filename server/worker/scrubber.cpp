#include "server/worker/scrubber.h"

#include <algorithm>

namespace gpupool::server {
namespace {

constexpr size_t kOwnBytes = size_t{2} << 20;  // the driver's smallest piece: none of it is for others

}  // namespace

Scrubber::~Scrubber() {
  if (own_ != 0) driver_.cuMemFree_v2(own_);
  if (exec_ != nullptr) driver_.cuGraphExecDestroy(exec_);
  if (graph_ != nullptr) driver_.cuGraphDestroy(graph_);
  if (stream_ != nullptr) driver_.cuStreamDestroy_v2(stream_);
}

// On a stream of its own: the NULL stream would order itself with the session's streams, and a stream waiting
// for a later launch would stop the executor. Made once: making it takes longer than clearing 64 MiB.
CUresult Scrubber::make(const CUDA_MEMSET_NODE_PARAMS& fill, CUcontext context) {
  CUresult result = CUDA_SUCCESS;
  if (stream_ == nullptr) result = driver_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS && graph_ == nullptr) result = driver_.cuGraphCreate(&graph_, 0);
  if (result == CUDA_SUCCESS && node_ == nullptr)
    result = driver_.cuGraphAddMemsetNode(&node_, graph_, nullptr, 0, &fill, context);
  if (result == CUDA_SUCCESS) result = driver_.cuGraphInstantiateWithFlags(&exec_, graph_, 0);
  return result;
}

// What is launched already keeps its parameters.
CUresult Scrubber::start(CUdeviceptr address, size_t bytes, CUcontext context) {
  CUDA_MEMSET_NODE_PARAMS fill{};
  fill.dst = address;
  fill.elementSize = 4;
  fill.width = bytes / 4;
  fill.height = 1;
  CUresult result = exec_ == nullptr ? make(fill, context) : CUDA_SUCCESS;
  if (result == CUDA_SUCCESS) result = driver_.cuGraphExecMemsetNodeSetParams(exec_, node_, &fill, context);
  return result == CUDA_SUCCESS ? driver_.cuGraphLaunch(exec_, stream_) : result;
}

CUresult Scrubber::prepare() {
  CUresult result = own_ == 0 ? driver_.cuMemAlloc_v2(&own_, kOwnBytes) : CUDA_SUCCESS;
  return result == CUDA_SUCCESS ? clear(own_, kOwnBytes) : result;
}

CUresult Scrubber::clear(CUdeviceptr address, size_t bytes) {
  CUcontext context = nullptr;
  CUresult result = driver_.cuCtxGetCurrent(&context);
  for (size_t done = 0; result == CUDA_SUCCESS && done < bytes; done += piece_)
    result = start(address + done, std::min(piece_, bytes - done), context);
  if (stream_ == nullptr) return result;
  const CUresult finished = driver_.cuStreamSynchronize(stream_);
  return result == CUDA_SUCCESS ? finished : result;
}

}  // namespace gpupool::server
