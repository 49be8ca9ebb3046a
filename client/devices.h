#pragma once
// The devices an application sees: those of the session, as CUDA_VISIBLE_DEVICES chooses and orders them. A
// CUdevice is an index into that choice, everywhere in the client. Frames carry the session's own number: the
// codec of rows (client/codec.h) is the one place that translates.

#include "schema/hello.h"

namespace gpupool::client {

int deviceCount();
// The session's number of `device`, or -1.
int sessionDevice(CUdevice device);
// Null if there is no such device.
const schema::DeviceProperties* propertiesOf(CUdevice device);
// What a device may have and the pool does not: such an attribute reads 0.
bool notInThePool(CUdevice_attribute attribute);

}  // namespace gpupool::client
