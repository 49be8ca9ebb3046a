#pragma once
// The environment variables that CUDA leaves to the driver: which devices a process sees and how code is
// loaded. (CUDA C++ Programming Guide, "CUDA Environment Variables"; details measured on driver 580.) Pure
// functions.

#include <cuda.h>

#include <span>
#include <vector>

namespace gpupool::client {

// CUDA_VISIBLE_DEVICES over the devices of the lease, in the order the application will count them. `value`
// null: all. The first entry decides between ordinals and UUIDs; the list ends before the first entry that
// names no device
// (-1, out of range, unknown or ambiguous UUID, one of the other form). Ordinals are read as strtol does,
// with prefix and trailing text; a UUID is "GPU-" and any unambiguous beginning, in either case.
// CUDA_ERROR_NO_DEVICE: nothing is left. CUDA_ERROR_INVALID_DEVICE: a device is named twice. Both are
// cuInit's answer.
CUresult visibleDevices(const char* value, std::span<const CUuuid> devices, std::vector<int>* chosen);

// No lease has a device that CUDA_VISIBLE_DEVICES names: it is empty, or begins with -1 or with a word.
bool namesNoDevice(const char* value);

// CUDA_MODULE_LOADING: EAGER in either case, else lazy, which DEFAULT means on Linux.
CUmoduleLoadingMode moduleLoadingMode(const char* value);

// CUDA_DEVICE_ORDER: the order is the lease's whatever it says, since it was the pool that chose the devices.
// Unknown words are refused as natively, with CUDA_ERROR_INVALID_DEVICE from cuInit.
CUresult checkDeviceOrder(const char* value);

}  // namespace gpupool::client
