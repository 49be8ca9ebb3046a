#pragma once
// Recognises errors that are caused by the device and not by the program. A broken device is reported to the
// server, which accepts no more leases on it, and to the client in one line.

#include "schema/cuda.h"

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace gpupool::server {

// call: the row that got this status. Making a context is left out: a device in exclusive mode refuses it,
// and works.
bool isLoss(CUresult status, std::string_view call);

// Called at the first loss; set before the session runs. One session a process.
void onDeviceLost(std::function<void(uint32_t ordinal, const std::string& error)> tell);
// True the first time only: the caller then notifies its client.
bool deviceLost(uint32_t ordinal, const std::string& error);

}  // namespace gpupool::server
