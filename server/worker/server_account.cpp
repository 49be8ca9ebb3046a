#include "server/worker/server_account.h"

#include "base/log.h"

namespace gpupool::server {

CUresult ServerAccount::take(unsigned place, uint64_t bytes) {
  const MemoryAnswer answer = process_.takeMemory(place, bytes);
  if (!answer.granted && !answer.error.empty())
    GPUPOOL_WARNING("no %s of %llu bytes: %s", place == kHost ? "pinned memory" : "device memory",
                    static_cast<unsigned long long>(bytes), answer.error.c_str());
  if (answer.granted) return CUDA_SUCCESS;
  return answer.heard ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
}

void ServerAccount::give(unsigned place, uint64_t bytes) {
  if (place != kHost) process_.giveMemory(place, bytes);
}

uint64_t ServerAccount::others(unsigned place) { return process_.takeMemory(place, 0).othersBytes; }

}  // namespace gpupool::server
