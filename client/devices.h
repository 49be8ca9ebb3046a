#pragma once
// The devices an application sees: those of the session, as CUDA_VISIBLE_DEVICES chooses and orders them. A
// CUdevice is an index into that choice; memory and frames use the session's own number.

#include "schema/hello.h"

namespace gpupool::client {

int deviceCount();
// The session's number of `device`, or -1.
int sessionDevice(CUdevice device);
// Null if there is no such device.
const schema::DeviceProperties* propertiesOf(CUdevice device);

}  // namespace gpupool::client
