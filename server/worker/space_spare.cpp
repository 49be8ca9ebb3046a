// Device memory of the session that is none of its pieces.
#include "server/worker/space.h"

namespace gpupool::server {

CUresult Space::makeSpare(unsigned device, size_t bytes, Spare& spare) {
  if (account_.others(device) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  Taken taken(account_, device, bytes);
  if (taken.status() != CUDA_SUCCESS) return taken.status();
  Physical physical;
  physical.device = device;
  physical.bytes = bytes;
  CUresult result = create(physical);
  if (result != CUDA_SUCCESS) return result;
  Spare made{device, bytes, 0, physical.handle};
  result = mapAside(device, made.handle, bytes, made.address);
  if (result != CUDA_SUCCESS) {
    driver_.cuMemRelease(made.handle);
    return result;
  }
  taken.keep();
  spare = made;
  return CUDA_SUCCESS;
}

void Space::endSpare(Spare& spare) {
  if (spare.bytes == 0) return;
  unmapAside(spare.address, spare.bytes);
  driver_.cuMemRelease(spare.handle);
  account_.give(spare.device, spare.bytes);
  spare = {};
}

}  // namespace gpupool::server
