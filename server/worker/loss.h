#pragma once
// Errors that are the device's and not the program's: a broken device is told to the client in one line.

#include <cuda.h>

#include <string_view>

namespace gpupool::server {

// call: the row that got this status. Making a context is left out: a device in exclusive mode refuses it,
// and is well.
bool isLoss(CUresult status, std::string_view call);

// True the first time, and only then: the caller tells its client.
bool deviceLost();

}  // namespace gpupool::server
