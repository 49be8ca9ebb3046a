#pragma once
// Errors that are the device's and not the program's: a broken device is told to the server, which places
// nothing on it any more, and to the client in one line.

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace gpupool::server {

// call: the row that got this status. Making a context is left out: a device in exclusive mode refuses it,
// and is well.
bool isLoss(CUresult status, std::string_view call);

// Whom to tell of the first loss; set before the session runs. One session a process.
void onDeviceLost(std::function<void(uint32_t ordinal, const std::string& error)> tell);
// True the first time, and only then: the caller tells its client.
bool deviceLost(uint32_t ordinal, const std::string& error);

}  // namespace gpupool::server
