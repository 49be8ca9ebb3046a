#pragma once
// Where this library puts what kernels can reach, in this process: chosen once, by what the system grants.

#include <cstdint>

namespace gpupool::softgpu {

struct AddressPlan {
  uint64_t heap, heapStep;         // device d's memory: [heap + d * heapStep, + heapStep)
  uint64_t globals, globalsBytes;  // module globals of all devices
  uint64_t host;                   // pinned and managed memory
  uint64_t reservations;           // address ranges reserved without a wish for a place
  uint64_t engine, engineEnd;      // shared and local memory, parameters, the device heap
  uint64_t functions;              // what pointers to functions point to; not for kernels to read
};
const AddressPlan& addressPlan();

}  // namespace gpupool::softgpu
